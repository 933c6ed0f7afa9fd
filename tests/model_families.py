"""The families in small, with the helpers that the tests of models share."""

import pytest
import timm
import torch
from timm.models.resnet import BasicBlock, Bottleneck
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.vision_transformer import Block

import stepsnet
from stepsnet import StepsNet
from stepsnet.models import steps_deit, steps_resnet, steps_swin, swin_plus

FAMILIES = {"deit": steps_deit, "swin": steps_swin, "swinpp": swin_plus, "resnet": steps_resnet}
TINY = {
    "deit": ("test_steps_deit", dict(img_size=32), 32),
    "swin": ("test_steps_swin", dict(img_size=56), 56),
    "swinpp": ("test_steps_swinpp", dict(img_size=56), 56),
    "resnet": ("test_steps_resnet", {}, 32),
}
# wide, narrow, wide; the last stage of the hierarchical families from wide to narrow
_SWIN_BOW_TIE = dict(widths=((16,), (32,), (64, 32, 64), (96, 64)), depths=((1,), (1,), (2, 2, 1), (0, 2)))
BOW_TIE = {
    "deit": dict(widths=(64, 32, 48, 64), depths=(2, 4, 2, 1)),
    "swin": _SWIN_BOW_TIE,
    "swinpp": _SWIN_BOW_TIE,
    "resnet": dict(widths=((8,), (16,), (24, 12, 24), (32, 16, 24)), depths=((1,), (1,), (1, 2, 1), (0, 2, 1))),
}
BLOCKS = (Block, SwinTransformerBlock, BasicBlock, Bottleneck)
ALL = pytest.mark.parametrize("family", TINY)
BOTH = pytest.mark.parametrize("bow_tie", [False, True], ids=["steps", "bow-tie"])


def tiny(family, bow_tie=False, **kwargs):
    torch.manual_seed(0)
    return stir(timm.create_model(TINY[family][0], **{**arguments_of(family, bow_tie), **kwargs}))


def arguments_of(family, bow_tie=False):
    return {**TINY[family][1], **(BOW_TIE[family] if bow_tie else {})}


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
    return [module for module in model.modules() if isinstance(module, StepsNet)]


def gradients(model, x):
    model.zero_grad()
    y = model(x)
    (y * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum().backward()
    return y.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys() and ours
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


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
