"""Segmentation runs: they learn, resume, predict, and start from a classifier."""

import dataclasses
import io
import json
import shutil

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from pycocotools import mask as coco_mask
from segmentation_images import CLASSES, TINY, write_camvid, write_pair
from segmentation_tasks import tiny_recipe

from stepsnet.cli import main
from stepsnet.commands.analyze import analyze_shortcut
from stepsnet.errors import UserError
from stepsnet.models.build import build_model
from stepsnet.output.console import Lines
from stepsnet.run_folder.checkpoint import save_weights, valid_checkpoints
from stepsnet.run_folder.inspection import read_inspection
from stepsnet.runs.evaluate import evaluate_run
from stepsnet.runs.train import train_run
from stepsnet.settings.overrides import override
from stepsnet.tasks import build_task, describe_deployment
from stepsnet.tasks.class_names import read_classes
from stepsnet.tasks.masks import encode_rle
from stepsnet.tasks.segmentation.data import load_pairs
from stepsnet.tasks.segmentation.drawing import color_of, draw_segments
from stepsnet.tasks.segmentation.predict import list_segments

EASY = ["augment.photometric=false", "augment.scale_range=[1,1]", "epoch_updates=15", "epochs=5", "lr=0.02"]
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a copy of the data of its own, and what it says at its end."""
    root = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch, Lines() as display:
        patch.setenv("STEPSNET_CACHE", str(root / "cache"))
        recipe = tiny_recipe(write_camvid(root / "camvid"), *EASY, "keep_checkpoints=3")
        return root / "run", recipe, train_run(recipe, root / "run", display)


def test_a_run_learns_and_is_scored(trained, camvid):
    run, recipe, summary = trained
    assert summary["metrics"]["val_miou"] > 40  # one class everywhere gives at most 17
    assert summary["class_iou"].keys() == set(CLASSES) and summary["images"] == {"train": 6, "val": 3}
    page, (section,) = (run / "report.html").read_text(), read_inspection(run)
    assert "mIoU" in page and "<h2>By class</h2>" in page and page.count('src="data:image/jpeg') == 3
    ranks = [picture.title.split(": ") for picture in section.pictures]
    assert [rank for rank, _ in ranks] == ["best", "median", "worst"]
    miou = [float(value.rstrip("%")) for _, value in ranks]
    assert miou == sorted(miou, reverse=True) and miou[2] > 20
    with Image.open(io.BytesIO(section.pictures[0].content)) as image:
        assert image.width > 2 * 40 + 6  # the image twice, and the legend
    scored = evaluate_run(run)
    assert scored["miou"] == pytest.approx(summary["metrics"]["val_miou"], abs=0.2)
    slid = evaluate_run(run, overrides=["eval_window=32", "eval_stride=16", "eval_flip=true"])
    assert slid["miou"] != scored["miou"] and slid["miou"] > 40
    for kind in ("images", "annotations"):
        shutil.rmtree(camvid / kind / "train")  # evaluation opens its own split only
    assert evaluate_run(run, f"camvid:{camvid}") == scored
    with pytest.raises(UserError, match="train is not a folder"):
        load_pairs(f"camvid:{camvid}")
    (camvid / "classes.json").write_text(json.dumps({"classes": CLASSES[::-1], "ignore_index": 255}))
    with pytest.raises(UserError, match=r"got 'tree' as class 0, expected 'road' as in .*run"):
        evaluate_run(run, f"camvid:{camvid}")
    with pytest.raises(UserError, match=r"classes\.json"):  # whose classes cannot be compared
        build_task(recipe, f"camvid:{camvid}", camvid.parent / "nowhere")
    of_data = "or max_invalid, max_undecodable or without_objects"
    with pytest.raises(UserError, match=f"got 'lr=1', expected a key that begins with eval_, {of_data}"):
        evaluate_run(run, overrides=["lr=1"])


def test_ade20ks_classes_are_a_runs_with_and_without_the_file_of_their_names(tmp_path):
    data, run = tmp_path / "ade20k", tmp_path / "run"
    run.mkdir()
    for split in ("training", "validation"):
        for name in ("a", "b"):
            write_pair(data, split, name, (24, 40), np.full((24, 40), 7))
    recipe = tiny_recipe(data, f"data=ade20k:{data}", "model.args.num_classes=150")
    model, task = build_task(recipe)
    task.save_assets(model, run)
    lines = ["Idx\tRatio\tTrain\tVal\tName", *(f"{n}\t0.1\t5\t6\tname{n}" for n in range(1, 151))]
    (data / "objectInfo150.txt").write_text("\n".join(lines))
    build_task(recipe, recipe.data, run)  # it is scored
    model, task = build_task(recipe)  # and goes on
    task.check_assets(run)
    task.save_assets(model, run)
    assert task.data.classes[0] == "name1" and read_classes(run)[0] == "class 1"


def test_the_longest_side_is_told_first_to_those_who_have_a_file(trained):
    run, recipe, _ = trained
    model = build_model(recipe.model)
    for scale in ("[40,24]", "[24,40]"):
        use = describe_deployment(run, override(recipe, [f"scale={scale}"]), model)
        assert use.preprocessing["longest_and_shortest_side"] == (40, 24)


def test_a_run_resumes(trained, tmp_path, capsys):
    run, recipe, summary = trained
    shutil.copytree(run, tmp_path / "run")
    for later in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(later)
    (tmp_path / "run" / "summary.json").unlink()
    with Lines() as display:
        again = train_run(recipe, tmp_path / "run", display, resume=True)
    assert "mIoU" in capsys.readouterr().out
    assert again["metrics"] == summary["metrics"]
    (tmp_path / "run" / "summary.json").unlink()
    with Lines() as display:  # it was stopped behind its last checkpoint
        ended = train_run(recipe, tmp_path / "run", display, resume=True)
    assert ended["class_iou"] == summary["class_iou"] and ended["commonest_class"] == summary["commonest_class"]

    def losses(folder):
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if line["kind"] == "step"]

    assert losses(tmp_path / "run") == losses(run)


def test_a_run_that_is_refused_other_classes_stays_as_it_was(trained, camvid, tmp_path):
    run, recipe, _ = trained
    shutil.copytree(run, tmp_path / "run")
    listed = camvid / "classes.json"
    listed.write_text(json.dumps({"classes": CLASSES[::-1], "ignore_index": 255}))

    def content():
        files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
        return {file: file.read_bytes() for file in files}

    before = content()
    longer = dataclasses.replace(recipe, epochs=recipe.epochs + 1, data=f"camvid:{camvid}")
    with pytest.raises(UserError, match="as class 0, expected"), Lines() as display:
        train_run(longer, tmp_path / "run", display, resume="extend")
    assert content() == before


def test_classes_of_a_start_that_failed_do_not_count(trained, tmp_path, monkeypatch):
    run, recipe, _ = trained
    (tmp_path / "run").mkdir()
    shutil.copy(run / "config.yaml", tmp_path / "run")
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / "classes.json").write_text(json.dumps(CLASSES[::-1]))

    def reached(*_):
        raise UserError("the training is reached")

    monkeypatch.setattr("stepsnet.runs.train.train", reached)
    with pytest.raises(UserError, match="the training is reached"), Lines() as display:
        train_run(recipe, tmp_path / "run", display)


def test_what_the_stream_carries_is_drawn_of_each_checkpoint(trained, tmp_path):
    run, _, _ = trained
    kept = valid_checkpoints(run / "checkpoints")
    rows = analyze_shortcut([run], tmp_path)
    assert [row["update"] for row in rows] == [checkpoint.state["position"]["step"] for checkpoint in kept]


def test_segments_are_in_cocos_form():
    labels = np.array([[2, 2, 0], [2, 0, 0]])
    first, second = list_segments(labels, np.full((2, 3), 0.5), ["a", "b", "c"])
    assert first["category"] == "a" and second["category_id"] == 2
    assert first["bbox"] == [1, 0, 2, 2] and first["area"] == 3 and first["share"] == 0.5 and first["score"] == 0.5
    for segment in (first, second):
        assert np.array_equal(coco_mask.decode(segment["segmentation"]), labels == segment["category_id"])
    mask = np.random.default_rng(0).random((7, 5)) > 0.5
    found = json.loads(json.dumps(encode_rle(mask)))
    assert found["size"] == [7, 5] and np.array_equal(coco_mask.decode(found), mask)


def test_segments_are_drawn_in_their_colors_between_white_lines():
    labels = np.zeros((12, 16), dtype=np.int64)
    labels[:, 8:] = 2
    image = torch.full((3, 12, 16), 100, dtype=torch.uint8)
    segments = list_segments(labels, np.ones((12, 16)), ["a", "b", "c"])
    drawn = np.asarray(draw_segments(image, labels, segments))
    for column, category in ((3, 0), (12, 2)):
        expected = 0.45 * 100 + 0.55 * np.array(color_of(category))
        assert np.abs(drawn[5, column] - expected).max() <= 1
    assert (drawn[:12, 8] == 255).all() and drawn.shape[1] > 16  # the legend


def test_classes_have_colors_that_differ():
    assert len({color_of(category) for category in range(150)}) == 150


def test_predict_draws_overlays_and_writes_segments(trained, camvid, tmp_path, capsys):
    shutil.copytree(trained[0], run := tmp_path / "run")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(trained[1].data, "camvid:nowhere"))  # a run is used without its data
    file = camvid / "images" / "val" / "val1.png"
    assert main(["predict", str(run), str(file), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{file}: ") and "%" in said and "val1.segments.png" in said
    found = json.loads((tmp_path / "out" / "val1.segments.json").read_text())
    assert found["image"] == {"file_name": "val1.png", "height": 28, "width": 40}
    assert sum(one["area"] for one in found["segments"]) == 28 * 40
    assert [one["name"] for one in found["categories"]] == list(CLASSES)
    drawn = Image.open(tmp_path / "out" / "val1.segments.png")
    assert drawn.width > 40 and drawn.height >= 28
    (tmp_path / "other").mkdir()
    shutil.copy(file, tmp_path / "other" / "val1.png")
    (tmp_path / "other" / "text.png").write_text("not an image")
    for names, expected in (
        ([tmp_path / "other" / "text.png"], "text.png as an image: cannot identify"),
        ([tmp_path / "other" / "none.png"], "none.png as an image: no such file"),
    ):
        assert main(["predict", str(run), *map(str, names), "--out", str(tmp_path / "no")]) == 2
        assert expected in capsys.readouterr().err and not (tmp_path / "no").exists()
    both = [str(file), str(tmp_path / "other" / "val1.png")]
    assert main(["predict", str(run), *both, "--out", str(tmp_path / "both")]) == 0
    written = sorted(path.relative_to(tmp_path / "both") for path in (tmp_path / "both").rglob("*.segments.png"))
    assert [str(path.parent) for path in written] == ["camvid/images/val", "other"]  # as the inputs are
    capsys.readouterr()


def test_a_backbone_starts_from_a_classification_run(camvid, tmp_path):
    classifier = timm.create_model(TINY["backbone"], num_classes=2, **TINY["backbone_args"])
    save_weights(tmp_path / "model.safetensors", classifier.state_dict())
    model, task = build_task(tiny_recipe(camvid, f"backbone={tmp_path}"))
    assert task.load_pretrained(model) == []
    own = [value for name, value in model.state_dict().items() if name.endswith("patch_embed.proj.weight")]
    assert len(own) == 1 and torch.equal(own[0], classifier.state_dict()["patch_embed.proj.weight"])


def test_a_classifier_that_has_not_ended_is_told_of(trained, camvid, tmp_path):
    """What is told goes by the checkpoints, which are those of another run here."""
    stopped = shutil.copytree(trained[0], tmp_path / "stopped")
    (stopped / "summary.json").unlink()
    classifier = timm.create_model(TINY["backbone"], num_classes=2, **TINY["backbone_args"])
    save_weights(stopped / "model.safetensors", classifier.state_dict())
    model, task = build_task(tiny_recipe(camvid, f"backbone={stopped}"))
    told = f"backbone: {stopped} has not ended: these are its weights after update 75 of 75"
    assert task.load_pretrained(model) == [told]
