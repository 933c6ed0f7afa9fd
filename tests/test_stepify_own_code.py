"""stepify around a user's own code: what their models and blocks may do, and one line for what they may not."""

import re
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import Block
from torch import nn

import stepsnet
from stepsnet import UserError
from stepsnet.analysis.residual_stream import measure_stream
from stepsnet.models.blocks import blocks_of
from stepsnet.models.stepify.adapters import ADAPTERS
from stepsnet.residual.channels import channel_dim

X = torch.randn(2, 5, 32)
PLAN = {"widths": (16, 32), "depths": (4, 2)}


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return x + self.fc(x)


def residuals(count=4, kind=Residual):
    return nn.Sequential(*(kind(32) for _ in range(count)))


def timm_blocks(count=4):
    return nn.Sequential(*(Block(32, 2) for _ in range(count)))


class Around(nn.Module):
    """A user's model around blocks of timm; its own initialization wants an argument."""

    def __init__(self):
        super().__init__()
        self.blocks = timm_blocks()

    def init_weights(self, std):
        raise AssertionError("never called")

    def forward(self, x):
        return self.blocks(x)


def test_an_initialization_that_wants_arguments_is_not_called():
    result = stepsnet.stepify(Around(), 2, example=X, plan=PLAN)
    assert result(X).shape == X.shape and all(bool(p.isfinite().all()) for p in result.parameters())


class StartedAnew(nn.Module):
    """A user's model that starts the weights of its blocks behind their constructors."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(32, 32)
        self.blocks = residuals()
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.02)
            nn.init.zeros_(module.bias)

    def forward(self, x):
        return self.blocks(self.embed(x))


def test_new_blocks_of_a_constructor_start_as_the_model_starts_its_blocks():
    model = StartedAnew()
    nn.init.ones_(model.embed.weight)  # as a trained one
    result = stepsnet.stepify(model, 2, example=X, plan=PLAN)
    for block in result.blocks:
        assert bool((block.fc.weight == 0.02).all()) and not block.fc.bias.any()
    assert torch.equal(result.embed.weight, model.embed.weight)


class ToldItsScale(nn.Module):
    """A block whose constructor takes more than the width, which shows in its weights alone."""

    def __init__(self, width, scale=1.0):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.gamma = nn.Parameter(scale * torch.ones(width))

    def forward(self, x):
        return x + self.gamma * self.fc(x)


def test_new_blocks_of_a_constructor_start_at_the_values_of_all_blocks():
    model = nn.Sequential(*(ToldItsScale(32, 1e-4) for _ in range(4)))
    for block in model:
        nn.init.zeros_(block.fc.weight)  # behind the constructor
    for block in stepsnet.stepify(model, 2, example=X, plan=PLAN):
        assert bool((block.block.gamma == 1e-4).all()) and not block.block.fc.weight.any() and block.block.fc.bias.any()
    with torch.no_grad():
        for block in model:
            block.gamma.normal_()  # as in a trained one, which says nothing of how it started
    assert all(bool((block.block.gamma == 1).all()) for block in stepsnet.stepify(model, 2, example=X, plan=PLAN))


@dataclass
class Attention:
    causal: bool = True


@dataclass
class Config:
    attention: Attention


class Configured(ToldItsScale):
    """A block whose constructor takes an object, which is compared to the end."""

    def __init__(self, width, config=None):
        super().__init__(width)
        self.config, self.seen = config or Config(Attention()), deque([torch.zeros(2)])


def test_a_constructor_that_was_told_something_deep_inside_an_object_is_not_called_without_it():
    model = nn.Sequential(*(Configured(32, Config(Attention(causal=False))) for _ in range(4)))
    with pytest.raises(UserError, match=r"Configured.*register_block"):
        stepsnet.stepify(model, 2, example=X, plan=PLAN)


def test_hooks_of_old_blocks_are_not_on_new_ones():
    model, called = timm_blocks(), []
    model[0].register_forward_hook(lambda *_: called.append(0))
    model[0].mlp.register_forward_pre_hook(lambda *_: called.append(1))
    result = stepsnet.stepify(model, 2, example=X, plan=PLAN)
    result(X)
    assert not called
    model(X)
    assert called == [1, 0]


def test_a_norm_without_weights_gets_the_new_width():
    model = timm_blocks()
    for block in model:
        block.norm1 = nn.LayerNorm(32, elementwise_affine=False)
    result = stepsnet.stepify(model, 2, example=X, plan=PLAN)
    assert [block.block.norm1.normalized_shape for block in result] == [(16,)] * 4 + [(32,)] * 2
    assert result(X).shape == X.shape


@pytest.mark.parametrize("function", [stepsnet.stepify, stepsnet.grow])
def test_a_model_made_in_inference_mode_can_be_trained(function):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=16, depth=4, embed_dim=32, num_heads=2)
    with torch.inference_mode():
        result = function(model, steps=2)
    result(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in result.parameters())


class OfSquares(nn.Module):
    """Its patches say their size as timm's do, but as one number."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Module()
        self.patch_embed.img_size, self.patch_embed.proj = 32, nn.Conv2d(3, 32, 16, 16)
        self.blocks = timm_blocks()

    def forward(self, x):
        return self.blocks(self.patch_embed.proj(x).flatten(2).mT)


