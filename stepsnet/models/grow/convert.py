"""A trained network as the first step of a wider StepsNet, which computes the same until it is trained further.

``grow(model, steps=2)`` widens the residual stream from C_1 to C_n channels. Five measures keep its function:

- **The old blocks** stay as they are, weights and names, and read and write the first C_1 channels. Only their rates
  of stochastic depth, which do nothing in evaluation, are spread anew over all blocks.
- **The new blocks** begin with their output projections at zero, so they leave the stream as it is.
- **The embeddings** get new channels, drawn with the standard deviation of the trained ones. They wait for the new
  blocks, and nothing else reads them.
- **The norms** outside of the blocks become norms by slices (:class:`~stepsnet.models.slice_norm.SliceNorm`). One
  norm over C_n channels would divide the old ones by another number. If the new channels were zeros instead, a factor
  would correct an RMSNorm, but not the mean of a LayerNorm, and the new blocks would have nothing of their own to read.
- **The head** gets columns of zeros for the new channels. A tied head has the embedding's new columns; there the
  weights of the last norm's new slice are zero instead.

On each new path only one factor is zero, and the other is not, so no gradient is stuck. In the first update, the output
projections get a gradient through the rows that write the old channels, and so do the head's columns (if tied, the
norm's weights). From the second update on, every parameter gets one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...errors import UserError
from ...plan import StepPlan
from ..blocks import check_no_peft, is_of_transformers
from ..stepify.plan import check_plan, check_round_to
from .of_timm import grown_vit
from .plan import RoundTo

__all__ = ["grow"]


@torch.inference_mode(False)  # the models that it returns are to be trained
def grow(
    model: nn.Module,
    steps: int | None = None,
    *,
    plan: Mapping[str, Any] | StepPlan | None = None,
    round_to: RoundTo = "heads",
) -> nn.Module:
    """Grow a network into a wider StepsNet whose first step it is; at the start, the outputs are those of the network.

    The given model is not changed. From timm, VisionTransformers and their subclasses can grow, such as DeiT and
    Steps-DeiT; from transformers, LLaMA, Mistral, Granite, Phi-3, Qwen2 and Qwen3, what :func:`stepsnet.stepify` makes
    of them, and the Steps-Transformer. A network that already has several steps gets further ones.

    What is frozen in the given model stays frozen, including the new channels of frozen embeddings. New blocks and the
    norms of new channels are trained, and so is an untied head, whose columns for new channels begin at zero.

    Args:
        model: the trained network.
        steps: n, the number of steps, including those it has already; by default one more.
        plan: widths, depths and optionally num_heads of all steps, including those it has already:
            ``{"widths": (192, 272), "depths": (12, 6)}``. By default each new step is √2 wider than the one before and
            has half as many blocks as the first.
        round_to: "heads" rounds widths as the paper does, a number rounds them to multiples of it.

    Returns:
        A model of the class that :func:`stepsnet.stepify` would give. Its new weights are drawn from torch's generator.

    Raises:
        UserError: a model of another family, or a plan that does not fit.
    """
    _check_options(model, steps, plan, round_to)
    check_no_peft(model, "grow")
    if is_of_transformers(model):
        from .of_transformers import grown_transformer  # only if transformers is installed

        return grown_transformer(model, steps, plan, round_to)
    return grown_vit(model, steps, plan, round_to)


def _check_options(model: Any, steps: Any, plan: Any, round_to: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"grow: got {str(model)[:40]!r}, expected a model with its weights")
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 2):
        raise UserError(f"steps: got {repr(steps)[:40]}, expected a whole number of at least 2")
    check_round_to(round_to)
    check_plan(plan)
