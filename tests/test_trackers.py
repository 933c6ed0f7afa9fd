"""Where a run's metrics go besides its folder."""

import json
import math
import sys

import pytest
from line_fits import SETTINGS, lines_without_speed, trained_with
from torch import nn

from stepsnet.engine.metrics_log import MetricsLog
from stepsnet.engine.tracking import open_trackers
from stepsnet.errors import UserError


def test_metrics_go_to_tensorboard_and_where_they_are_sent(tmp_path, monkeypatch):
    """TensorBoard's own reader finds each line; a service that cannot be had here is stood in for by its two calls."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sent = []

    class Service:
        @classmethod
        def init(cls, **kwargs):
            sent.append(kwargs)
            return cls()

        def log(self, values, step):
            sent.append((step, values))

        def finish(self):
            finished.append(len(sent))

    finished = []
    monkeypatch.setitem(sys.modules, "trackio", Service)
    _, _, _ = trained_with(tmp_path / "run", tracker="trackio", log_interval=2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    epochs = [(line["step"], line["val_loss"]) for line in lines if line["kind"] == "epoch"]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("val_loss")] == [(s, pytest.approx(v)) for s, v in epochs]
    assert [e.step for e in events.Scalars("grad_norm")] == [2, 4, 6, 8, 10, 12, 14]
    name = sent[0]["name"]
    assert (
        name.startswith("run-")
        and (tmp_path / "run" / "tracker.txt").read_text() == name
        and sent[0]["config"]["lr"] == SETTINGS.lr
    )
    assert [(step, values["val_loss"]) for step, values in sent[1:] if "val_loss" in values] == epochs
    assert finished == [len(sent)]  # once, after the last line
    sent.clear()  # another folder of that name is another run; the same one is found again, wherever it is
    (tmp_path / "other").mkdir()
    trained_with(tmp_path / "other" / "run", tracker="trackio")
    assert sent[0]["name"] not in (name, "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    sent.clear()
    trained_with(tmp_path / "moved", tracker="trackio")
    assert sent[0]["name"] == name and sent[0]["resume"] == "allow"
    names = set()  # runs that get the tracker when they go on
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        trained_with(tmp_path / folder / "run", epochs=1)
        sent.clear()
        trained_with(tmp_path / folder / "run", tracker="trackio")
        names.add(sent[0]["name"])
    assert len(names) == 2 and "run" not in names


def test_what_a_start_before_the_first_checkpoint_has_sent_is_forgotten(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (5, 3):  # the first was killed
        (tracker,) = open_trackers("tensorboard", tmp_path, 0, {})
        for step in range(1, steps + 1):
            tracker.track({"loss": 1.0}, step)
        tracker.close(True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]


def test_each_line_of_metrics_is_json(tmp_path):
    """The norm of gradients is not finite in an update that float16 leaves out."""
    MetricsLog(tmp_path / "metrics.jsonl", True).add({"kind": "step", "step": 1, "loss": 2.0, "grad_norm": math.inf})
    line = {"kind": "step", "step": 1, "loss": 2.0, "grad_norm": None}
    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail) == line


def test_tensorboard_by_name_is_required(tmp_path, monkeypatch):
    """It is written wherever it is installed; who names it wants to hear that it is not."""
    trained_with(tmp_path / "named", tracker="tensorboard")
    assert list((tmp_path / "named" / "tensorboard").iterdir())
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    trained_with(tmp_path / "none")
    assert not (tmp_path / "none" / "tensorboard").exists()
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", None)  # an installation that is broken
    trained_with(tmp_path / "broken")
    with pytest.raises(UserError, match=r"tensorboard is not installed; .*\[tensorboard\]"):
        trained_with(tmp_path / "missing", tracker="tensorboard")


def test_a_tracker_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"tracker: wandb is not installed; `pip install '\.\[wandb\]'`"):
        trained_with(tmp_path, tracker="wandb")


def test_a_service_hears_how_a_run_has_ended(tmp_path, monkeypatch):
    """Weights & Biases takes a second run of one process, as in a notebook, for the first that was never finished."""
    finished = []

    class Service:
        @classmethod
        def init(cls, **kwargs):
            return cls()

        def log(self, values, step):
            pass

        def finish(self, exit_code):
            finished.append(exit_code)
            raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "wandb", Service)
    trained_with(tmp_path / "one", tracker="wandb")
    with pytest.raises(RuntimeError, match="shapes"):
        trained_with(tmp_path / "two", make=lambda: nn.Linear(5, 1), tracker="wandb")
    assert finished == [0, 1]


@pytest.mark.parametrize("error", [ConnectionError("the service\nis away"), RuntimeError("the space is sleeping")])
def test_a_service_that_fails_stops_no_training(error, tmp_path, monkeypatch):
    """It is told once; the record of the run is its own."""
    seen = []

    class Service:
        @classmethod
        def init(cls, **kwargs):
            return cls()

        def log(self, values, step):
            seen.append(step)
            if step >= 4:
                raise error

        def finish(self):
            seen.append("finish")

    monkeypatch.setitem(sys.modules, "trackio", Service)
    _, _, events = trained_with(tmp_path / "run", tracker="trackio", log_interval=2)
    assert seen == [2, 4, "finish"]
    said = [event["text"] for event in events if "tracker:" in event.get("text", "")]
    text = " ".join(str(error).split())
    path = tmp_path / "run" / "metrics.jsonl"
    assert said == [f"tracker: trackio failed at update 4 and gets no more metrics: {text}; all of them are in {path}"]
    trained_with(tmp_path / "plain", log_interval=2)
    assert lines_without_speed(tmp_path / "run") == lines_without_speed(tmp_path / "plain")