def test_the_size_of_images_may_be_one_number():
    assert stepsnet.stepify(OfSquares(), 2, plan=PLAN)(torch.randn(2, 3, 32, 32)).shape == (2, 4, 32)


class Unfinished(Residual):
    def forward(self, x):
        return x + self.fc(x) * self.scale


def test_what_a_users_code_gets_wrong_is_one_line():
    with pytest.raises(UserError, match=r"Sequential does not take the example input .*no attribute 'scale'"):
        stepsnet.stepify(residuals(kind=Unfinished), 2, example=X)
    with pytest.raises(UserError, match=r"steps: got 3, but one block in each costs 1\.\d\d times as much as"):
        stepsnet.stepify(residuals(1), 3, example=X)
    try:
        stepsnet.register_block(Residual, lambda block, width, heads: None)
        with pytest.raises(UserError, match=r"Residual at width .*: rebuild returned NoneType, expected a block"):
            stepsnet.stepify(residuals(), 2, example=X)
        stepsnet.register_block(Residual, lambda block, width, heads: Residual(width), heads="attn.num_heads")
        with pytest.raises(
            UserError, match=r"heads='attn.num_heads': there is no such attribute in Residual, expected"
        ):
            stepsnet.stepify(residuals(), 2, example=X)
    finally:
        del ADAPTERS[Residual]


class Numbered(Residual):
    """A block with its number, under the name that transformers has for it."""

    def __init__(self, width, layer_idx):
        super().__init__(width)
        self.layer_idx = layer_idx


