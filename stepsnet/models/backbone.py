"""Backbones for dense tasks: four feature maps of strides 4, 8, 16 and 32, from a Steps or timm model, at any size.

timm's ``features_only`` gives the maps. This module adds a LayerNorm after each map of a network that leaves its
residual stream without one, as dense recipes do, images of any size, and the four strides for models whose maps all
have the same one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.data import resolve_data_config
from timm.layers import to_2tuple
from timm.models import (
    ConvNeXt,
    DaVit,
    DeepseekVitClassifier,
    DeepseekVitEncoder,
    EdgeNeXt,
    Eva,
    FocalNet,
    Gemma4VitClassifier,
    Gemma4VitEncoder,
    Hiera,
    MetaFormer,
    MultiScaleVit,
    NaFlexVit,
    Qwen3VitClassifier,
    Qwen3VitEncoder,
    SwinTransformer,
    SwinTransformerV2,
    SwinTransformerV2Cr,
    Twins,
    VisionTransformer,
    VisionTransformerSAM,
    Xcit,
)
from timm.models.hieradet_sam2 import HieraDet
from timm.models.mambaout import MambaOut
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UserError, in_a_line
from ..residual.connected import ConnectedSequence
from ..residual.design import Wiring
from .transfer import read_pretrained, resized
from .windows import pad_windows

__all__ = ["PyramidBackbone", "STRIDES", "check_color", "create_backbone", "load_backbone", "mean_and_std_of"]

STRIDES = (4, 8, 16, 32)

# Arguments that make a family accept images of any size. Swin's windows keep their size on small maps, so that the
# blocks of the last stage shift them as in Swin's detectors.
_ANY_SIZE: tuple[tuple[type[nn.Module], dict[str, Any]], ...] = (
    (SwinTransformer, {"dynamic_img_size": True, "always_partition": True}),
    (SwinTransformerV2, {"dynamic_img_size": True, "always_partition": True}),
    (SwinTransformerV2Cr, {"dynamic_img_size": True, "always_partition": True}),
    (VisionTransformer, {"dynamic_img_size": True}),
    (Eva, {"dynamic_img_size": True}),
)
# Families whose maps are the residual stream itself: their blocks have layer norms (or RMS norms) in the branches
# alone, so the stream may grow with depth, and the norm that ends it is part of the classifier. The dense recipes of
# Swin and of ConvNeXt put a LayerNorm after each map of such a network. Networks with batch norms, such as ResNets,
# need none, nor does PVTv2, whose stages end in a norm.
_WITHOUT_LAST_NORM: tuple[type[nn.Module], ...] = (
    *(SwinTransformer, SwinTransformerV2, SwinTransformerV2Cr, Twins, DaVit, FocalNet),
    *(Hiera, HieraDet, MultiScaleVit),
    *(ConvNeXt, EdgeNeXt, MambaOut, MetaFormer),
    *(VisionTransformer, VisionTransformerSAM, NaFlexVit, Eva, Xcit),
    *(DeepseekVitClassifier, DeepseekVitEncoder, Gemma4VitClassifier, Gemma4VitEncoder),
    *(Qwen3VitClassifier, Qwen3VitEncoder),
)
_OTHER_SIZE = (331, 245)  # an image size that no model is made for


class PyramidBackbone(nn.Module):
    """Four feature maps of an image, the one with the highest resolution first.

    Args:
        features: a timm model created with ``features_only`` and four outputs.
        patch_size: in pixels; the image is padded at the bottom and on the right to a multiple of it. Incomplete
            windows are padded map by map, as in Swin's detectors (:class:`~stepsnet.models.windows.PaddedWindows`).
        normalised: put a LayerNorm after each output, for a model that leaves its residual stream without one.
        frozen_stages: number of stages, 0 to 4, whose weights are not trained; from 1 on the stem is frozen too. The
            LayerNorms after their outputs are trained: the classifier, whose weights the stages have, has none there.
        frozen_norms: whether the batch norms keep their weights and their statistics.
        undecayed: parameters of ``features``, such as ``model.pos_embed``, that are exempt from weight decay; names
            that match none are ignored.

    Shape: (B, 3, H, W) -> 4 × (B, channels[i], ⌈H / strides[i]⌉, ⌈W / strides[i]⌉). The maps of a plain model, which
    all have the same stride, are resampled to the four strides (bilinear).

    Raises:
        ValueError: ``frozen_stages`` is out of range.
    """

    def __init__(
        self,
        features: nn.Module,
        patch_size: int = 1,
        *,
        normalised: bool = False,
        frozen_stages: int = 0,
        frozen_norms: bool = False,
        undecayed: frozenset[str] = frozenset(),
    ):
        super().__init__()
        if isinstance(frozen_stages, bool) or not 0 <= frozen_stages <= len(STRIDES):
            raise ValueError(f"frozen_stages: got {frozen_stages!r}, expected 0 to {len(STRIDES)}")
        info: Any = features.feature_info
        self.channels: list[int] = list(info.channels())
        self.strides = list(STRIDES)
        self.features, self.patch_size, self.undecayed = features, patch_size, undecayed
        self.channels_last = str(getattr(features, "output_fmt", "NCHW")).endswith("NHWC")
        self.norms = nn.ModuleList(nn.LayerNorm(width) if normalised else nn.Identity() for width in self.channels)
        self.frozen_norms = frozen_norms
        self._frozen = self._freeze(frozen_stages, frozen_norms)
        self._at_first = set(features.modules())

    def forward(self, images: Tensor) -> list[Tensor]:
        height, width = images.shape[-2:]
        images = F.pad(images, (0, -width % self.patch_size, 0, -height % self.patch_size))
        padded = images.shape[-2:]
        maps = []
        for x, norm, stride in zip(self.features(images), self.norms, self.strides):
            x = norm(x if self.channels_last else x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # (B, C, H', W')
            size = [_ceil_divide(side, stride) for side in padded]
            # sizes differ where a stem drops incomplete patches, as ConvNeXt's does; a program exported for any size
            # keeps this resampling unless the sizes are known to be always equal
            if not all(statically_known_true(mine == theirs) for mine, theirs in zip(x.shape[-2:], size)):
                x = F.interpolate(x, size, mode="bilinear", align_corners=False)
            maps.append(x[..., : _ceil_divide(height, stride), : _ceil_divide(width, stride)].contiguous())
        return maps

    def train(self, mode: bool = True) -> PyramidBackbone:
        """Set the mode, but keep frozen parts in evaluation mode: no stochastic depth, and fixed statistics."""
        super().train(mode)
        for module in self._frozen:
            module.training = False
            for child in module.children():
                if child not in self._at_first:  # it has replaced a frozen module, as when blocks are compiled
                    child.train(False)
        return self

    def no_weight_decay(self) -> set[str]:
        """The parameters that the classifier exempts, such as bias tables and position embeddings."""
        return {f"features.{name}" for name, _ in self.features.named_parameters() if name in self.undecayed}

    def check_frozen_norms(self) -> None:
        """Raise UserError, before training begins, if batch norms are to be frozen but there are none."""
        if self.frozen_norms and not any(isinstance(module, _BatchNorm) for module in self.features.modules()):
            raise UserError("frozen_norms: got true, expected false: this backbone has no batch norms to freeze")

    def _freeze(self, stages: int, norms: bool) -> list[nn.Module]:
        """Switch off the gradients of the frozen modules, and return those modules."""
        frozen: list[nn.Module] = []
        if stages:
            trained_parts = _parts_after(self.features, stages)
            modules = {module for part in trained_parts for module in part.modules()}
            parameters = {parameter for part in trained_parts for parameter in part.parameters()}
            frozen += [module for module in self.features.modules() if module not in modules]
            for parameter in self.features.parameters():
                parameter.requires_grad_(parameter in parameters)
        if norms:
            found = [module for module in self.features.modules() if isinstance(module, _BatchNorm)]
            for norm in found:
                norm.requires_grad_(False)
            frozen += found
        return frozen


def _ceil_divide(side: int, stride: int) -> int:
    """⌈side / stride⌉ without ``-(-side // stride)``: ONNX and OpenVINO round negative quotients towards 0."""
    return (side + stride - 1) // stride


def check_color(backbone_args: Mapping[str, Any]) -> None:
    """Raise ValueError unless the backbone takes color images: detectors and segmenters read all images in color."""
    if (channels := backbone_args.get("in_chans", 3)) != 3:
        raise ValueError(f"backbone_args.in_chans: got {channels}, expected 3: images are read in color, gray ones too")


def create_backbone(
    name: str, *, frozen_stages: int = 0, frozen_norms: bool = False, any_size: bool = True, **timm_args: Any
) -> PyramidBackbone:
    """The backbone of a timm or StepsNet model.

    Args:
        name: a model name that ``timm.is_model`` knows, those of stepsnet included.
        frozen_stages, frozen_norms: see :class:`PyramidBackbone`.
        any_size: refuse a model that takes only some image sizes.
        **timm_args: arguments of the classifier, such as ``drop_path_rate`` or ``widths``.

    Raises:
        ValueError: an unknown model, one with neither maps of the four strides nor four maps of one stride, with
            ``any_size`` one that does not take images of any size, or stages that cannot be frozen.
    """
    if not timm.is_model(name):
        raise ValueError(f"backbone: got {name!r}, expected a timm or StepsNet model")
    arguments = {key: value for key, value in timm_args.items() if key != "num_classes"}
    described = {**arguments, "pretrained": False}
    with torch.device("meta"):
        classifier: Any = timm.create_model(name, **described)
    of_family = next((args for family, args in _ANY_SIZE if isinstance(classifier, family)), None)
    strides = [info["reduction"] for info in getattr(classifier, "feature_info", [])]
    if set(STRIDES) <= set(strides):
        indices = [len(strides) - 1 - strides[::-1].index(stride) for stride in STRIDES]  # the last map of each stride
    elif len(set(strides)) == 1 and len(strides) >= len(STRIDES):
        indices = [len(strides) * part // len(STRIDES) - 1 for part in range(1, len(STRIDES) + 1)]  # evenly spaced
    else:
        expected = f"{STRIDES}, or at least {len(STRIDES)} maps of one stride"
        raise ValueError(f"backbone {name}: got maps of strides {strides}, expected {expected}")
    settings = {"features_only": True, "out_indices": indices, **(of_family or {}), **arguments}
    patch_size = to_2tuple(getattr(getattr(classifier, "patch_embed", None), "patch_size", 1))[0]
    patterns: set[str] = getattr(classifier, "no_weight_decay", set)()  # for names, as timm's optimizers read them
    exempt = [key for key, _ in classifier.named_parameters() if any(fnmatch(key, pattern) for pattern in patterns)]
    features = timm.create_model(name, **settings)
    pad_windows(features)
    return PyramidBackbone(
        features,
        patch_size=_accepted_multiple(name, settings, patch_size) if any_size else patch_size,
        normalised=isinstance(classifier, _WITHOUT_LAST_NORM),
        frozen_stages=frozen_stages,
        frozen_norms=frozen_norms,
        undecayed=frozenset(_name_in_backbone(features, key) for key in exempt),
    )


def _accepted_multiple(name: str, settings: dict[str, Any], patch_size: int) -> int:
    """The multiple to pad images to, the patch size or the largest stride, found by trial on the meta device.

    Raises:
        ValueError: the model takes only some image sizes.
    """
    reason = ""
    with torch.device("meta"), torch.no_grad():  # a separate model, because a forward pass may leave caches behind
        features = timm.create_model(name, **{**settings, "pretrained": False}).eval()
        for multiple in (patch_size, max(STRIDES)):
            try:
                PyramidBackbone(features, multiple)(torch.empty(1, settings.get("in_chans", 3), *_OTHER_SIZE))
                return multiple
            except Exception as error:  # whatever a model raises for a size that is not its own
                said = in_a_line(error)
                if isinstance(error, NotImplementedError) or "meta tensors" in said:  # the meta device does not suffice
                    return patch_size
                reason = reason or said[:120]
    refused = "{}×{}".format(*_OTHER_SIZE)
    raise ValueError(
        f"backbone {name}: got a model that refuses {refused} pixels ({reason}), expected one that takes images of any "
        "size"
    )


def mean_and_std_of(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and std of each channel in timm's config of that name, or timm's default, for pixels in 0 … 1."""
    found = timm.get_pretrained_cfg(name)  # None for a model that was registered without one
    config = resolve_data_config(pretrained_cfg=found.to_dict() if found else {})
    return tuple(config["mean"]), tuple(config["std"])


def load_backbone(backbone: PyramidBackbone, path: str | Path, key: str = "backbone") -> None:
    """Load a classifier's weights from the folder of a run, a checkpoint file that timm reads, or ``timm:NAME``.

    The classifier's head is left out, and the norms after the maps keep their weights. Relative position tables and
    position embeddings of another size are interpolated by timm. On the meta device, the weights are only checked.

    Args:
        key: the recipe's key, for messages.

    Raises:
        UserError: nothing can be read there, or the weights are not those of this model; the message names the first
            weight that is missing, unexpected or of another shape.
    """
    given = read_pretrained(path, key)
    weights = {_name_in_backbone(backbone.features, name): value for name, value in given.items()}
    own = backbone.features.state_dict()
    missing = [name for name in own if name not in weights and not name.endswith("num_batches_tracked")]
    # a top-level module that the backbone does not have belongs to the classifier's head
    parts = {_part(name) for name in own}
    unexpected = [name for name in weights if name not in own and _part(name) in parts]
    if missing or unexpected:
        first = f"{missing[0]} is missing" if missing else f"{unexpected[0]} is not in the model"
        count = len(missing) + len(unexpected)
        more = f" (and {count - 1} more)" if count > 1 else ""
        raise UserError(f"{key}: the weights of {path} do not fit, expected those of the same model: {first}{more}")
    model, inside = (wrapped, "model.") if (wrapped := _wrapped_model(backbone.features)) else (backbone.features, "")
    fitting = {
        name: resized(model, name.removeprefix(inside), weights[name], own[name]) for name in own if name in weights
    }
    wrong = next((name for name, value in fitting.items() if value.shape != own[name].shape), None)
    if wrong:
        got, expected = tuple(fitting[wrong].shape), tuple(own[wrong].shape)
        raise UserError(f"{key}: {wrong} of {path} has shape {got}, expected {expected}")
    if not any(tensor.is_meta for tensor in own.values()):
        backbone.features.load_state_dict(fitting, strict=False)


def _wrapped_model(features: nn.Module) -> Any:
    """The model that ``features_only`` wraps; None where timm rebuilds it from its children instead."""
    return getattr(features, "model", None)


def _parts_after(features: nn.Module, stages: int) -> list[nn.Module]:
    """The modules that run after the output of the given number of stages."""
    if (model := _wrapped_model(features)) is not None:
        info: Any = features.feature_info
        parts = [
            part for part in _siblings_after(model, info.module_name()[stages - 1]) if not isinstance(part, Wiring)
        ]
        inside = {module for part in parts for module in part.modules()}
        joined = (part for part in model.modules() if isinstance(part, ConnectedSequence))
        return parts + [part.wiring for part in joined if part.blocks and part.blocks[-1] in inside]
    children: Any = dict(features.named_children())
    outputs = list(features.return_layers)  # type: ignore[arg-type]
    return list(children.values())[list(children).index(outputs[stages - 1]) + 1 :]


def _siblings_after(model: nn.Module, path: str) -> list[nn.Module]:
    """The stages or blocks after a module in its container, and after that container in the one around it.

    Raises:
        ValueError: there is no such module within another, or the model has a second list of parts, such as one
            embedding per stage, whose order is not known.
    """
    top, *names = path.split(".")
    lists = [name for name, child in model.named_children() if isinstance(child, nn.ModuleList) and len(child) > 1]
    if not names or path not in dict(model.named_modules()) or {*lists} - {top}:
        raise ValueError(
            f"frozen_stages: got a {type(model).__name__}, expected 0: which modules run after {path} is not known"
        )
    found: list[nn.Module] = []
    for level in range(len(names), 0, -1):
        children = dict(model.get_submodule(".".join([top, *names[: level - 1]])).named_children())
        found += list(children.values())[list(children).index(names[level - 1]) + 1 :]
    return found


def _name_in_backbone(features: nn.Module, name: str) -> str:
    """Translate the name of a classifier's weight to ``features_only``, which flattens an nn.Sequential."""
    if _wrapped_model(features) is not None:
        return f"model.{name}"
    flat = re.match(r"([^.]+)\.(\d+)\.", name)
    if flat and hasattr(features, f"{flat[1]}_{flat[2]}"):
        return f"{flat[1]}_{flat[2]}.{name[flat.end() :]}"
    return name


def _part(name: str) -> str:
    """The top-level module of a weight."""
    return name.removeprefix("model.").partition(".")[0]
