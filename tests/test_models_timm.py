"""Every family works with timm's tools: features, parameter groups and layer decay."""

import re

import pytest
import timm
import torch
from model_families import (
    ALL,
    BLOCKS,
    BOTH,
    PARITY,
    TINY,
    arguments_of,
    assert_same,
    blocks_of,
    image_of,
    images,
    key_map,
    pair,
    tiny,
)
from timm.models._manipulate import group_parameters
from timm.optim import create_optimizer_v2

torch.set_num_threads(1)  # xdist already uses the cores


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


# ---- features


@BOTH
def test_deit_intermediates_are_the_whole_stream_after_each_block(bow_tie):
    """[y_i, x_{i+1} …]: block by block the first channels are rewritten and the others are still there."""
    model = tiny("deit", bow_tie).eval()
    x = images(32)
    z = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
    embedded, expected = z, []
    for network, width in zip(model.blocks.networks, model.blocks.widths):
        for block in network:
            z = torch.cat([block(z[..., :width]), z[..., width:]], -1)
            expected.append(z)
    final, features = model.forward_intermediates(x, return_prefix_tokens=True, output_fmt="NLC")
    assert len(features) == len(expected) == 9
    for (tokens, prefix), z in zip(features, expected):
        torch.testing.assert_close(torch.cat([prefix, tokens], 1), z)
    torch.testing.assert_close(final, model.forward_features(x))
    torch.testing.assert_close(model.norm(expected[-1]), model.forward_features(x))
    if not bow_tie:  # until the second step, x_2 and x_3 are as embedded
        torch.testing.assert_close(features[3][0][..., 32:], embedded[:, 1:, 32:], rtol=0, atol=0)
        assert not torch.equal(features[4][0][..., 32:48], embedded[:, 1:, 32:48])


@BOTH
@ALL
def test_intermediates_that_stop_early_are_the_same(family, bow_tie):
    model, x = tiny(family, bow_tie).eval(), image_of(family)
    features = model.forward_intermediates(x, intermediates_only=True)
    for i, expected in enumerate(features):
        (feature,) = model.forward_intermediates(x, indices=[i], intermediates_only=True, stop_early=True)
        torch.testing.assert_close(feature, expected)


@BOTH
@ALL
def test_a_pruned_model_gives_the_same_features(family, bow_tie):
    x = image_of(family)
    whole = tiny(family, bow_tie).eval()
    features = whole.forward_intermediates(x, intermediates_only=True)
    for i in range(len(features)):
        model = tiny(family, bow_tie).eval()
        assert model.prune_intermediate_layers([i]) == [i]
        assert len(blocks_of(model)) <= len(blocks_of(whole))
        (feature,) = model.forward_intermediates(x, indices=[i], intermediates_only=True)
        torch.testing.assert_close(feature, features[i])
    model = tiny(family, bow_tie)
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
@pytest.mark.parametrize("family", ["resnet", "swin", "swinpp"])
def test_features_by_a_symbolic_trace_end_in_tensors(family, bow_tie):
    name, arguments = TINY[family][0], arguments_of(family, bow_tie)
    torch.manual_seed(0)
    model = timm.create_model(name, **arguments).eval()
    torch.manual_seed(0)
    traced = timm.create_model(name, features_only=True, feature_cls="fx", **arguments).eval()
    x = image_of(family)
    channels_first = model.forward_intermediates(x, intermediates_only=True)
    for found, expected in zip(traced(x), channels_first, strict=True):
        found = found if family == "resnet" else found.permute(0, 3, 1, 2)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["hook", "fx"])
def test_channels_of_what_blocks_write(kind):
    """By hooks and by a trace timm gets a block's output alone, without the channels that wait."""
    model = timm.create_model("test_steps_deit", features_only=True, feature_cls=kind, out_indices=(0, 4, 8)).eval()
    assert model.feature_info.channels() == [32, 48, 64] == [one.shape[-1] for one in model(torch.zeros(1, 3, 64, 64))]


@BOTH
@ALL
def test_features_only(family, bow_tie):
    name, arguments = TINY[family][0], arguments_of(family, bow_tie)
    x = image_of(family)
    torch.manual_seed(0)
    backbone = timm.create_model(name, features_only=True, **arguments).eval()
    torch.manual_seed(0)
    model = timm.create_model(name, **arguments).eval()
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


# ---- parameter groups


@BOTH
@ALL
def test_groups_follow_the_order_of_execution(family, bow_tie):
    """Layer by layer: a stem, one group a block, and a head; depth in blocks, not in steps."""
    model, x = tiny(family, bow_tie).eval(), image_of(family)
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


@pytest.mark.parametrize("design", ["attention_residuals", "deep_cross_attention"])
def test_the_wiring_at_the_end_of_a_step_is_of_its_last_block(design):
    model = timm.create_model("test_steps_deit", residual=design)
    groups = group_parameters(model, model.group_matcher(), reverse=True)
    of_blocks = {}  # the last one of each step
    for name, group in groups.items():
        if match := re.match(r"blocks\.networks\.(\d+)\.\d+\.", name):
            of_blocks[match[1]] = max(group, of_blocks.get(match[1], 0))
    wirings = {name: group for name, group in groups.items() if ".wiring." in name}
    assert wirings and all(group == of_blocks[name.split(".")[2]] for name, group in wirings.items())


def test_no_weight_decay():
    deit = tiny("deit")
    assert {"pos_embed", "cls_token"} <= set(deit.no_weight_decay())
    for family in ("swin", "swinpp"):
        model = tiny(family)
        tables = {name for name, _ in model.named_parameters() if name.endswith("relative_position_bias_table")}
        assert len(tables) == len(blocks_of(model)) and tables <= set(model.no_weight_decay())


def test_hooks_into_a_design_of_the_stream_are_refused():
    """They would get its state: of several designs the same tensor behind every block."""
    with pytest.raises(ValueError, match="feature_cls: got hook or fx for a residual design"):
        timm.create_model("test_steps_deit", features_only=True, feature_cls="hook", residual="value_residual")
