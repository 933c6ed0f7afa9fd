"""Every family: its 1-step model is timm's baseline, and the blocks of Swin++ are their formula."""

import pytest
import timm
import torch
import torch.nn.functional as F
from model_families import PARITY, assert_same, blocks_of, gradients, images, key_map, pair, stir, tiny
from torch import nn

import stepsnet
from stepsnet.models import steps_swin
from stepsnet.models.swin_plus import SwinPlusBlock

torch.set_num_threads(1)  # xdist already uses the cores


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
    of_stages = tiny("swin", head_dim=(8, 8, 16, 8), global_pool="max")
    attentions = [[block.attn for block in blocks_of(stage)] for stage in of_stages.layers]
    sizes = [{attn.qkv.out_features // attn.num_heads // 3 for attn in stage} for stage in attentions]
    assert sizes == [{8}, {8}, {16}, {8}] and of_stages.global_pool == of_stages.head.global_pool.pool_type == "max"
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
