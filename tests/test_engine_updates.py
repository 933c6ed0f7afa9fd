"""An update: its data and random numbers, rate and decay, parts and precision, and the averages."""

import dataclasses
import json
import math
import weakref
from itertools import islice

import pytest
import timm
import torch
from line_fits import ALONE, SETTINGS, Points, made, make_model, make_quiet_model, trained_with
from torch import nn

from stepsnet.engine.distributed import DistributedContext
from stepsnet.engine.optim import Schedule, build_optimizer
from stepsnet.engine.prepare import prepare
from stepsnet.engine.randomness import data_order, seed_step
from stepsnet.engine.train import train
from stepsnet.engine.update import Diverged, Updater
from stepsnet.errors import UserError
from stepsnet.run_folder.checkpoint import latest
from stepsnet.settings.config import TrainingSettings


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


@pytest.mark.parametrize(
    ("sizes", "scale"),
    [
        ({}, 1.0),
        ({"batch_size": 64, "lr_base_size": 16}, 4.0),
        ({"batch_size": 64, "lr_base_size": 16, "lr_base_scale": "sqrt"}, 2.0),
    ],
)
def test_the_schedule_written_out(sizes, scale):
    settings = TrainingSettings(epochs=10, lr=1.0, warmup_epochs=2, warmup_lr=0.1, min_lr=0.05, **sizes)
    optimizer = build_optimizer(make_model(), settings)
    schedule = Schedule(optimizer, settings, steps_per_epoch=7)
    for step in (0, 1, 13, 14, 40, 69, 3):  # in any order
        schedule.step_update(step)
        expected = 0.1 + step * (1.0 - 0.1) / 14
        if step >= 14:
            expected = 0.05 + 0.5 * (1.0 - 0.05) * (1 + math.cos(math.pi * step / 70))
        assert all(group["lr"] == pytest.approx(scale * expected) for group in optimizer.param_groups), step


def test_steps_of_the_rate_written_out():
    settings = TrainingSettings(epochs=12, lr=1.0, sched="multistep", milestones=(8, 11), warmup_epochs=0.5)
    settings = dataclasses.replace(settings, warmup_lr=0.1, decay_rate=0.1)
    optimizer = build_optimizer(make_model(), settings)
    schedule = Schedule(optimizer, settings, steps_per_epoch=10)
    wanted = {0: 0.1, 1: 0.28, 5: 1.0, 79: 1.0, 80: 0.1, 109: 0.1, 110: 0.01, 119: 0.01, 4: 0.82}
    for step, expected in wanted.items():
        schedule.step_update(step)
        assert all(group["lr"] == pytest.approx(expected) for group in optimizer.param_groups), step


def test_norms_and_biases_are_not_decayed():
    groups = build_optimizer(make_model(), SETTINGS).param_groups
    decayed = {parameter.ndim for group in groups if group["weight_decay"] for parameter in group["params"]}
    spared = {parameter.ndim for group in groups if not group["weight_decay"] for parameter in group["params"]}
    assert (decayed, spared) == ({2}, {1})


def test_accumulated_parts_make_the_same_update(tmp_path):
    whole, _, _ = trained_with(tmp_path / "whole", make_quiet_model)
    parts, _, events = trained_with(tmp_path / "parts", make_quiet_model, accumulation_steps=2)
    for ours, theirs in zip(parts.parameters(), whole.parameters()):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert "effective batch 4 = 1 rank × 2 accumulated × 2" in events[0]["text"]


def test_each_part_of_an_update_is_loaded_when_the_one_before_is_done(tmp_path):
    loaded, alive = [], []

    class Watched(Points):
        def batches(self, *place):
            for x, y in super().batches(*place):
                loaded.append(weakref.ref(x))
                yield x, y
                del x, y

        def loss(self, model, batch):
            alive.append(sum(one() is not None for one in loaded))
            return super().loss(model, batch)

    settings = dataclasses.replace(SETTINGS, accumulation_steps=4, epochs=1)
    train(make_model(), Watched(), settings, made(tmp_path), ALONE, report=lambda event: None)
    assert alive == [1] * 20


def test_an_update_without_all_of_its_parts_is_refused(tmp_path):
    class Short(Points):
        def batches(self, *place):
            yield from islice(super().batches(*place), 3)

    with pytest.raises(UserError, match="batches of Short: got 1 micro-batches for update 2, expected 2"):
        settings = dataclasses.replace(SETTINGS, accumulation_steps=2)
        train(make_model(), Short(), settings, made(tmp_path), ALONE, report=lambda event: None)


def test_averages_written_out_are_what_is_evaluated(tmp_path):
    weights = []

    class Watched(Points):
        def loss(self, model, batch):
            weights.append(model[0].weight.detach().clone())
            return super().loss(model, batch)

    settings = dataclasses.replace(SETTINGS, ema_decay=0.8)
    model = make_quiet_model()
    fitted = train(model, Watched(), settings, made(tmp_path), ALONE, report=lambda event: None)
    expected = weights[0]
    for after in [*weights[1:], model[0].weight.detach()]:
        expected = 0.8 * expected + 0.2 * after
    assert torch.allclose(fitted.weights["0.weight"], expected, atol=1e-6)
    found, _ = latest(tmp_path / "checkpoints")
    assert torch.equal(found.weights()["0.weight"], fitted.weights["0.weight"])


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.1), ("float16", 0.3)])
def test_half_precision_trains_close_to_float32(tmp_path, dtype, tolerance):
    _, exact, _ = trained_with(tmp_path / "exact", make_quiet_model)
    model, metrics, _ = trained_with(tmp_path / dtype, make_quiet_model, amp_dtype=dtype)
    assert model[0].weight.dtype == torch.float32
    assert metrics["val_loss"] == pytest.approx(exact["val_loss"], rel=tolerance) and metrics != exact
    scale = latest(tmp_path / dtype / "checkpoints")[0].state["scaler"].get("scale")
    assert (scale is None) if dtype == "bfloat16" else (1 <= scale <= 2.0**16)  # halved after an overflow


