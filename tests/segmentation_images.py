"""Small data sets with a class for every pixel, made for tests."""

import json

import numpy as np
from PIL import Image

CLASSES = ("road", "car", "tree")


def write_pair(root, split, name, size, labels=None, seed=0):
    """An image of noise around a gray that tells its class, so that there is something to be learnt."""
    rng = np.random.default_rng([seed, len(name), *name.encode()])
    if labels is None:
        coarse = rng.integers(0, len(CLASSES), (3, 4))
        labels = np.kron(coarse, np.ones((-(-size[0] // 3), -(-size[1] // 4)), dtype=np.int64))[: size[0], : size[1]]
        labels[:2] = 255
    grey = np.asarray([40, 120, 200, *[0] * 253])[labels][..., None]
    pixels = (grey + rng.integers(-20, 20, (*size, 3))).clip(0, 255).astype(np.uint8)
    for kind in ("images", "annotations"):
        (root / kind / split).mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(root / "images" / split / f"{name}.png")
    Image.fromarray(labels.astype(np.uint8)).save(root / "annotations" / split / f"{name}.png")


def write_camvid(root, train=6, val=3, size=(24, 40)):
    (root / "classes.json").parent.mkdir(parents=True, exist_ok=True)
    (root / "classes.json").write_text(json.dumps({"classes": CLASSES, "ignore_index": 255}))
    for split, count in (("train", train), ("val", val)):
        for index in range(count):
            height, width = (size[0] + 4 * (index % 2), size[1]) if split == "val" else size
            write_pair(root, split, f"{split}{index}", (height, width))
    return root


TINY = {
    "backbone": "steps_swin_tiny_patch4_window7_224",
    "backbone_args": {
        "widths": ((8,), (16,), (16, 24), (24, 32)),
        "depths": ((1,), (1,), (1, 1), (1, 1)),
        "num_heads": ((1,), (1,), (1, 1), (1, 1)),
        "window_size": 2,
        "img_size": 32,
    },
    "channels": 8,
    "auxiliary_channels": 8,
    "num_classes": len(CLASSES),
}
