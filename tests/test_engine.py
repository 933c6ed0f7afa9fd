"""The training loop: what resumes bit for bit, and what stops it."""

import dataclasses
import json
import math
import os
import signal
import sys

import pytest
import timm
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from stepsnet.checkpoint import check_fit, latest, load_weights
from stepsnet.config import TrainingSettings
from stepsnet.engine.distributed import DistributedContext, pick_device
from stepsnet.engine.interrupt import Interrupted
from stepsnet.engine.optim import build_optimizer, build_schedule
from stepsnet.engine.prepare import compile_blocks, prepare
from stepsnet.engine.randomness import data_order, seed_step
from stepsnet.engine.train import train
from stepsnet.engine.train_state import TrainState
from stepsnet.errors import UserError
from stepsnet.models.blocks import blocks_of, recompute_blocks

SETTINGS = TrainingSettings(
    epochs=3, batch_size=4, lr=0.05, warmup_epochs=1, clip_grad=1.0, weight_decay=0.1, device="cpu", stream_epochs=0
)


ALONE = DistributedContext(0, 1, torch.device("cpu"))
CLOCKS = ("samples_per_second", "memory_gib")


class Points:
    """A line to be fitted; a dropout in the model shows whether randomness is a function of the step."""

    steps_per_epoch, batch_size, monitor = 5, 4, "score"
    unit, units_per_sample = "points", 1

    def __init__(self, die_at=None, poison_at=None):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(20, 3, generator=generator)
        self.y = self.x.sum(-1, keepdim=True)
        self.die_at, self.poison_at, self.seen, self.untold = die_at, poison_at, 0, []

    def batches(self, epoch, start, shard, device):
        order = torch.from_numpy(data_order(SETTINGS.seed, epoch, 20))
        for number in range(start, self.steps_per_epoch):
            if self.die_at == (epoch, number):
                raise Killed
            scale = math.nan if self.poison_at == (epoch, number) else 1.0
            for positions in shard.micro_batches(number, self.batch_size):
                torch.rand(3)  # a task may draw as it likes
                chosen = order[list(positions)]
                yield self.x[chosen] * scale, self.y[chosen]

    def notices(self):
        told, self.untold = self.untold, []
        return told

    def loss(self, model, batch):
        error = ((model(batch[0]) - batch[1]) ** 2).mean()
        return error, {"top1": -error.detach()}

    @torch.no_grad()
    def evaluate(self, model, shard, device):
        error = ((model(self.x) - self.y) ** 2).mean().item()
        return {"loss": error, "score": -error}


