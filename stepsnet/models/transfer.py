"""Weights of one model in another: what is copied, what is resized to fit, and what stays as it was.

A classifier's ``init`` is :func:`start_from`. A dense model's ``backbone`` also uses :func:`read_pretrained` and
:func:`resized`, but every weight has to fit (backbone.py).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import timm.models
import torch
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table
from timm.models import adapt_input_conv
from torch import Tensor, nn

from ..errors import UserError, in_a_line, nearest
from ..output.markdown import markdown_table
from ..output.summary_stats import format_count
from ..output.terminal import silenced
from ..run_folder.folder import read_weights
from ..steps import StepsNet
from . import steps_deit, steps_resnet, steps_swin
from .stepify.sequence import StepSequence

__all__ = ["read_pretrained", "resized", "start_from", "takes_head"]

_FROM_BASELINE = (steps_deit.from_baseline, steps_swin.from_baseline, steps_resnet.from_baseline)
_BLOCK = re.compile(r"(.*)\.networks\.(\d+)\.(\d+)\.(.+)")  # container, step, block, tensor
_PART = re.compile(r"layers\.\d+|[^.]+")  # a top-level module, or a stage of Swin's


def read_pretrained(source: str | Path, key: str) -> dict[str, Tensor]:
    """Read the weights in the folder of a run, in a file that timm reads, or those of ``timm:NAME``.

    Files are safetensors, or read by torch with ``weights_only=True``.

    Args:
        key: the recipe's key, for messages.

    Raises:
        UserError: nothing can be read there, or what is read is not a dictionary of finite weights.
    """
    if not isinstance(source, str | Path):
        kind = type(source).__name__
        raise UserError(f"{key}: got a {kind}, expected the folder of a run, a checkpoint file or timm:NAME")
    name, path = str(source), Path(source)
    if name.startswith("timm:"):
        weights = _read_timm(name.removeprefix("timm:"), key)
    elif path.is_dir():
        weights = dict(read_weights(path))
    elif path.exists():
        weights = _read_file(path, key)
    else:
        raise UserError(f"{key}: got {path}, expected the folder of a run, a checkpoint file or timm:NAME")
    for tensor_name, value in weights.items():
        if not isinstance(value, Tensor):
            got = type(value).__name__
            raise UserError(f"{key}: {source} holds a {got} under {tensor_name!r}, expected only weights, by name")
        if value.is_floating_point() and not value.isfinite().all():
            raise UserError(f"{key}: {tensor_name} of {source} is not finite, expected the weights of a trained model")
    return weights


def _read_file(path: Path, key: str) -> dict[str, Any]:
    try:
        return timm.models.load_state_dict(str(path), weights_only=True)
    except AttributeError:  # not a dictionary
        raise UserError(f"{key}: {path} does not hold a dictionary, expected one of weights by name") from None
    except Exception as error:  # from torch, pickle, safetensors or the file system
        raise UserError(f"{key}: cannot read {path}: {in_a_line(error, 300)}") from None


def _read_timm(name: str, key: str) -> dict[str, Tensor]:
    if not timm.is_model(name):
        known = nearest(name, {pretrained.partition(".")[0] for pretrained in timm.list_pretrained()})
        raise UserError(f"{key}: got timm:{name}, expected one of timm's pretrained models{known}")
    try:
        # without a network, the hub would log each attempt; a new model must not draw from the run's random numbers
        with silenced("huggingface_hub"), torch.random.fork_rng(devices=[]):
            return timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:  # from the network, the hub, the cache or the file
        reason = in_a_line(error).partition(". ")[0][:200]
        raise UserError(
            f"{key}: cannot load timm:{name} ({reason}); expected a model that timm has weights for and a connection "
            "to download them, or a file of weights"
        ) from None


def start_from(model: nn.Module, source: str, key: str = "init") -> str:
    """Copy the weights of ``source`` into a classifier wherever they fit, and return a table of what was done.

    The blocks of a step are copied into the step whose blocks have the same shapes, the last block into the last one,
    and so on backwards: from a model of one width, the last blocks go into the step of that width. Outside the blocks,
    tensors of the same name and shape are copied; position embeddings, relative position tables and the first
    convolution are resized. A head therefore stays random if the number of classes differs.

    Args:
        model: the classifier; on the meta device, it is left as it is.
        source: the folder of a run, a file, or ``timm:NAME``.
        key: the recipe's key, for messages.

    Raises:
        UserError: the weights cannot be read, or fit no layer of the model.
    """
    given, own = read_pretrained(source, key), model.state_dict()
    pairs, why = _pair(model, own, given)
    rows: dict[str, _Row] = defaultdict(_Row)
    layers = 0
    for name, tensor in own.items():
        row, theirs = rows[_part_of(model, name)], given.get(pairs.get(name, ""))
        fitting = resized(model, name, theirs, tensor) if theirs is not None else None
        if theirs is None or fitting is None or fitting.shape != tensor.shape:
            row.left += tensor.numel()
            row.why = row.why or why.get(name) or _difference(tensor, theirs, _is_head(model, name))
            continue
        row.copied += tensor.numel() * (fitting is theirs)
        row.resized += tensor.numel() * (fitting is not theirs)
        layers += tensor.ndim > 1 and not _is_head(model, name)
        if not tensor.is_meta:
            tensor.copy_(fitting)
    if not layers:
        first = next(f"{part}: {row.why}" for part, row in rows.items() if row.left)
        raise UserError(f"{key}: {source} fits no layer of the model, expected weights of a model like it ({first})")
    cells = [
        [part, *(format_count(n) if n else "" for n in (row.copied, row.resized, row.left)), row.why]
        for part, row in rows.items()
    ]
    table = markdown_table(["parameters", "copied", "resized", "left at random", ""], cells, "lrrrl")
    return f"{key} from {source}\n{table}"


def takes_head(model: nn.Module, source: str, key: str = "init") -> bool:
    """Whether :func:`start_from` copies a head from ``source``, so that the model's outputs start as those of that."""
    given, own = read_pretrained(source, key), model.state_dict()
    heads = (name for name in own if _is_head(model, name))
    return any(name in given and given[name].shape == own[name].shape for name in heads)


