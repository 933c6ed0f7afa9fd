"""What a classifier's data decide where the recipe leaves it open, and what is told before the training."""

import dataclasses
import importlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
import timm
from classification_tasks import sample
from PIL import Image

from stepsnet.cli import main
from stepsnet.errors import UserError
from stepsnet.models.backbone import create_backbone
from stepsnet.models.build import build_model
from stepsnet.recipes import find_recipe
from stepsnet.run_folder.checkpoint import save_weights
from stepsnet.runs.advice import on_settings
from stepsnet.settings.config import ModelSpec
from stepsnet.settings.from_data import as_begun
from stepsnet.settings.overrides import override, read_recipe
from stepsnet.tasks import build_opened, build_task, open_data, resolve
from stepsnet.tasks.classification import task as classification
from stepsnet.tasks.classification.inputs import normalization_of
from stepsnet.tasks.classification.sources import SOURCES
from stepsnet.tasks.normalization import Normalization

SHALLOW = ["model.args.depths=[1,1,1]", "baseline.args.depths=[1]", "train_samples=null", "batch_size=4"]
WIDE = "model.args.widths=[32,48,64] model.args.num_heads=[1,2,2] model.args.mlp_ratio=3"  # as test_steps_deit
RUN = ["epochs=1", "warmup_epochs=0", "stream_epochs=0", "device=cpu"]


def write_images(root, size=(16, 16), mode="RGB", classes=("ant", "bee", "cow"), train=4, val=2):
    """Pictures of noise of ``size``, which is a width and a height, in the folders of classes."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for name in classes:
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
                Image.fromarray(pixels).convert(mode).save(root / split / name / f"{number}.png")
    return root


def recipe_on(root, *changes):
    return override(find_recipe("cifar10/shallow"), [f"data=folder:{root}", *SHALLOW, *changes])


def resolved(recipe):
    return resolve(recipe, open_data(recipe))


@pytest.mark.parametrize("mode, chans", [("RGB", 3), ("L", 1), ("1", 1), ("P", 3), ("LA", 1), ("I;16", 1)])
def test_classes_channels_and_size_for_the_model_and_the_baseline(mode, chans, tmp_path):
    recipe = recipe_on(write_images(tmp_path, mode=mode) if mode != "I;16" else sixteen_bits(tmp_path))
    for one in (recipe, recipe.of_baseline()):
        closed, lines = resolved(one)
        decided = {"num_classes": 3, "img_size": 16} | ({"in_chans": 1} if chans == 1 else {})
        assert closed.model.args == {**one.model.args, **decided} and closed.img_size is None
        assert lines[0] == "num_classes 3, from the data" and lines[-1] == "img_size 16, from the data"
        assert len(lines) == (3 if chans == 1 else 2)
        model, task = build_opened(closed, open_data(closed))
        image, _, _ = sample(task.data.val, 0, 0, 0)
        assert model(image[None]).shape == (1, 3) and task.input_size == (chans, 16, 16)
        assert resolved(closed) == (closed, [])  # it is closed


def sixteen_bits(root):
    write_images(root)
    for file in root.rglob("*.png"):
        Image.fromarray(np.asarray(Image.open(file).convert("L")).astype(np.uint16) * 256).save(file)
    return root


def test_a_model_of_any_size_is_told_the_size_and_one_of_a_fixed_size_is_built_for_it(tmp_path):
    recipe = recipe_on(write_images(tmp_path, (32, 32)))
    for spec, args, size in (
        (ModelSpec("resnet10t"), {}, 32),
        (ModelSpec("deit_tiny_patch16_224", {"depth": 1}), {"img_size": 32}, None),
        (ModelSpec("test_steps_swin"), {"img_size": 32}, None),
        (ModelSpec("test_steps_deit", {"num_classes": None, "img_size": 64}), {"img_size": 64}, None),
    ):
        closed, _ = resolved(dataclasses.replace(recipe, model=spec))
        assert closed.model.args == {**spec.args, "num_classes": 3, **args} and closed.img_size == size
    for size in (32, 48):  # a number is the same for a model that leaves its size open
        closed, lines = resolved(override(recipe, [f"img_size={size}"]))
        assert closed.model.args["img_size"] == closed.img_size == size
        assert lines == ["num_classes 3, from the data"]
    assert resolved(dataclasses.replace(recipe, img_size=None))[0].model.args.keys().isdisjoint({"img_size"})


@pytest.mark.parametrize(
    "size, changes, expected",
    [
        ((20, 20), [], "got 20, the side of the training images, expected a multiple of 8, the side of a patch of "
         "steps_deit_tiny_patch16_224, such as img_size=24 (its patches of 8 pixels do not divide 20)"),
        ((16, 16), ["img_size=20"], "got 20, expected a multiple of 8"),
        ((24, 16), [], "got data, but the 12 training images that were looked at are 16×24 pixels, expected squares of "
         "one size; a side such as img_size=64 resizes and crops them"),
        ((16, 16), ["img_size=64", "model.args.img_size=32"], "got 64, expected 32, the size that steps_deit_tiny"),
    ],
)  # fmt: skip
def test_a_size_that_does_not_fit_is_one_line_with_the_key(size, changes, expected, tmp_path):
    recipe = recipe_on(write_images(tmp_path, size), *changes)
    with pytest.raises(UserError) as raised:
        resolved(recipe)
    assert str(raised.value).startswith(f"img_size: {expected}")


def test_images_at_their_own_size_are_evaluated_whole(tmp_path):
    """And trained on so, where nothing augments them: a model's own crop would enlarge them first."""
    recipe = recipe_on(write_images(tmp_path), "crop_pct=null", "augment=null", "model.args.num_classes=3")
    closed, lines = resolved(recipe)
    assert lines[-1] == "img_size 16, from the data, whose images are evaluated whole (crop_pct 1)"
    assert as_begun(recipe, closed).crop_pct == closed.crop_pct == 1.0
    _, task = build_opened(closed, open_data(closed))
    for samples in (task.data.train, task.data.val):
        stored = np.asarray(samples.images.read(int(samples.indices[0])).convert("RGB")) / 255
        mean, std = (np.array(one) for one in normalization_of(closed, build_model(closed.model)))
        np.testing.assert_allclose(sample(samples, 0, 0, 0)[0].permute(1, 2, 0), (stored - mean) / std, atol=1e-5)
    kept, lines = resolved(override(recipe, ["crop_pct=0.5"]))
    assert kept.crop_pct == 0.5 and lines[-1] == "img_size 16, from the data"


