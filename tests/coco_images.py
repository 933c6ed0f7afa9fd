"""A COCO data set of a few made-up images, with every kind of segmentation."""

import json

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask

CATEGORIES = [{"id": 7, "name": "disc"}, {"id": 3, "name": "square"}]
SIZES = [(64, 48), (48, 64), (70, 52), (50, 60), (64, 40), (44, 60), (60, 60), (66, 50)]  # width, height


def rectangle(x, y, width, height, shape):
    mask = np.zeros(shape, dtype=np.uint8, order="F")
    mask[y : y + height, x : x + width] = 1
    return mask


def as_polygon(x, y, width, height, shape):
    return [[x, y, x + width, y, x + width, y + height, x, y + height]]


def as_counts(x, y, width, height, shape):
    """Uncompressed RLE: column after column, of pixels outside and inside in turn."""
    flat = rectangle(x, y, width, height, shape).flatten(order="F")
    changes = np.flatnonzero(np.diff(np.concatenate([[0], flat]))).tolist()
    return {"size": list(shape), "counts": np.diff([0, *changes, flat.size]).tolist()}


def as_string(x, y, width, height, shape):
    rle = coco_mask.encode(rectangle(x, y, width, height, shape))
    return {"size": list(shape), "counts": rle["counts"].decode()}


KINDS = (as_polygon, as_counts, as_string)
BOX_ALONE = ([], None, [[]])


def write_coco(root, train=6, val=3, first_id=1, masks=True, **others):
    """Each image has a bright square and a dark one, in turn as polygon and RLE; the first of a split a crowd too.

    ``others`` are further splits, such as ``test=2``. Without ``masks`` there are boxes alone, as programs write them.
    """
    random = np.random.default_rng(0)
    (root / "images").mkdir(parents=True)
    for split, count in {"train": train, "val": val, **others}.items():
        content = {"images": [], "annotations": [], "categories": CATEGORIES}
        for number in range(1, count + 1):
            width, height = SIZES[number % len(SIZES)]
            name = f"{split}{number}.png"
            pixels = random.integers(90, 160, (height, width, 3), dtype=np.uint8)
            content["images"].append({"id": number, "file_name": name, "width": width, "height": height})
            move = number % 8
            boxes = [(4 + move, 5, 18, 20, 3, 0), (26, 8 + move, 14, 22, 7, 0)]
            boxes += [(2, 30, 30, 9, 3, 1)] if number == 1 else []
            for x, y, w, h, category, crowd in boxes:
                pixels[y : y + h, x : x + w] = 250 if category == 3 else 5
                index = len(content["annotations"])
                kind = as_counts if crowd else KINDS[index % 3]
                content["annotations"].append(
                    {
                        "id": index + first_id,
                        "image_id": number,
                        "category_id": category,
                        "bbox": [x, y, w, h],
                        "area": w * h,
                        "iscrowd": crowd,
                        "segmentation": kind(x, y, w, h, (height, width)) if masks else BOX_ALONE[index % 3],
                    }
                )
            Image.fromarray(pixels).save(root / "images" / name)
        (root / f"instances_{split}.json").write_text(json.dumps(content))
    return root
