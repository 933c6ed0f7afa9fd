"""Backbones for dense tasks: four feature maps of strides 4, 8, 16 and 32, of any Steps or timm model.

What is common is timm's: ``features_only`` gives the maps. Here they get what Swin's dense recipes put behind
them (a LayerNorm a map), images of any size, and the strides where a model has only one of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import timm.models
import torch
import torch.nn.functional as F
from timm.data import resolve_data_config
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table, to_2tuple
from timm.models import SwinTransformer, VisionTransformer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UserError
from ..run_folder import read_weights
from ..stream import blocks_of

__all__ = ["PyramidBackbone", "create_backbone", "load_backbone", "normalisation_of"]

STRIDES = (4, 8, 16, 32)

# What a family must be told to take images of any size. A window is never cut down to a small map, so that
# the blocks of the last stage shift theirs as in Swin's detectors.
_ANY_SIZE: tuple[tuple[type[nn.Module], dict[str, Any]], ...] = (
    (SwinTransformer, {"dynamic_img_size": True, "always_partition": True}),
    (VisionTransformer, {"dynamic_img_size": True}),
)


class PyramidBackbone(nn.Module):
    """Four maps of an image, the finest first.

    Args:
        features: a timm model made with ``features_only``, of four outputs.
        patch_size: the image is padded below and on the right to a multiple of it; windows that do not fill are
            padded by timm's blocks, map by map, as in Swin's detectors.
        normalised: put a LayerNorm behind each output; the residual stream of a pre-norm model has none.
        frozen_stages: the stem and so many of the four stages keep their weights (0: none, not even the stem).
        frozen_norms: the batch norms keep their weights and their statistics.
        undecayed: last parts of the names of parameters that no weight decay is meant for.

    Shape: (B, 3, H, W) -> 4 × (B, channels[i], ⌈H / strides[i]⌉, ⌈W / strides[i]⌉). A plain model, whose maps all
    have one stride, is resampled to the four (bilinear).
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
        self._frozen = self._freeze(frozen_stages, frozen_norms)

    def forward(self, images: Tensor) -> list[Tensor]:
        height, width = images.shape[-2:]
        images = F.pad(images, (0, -width % self.patch_size, 0, -height % self.patch_size))
        padded = images.shape[-2:]
        maps = []
        for x, norm, stride in zip(self.features(images), self.norms, self.strides):
            x = norm(x if self.channels_last else x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # (B, C, H', W')
            size = [-(-side // stride) for side in padded]
            if list(x.shape[-2:]) != size:
                x = F.interpolate(x, size, mode="bilinear", align_corners=False)
            maps.append(x[..., : -(-height // stride), : -(-width // stride)].contiguous())
        return maps

    def train(self, mode: bool = True) -> PyramidBackbone:
        """Frozen parts stay in evaluation mode: no stochastic depth, and statistics as they are."""
        super().train(mode)
        for module in self._frozen:
            module.training = False
        return self

    def no_weight_decay(self) -> set[str]:
        """Bias tables and position embeddings, as of the classifier."""
        return {name for name, _ in self.named_parameters() if name.rpartition(".")[2] in self.undecayed}

    def _freeze(self, stages: int, norms: bool) -> list[nn.Module]:
        """Take the gradients of what is frozen; returns its modules."""
        frozen: list[nn.Module] = []
        if stages:
            later = _behind(self.features, stages)
            modules = {module for part in later for module in part.modules()}
            parameters = {parameter for part in later for parameter in part.parameters()}
            frozen += [module for module in self.features.modules() if module not in modules]
            for parameter in self.features.parameters():
                parameter.requires_grad_(parameter in parameters)
            for norm in self.norms[:stages]:
                norm.requires_grad_(True)  # new here, and nothing was learnt by it before
        if norms:
            found = [module for module in self.features.modules() if isinstance(module, _BatchNorm)]
            for norm in found:
                norm.requires_grad_(False)
            frozen += found
        return frozen


def create_backbone(
    name: str, *, frozen_stages: int = 0, frozen_norms: bool = False, **timm_args: Any
) -> PyramidBackbone:
    """The backbone of a timm or StepsNet model; nothing here depends on the name.

    Args:
        frozen_stages, frozen_norms: see :class:`PyramidBackbone`.
        **timm_args: what the classifier is made with, such as ``drop_path_rate`` or ``widths``.

    Raises:
        ValueError: timm does not know the model, or it has neither the four strides nor one for all.
    """
    if not timm.is_model(name):
        raise ValueError(f"backbone: got {name!r}, expected a timm or StepsNet model")
    arguments = {key: value for key, value in timm_args.items() if key != "num_classes"}
    described = {**arguments, "pretrained": False}
    with torch.device("meta"):
        classifier: Any = timm.create_model(name, **described)
    any_size = next((args for family, args in _ANY_SIZE if isinstance(classifier, family)), None)
    strides = [info["reduction"] for info in getattr(classifier, "feature_info", [])]
    if set(STRIDES) <= set(strides):
        indices = [len(strides) - 1 - strides[::-1].index(stride) for stride in STRIDES]  # the last of each stride
    elif len(set(strides)) == 1 and len(strides) >= len(STRIDES):
        indices = [len(strides) * part // len(STRIDES) - 1 for part in range(1, len(STRIDES) + 1)]  # evenly, to the end
    else:
        raise ValueError(f"backbone {name}: got maps of strides {strides}, expected {STRIDES} or one stride for all")
    features = timm.create_model(name, features_only=True, out_indices=indices, **{**(any_size or {}), **arguments})
    exempt: set[str] = getattr(classifier, "no_weight_decay", set)()
    return PyramidBackbone(
        features,
        patch_size=to_2tuple(getattr(getattr(classifier, "patch_embed", None), "patch_size", 1))[0],
        normalised=any_size is not None,
        frozen_stages=frozen_stages,
        frozen_norms=frozen_norms,
        undecayed=frozenset(parameter.rpartition(".")[2] for parameter in exempt),
    )


def normalisation_of(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of a channel that timm has for a model's classifiers."""
    config = resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    return tuple(config["mean"]), tuple(config["std"])


def load_backbone(backbone: PyramidBackbone, place: str | Path) -> None:
    """Load the weights of a classifier: a run's folder, or a checkpoint file that timm reads.

    The classifier's head is left out, and the norms behind the maps stay as they are. Tables of relative
    positions and position embeddings of another size are interpolated, by timm.

    Raises:
        UserError: nothing is there, or the first weights that the backbone lacks, or that do not fit.
    """
    weights = {_named_here(backbone.features, name): value for name, value in _read(Path(place)).items()}
    own = backbone.features.state_dict()
    missing = [name for name in own if name not in weights and not name.endswith("num_batches_tracked")]
    # a part that the backbone does not have at all is the classifier's head
    parts = {_part(name) for name in own}
    unexpected = [name for name in weights if name not in own and _part(name) in parts]
    if missing or unexpected:
        said = f"it lacks {missing[0]}" if missing else f"{unexpected[0]} is not in the model"
        count = len(missing) + len(unexpected)
        raise UserError(f"backbone: the weights of {place} do not fit, expected those of the same model: {said}"
                        f"{f' (and {count - 1} more)' if count > 1 else ''}")  # fmt: skip
    fitting = {name: _resized(backbone.features, name, weights[name], own[name]) for name in own if name in weights}
    wrong = next((name for name, value in fitting.items() if value.shape != own[name].shape), None)
    if wrong:
        got, expected = tuple(fitting[wrong].shape), tuple(own[wrong].shape)
        raise UserError(f"backbone: {wrong} of {place} has shape {got}, expected {expected}")
    backbone.features.load_state_dict(fitting, strict=False)


def _whole(features: nn.Module) -> Any:
    """The model, where ``features_only`` keeps it in one piece; None where it is rebuilt from its children."""
    return getattr(features, "model", None)


def _behind(features: nn.Module, stages: int) -> list[nn.Module]:
    """The parts that run after the output of so many stages."""
    if (whole := _whole(features)) is not None:
        indices: Any = features.out_indices
        return blocks_of(whole)[indices[stages - 1] + 1 :]
    children: Any = dict(features.named_children())
    outputs = list(features.return_layers)  # type: ignore[arg-type]
    return list(children.values())[list(children).index(outputs[stages - 1]) + 1 :]


def _named_here(features: nn.Module, name: str) -> str:
    """A classifier's name of a weight -> that of ``features_only``, which flattens what is sequential."""
    if _whole(features) is not None:
        return f"model.{name}"
    flat = re.match(r"([^.]+)\.(\d+)\.", name)
    if flat and hasattr(features, f"{flat[1]}_{flat[2]}"):
        return f"{flat[1]}_{flat[2]}.{name[flat.end() :]}"
    return name


def _part(name: str) -> str:
    return name.removeprefix("model.").partition(".")[0]


def _read(place: Path) -> Mapping[str, Tensor]:
    if place.is_dir():
        return read_weights(place)
    if not place.exists():
        raise UserError(f"backbone: got {place}, expected the folder of a run or a checkpoint file")
    try:
        return timm.models.load_state_dict(str(place), weights_only=True)
    except Exception as error:  # of torch, pickle, safetensors or the file system
        raise UserError(f"backbone: cannot read {place}: {' '.join(str(error).split())[:300]}") from None


def _resized(features: nn.Module, name: str, given: Tensor, own: Tensor) -> Tensor:
    """Relative and absolute positions for another size; everything else as it is."""
    if given.shape == own.shape or given.ndim != own.ndim:
        return given
    if name.endswith("relative_position_bias_table") and given.shape[-1] == own.shape[-1]:
        attention: Any = features.get_submodule(name.rpartition(".")[0])
        return resize_rel_pos_bias_table(given, attention.window_size, tuple(own.shape))
    if name.endswith("pos_embed") and given.ndim == 3 and given.shape[-1] == own.shape[-1]:
        model: Any = _whole(features)
        prefix = 0 if getattr(model, "no_embed_class", False) else getattr(model, "num_prefix_tokens", 0)
        return resample_abs_pos_embed(given, list(model.patch_embed.grid_size), num_prefix_tokens=prefix)
    return given
