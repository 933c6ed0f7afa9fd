"""Every family in training, at other sizes and in compilers: checkpointing, stochastic depth, export, scripts."""

from collections import Counter

import pytest
import timm
import torch
from model_families import (
    ALL,
    BOTH,
    PARITY,
    TINY,
    assert_same,
    blocks_of,
    containers_of,
    gradients,
    image_of,
    images,
    pair,
    tiny,
)
from timm.layers import DropPath
from timm.models.resnet import BasicBlock, Bottleneck

torch.set_num_threads(1)  # xdist already uses the cores


# ---- gradient checkpointing


@BOTH
@ALL
def test_gradient_checkpointing_gives_the_same_gradients(family, bow_tie):
    """With stochastic depth: blocks that are recomputed drop the same paths."""
    model, x = tiny(family, bow_tie, drop_path_rate=0.5), image_of(family)
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    results, saved = [], []
    for enable in (False, True):
        model.load_state_dict(initial)  # the batch norms' averages
        model.set_grad_checkpointing(enable)
        torch.manual_seed(3)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):
            results.append(gradients(model, x))
        saved.append(sum(sizes))
    torch.testing.assert_close(results[1][0], results[0][0])
    assert_same(results[1][1], results[0][1], rtol=1e-4, atol=1e-4)
    assert saved[1] < saved[0]
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


# ---- other sizes and heads


@BOTH
@pytest.mark.parametrize("family", ["deit", "swin", "swinpp"])
def test_set_input_size(family, bow_tie):
    """A model that is resized is one that was built at that size with its weights."""
    small, large = (32, 64) if family == "deit" else (56, 112)
    model = tiny(family, bow_tie, img_size=small).eval()
    model.set_input_size(img_size=(large, large))
    built = tiny(family, bow_tie, img_size=large).eval()
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


# ---- stochastic depth


def drop_rates(model):
    rates = []
    for block in blocks_of(model):
        paths = [m.drop_prob for m in block.modules() if isinstance(m, DropPath)]
        assert len(set(paths)) <= 1 and len(paths) in (0, 1 if isinstance(block, (BasicBlock, Bottleneck)) else 2)
        rates.append(paths[0] if paths else 0.0)
    return rates


@BOTH
@ALL
def test_drop_path_rates_increase_linearly_over_all_blocks(family, bow_tie):
    model = tiny(family, bow_tie, drop_path_rate=0.4)
    count = len(blocks_of(model))
    assert drop_rates(model) == pytest.approx([0.4 * i / (count - 1) for i in range(count)])
    assert drop_rates(tiny(family, bow_tie)) == pytest.approx(
        [0.1 * i / (count - 1) for i in range(count)] if family.startswith("swin") else [0.0] * count
    )


@pytest.mark.parametrize("case", PARITY)
def test_drop_path_rates_of_one_step_are_the_baselines(case):
    model, baseline, _ = pair(case, drop_path_rate=0.3)
    assert drop_rates(model) == pytest.approx(drop_rates(baseline)) and max(drop_rates(model)) > 0.2


# ---- shifts


@pytest.mark.parametrize("family", ["swin", "swinpp"])
def test_shifts_alternate_through_the_whole_stage(family):
    """Also where a step has an odd number of blocks: a step boundary does not begin anew."""
    widths = ((16,), (16, 32), (32, 48, 64), (64, 96))
    depths = ((3,), (1, 2), (3, 1, 1), (1, 1))
    model = tiny(family, img_size=224, widths=widths, depths=depths)
    shifts = [[block.shift_size for block in stage.blocks] for stage in model.layers]
    assert shifts[:3] == [[(0, 0), (3, 3)] * 1 + [(0, 0)], [(0, 0), (3, 3), (0, 0)], [(0, 0), (3, 3)] * 2 + [(0, 0)]]
    assert shifts[3] == [(0, 0), (0, 0)]  # 7 × 7: one window
    assert all(block.window_size == (7, 7) for block in blocks_of(model))


# ---- compilers

SHALLOW = {
    "deit": (1, 1, 1),
    "swin": ((2,), (0,), (1, 1, 0), (0, 1)),  # with a shifted window
    "swinpp": ((0,), (0,), (1, 1, 0), (0, 0)),
    "resnet": ((0,), (0,), (1, 1, 1), (0, 0, 1)),
}


@ALL
def test_compile_without_a_graph_break(family):
    model, x = tiny(family, depths=SHALLOW[family]).eval(), image_of(family)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), model(x))


@ALL
def test_export(family):
    model, x = tiny(family, depths=SHALLOW[family]).eval(), image_of(family)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@ALL
def test_script(family):
    name, defaults, _ = TINY[family]
    with timm.layers.set_scriptable(True):
        model = timm.create_model(name, depths=SHALLOW[family], **defaults).eval()
    x, scripted = image_of(family), torch.jit.script(model)
    torch.testing.assert_close(scripted(x), model(x))
    if family == "deit":  # as timm's ViT, which gives other numbers with a mask
        with pytest.raises(torch.jit.Error, match="a scripted Steps-DeiT takes no attn_mask and no is_causal"):
            scripted(x, is_causal=True)


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
