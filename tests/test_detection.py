"""Detection as a task: its batches and loss, and runs from a classifier to predictions."""

import dataclasses
import io
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from coco_images import KINDS, SIZES, write_coco
from detection_tasks import CPU, Knowing, make_task, tiny
from PIL import Image, ImageColor
from pycocotools.coco import COCO
from torch import nn

from stepsnet.analysis.complexity import count_complexity, detector_macs
from stepsnet.cli import main
from stepsnet.engine.task import BatchShard
from stepsnet.errors import UserError
from stepsnet.models.build import build_model
from stepsnet.output.colors import OKABE_ITO
from stepsnet.output.console import Lines
from stepsnet.recipes.coco import COCO as coco_recipe
from stepsnet.run_folder.checkpoint import load_weights, save_weights
from stepsnet.run_folder.inspection import read_inspection
from stepsnet.runs.evaluate import evaluate_run
from stepsnet.runs.train import train_run
from stepsnet.settings.config import DetectionAugment, ModelSpec
from stepsnet.tasks import build_task, predict
from stepsnet.tasks.detection.drawing import draw_objects
from stepsnet.tasks.prediction import PredictInputs

DOCS = Path(__file__).parent.parent / "docs"
pytestmark = pytest.mark.usefixtures("session_cache")


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp("coco") / "data")


def same(batch, other):
    images = all(torch.equal(a, b) for a, b in zip(batch[0], other[0], strict=True))
    return images and all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        for a, b in zip(batch[1], other[1], strict=True)
    )


def test_batches_depend_on_seed_and_epoch_and_on_nothing_else(tmp_path):
    coco = write_coco(tmp_path / "data", train=10)

    def batches(task, epoch=0, start=0, share=BatchShard()):  # noqa: B008 - it is frozen
        return list(task.batches(epoch, start, share, CPU))

    expected = batches(make_task(coco))
    assert len(expected) == 2 and all(len(images) == len(targets) == 4 for images, targets in expected)
    torch.rand(5)
    for workers, start in ((2, 0), (0, 1)):
        got = batches(make_task(coco, workers=workers), start=start)
        assert all(same(a, b) for a, b in zip(got, expected[start:], strict=True))
    for other in (batches(make_task(coco), epoch=1), batches(make_task(coco, seed=1))):
        assert len(other) == 2 and not all(
            a.shape == b.shape and torch.equal(a, b) for a, b in zip(other[0][0], expected[0][0])
        )
    shares = [batches(make_task(coco), share=BatchShard(rank, 2, 1)) for rank in range(2)]
    for whole, *parts in zip(expected, *shares, strict=True):
        joined = ([image for images, _ in parts for image in images], [t for _, targets in parts for t in targets])
        assert same(joined, whole)


def test_the_loss_is_the_sum_and_leaves_the_mode_as_it_is(coco):
    model, task = build_task(tiny(coco))
    batch = task.example_batch(CPU)
    model.eval()
    torch.manual_seed(0)
    loss, others = task.loss(model, batch)
    assert others.keys() == {"classifier", "box_reg", "mask", "objectness", "rpn_box_reg"}
    torch.testing.assert_close(loss, sum(others.values()))
    assert not any(module.training for module in model.modules())
    torch.manual_seed(0)
    again, _ = task.loss(model, batch)
    assert torch.equal(loss, again)


def test_one_pixel_of_one_image_trains_no_batch_norm(coco):
    args = ["model.args.backbone=test_steps_resnet", "model.args.size=16", "model.args.max_size=16"]
    model, task = build_task(tiny(coco, *args, "augment.sizes=[16]", "augment.max_size=16"))
    images, targets = task.example_batch(torch.device("cpu"))
    with pytest.raises(
        UserError, match="batch_size: got a forward pass of one image, whose smallest feature map is one pixel"
    ):
        task.loss(model.train(), (images[:1], targets[:1]))