class ChannelsLast(nn.Module):
    """A block of (B, H, W, C) or (B, N, C) with a convolution, and a mixer inside of which is wider."""

    def __init__(self, width, kind=nn.Conv2d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.conv = kind(2 * width, 2 * width, 3, padding=1, groups=2 * width)

    def forward(self, x):
        return x + self.down(self.conv(self.up(self.norm(x)).movedim(-1, 1)).movedim(1, -1))


class Along(ChannelsLast):
    def __init__(self, width):
        super().__init__(width, nn.Conv1d)


@pytest.mark.parametrize("kind, shape", [(ChannelsLast, (16, 16)), (ChannelsLast, (64, 64)), (Along, (64,))])
def test_channels_are_where_the_norms_have_them(kind, shape):
    """Not in dimension 1, though there are convolutions, and though these have as many channels as the image rows."""
    x = torch.randn(2, *shape, 32)
    model = nn.Sequential(*(kind(32) for _ in range(4)))
    ours = stepsnet.stepify(model, 2, example=x)
    assert ours.dim == -1 and ours(x).shape == x.shape
    assert {block.width for block in measure_stream(model, lambda model: model(x).square().mean())} == {32}


class Bottleneck(nn.Module):
    """A block of (B, C, H, W) whose first norm has fewer channels, as many as the image may have columns."""

    def __init__(self, width):
        super().__init__()
        inner = width // 4
        self.reduce, self.norm1 = nn.Conv2d(width, inner, 1), nn.BatchNorm2d(inner)
        self.expand, self.norm2 = nn.Conv2d(inner, width, 1), nn.BatchNorm2d(width)

    def forward(self, x):
        return x + self.norm2(self.expand(self.norm1(self.reduce(x)).relu()))


def test_the_norms_inside_of_a_bottleneck_are_not_those_of_the_stream():
    model, x = nn.Sequential(*(Bottleneck(64) for _ in range(4))), torch.randn(2, 64, 16, 16)
    assert {block.width for block in measure_stream(model, lambda model: model(x).square().mean())} == {64}
    assert stepsnet.stepify(model, 2, example=x).dim == 1


class Convolved(nn.Module):
    """A block of (B, N, C) that begins with no convolution, and whose sequence is as long as it is wide."""

    def __init__(self, width):
        super().__init__()
        self.up, self.conv = nn.Linear(width, width), nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv(self.up(x).mT).mT


class Heads(nn.Module):
    """A block of (B, H, W, C) without convolutions whose first norm is that of heads, of as many channels as rows."""

    def __init__(self, width):
        super().__init__()
        self.inner, self.norm, self.fc = nn.LayerNorm(16), nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        y = self.fc(self.norm(x))
        return x + self.inner(y.unflatten(-1, (-1, 16))).flatten(-2)


def test_blocks_without_convolutions_have_their_channels_last():
    model, x = nn.Sequential(*(Heads(64) for _ in range(4))), torch.randn(2, 16, 16, 64)
    assert {block.width for block in measure_stream(model, lambda model: model(x).square().mean())} == {64}
    assert channel_dim(model[0], x.shape) == -1


def test_a_series_whose_channels_nothing_decides_has_them_last_where_a_block_begins_with_no_convolution():
    x = torch.randn(2, 32, 32)
    assert stepsnet.stepify(nn.Sequential(*(Convolved(32) for _ in range(4))), 2, example=x).dim == -1


def test_blocks_of_timm_that_have_their_channels_last():
    """Whose constructor takes their width, where nothing else was said to it."""
    model = timm.create_model("mambaout_femto", depths=(1, 1, 3, 1), dims=(8, 16, 32, 64), num_classes=5)
    ours = stepsnet.stepify(model, 2, stages=(3,))
    assert (ours.stages[2].blocks.dim, ours.stages[2].blocks.width) == (-1, 32)
    assert ours(torch.randn(1, 3, 64, 64)).shape == (1, 5)


def test_channels_that_are_elsewhere_are_hinted_at(monkeypatch):
    monkeypatch.setitem(ADAPTERS, ChannelsLast, None)  # so that it goes when the test ends
    model, x = nn.Sequential(*(ChannelsLast(32) for _ in range(4))), torch.randn(1, 32, 32, 32)
    hint = r"taken to be in dimension 1, dim= of register_block sets another"
    with pytest.raises(UserError, match=hint):
        stepsnet.stepify(model, 2, example=x)
    stepsnet.register_block(ChannelsLast, lambda block, width, heads: ChannelsLast(width))
    with pytest.raises(UserError, match=hint):
        stepsnet.stepify(model, 2, example=x)
    stepsnet.register_block(ChannelsLast, lambda block, width, heads: ChannelsLast(width), dim=-1)
    assert stepsnet.stepify(model, 2, example=x).widths[-1] == 32
    first = measure_stream(model, lambda model: model(x).square().mean())[0]
    assert first.gamma == pytest.approx((x.std(-1).mean() / model[0](x).std(-1).mean()).item(), rel=1e-4)


def test_blocks_of_ones_own_are_numbered_anew():
    """As places in a cache, for example: two layers with one number would overwrite each other there."""
    stepsnet.register_block(Numbered, lambda block, width, heads: Numbered(width, block.layer_idx))
    model = nn.Sequential(*(Numbered(32, index) for index in range(6)))
    result = stepsnet.stepify(model, 3, example=X)
    assert [block.block.layer_idx for block in result] == list(range(len(result))) and len(result) > 6
    odd = nn.Sequential(*(Numbered(32, 2 * index + 1) for index in range(6)))  # no places
    numbers = [block.block.layer_idx for block in stepsnet.stepify(odd, 3, example=X)]
    assert numbers == sorted(numbers) and set(numbers) == {1, 3, 5, 7, 9, 11}
    stepsnet.register_block(Numbered, lambda block, width, heads: Numbered(width, 100))  # set by the function itself
    assert {block.block.layer_idx for block in stepsnet.stepify(model, 3, example=X)} == {100}


class Told(Residual):
    """A block that was told something, has a number, and drops with a rate of its own."""

    def __init__(self, width, told, number=0, rate=0.0):
        super().__init__(width)
        self.told, self.number, self.drop = told, number, nn.Dropout(rate)

    def forward(self, x):
        return x + self.drop(self.fc(x))


class Kind(Enum):
    LOCAL, GLOBAL = "local", "global"


def doubled(factor):
    return lambda x: factor * x


@dataclass(slots=True)
class Window:
    shift: int


def read_path(i):
    """Of which only the first was asked for its text, which it has noted since."""
    path = Path("ab"[i % 2])
    if i == 0:
        str(path)
    return path


TURNS = {
    "a list": lambda i: [0, 2 * (i % 2)],
    "a mapping": lambda i: {"shift": i % 2},
    "an enumeration": lambda i: (Kind.LOCAL, Kind.GLOBAL)[i % 2],
    "a slice": lambda i: slice(i % 2, None),
    "a type of numbers": lambda i: (torch.float16, torch.bfloat16)[i % 2],
    "a function": lambda i: (nn.functional.relu, nn.functional.gelu)[i % 2],
    "a function of a function": lambda i: doubled(i % 2),
    "a partial function": lambda i: partial(nn.functional.gelu, approximate=("none", "tanh")[i % 2]),
    "an object": lambda i: SimpleNamespace(shift=i % 2),
    "an object with slots": lambda i: Window(i % 2),
    "a pattern": lambda i: re.compile("ab"[i % 2]),
    "a path": read_path,
    "a tensor": lambda i: torch.tensor([i % 2]),
    "an array": lambda i: np.array([i % 2]),
}


def told_blocks(kind, depth, plan, rates=False):
    stepsnet.register_block(Told, lambda block, w, heads: Told(w, block.told, block.number, block.drop.p))
    said = [TURNS[kind](i) for i in range(depth)]
    rate = 0.3 / max(1, depth - 1) if rates else 0.0
    model = nn.Sequential(*(Told(32, one, i if rates else 0, rate * i) for i, one in enumerate(said)))
    return said, stepsnet.stepify(model, plan=plan, example=X).blocks


@pytest.mark.parametrize("kind", TURNS)
def test_blocks_that_take_turns_go_on_to(kind):
    said, blocks = told_blocks(kind, 4, {"widths": (16, 32), "depths": (5, 3)})
    assert [block.told is said[i % 2] or block.told == said[i % 2] for i, block in enumerate(blocks)] == [True] * 8


@pytest.mark.parametrize("depth", [2, 3, 6])
def test_rates_are_spread_anew_over_blocks_that_take_turns(depth):
    """Whether or not each has a number; of two blocks which differ in a list and a rate, the list takes turns."""
    said, blocks = told_blocks("a list", depth, {"widths": (16, 32), "depths": (5, 3)}, rates=True)
    assert [block.told for block in blocks] == [said[i % 2] for i in range(8)]
    assert [block.drop.p for block in blocks] == pytest.approx([0.3 * i / 7 for i in range(8)])
    assert [block.number for block in blocks] == list(range(8))


def test_blocks_that_are_special_at_both_ends_stay_there():
    """The last like the first, as of global attention at both ends, is no period of the others' number."""
    stepsnet.register_block(Told, lambda block, w, heads: Told(w, block.told))
    model = nn.Sequential(*(Told(32, told) for told in ("ends", "between", "between", "between", "between", "ends")))
    blocks = stepsnet.stepify(model, plan={"widths": (16, 32), "depths": (6, 4)}, example=X).blocks
    assert [block.told for block in blocks] == ["ends", *["between"] * 8, "ends"]


class Windowed(Residual):
    """A block with a mask, and with what its passes have changed: statistics, and a counter of its own."""

    def __init__(self, width, mask, seen):
        super().__init__(width)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("mask", mask)
        self.register_buffer("seen", seen)

    def forward(self, x):
        return x + self.mask @ self.fc(self.norm(x))


def test_masks_take_turns_whatever_else_training_has_put_into_buffers():
    stepsnet.register_block(Windowed, lambda block, width, heads: Windowed(width, block.mask, block.seen), dim=-1)
    masks = [torch.ones(5, 5), torch.eye(5)]
    for count in ("none", "one", "own"):
        seen = {"none": lambda i: None, "one": lambda i: torch.ones(()), "own": lambda i: torch.tensor(float(i**2))}
        model = nn.Sequential(*(Windowed(32, masks[i % 2].clone(), seen[count](i)) for i in range(6)))
        for block in model:
            block.norm.running_mean.normal_()
        blocks = stepsnet.stepify(model, plan={"widths": (16, 32), "depths": (5, 3)}, example=X).blocks
        assert [torch.equal(block.mask, masks[i % 2]) for i, block in enumerate(blocks)] == [True] * 8, count


class Spectral(Residual):
    """A block with a norm of another type than the rest, and with weights and a buffer of complex numbers."""

    def __init__(self, width):
        super().__init__(width)
        self.norm = nn.LayerNorm(width)
        del self.fc
        self.fc = nn.Linear(width, width)
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.complex64))
        self.register_buffer("turn", torch.full((1,), 1j))

    def forward(self, x):
        spectrum = (self.turn * self.weight * self.norm(x.float())).imag  # of the weights alone
        return x + self.fc(spectrum.to(self.fc.weight.dtype)).to(x.dtype)


