"""A trained network of one width, compressed to a StepsNet of less compute that keeps as much of its function as fits.

It takes four phases, of which ``compress(model, calibration, steps=3)`` does three. The first two leave the function as
it is:

- **Norms** (stream_parts.py). LayerNorms become RMSNorms: the layers that write to the stream remove the mean, and
  gains and biases go into the linear layers that read it. The gains of RMSNorms go there too, and LayerScales into the
  layers in front of them.
- **Rotation** (rotation.py). One orthogonal matrix Q for the whole stream, x -> xQ. A norm without gains divides by a
  length, which no rotation changes: this is the invariance of SliceGPT (arXiv 2401.15024), with a single Q. Its first
  C_1 columns are the directions that the blocks of the first step read and write most, the next are those of the second
  step in the complement, and so on.
- **Cut** (cut.py). Each block keeps the weights of the first C_i channels, and of the heads and hidden units that
  contribute most to them. A norm over C_i channels still divides their sum of squares by C. The blocks of the last step
  stay whole.
- **Distillation** (distill.py), in the caller's training loop: of the stream after each step, then of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UserError
from ...plan import StepPlan, per_block
from ..stepify.convert import stepify
from ..stepify.plan import check_plan, read_plan
from .cut import cut_block, heads_and_groups
from .distill import Compressed
from .rotation import Statistics, greedy_rotation, watch
from .stream_parts import StreamParts, branches, fold_norms, rotate, stream_parts_of

__all__ = ["compress", "compressed_shape"]


def compress(
    model: nn.Module,
    calibration: Tensor | Iterable[Any],
    steps: int = 3,
    *,
    plan: Mapping[str, Any] | StepPlan | None = None,
    rotation: Tensor | None = None,
) -> Compressed:
    """Compress a trained network to a StepsNet of less compute with as much of its function as fits, to be distilled.

    The given model is not changed. From timm, it can be a VisionTransformer with timm's Block, learned positions and a
    linear head; from transformers, a causal language model of LLaMA, Mistral, Qwen2 or Qwen3.

    Args:
        model: the trained network, of one width.
        calibration: inputs as in training: images (B, C, H, W) or token ids (B, N) without padding, or batches of them
            as a DataLoader yields them; a few thousand images or some ten thousand tokens. They decide which
            directions, heads and hidden units stay.
        steps: n, the number of steps. Without a plan, widths are about √2 apart in whole heads, up to the model's own,
            and each step has the same number of blocks, the last also those that are left over.
        plan: widths, depths and optionally num_heads: ``{"widths": (192, 256, 384), "depths": (4, 4, 4)}``. The last
            width is the model's own, and the depths add up to its number of blocks.
        rotation: an orthogonal matrix (C, C) of your own, in place of the one from the calibration.

    Raises:
        UserError: a model of another family, a part that is not known, or a plan that does not fit.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"compress: got {str(model)[:40]!r}, expected a model with its weights")
    check_plan(plan)
    teacher = fold_norms(model)
    parts = stream_parts_of(teacher)
    chosen = _plan(parts, steps, plan)
    statistics = watch(teacher, parts, calibration)
    if rotation is None:
        rotation = greedy_rotation(statistics.moments, chosen["widths"], chosen["depths"])
    rotate(parts, _orthogonal(rotation, parts.width))
    student = stepify(teacher, plan=chosen)
    _inherit(student, parts, statistics, chosen)
    return Compressed(student, teacher, chosen["widths"], chosen["depths"])


