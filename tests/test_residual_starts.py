"""Where LayerScale, ReZero, DeepNorm, Fixup and NormFormer begin, in Steps-DeiT models; and that they train there."""

import math
import re

import pytest
import timm
import torch
from residual_networks import train
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import stepsnet
from stepsnet.residual import DESIGNS, Connection, connect
from stepsnet.residual.design import reset_norm

DEPTH_METHODS = ["layer_scale", "rezero", "deepnorm", "fixup", "normformer"]
SMALL = dict(img_size=8, patch_size=4, num_classes=5, class_token=False, global_pool="avg")
STEPS = dict(widths=(16, 24, 32), depths=(2, 1, 1), num_heads=(2, 2, 2), **SMALL)
PLAIN = dict(widths=(32,), depths=(3,), num_heads=(2,), **SMALL)


def create(method, arguments=STEPS):
    torch.manual_seed(0)
    return timm.create_model("steps_deit_tiny_patch16_224", residual=method, **arguments)


def first_block(method, arguments=PLAIN):
    model = create(method, arguments)
    block = next(m for m in model.modules() if isinstance(m, timm.models.vision_transformer.Block)).eval()
    return block.double(), torch.randn(2, 5, 32, dtype=torch.double)


@pytest.mark.parametrize(("depth", "expected"), [(18, 0.1), (24, 1e-5), (25, 1e-6)])
def test_layer_scale_is_timms_with_the_starts_of_cait(depth, expected):
    ours = create("layer_scale", {**PLAIN, "depths": (depth,)})
    torch.manual_seed(0)
    theirs = timm.create_model(
        "deit_tiny_patch16_224", embed_dim=32, depth=depth, num_heads=2, init_values=expected, **SMALL
    )
    gains = {
        key: re.sub(r"ls(\d)\.gamma", lambda ls: f"connections.{int(ls[1]) - 1}.gain", key)
        for key in theirs.state_dict()
    }
    stepsnet.load_baseline(ours, {gains[key]: value for key, value in theirs.state_dict().items()})
    x = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(ours(x), theirs(x))
    fresh = create("layer_scale", {**PLAIN, "depths": (depth,)})
    assert all(c.gain.eq(expected).all() for block in fresh.blocks.networks[0].blocks for c in block.connections)


@pytest.mark.parametrize("method", ["rezero", "fixup"])
def test_blocks_begin_as_the_identity(method):
    block, x = first_block(method)
    assert torch.equal(block(x), x)


def spread_of(weight):
    return weight.std().item()


def test_where_the_weights_begin():
    wide = {**PLAIN, "widths": (256,), "num_heads": (4,), "depths": (8,)}
    xavier, between = math.sqrt(2 / (256 + 256)), math.sqrt(2 / (256 + 1024))
    block, _ = first_block("fixup", wide)
    q, k, v = block.attn.qkv.weight.chunk(3)
    sixth, half = 16 ** (-1 / 6), 16**-0.5  # two branches a block
    found = [spread_of(w) for w in (q, k, v, block.mlp.fc1.weight)]
    assert found == pytest.approx([*[sixth * xavier] * 3, half * between], rel=0.03)
    assert not block.attn.proj.weight.any() and not block.mlp.fc2.weight.any()
    block, _ = first_block("deepnorm", wide)
    q, k, v = block.attn.qkv.weight.chunk(3)
    beta = 64**-0.25
    found = [spread_of(w) for w in (q, k, v, block.attn.proj.weight, block.mlp.fc1.weight, block.mlp.fc2.weight)]
    expected = [xavier, xavier, *[beta * xavier] * 2, *[beta * between] * 2]
    assert found == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("method", DEPTH_METHODS)
@pytest.mark.parametrize("arguments", [STEPS, PLAIN], ids=["steps", "baseline"])
def test_a_method_trains_in_steps_and_in_the_baseline(method, arguments):
    model = create(method, arguments)
    x, labels = torch.randn(16, 3, 8, 8), torch.arange(16) % 5
    losses = train(model, x, labels, updates=60)
    assert losses[-1] < 0.7 * losses[0]
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("method", DEPTH_METHODS)
def test_a_method_begins_again(method):
    with torch.device("meta"):
        model = timm.create_model("steps_deit_tiny_patch16_224", residual=method, **STEPS)
    model.to_empty(device="cpu").init_weights()
    eager = create(method).eval()
    drawn = [key for key in eager.state_dict() if ".attn." in key or ".mlp." in key]
    assert len(drawn) == 4 * 8
    for key in drawn:
        again, first = (one.state_dict()[key].std().item() for one in (model, eager))
        assert again == pytest.approx(first, rel=0.3), key


@pytest.mark.parametrize(("kind", "weight"), [(nn.LayerNorm, 1), (LlamaRMSNorm, 1), (Gemma3RMSNorm, 0)])
def test_a_norm_starts_with_gains_of_1_however_it_writes_them(kind, weight):
    norm, x = kind(16), torch.randn(4, 16)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    reset_norm(norm)
    assert bool((norm.weight == weight).all())
    centred = x - x.mean(-1, keepdim=True) if kind is nn.LayerNorm else x
    torch.testing.assert_close(norm(x), centred / centred.square().mean(-1, keepdim=True).sqrt(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["mhc", "fixup", "deepnorm", "rezero", "layer_scale", "dense_former"])
def test_a_model_without_weights_is_started_as_one_with_them(name):
    """timm's mode for weights that were skipped asks for reset_parameters and for nothing else."""
    arguments = {"residual": name, "widths": (16,), "depths": (2,), "num_heads": (2,), "img_size": 32}
    with torch.device("meta"):
        model = timm.create_model("test_steps_deit", weight_init="skip", **arguments)
    model = model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(7.0)
    model.init_weights()
    expected = timm.create_model("test_steps_deit", **arguments).state_dict()
    for key, value in model.state_dict().items():
        if "connections" in key and not key.endswith("phi"):
            torch.testing.assert_close(value, expected[key])
        elif key.endswith("phi") or (name in ("fixup", "deepnorm", "rezero") and key.endswith("attn.proj.weight")):
            assert value.std().item() == pytest.approx(expected[key].std().item(), rel=0.2), key


@pytest.mark.parametrize("unit", ["branch", "branches", "block"])
def test_a_design_sets_the_start_of_every_branch(unit, monkeypatch):
    class Mine(Connection):
        title = source = "a test"

        def forward(self, x, F):
            return x

        def init_branch(self, block, parts):
            reached.append(parts.norm)

    reached: list[str] = []
    Mine.unit = unit
    monkeypatch.setitem(DESIGNS, "mine", Mine)
    connect([timm.models.vision_transformer.Block(16, 2) for _ in range(2)], "mine")
    assert reached == ["norm1", "norm2"] * 2
