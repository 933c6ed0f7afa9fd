"""The training loop: what resumes bit for bit, and what stops it."""

import dataclasses
import errno
import os
import shutil
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from line_fits import ALONE, SETTINGS, Killed, Points, Stopping, fit, lines_without_speed, made, make_model
from torch import nn

from stepsnet.analysis.residual_stream import measure_stream
from stepsnet.device import pick_device, pick_device_of_run
from stepsnet.engine.distributed import DistributedContext, init_distributed
from stepsnet.engine.interrupt import Interrupted
from stepsnet.engine.optim import build_optimizer
from stepsnet.engine.train import train
from stepsnet.engine.train_state import TrainState, find_checkpoint
from stepsnet.errors import UserError, exit_status
from stepsnet.run_folder.checkpoint import check_fit, latest, load_weights
from stepsnet.settings.config import TrainingSettings


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return fit(folder), folder


@pytest.mark.parametrize("place", [(0, 3), (1, 0), (1, 4), (2, 2)])
def test_a_killed_run_ends_as_if_it_had_not_been(tmp_path, whole, place):
    with pytest.raises(Killed):
        fit(tmp_path, Points(die_at=place))
    model, metrics, _ = fit(tmp_path)
    (expected, expected_metrics, _), folder = whole
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert metrics == expected_metrics
    assert lines_without_speed(tmp_path) == lines_without_speed(folder)
    states = [latest(path / "checkpoints")[0].state["optimizer"]["state"] for path in (tmp_path, folder)]
    assert states[0].keys() == states[1].keys() and states[0]
    for name in states[0]:
        assert all(torch.equal(states[0][name][key], states[1][name][key]) for key in states[1][name]), name


def test_a_stopped_run_resumes_inside_its_epoch(tmp_path, whole):
    with pytest.raises(Interrupted, match="after update 8") as stopped:
        fit(tmp_path, Stopping(at=8))  # the third of the second epoch
    assert stopped.value.status == 128 + signal.SIGTERM
    model, metrics, events = fit(tmp_path)
    assert {"kind": "note", "text": "resumed after update 8"} in events
    assert {"kind": "phase", "text": "epoch 3/3: evaluating"} in events  # which may take minutes, without a word
    (expected, expected_metrics, _), folder = whole
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters()))
    assert metrics == expected_metrics and lines_without_speed(tmp_path) == lines_without_speed(folder)


def test_a_log_that_is_moved_away_costs_no_checkpoint(tmp_path, whole):
    """Where it is put back before the run goes on, no line is lost."""
    log, aside = tmp_path / "metrics.jsonl", tmp_path / "aside"

    class Moving(Stopping):
        def loss(self, model, batch):
            if self.seen == self.at - 1:
                log.rename(aside)
            return super().loss(model, batch)

    rarely = dataclasses.replace(SETTINGS, log_interval=1000)
    with pytest.raises(Interrupted, match="after update 8"):
        fit(tmp_path, Moving(at=8), settings=rarely)
    lines = aside.read_bytes()
    aside.rename(log)
    _, metrics, events = fit(tmp_path, settings=rarely)
    assert metrics == whole[0][1] and log.read_bytes().startswith(lines) and lines
    assert not [event for event in events if "has lost lines" in event.get("text", "")]


def test_what_a_task_has_found_is_in_its_checkpoint(tmp_path):
    """Also numpy's numbers, which torch writes into a file that it then refuses to read."""

    class Finding(Points):
        found: tuple = ({},)

        def state_dict(self):
            return {"best": np.float64(0.5), **self.found[0]}

        def load_state_dict(self, state):
            self.found = (state,)

        def evaluate(self, model, shard, device):
            return {name: np.float64(value) for name, value in super().evaluate(model, shard, device).items()}

    with pytest.raises(Interrupted):
        fit(tmp_path, type("StoppingFinding", (Finding, Stopping), {})(at=8))  # in the second epoch
    task = Finding()
    fit(tmp_path, task)
    assert task.found == ({"best": 0.5},)
    task.found = ({"where": tmp_path},)
    with pytest.raises(
        UserError, match=r"state_dict of Finding: .*PosixPath is not JSON serializable, expected numbers"
    ):
        fit(tmp_path / "other", task)


