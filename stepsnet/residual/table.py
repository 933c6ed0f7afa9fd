"""All designs by name, one line each, in the order in which they are shown. A new design is a file and a line here."""

from __future__ import annotations

import sys
from typing import Any, Self

from ..errors import UserError
from .alt_up import AltUp
from .attention_residuals import AttentionResiduals, BlockAttentionResiduals
from .complete_p import CompleteP
from .deep_cross_attention import DeepCrossAttention
from .deepnorm import DeepNorm
from .dense_former import DenseFormer
from .design import Connection
from .fixup import Fixup
from .hyper_connections import HyperConnections
from .lambdas import Lambdas
from .laurel import LAuReL
from .layer_norm_scaling import LayerNormScaling
from .layer_scale import LayerScale
from .mhc import MHC
from .mudd import MUDD
from .normformer import NormFormer
from .peri_ln import PeriLN
from .rezero import ReZero
from .value_residual import ValueResidual

__all__ = ["DESIGNS"]


class _Designs(dict[str, type[Connection] | None]):
    """Designs by name. Users may add others but not replace ours, since results refer to them by name."""

    def __setitem__(self, name: str, design: type[Connection] | None) -> None:
        if name in _OURS and design is not _OURS[name]:
            raise UserError(
                f"residual: got a design called {name}, the name of one of stepsnet's own, expected another name"
            )
        there = self.get(name)
        if there is not None and design is not None and _file_of(design) != _file_of(there):
            modules = f"{there.__module__} and {design.__module__}"
            raise UserError(
                f"residual: got two designs called {name}, from {modules}, expected a different name for each"
            )
        super().__setitem__(name, design)

    def update(self, *others: Any, **more: Any) -> None:
        for name, design in dict(*others, **more).items():
            self[name] = design

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self


def _file_of(design: Any) -> str:
    """The file of a design. Its module may be ``__main__`` in a script and imported again by name, or be reloaded."""
    module = sys.modules.get(design.__module__)
    return getattr(module, "__file__", None) or design.__module__


_OURS: dict[str, type[Connection] | None] = {
    "plain": None,  # x_{l+1} = x_l + F_l(x_l), the blocks as they are
    "layer_scale": LayerScale,
    "rezero": ReZero,
    "deepnorm": DeepNorm,
    "fixup": Fixup,
    "normformer": NormFormer,
    "layer_norm_scaling": LayerNormScaling,
    "peri_ln": PeriLN,
    "complete_p": CompleteP,
    "value_residual": ValueResidual,
    "lambdas": Lambdas,
    "dense_former": DenseFormer,
    "deep_cross_attention": DeepCrossAttention,
    "mudd": MUDD,
    "laurel": LAuReL,
    "alt_up": AltUp,
    "hyper_connections": HyperConnections,
    "mhc": MHC,
    "attention_residuals": AttentionResiduals,
    "attention_residuals_block": BlockAttentionResiduals,
}

DESIGNS = _Designs(_OURS)