@pytest.mark.parametrize("register", [True, False])
def test_each_tensor_of_a_new_block_has_the_type_of_its_namesake(register):
    model = nn.Sequential(*(Spectral(32) for _ in range(4)))
    for block in model:
        block.fc.to(torch.bfloat16)
    if register:
        stepsnet.register_block(Spectral, lambda block, width, heads: Spectral(width))
    ours = stepsnet.stepify(model, 2, plan=PLAN, example=X)
    types = {name: tensor.dtype for name, tensor in model[0].state_dict().items()}
    assert {name: tensor.dtype for name, tensor in ours.blocks[0].state_dict().items()} == types


class KeepsItsMap(Residual):
    def forward(self, x):
        self.map = self.fc(x)
        return x + self.map


def test_declared_blocks_may_keep_what_a_pass_has_computed():
    stepsnet.register_block(KeepsItsMap, lambda block, width, heads: KeepsItsMap(width), branches=["fc"])
    model = residuals(kind=KeepsItsMap)
    model(X)
    assert stepsnet.stepify(model, 2, plan=PLAN, example=X)(X).shape == X.shape
    assert stepsnet.residual.connect(model, "layer_scale", width=32)(X).shape == X.shape


def test_two_blocks_that_differ_in_a_rate_alone_do_not_take_turns():
    stepsnet.register_block(Told, lambda block, w, heads: Told(w, block.told, 0, block.drop.p))
    model = nn.Sequential(Told(32, None), Told(32, None, 0, 0.2))
    blocks = stepsnet.stepify(model, plan={"widths": (16, 32), "depths": (2, 1)}, example=X).blocks
    assert [block.drop.p for block in blocks] == pytest.approx([0, 0.1, 0.2])
    # what the user's own function decides stays
    stepsnet.register_block(Told, lambda block, w, heads: Told(w, block.told, 0, 0.5))
    blocks = stepsnet.stepify(model, plan={"widths": (16, 32), "depths": (2, 1)}, example=X).blocks
    assert [block.drop.p for block in blocks] == [0.5] * 3
    stepsnet.register_block(Told, lambda block, w, heads: Told(w, block.told, 0, block.drop.p / 2))
    blocks = stepsnet.stepify(model, plan={"widths": (16, 32), "depths": (2, 1)}, example=X).blocks
    assert [block.drop.p for block in blocks] == [0, 0, 0.1]


