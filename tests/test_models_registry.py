"""Every family: the registered names, importing, and the paper's parameters and blocks."""

import functools
import json
import os
from importlib import resources

import pytest
import timm
import torch
from import_orders import check_behind_each, run_python
from model_families import ALL, FAMILIES, blocks_of, tiny
from timm.models.resnet import BasicBlock, Bottleneck
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.vision_transformer import Block
from torch import nn

import stepsnet
from stepsnet import plan_steps
from stepsnet.models import model_names

torch.set_num_threads(1)  # xdist already uses the cores


# ---- names


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


# ---- importing


IMPORTS = """
    import stepsnet, timm  # and nothing of ours that would load the models by itself
    missing = [name for name in {names} if not timm.is_model(name)]
    assert not missing, (first, missing)
    assert callable(stepsnet.load_baseline)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_every_order_of_imports_registers_our_models():
    orders = [
        "import stepsnet; stepsnet.StepsNet; assert 'timm' not in sys.modules; import timm",
        "import timm, stepsnet",
        "from stepsnet.models import steps_swin",
        "import stepsnet; stepsnet.residual.connect([], 'plain')",
    ]
    names = [name for family in FAMILIES.values() for name in family.ARCHITECTURES]
    untouched = "import sys; assert not {'timm', 'stepsnet'} & sys.modules.keys(); "
    check_behind_each([untouched + order for order in orders], IMPORTS.format(names=names), "torch, torchvision")


def test_importing_is_quick_and_a_model_is_built_without_what_is_above_it():
    """The command line answers without torch; models know no recipe and no task."""
    run_python(
        "import stepsnet, sys; dir(stepsnet); assert not {'torch', 'timm'} & sys.modules.keys()\n"
        "from stepsnet.settings.config import ModelSpec; from stepsnet.models.build import build_model\n"
        "build_model(ModelSpec('test_steps_deit', {}))\n"
        "above = ('recipes', 'tasks', 'engine', 'analysis', 'report', 'commands')\n"
        "found = [name for name in sys.modules if name.startswith(tuple(f'stepsnet.{room}' for room in above))]\n"
        "assert not found, found"
    )


def test_public_names():
    assert set(stepsnet.__all__) <= set(dir(stepsnet))
    assert all(getattr(stepsnet, name).__name__ == name for name in stepsnet.__all__)
    with pytest.raises(AttributeError, match="module 'stepsnet' has no attribute 'nothing'"):
        _ = stepsnet.nothing


# ---- at the paper's scale

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


def test_planned_profiles_have_the_parameters_of_the_paper():
    """A plan's widths are a model's; the order of the steps changes neither parameters nor compute (Table 10)."""
    counts = set()
    for profile, steps in (("steps", 3), ("reverse", 3), ("bowtie", 5)):
        plan = plan_steps(384, 12, steps, profile=profile)
        shape = dict(widths=plan.widths, depths=plan.depths, num_heads=plan.num_heads)
        with torch.device("meta"):
            model = timm.create_model("steps_deit_small_patch16_224", **shape)
        assert model(torch.empty(1, 3, 224, 224, device="meta")).shape == (1, 1000)
        assert model.blocks.widths == plan.widths
        counts.add(sum(p.numel() for p in model.parameters()))
        assert sum(p.numel() for p in model.blocks.parameters()) == plan.params
    assert counts == {sum(p.numel() for p in on_meta("steps_deit_small_patch16_224").parameters())}
