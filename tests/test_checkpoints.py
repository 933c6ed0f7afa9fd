"""The folder of a checkpoint in place of a run's: the best one by the validation score can be used as the last can."""

import json

import pytest
import torch

import stepsnet
from stepsnet.cli import main
from stepsnet.errors import UserError
from stepsnet.output.console import Display
from stepsnet.recipes import find_recipe
from stepsnet.run_folder.checkpoint import load_weights
from stepsnet.run_folder.folder import read_weights, run_of
from stepsnet.run_folder.records import read_metrics
from stepsnet.runs.evaluate import evaluate_run
from stepsnet.runs.train import train_run
from stepsnet.settings.overrides import override

CHANGES = ["epochs=6", "batch_size=128", "model.args.depths=[1,1,1]", "stream_epochs=0", "ema_decay=0.5", "lr=0.02"]
# at a rate that is too high, so that the best score is not the last
CHANGES += ["keep_checkpoints=1", "lr_base_size=null", "clip_grad=null", "sched=multistep", "warmup_epochs=0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    train_run(override(find_recipe("digits/tiny"), CHANGES), folder, Display())
    return folder


def epochs_of(run):
    return [line for line in read_metrics(run) if line["kind"] == "epoch"]


def test_each_kept_checkpoint_scores_as_it_did(run, capsys):
    summary = json.loads((run / "summary.json").read_text())
    scores = {line["step"]: line["val_top1"] for line in epochs_of(run)}
    kept = {int(path.name.rpartition("-")[2]): path for path in (run / "checkpoints").iterdir()}
    best = summary["best_update"]
    assert kept.keys() == {best, max(scores)} and scores[best] == max(scores.values())
    assert summary["metrics"]["best_val_top1"] == scores[best]
    for step, folder in kept.items():
        assert run_of(folder) == run
        assert evaluate_run(folder)["top1"] == scores[step]
        assert main(["eval", str(folder), "--json"]) == 0
        told = capsys.readouterr()
        assert json.loads(told.out)["top1"] == scores[step]
        assert f"these are the weights of {run} after update {step}" in told.err
        averages = load_weights(folder / "averages.safetensors")
        assert all(torch.equal(tensor, averages[name]) for name, tensor in read_weights(folder).items())


def test_it_is_loaded_and_started_from(run, tmp_path):
    (folder,) = (path for path in (run / "checkpoints").iterdir() if path.name.endswith(f"{best_of(run):08}"))
    weights = load_weights(folder / "averages.safetensors")
    model = stepsnet.load(folder).model
    assert all(torch.equal(tensor.cpu(), weights[name]) for name, tensor in model.state_dict().items())
    begun = override(find_recipe("digits/tiny"), [*CHANGES, f"init={folder}", "epochs=1", "lr=0", "min_lr=0"])
    train_run(begun, tmp_path / "next", Display())
    for name, tensor in load_weights(tmp_path / "next" / "model.safetensors").items():
        assert torch.equal(tensor, weights[name]), name


def best_of(run):
    return json.loads((run / "summary.json").read_text())["best_update"]


def test_what_needs_a_whole_run_refuses_it(run, tmp_path, capsys):
    folder = next((run / "checkpoints").iterdir())
    for command in (["push", str(folder), "--out", str(tmp_path / "out")], ["report", str(folder)]):
        assert main(command) == 2 and capsys.readouterr().err.count("\n") == 1
    assert main(["resume", str(folder)]) == 2
    assert "expected the folder of a run (it has no config.yaml)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="expected a checkpoint that exists"):
        read_weights(folder.with_name("step-00000001"))
    elsewhere = tmp_path / "checkpoints" / "step-00000001"  # beside no run
    elsewhere.mkdir(parents=True)
    assert main(["eval", str(elsewhere)]) == 2
    assert "expected the folder of a run (it has no config.yaml)" in capsys.readouterr().err