def test_images_of_several_sizes_need_a_number(tmp_path):
    write_images(tmp_path, (16, 16))
    Image.new("RGB", (300, 200)).save(tmp_path / "train" / "ant" / "more.png")
    (tmp_path / "train" / "bee" / "torn.png").write_bytes(b"no picture")  # is not looked at
    with pytest.raises(UserError, match=r"the 13 training images .* are of 2 sizes, from 16×16 to 200×300 pixels"):
        resolved(recipe_on(tmp_path))
    closed, _ = resolved(recipe_on(tmp_path, "img_size=64"))
    assert closed.model.args["img_size"] == 64


def test_what_is_given_is_not_taken_from_the_data(tmp_path):
    root = write_images(tmp_path, mode="L")
    closed, lines = resolved(recipe_on(root, "model.args.in_chans=3"))
    assert closed.model.args["in_chans"] == 3 and "model.args.in_chans=1 reads one channel" in lines[1]
    closed, lines = resolved(recipe_on(root, "baseline.args.num_classes=3").of_baseline())
    assert "in_chans" not in closed.model.args
    assert "reads them in color: baseline.args.in_chans=1" in lines[0]
    for recipe, key in ((recipe_on(root), "model"), (recipe_on(root).of_baseline(), "baseline")):
        wrong = dataclasses.replace(recipe.model, args={**recipe.model.args, "num_classes": 10})
        changed = dataclasses.replace(recipe, model=wrong, baseline=wrong if key == "baseline" else recipe.baseline)
        with pytest.raises(UserError, match=rf"^{key}.args.num_classes: got 10, expected the data's 3 \(null takes"):
            build_task(changed)
    with pytest.raises(UserError, match=r"^model.args.in_chans: got 2, expected 1 for greyscale images or 3 for color"):
        build_task(recipe_on(root, "model.args.in_chans=2"))
    with pytest.raises(UserError, match=r"digits are 1×8×8 values, got a model with 1×64×64 inputs"):
        build_task(override(find_recipe("digits/tiny"), ["img_size=64"]))