def resized(model: nn.Module, name: str, given: Tensor, own: Tensor) -> Tensor:
    """Resize ``given`` to ``own`` if it holds positions or is the first convolution; otherwise return it as it is.

    Args:
        model: the one that has the tensor ``own`` under ``name``.
    """
    if given.shape == own.shape or given.ndim != own.ndim:
        return given
    if name.endswith("relative_position_bias_table") and given.shape[-1] == own.shape[-1]:
        attention: Any = model.get_submodule(name.rpartition(".")[0])
        return resize_rel_pos_bias_table(given, attention.window_size, tuple(own.shape))
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if name.endswith("pos_embed") and grid and given.ndim == 3 and given.shape[-1] == own.shape[-1]:
        return _resized_positions(given, own, grid)
    if name in _first_convolutions(model) and given.shape[0] == own.shape[0] and given.shape[2:] == own.shape[2:]:
        return adapt_input_conv(own.shape[1], given, base_chans=given.shape[1])
    return given


def _resized_positions(given: Tensor, own: Tensor, grid: Sequence[int]) -> Tensor:
    """(1, N, C): the first tokens that both have, such as the class token, and a square grid, interpolated as timm
    does it."""
    prefix, count = own.shape[1] - math.prod(grid), given.shape[1]
    found = next((n for n in (prefix, 0, 1, 2) if n < count and math.isqrt(count - n) ** 2 == count - n), None)
    if found is None:
        return given
    tokens = resample_abs_pos_embed(given[:, found:], list(grid), num_prefix_tokens=0)
    before = given.new_zeros(1, prefix, given.shape[2])
    before[:, : min(found, prefix)] = given[:, : min(found, prefix)]  # the class token is the first in both
    return torch.cat((before, tokens), dim=1)


@dataclass
class _Row:
    """How many parameters and buffers of a part of the model were copied, resized or left, and why left."""

    copied: int = 0
    resized: int = 0
    left: int = 0
    why: str = ""