def test_a_rate_of_zero_may_be_an_identity():
    """As timm has it in a model of four blocks or more."""

    def told(width, rate):
        block = Told(width, None)
        block.drop = nn.Dropout(rate) if rate else nn.Identity()
        return block

    stepsnet.register_block(Told, lambda block, width, heads: told(width, getattr(block.drop, "p", 0)))
    model = nn.Sequential(*(told(32, i / 10) for i in range(4)))
    blocks = stepsnet.stepify(model, plan=PLAN, example=X).eval().blocks
    assert isinstance(blocks[0].drop, nn.Identity) or blocks[0].drop.p == 0
    assert [block.drop.p for block in blocks[1:]] == pytest.approx([0.06, 0.12, 0.18, 0.24, 0.3])
    assert not any(block.drop.training for block in blocks)


class Conditioned(nn.Module):
    """A model of two arguments, with tokens beside numbers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(9, 32), residuals()

    def forward(self, x, token):
        return self.blocks(x + 0.01 * self.embedding(token).unsqueeze(1))


@pytest.mark.parametrize("kind", [tuple, list, dict])
def test_an_example_may_have_several_arguments(kind):
    token = torch.tensor([3, 8])
    example = {"x": X, "token": token} if kind is dict else kind((X, token))
    result = stepsnet.stepify(Conditioned(), 2, example=example, plan=PLAN)
    assert result(X, token).shape == X.shape and result.blocks.widths == (16, 32)
    report = stepsnet.describe_stepify(Conditioned(), 2, example=example, plan=PLAN)
    assert report.streams[0].sigma == pytest.approx(1, rel=0.2)


class Characters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(500, 32), residuals()
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, ids):
        return self.blocks(self.embedding(ids))


def test_a_model_of_token_ids_is_described_on_those_of_the_example():
    (stream,) = stepsnet.describe_stepify(Characters(), 2, example=torch.arange(500).view(5, 100), plan=PLAN).streams
    assert stream.sigma == pytest.approx(0.02, rel=0.05) and stream.suggested_scale == pytest.approx(50, rel=0.05)


class Encoder(nn.Module):
    """torch's, which in evaluation leaves out the positions that are padded."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 4)

    def forward(self, ids, padding=None):
        return self.encoder(self.embedding(ids), src_key_padding_mask=padding)


