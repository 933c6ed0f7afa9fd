"""What a killed process, a full disk or somebody's hand leaves in a run folder, and what the run makes of it."""

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from forks import KILLED, forked, status_of
from line_fits import SETTINGS, Points, Stopping, fit, lines_without_speed, made, make_model

from stepsnet.engine.interrupt import Interrupted
from stepsnet.errors import UserError
from stepsnet.files.writing import is_temporary, write_atomically
from stepsnet.run_folder.checkpoint import latest, write_weights
from stepsnet.run_folder.folder import read_weights
from stepsnet.run_folder.records import read_metrics

ONE = dataclasses.replace(SETTINGS, epochs=2, keep_checkpoints=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return fit(folder, settings=ONE)[0].state_dict(), folder


@pytest.fixture
def stopped(tmp_path):
    """A run that was stopped between its last update and the evaluation, and has one checkpoint."""
    with pytest.raises(Interrupted, match=rf"after update 10; `stepsnet resume {tmp_path / 'run'}` goes on"):
        fit(tmp_path / "run", Stopping(at=10), settings=ONE)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000005")  # the best so far
    return tmp_path / "run"


def killed_at(number, function):
    """Run a function in a process that dies at the n-th event from when it begins to write a checkpoint.

    Returns whether it died, which it does not after the last event.
    """
    seen = -1

    def is_reached(event, arguments):
        nonlocal seen
        seen += seen >= 0 or (event == "os.mkdir" and ".step-" in str(arguments[0]))
        return seen > number

    return status_of(forked(function, is_reached)) == KILLED


def test_a_checkpoint_that_replaces_another_can_be_killed_at_any_moment(stopped, whole, tmp_path):
    weights, expected = whole
    events = 0
    while True:
        run = tmp_path / f"killed-{events}"
        shutil.copytree(stopped, run)
        died = killed_at(events, lambda run=run: fit(run, settings=ONE) and None)
        model, _, told = fit(run, settings=ONE)
        assert {"kind": "note", "text": "resumed after update 10"} in told, events
        assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items()), events
        assert lines_without_speed(run) == lines_without_speed(expected), events
        events += died
        if not died:
            break
    assert events > 15


def test_a_checkpoint_is_not_given_up_for_a_later_one_that_is_damaged(tmp_path, whole):
    three = dataclasses.replace(ONE, keep_checkpoints=3, checkpoint_interval=4)
    with pytest.raises(Interrupted, match="after update 9"):
        fit(tmp_path, Stopping(at=9), settings=three)
    for step in (8, 9):
        (tmp_path / "checkpoints" / f"step-{step:08d}" / "state.pt").write_bytes(b"")
    with pytest.raises(Interrupted, match="after update 6"):
        fit(tmp_path, Stopping(at=1), settings=ONE)
    model, _, told = fit(tmp_path, settings=ONE)
    assert {"kind": "note", "text": "resumed after update 6"} in told
    assert all(torch.equal(tensor, whole[0][name]) for name, tensor in model.state_dict().items())


def test_a_checkpoint_is_read_under_its_temporary_name(stopped):
    (stopped / "checkpoints" / "step-00000010").rename(stopped / "checkpoints" / ".step-00000010")
    assert read_weights(stopped).keys() == make_model().state_dict().keys()
    (stopped / "checkpoints" / ".step-00000010" / "state.pt").unlink()
    with pytest.raises(UserError, match=r"none of them is valid: .*\.step-00000010"):
        read_weights(stopped)


@pytest.mark.parametrize("sums", ["", "0" * 64 + "  state.pt\n", "no sum"])
def test_checksums_that_do_not_cover_a_checkpoint_are_not_believed(stopped, sums):
    (stopped / "checkpoints" / "step-00000010" / "SHA256SUMS").write_text(sums)
    with pytest.raises(UserError, match="none of them is valid"):
        latest(stopped / "checkpoints")


