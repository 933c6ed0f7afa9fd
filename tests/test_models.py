"""Every family: its 1-step model is timm's baseline, and its models are good citizens of timm."""

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from importlib import resources

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from timm.models._manipulate import group_parameters
from timm.models.resnet import BasicBlock, Bottleneck
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.vision_transformer import Block
from timm.optim import create_optimizer_v2
from torch import nn

import stepsnet
from stepsnet import ReverseStepsNet, StepsNet
from stepsnet.models import model_names, steps_deit, steps_resnet, steps_swin, swin_plus
from stepsnet.models.swin_plus import SwinPlusBlock

torch.set_num_threads(1)  # xdist already uses the cores

FAMILIES = {"deit": steps_deit, "swin": steps_swin, "swinpp": swin_plus, "resnet": steps_resnet}
TINY = {
    "deit": ("test_steps_deit", dict(img_size=32), 32),
    "swin": ("test_steps_swin", dict(img_size=56), 56),
    "swinpp": ("test_steps_swinpp", dict(img_size=56), 56),
    "resnet": ("test_steps_resnet", {}, 32),
}
BLOCKS = (Block, SwinTransformerBlock, BasicBlock, Bottleneck)
ALL = pytest.mark.parametrize("family", TINY)
BOTH = pytest.mark.parametrize("reverse", [False, True], ids=["steps", "reverse"])


def tiny(family, **kwargs):
    name, defaults, _ = TINY[family]
    torch.manual_seed(0)
    return stir(timm.create_model(name, **{**defaults, **kwargs}))


def stir(model):
    """Move every weight away from the ones and zeros of its initialisation, behind which errors hide."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def images(size=32, batch=2, channels=3):
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(1))


def image_of(family, **kwargs):
    return images(TINY[family][2], **kwargs)


def blocks_of(model):
    """The residual blocks in the order of their names, which is that of execution."""
    return [module for module in model.modules() if isinstance(module, BLOCKS)]


def containers_of(model):
    return [module for module in model.modules() if isinstance(module, (StepsNet, ReverseStepsNet))]


def execution_order(model, x):
    """The names of the modules with weights of their own, in the order in which a forward pass meets them."""
    order, handles = [], []
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            handles.append(module.register_forward_pre_hook(lambda module, args, name=name: order.append(name)))
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return order


def gradients(model, x):
    model.zero_grad()
    y = model(x)
    (y * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum().backward()
    return y.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys() and ours
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


# ---- (a) the 1-step model is the baseline

PARITY = {
    "DeiT": ("test_steps_deit", dict(widths=(64,), depths=(6,), num_heads=(2,)), "test_vit", {}, dict(img_size=32), 32),
    "DeiT-T": (
        "steps_deit_tiny_patch16_224",
        dict(widths=(96,), depths=(3,), num_heads=(3,)),
        "deit_tiny_patch16_224",
        dict(embed_dim=96, depth=3, num_heads=3),
        dict(img_size=32, num_classes=7),
        32,
    ),
    "Swin": (
        "steps_swin_tiny_patch4_window7_224",
        dict(
            widths=((16,), (32,), (64,), (128,)),
            depths=((1,), (1,), (2,), (1,)),
            num_heads=((1,), (2,), (2,), (4,)),
        ),
        "swin_tiny_patch4_window7_224",
        dict(embed_dim=16, depths=(1, 1, 2, 1), num_heads=(1, 2, 2, 4)),
        dict(img_size=56),
        56,
    ),
    "Swin, shifted": (
        "steps_swin_tiny_patch4_window7_224",
        dict(
            widths=((16,), (32,), (64,), (128,)),
            depths=((2,), (3,), (1,), (0,)),
            num_heads=((1,), (2,), (2,), (4,)),
            mlp_ratio=2.0,
        ),
        "swin_tiny_patch4_window7_224",
        dict(embed_dim=16, depths=(2, 3, 1, 0), num_heads=(1, 2, 2, 4), mlp_ratio=2.0),
        dict(img_size=(56, 64), window_size=4, num_classes=5),
        (56, 64),
    ),
    "ResNet-18": (
        "steps_resnet18",
        dict(widths=((64,), (128,), (256,), (512,)), depths=((1,), (1,), (1,), (1,))),
        "resnet18",
        {},
        dict(num_classes=7),
        32,
    ),
    "ResNet, bottleneck": (
        "steps_resnet50",
        dict(widths=((8,), (16,), (24,), (32,)), depths=((1,), (2,), (3,), (0,))),
        "resnet50",
        dict(layers=(2, 3, 4, 1), channels=(8, 16, 24, 32)),
        {},
        32,
    ),
}


def pair(case, **kwargs):
    name, ours, baseline, theirs, common, size = PARITY[case]
    common = {"drop_path_rate": 0.0, **common}  # Swin's default is 0.1
    torch.manual_seed(0)
    baseline = stir(timm.create_model(baseline, **theirs, **{**common, **kwargs}))
    model = timm.create_model(name, **ours, **{**common, **kwargs})
    stepsnet.load_baseline(model, baseline.state_dict())
    height, width = size if isinstance(size, tuple) else (size, size)
    x = images(max(height, width))[:, :, :height, :width]
    return model, baseline, x


def key_map(model):
    (family,) = (family for family in FAMILIES.values() if type(model).__module__ == family.__name__)
    return family.from_baseline


@pytest.mark.parametrize("case", PARITY)
def test_one_step_is_timms_baseline(case):
    """Strictly: the same keys and shapes; the same logits; the same gradient of every weight."""
    model, baseline, x = pair(case)
    for training in (True, False):  # in this order, so that the batch norms' averages have moved alike
        logits, grads = gradients(model.train(training), x)
        expected, theirs = gradients(baseline.train(training), x)
        assert expected.std() > 1e-3
        torch.testing.assert_close(logits, expected)
        assert all(grad is not None and grad.abs().sum() > 0 for name, grad in theirs.items())
        assert_same(grads, key_map(model)(theirs), rtol=1e-4, atol=1e-4)
    assert_same(model.state_dict(), key_map(model)(baseline.state_dict()))
    assert [name for name, _ in model.named_parameters()] == list(key_map(model)(theirs))  # in the same order


@pytest.mark.parametrize("case", PARITY)
def test_one_step_drops_the_paths_that_timms_baseline_drops(case):
    model, baseline, x = pair(case, drop_path_rate=0.5)
    outputs = []
    for one in (model, baseline):
        torch.manual_seed(3)
        outputs.append(one.train()(x))
    torch.testing.assert_close(*outputs)
    torch.manual_seed(4)
    assert not torch.allclose(model(x), outputs[0])


@pytest.mark.parametrize("case", ["DeiT", "ResNet, bottleneck"])
def test_one_step_starts_as_timms_baseline_does(case):
    name, ours, baseline, theirs, common, _ = PARITY[case]
    torch.manual_seed(5)
    model = timm.create_model(name, **ours, **common)
    torch.manual_seed(5)
    baseline = timm.create_model(baseline, **theirs, **common)
    assert_same(model.state_dict(), key_map(model)(baseline.state_dict()), rtol=0, atol=0)


def test_swin_starts_as_timms_baseline_does():
    """Not drawn in the same order, but from the same distributions; the positions' table and the stem among them."""
    name, ours, baseline, theirs, common, _ = PARITY["Swin"]
    torch.manual_seed(5)
    model, baseline = timm.create_model(name, **ours, **common), timm.create_model(baseline, **theirs, **common)
    theirs = key_map(model)(baseline.state_dict())
    for key, value in model.state_dict().items():
        if value.dim() == 1 and key != "patch_embed.proj.bias":
            torch.testing.assert_close(value, theirs[key])  # norms' ones and zeros, and biases
        else:
            assert value.std().item() == pytest.approx(theirs[key].std().item(), rel=0.25), key
            assert abs(value.mean()) < 0.25 * value.std(), key
    # the draws of the last stage are many
    assert model.layers[3].blocks[0].mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_swin_options_reach_the_blocks():
    options = dict(always_partition=True, qkv_bias=False, mlp_ratio=3.0, proj_drop_rate=0.1, attn_drop_rate=0.2)
    model = tiny("swin", head_dim=8, **options)
    for block in blocks_of(model):
        assert block.always_partition and block.attn.qkv.bias is None
        assert block.mlp.fc1.out_features == 3 * block.dim
        assert block.attn.qkv.out_features == 3 * 8 * block.attn.num_heads
        assert (block.attn.proj_drop.p, block.attn.attn_drop.p, block.mlp.drop1.p) == (0.1, 0.2, 0.1)
    unconditioned = tiny("swin", weight_init="skip", img_size=112, strict_img_size=False)
    assert unconditioned.eval()(images(96)).shape == (2, 1000)