class Stopping(Points):
    """SIGTERM comes in the middle of an update, counted from 1."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def loss(self, model, batch):
        self.seen += 1
        if self.seen == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch)


class Killed(Exception):
    pass


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 1))


def fit(folder, task=None, settings=SETTINGS):
    model, events = make_model(), []
    torch.rand(7)  # what was drawn before must not matter
    folder.mkdir(exist_ok=True)
    result = train(model, task or Points(), settings, folder, ALONE, report=events.append)
    return model, result.metrics, events


def lines_without_speed(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]


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
    (expected, expected_metrics, _), folder = whole
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters()))
    assert metrics == expected_metrics and lines_without_speed(tmp_path) == lines_without_speed(folder)


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


def test_what_was_written_half_is_no_checkpoint(tmp_path, monkeypatch):
    saved(tmp_path, 1)

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(UserError, match="step-00000002: No space left on device"):
        saved(tmp_path, 2)
    assert latest(tmp_path)[0].path.name == "step-00000001"


def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path):
    with pytest.raises(UserError, match="got nan at update 8"):
        fit(tmp_path, Points(poison_at=(1, 2)))
    found, _ = latest(tmp_path / "checkpoints")
    assert found.state["position"]["step"] == 5
    assert all(tensor.isfinite().all() for tensor in found.weights().values())


def test_the_data_order_is_a_function_of_seed_and_epoch():
    order = data_order(3, 5, 100)
    assert sorted(order) == list(range(100))
    assert (order == data_order(3, 5, 100)).all()
    assert (order != data_order(3, 6, 100)).any() and (order != data_order(4, 5, 100)).any()


def test_what_an_update_draws_is_a_function_of_seed_step_and_rank():
    def draw(*place):
        seed_step(*place)
        return torch.rand(4).tolist()

    assert draw(1, 2, 0) == draw(1, 2, 0)
    assert len({tuple(draw(*place)) for place in [(1, 2, 0), (2, 2, 0), (1, 3, 0), (1, 2, 1)]}) == 4


def test_the_schedule_written_out():
    settings = TrainingSettings(epochs=10, lr=1.0, warmup_epochs=2, warmup_lr=0.1, min_lr=0.05)
    optimizer = build_optimizer(make_model(), settings)
    schedule = build_schedule(optimizer, settings, steps_per_epoch=7)
    for step in (0, 1, 13, 14, 40, 69, 3):  # in any order
        schedule.step_update(step)
        expected = 0.1 + step * (1.0 - 0.1) / 14
        if step >= 14:
            expected = 0.05 + 0.5 * (1.0 - 0.05) * (1 + math.cos(math.pi * step / 70))
        assert all(group["lr"] == pytest.approx(expected) for group in optimizer.param_groups), step


def test_steps_of_the_rate_written_out():
    settings = TrainingSettings(epochs=12, lr=1.0, sched="multistep", milestones=(8, 11), warmup_epochs=0.5)
    settings = dataclasses.replace(settings, warmup_lr=0.1, decay_rate=0.1)
    optimizer = build_optimizer(make_model(), settings)
    schedule = build_schedule(optimizer, settings, steps_per_epoch=10)
    wanted = {0: 0.1, 1: 0.28, 5: 1.0, 79: 1.0, 80: 0.1, 109: 0.1, 110: 0.01, 119: 0.01, 4: 0.82}
    for step, expected in wanted.items():
        schedule.step_update(step)
        assert all(group["lr"] == pytest.approx(expected) for group in optimizer.param_groups), step


def test_norms_and_biases_are_not_decayed():
    groups = build_optimizer(make_model(), SETTINGS).param_groups
    decayed = {parameter.ndim for group in groups if group["weight_decay"] for parameter in group["params"]}
    spared = {parameter.ndim for group in groups if not group["weight_decay"] for parameter in group["params"]}
    assert (decayed, spared) == ({2}, {1})


def test_errors_name_what_was_expected(tmp_path):
    with pytest.raises(UserError, match=r"opt: got 'adamww'.*adamw"):
        build_optimizer(make_model(), TrainingSettings(opt="adamww"))
    with pytest.raises(UserError, match="device: got 'abacus'"):
        pick_device("abacus")
    with pytest.raises(UserError, match=r"1 tensors.*0\.weight \(8, 4\), expected \(8, 3\)"):
        check_fit(make_model(), {**make_model().state_dict(), "0.weight": torch.zeros(8, 4)})
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match=r"cannot read .*bad\.safetensors"):
        load_weights(tmp_path / "bad.safetensors")


def trained_with(folder, **changes):
    return fit(folder, settings=dataclasses.replace(SETTINGS, **changes))


def make_quiet_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def test_accumulated_parts_make_the_same_update(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "make_model", make_quiet_model)
    whole, _, _ = trained_with(tmp_path / "whole")
    parts, _, events = trained_with(tmp_path / "parts", accumulation_steps=2)
    for ours, theirs in zip(parts.parameters(), whole.parameters()):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert "effective batch 4 = 1 rank × 2 accumulated × 2" in events[0]["text"]


def test_averages_written_out_are_what_is_evaluated(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "make_model", make_quiet_model)
    weights = []

    class Watched(Points):
        def loss(self, model, batch):
            weights.append(model[0].weight.detach().clone())
            return super().loss(model, batch)

    settings = dataclasses.replace(SETTINGS, ema_decay=0.8)
    model = make_model()
    fitted = train(model, Watched(), settings, made(tmp_path), ALONE, report=lambda event: None)
    expected = weights[0]
    for after in [*weights[1:], model[0].weight.detach()]:
        expected = 0.8 * expected + 0.2 * after
    assert torch.allclose(fitted.weights["0.weight"], expected, atol=1e-6)
    found, _ = latest(tmp_path / "checkpoints")
    assert torch.equal(found.weights()["0.weight"], fitted.weights["0.weight"])


def made(folder):
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.1), ("float16", 0.3)])
def test_half_precision_trains_close_to_float32(tmp_path, monkeypatch, dtype, tolerance):
    monkeypatch.setattr(sys.modules[__name__], "make_model", make_quiet_model)
    _, exact, _ = trained_with(tmp_path / "exact")
    model, metrics, _ = trained_with(tmp_path / dtype, amp_dtype=dtype)
    assert model[0].weight.dtype == torch.float32
    assert metrics["val_loss"] == pytest.approx(exact["val_loss"], rel=tolerance) and metrics != exact
    scale = latest(tmp_path / dtype / "checkpoints")[0].state["scaler"].get("scale")
    assert (scale is None) if dtype == "bfloat16" else (1 <= scale <= 2.0**16)  # halved after an overflow


def test_the_first_module_that_is_not_finite_is_named(tmp_path, monkeypatch):
    class Explodes(nn.Module):
        def forward(self, x):
            return x / 0.0

    monkeypatch.setattr(
        sys.modules[__name__], "make_model", lambda: nn.Sequential(nn.Linear(3, 8), Explodes(), nn.Linear(8, 1))
    )
    with pytest.raises(UserError, match=r"at update 1, .*first module whose output is not finite is 1;"):
        fit(made(tmp_path))


def test_recomputed_blocks_give_the_same_run(tmp_path, monkeypatch):
    calls = []

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

        def forward(self, x):
            calls.append(torch.is_grad_enabled())
            return x + self.dropout(self.linear(x))

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 1))

    monkeypatch.setattr(sys.modules[__name__], "make_model", make)
    plain, _, _ = trained_with(made(tmp_path / "plain"))
    passes = len(calls)
    again, _, _ = trained_with(made(tmp_path / "again"), grad_checkpointing=1.0)
    assert len(calls) - passes == passes + 2 * 15  # each of 2 blocks once more in 15 updates
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("settings", [{"grad_checkpointing": 0.5}, {"compile": True}])
def test_a_model_without_blocks_says_so(tmp_path, settings):
    with pytest.raises(UserError, match="no sequence of blocks was found"):
        trained_with(tmp_path, **settings)


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


def test_a_tied_weight_is_averaged_once_an_update():
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(5, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 5, bias=False)}
    )
    model["head"].weight = model["embedding"].weight
    trained, _ = prepare(model, dataclasses.replace(SETTINGS, ema_decay=0.9), ALONE)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    trained.averages.update(model)
    for parameter, old in zip(trained.averages.module.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, old + 0.1)


def test_the_blocks_of_chosen_steps_are_recomputed(tmp_path):
    model = timm.create_model("test_steps_deit", widths=(32, 48, 64), depths=(2, 3, 1), img_size=32)
    expected = [step for step, depth in enumerate((2, 3, 1), 1) for _ in range(depth)]
    for chosen in ((1,), (2, 3), (3, 1)):
        found = blocks_of(model, chosen)
        assert found == [block for block, step in zip(blocks_of(model), expected) if step in chosen]
    passes = dict.fromkeys(range(6), 0)

    def progress_bar(number):
        def hook(module, inputs):
            passes[number] += 1

        return hook

    for number, block in enumerate(blocks_of(model)):
        block.norm1.register_forward_pre_hook(progress_bar(number))

    class Pictures(Points):
        steps_per_epoch = 1

        def batches(self, epoch, start, shard, device):
            yield torch.randn(4, 3, 32, 32), torch.zeros(4, dtype=torch.long)

        def loss(self, model, batch):
            return nn.functional.cross_entropy(model(batch[0]), batch[1]), {}

        def evaluate(self, model, shard, device):
            return {"score": 0.0}

    settings = dataclasses.replace(SETTINGS, epochs=1, warmup_epochs=0, grad_checkpointing=(2,))
    train(model, Pictures(), settings, made(tmp_path), ALONE, report=lambda event: None)
    assert list(passes.values()) == [1, 1, 2, 2, 2, 1]


def test_steps_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"grad_checkpointing: got steps \[2\], expected some of the model's 0"):
        trained_with(tmp_path, grad_checkpointing=(2,))


def test_a_batch_that_does_not_fit_says_what_to_lower(tmp_path):
    class Huge(Points):
        def loss(self, model, batch):
            return torch.empty(2**60).sum(), {}  # more than any machine has

    with pytest.raises(UserError, match=r"memory: a forward pass of 4 samples does not fit .*accumulation_steps"):
        fit(made(tmp_path), Huge())


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

    monkeypatch.setitem(sys.modules, "trackio", Service)
    _, _, _ = trained_with(tmp_path / "run", tracker="trackio", log_interval=2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    epochs = [(line["step"], line["val_loss"]) for line in lines if line["kind"] == "epoch"]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("val_loss")] == [(s, pytest.approx(v)) for s, v in epochs]
    assert [e.step for e in events.Scalars("grad_norm")] == [2, 4, 6, 8, 10, 12, 14]
    assert sent[0]["name"] == "run" and sent[0]["config"]["lr"] == SETTINGS.lr
    assert [(step, values["val_loss"]) for step, values in sent[1:] if "val_loss" in values] == epochs


def test_a_tracker_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"tracker: wandb is not installed, expected `pip install stepsnet\[wandb\]`"):
        trained_with(tmp_path, tracker="wandb")


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("drop_path_rate", [0.0, 0.1])
def test_the_number_of_graphs_does_not_grow_with_the_depth(drop_path_rate, recomputed):
    counts, sizes = [], []
    for depths in ((2, 1, 1), (9, 4, 3)):
        torch._dynamo.reset()
        model = timm.create_model(
            "test_steps_deit", widths=(32, 48, 64), depths=depths, img_size=32, drop_path_rate=drop_path_rate
        )
        counter = CompileCounter()
        blocks = blocks_of(model) if recomputed else []
        compile_blocks(model, blocks, backend=counter)
        recompute_blocks(blocks)
        model(torch.randn(2, 3, 32, 32)).sum().backward()
        counts.append(counter.frame_count)
        sizes.append(len(blocks_of(model)))
    assert sizes == [4, 16] and counts[0] == counts[1] > 0, counts
