"""Blocks of a model that are recomputed or compiled one by one."""

import copy
import dataclasses
import pickle

import pytest
import timm
import torch
from line_fits import ALONE, SETTINGS, Points, made, trained_with
from timm.layers import DropPath
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from stepsnet.engine.train import train
from stepsnet.errors import UserError
from stepsnet.models.blocks import blocks_of, recompute_blocks, step_sequences
from stepsnet.models.compilation import SharedDropPath, compile_blocks
from stepsnet.models.stepify.sequence import StepSequence
from stepsnet.steps import StepsNet


def test_recomputed_blocks_give_the_same_run(tmp_path):
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

    plain, _, _ = trained_with(made(tmp_path / "plain"), make)
    passes = len(calls)
    again, _, _ = trained_with(made(tmp_path / "again"), make, grad_checkpointing=1.0)
    assert len(calls) - passes == passes + 2 * 15  # each of 2 blocks once more in 15 updates
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["blocks", "StepsNet", "StepSequence"])
def test_running_statistics_count_a_recomputed_pass_once(kind, tmp_path):
    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

        def forward(self, x):
            return x + self.norm(self.linear(x)).relu()

    def make(recomputed=False):
        torch.manual_seed(0)
        blocks = nn.Sequential(Block(4), Block(8))
        if kind != "blocks":
            steps = StepsNet([blocks[:1], blocks[1:]], (4, 8)) if kind == "StepsNet" else None
            blocks = steps or StepSequence(blocks, (4, 8), (1, 1))
            blocks.set_grad_checkpointing(recomputed)
        else:
            blocks[0] = Block(8)
        return nn.Sequential(nn.Linear(3, 8), blocks, nn.Linear(8, 1))

    plain, _, _ = trained_with(made(tmp_path / "plain"), make)
    if kind == "blocks":
        again, _, _ = trained_with(made(tmp_path / "again"), make, grad_checkpointing=1.0)
    else:
        again, _, _ = trained_with(made(tmp_path / "again"), lambda: make(True))
    assert all(map(torch.equal, plain.state_dict().values(), again.state_dict().values()))
    assert any("running_mean" in name for name in plain.state_dict())


def test_recomputed_norms_take_a_second_backward():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    plain, x = copy.deepcopy(block), torch.randn(6, 4)
    expected = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    recompute_blocks([block])
    y = block(x).square().sum()
    for _ in range(2):
        found = torch.autograd.grad(y, list(block.parameters()), retain_graph=True)
        torch.testing.assert_close(found, expected)
    assert block[1].num_batches_tracked == 1 and torch.equal(block[1].running_mean, plain[1].running_mean)


@pytest.mark.parametrize("settings", [{"grad_checkpointing": 0.5}, {"compile": True}])
def test_a_model_without_blocks_says_so(tmp_path, settings):
    with pytest.raises(UserError, match="no sequence of blocks was found"):
        trained_with(tmp_path, **settings)


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

    class Images(Points):
        steps_per_epoch = 1

        def batches(self, epoch, start, shard, device):
            yield torch.randn(4, 3, 32, 32), torch.zeros(4, dtype=torch.long)

        def loss(self, model, batch):
            return nn.functional.cross_entropy(model(batch[0]), batch[1]), {}

        def evaluate(self, model, shard, device):
            return {"loss": 0.0}

    settings = dataclasses.replace(SETTINGS, epochs=1, warmup_epochs=0, grad_checkpointing=(2,))
    train(model, Images(), settings, made(tmp_path), ALONE, report=lambda event: None)
    assert list(passes.values()) == [1, 1, 2, 2, 2, 1]


def test_steps_that_are_not_there_are_refused(tmp_path):
    expected = "expected numbers from 1 to the model's number of steps, which is 0"
    with pytest.raises(UserError, match=rf"grad_checkpointing: got steps \[2\], {expected}"):
        trained_with(tmp_path, grad_checkpointing=(2,))


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("drop_path_rate", [0.0, 0.1])
def test_there_is_a_graph_a_width_whatever_the_depth(drop_path_rate, recomputed):
    for depths in ((2, 1, 1), (9, 4, 3)):
        torch._dynamo.reset()
        counters.clear()
        model = timm.create_model(
            "test_steps_deit", widths=(32, 48, 64), depths=depths, img_size=32, drop_path_rate=drop_path_rate
        )
        counter = CompileCounter()
        blocks = blocks_of(model) if recomputed else []
        compile_blocks(model, blocks, backend=counter)
        recompute_blocks(blocks)
        model(torch.randn(2, 3, 32, 32)).sum().backward()
        assert counter.frame_count == 3 and not counters["graph_break"]
        with torch.no_grad():
            model.eval()(torch.randn(2, 3, 32, 32))
        assert not counters["graph_break"]
        assert len(blocks_of(model)) == sum(depths)


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights():
    x = torch.randn(2, 3, 32, 32)
    for recomputed in (False, True):
        torch._dynamo.reset()
        model = timm.create_model("test_steps_deit", widths=(32,), depths=(2,), img_size=32).eval()
        compile_blocks(model, blocks_of(model) if recomputed else [], backend="eager")
        copied = copy.deepcopy(model)
        expected = model(x)
        torch.testing.assert_close(copied(x), expected)
        nn.init.zeros_(blocks_of(copied)[0].mlp.fc2.weight)
        assert torch.equal(model(x), expected) and not torch.allclose(copied(x), expected)


