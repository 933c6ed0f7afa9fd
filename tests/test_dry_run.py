"""--dry-run: what it says is what a run does, it fails as a run does, and it leaves nothing behind."""

import dataclasses
import shutil
import sys
from contextlib import nullcontext

import pytest
import timm
import torch
import yaml
from coco_images import write_coco
from detection_tasks import tiny as tiny_detector
from run_folders import closed
from segmentation_tasks import tiny_recipe
from toy_study import declared

from stepsnet.analysis.memory import activation_bytes, peak_bytes, states_memory
from stepsnet.cli import main
from stepsnet.engine.distributed import DistributedContext
from stepsnet.recipes import find_recipe
from stepsnet.runs.dry_run import forecast, render_forecasts
from stepsnet.settings.overrides import override, to_plain

SMALL = ["batch_size=128", "model.args.depths=[1,1,1]", "baseline.args.depths=[2]"]


def test_train_shows_the_recipe_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "digits/tiny", "--dry-run", "epochs=1", *SMALL]) == 0
    said = capsys.readouterr().out
    recipe = override(find_recipe("digits/tiny"), ["epochs=1", *SMALL])
    assert yaml.safe_load(said) == to_plain(closed(recipe))
    assert "# num_classes 10, from the data\n" in said and "# warmup_epochs 2 of 1 epoch: " in said
    assert "# updates: 11 per epoch, 11 in 1 epoch\n" in said
    assert "# effective batch 128 = 1 rank × 1 accumulated × 128, lr 0.004\n" in said
    assert "# first batch: float32 128×1×8×8, int64 128\n" in said
    assert "# the run would be in runs/digits-tiny; this was a dry run" in said
    assert not list(tmp_path.iterdir())


def test_compare_and_sweep_show_every_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "digits/tiny", "--dry-run", "--seeds", "0,1", *SMALL]) == 0
    said = capsys.readouterr().out
    (document,) = yaml.safe_load_all(said)
    for key in ("model", "baseline"):
        assert {"num_classes": 10, "in_chans": 1, "img_size": 8}.items() <= document[key]["args"].items()
    assert said.count("\nname: ") == 1 and said.index("# StepsNet:") < said.index("# baseline:")
    assert "# 4 runs, 2 at once, would be in runs/digits-tiny" in said
    short = ["train_samples=64", "batch_size=32"]
    assert main(["sweep", "digits/steps_12", "digits/fixed_width_12", "--dry-run", "--seeds", "0,1,2", *short]) == 0
    said = capsys.readouterr().out
    documents = list(yaml.safe_load_all(said))
    assert [document["name"] for document in documents] == ["digits/fixed_width_12", "digits/steps_12"]
    assert "# digits/steps_12 (StepsNet):" in said and "# 6 runs, 2 at once, would be in runs/sweep" in said
    assert not list(tmp_path.iterdir())
    study = declared(tmp_path)
    assert main(["sweep", str(study), "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("0 of 10 runs of toy are done") and said[1] == "  plain-1-tuning-lr0.001-seed0"
    assert list(tmp_path.iterdir()) == [study]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["batch_size=9999"], "batch_size: got 9999, expected 1 to 1437, the number of training images"),
        (["opt=adamww"], "opt: got 'adamww'"),
        (["device=abacus"], "device: got 'abacus'"),
        (["accumulation_steps=3"], "batch_size: got 32, expected a multiple of 3"),
        (["grad_checkpointing=[9]"], "grad_checkpointing: got steps [9]"),
        (["--run", "full"], "full is not empty, expected a new folder"),
        (["--run", "full/diary.txt/run"], "cannot use full/diary.txt/run: Not a directory"),
    ],
)
def test_it_fails_as_a_run_does(arguments, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").write_text("mine")
    assert main(["train", "digits/tiny", "--dry-run", *arguments]) == 2
    said = capsys.readouterr()
    assert expected in said.err and len(said.err.splitlines()) == 1 and not said.out
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "diary.txt"]


def test_a_tracker_has_to_be_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["train", "digits/tiny", "--dry-run", "tracker=wandb", *SMALL]) == 2
    assert "tracker: wandb is not installed" in capsys.readouterr().err


