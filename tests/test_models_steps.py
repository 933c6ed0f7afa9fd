"""Every family: its blocks in steps of any profile of widths, and errors in its arguments."""

import numpy
import pytest
import timm
import torch
from model_families import (
    ALL,
    BOTH,
    BOW_TIE,
    blocks_of,
    containers_of,
    image_of,
    images,
    tiny,
)
from step_networks import write_out
from timm.models.resnet import BasicBlock

from stepsnet import StepsNet

torch.set_num_threads(1)  # xdist already uses the cores


# ---- the steps themselves


def plain_widths(family):
    return {
        "deit": ((32, 48, 64), (2, 1, 1), (2, 2, 4)),
        "resnet": (((8,), (8, 16), (12, 16, 24), (16, 24, 32)), ((1,), (1, 2), (2, 1, 1), (2, 1, 0)), None),
    }.get(family, (((16,), (16, 32), (32, 48, 64), (64, 96)), ((1,), (1, 2), (2, 1, 1), (2, 0)), None))


@ALL
def test_overrides_reach_every_block(family):
    widths, depths, heads = plain_widths(family)
    plain = dict(widths=widths, depths=depths, **(dict(num_heads=heads) if heads else {}))
    for arguments in (plain, BOW_TIE[family]):
        model = tiny(family, **arguments, num_classes=5, in_chans=1).eval()
        widths, depths = arguments["widths"], arguments["depths"]
        nested = [(widths, depths)] if family == "deit" else list(zip(widths, depths))
        expansion = 4 if family == "resnet" else 1
        containers = containers_of(model)
        assert len(containers) == len(nested)
        for container, (stage_widths, stage_depths) in zip(containers, nested):
            assert container.widths == tuple(expansion * width for width in stage_widths)
            assert container.blocks_per_step() == list(stage_depths)
            assert container.dim == (1 if family == "resnet" else -1)
            for network, width in zip(container.networks, container.widths):
                for block in network:
                    first = block.conv1.in_channels if family == "resnet" else block.mlp.fc1.in_features
                    last = block.conv3.out_channels if family == "resnet" else block.mlp.fc2.out_features
                    assert first == last == width
        assert model(image_of(family, channels=1)).shape == (2, 5)
        assert model.num_features == model.head_hidden_size == containers[-1].width == max(containers[-1].widths)
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


def test_a_family_without_heads_takes_none():
    widths, depths, _ = plain_widths("resnet")
    for arguments in ({}, {"widths": widths, "depths": depths}):
        with pytest.raises(TypeError, match="num_heads"):
            tiny("resnet", num_heads=((1,), (2,), (4,), (8,)), **arguments)