def test_every_kind_of_block_has_its_graph():
    """More of them than dynamo allows for one function: eight."""
    torch._dynamo.reset()
    counters.clear()
    model = timm.create_model(
        "test_steps_swin",
        img_size=112,
        window_size=7,
        drop_path_rate=0.1,
        widths=((16,), (16, 24, 32), (32, 48, 64), (64,)),  # two stages with a step of 32 channels
        num_heads=((1,), (1, 2, 2), (2, 2, 4), (4,)),
        depths=((1,), (2, 2, 2), (2, 2, 2), (1,)),
    )
    kinds = {
        (id(network), any(block.shift_size))
        for steps in step_sequences(model)
        for network in steps.networks
        for block in network
    }
    counter = CompileCounter()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        compile_blocks(model, backend=counter)
        model.train()(torch.randn(2, 3, 112, 112)).sum().backward()
    assert counter.frame_count == len(kinds) > 8 and not counters["graph_break"]


def test_a_compiled_model_is_copied_and_pickled():
    model = timm.create_model("test_steps_deit", widths=(32, 48), depths=(1, 1), img_size=32)
    x = torch.randn(2, 3, 32, 32)
    expected = model(x)
    compile_blocks(model, backend="eager")
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    torch.testing.assert_close(model(x), expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for other in others:
        torch.testing.assert_close(other(x), expected)
        assert all(block.forward.__self__ is block for block in blocks_of(other))


class DropsElsewhere(nn.Module):
    """Stochastic depth in a part that has no parameters."""

    def __init__(self):
        super().__init__()
        self.fc, self.end = nn.Linear(8, 8), nn.Sequential(DropPath(0.5), nn.Identity())

    def forward(self, x):
        return x + self.end(self.fc(x))


def test_stochastic_depth_in_a_part_without_parameters():
    model = nn.Sequential(DropsElsewhere(), DropsElsewhere())
    x = torch.randn(2, 8)
    expected = model.eval()(x)
    compile_blocks(model, backend="eager")
    torch.testing.assert_close(model(x), expected)
    assert isinstance(model[1].end[0], SharedDropPath)


def test_stochastic_depth_in_a_graph_is_timms():
    rate, shape = 0.3, (4000, 2, 3)
    shared, theirs = SharedDropPath(rate, True, torch.device("cpu")), DropPath(rate)
    factors = [path.train()(torch.ones(shape)) for path in (shared, theirs)]
    for factor in factors:
        assert torch.equal(factor, factor[:, :1, :1].expand(shape))  # a sample is kept whole
        torch.testing.assert_close(factor.unique(), torch.tensor([0.0, 1 / (1 - rate)]))
        assert abs(factor[:, 0, 0].mean() - 1) < 4 * (rate / (1 - rate) / shape[0]) ** 0.5
    assert torch.equal(shared.eval()(factors[0]), factors[0]) and not shared.state_dict()
    moved = copy.deepcopy(shared).to("meta").to_empty(device="cpu").half()
    assert (moved.kept.device.type, moved.kept.item(), moved.kept.dtype) == ("cpu", shared.kept.item(), torch.float32)
    shared.drop_prob = 1.0
    assert not shared.train()(torch.ones(shape)).any()


def test_compiled_stochastic_depth_is_recomputed_as_it_was():
    gradients = []
    for recomputed in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = timm.create_model("test_steps_deit", widths=(32,), depths=(4,), img_size=32, drop_path_rate=0.5)
        blocks = blocks_of(model)
        compile_blocks(model, blocks if recomputed else [])
        recompute_blocks(blocks if recomputed else [])
        torch.manual_seed(1)
        model(torch.ones(8, 3, 32, 32)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)