def test_of_several_ranks_the_first_shows_it(monkeypatch, capsys):
    command = ["train", "digits/tiny", "--dry-run", *SMALL]
    monkeypatch.setenv("RANK", "1")  # alone, a variable of the user's own
    assert main(command) == 0 and "# updates: 11 per epoch" in capsys.readouterr().out
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone = DistributedContext(0, 1, torch.device("cpu"))  # no other is waited for
    monkeypatch.setattr("stepsnet.runs.dry_run.init_distributed", lambda device: nullcontext(alone))
    assert main(command) == 0
    assert not capsys.readouterr().out


def test_a_run_that_goes_on_is_held_against_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = [*SMALL, "epochs=1", "train_samples=128", "stream_epochs=0", "device=cpu"]
    assert main(["train", "digits/tiny", "--run", "first", *small]) == 0
    began = ["train", "digits/tiny", "init=first", "--run", "second", *small]
    assert main(began) == 0
    shutil.rmtree(tmp_path / "first")
    capsys.readouterr()
    resumed = [*began, "--resume", "--dry-run"]
    assert main(resumed) == 0  # its weights are those of its checkpoint
    assert "# updates: 1 per epoch" in capsys.readouterr().out
    classes = tmp_path / "second" / "classes.json"
    classes.write_text(classes.read_text().replace("7", "seven"))
    assert main(resumed) == 2 and "classes" in capsys.readouterr().err
    monkeypatch.setattr("stepsnet.tasks.classification.task.Classification.sizes", lambda task: {"train": 127})
    assert main(resumed) == 2 and "--resume: the data have train 127, " in capsys.readouterr().err


def test_a_place_that_may_not_be_written_to_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    assert main(["train", "digits/tiny", "--dry-run", "--run", str(tmp_path / "a" / "b")]) == 2
    assert "expected a folder that can be written to" in capsys.readouterr().err


def test_memory_is_that_of_the_loss_with_the_settings():
    recipe = override(find_recipe("digits/tiny"), SMALL)
    found = forecast(recipe).memory
    recipe = closed(recipe)
    model = timm.create_model(recipe.model.name, **recipe.model.args)
    count = sum(parameter.numel() for parameter in model.parameters())
    alike = activation_bytes(model, (1, 8, 8), 128)
    assert (found.weights, found.gradients, found.optimizer) == (4 * count, 4 * count, 8 * count)
    assert alike <= found.activations < 1.1 * alike  # and those of the loss itself
    changed = ["opt=sgd", "ema_decay=0.9", "grad_checkpointing=1.0", "accumulation_steps=2"]
    less = forecast(override(recipe, changed)).memory
    assert (less.optimizer, less.averages) == (4 * count, 4 * count) and less.activations < found.activations / 2
    for parameter in model.blocks.parameters():
        parameter.requires_grad = False
    frozen = states_memory(model)
    assert frozen.weights == 4 * count and frozen.optimizer == 2 * frozen.gradients < found.optimizer


def test_the_batch_of_a_dictionary_is_faked_too():
    model = torch.nn.Linear(8, 4)
    batch = {"x": torch.ones(16, 8), "weights": [torch.ones(16, 4)]}
    peak = peak_bytes(model, batch, lambda model, b: (model(b["x"]) * b["weights"][0]).sum(), lambda model: None)
    assert peak >= 2 * 4 * 16 * 4 and all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.usefixtures("own_cache")
def test_dense_tasks(camvid, tmp_path):
    write_coco(tmp_path / "coco")
    recipes = [tiny_recipe(camvid), tiny_detector(tmp_path / "coco")]
    segmenter, detector = (dataclasses.replace(recipe, workers=1) for recipe in recipes)
    found, size, count = forecast(segmenter), segmenter.crop_size, segmenter.batch_size
    assert found.first_batch == f"float32 {count}×3×{size}×{size}, int64 {count}×{size}×{size}"
    assert found.memory.activations and not found.activations_unknown
    found = forecast(detector, "mine")
    assert found.first_batch.startswith(f"list of {detector.batch_size} [float32 3×")
    assert "boxes: float32" in found.first_batch and not found.memory.activations
    assert "activations: not predicted" in render_forecasts([found], "one run")