def test_a_signal_that_also_ends_a_compiler_is_no_fault(tmp_path, whole):
    """Ctrl-C reaches every process of the terminal; the run goes on from its last checkpoint."""

    class Compiling(Stopping):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            if self.seen == self.at:
                raise RuntimeError("CppCompileError")
            return loss

    with pytest.raises(Interrupted, match=r"^stopped by SIGTERM; `stepsnet resume .*` goes on from there"):
        fit(tmp_path, Compiling(at=8))
    assert fit(tmp_path)[1] == whole[0][1]


def test_a_finished_run_is_left_as_it_is(whole):
    (_, metrics, _), folder = whole
    before = (folder / "metrics.jsonl").read_bytes()
    assert fit(folder)[1] == metrics
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_what_the_task_has_to_tell_comes_before_the_first_update(tmp_path):
    events = []
    task = Points(die_at=(0, 0))
    task.untold = ["one record was left out"]
    with pytest.raises(Killed):
        train(make_model(), task, SETTINGS, tmp_path, ALONE, report=events.append)
    assert [event["text"] for event in events if event["kind"] == "note"][-1] == "one record was left out"


def test_a_torn_checkpoint_is_passed_over(tmp_path):
    with pytest.raises(Killed):
        fit(tmp_path, Points(die_at=(2, 1)))
    last, older = sorted((tmp_path / "checkpoints").iterdir(), reverse=True)
    content = (last / "state.pt").read_bytes()
    (last / "state.pt").write_bytes(content[: len(content) // 2])
    found, passed_over = latest(tmp_path / "checkpoints")
    assert found.state["position"]["step"] == 5
    assert len(passed_over) == 1 and last.name in passed_over[0] and "checksum" in passed_over[0]
    (older / "model.safetensors").unlink()
    with pytest.raises(UserError, match="none of them is valid"):
        latest(tmp_path / "checkpoints")


def saved(folder, step, keep=2, best=None):
    model = make_model()
    optimizer = build_optimizer(model, SETTINGS)
    return TrainState(model, optimizer, None, ALONE, sharded=False).save(folder, step, {"position": {}}, keep, best)


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step in range(5):
        saved(tmp_path, step, best=1)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["step-00000001", "step-00000003", "step-00000004"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        saved(tmp_path / "file", 1)


def test_an_old_checkpoint_that_cannot_be_removed_stops_nothing(tmp_path, monkeypatch):
    """On NFS a file that somebody has open stays in its folder until it is closed."""
    remove = os.rmdir

    def not_empty(path, **kwargs):
        if "step-00000000" in str(path):
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        remove(path, **kwargs)

    monkeypatch.setattr(os, "rmdir", not_empty)
    for step in range(3):
        saved(tmp_path, step)
    assert latest(tmp_path)[0].path.name == "step-00000002" and (tmp_path / "step-00000000").exists()
    monkeypatch.undo()
    saved(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_copy_beside_the_checkpoints_stays_as_it_is(tmp_path):
    for step in (10, 20):
        saved(tmp_path, step)
    copy = shutil.copytree(tmp_path / "step-00000010", tmp_path / "step-00000010-mine")
    find_checkpoint(tmp_path, ALONE)
    saved(tmp_path, 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == [copy.name, "step-00000020", "step-00000030"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (RuntimeError("[enforce fail at inline_container.cc:671]"), r"writing failed, with \d+\.\d GiB free"),
    ],
)
def test_what_was_written_half_is_no_checkpoint(tmp_path, monkeypatch, error, said):
    saved(tmp_path, 1)

    def full_disk(*args, **kwargs):
        raise error

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(UserError, match=f"step-00000002: {said}"):
        saved(tmp_path, 2)
    assert latest(tmp_path)[0].path.name == "step-00000001"


def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path):
    with pytest.raises(UserError, match="got nan at update 8"):
        fit(tmp_path, Points(poison_at=(1, 2)))
    found, _ = latest(tmp_path / "checkpoints")
    assert found.state["position"]["step"] == 5
    assert all(tensor.isfinite().all() for tensor in found.weights().values())


def test_errors_name_what_was_expected(tmp_path):
    with pytest.raises(UserError, match=r"opt: got 'adamww'.*adamw"):
        build_optimizer(make_model(), TrainingSettings(opt="adamww"))
    with pytest.raises(UserError, match="device: got 'abacus'"):
        pick_device("abacus")
    with pytest.raises(UserError, match="device: got 'cpu:99', expected cpu"):
        pick_device("cpu:99")
    assert pick_device("cpu:0").type == "cpu"
    with init_distributed("cpu:0") as context:
        assert context.device.type == "cpu"
    with pytest.raises(UserError, match=r"1 tensors.*0\.weight \(8, 4\), expected \(8, 3\)"):
        check_fit(make_model(), {**make_model().state_dict(), "0.weight": torch.zeros(8, 4)})
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match=r"cannot read .*bad\.safetensors"):
        load_weights(tmp_path / "bad.safetensors")


def test_the_first_module_that_is_not_finite_is_named(tmp_path):
    class Explodes(nn.Module):
        def forward(self, x):
            return x / 0.0

    def make():
        return nn.Sequential(nn.Linear(3, 8), Explodes(), nn.Linear(8, 1))

    with pytest.raises(UserError, match=r"at update 1, .*first module whose output is not finite is 1;"):
        fit(made(tmp_path), make=make)


def test_a_signal_at_an_epochs_end_does_not_wait_for_the_evaluation(tmp_path, whole):
    class Unevaluated(Stopping):
        def evaluate(self, model, shard, device):
            assert self.seen < 10
            return super().evaluate(model, shard, device)

    with pytest.raises(Interrupted, match="after update 10"):
        fit(tmp_path, Unevaluated(at=10))  # the last of the second epoch
    model, metrics, _ = fit(tmp_path)
    (expected, expected_metrics, _), folder = whole
    assert metrics == expected_metrics and lines_without_speed(tmp_path) == lines_without_speed(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_a_signal_in_an_evaluation_stops_it_and_loses_no_update(tmp_path, whole):
    class Evaluating(Points):
        passes = 0

        @torch.no_grad()
        def evaluate(self, model, shard, device):
            for _ in range(4):
                error = ((model(self.x) - self.y) ** 2).mean().item()
                self.passes += 1
                if self.passes == 6:  # the second of the second epoch
                    os.kill(os.getpid(), signal.SIGTERM)
            return {"loss": error}

    task = Evaluating()
    with pytest.raises(Interrupted, match="after update 10"):
        fit(tmp_path, task)
    assert task.passes == 6
    model, metrics, events = fit(tmp_path)
    assert {"kind": "note", "text": "resumed after update 10"} in events
    (expected, expected_metrics, _), folder = whole
    assert metrics == expected_metrics and lines_without_speed(tmp_path) == lines_without_speed(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_what_rank_0_alone_cannot_write_is_told_to_the_others(tmp_path, monkeypatch):
    """At a start and at an epoch's end; they would wait for it in the next exchange."""
    told = []

    def on_main(context, function):
        try:
            return function()
        except UserError as error:
            told.append(str(error))
            raise

    class Unwritable(Points):
        def evaluate(self, model, shard, device):
            (folder / "metrics.jsonl").unlink()
            (folder / "metrics.jsonl").mkdir()
            return super().evaluate(model, shard, device)

    monkeypatch.setattr(DistributedContext, "on_main", on_main)
    folder = made(tmp_path / "later")
    with pytest.raises(UserError, match="metrics: cannot write"):
        fit(folder, Unwritable())
    assert len(told) == 1
    with pytest.raises(UserError, match="metrics: cannot write"):
        fit(folder)
    assert len(told) == 2
    with pytest.raises(UserError, match="wandb is not installed"):
        monkeypatch.setitem(sys.modules, "wandb", None)
        fit(made(tmp_path / "tracked"), settings=dataclasses.replace(SETTINGS, tracker="wandb"))
    assert len(told) == 3


def test_a_batch_that_does_not_fit_says_what_to_lower(tmp_path):
    class Huge(Points):
        def loss(self, model, batch):
            return torch.empty(2**60).sum(), {}  # more than any machine has

    with pytest.raises(UserError, match=r"memory: a forward pass of 4 samples does not fit .*accumulation_steps"):
        fit(made(tmp_path), Huge())


def test_a_monitored_metric_has_to_be_listed(tmp_path):
    task = Points()
    task.monitor = "lossy"
    with pytest.raises(UserError, match="monitor of Points: got 'lossy', expected a listed metric"):
        train(make_model(), task, SETTINGS, tmp_path, ALONE, report=print)


def test_the_best_of_a_loss_is_the_lowest(tmp_path):
    class Scripted(Points):
        losses = iter((3.0, 1.0, 2.0))

        def evaluate(self, model, shard, device):
            return {"loss": next(self.losses)}

    settings = dataclasses.replace(SETTINGS, keep_checkpoints=1)
    result = train(make_model(), Scripted(), settings, tmp_path, ALONE, report=lambda event: None)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert (result.best, kept) == (1.0, ["step-00000010", "step-00000015"])


def test_a_resumed_run_goes_on_with_its_loss_scale(tmp_path):
    half = dataclasses.replace(SETTINGS, amp_dtype="float16")
    fit(tmp_path / "whole", settings=half)
    with pytest.raises(Interrupted):
        fit(tmp_path / "two", Stopping(at=8), half)
    fit(tmp_path / "two", settings=half)
    ours, theirs = (latest(tmp_path / name / "checkpoints")[0].state["scaler"] for name in ("two", "whole"))
    assert ours == theirs


def test_a_task_without_an_update_an_epoch_is_refused(tmp_path):
    task = Points()
    task.steps_per_epoch = 0
    with pytest.raises(UserError, match="steps_per_epoch of Points: got 0 with batches of 4, expected at least 1"):
        fit(tmp_path, task)


def test_an_evaluation_whose_data_fail_loses_no_update(tmp_path, whole):
    class Unreadable(Points):
        def evaluate(self, model, shard, device):
            raise UserError("data: 9 of 10 images cannot be decoded, expected fewer")

    with pytest.raises(UserError, match="9 of 10 images"):
        fit(tmp_path, Unreadable())
    model, _, events = fit(tmp_path)
    assert {"kind": "note", "text": "resumed after update 5"} in events
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole[0][0].parameters(), strict=True))


def test_a_stream_that_does_not_fit_costs_no_epoch(tmp_path, monkeypatch):
    def huge(*_):
        torch.empty(2**60)  # more than any machine has

    monkeypatch.setattr("stepsnet.engine.train.stream_line_of", huge)
    _, metrics, events = fit(tmp_path, settings=dataclasses.replace(SETTINGS, stream_epochs=1))
    notes = [event["text"] for event in events if event["kind"] == "note" and event["text"].startswith("stream: ")]
    assert len(notes) == 1 and "does not fit into memory" in notes[0] and "val_loss" in metrics


def test_a_measurement_that_fails_leaves_no_gradients(tmp_path):
    def backward_that_does_not_fit(model):
        value = model(torch.ones(4, 3)).sum()
        value.register_hook(lambda gradient: torch.empty(2**60))  # more than any machine has
        return value

    blocks = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = nn.Sequential(blocks, nn.Linear(3, 1))
    model(torch.ones(4, 3)).sum().backward()
    with pytest.raises(RuntimeError):
        measure_stream(model, backward_that_does_not_fit)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_block_that_stands_twice_is_in_a_checkpoint_once(tmp_path):
    def make():
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        return nn.Sequential(block, block, nn.Linear(3, 1))

    with pytest.raises(Interrupted):
        fit(tmp_path, Stopping(at=8), make=make)
    model, _, _ = fit(tmp_path, make=make)
    expected, _, _ = fit(tmp_path / "whole", make=make)
    assert all(map(torch.equal, model.state_dict().values(), expected.state_dict().values()))
    assert model[0][1].num_batches_tracked == 2 * 15


def test_an_evaluation_that_does_not_fit_loses_no_update(tmp_path, whole):
    class Huge(Points):
        def evaluate(self, model, shard, device):
            return {"loss": torch.empty(2**60).sum()}  # more than any machine has

    message = (
        r"memory: the evaluation after epoch 1 does not fit .*the epoch's updates are saved, and resuming begins with"
    )
    with pytest.raises(UserError, match=message):
        fit(tmp_path, Huge())
    model, metrics, events = fit(tmp_path)
    assert {"kind": "note", "text": "resumed after update 5"} in events
    (expected, expected_metrics, _), folder = whole
    assert metrics == expected_metrics and lines_without_speed(tmp_path) == lines_without_speed(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.fixture
def four_ranks(monkeypatch):
    """torchrun's rank 1 of four on a machine of two accelerators, without NCCL; what is asked of the group."""
    calls = []
    found_by = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    ranks = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in {**ranks, **found_by}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("stepsnet.engine.distributed.pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: calls.append(index))
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, name=name: calls.append(name))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    world = SimpleNamespace(abort=lambda: calls.append("abort"))
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=world))
    return calls


def test_a_rank_that_fails_does_not_wait_for_the_others(four_ranks):
    """NCCL's group is destroyed by all ranks together: the one that failed would never say why."""
    with init_distributed("cuda") as context:
        assert (context.rank, context.device) == (1, torch.device("cuda", 1))
    assert four_ranks == [1, "init_process_group", "destroy_process_group"]
    four_ranks.clear()
    with pytest.raises(UserError, match="mine"), init_distributed("cuda"):
        raise UserError("mine")
    assert four_ranks == [1, "init_process_group", "abort"]


def test_more_ranks_than_devices_are_one_line(four_ranks, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    message = "torchrun: got 4 ranks on a machine with 2 devices, expected at most one rank per device"
    with pytest.raises(UserError, match=message):
        init_distributed("cuda").__enter__()
    assert four_ranks == []


@pytest.mark.parametrize(
    ("variables", "got"),
    [
        ({"MASTER_ADDR": None}, "got RANK=1 and WORLD_SIZE=4 without MASTER_ADDR, expected all"),
        ({"MASTER_PORT": None}, "got RANK=1 and WORLD_SIZE=4 without MASTER_PORT, expected all"),
        ({"RANK": "16"}, "got RANK=16 and WORLD_SIZE=4, expected all"),
        ({"RANK": "gold"}, "got RANK=gold and WORLD_SIZE=4, expected all"),
    ],
)
def test_variables_that_are_not_torchruns_are_one_line(variables, got, four_ranks, monkeypatch):
    for name, value in variables.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^torchrun: {got}"):
        init_distributed("cuda").__enter__()
    assert four_ranks == []


@pytest.mark.parametrize("error", [RuntimeError("[x.cc:1] Connection closed by peer"), dist.DistBackendError("NCCL")])
def test_the_end_of_another_rank_is_no_fault_of_this_one(error, monkeypatch, capsys):
    def run():
        raise error

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert exit_status(run) == 2
    assert capsys.readouterr().err.startswith("stepsnet: another rank has ended, and its own line says why (")


def test_a_run_of_another_machines_device_can_be_used(monkeypatch):
    assert pick_device_of_run("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert pick_device_of_run("xpu:3") == torch.device("cpu")
    with pytest.raises(UserError, match="device: got 'xpu:3', expected an available device: "):
        pick_device("xpu:3")