@pytest.mark.parametrize("steps", [1, 2])
def test_an_encoder_of_torch_takes_a_padding_mask_in_evaluation(steps):
    kind = nn.TransformerEncoderLayer
    stepsnet.register_block(
        kind, lambda block, w, heads: kind(w, heads, 2 * w, batch_first=True), heads="self_attn.num_heads"
    )
    try:
        ids, padding, model = torch.randint(9, (2, 7)), torch.arange(7) >= torch.tensor([[7], [4]]), Encoder().eval()
        ours = stepsnet.stepify(model, steps, example=ids)
        with torch.no_grad():
            got, alone = ours(ids, padding), ours(ids[1:, :4])
            if steps == 1:
                assert torch.equal(got, model(ids, padding))
        torch.testing.assert_close(got[1, :4], alone[0])
        torch.testing.assert_close(got[0], ours(ids, padding)[0])  # with gradients, by another path of torch's
        assert model.encoder.use_nested_tensor
    finally:
        del ADAPTERS[kind]


class WithNone(nn.Module):
    """Lists with None in the place of modules, as where a layer has no norm behind it."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([None, None])
        self.blocks = nn.ModuleList([*residuals(), None])

    def forward(self, x):
        for block in self.blocks:
            x = x if block is None else block(x)
        return x


def test_leading_blocks_keep_names_of_their_own():
    class Unit(nn.Module):
        def __init__(self, before, width):
            super().__init__()
            self.shortcut = nn.Linear(before, width) if before != width else nn.Identity()
            self.fc = nn.Linear(width, width)

        def forward(self, x):
            x = self.shortcut(x)
            return x + self.fc(x)

    stepsnet.register_block(Unit, lambda block, width, heads: Unit(width, width))
    names = ["unit01", "2", "unit03", "unit04", "unit05"]
    for first, expected in (("unit01", ["unit01", "1", "2", "3", "4", "5", "6"]), ("1", ["1", *"234567"])):
        widths = zip([first, *names[1:]], [16, 32, 32, 32, 32])
        model = nn.Sequential(OrderedDict((name, Unit(before, 32)) for name, before in widths))
        x = torch.randn(2, 5, 16)
        ours = stepsnet.stepify(model, plan={"widths": (16, 32), "depths": (4, 2)}, example=x)
        assert ours.names == expected and ours(x).shape == (2, 5, 32)
        assert torch.equal(ours.get_submodule(first).shortcut.weight, model[0].shortcut.weight)
        assert torch.equal(stepsnet.stepify(model, 1, example=x)(x), model(x))


def test_lists_may_hold_none():
    model = WithNone()
    assert blocks_of(model) == list(model.blocks)[:4]
    assert stepsnet.stepify(model, 2, example=X, plan=PLAN)(X).shape == X.shape
    assert stepsnet.describe_stepify(model, 2, example=X, plan=PLAN).streams
    expected = model(X)
    torch.testing.assert_close(stepsnet.optimize(model, compile=False)(X), expected)


def stem_with(change):
    model = nn.Sequential(nn.Linear(32, 32), residuals())
    change(model[0])
    return model


def keep_output(stem):
    stem.cache = [stem(X)]


def keep_lock(stem):
    stem.lock = threading.Lock()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: stem_with(keep_output), r"Sequential\.0\.cache is computed from weights, .* expected it detached, or"),
        (
            lambda: stem_with(nn.utils.weight_norm),
            r"Sequential\.0\.weight is computed .*, or weight_norm of torch.nn.utils.parametrizations",
        ),
        (
            lambda: stem_with(keep_lock),
            r"Sequential\.0\.lock cannot be copied \(.*lock.*\), expected a model that copy",
        ),
        (
            lambda: nn.Sequential(nn.LazyLinear(32), residuals()),
            r"Sequential\.0\.weight has no shape yet, expected a model after its first forward pass",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_cannot_be_copied_is_named(make, words):
    for function in (stepsnet.stepify, stepsnet.describe_stepify):
        model = make()
        if hasattr(model[0], "weight_g"):
            model(X)
        with pytest.raises(UserError, match=rf"^stepify: {words}"):
            function(model, 2, example=X, plan=PLAN)


class TimeFirst(nn.Module):
    """A block of (N, B, C), with a convolution along time."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, heads)
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x):
        y = self.norm(x)
        y = self.attention(y, y, y)[0]
        return x + self.conv(y.permute(1, 2, 0)).permute(2, 0, 1)


