"""A run grows from another's folder: by the command, by a recipe, and without that folder once it has begun."""

import json
import shutil
from dataclasses import replace

import pytest
import timm
import torch
import yaml

import stepsnet
from stepsnet.cli import main
from stepsnet.errors import UserError
from stepsnet.models.build import build_model
from stepsnet.output.console import Lines
from stepsnet.recipes import find_recipe
from stepsnet.run_folder.checkpoint import save_weights
from stepsnet.run_folder.folder import has_ended, read_weights
from stepsnet.runs.compare import compare
from stepsnet.runs.prepare import prepare_run
from stepsnet.runs.sweep import sweep
from stepsnet.settings.config import ModelSpec
from stepsnet.settings.overrides import read_recipe

VIT = dict(img_size=8, patch_size=4, in_chans=1, num_classes=10, widths=[32], depths=[2], num_heads=[2])
QUICK = dict(epochs=1, warmup_epochs=0, stream_epochs=0, threads=1)
TEXT = dict(vocab_size=280, seq_len=16, batch_size=4, epoch_updates=6, epochs=1, warmup_epochs=0, min_lr=0.0)
LLAMA = dict(vocab_size=280, max_position_embeddings=32, widths=[32], depths=[2], num_attention_heads=[2])


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A finished run of a plain network."""
    folder = tmp_path_factory.mktemp("grow") / "small"
    stepsnet.train("digits/tiny", folder, model=ModelSpec("steps_deit_tiny_patch16_224", VIT), **QUICK)
    return folder


def metrics_of(folder):
    return json.loads((folder / "summary.json").read_text())["metrics"]


def test_a_grown_run_begins_where_the_other_ended(small, tmp_path, capsys):
    """At a rate of 0 nothing is learned: its metrics and its predictions are those of the network before."""
    run, here = tmp_path / "run", tmp_path / "small"
    shutil.copytree(small, here)
    assert main(["grow", str(here), "--run", str(run), "lr=0", "min_lr=0"]) == 0
    said = capsys.readouterr()
    assert "32×2, 45×1; at the start its outputs are those of" in said.out and "the settings are those of" in said.err
    before, after = metrics_of(here), metrics_of(run)
    assert after["val_top1"] == before["val_top1"] and after["val_loss"] == pytest.approx(before["val_loss"], rel=1e-5)
    assert main(["grow", str(here), "--run", str(run), "lr=0", "min_lr=0", "--resume"]) == 0  # it has ended
    shutil.rmtree(here)  # what has begun does not need it
    (run / "summary.json").unlink()
    assert main(["resume", str(run)]) == 0 and has_ended(run)
    assert main(["eval", str(run)]) == 0
    assert main(["grow", str(run), "--run", str(tmp_path / "again"), "--dry-run"]) == 0  # a run that has grown
    assert "45×1, 64×1" in capsys.readouterr().out


def test_a_recipe_with_the_folder_is_replayed_by_its_config(small, tmp_path):
    model = ModelSpec("grow", {"model": str(small), "plan": {"widths": [32, 40], "depths": [2, 1]}})
    first = stepsnet.train("digits/tiny", tmp_path / "first", model=model, **QUICK)
    recipe = read_recipe(tmp_path / "first" / "config.yaml")
    assert recipe.model.args["model"]["args"]["widths"] == [32] and recipe.model.args["weights"] == str(small)
    assert recipe.model.args["num_classes"] == 10 and recipe.model.args["in_chans"] == 1
    again = stepsnet.train(tmp_path / "first" / "config.yaml", tmp_path / "again")
    weights = [read_weights(run.folder) for run in (first, again)]
    assert weights[0].keys() == weights[1].keys() == build_model(recipe.model).state_dict().keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    trained = read_weights(small)["blocks.networks.0.0.attn.qkv.weight"]
    assert not torch.equal(weights[0]["blocks.networks.0.0.attn.qkv.weight"], trained)  # it went on


def test_a_comparison_and_a_sweep_of_a_grown_network_go_on(small, tmp_path, grids_in_this_process):
    """For job scripts that are run again: the recipe names the folder, and what has begun does not."""
    model = ModelSpec("grow", {"model": str(small), "plan": {"widths": [32, 40], "depths": [2, 1]}})
    baseline = ModelSpec("steps_deit_tiny_patch16_224", VIT)
    recipe = replace(find_recipe("digits/tiny"), model=model, baseline=baseline, **QUICK)

    with Lines() as display:
        for _ in range(2):
            compare(recipe, tmp_path / "pair", [0], 1, display, "auto")
            sweep([replace(recipe, baseline=None)], tmp_path / "grid", [0], 1, display, "auto")
    assert has_ended(tmp_path / "pair" / "stepsnet-seed0") and has_ended(tmp_path / "grid" / "digits-tiny-seed0")


def test_a_file_of_weights_grows_into_other_classes(tmp_path):
    vit = timm.create_model("test_vit", img_size=32, num_classes=7)
    save_weights(tmp_path / "vit.safetensors", vit.state_dict())
    args = {"model": "test_vit", "weights": str(tmp_path / "vit.safetensors"), "img_size": 8, "patch_size": 4}
    prepared = prepare_run(replace(find_recipe("digits/tiny"), model=ModelSpec("grow", args), threads=1))
    said = "\n".join(prepared.lines)
    assert "7 in the source" in said
    assert "its outputs are those of the network before it grew, with what fits of " in said
    ours = prepared.model.blocks[0].block.state_dict()
    assert all(torch.equal(tensor, vit.blocks[0].state_dict()[name]) for name, tensor in ours.items())


def test_language(tmp_path):
    words = "step by step the network widens and the others wait. "
    (tmp_path / "others").mkdir()
    for name, times in (("train", 400), ("valid", 40)):
        (tmp_path / f"{name}.txt").write_text(words * times)
        (tmp_path / "others" / f"{name}.txt").write_text(words[::-1] * times)
    model = ModelSpec("steps_transformer", LLAMA)
    data = f"text:{tmp_path}"
    before = stepsnet.train("python-docs/tiny", tmp_path / "small", data=data, model=model, **TEXT)
    grown = {"data": data, "model": ModelSpec("grow", {"model": str(before.folder)}), **TEXT, "lr": 0.0}
    after = stepsnet.train("python-docs/tiny", tmp_path / "grown", **grown)
    losses = [metrics_of(run.folder)["val_loss"] for run in (before, after)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert main(["predict", str(after.folder), "--prompt", "step by", "--tokens", "3"]) == 0
    with pytest.raises(
        UserError, match=r"data: got text whose tokenizer is not that of .*small, expected the data that it was"
    ):
        stepsnet.train("python-docs/tiny", tmp_path / "x", **{**grown, "data": f"text:{tmp_path / 'others'}"})
    with pytest.raises(UserError, match=r"small is a run of language, expected one of classification"):
        stepsnet.train("digits/tiny", tmp_path / "x", model=grown["model"])


def test_mistakes_are_one_line(small, tmp_path, capsys):
    unfinished = tmp_path / "unfinished"
    shutil.copytree(small, unfinished)
    (unfinished / "summary.json").unlink()
    resnet = tmp_path / "resnet"
    shutil.copytree(small, resnet)
    config = yaml.safe_load((resnet / "config.yaml").read_text())
    config["model"] = {"name": "test_resnet", "args": {"num_classes": 10, "in_chans": 1}}
    (resnet / "config.yaml").write_text(yaml.safe_dump(config))
    run = str(tmp_path / "run")
    for arguments, expected in (
        ([str(tmp_path / "nowhere")], "run: got"),
        ([str(unfinished)], "has not ended, expected a finished run; `stepsnet resume"),
        ([str(resnet)], "grow: got ResNet, expected a VisionTransformer"),
        ([str(small), "--widths", "24,32", "--depths", "2,1"], "expected the first to be the model's, (32,)"),
        ([str(small), "--widths", "32,24", "--depths", "2,1"], "got 24 after 32, expected a wider one"),
        (
            [str(small), "--widths", "32,40", "--depths", "2,1", "--heads", "2,3"],
            "got 3 at width 40, expected a divisor",
        ),
        ([str(small), "--widths", "32,40"], "plan: got widths, expected widths and depths"),
        ([str(small), "--steps", "1"], "argument --steps: got 1, expected 2 to"),
        ([str(small), "model.args.patch_size=2"], "tensors do not fit the model"),
        ([str(small), f"init={small}"], "beside a model that grows, expected its weights in model.args.weights"),
        ([str(small), "model.args.model=test_vit", "model.args.weights=null"], "model.args.weights: got none"),
    ):
        assert main(["grow", *arguments, "--run", run]) == 2, arguments
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert expected in line and not (tmp_path / "run" / "config.yaml").exists()
