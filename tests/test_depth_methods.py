"""LayerScale, ReZero, DeepNorm, Fixup and NormFormer against their formulas, in steps and with one."""

import math

import pytest
import timm
import torch
from torch.nn import functional as F

import stepsnet
from stepsnet.config import ModelSpec
from stepsnet.errors import UserError
from stepsnet.models.build import build_model
from stepsnet.residual import DESIGNS

DEPTH_METHODS = [name for name, design in DESIGNS.items() if design and design.timm_block]
SMALL = dict(img_size=8, patch_size=4, num_classes=5, class_token=False, global_pool="avg")
STEPS = dict(widths=(16, 24, 32), depths=(2, 1, 1), num_heads=(2, 2, 2), **SMALL)
PLAIN = dict(widths=(32,), depths=(3,), num_heads=(2,), **SMALL)


def create(method, arguments=STEPS):
    torch.manual_seed(0)
    return timm.create_model("steps_deit_tiny_patch16_224", depth_method=method, **arguments)


def first_block(method, stirred=True, arguments=PLAIN):
    """Stirred: every weight is drawn anew, so that no gain is 0 or 1."""
    model = create(method, arguments)
    block = next(m for m in model.modules() if isinstance(m, timm.models.vision_transformer.Block)).eval()
    if stirred:
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return block.double(), torch.randn(2, 5, 32, dtype=torch.double)


def heads_of(block, x):
    """Scaled dot-product attention written out: (B, N, C) -> (B, N, C), before the projection."""
    B, N, C = x.shape
    q, k, v = F.linear(x, block.attn.qkv.weight, block.attn.qkv.bias).split(C, -1)
    q, k, v = (part.reshape(B, N, 2, C // 2).transpose(1, 2) for part in (q, k, v))
    weights = (q @ k.transpose(-2, -1) / math.sqrt(C // 2)).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(B, N, C)


def linear(layer, x):
    return x @ layer.weight.T + layer.bias


def norm(layer, x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight + layer.bias


def test_rezero_is_its_formula():
    block, x = first_block("rezero")
    y = x + block.ls1.gain * linear(block.attn.proj, heads_of(block, x))
    y = y + block.ls2.gain * linear(block.mlp.fc2, F.gelu(linear(block.mlp.fc1, y)))
    torch.testing.assert_close(block(x), y)


def test_fixup_is_its_formula():
    block, x = first_block("fixup")
    heads = heads_of(block, x + block.norm1.shift)
    y = x + block.ls1.gain * linear(block.attn.proj, heads + block.attn.norm.shift)
    hidden = F.gelu(linear(block.mlp.fc1, y + block.norm2.shift))
    y = y + block.ls2.gain * linear(block.mlp.fc2, hidden + block.mlp.norm.shift)
    torch.testing.assert_close(block(x), y)


def test_deepnorm_is_its_formula():
    block, x = first_block("deepnorm")
    alpha = (2 * 3) ** 0.25
    y = norm(block.norm1, alpha * x + linear(block.attn.proj, heads_of(block, x)))
    y = norm(block.norm2, alpha * y + linear(block.mlp.fc2, F.gelu(linear(block.mlp.fc1, y))))
    torch.testing.assert_close(block(x), y)


def test_normformer_is_its_formula():
    block, x = first_block("normformer")
    heads = heads_of(block, norm(block.norm1, x)) * block.attn.norm.gain.repeat_interleave(16)
    y = x + norm(block.ls1, linear(block.attn.proj, heads))
    hidden = norm(block.mlp.norm, F.gelu(linear(block.mlp.fc1, norm(block.norm2, y))))
    torch.testing.assert_close(block(x), y + linear(block.mlp.fc2, hidden))


@pytest.mark.parametrize(("depth", "expected"), [(18, 0.1), (24, 1e-5), (25, 1e-6)])
def test_layer_scale_is_timms_with_the_starts_of_cait(depth, expected):
    ours = create("layer_scale", {**PLAIN, "depths": (depth,)})
    torch.manual_seed(0)
    theirs = timm.create_model(
        "deit_tiny_patch16_224", embed_dim=32, depth=depth, num_heads=2, init_values=expected, **SMALL
    )
    stepsnet.load_baseline(ours, theirs.state_dict())
    x = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(ours(x), theirs(x))
    assert ours.blocks.networks[0][0].ls1.gamma.eq(expected).all()


@pytest.mark.parametrize("method", ["rezero", "fixup"])
def test_blocks_begin_as_the_identity(method):
    block, x = first_block(method, stirred=False)
    assert torch.equal(block(x), x)


def spread_of(weight):
    return weight.std().item()


def test_where_the_weights_begin():
    wide = {**PLAIN, "widths": (256,), "num_heads": (4,), "depths": (8,)}
    xavier, between = math.sqrt(2 / (256 + 256)), math.sqrt(2 / (256 + 1024))
    block, _ = first_block("fixup", stirred=False, arguments=wide)
    q, k, v = block.attn.qkv.weight.chunk(3)
    shrink = 16**-0.5  # two branches a block
    found = [spread_of(w) for w in (q, k, v, block.mlp.fc1.weight)]
    assert found == pytest.approx([xavier, xavier, shrink * xavier, shrink * between], rel=0.03)
    assert not block.attn.proj.weight.any() and not block.mlp.fc2.weight.any()
    block, _ = first_block("deepnorm", stirred=False, arguments=wide)
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("method", DEPTH_METHODS)
def test_a_method_survives_the_meta_device_and_script(method):
    with torch.device("meta"):
        model = timm.create_model("steps_deit_tiny_patch16_224", depth_method=method, **STEPS)
    model.to_empty(device="cpu").init_weights()
    eager = create(method).eval()
    x = torch.randn(1, 3, 8, 8)
    assert torch.isfinite(model.eval()(x)).all()
    torch.testing.assert_close(torch.jit.script(eager)(x), eager(x))
    same = {name for name, value in eager.state_dict().items() if value.eq(model.state_dict()[name]).all()}
    gains = {name for name in eager.state_dict() if name.endswith(("gain", "shift", "gamma"))}
    assert gains <= same  # what begins at a number begins there again


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth_method": "rezro"}, "residual: got 'rezro', expected one of plain, layer_scale, rezero"),
        ({"depth_method": "rezero", "init_values": 1e-5}, "residual: got 'rezero' with init_values, expected only"),
        ({"depth_method": "fixup", "scale_mlp_norm": True}, "with scale_mlp_norm, expected only one of them"),
    ],
)
def test_a_mistake_is_said(arguments, message):
    with pytest.raises(UserError) as error:
        build_model(ModelSpec("steps_deit_tiny_patch16_224", {**STEPS, **arguments}))
    assert message in str(error.value)