def test_data_of_ones_own_need_no_shapes(tmp_path, monkeypatch):
    """A kind of data that has only what the protocol asks for: it is read in color."""
    folder = SOURCES["folder"]

    def without_shapes(path, mode):
        splits = folder(path, mode)
        for images in (splits.train, splits.val):
            monkeypatch.setattr(type(images), "shape", property(), raising=False)
        return splits

    monkeypatch.setitem(SOURCES, "mine", without_shapes)
    closed, _ = resolved(recipe_on(write_images(tmp_path, mode="L"), f"data=mine:{tmp_path}"))
    assert closed.model.args["img_size"] == 16 and "in_chans" not in closed.model.args


def test_a_run_says_what_it_took_and_its_config_replays_it(tmp_path, capsys, monkeypatch):
    data, run, again = write_images(tmp_path / "data", mode="L"), tmp_path / "run", tmp_path / "again"
    arguments = ["cifar10/shallow", f"data=folder:{data}", *SHALLOW, *RUN]
    monkeypatch.setattr("stepsnet.runs.train.report_or_tell", lambda *_: None)
    assert main(["train", *arguments, "--run", str(run)]) == 0
    out = capsys.readouterr().out
    said = [line.partition(": ")[2] for line in out.splitlines()]
    assert said[:3] == [
        "num_classes 3, from the data",
        "in_chans 1, from the data: the 12 training images that were looked at are greyscale",
        "img_size 16, from the data",
    ]
    assert said[3] == "lr 0.001 is cifar10/shallow's for batches of 64, but batch_size is 4: lr_base_size=64 scales it"
    decided = {"num_classes": 3, "in_chans": 1, "img_size": 16}
    config, summary = read_recipe(run / "config.yaml"), json.loads((run / "summary.json").read_text())
    assert decided.items() <= config.model.args.items() and decided.items() <= summary["model"]["args"].items()
    assert config.img_size is None
    assert main(["predict", str(run), str(data / "val" / "ant" / "0.png")]) == 0
    assert main(["eval", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["top1"] == summary["metrics"]["val_top1"]
    assert main(["train", str(run / "config.yaml"), "--run", str(again)]) == 0
    assert "from the data" not in capsys.readouterr().out
    assert (again / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    # resumed by the recipe's name it is as it was begun, whatever the data look like now
    write_images(data, (24, 24))
    assert main(["train", *arguments, "--run", str(run), "--resume"]) == 0
    assert "from the data" not in capsys.readouterr().out
    assert main(["train", *arguments, "model.args.img_size=24", "--run", str(run), "--resume"]) == 2


def test_a_comparison_is_checked_with_its_data_before_the_first_run(tmp_path, capsys, monkeypatch):
    data, run = write_images(tmp_path / "data"), tmp_path / "run"
    opened, started = [], []
    read = classification.open_images
    monkeypatch.setattr(classification, "open_images", lambda name: opened.append(name) or read(name))
    monkeypatch.setattr("stepsnet.runs.grid.run_all", lambda waiting, *_: started.extend(waiting))
    monkeypatch.setattr("stepsnet.runs.report.write_report", lambda *_: None)
    arguments = ["compare", "cifar10/shallow", f"data=folder:{data}", *SHALLOW, "epochs=1", "--run", str(run)]
    vit = tmp_path / "vit.safetensors"
    save_weights(vit, timm.create_model("test_vit").state_dict())
    for mistake, said in {
        "batch_size=13": "batch_size: got 13, expected 1 to 12, the number of training images",
        "baseline.args.num_classes=4": "baseline.args.num_classes: got 4, expected the data's 3",
        "holdout=11": "holdout: got 11, expected 3 to 9",
        "img_size=20": "img_size: got 20, expected a multiple of 8",
        f"init={vit}": "baseline_init: got none although init is given",
        f"init={vit} baseline_init={vit}": f"init: {vit} fits no layer of the model",
        f"init={vit} baseline_init={vit} {WIDE}": f"baseline_init: {vit} fits no layer of the model",
    }.items():
        assert main([*arguments, *mistake.split()]) == 2
        err = capsys.readouterr().err
        assert said in err and len(err.splitlines()) == 1 and not run.exists(), err
    opened.clear()
    monkeypatch.setattr(
        "stepsnet.runs.compare.summarize", lambda summaries: {"seeds": [], "StepsNet": {}, "baseline": {}}
    )
    assert main([*arguments, "--seeds", "0,1"]) == 0
    out = capsys.readouterr().out
    assert len(opened) == 1 and len(started) == 4 and all(job.lines_shown for job in started)
    assert out.splitlines()[0] == "StepsNet, baseline: num_classes 3, from the data"
    assert sum("warmup_epochs 1 of 1 epoch" in line for line in out.splitlines()) == 1
    config = read_recipe(run / "config.yaml")
    for spec in (config.model, config.baseline):
        assert (spec.args["num_classes"], spec.args["img_size"]) == (3, 16)


def test_a_comparison_whose_models_have_their_sizes_in_different_places_goes_on(tmp_path, grids_in_this_process):
    """The size of the one is among its arguments, where the other's is the recipe's."""
    data, run = write_images(tmp_path / "data"), tmp_path / "run"
    baseline = ["baseline.name=test_resnet", 'baseline.args={"num_classes":null}']
    arguments = ["compare", "cifar10/shallow", f"data=folder:{data}", "model.args.depths=[1,1,1]", *baseline]
    arguments += ["train_samples=null", "batch_size=4", *RUN]

    assert main([*arguments, "--run", str(run)]) == 0
    sizes = {
        (recipe.img_size, recipe.model.args.get("img_size")) for recipe in map(read_recipe, run.glob("*/config.yaml"))
    }
    assert sizes == {(None, 16), (16, None)}
    (run / "baseline-seed0" / "summary.json").unlink()
    assert main([*arguments, "--run", str(run), "--resume"]) == 0
    assert main(["resume", str(run), "epochs=2"]) == 0
    assert {json.loads(file.read_text())["epochs"] for file in run.glob("*/summary.json")} == {2}


@pytest.mark.parametrize("sized", ["model", "baseline"])
def test_a_comparison_evaluates_one_share_of_the_images(sized, tmp_path, capsys, grids_in_this_process):
    """Images are evaluated whole for the model whose size they decide, and not for one that has a size of its own."""
    data, run = write_images(tmp_path / "data"), tmp_path / "run"
    arguments = ["compare", "cifar10/shallow", f"data=folder:{data}", *SHALLOW, *RUN]
    arguments += [f"{sized}.args.img_size=16", "--run", str(run)]

    for option in ([], ["--dry-run"]):
        assert main([*arguments, "crop_pct=null", *option]) == 2
        out, err = capsys.readouterr()
        assert err.startswith("stepsnet: crop_pct: got null") and not out and not run.exists(), err
    assert main([*arguments, "crop_pct=1"]) == 0
    (run / "baseline-seed0" / "summary.json").unlink()
    assert main([*arguments, "crop_pct=1", "--resume"]) == 0
    assert {recipe.crop_pct for recipe in map(read_recipe, run.glob("*/config.yaml"))} == {1.0}


@pytest.mark.parametrize(
    "spoil, expected",
    [
        (lambda root: (root / "train" / ".ipynb_checkpoints").mkdir(), []),
        (lambda root: (root / "train" / "dog").mkdir(),
         ["no images of dog at all, though the model has an output for every class"]),
        (lambda root: write_images(root, classes=("dog",), train=0),
         ["no training images of dog, but 2 to evaluate"]),
        (lambda root: write_images(root, classes=("dog",), val=0),
         ["no evaluated images of dog: the metrics cover only the other classes"]),
        (lambda root: write_images(root, classes=("bee",), train=10, val=5),
         ["55.6% of the training images are of bee: always answering this scores 55.6% top-1 on the evaluated images"]),
        (lambda root: [(root / name).touch() for name in ("train/ant/a.heic", "train/bee/b.HEIC", "val/ant/c.cr2")],
         ["left out 2 files (.heic) in train", "left out 1 file (.cr2) in val"]),
    ],
)  # fmt: skip
def test_what_a_user_should_know_of_the_classes(spoil, expected, tmp_path):
    spoil(write_images(tmp_path))
    model, task = build_task(recipe_on(tmp_path))
    assert task.remarks() == expected
    assert model.num_classes == len(task.data.classes) == (4 if "dog" in str(expected) else 3)


def test_classes_that_training_does_not_have_are_refused(tmp_path):
    write_images(tmp_path)
    write_images(tmp_path, classes=("elk", "fox"), train=0)
    for name in ("elk", "fox"):
        (tmp_path / "train" / name).rmdir()
    with pytest.raises(UserError, match=r"val/elk and 1 more: got images of a class that has no folder in .*train"):
        build_task(recipe_on(tmp_path))


def test_settings_that_are_seldom_meant():
    recipe = find_recipe("cifar10/deep")
    assert on_settings(recipe) == []
    (line,) = on_settings(override(recipe, ["epochs=2", "warmup_epochs=5"]))
    assert line.startswith("warmup_epochs 5 of 2 epochs: the learning rate only rises, to 40% of lr")
    (line,) = on_settings(override(recipe, ["batch_size=256"]))
    assert line == "lr 0.001 is cifar10/deep's for batches of 64, but batch_size is 256: lr_base_size=64 scales it"
    for fine in (["batch_size=128"], ["batch_size=256", "lr=0.004"], ["batch_size=256", "lr_base_size=64"]):
        assert on_settings(override(recipe, fine)) == []
    assert on_settings(override(find_recipe("imagenet/deit_tiny"), ["batch_size=64"])) == []  # scaled
    coco = find_recipe("coco/mask_rcnn_swin_tiny")
    (line,) = on_settings(coco)
    assert line.startswith("backbone: none is given, so it starts from random weights; the results expected of coco/")
    assert on_settings(override(coco, ["backbone=timm:swin_tiny_patch4_window7_224"])) == []
    assert on_settings(find_recipe("pennfudan/mask_rcnn")) == []  # which is meant to


@pytest.mark.parametrize("task", ["detection", "segmentation"])
def test_a_backbone_whose_weights_saw_other_images_is_told(task, monkeypatch):
    """timm's plain ViT has 0.5 as mean and deviation, its weights of MAE those of ImageNet."""
    module = importlib.import_module(f"stepsnet.tasks.{task}.task")
    monkeypatch.setattr(module, "load_backbone", lambda *arguments: None)
    of_vit = Normalization((0.5,) * 3, (0.5,) * 3)
    vit = create_backbone("vit_tiny_patch16_224", depth=4)
    model = SimpleNamespace(
        backbone=SimpleNamespace(body=vit) if task == "detection" else vit,
        transform=SimpleNamespace(image_mean=[0.5] * 3, image_std=[0.5] * 3),
    )
    recipe = SimpleNamespace(backbone="timm:vit_base_patch16_224.mae", model=model, baseline=None)
    asked = SimpleNamespace(recipe=recipe, inference=SimpleNamespace(**of_vit._asdict()))
    kind = module.Detection if task == "detection" else module.Segmentation
    (line,) = kind.load_pretrained(asked, model)
    assert line.startswith(
        "backbone: the weights of timm:vit_base_patch16_224.mae were trained on images normalized with mean (0.485"
    )
    recipe.backbone = "timm:vit_base_patch16_224.augreg_in1k"
    assert kind.load_pretrained(asked, model) == []


def test_a_single_class_is_refused_before_training(tmp_path):
    recipe, _ = resolved(recipe_on(write_images(tmp_path, classes=("ant",))))
    with pytest.raises(UserError, match="has one class, ant, expected at least two"):
        build_opened(recipe, open_data(recipe))