def test_time_may_be_first(monkeypatch):
    monkeypatch.setitem(ADAPTERS, TimeFirst, None)  # so that it goes when the test ends
    model, x = nn.Sequential(*(TimeFirst(32, 4) for _ in range(4))), torch.randn(40, 2, 32)
    stepsnet.register_block(TimeFirst, lambda block, w, heads: TimeFirst(w, heads), heads="attention.num_heads")
    ours = stepsnet.stepify(model, 2, example=x)
    assert ours.dim == -1 and ours(x).shape == x.shape
    stepsnet.register_block(TimeFirst, lambda block, w, heads: TimeFirst(w, heads), heads="attention.num_heads", dim=1)
    with pytest.raises(UserError, match=r"the model: got 4 heads in blocks of width 2, .* in dimension 1, dim= of reg"):
        stepsnet.stepify(model, 2, example=x)


class Grouped(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(32, width), nn.Conv2d(width, width, 1)

    def forward(self, x):
        return x + self.conv(self.norm(x))


def test_widths_that_the_groups_of_a_norm_divide_are_hinted_at():
    model, x = nn.Sequential(*(Grouped(128) for _ in range(4))), torch.randn(1, 128, 2, 2)
    with pytest.raises(
        UserError, match=r"^stepify: the model: Grouped at width 88: .*; its GroupNorm needs a multiple of 32, see rou"
    ):
        stepsnet.stepify(model, 2, example=x)
    assert stepsnet.stepify(model, 2, example=x, round_to=32).widths == (96, 128)


class Parametrized(Residual):
    def __init__(self, width):
        super().__init__(width)
        nn.utils.parametrizations.weight_norm(self.fc)


@pytest.mark.parametrize("kind", [Residual, Parametrized])
def test_compiled_and_parametrized_blocks_need_no_function(kind):
    """Whatever torch notes in them, nothing was said to their constructor but the width."""
    model = residuals(kind=kind)
    for block in model:
        block.compile()  # at its first call, which does not come
    ours = stepsnet.stepify(model, 2, example=X, plan=PLAN)
    assert [type(block.block) for block in ours] == [kind] * 6 and ours(X).shape == X.shape


class Crossed(Residual):
    """A block that reads a memory of so many channels."""

    def __init__(self, width, memory):
        super().__init__(width)
        self.read = nn.Linear(memory, width)

    def forward(self, x, memory):
        return x + self.fc(x) + self.read(memory).mean(1, keepdim=True)


class WithMemory(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Crossed(32, 32) for _ in range(4))

    def forward(self, x, memory):
        for block in self.blocks:
            x = block(x, memory)
        return x


def test_what_blocks_get_beside_the_stream_keeps_its_channels():
    given = X, torch.randn(2, 7, 32)
    stepsnet.register_block(Crossed, lambda block, width, heads: Crossed(width, width))
    with pytest.raises(
        UserError, match=r"does not run at width 16 .*; what it gets besides the stream keeps its 32 chan"
    ):
        stepsnet.stepify(WithMemory(), 2, example=given, match="macs", round_to=16)
    stepsnet.register_block(Crossed, lambda block, width, heads: Crossed(width, block.read.in_features))
    assert stepsnet.stepify(WithMemory(), 2, example=given, round_to=16)(*given).shape == X.shape


class OfValues(Characters):
    def forward(self, ids):
        return super().forward(ids + 1 if (ids > 3).any() else ids)


class Squares(Characters):
    """With a mask of (N, N)."""

    def forward(self, ids, mask):
        assert mask.shape == (ids.shape[1],) * 2, "another mask"
        return super().forward(ids)


def test_why_a_model_does_not_run_without_data():
    ids = torch.randint(8, (6, 6))
    with pytest.raises(
        UserError, match=r"OfValues does not run without data, on torch's meta device .* reads only shapes"
    ):
        stepsnet.stepify(OfValues(), 2, example=ids)
    model = OfValues()
    model.blocks = stepsnet.stepify(model.blocks, 2, example=torch.randn(2, 6, 32))  # as docs/your-model.md says
    assert model(ids).shape == (6, 6, 32)
    for batch in (6, 5):  # a mask of as many rows is not cut as a batch is
        assert stepsnet.stepify(Squares(), 2, example=(ids[:batch], torch.ones(6, 6)))


class Masked(Residual):
    """A block that makes a mask on the CPU, without saying where."""

    def forward(self, x):
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1]), 1)  # (N, N)
        return x + self.fc(x - mask @ x)