def test_multiply_accumulates_of_a_detector(coco):
    """Its parts written out: convolutions and linear layers on the maps, 1,000 boxes and 100 masks."""
    model = build_model(
        ModelSpec("mask_rcnn", {"backbone": "test_steps_resnet", "num_classes": 2, "channels": 8, "hidden": 16})
    )
    counts = detector_macs(model, (3, 64, 96))
    pixels = [16 * 24, 8 * 12, 4 * 6, 2 * 3, 1 * 2]
    assert counts["fpn"] == sum(n * (8 * c + 9 * 8 * 8) for n, c in zip(pixels, model.backbone.body.channels))
    assert counts["rpn"] == sum(pixels) * (9 * 8 * 8 + 8 * 3 + 8 * 12)
    assert counts["boxes"] == 1000 * (8 * 49 * 16 + 16 * 16 + 16 * (3 + 12))
    assert counts["masks"] == 100 * (4 * 196 * 9 * 8 * 8 + 196 * 4 * 8 * 8 + 784 * 8 * 3)
    classifier = timm.create_model("test_steps_resnet", num_classes=0, global_pool="")
    assert counts["backbone"] == count_complexity(classifier, (3, 64, 96)).macs


@pytest.fixture(scope="module")
def run(coco, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch, Lines() as display:
        patch.setenv("STEPSNET_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        summary = train_run(tiny(coco), folder, display)
    return folder, summary


def test_a_run_is_resumed_bit_for_bit_and_scored(run, coco, tmp_path):
    folder, summary = run
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert len(steps) == 6 and {"loss", "mask", "rpn_box_reg"} <= steps[0].keys()
    assert {"val_box_ap", "val_mask_ap", "best_val_box_ap"} <= summary["metrics"].keys()
    assert summary["left_out"] == [] and summary["macs"] > 0 and summary["blocks"] == 8
    shutil.copytree(folder, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-00000006")
    for name in ("summary.json", "model.safetensors"):
        (tmp_path / "half" / name).unlink()
    with Lines() as display:
        train_run(tiny(coco), tmp_path / "half", display, resume=True)
    ours, theirs = (load_weights(place / "model.safetensors") for place in (folder, tmp_path / "half"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    (tmp_path / "half" / "summary.json").unlink()
    with Lines() as display:  # it was stopped behind its last checkpoint
        ended = train_run(tiny(coco), tmp_path / "half", display, resume=True)
    assert ended["class_box_ap"] == summary["class_box_ap"] and ended["class_mask_ap"] == summary["class_mask_ap"]
    scores = evaluate_run(folder)
    assert scores["box_ap"] == summary["metrics"]["val_box_ap"]
    shutil.copytree(coco, tmp_path / "coco")
    (tmp_path / "coco" / "instances_train.json").unlink()  # scoring asks for what it scores
    assert evaluate_run(folder, f"coco:{tmp_path / 'coco'}") == scores
    content = json.loads((coco / "instances_val.json").read_text())
    content["categories"][0]["name"] = "ring"
    (tmp_path / "coco" / "instances_val.json").write_text(json.dumps(content))
    with pytest.raises(
        UserError, match=r"instances_val.json has other categories: got .*ring.*, expected .* as in .*run"
    ):
        evaluate_run(folder, f"coco:{tmp_path / 'coco'}")
    page, (pictures,) = (folder / "report.html").read_text(), read_inspection(folder)
    assert "box AP" in page and "<h2>By class</h2>" in page
    assert page.count('src="data:image/jpeg') == len(pictures.pictures) > 0


def test_a_folder_without_categories_has_none_to_score_by(coco, tmp_path):
    with pytest.raises(UserError, match=r"categories\.json"):
        build_task(tiny(coco), f"coco:{coco}", tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_breaks_after_the_check_is_said(workers, tmp_path):
    coco = write_coco(tmp_path / "data")
    task = make_task(coco, workers=workers)
    for split in ("train", "val"):
        for file in (coco / "images").glob(f"{split}*"):
            file.write_bytes(file.read_bytes()[:100])  # the header is there
    looks = (
        lambda: list(task.batches(0, 0, BatchShard(), CPU)),
        lambda: task.evaluate(nn.Identity(), BatchShard(), CPU),
        lambda: task.example_batch(CPU),
    )
    for look in looks:
        with pytest.raises(UserError, match=r"^data: cannot decode [^\n]*\.png: [^\n]*$"):
            look()


def test_other_data_are_scored_with_the_mistakes_that_eval_is_told_to_accept(run, coco, tmp_path):
    folder, other = run[0], shutil.copytree(coco, tmp_path / "coco")
    data = f"coco:{other}"
    content = json.loads((other / "instances_val.json").read_text())
    content["annotations"][0]["bbox"] = [5, 5, 60, 9]
    (other / "instances_val.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="set max_invalid=1 to cut boxes"):
        evaluate_run(folder, data)
    assert evaluate_run(folder, data, ["max_invalid=1"]).keys() == evaluate_run(folder).keys()
    content = json.loads((other / "instances_train.json").read_text())
    content["annotations"] = [record for record in content["annotations"] if record["image_id"] != 3]
    (other / "instances_train.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="set without_objects=leave_out, or without_objects=train"):
        evaluate_run(folder, f"{data}@train")
    evaluate_run(folder, f"{data}@train", ["without_objects=leave_out"])


LARGE = ["model.args.size=800", "model.args.max_size=1333"]


@pytest.mark.parametrize(
    ("changes", "augment", "told"),
    [
        ([], {"sizes": (48, 64), "max_size": 96}, ""),
        (LARGE, {}, ""),
        (LARGE, dataclasses.asdict(coco_recipe.augment), ""),
        (
            LARGE,
            {"sizes": (48, 64), "max_size": 96},
            "^evaluation gives 3 of 3 .*args.size=800 and max_size=1333",
        ),
        (["model.args.size=40"], {"sizes": (48, 64)}, "3 of 3 .* model.args.size=40 and max_size=96, .*sizes=48 to 64"),
        # with a shorter side of 64 pixels, the images have longer sides of 85, 86 and 76
        ([], {"sizes": (64,), "max_size": 85}, ""),
        ([], {"sizes": (64,), "max_size": 80}, "2 of 3 .*, but augment.sizes=64 and augment.max_size=80$"),
    ],
)
def test_sizes_of_evaluation_that_are_not_trained_are_told(coco, changes, augment, told):
    lines = make_task(coco, *changes, augment=DetectionAugment(**augment)).remarks()
    assert bool(lines) == bool(told) and all(re.search(told, line) for line in lines)
    if told:
        recipe = tiny(coco, *changes)
        recipe = dataclasses.replace(recipe, baseline=recipe.model, augment=DetectionAugment(**augment))
        assert "baseline.args.size=" in build_task(recipe)[1].remarks()[0]


def test_a_report_shows_what_is_there_beside_what_was_found(coco):
    """A detector that knows the objects of the first image, all but one of the second, and none of the third."""
    task = make_task(coco)
    knowing = Knowing(task.data)
    finds = {0: 2, 1: 1, 2: 0}

    def model(images):
        (found,) = knowing(images)
        index = next(i for i, other in enumerate(knowing.images) if other.equal(images[0]))
        return [{key: value[: finds[index]] for key, value in found.items()}]

    (section,) = task.inspect(model, CPU)
    assert [picture.title for picture in section.pictures] == ["best: 1.00", "median: 0.67", "worst: 0.00"]
    details = [f"val{number}.png: 2 annotated, {count} found" for number, count in ((1, 2), (2, 1), (3, 0))]
    assert [picture.detail for picture in section.pictures] == details
    assert "a score of at least 0.5" in section.about and "spread evenly over the evaluated split" in section.about
    with Image.open(io.BytesIO(section.pictures[2].content)) as image:
        width, height = SIZES[3]
        there, found = (np.asarray(image, dtype=float)[:, part] for part in (slice(0, width), slice(width + 6, None)))
        assert image.size == (2 * width + 6, height) and np.abs(there - found).max() > 60
        original = np.asarray(Image.open(coco / "images" / "val3.png"), dtype=float)
        assert np.abs(found - original).mean() < 16  # nothing is drawn on the right; it is a JPEG of noise


def test_predict_draws_and_writes_cocos_json(run, coco, tmp_path, capsys):
    folder, _ = run
    files = [coco / "images" / "val1.png", coco / "images" / "val2.png"]
    Image.open(files[0]).convert("L").save(tmp_path / "val1.jpg")  # grey, and of the same name
    shutil.move(str(coco / "instances_val.json"), tmp_path)  # the data are not needed
    try:
        names = [*map(str, files), str(tmp_path / "val1.jpg")]
        assert main(["predict", str(folder), *names, "--out", str(tmp_path / "out"), "--least", "0.0"]) == 0
    finally:
        shutil.move(str(tmp_path / "instances_val.json"), coco)
    out = capsys.readouterr().out.splitlines()
    root = os.path.commonpath([coco / "images", tmp_path])  # the outputs mirror the folders below it
    drawn = [tmp_path / "out" / Path(name).relative_to(root).with_suffix(".png") for name in names]
    assert [line.rpartition(" → ")[2] for line in out] == list(map(str, drawn)) and len(set(drawn)) == 3
    records = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert records and {record["category_id"] for record in records} <= {3, 7}
    keys = {"category_id", "category", "bbox", "score", "segmentation", "file_name"}
    assert all(record.keys() == keys for record in records) and {r["file_name"] for r in records} == {*names}
    with Image.open(drawn[0]) as image, Image.open(files[0]) as original:
        assert image.size == original.size and image.mode == "RGB"
        assert not np.array_equal(np.asarray(image), np.asarray(original))
    predict(folder, PredictInputs(files=files[:1], out=tmp_path / "none", min_score=1.1))
    with Image.open(tmp_path / "none" / "val1.png") as image, Image.open(files[0]) as original:
        assert np.array_equal(np.asarray(image), np.asarray(original))
    # the page says how the records get the ids of one's own JSON
    (code,) = re.findall(r"```text\n(ids = .*?)```", (DOCS / "detection.md").read_text(encoding="utf-8"), re.DOTALL)
    known: dict = {"json": json, "os": os}
    exec(code.replace("drawn", str(tmp_path / "none")).replace("PATH", str(coco)), known)
    COCO(coco / "instances_val.json").loadRes(known["results"])
    assert {record["image_id"] for record in known["results"]} == {1}
    (tmp_path / "text.png").write_text("a text")
    assert main(["predict", str(folder), str(files[0]), str(tmp_path / "text.png"), "--out", str(tmp_path / "no")]) == 2
    assert "cannot read" in capsys.readouterr().err and not (tmp_path / "no").exists()
    assert main(["predict", str(folder), str(files[0]), "--out", str(tmp_path / "no"), "--least", "nan"]) == 2
    assert "--least: got nan, expected a finite number" in capsys.readouterr().err and not (tmp_path / "no").exists()


def test_objects_are_drawn_the_surest_on_top():
    image = torch.full((3, 40, 60), 100, dtype=torch.uint8)
    boxes = [(5, 5, 30, 30), (15, 10, 40, 25)]  # x, y, width, height; they overlap
    records = [
        {"category_id": 3, "score": score, "bbox": list(box), "segmentation": KINDS[2](*box, (40, 60))}
        for box, score in zip(boxes, (0.5, 0.9))
    ]
    first, second = (np.array(ImageColor.getrgb(color)) for color in OKABE_ITO[1::-1])
    drawn = draw_objects(image, records, {3: "disc"}).permute(1, 2, 0).numpy()
    assert np.abs(drawn[32, 8] - (0.55 * 100 + 0.45 * first)).max() <= 1
    assert np.abs(drawn[33, 25] - (0.55 * (0.55 * 100 + 0.45 * first) + 0.45 * second)).max() <= 2
    assert (drawn[20, 15] == second).all() and (drawn[30, 5] == first).all()  # their boxes
    assert (draw_objects(image, records[::-1], {3: "disc"}).permute(1, 2, 0).numpy() == drawn).all()


def test_a_backbone_starts_from_a_classifier(coco, tmp_path):
    classifier = timm.create_model("test_steps_swin", num_classes=5)
    save_weights(tmp_path / "model.safetensors", classifier.state_dict())
    recipe = tiny(coco, f"backbone={tmp_path}")
    (model, task), stem = build_task(recipe), "patch_embed.proj.weight"
    assert task.load_pretrained(model) == []
    assert torch.equal(model.backbone.body.features.state_dict()[stem], classifier.state_dict()[stem])


def test_a_classifier_that_has_not_ended_is_told_of(run, coco, tmp_path):
    """What is told goes by the checkpoints, which are those of another run here."""
    stopped = shutil.copytree(run[0], tmp_path / "stopped")
    (stopped / "summary.json").unlink()
    save_weights(stopped / "model.safetensors", timm.create_model("test_steps_swin", num_classes=5).state_dict())
    model, task = build_task(tiny(coco, f"backbone={stopped}"))
    told = f"backbone: {stopped} has not ended: these are its weights after update 6 of 6"
    assert task.load_pretrained(model) == [told]


def test_a_run_that_has_begun_does_without_the_classifier(coco, tmp_path):
    classifier = timm.create_model("test_steps_swin", num_classes=5)
    (tmp_path / "classifier").mkdir()
    save_weights(tmp_path / "classifier" / "model.safetensors", classifier.state_dict())
    recipe = tiny(coco, f"backbone={tmp_path / 'classifier'}", "lr=0", "min_lr=0")  # the weights stay what they are
    with Lines() as display:
        train_run(recipe, tmp_path / "run", display)
        shutil.rmtree(tmp_path / "classifier")
        with pytest.raises(UserError, match=r"backbone: got .*classifier, expected the folder of a run"):
            train_run(recipe, tmp_path / "new", display)
        assert not (tmp_path / "new").exists()
        (tmp_path / "run" / "summary.json").unlink()
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
        train_run(recipe, tmp_path / "run", display, resume=True)
    name = "patch_embed.proj.weight"
    weights = load_weights(tmp_path / "run" / "model.safetensors")
    assert torch.equal(weights[f"backbone.body.features.{name}"], classifier.state_dict()[name])


def test_each_contender_starts_from_its_own_classifier(coco, tmp_path):
    recipe = tiny(coco)
    baseline = ModelSpec("mask_rcnn", {**recipe.model.args, "backbone": "test_steps_resnet"})
    for name in ("test_steps_swin", "test_steps_resnet"):
        save_weights(tmp_path / f"{name}.safetensors", timm.create_model(name, num_classes=5).state_dict())
    both = {"backbone": f"{tmp_path}/test_steps_swin.safetensors"}
    recipe = dataclasses.replace(recipe, baseline=baseline, **both)
    with pytest.raises(UserError, match="baseline_backbone: got none although backbone is given"):
        recipe.of_baseline()
    with pytest.raises(UserError, match=r"^backbone: got none although baseline_backbone is given"):
        dataclasses.replace(recipe, backbone=None, baseline_backbone="there").of_baseline()
    recipe = dataclasses.replace(recipe, baseline_backbone=f"{tmp_path}/test_steps_resnet.safetensors")
    (model, task), stem = build_task(recipe.of_baseline()), "conv1.weight"
    task.load_pretrained(model)
    weights = load_weights(tmp_path / "test_steps_resnet.safetensors")
    assert torch.equal(model.backbone.body.features.state_dict()[stem], weights[stem])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("augment.sizes=[]", r"augment.sizes: got \[\], expected at least 1 of them"),
        ("augment.crop_sizes=[400,0]", r"augment\..*1: got 0, expected at least 1"),
        ("augment.max_size=0", "augment.max_size: got 0"),
        ("augment.crop_range=[600,384]", "augment.crop_range: got 600, 384, expected the smaller one first"),
        ("augment.flip=1.5", "augment.flip: got 1.5, expected at most 1"),
    ],
)
def test_augmentation_that_cannot_be_is_refused(coco, change, expected):
    with pytest.raises(UserError, match=expected):
        tiny(coco, change)


def test_boxes_alone_are_trained_on_scored_and_drawn(tmp_path, capsys):
    """Faster R-CNN, validated on held-out images and scored on the val split at the end."""
    root, run = write_coco(tmp_path / "data", masks=False), tmp_path / "run"
    recipe = tiny(root, "epochs=1", "holdout=2", "score_test=true", name="pennfudan/faster_rcnn")
    with pytest.raises(UserError, match=r"has boxes and no segmentations, expected model.name=faster_rcnn"):
        build_task(tiny(root))
    with Lines() as display:
        summary = train_run(recipe, run, display)
    assert summary["split"] == "2 of train" and summary["images"] == {"train": 4, "evaluated": 2}
    scored = {key for key in summary["metrics"] if key.startswith(("val_", "test_"))}
    assert {"val_box_ap", "test_box_ap"} <= scored and not any("mask" in key for key in scored)
    assert summary["class_box_ap"].keys() == {"square", "disc"} and "class_mask_ap" not in summary
    of_test = {key.removeprefix("test_"): summary["metrics"][key] for key in scored if key.startswith("test_")}
    assert evaluate_run(run, f"coco:{root}@test") == of_test
    assert main(["predict", str(run), str(root / "images" / "val1.png"), "--out", str(tmp_path), "--least", "0"]) == 0
    records = json.loads((tmp_path / "predictions.json").read_text())
    assert records and not any("segmentation" in record for record in records)
    with pytest.raises(UserError, match=r"has no test split, expected .*, or a recipe with holdout"):
        build_task(tiny(root, "score_test=true", name="pennfudan/faster_rcnn"))
    of_test = json.loads((root / "instances_val.json").read_text())
    of_test["annotations"][0]["bbox"] = [500, 500, 10, 10]
    (root / "instances_val.json").write_text(json.dumps(of_test))
    with pytest.raises(UserError, match=r"instances_val.json.* lies outside its image"):  # not when all is trained
        build_task(recipe)


def test_a_run_goes_on_with_its_own_categories_alone(tmp_path):
    root = write_coco(tmp_path / "data")
    model, task = build_task(tiny(root))
    task.save_assets(model, tmp_path)
    task.save_assets(model, tmp_path)
    for file in root.glob("instances_*.json"):
        content = json.loads(file.read_text())
        content["categories"][0]["name"] = "ring"
        file.write_text(json.dumps(content))
    model, task = build_task(tiny(root))
    for refuses in (task.check_assets, lambda folder: task.save_assets(model, folder)):
        with pytest.raises(
            UserError, match=r"instances_train.json has other categories: got .*ring.*, expected .* as in "
        ):
            refuses(tmp_path)


def test_a_cascade_with_frozen_parts_trains(coco, tmp_path):
    changes = ["epochs=1", "model.args.backbone=test_steps_resnet", 'model.args.backbone_args={"frozen_stages":1}']
    recipe = tiny(coco, *changes, "ema_decay=0.5", "stream_interval=2", name="pennfudan/cascade")
    torch.manual_seed(recipe.seed)
    before = build_model(recipe.model).state_dict()
    with Lines() as display:
        summary = train_run(recipe, tmp_path / "run", display)
    after = load_weights(tmp_path / "run" / "model.safetensors")
    frozen = [key for key in after if key.startswith(("backbone.body.features.conv1", "backbone.body.features.layer1"))]
    assert frozen and all(torch.equal(before[key], after[key]) for key in frozen)
    assert not torch.equal(
        before["roi_heads.stages.2.box_head.0.0.weight"], after["roi_heads.stages.2.box_head.0.0.weight"]
    )
    assert summary["metrics"]["train_mask_3"] > 0


@pytest.mark.parametrize(("name", "batch_size"), [("mask_rcnn", 4), ("cascade_mask_rcnn", 2)])
def test_a_detector_learns_squares_on_images_that_it_has_not_seen(tmp_path, name, batch_size):
    args = {"num_classes": 2, "size": 64, "max_size": 96, "channels": 16, "hidden": 32, "samples": 32}
    args |= {"backbone": "test_steps_swin", "backbone_args": {"drop_path_rate": 0.0}, "anchors": (8, 16, 32, 64, 128)}
    augment = DetectionAugment(sizes=(56, 64, 72), max_size=110, flip=0.5)
    recipe = tiny(write_coco(tmp_path / "data", train=12, val=6))
    torch.manual_seed(0)
    model, task = build_task(
        dataclasses.replace(recipe, model=ModelSpec(name, args), batch_size=batch_size, augment=augment)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(10):
        model.train()
        for batch in task.batches(epoch, 0, BatchShard(), CPU):
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1.0, (epoch + 1) / 5)
            task.loss(model, batch)[0].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
    scores = task.evaluate(model.eval(), BatchShard(), CPU)
    assert scores["box_ap50"] > 50 and scores["mask_ap50"] > 50
