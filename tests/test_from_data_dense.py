"""What the data of detection and segmentation decide and tell, for both models of a comparison before it starts."""

import dataclasses
import json

import numpy as np
import pytest
import timm
from coco_images import write_coco
from segmentation_images import write_camvid, write_pair

from stepsnet.errors import UserError
from stepsnet.output.console import Display
from stepsnet.recipes import find_recipe
from stepsnet.run_folder.checkpoint import save_weights
from stepsnet.runs.check import check_grid, tell
from stepsnet.settings.config import ModelSpec
from stepsnet.tasks.detection import task as detection
from stepsnet.tasks.segmentation import task as segmentation

pytestmark = pytest.mark.usefixtures("own_cache")


class Shown(list, Display):
    show = list.append


def checked(recipe):
    return check_grid([recipe, recipe.of_baseline()], [0], 1)


@pytest.mark.parametrize("name", ["camvid/tiny", "pennfudan/mask_rcnn"])
def test_classes_are_the_datas_for_the_model_and_the_baseline(name, tmp_path, monkeypatch):
    read, write, of_task = {
        "camvid/tiny": ("load_pairs", write_camvid, segmentation),
        "pennfudan/mask_rcnn": ("load_coco", write_coco, detection),
    }[name]
    kind, opened = "camvid" if of_task is segmentation else "coco", []
    reader = getattr(of_task, read)
    monkeypatch.setattr(of_task, read, lambda *args, **settings: opened.append(1) or reader(*args, **settings))
    recipe = dataclasses.replace(find_recipe(name), data=f"{kind}:{write(tmp_path / 'data')}", batch_size=2)
    both = checked(recipe)
    classes = 3 if of_task is segmentation else 2
    assert len(opened) == 1
    for one in both:
        assert one.recipe.model.args["num_classes"] == one.model.num_classes == classes
        assert next(one.model.parameters()).is_meta
    shown = Shown()
    tell(shown, ["StepsNet", "baseline"], both)
    line = {"run": "StepsNet, baseline", "kind": "note", "text": f"num_classes {classes}, from the data"}
    assert shown[0] == line and [event["text"] for event in shown].count(line["text"]) == 1
    save_weights(tmp_path / "vit.safetensors", timm.create_model("test_vit").state_dict())
    weights = {"backbone": str(tmp_path / "vit.safetensors"), "baseline_backbone": str(tmp_path / "vit.safetensors")}
    with pytest.raises(UserError, match=r"^backbone: the weights of .* do not fit"):
        checked(dataclasses.replace(recipe, **weights))
    with pytest.raises(UserError, match=r"^baseline_backbone: the weights of .* do not fit"):
        check_grid([dataclasses.replace(recipe, **weights).of_baseline()], [0], 1)


def test_data_are_opened_again_for_a_model_that_reads_more_of_them(tmp_path):
    root = write_coco(tmp_path / "data", masks=False)
    recipe = dataclasses.replace(find_recipe("pennfudan/mask_rcnn"), data=f"coco:{root}", batch_size=2)
    boxes = dataclasses.replace(recipe, model=ModelSpec("faster_rcnn", recipe.model.args), baseline=None)
    (one,) = check_grid([boxes], [0], 1)
    assert one.recipe.model.args["num_classes"] == 2
    with pytest.raises(UserError, match="has boxes and no segmentations"):
        check_grid([boxes, recipe], [0], 1)


def test_what_a_user_should_know_of_pixels(tmp_path):
    root = write_camvid(tmp_path / "data", train=2, val=1)
    (root / "classes.json").write_text(json.dumps({"classes": ["road", "car", "tree", "pole", "sign"]}))
    labels = np.full((24, 40), 255)
    labels[:4] = 3
    write_pair(root, "val", "pole", (24, 40), labels)
    for number in range(2):
        write_pair(root, "train", f"blank{number}", (24, 40), np.full((24, 40), 255))
    recipe = dataclasses.replace(find_recipe("camvid/tiny"), data=f"camvid:{root}", batch_size=2, baseline=None)
    (one,) = check_grid([recipe], [0], 1)
    assert one.lines[1:4] == [
        "no pixels of sign at all, though the model has an output for every class",
        "no training pixels of pole, but 160 to evaluate",
        "54.2% of the training images' pixels are ignored: they have no class",
    ]


def test_what_a_user_should_know_of_objects(tmp_path):
    root = write_coco(tmp_path / "data")
    for split in ("train", "val"):
        file = root / f"instances_{split}.json"
        content = json.loads(file.read_text())
        content["categories"].append({"id": 9, "name": "ring"})
        if split == "val":
            content["annotations"] = [{**one, "category_id": 9} for one in content["annotations"]]
        file.write_text(json.dumps(content))
    recipe = dataclasses.replace(find_recipe("pennfudan/mask_rcnn"), data=f"coco:{root}", baseline=None)
    (one,) = check_grid([recipe], [0], 1)
    assert one.lines[0] == "num_classes 3, from the data"
    assert one.lines[1] == "no training objects of ring, but 6 to evaluate"
    assert one.lines[2] == "no evaluated objects of square, disc: the metrics cover only the other classes"
