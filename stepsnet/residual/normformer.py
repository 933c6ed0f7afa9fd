r"""NormFormer: Shleifer et al., "Improved Transformer Pretraining with Extra Normalization", arXiv 2110.09456, Sec. 2.

    x' = x + Norm(W_o [γ_1 head_1, …, γ_H head_H](Norm(x)))        γ: one number a head
    x_{l+1} = x' + W_2 Norm(GELU(W_1 Norm(x')))

In a gated MLP, the norm also stands in front of the last layer. Norms have the class of those in front of the branches.
Dropout that a library puts at the end of its attention, as in GPT-2, comes before the norm; the authors' comes after
it. The paper's learned scale of the MLP's shortcut, which is optional there, is not part of this. Start: γ = 1, norms
as usual. Parameters: H + 2C + 8C per block with an MLP of 4C. Traffic: as in the plain stream, with the norm after the
attention fused with the sum; the norm inside the MLP does not touch the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import UserError
from .branches import BranchParts
from .design import Branch, Connection, Place, reset_norm
from .linears import heads_of, inputs_of_last, run_before_last
from .scales import HeadScale

__all__ = ["NormFormer"]


class NormFormer(Connection):
    title = "a gain per head, and norms after the attention and inside the MLP"
    source = "arXiv 2110.09456, Sec. 2"
    scales_branches = True
    needs = ("norm", "linears")

    def __init__(self, place: Place, options: Mapping[str, Any]):
        super().__init__(place, options)
        # ``inner`` stands in front of the last layer, ``norm`` behind an attention
        self.inner: Any = HeadScale(place.heads) if place.heads else _norm_of(place.inputs, place.norm)
        self.norm = _norm_of(place.width, place.norm) if place.heads else None

    def init_weights(self) -> None:
        for part in self.children():
            part.reset_parameters() if isinstance(part, HeadScale) else reset_norm(part)

    def forward(self, x: Tensor, F: Branch) -> Tensor:
        return x + F(x, behind=self.norm)

    @classmethod
    def check_block(cls, block: nn.Module, parts: Sequence[BranchParts]) -> None:
        for one in parts:
            heads, inputs = heads_of(block, one), inputs_of_last(block, one)
            if one.projections is not None and (heads < 1 or inputs % heads):
                got = f"{one.layer} of {type(block).__name__}: got {heads or 'no'} heads of {inputs} channels"
                raise UserError(f"residual: normformer: {got}, expected head_dim or num_heads as an attribute")

    @classmethod
    def hooked(cls, parts: BranchParts) -> list[str]:
        return [parts.last]

    @classmethod
    def prepare(cls, block: Any, parts: Sequence[BranchParts], place: Place, options: Mapping[str, Any]) -> None:
        for index, one in enumerate(parts):
            run_before_last(block, index, one)


def _norm_of(width: int, norm: Any) -> nn.Module:
    """A new norm of the same kind. transformers' RMSNorm has another name for its ε.

    Raises:
        UserError: the norm's class does not take a width and an ε.
    """
    try:
        made = type(norm)(width, eps=norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)
    except (AttributeError, TypeError):
        kind = type(norm).__name__
        raise UserError(
            f"residual: normformer: got the norm {kind}, expected one that is made by {kind}(C, eps=…)"
        ) from None
    if hasattr(norm, "elementwise_affine"):
        made.elementwise_affine = norm.elementwise_affine
    for part in ("weight", "bias"):  # which the norm in front may not have
        if getattr(norm, part, made) is None:
            setattr(made, part, None)
    return made