def test_our_mixer_has_features():
    arguments = dict(img_size=32, patch_size=8, embed_dim=24, num_blocks=4)
    torch.manual_seed(0)
    features = timm.create_model("mixer_ti16_224", features_only=True, out_indices=(1, 3), **arguments).eval()
    torch.manual_seed(0)
    model = timm.create_model("mixer_ti16_224", **arguments).eval()
    images = torch.randn(2, 3, 32, 32)
    expected = model.forward_intermediates(images, indices=(1, 3), intermediates_only=True)
    for ours, theirs in zip(features(images), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_deit_runs_its_blocks_as_eq_5():
    model = tiny("deit").eval()
    x = images(32)
    f1, f2, f3 = model.blocks.networks
    z = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
    x1, x2, x3 = z.split([32, 16, 16], -1)
    y = f3(torch.cat([f2(torch.cat([f1(x1), x2], -1)), x3], -1))
    torch.testing.assert_close(model.forward_features(x), model.norm(y))
    torch.testing.assert_close(model(x), model.head(model.norm(y)[:, 0]))


@BOTH
@pytest.mark.parametrize("family", ["swin", "swinpp", "resnet"])
def test_a_stage_is_the_rule_written_out(family, bow_tie):
    """Of the last stage's widest step, which has no blocks, the channels are what the downsampling made."""
    model = tiny(family, bow_tie).eval()
    stages = [model.layer3, model.layer4] if family == "resnet" else model.layers[2:]
    widths = model.layer2[1].width if family == "resnet" else 32
    shape = (2, widths, 8, 8) if family == "resnet" else (2, 8, 8, widths)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for stage in stages:
        entry, container = stage if family == "resnet" else (stage.downsample, stage.blocks)
        z = entry(x)
        expected = write_out(container.networks, container.widths, z, container.dim)
        x = stage(x)
        torch.testing.assert_close(x, expected)
    if family != "resnet":
        torch.testing.assert_close(x[..., 64:], z[..., 64:], rtol=0, atol=0)


def test_deit_takes_a_mask():
    model = tiny("deit").eval()
    x = images(32)
    causal = model.forward_features(x, is_causal=True)
    mask = torch.full((5, 5), float("-inf")).triu(1)
    torch.testing.assert_close(causal, model.forward_features(x, attn_mask=mask))
    assert not torch.allclose(causal, model.forward_features(x))
    no_mask = model.forward_features(x, attn_mask=torch.zeros(5, 5))
    torch.testing.assert_close(no_mask, model.forward_features(x))


def jax_vit(blocks, width, draw):
    """The weights of a ViT as JAX has them; ``draw`` makes an array of a shape."""
    of_norm = {"scale": (width,), "bias": (width,)}
    parts = {
        "embedding": {"kernel": (16, 16, 3, width), "bias": (width,)},
        "Transformer/encoder_norm": of_norm,
        "head": {"kernel": (width, 3), "bias": (3,)},
    }
    for index in range(blocks):
        block, attention = f"Transformer/encoderblock_{index}", "MultiHeadDotProductAttention_1"
        parts |= {f"{block}/LayerNorm_0": of_norm, f"{block}/LayerNorm_2": of_norm}
        projection = {"kernel": (width, 1, width), "bias": (1, width)}
        parts |= {f"{block}/{attention}/{name}": projection for name in ("query", "key", "value")}
        parts[f"{block}/{attention}/out"] = {"kernel": (1, width, width), "bias": (width,)}
        parts[f"{block}/MlpBlock_3/Dense_0"] = {"kernel": (width, 4 * width), "bias": (4 * width,)}
        parts[f"{block}/MlpBlock_3/Dense_1"] = {"kernel": (4 * width, width), "bias": (width,)}
    shapes = {"cls": (1, 1, width), "Transformer/posembed_input/pos_embedding": (1, 5, width)}
    shapes |= {f"{part}/{name}": shape for part, names in parts.items() for name, shape in names.items()}
    return {name: draw(shape) for name, shape in shapes.items()}


def test_weights_of_jax_are_read_as_timm_reads_them(tmp_path):
    numpy.savez(tmp_path / "vit.npz", **jax_vit(2, 64, numpy.random.default_rng(0).standard_normal))
    small = dict(img_size=32, num_classes=3, checkpoint_path=str(tmp_path / "vit.npz"))
    theirs = timm.create_model("vit_tiny_patch16_224", embed_dim=64, depth=2, num_heads=1, **small).eval()
    one = dict(widths=(64,), depths=(2,), num_heads=(1,))
    ours = timm.create_model("steps_deit_tiny_patch16_224", **one, **small).eval()
    assert type(ours.blocks) is StepsNet and torch.equal(ours(images(32)), theirs(images(32)))
    gains = dict(residual="layer_scale", residual_options={"initial": 1.0})  # which leave a plain network
    scaled = timm.create_model("steps_deit_tiny_patch16_224", **one, **small, **gains).eval()
    torch.testing.assert_close(scaled(images(32)), theirs(images(32)))
    with pytest.raises(ValueError, match=r"vit\.npz: got norms of a ViT, expected a design that leaves"):
        timm.create_model("steps_deit_tiny_patch16_224", **one, **small, residual="rezero")
    several = timm.create_model("test_steps_deit", img_size=32, num_classes=3)
    before = several.patch_embed.proj.weight.clone()
    with pytest.raises(ValueError, match=r"vit\.npz: got weights of one width, expected a model of one step"):
        timm.models.load_checkpoint(several, str(tmp_path / "vit.npz"))
    assert torch.equal(several.patch_embed.proj.weight, before)


# ---- errors

DEIT_ERRORS = [
    (dict(widths=(32, 48, 64), depths=(1, 1)), r"depths: got \(1, 1\), expected one per width of \(32, 48, 64\)"),
    (dict(widths=(), depths=()), r"widths: got \(\), expected positive integers"),
    (dict(widths=(0, 32, 64)), r"widths: got \(0, 32, 64\), expected positive integers"),
    (dict(widths=(32, 48.0, 64)), r"widths: got \(32, 48\.0, 64\), expected positive integers"),
    (dict(depths=(1, -1, 1)), r"depths: got \(1, -1, 1\), expected integers of at least 0"),
    (dict(depths=(1, 1.5, 1)), r"depths: got \(1, 1\.5, 1\), expected integers of at least 0"),
    (dict(num_heads=(1, 5, 2)), "num_heads: got 5, expected a divisor of the width 48"),
    (dict(num_heads=(1, 0, 2)), "num_heads: got 0, expected a divisor of the width 48"),
    (dict(num_heads=(1, 2)), r"num_heads: got \(1, 2\), expected one per width of \(32, 48, 64\)"),
    (dict(embed_dim=96), "embed_dim: got 96, expected widths= and depths=, with an entry for each step"),
    (dict(num_heads=3), "num_heads: got 3, expected a list with an entry for each step or stage"),
]
STAGED_ERRORS = [
    (dict(widths=((16,), (32,), (64,))), r"widths: got \(\(16,\), \(32,\), \(64,\)\), expected 4 sequences"),
    (dict(widths=(16, 32, 64, 96)), r"widths: got \(16, 32, 64, 96\), expected 4 sequences, one per stage"),
    (dict(depths=((1,), (1,), (2, 1, 1))), "depths: got .*, expected 4 sequences, one per stage"),
    (dict(depths=(1, 1, 4, 2)), r"depths: got \(1, 1, 4, 2\), expected 4 sequences, one per stage"),
    (dict(depths=((1,), (1,), (2, 1), (2, 0))), r"depths of stage 3: got \(2, 1\), expected one per width of"),
    (dict(depths=((1,), (-1,), (2, 1, 1), (2, 0))), r"depths of stage 2: got \(-1,\), expected integers of at least 0"),
    (
        dict(widths=((16,), (32,), (32, 48, 64), (-64, 96))),
        r"widths of stage 4: got \(-64, 96\), expected positive integers",
    ),
]
HEADS_ERRORS = [
    (dict(num_heads=((1,), (2,), (2, 5, 4), (4, 4))), "num_heads of stage 3: got 5, expected a divisor of the width"),
    (dict(num_heads=((1,), (2,), (2, 2), (4, 4))), r"num_heads of stage 3: got \(2, 2\), expected one per width of"),
    (dict(num_heads=((1,), (2,))), "num_heads: got .*, expected 4 sequences, one per stage"),
    (dict(num_heads=((1,), 2, (2, 2, 4), (4, 4))), "num_heads: got .*, expected 4 sequences, one per stage"),
    (dict(head_dim=(8, 8)), r"head_dim: got \(8, 8\), expected one number, or 4 numbers, one per stage"),
]


@pytest.mark.parametrize(
    "family, arguments, message",
    [
        *(("deit", *case) for case in DEIT_ERRORS),
        *(("swin", *case) for case in STAGED_ERRORS + HEADS_ERRORS),
        *(("swinpp", *case) for case in STAGED_ERRORS[:1] + HEADS_ERRORS[:1]),
        *(("resnet", *case) for case in STAGED_ERRORS[:4]),
        ("resnet", dict(depths=((1,), (1,), (2, 1), (2, 1, 0))), r"depths of stage 3: got \(2, 1\)"),
        ("resnet", dict(block=(BasicBlock,) * 4), "block: got .*, expected timm's BasicBlock or Bottleneck"),
    ],
    ids=str,
)
def test_errors_name_the_value_and_what_was_expected(family, arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny(family, **arguments)