@pytest.mark.parametrize(
    "change", [{"accumulation_steps": 2}, {"amp_dtype": "bfloat16"}, {"amp_dtype": "float16"}], ids=str
)
def test_the_norm_of_the_gradient_is_that_of_whole_batches_in_float32(tmp_path, change):
    """By steps so small that an update which float16 skips changes nothing."""
    plain = {"opt": "momentum", "momentum": 0.0, "weight_decay": 0.0, "warmup_epochs": 0, "log_interval": 1}

    def norms(folder, **change):
        trained_with(folder, make_quiet_model, **plain, clip_grad=0.01, **change)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [line["grad_norm"] for line in lines if line["kind"] == "step"]

    exact, found = norms(tmp_path / "exact"), norms(tmp_path / "changed", **change)
    pairs = [pair for pair in zip(found, exact, strict=True) if pair[0] is not None]  # the scale is too large at first
    assert len(exact) == 15 and len(pairs) >= (10 if change.get("amp_dtype") == "float16" else 15)
    for ours, theirs in pairs:
        assert ours == pytest.approx(theirs, rel=0.05)


class Root(nn.Module):
    """Zeros, whose gradient is not finite."""

    def forward(self, x):
        return (0 * x).sqrt()


# float16's scale is 2^16 at first; it is halved with each update that is skipped, down to 1
@pytest.mark.parametrize(("dtype", "update"), [("float32", 1), ("float16", 17)])
def test_a_run_whose_gradients_are_never_finite_ends_and_names_the_last_of_them(tmp_path, dtype, update):
    def make():
        return nn.Sequential(nn.Linear(3, 8), Root(), nn.Linear(8, 1))

    said = f"gradient: got nan at update {update}, .*output is finite on rank 0, but the gradient of 0.bias is not;"
    with pytest.raises(Diverged, match=said) as raised:
        trained_with(tmp_path, make, amp_dtype=dtype, epochs=4)
    assert raised.value.step == update


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


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_channels_are_last_but_where_weights_are_sharded(parallel, monkeypatch):
    """FSDP raises NotImplementedError of weights that are not contiguous."""
    monkeypatch.setattr("stepsnet.engine.prepare.parallelize", lambda model, *_: model)
    settings = dataclasses.replace(SETTINGS, compile=True, parallel=parallel)
    model = timm.create_model("test_resnet", num_classes=2)
    prepare(model, settings, dataclasses.replace(ALONE, world_size=2))
    assert all(parameter.is_contiguous() for parameter in model.parameters()) == (parallel == "fsdp")


def test_gradients_are_clipped_to_the_settings_norm(tmp_path):
    class Once(Points):
        steps_per_epoch = 1

    plain = {"opt": "momentum", "momentum": 0.0, "weight_decay": 0.0, "warmup_epochs": 0, "log_interval": 1}
    settings = dataclasses.replace(SETTINGS, epochs=1, lr=0.05, clip_grad=0.01, **plain)
    model, before = make_quiet_model(), nn.utils.parameters_to_vector(make_quiet_model().parameters())
    train(model, Once(), settings, made(tmp_path), ALONE, report=lambda event: None)
    moved = (nn.utils.parameters_to_vector(model.parameters()) - before).norm().item()
    assert moved == pytest.approx(0.05 * 0.01, rel=1e-2)
    first, *_ = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(first)["grad_norm"] > 0.1  # before it is clipped


def test_the_settings_reach_the_optimizer():
    settings = dataclasses.replace(SETTINGS, weight_decay=0.3, layer_decay=0.5)
    model = timm.create_model("test_vit")
    groups = build_optimizer(model, settings).param_groups
    assert {group["lr_scale"] for group in groups} == {0.5**k for k in range(len(model.blocks) + 2)}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.3}
    sgd = dataclasses.replace(SETTINGS, opt="sgd", momentum=0.5)
    assert build_optimizer(make_model(), sgd).defaults["momentum"] == 0.5
    with pytest.raises(UserError, match="the model names no layers"):
        build_optimizer(make_model(), settings)


def test_an_update_seeds_each_part_of_each_rank(monkeypatch):
    seeded = []
    monkeypatch.setattr("stepsnet.engine.update.seed_step", lambda *place: seeded.append(place))
    model, task = make_quiet_model(), Points()
    optimizer = build_optimizer(model, SETTINGS)
    rank_1 = DistributedContext(1, 1, torch.device("cpu"))
    settings = dataclasses.replace(SETTINGS, accumulation_steps=2)
    update = Updater(model, task, optimizer, Schedule(optimizer, SETTINGS, 5), settings, rank_1, None)
    update(3, [(task.x[:2], task.y[:2]), (task.x[2:4], task.y[2:4])])
    assert seeded == [(SETTINGS.seed, 3, 1, part) for part in range(2)]