def _steps_of(tensors: Mapping[str, Tensor], flat: Sequence[str]) -> dict[tuple[str, int], list[dict[str, str]]]:
    """The blocks of each step of each container, in order; a block maps each tensor's name within it to the whole name.

    timm's names, and those in the containers ``flat``, number the blocks across all steps; there, a step is a run of
    blocks with the same shapes.
    """
    whole_names: Any = {name: name for name in tensors}
    for rename in _FROM_BASELINE:
        whole_names = rename(whole_names)
    found: dict[tuple[str, int], dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for name, whole_name in whole_names.items():
        path = next((path for path in flat if not _BLOCK.fullmatch(name) and name.startswith(f"{path}.")), None)
        if path is not None:
            name = f"{path}.networks.0.{name.removeprefix(f'{path}.')}"
        if match := _BLOCK.fullmatch(name):
            container, step, block, tensor = match.groups()
            found[container, int(step)][int(block)][tensor] = whole_name
    steps: dict[tuple[str, int], list[dict[str, str]]] = defaultdict(list)
    for (container, step), by_number in found.items():
        before = None
        for _, block in sorted(by_number.items()):
            shapes = {tensor: tensors[name].shape for tensor, name in block.items()}
            is_flat = not any(_BLOCK.fullmatch(name) for name in block.values())
            step += is_flat and before not in (None, shapes)
            steps[container, step].append(block)
            before = shapes
    return steps


def _pair(
    model: nn.Module, own: Mapping[str, Tensor], given: Mapping[str, Tensor]
) -> tuple[dict[str, str], dict[str, str]]:
    """Find each tensor's counterpart, whatever its shape, and for tensors of blocks without one, the reason."""
    flat = [path for path, module in model.named_modules() if isinstance(module, StepSequence)]
    ours, theirs = _steps_of(own, flat), _steps_of(given, flat)
    pairs, why = {name: name for name in own.keys() & given.keys()}, dict[str, str]()
    for (container, _), blocks in sorted(ours.items(), key=lambda item: item[0], reverse=True):
        alike = [
            key
            for key, others in theirs.items()
            if key[0] == container and _are_alike(blocks[-1], others[-1], own, given)
        ]
        others = theirs.pop(max(alike)) if alike else []
        for back, block in enumerate(reversed(blocks), 1):
            for tensor, name in block.items():
                pairs.pop(name, None)
                if back <= len(others):
                    pairs[name] = others[-back][tensor]
                else:
                    why[name] = (
                        f"only {len(others)} such blocks in the source" if others else "no such blocks in the source"
                    )
    return pairs, why


def _are_alike(
    block: dict[str, str], other: dict[str, str], own: Mapping[str, Tensor], given: Mapping[str, Tensor]
) -> bool:
    """Whether a block has the same tensors as another, with the same shapes except for the window size."""
    if block.keys() != other.keys():
        return False
    shapes = [(tensor, own[name].shape, given[other[tensor]].shape) for tensor, name in block.items()]
    return all(
        mine == theirs or (tensor.endswith("relative_position_bias_table") and mine[-1] == theirs[-1])
        for tensor, mine, theirs in shapes
    )


def _part_of(model: nn.Module, name: str) -> str:
    """The row under which a tensor is reported: its step, or the module that it is in."""
    if match := _BLOCK.fullmatch(name):
        container = model.get_submodule(match[1])
        if isinstance(container, StepsNet) and len(container.widths) > 1:
            return f"{match[1]}, step {int(match[2]) + 1}, {container.widths[int(match[2])]} wide"
    found = _PART.match(name)
    return found[0] if found else name


def _is_head(model: nn.Module, name: str) -> bool:
    classifier = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    return name.startswith(tuple(f"{one}." for one in ([classifier] if isinstance(classifier, str) else classifier)))


def _first_convolutions(model: nn.Module) -> list[str]:
    first = getattr(model, "pretrained_cfg", {}).get("first_conv") or ()
    return [f"{one}.weight" for one in ([first] if isinstance(first, str) else first)]


def _difference(own: Tensor, given: Tensor | None, is_head: bool) -> str:
    if given is None:
        return "not in the source"
    if is_head and own.shape[0] != given.shape[0]:
        return f"{own.shape[0]} classes, {given.shape[0]} in the source"
    return f"{tuple(own.shape)}, {tuple(given.shape)} in the source"
