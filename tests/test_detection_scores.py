"""Detection's AP, counted by hand, and the records that it is counted from."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from coco_images import KINDS, write_coco
from detection_tasks import CPU, Knowing, make_task
from pycocotools import mask as coco_mask
from torch import nn

from stepsnet.engine.task import BatchShard
from stepsnet.tasks.detection.data import load_coco
from stepsnet.tasks.detection.scores import average_precision, class_names, found_objects, objects_by_class

pytestmark = pytest.mark.usefixtures("session_cache")


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp("coco") / "data")


@pytest.mark.parametrize("first_id", [0, 1])
@pytest.mark.parametrize("kinds", [("box", "mask"), ("box",)])
def test_perfect_detections_have_an_ap_of_100(first_id, kinds, tmp_path):
    """pycocotools takes the id 0 of an annotation for "no match"."""
    root = write_coco(tmp_path / "data", train=1, first_id=first_id, masks="mask" in kinds)
    task = make_task(root, f"model.name={'mask' if 'mask' in kinds else 'faster'}_rcnn", batch_size=1)
    scores = task.evaluate(Knowing(task.data), BatchShard(), CPU)
    assert scores.keys() == {f"{k}_{m}" for k in kinds for m in ("ap", "ap50", "ap75", "ap_small")}
    assert set(scores.values()) == {100.0}  # all objects are below 32×32, and other sizes have none
    facts = task.facts()
    assert facts["class_objects"] == {"square": 3, "disc": 3}
    assert all(facts[f"class_{kind}_ap"] == {"square": 100.0, "disc": 100.0} for kind in kinds)


def test_ap_counted_by_hand(coco):
    """One class, two objects, one found with an IoU of 0.6: AP is interpolated at 101 recalls."""
    split = load_coco(f"coco:{coco}").val
    images, (image,) = split.images, split.images[1:2]
    objects = split.annotations[image["id"]]
    split = dataclasses.replace(split, images=(image,))
    x, y, w, h = objects[0]["bbox"]
    shape = (image["height"], image["width"])

    def record(box, score, category=3):
        rle = KINDS[2](*box, shape)
        return {
            "image_id": image["id"],
            "category_id": category,
            "bbox": list(box),
            "score": score,
            "segmentation": rle,
        }

    found = [record((x, y, w, h), 0.8), record(tuple(objects[1]["bbox"]), 0.9, 7)]
    assert average_precision(split, found)[0]["box_ap"] == 100.0
    wide = record((x, y, w, int(h * 0.6)), 0.8)  # within the object: IoU 0.6 at thresholds 0.5, 0.55 and 0.6
    scores, by_class = average_precision(split, [wide, found[1]])
    assert by_class == {
        f"{kind}_ap": {"square": pytest.approx(30, abs=1e-3), "disc": 100.0} for kind in ("box", "mask")
    }
    assert scores["box_ap50"] == 100.0 and scores["box_ap75"] == 50.0  # one of two classes
    assert scores["box_ap"] == pytest.approx((3 * 100 + 7 * 50) / 10, abs=1e-3)
    assert scores["mask_ap"] == scores["box_ap"]
    before = record((x, y + 30, 4, 4), 0.95)  # a false positive above the true one halves its precision
    assert average_precision(split, [before, *found])[0]["box_ap50"] == pytest.approx((50 + 100) / 2, abs=1e-3)
    assert average_precision(split, [])[0]["box_ap"] == 0.0
    # a detection in a crowd is neither right nor wrong
    crowded = dataclasses.replace(split, images=images[:1])
    right = [{**record(tuple(a["bbox"]), 0.5, a["category_id"]), "image_id": 1} for a in split.annotations[1]]
    crowd = next(a for a in split.annotations[1] if a["iscrowd"])
    size = (images[0]["height"], images[0]["width"])
    right = [{**r, "segmentation": KINDS[2](*r["bbox"], size)} for r in right if r["bbox"] != crowd["bbox"]]
    inside = {**right[0], "bbox": [4, 31, 8, 5], "score": 0.99, "category_id": 3}
    inside["segmentation"] = KINDS[2](4, 31, 8, 5, size)
    assert average_precision(crowded, [*right, inside])[0]["box_ap"] == 100.0
    assert average_precision(crowded, [*right, inside])[0]["mask_ap"] == 100.0


class Blind(nn.Module):
    """Finds nothing."""

    def forward(self, images):
        (image,) = images
        found = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "scores": torch.zeros(0)}
        return [{**found, "masks": torch.zeros(0, 1, *image.shape[1:])}]


def test_evaluation_decodes_no_masks_of_its_own(coco, monkeypatch):
    """pycocotools compares run lengths; decoded, the masks of a large image take seconds and gigabytes."""
    task, expected = make_task(coco), make_task(coco).example_batch(CPU)[1]
    assert all(target["masks"].any() for target in expected)
    with monkeypatch.context() as patched:
        patched.setattr("stepsnet.tasks.detection.data._masks_of", lambda *_: pytest.fail("decoded masks"))
        assert task.evaluate(Blind(), BatchShard(), CPU)["mask_ap"] == 0
        assert task.inspect(Blind(), CPU)


def test_found_objects_are_cocos_records():
    masks = torch.zeros(2, 1, 20, 30)
    masks[0, 0, 2:6, 3:9] = 0.9
    masks[1, 0, 5:8, 5:8] = 0.4  # not surer than half
    objects = {"boxes": torch.tensor([[3.0, 2, 9, 6], [5, 5, 8, 8]]), "labels": torch.tensor([2, 1])}
    first, second = found_objects({**objects, "scores": torch.tensor([0.5, 0.25]), "masks": masks}, [3, 7])
    assert (first["category_id"], first["bbox"], first["score"]) == (7, [3, 2, 6, 4], 0.5)
    assert np.array_equal(coco_mask.decode(first["segmentation"]), (masks[0, 0] > 0.5).numpy())
    assert second["category_id"] == 3 and coco_mask.area(second["segmentation"]) == 0
    json.dumps([first, second])
    alone = found_objects({**objects, "scores": torch.tensor([0.5, 0.25])}, [3, 7])  # of a detector without masks
    assert [record["bbox"] for record in alone] == [first["bbox"], second["bbox"]] and "segmentation" not in alone[0]


def test_classes_keep_their_names_apart_and_may_have_no_objects(coco):
    split = load_coco(f"coco:{coco}").val
    categories = (*split.categories, {"id": 9, "name": "disc"}, {"id": 11, "name": "ring"})
    split = dataclasses.replace(split, categories=categories)
    assert class_names(split.categories) == {3: "square", 7: "disc (7)", 9: "disc (9)", 11: "ring"}
    assert objects_by_class(split) == {"square": 3, "disc (7)": 3, "disc (9)": 0, "ring": 0}
    _, by_class = average_precision(split, [])
    assert by_class["box_ap"] == {"square": 0.0, "disc (7)": 0.0, "disc (9)": None, "ring": None}