def compressed_shape(
    model: nn.Module, steps: int = 3, *, plan: Mapping[str, Any] | StepPlan | None = None
) -> nn.Module:
    """A network of the shape that :func:`compress` makes, into which the weights of a compressed one can be loaded.

    Args:
        model: a model of the architecture that was compressed; its weights do not matter, and it is not changed.
        steps, plan: as given to :func:`compress`; or, as the plan, the widths and depths of the compressed network.

    Raises:
        UserError: as :func:`compress`.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"compress: got {str(model)[:40]!r}, expected a model")
    check_plan(plan)
    folded = fold_norms(model)
    return stepify(folded, plan=_plan(stream_parts_of(folded), steps, plan)).requires_grad_(True).train()


@torch.no_grad()
def _inherit(student: nn.Module, parts: StreamParts, statistics: Statistics, plan: Mapping[str, Any]) -> None:
    widths = per_block(plan["widths"], plan["depths"])
    for index, (block, whole) in enumerate(zip(stream_parts_of(student).blocks, parts.blocks)):
        cut_block(block, whole, statistics.inner[index], widths[index])
        for one in branches(whole):
            norm: Any = block.get_submodule(one.norm)
            norm.weight.fill_(math.sqrt(parts.width / widths[index]))


# ---- plans


def _plan(parts: StreamParts, steps: Any, plan: Mapping[str, Any] | StepPlan | None) -> dict[str, tuple[int, ...]]:
    blocks, width, unit = len(parts.blocks), parts.width, _unit(parts)
    if plan is None:
        if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= blocks:
            raise UserError(f"steps: got {str(steps)[:40]}, expected 1 to {blocks}, the model's number of blocks")
        narrower = (unit * max(1, round(width / math.sqrt(2) ** k / unit)) for k in range(steps - 1, 0, -1))
        widths = (*narrower, width)
        if len(set(widths)) < steps:
            raise UserError(
                f"steps: got {steps} for width {width} in multiples of {unit}, expected fewer: the widths would be "
                f"{widths}"
            )
        each = blocks // steps
        return _with_heads(parts, widths, (*[each] * (steps - 1), blocks - each * (steps - 1)))
    widths, depths, given = read_plan(plan)
    if list(widths) != sorted(set(widths)) or widths[-1] != width:
        raise UserError(f"plan: widths: got {widths}, expected increasing widths up to the model's {width}")
    if sum(depths) != blocks or not depths[-1]:
        raise UserError(
            f"plan: depths: got {depths}, expected a sum of {blocks}, the model's number of blocks, and at least one "
            "in the last step"
        )
    if wrong := next((c for c in widths[:-1] if c % unit), None):
        raise UserError(f"plan: widths: got {wrong}, expected a multiple of {unit}, so that heads stay whole")
    chosen = _with_heads(parts, widths, depths)
    if given not in (None, chosen["num_heads"]):
        raise UserError(f"plan: num_heads: got {given}, expected {chosen['num_heads']}: heads keep their size")
    return chosen


def _with_heads(parts: StreamParts, widths: tuple[int, ...], depths: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Add the numbers of heads, which keep the model's own size: whole groups, in proportion to the width."""
    heads, groups = heads_and_groups(parts.blocks[0])
    num_heads = tuple(groups * max(1, round(heads * width / parts.width / groups)) for width in widths)
    return {"widths": widths, "depths": depths, "num_heads": num_heads}


def _unit(parts: StreamParts) -> int:
    """What widths are multiples of: whole groups of heads that share keys and values, if heads tile the width."""
    heads, groups = heads_and_groups(parts.blocks[0])
    if parts.width % heads:
        return 8 if parts.width >= 64 else 4
    return parts.width // heads * groups


def _orthogonal(rotation: Any, width: int) -> Tensor:
    if not isinstance(rotation, Tensor):
        raise UserError(f"rotation: got {type(rotation).__name__}, expected an orthogonal matrix of {width} by {width}")
    rotation = rotation.detach().cpu().double()
    eye = torch.eye(width, dtype=torch.float64)
    if rotation.shape != eye.shape or not torch.allclose(rotation.T @ rotation, eye, atol=1e-4):
        raise UserError(f"rotation: got {tuple(rotation.shape)}, expected an orthogonal matrix of {width} by {width}")
    return rotation