def test_swin_of_a_dynamic_size():
    """Shifted windows need other masks at another size."""
    model, baseline, _ = pair("Swin, shifted", dynamic_img_size=True)
    x = images(72)[:, :, :, :64]
    torch.testing.assert_close(model.eval()(x), baseline.eval()(x))


def test_load_baseline_is_strict():
    model, baseline, _ = pair("DeiT-T")
    weights = baseline.state_dict()
    del weights["blocks.1.attn.qkv.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks\.networks\.0\.1\.attn\.qkv\.weight"):
        stepsnet.load_baseline(model, weights)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*extra"):
        stepsnet.load_baseline(model, {**baseline.state_dict(), "extra": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="Missing key"):
        stepsnet.load_baseline(tiny("deit"), baseline.state_dict())
    with pytest.raises(ValueError, match="got a VisionTransformer"):
        stepsnet.load_baseline(baseline, baseline.state_dict())


def swinpp_block_by_hand(block, x):
    """LPU(x) = DWConv(x) + x, then Swin's attention, then fc2(LPU(GELU(fc1(·)))), each with its shortcut."""

    def lpu(x, conv):
        local = F.conv2d(x.movedim(-1, 1), conv.weight, conv.bias, padding=1, groups=x.shape[-1])
        return x + local.movedim(1, -1)

    def attention(x):  # one window over the whole map
        batch, height, width, channels = x.shape
        x = x.reshape(batch, height * width, channels)
        q, k, v = block.attn.qkv(x).unflatten(-1, (3, heads, channels // heads)).permute(2, 0, 3, 1, 4)
        rows = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        offset = rows[:, None] - rows[None, :] + torch.tensor([height - 1, width - 1])
        bias = block.attn.relative_position_bias_table[offset[..., 0] * (2 * width - 1) + offset[..., 1]]
        scores = q @ k.mT / (channels // heads) ** 0.5 + bias.permute(2, 0, 1)
        x = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, height, width, channels)
        return block.attn.proj(x)

    heads = block.attn.num_heads
    x = lpu(x, block.lpu.conv)
    x = x + attention(F.layer_norm(x, x.shape[-1:], block.norm1.weight, block.norm1.bias, 1e-5))
    hidden = F.gelu(block.mlp.fc1(F.layer_norm(x, x.shape[-1:], block.norm2.weight, block.norm2.bias, 1e-5)))
    return x + block.mlp.fc2(lpu(hidden, block.mlp.lpu.conv))


def test_swinpp_block_is_its_formula():
    block = stir(SwinPlusBlock(24, input_resolution=(7, 7), num_heads=3, window_size=7)).eval()
    x = torch.randn(2, 7, 7, 24, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(block(x), swinpp_block_by_hand(block, x))
    # 12C² + 13C of a Transformer block, the positions' table, and 10 weights for each of C + 4C channels
    assert sum(p.numel() for p in block.parameters()) == 12 * 24**2 + 13 * 24 + 13**2 * 3 + 10 * 5 * 24


def test_swinpp_without_its_convolutions_is_swin():
    """With their weights at zero, LPUs are identities: the rest is timm's Swin, shifts and all."""
    _, ours, _, _, common, _ = PARITY["Swin, shifted"]
    _, baseline, x = pair("Swin, shifted")
    model = timm.create_model("swinpp_tiny_window7_224", **ours, **common)
    missing, unexpected = model.load_state_dict(steps_swin.from_baseline(baseline.state_dict()), strict=False)
    assert not unexpected and missing and all(".lpu.conv." in key for key in missing)
    for key in missing:
        nn.init.zeros_(model.get_parameter(key))
    torch.testing.assert_close(model.eval()(x), baseline.eval()(x))
    nn.init.ones_(model.get_parameter(missing[0]))
    assert not torch.allclose(model(x), baseline(x))


def test_swinpp_drops_paths_and_activations():
    block = stir(SwinPlusBlock(16, input_resolution=(7, 7), num_heads=2, window_size=7, drop_path=1.0 - 1e-9))
    x = torch.randn(2, 7, 7, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(block(x), block.lpu(x))  # both branches dropped; the LPU has none
    dropped = SwinPlusBlock(16, input_resolution=(7, 7), num_heads=2, window_size=7, proj_drop=0.5)
    assert dropped.mlp.drop1.p == dropped.mlp.drop2.p == dropped.attn.proj_drop.p == 0.5


# ---- the steps themselves


def plain_widths(family):
    return {
        "deit": ((32, 48, 64), (2, 1, 1), (2, 2, 4)),
        "resnet": (((8,), (8, 16), (12, 16, 24), (16, 24, 32)), ((1,), (1, 2), (2, 1, 1), (2, 1, 0)), None),
    }.get(family, (((16,), (16, 32), (32, 48, 64), (64, 96)), ((1,), (1, 2), (2, 1, 1), (2, 0)), None))


@BOTH
@ALL
def test_overrides_reach_every_block(family, reverse):
    widths, depths, heads = plain_widths(family)
    options = dict(num_heads=heads) if heads else {}
    model = tiny(family, widths=widths, depths=depths, reverse=reverse, num_classes=5, in_chans=1, **options).eval()
    nested = [(widths, depths)] if family == "deit" else list(zip(widths, depths))
    expansion = 4 if family == "resnet" else 1
    containers = containers_of(model)
    assert len(containers) == len(nested)
    for container, (stage_widths, stage_depths) in zip(containers, nested):
        order = slice(None, None, -1) if reverse else slice(None)
        assert type(container) is (ReverseStepsNet if reverse else StepsNet)
        assert container.widths == tuple(expansion * width for width in stage_widths)[order]
        assert tuple(len(network) for network in container.networks) == tuple(stage_depths)[order]
        assert container.dim == (1 if family == "resnet" else -1)
        assert len(container) == sum(stage_depths)
        for network, width in zip(container.networks, container.widths):
            for block in network:
                first = block.conv1.in_channels if family == "resnet" else block.mlp.fc1.in_features
                last = block.conv3.out_channels if family == "resnet" else block.mlp.fc2.out_features
                assert first == last == width
    assert model(image_of(family, channels=1)).shape == (2, 5)
    assert model.num_features == model.head_hidden_size == containers[-1].width
    if family.startswith("swin"):
        assert [stage.depth for stage in model.layers] == [sum(stage_depths) for stage_depths in depths]


@pytest.mark.parametrize("family", ["deit", "swin", "swinpp"])
def test_new_widths_choose_their_heads_anew(family):
    widths, depths, _ = plain_widths(family)
    model = tiny(family, widths=widths, depths=depths)
    size = 64 if family == "deit" else 32
    for block in blocks_of(model):
        width, heads = block.mlp.fc1.in_features, block.attn.num_heads
        nearer = [h for h in (1, 2, 3, 4) if width % h == 0 and abs(width / h - size) < abs(width / heads - size)]
        assert width % heads == 0 and not nearer
    with_heads = tiny(family, num_heads=(4, 4, 8) if family == "deit" else ((2,), (4,), (4, 4, 4), (8, 8)))
    assert {block.attn.num_heads for block in blocks_of(with_heads)} == ({4, 8} if family == "deit" else {2, 4, 8})


def test_deit_runs_its_blocks_as_eq_5():
    model = tiny("deit").eval()
    x = images(32)
    f1, f2, f3 = model.blocks.networks
    z = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
    x1, x2, x3 = z.split([32, 16, 16], -1)
    y = f3(torch.cat([f2(torch.cat([f1(x1), x2], -1)), x3], -1))
    torch.testing.assert_close(model.forward_features(x), model.norm(y))
    torch.testing.assert_close(model(x), model.head(model.norm(y)[:, 0]))


@pytest.mark.parametrize("family", ["swin", "swinpp"])
def test_swin_runs_a_stage_as_eq_5(family):
    model = tiny(family).eval()
    stage = model.layers[2]
    x = torch.randn(2, 8, 8, 32, generator=torch.Generator().manual_seed(1))
    f1, f2, f3 = stage.blocks.networks
    x1, x2, x3 = stage.downsample(x).split([32, 16, 16], -1)
    torch.testing.assert_close(stage(x), f3(torch.cat([f2(torch.cat([f1(x1), x2], -1)), x3], -1)))
    # the last stage's widest step has no blocks: its slice is what the patch merging made
    last, x = model.layers[3], torch.randn(2, 4, 4, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(last(x)[..., 64:], last.downsample(x)[..., 64:], rtol=0, atol=0)
    torch.testing.assert_close(last(x)[..., :64], last.blocks.networks[0](last.downsample(x)[..., :64]))


def test_resnet_runs_a_stage_as_eq_5():
    model = tiny("resnet").eval()
    stage = model.layer3
    x = torch.randn(2, 64, 4, 4, generator=torch.Generator().manual_seed(1))
    f1, f2, f3 = stage[1].networks
    x1, x2, x3 = stage[0](x).split([48, 16, 32], 1)  # 4 × (12, 16, 24) channels
    assert stage[0].downsample is not None and len(blocks_of(stage)) == 5
    torch.testing.assert_close(stage(x), f3(torch.cat([f2(torch.cat([f1(x1), x2], 1)), x3], 1)))


def test_deit_takes_a_mask():
    model = tiny("deit").eval()
    x = images(32)
    causal = model.forward_features(x, is_causal=True)
    mask = torch.full((5, 5), float("-inf")).triu(1)
    torch.testing.assert_close(causal, model.forward_features(x, attn_mask=mask))
    assert not torch.allclose(causal, model.forward_features(x))
    no_mask = model.forward_features(x, attn_mask=torch.zeros(5, 5))
    torch.testing.assert_close(no_mask, model.forward_features(x))


# ---- (c) errors

DEIT_ERRORS = [
    (dict(widths=(32, 48, 64), depths=(1, 1)), r"depths: got 2 \(1, 1\), expected one a width of \(32, 48, 64\)"),
    (dict(widths=(), depths=()), "depths: got 0"),
    (dict(widths=(48, 32, 64)), r"widths: got \(48, 32, 64\), expected them strictly increasing"),
    (dict(widths=(32, 32, 64)), r"widths: got \(32, 32, 64\), expected them strictly increasing"),
    (dict(widths=(0, 32, 64)), "widths: got 0, expected positive whole numbers"),
    (dict(widths=(32, 48.0, 64)), r"widths: got 48\.0, expected positive whole numbers"),
    (dict(depths=(1, -1, 1)), "depths: got -1, expected whole numbers from 0 up"),
    (dict(depths=(1, 1.5, 1)), r"depths: got 1\.5, expected whole numbers from 0 up"),
    (dict(num_heads=(1, 5, 2)), "num_heads: got 5, expected a divisor of the width 48"),
    (dict(num_heads=(1, 0, 2)), "num_heads: got 0, expected a divisor of the width 48"),
    (dict(num_heads=(1, 2)), r"num_heads: got \(1, 2\), expected one a width of \(32, 48, 64\)"),
]
STAGED_ERRORS = [
    (dict(widths=((16,), (32,), (64,))), r"widths: got \(\(16,\), \(32,\), \(64,\)\), expected 4 sequences"),
    (dict(widths=(16, 32, 64, 96)), r"widths: got \(16, 32, 64, 96\), expected 4 sequences, one a stage"),
    (dict(depths=((1,), (1,), (2, 1, 1))), "depths: got .*, expected 4 sequences, one a stage"),
    (dict(depths=(1, 1, 4, 2)), r"depths: got \(1, 1, 4, 2\), expected 4 sequences, one a stage"),
    (dict(depths=((1,), (1,), (2, 1), (2, 0))), r"depths of stage 3: got 2 \(2, 1\), expected one a width of"),
    (dict(depths=((1,), (-1,), (2, 1, 1), (2, 0))), "depths of stage 2: got -1, expected whole numbers from 0 up"),
    (dict(widths=((16,), (32,), (32, 64, 48), (64, 96))), r"widths of stage 3: got \(32, 64, 48\), expected them"),
    (dict(widths=((16,), (32,), (32, 48, 64), (-64, 96))), "widths of stage 4: got -64, expected positive"),
]
HEADS_ERRORS = [
    (dict(num_heads=((1,), (2,), (2, 5, 4), (4, 4))), "num_heads of stage 3: got 5, expected a divisor of the width"),
    (dict(num_heads=((1,), (2,), (2, 2), (4, 4))), r"num_heads of stage 3: got \(2, 2\), expected one a width of"),
    (dict(num_heads=((1,), (2,))), "num_heads: got .*, expected 4 sequences, one a stage"),
]


@pytest.mark.parametrize(
    "family, arguments, message",
    [
        *(("deit", *case) for case in DEIT_ERRORS),
        *(("swin", *case) for case in STAGED_ERRORS + HEADS_ERRORS),
        *(("swinpp", *case) for case in STAGED_ERRORS[:1] + HEADS_ERRORS[:1]),
        *(("resnet", *case) for case in STAGED_ERRORS[:4]),
        ("resnet", dict(depths=((1,), (1,), (2, 1), (2, 1, 0))), r"depths of stage 3: got 2 \(2, 1\)"),
    ],
    ids=str,
)
def test_errors_name_the_value_and_what_was_expected(family, arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny(family, **arguments)


# ---- (d) names


@ALL
def test_baselines_are_models_of_timm(family):
    module = FAMILIES[family]
    named = {name for name in module.ARCHITECTURES if name.startswith(("steps_", "test_steps_"))}
    assert module.BASELINES.keys() == {name for name in named if not name.endswith("_baseline")}
    for name, baseline in module.BASELINES.items():
        assert stepsnet.baseline_of(name) == baseline
        assert timm.is_model(name) and timm.is_model(baseline)
        assert baseline not in module.BASELINES


@pytest.mark.parametrize("name", ["resnet18", "swinpp_tiny_window7_224", "test_steps_swin_baseline", ""])
def test_baseline_of_another_name(name):
    with pytest.raises(ValueError, match=f"model: got '{name}', expected a Steps model.*steps_deit_small_patch16_224"):
        stepsnet.baseline_of(name)


def test_registry():
    names = model_names()
    assert len(names) == len(set(names)) == 16 and not any(name.startswith("test_") for name in names)
    for family in FAMILIES.values():
        for name in family.ARCHITECTURES:
            module = family.__name__.rpartition(".")[2]
            assert name in timm.list_models(module=module)
            cfg = timm.get_pretrained_cfg(name)
            assert cfg.url == "" and cfg.num_classes == 1000 and cfg.architecture == name


@ALL
def test_default_cfg(family):
    model = tiny(family)
    cfg = model.default_cfg
    for key in ("input_size", "mean", "std", "interpolation", "crop_pct", "first_conv", "classifier", "num_classes"):
        assert cfg[key], key
    first, classifier = model.get_submodule(cfg["first_conv"]), model.get_submodule(cfg["classifier"])
    assert isinstance(first, nn.Conv2d) and first.in_channels == 3
    assert classifier is model.get_classifier() and classifier.out_features == 1000


# ---- (e) features


@BOTH
def test_deit_intermediates_are_the_whole_stream_after_each_block(reverse):
    """[y_i, x_{i+1} …]: block by block the first channels are rewritten and the others are still there."""
    model = tiny("deit", reverse=reverse).eval()
    x = images(32)
    z = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
    embedded, expected = z, []
    for network, width in zip(model.blocks.networks, model.blocks.widths):
        for block in network:
            z = torch.cat([block(z[..., :width]), z[..., width:]], -1)
            expected.append(z)
    if reverse:  # the last block puts [x_3, y_2, y_1] into the output's order
        expected[-1] = torch.cat([z[..., 48:], z[..., 32:48], z[..., :32]], -1)
    final, features = model.forward_intermediates(x, return_prefix_tokens=True, output_fmt="NLC")
    assert len(features) == len(expected) == 9
    for (tokens, prefix), z in zip(features, expected):
        torch.testing.assert_close(torch.cat([prefix, tokens], 1), z)
    torch.testing.assert_close(final, model.forward_features(x))
    torch.testing.assert_close(model.norm(expected[-1]), model.forward_features(x))
    if not reverse:  # until the second step, x_2 and x_3 are as embedded
        torch.testing.assert_close(features[3][0][..., 32:], embedded[:, 1:, 32:], rtol=0, atol=0)
        assert not torch.equal(features[4][0][..., 32:48], embedded[:, 1:, 32:48])


STOPS = pytest.mark.parametrize(
    "family, reverse",
    [(family, reverse) for family in TINY for reverse in (False, True)],
)


@STOPS
def test_intermediates_that_stop_early_are_the_same(family, reverse):
    model, x = tiny(family, reverse=reverse).eval(), image_of(family)
    features = model.forward_intermediates(x, intermediates_only=True)
    for i, expected in enumerate(features):
        (feature,) = model.forward_intermediates(x, indices=[i], intermediates_only=True, stop_early=True)
        torch.testing.assert_close(feature, expected)


@STOPS
def test_a_pruned_model_gives_the_same_features(family, reverse):
    x = image_of(family)
    whole = tiny(family, reverse=reverse).eval()
    features = whole.forward_intermediates(x, intermediates_only=True)
    for i in range(len(features)):
        model = tiny(family, reverse=reverse).eval()
        assert model.prune_intermediate_layers([i]) == [i]
        assert len(blocks_of(model)) <= len(blocks_of(whole))
        (feature,) = model.forward_intermediates(x, indices=[i], intermediates_only=True)
        torch.testing.assert_close(feature, features[i])
    model = tiny(family, reverse=reverse)
    model.prune_intermediate_layers([1])
    assert len(blocks_of(model)) < len(blocks_of(whole))


@ALL
def test_a_pruned_model_can_checkpoint(family):
    model, x = tiny(family), image_of(family)
    model.prune_intermediate_layers([1])
    expected = gradients_of_features(model, x)
    model.set_grad_checkpointing()
    assert_same(gradients_of_features(model, x), expected, rtol=1e-4, atol=1e-4)


def gradients_of_features(model, x):
    model.zero_grad()
    y = model.forward_features(x)
    (y * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@BOTH
@ALL
def test_features_only(family, reverse):
    name, defaults, _ = TINY[family]
    x = image_of(family)
    torch.manual_seed(0)
    backbone = timm.create_model(name, features_only=True, reverse=reverse, **defaults).eval()
    torch.manual_seed(0)
    model = timm.create_model(name, reverse=reverse, **defaults).eval()
    missing, unexpected = model.load_state_dict(
        {key.removeprefix("model.").replace("layers_", "layers."): v for key, v in backbone.state_dict().items()},
        strict=False,
    )
    assert not unexpected and all(key.startswith(("norm", "head", "fc", "blocks.networks")) for key in missing)
    features = backbone(x)
    if family == "deit":
        expected = model.forward_intermediates(x, indices=3, intermediates_only=True)
    else:
        expected = model.forward_intermediates(x, intermediates_only=True)
    assert len(features) == len(expected) == len(backbone.feature_info.channels())
    side = x.shape[-1]
    for feature, other, channels, reduction in zip(
        features, expected, backbone.feature_info.channels(), backbone.feature_info.reduction()
    ):
        feature = feature.movedim(-1, 1) if family.startswith("swin") else feature
        torch.testing.assert_close(feature, other)
        assert feature.shape == (2, channels, -(-side // reduction), -(-side // reduction))


@ALL
def test_features_at_chosen_indices(family):
    name, defaults, _ = TINY[family]
    backbone = timm.create_model(name, features_only=True, out_indices=(0, 2), **defaults)
    assert [f.shape[0] for f in backbone(image_of(family))] == [2, 2]
    model = timm.create_model(name, **defaults)
    assert backbone.feature_info.channels() == [model.feature_info[i]["num_chs"] for i in (0, 2)]
    for info in model.feature_info:
        assert model.get_submodule(info["module"]) is not None


def test_feature_info_counts_blocks_in_deit_and_stages_elsewhere():
    deit = tiny("deit")
    assert [deit.get_submodule(info["module"]) for info in deit.feature_info] == blocks_of(deit)
    assert {info["num_chs"] for info in deit.feature_info} == {64}  # the whole stream, in narrow steps too
    assert [info["num_chs"] for info in tiny("swin").feature_info] == [16, 32, 64, 96]
    assert [info["num_chs"] for info in tiny("resnet").feature_info] == [64, 32, 64, 96, 128]


@ALL
def test_hooks_on_blocks_fire_in_order(family):
    """What feature extractors rely on; also inside forward_intermediates."""
    model, x = tiny(family).eval(), image_of(family)
    for forward in (model, model.forward_intermediates):
        seen = []
        handles = [b.register_forward_hook(lambda m, a, o, seen=seen: seen.append(m)) for b in blocks_of(model)]
        forward(x)
        for handle in handles:
            handle.remove()
        assert seen == blocks_of(model)


# ---- (f) parameter groups


@BOTH
@ALL
def test_groups_follow_the_order_of_execution(family, reverse):
    """Layer by layer: a stem, one group a block, and a head; depth in blocks, not in steps."""
    model, x = tiny(family, reverse=reverse).eval(), image_of(family)
    groups = group_parameters(model, model.group_matcher(), reverse=True)
    assert groups.keys() == dict(model.named_parameters()).keys()
    assert set(groups.values()) == set(range(1 + len(blocks_of(model)) + 1))
    order = execution_order(model, x)
    ids = [max(groups[f"{name}.{p}"] for p, _ in model.get_submodule(name).named_parameters()) for name in order[1:]]
    assert ids == sorted(ids)
    named = {name: module for name, module in model.named_modules() if isinstance(module, BLOCKS)}
    of_block = [{groups[f"{name}.{p}"] for p, _ in block.named_parameters()} for name, block in named.items()]
    assert all(len(ids) == 1 for ids in of_block) and len(set.union(*of_block)) == len(of_block)
    assert groups[list(groups)[-1]] == max(groups.values())


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("case", PARITY)
def test_groups_of_one_step_are_the_baselines(case, coarse):
    model, baseline, _ = pair(case)
    theirs = group_parameters(baseline, baseline.group_matcher(coarse), reverse=True)
    ours = group_parameters(model, model.group_matcher(coarse), reverse=True)
    assert ours == key_map(model)(theirs)


@ALL
def test_layer_decay(family):
    model = tiny(family)
    optimizer = create_optimizer_v2(model, "adamw", lr=1.0, weight_decay=0.05, layer_decay=0.75)
    groups = group_parameters(model, model.group_matcher(), reverse=True)
    scale = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    unweighted = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    last = max(groups.values())
    for name, parameter in model.named_parameters():
        assert scale[id(parameter)] == pytest.approx(0.75 ** (last - groups[name])), name
        assert decay[id(parameter)] == (0.0 if parameter.dim() < 2 or name in unweighted else 0.05), name


def test_no_weight_decay():
    deit = tiny("deit")
    assert {"pos_embed", "cls_token"} <= set(deit.no_weight_decay())
    for family in ("swin", "swinpp"):
        model = tiny(family)
        tables = {name for name, _ in model.named_parameters() if name.endswith("relative_position_bias_table")}
        assert len(tables) == len(blocks_of(model)) and tables <= set(model.no_weight_decay())


# ---- (g) gradient checkpointing


@BOTH
@ALL
def test_gradient_checkpointing_gives_the_same_gradients(family, reverse):
    model, x = tiny(family, reverse=reverse, drop_path_rate=0.0), image_of(family)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t)
    plain = {key: value.clone() for key, value in model.state_dict().items()}
    with hooks:
        logits, expected = gradients(model, x)
    before = sum(saved)
    model.load_state_dict(plain)  # the batch norms' averages
    model.set_grad_checkpointing()
    saved.clear()
    with hooks:
        ours, grads = gradients(model, x)
    torch.testing.assert_close(ours, logits)
    assert_same(grads, expected, rtol=1e-4, atol=1e-4)
    assert sum(saved) < before
    model.set_grad_checkpointing(False)
    assert not any(container.grad_checkpointing for container in containers_of(model))


def test_gradient_checkpointing_keeps_narrow_inputs():
    """The memory of the paper: 4, 2 and 3 blocks keep 32, 48 and 64 channels; not 64 each."""
    model, x = tiny("deit"), images(32)
    model.set_grad_checkpointing()
    tokens = model.norm_pre(model._pos_embed(model.patch_embed(x))).detach().requires_grad_()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        model.blocks(tokens)
    assert Counter(t.shape[-1] for t in seen if t.numel()) == {32: 4, 48: 2, 64: 3}
    causal = tiny("deit")
    causal.set_grad_checkpointing()
    for forward in (lambda: causal.forward_features(x, is_causal=True), lambda: causal.forward_intermediates(x)):
        seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            forward()
        widths = Counter(t.shape[-1] for t in seen if t.shape[:2] == (2, 5))
        assert (widths[32], widths[48]) == (4, 2)  # block by block too
    torch.testing.assert_close(causal.forward_features(x, is_causal=True), tiny("deit").forward_features(x, None, True))


@ALL
def test_gradient_checkpointing_with_stochastic_depth(family):
    """Recomputed blocks drop the same paths."""
    model, x = tiny(family, drop_path_rate=0.5), image_of(family)
    plain = {key: value.clone() for key, value in model.state_dict().items()}
    results = []
    for enable in (False, True):
        model.load_state_dict(plain)
        model.set_grad_checkpointing(enable)
        torch.manual_seed(3)
        results.append(gradients(model, x))
    torch.testing.assert_close(results[1][0], results[0][0])
    assert_same(results[1][1], results[0][1], rtol=1e-4, atol=1e-4)


# ---- (h) other sizes and heads


@BOTH
@pytest.mark.parametrize("family", ["deit", "swin", "swinpp"])
def test_set_input_size(family, reverse):
    """A model that is resized is one that was built at that size with its weights."""
    small, large = (32, 64) if family == "deit" else (56, 112)
    model = tiny(family, img_size=small, reverse=reverse).eval()
    model.set_input_size(img_size=(large, large))
    built = tiny(family, img_size=large, reverse=reverse).eval()
    if family != "deit":
        built.set_input_size(window_size=14)
        model.set_input_size(window_size=14)
        shapes = [(b.window_size, b.shift_size, b.input_resolution) for b in blocks_of(model)]
        assert shapes == [(b.window_size, b.shift_size, b.input_resolution) for b in blocks_of(built)]
    built.load_state_dict(model.state_dict())
    x = images(large)
    torch.testing.assert_close(model(x), built(x))


def test_deit_of_a_dynamic_size():
    model = tiny("deit").eval()
    assert model(images(64)).shape == (2, 1000)  # the tiny one has dynamic_img_size


@ALL
def test_classifier(family):
    model, x = tiny(family).eval(), image_of(family)
    features = model.forward_features(x)
    pre_logits = model.forward_head(features, pre_logits=True)
    assert pre_logits.shape == (2, model.head_hidden_size)
    torch.testing.assert_close(model.get_classifier()(pre_logits), model(x))
    model.reset_classifier(7)
    assert model(x).shape == (2, 7) and model.num_classes == 7 and model.get_classifier().out_features == 7
    model.reset_classifier(0)
    torch.testing.assert_close(model(x), pre_logits)
    model.reset_classifier(0, "")
    assert model(x).shape == features.shape
    assert timm.create_model(TINY[family][0], num_classes=0, **TINY[family][1])(x).shape == pre_logits.shape


# ---- (i) stochastic depth


def drop_rates(model):
    rates = []
    for block in blocks_of(model):
        paths = [m.drop_prob for m in block.modules() if isinstance(m, DropPath)]
        assert len(set(paths)) <= 1 and len(paths) in (0, 1 if isinstance(block, (BasicBlock, Bottleneck)) else 2)
        rates.append(paths[0] if paths else 0.0)
    return rates


@BOTH
@ALL
def test_drop_path_rates_increase_linearly_over_all_blocks(family, reverse):
    model = tiny(family, drop_path_rate=0.4, reverse=reverse)
    count = len(blocks_of(model))
    assert drop_rates(model) == pytest.approx([0.4 * i / (count - 1) for i in range(count)])
    assert drop_rates(tiny(family)) == pytest.approx(
        [0.1 * i / (count - 1) for i in range(count)] if family.startswith("swin") else [0.0] * count
    )


@pytest.mark.parametrize("case", PARITY)
def test_drop_path_rates_of_one_step_are_the_baselines(case):
    model, baseline, _ = pair(case, drop_path_rate=0.3)
    assert drop_rates(model) == pytest.approx(drop_rates(baseline)) and max(drop_rates(model)) > 0.2


# ---- (j) shifts


@BOTH
@pytest.mark.parametrize("family", ["swin", "swinpp"])
def test_shifts_alternate_through_the_whole_stage(family, reverse):
    """Also where a step has an odd number of blocks: a step boundary does not begin anew."""
    widths = ((16,), (16, 32), (32, 48, 64), (64, 96))
    depths = ((3,), (1, 2), (3, 1, 1), (1, 1))
    model = tiny(family, img_size=224, widths=widths, depths=depths, reverse=reverse)
    shifts = [[block.shift_size for block in stage.blocks] for stage in model.layers]
    assert shifts[:3] == [[(0, 0), (3, 3)] * 1 + [(0, 0)], [(0, 0), (3, 3), (0, 0)], [(0, 0), (3, 3)] * 2 + [(0, 0)]]
    assert shifts[3] == [(0, 0), (0, 0)]  # 7 × 7: one window
    assert all(block.window_size == (7, 7) for block in blocks_of(model))


# ---- (k) compilers and other machinery


@ALL
def test_compile_without_a_graph_break(family):
    model, x = tiny(family).eval(), image_of(family)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), model(x))


@ALL
def test_export(family):
    model, x = tiny(family).eval(), image_of(family)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@ALL
def test_script(family):
    name, defaults, _ = TINY[family]
    with timm.layers.set_scriptable(True):
        model = timm.create_model(name, **defaults).eval()
    x = image_of(family)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))


@ALL
def test_autocast(family):
    model, x = tiny(family).eval(), image_of(family)
    with torch.autocast("cpu", torch.bfloat16):
        half = model(x)
    assert torch.corrcoef(torch.stack([half.float().flatten(), model(x).flatten()]))[0, 1] > 0.99


@ALL
def test_pretrained_weights_of_the_same_steps(family, tmp_path):
    """A checkpoint of ours loads back through timm's filters."""
    model, x = tiny(family).eval(), image_of(family)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    name, defaults, _ = TINY[family]
    other = timm.create_model(
        name, pretrained=True, pretrained_cfg_overlay=dict(file=tmp_path / "weights.pt"), **defaults
    )
    other.eval()
    torch.testing.assert_close(other(x), model(x))


# ---- (l) importing


IMPORTS = """
import os, sys
import torch, torchvision  # once, for they take long

def check(first):
    exec(first)
    import stepsnet, timm  # and nothing of ours that would load the models by itself
    missing = [name for name in {names} if not timm.is_model(name)]
    assert not missing, (first, missing)
    assert callable(stepsnet.load_baseline)

for first in {orders}:
    assert not {{"timm", "stepsnet"}} & sys.modules.keys()
    if not (child := os.fork()):
        status = 1
        try:
            check(first)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, first
"""


def run_python(code):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_every_order_of_imports_registers_our_models():
    orders = [
        "import stepsnet; stepsnet.StepsNet; assert 'timm' not in sys.modules; import timm",
        "import timm, stepsnet",
        "from stepsnet.models import steps_swin",
    ]
    names = [name for family in FAMILIES.values() for name in family.ARCHITECTURES]
    run_python(IMPORTS.format(orders=orders, names=names))


def test_importing_is_quick():
    """The command line answers without torch."""
    run_python("import stepsnet, sys; dir(stepsnet); assert not {'torch', 'timm'} & sys.modules.keys()")


def test_public_names():
    assert set(stepsnet.__all__) <= set(dir(stepsnet))
    assert all(getattr(stepsnet, name).__name__ == name for name in stepsnet.__all__)
    with pytest.raises(AttributeError, match="module 'stepsnet' has no attribute 'nothing'"):
        _ = stepsnet.nothing


# ---- (m) at the paper's scale

ROWS = json.loads(resources.files("stepsnet").joinpath("paper/tables.json").read_text(encoding="utf-8"))
SIZES = {
    "ResNet": {"18": "resnet18", "34": "resnet34", "50": "resnet50"},
    "DeiT": {size[0].upper(): f"deit_{size}_patch16_224" for size in ("tiny", "small", "base")},
    "Swin": {size[0].upper(): f"swin_{size}_patch4_window7_224" for size in ("tiny", "small", "base")},
}
ARCHITECTURES = [name for family in FAMILIES.values() for name in family.ARCHITECTURES]


def name_of(row):
    *steps, family, size = row["row"].split("-")
    return "".join(["steps_"] * len(steps)) + SIZES[family][size]


@functools.cache
def on_meta(name):
    with torch.device("meta"):
        return timm.create_model(name)


def counts(model):
    """Blocks, and layers as the paper counts them."""
    blocks = blocks_of(model)
    per_block, around = {
        Block: (5, 2),  # patch embedding, head
        SwinTransformerBlock: (5, 5),  # and three mergings
        BasicBlock: (2, 2),  # stem, head
        Bottleneck: (3, 2),
    }[type(blocks[0])]
    return len(blocks), per_block * len(blocks) + around


@pytest.mark.parametrize("row", [row for row in ROWS if row["table"] == "1"], ids=lambda row: row["row"])
def test_table_1(row):
    model = on_meta(name_of(row))
    assert counts(model) == (row["blocks"], row["layers"])
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == row["params_M"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_builds(name):
    model = on_meta(name)
    size = model.default_cfg["input_size"]
    assert model(torch.empty(1, *size, device="meta")).shape == (1, 1000)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_302_layer_deit():
    model = on_meta("steps_deit_base_d60_patch16_224")
    assert counts(model) == (60, 302)
    params = sum(p.numel() for p in model.parameters())
    assert round(params / 1e6, 1) == 42.1
    baseline = sum(p.numel() for p in on_meta("deit_base_patch16_224").parameters())
    assert params / baseline == pytest.approx(0.5, abs=0.02)  # "50% fewer parameters"


def test_a_zero_block_step_narrows_swins_last_stage():
    model = on_meta("steps_swin_tiny_patch4_window7_224")
    assert model.layers[3].downsample.reduction.out_features == model.norm.normalized_shape[0] == 544
    assert model.head.fc.in_features == 544
    resnet = on_meta("steps_resnet18")
    assert resnet.layer4[1].widths[-1] == resnet.layer4[0].bn2.num_features == 512
    assert len(resnet.layer4[1].networks[-1]) == len(resnet.layer3[1].networks[-1]) == 0