@pytest.mark.parametrize(
    ("spoil", "left"),
    [
        (lambda text: text[: len(text) // 2], 1),
        (lambda text: "", 0),
        (lambda text: "\0" * 40 + text[40:], 1),
        (lambda text: None, 0),
    ],
)
def test_metrics_that_were_lost_are_said_and_cost_no_weights(tmp_path, whole, spoil, left):
    run = tmp_path / "run"
    shutil.copytree(whole[1], run)
    log = run / "metrics.jsonl"
    spoiled = spoil(log.read_text())
    if spoiled is None:
        log.unlink()
    else:
        log.write_text(spoiled)
    model, metrics, told = fit(run, settings=ONE)  # it has come to its end, and its result is still to be written
    assert all(torch.equal(tensor, whole[0][name]) for name, tensor in model.state_dict().items())
    assert metrics == fit(whole[1], settings=ONE)[1] and metrics["val_loss"]
    assert [event["text"] for event in told if "has lost lines of the 10 updates" in event["text"]]
    assert len(read_metrics(run)) == left and "\0" not in log.read_text()
    assert "lost" not in str(fit(run, settings=dataclasses.replace(ONE, epochs=3))[2][3:])
    assert [line["step"] for line in read_metrics(run)][left:] == [15]
    assert "lost" not in str(fit(run, settings=dataclasses.replace(ONE, epochs=3))[2])


def test_a_disk_that_fills_up_is_one_line_and_the_run_goes_on_later(tmp_path):
    log = made(tmp_path / "run") / "metrics.jsonl"

    class Filling(Points):
        def evaluate(self, model, shard, device):
            if log.exists():
                log.rename(tmp_path / "written")
                log.symlink_to("/dev/full")
            return super().evaluate(model, shard, device)

    with pytest.raises(UserError, match=r"metrics: cannot write .*metrics\.jsonl: No space left on device"):
        fit(tmp_path / "run", Filling())
    (tmp_path / "written").rename(log)
    assert fit(tmp_path / "run")[1]["val_loss"]


def test_a_disk_that_is_full_at_the_checksums_of_the_first_checkpoint_leaves_none(tmp_path, monkeypatch):
    write = Path.write_text

    def full(path, *arguments):
        if "SHA256SUMS" not in path.name:
            return write(path, *arguments)
        path.touch()  # an entry of a folder still has its place
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(UserError, match=r"checkpoint: cannot write .*step-00000005: No space left on device"):
            fit(tmp_path / "run")
    assert latest(tmp_path / "run" / "checkpoints") == (None, [])
    assert fit(tmp_path / "run")[1]["val_loss"]


@pytest.mark.parametrize("what", ["weights", "val_loss"])
def test_what_is_not_finite_at_the_end_is_no_result(tmp_path, what):
    """No update follows that would show it in its loss; and an evaluation does not show every weight."""

    class Short(Points):
        steps_per_epoch = 1

        def evaluate(self, model, shard, device):
            found = super().evaluate(model, shard, device)
            return {key: math.nan for key in found} if what == "val_loss" else found

    def make():
        model = make_model()
        model.register_parameter("unused", torch.nn.Parameter(torch.tensor(torch.inf)))
        return model

    settings = dataclasses.replace(SETTINGS, epochs=1, warmup_epochs=0)
    with pytest.raises(UserError, match=rf"{what}: got nan at update 1, .*a lower lr \(now 0.05\)"):
        fit(tmp_path / "run", Short(), settings, make)
    assert not list((tmp_path / "run").rglob("step-*"))


def test_a_planted_link_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("mine")
    for name in ("config.yaml", f".config.yaml.{os.getpid()}"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    write_atomically(tmp_path / "config.yaml", "new")
    write_weights(tmp_path / "model.safetensors", {"a": torch.zeros(2)})
    assert (tmp_path / "mine").read_text() == "mine" and (tmp_path / "config.yaml").read_text() == "new"
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask()


def umask():
    before = os.umask(0)
    os.umask(before)
    return before


def test_others_may_read_a_checkpoint_where_the_umask_lets_them(tmp_path):
    fit(tmp_path / "run")
    files = [path for path in (tmp_path / "run" / "checkpoints").glob("step-*/*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "state.pt"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask()}


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "summary.json").write_text("old")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"cannot write .*summary\.json: No space left on device"):
            write_atomically(tmp_path / "summary.json", json.dumps({}))
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert (tmp_path / "summary.json").read_text() == "old"
    left = tmp_path / f".config.yaml.{0:016x}.tmp"
    assert is_temporary(left) and not is_temporary(tmp_path / ".config.yaml.old")