def test_blocks_may_make_tensors_without_saying_where():
    model = residuals(kind=Masked)
    ours = stepsnet.stepify(model, 1, example=X)
    assert torch.equal(ours(X), model(X))
    assert stepsnet.describe_stepify(model, 2, example=X)
    assert stepsnet.stepify(model, 2, example=X)(X).shape == X.shape


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = residuals()

    def forward(self, x):
        for _ in range(3):
            x = self.blocks(x)
        return 0.01 * x


def test_a_stream_that_begins_several_times_is_not_scaled():
    (stream,) = stepsnet.describe_stepify(Recurrent(), 2, example=X, plan=PLAN).streams
    assert stream.passes == 3 and stream.suggested_scale is None
    assert stepsnet.stepify(Recurrent(), 2, example=X, plan=PLAN)(X).shape == X.shape
    with pytest.raises(UserError, match="stream_scale: got 5, but Recurrent runs blocks 3 times"):
        stepsnet.stepify(Recurrent(), 2, example=X, plan=PLAN, stream_scale=5)


@pytest.mark.parametrize("example", ["x", (), [1], {1: X}, torch.tensor(1.0)])
def test_what_is_no_example_is_one_line(example):
    with pytest.raises(UserError, match=r"^example: got "):
        stepsnet.stepify(residuals(), 2, example=example)


class ToldInABuffer(nn.Module):
    """What its constructor is told shows in a buffer alone."""

    def __init__(self, width, alpha=1.0):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.register_buffer("alpha", torch.tensor(alpha))
        self.register_buffer("missing", None)

    def forward(self, x):
        return x + self.alpha * self.fc(x)


def test_what_a_constructor_has_put_into_buffers_is_not_reset():
    model = nn.Sequential(*(ToldInABuffer(32) for _ in range(4)))
    assert stepsnet.stepify(model, 2, example=X, plan=PLAN)
    model[2] = ToldInABuffer(32, 0.1)
    with pytest.raises(UserError, match="ToldInABuffer"):
        stepsnet.stepify(model, 2, example=X, plan=PLAN)
