"""The linear layers of a branch: their start values, and what is put in front of the last of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from ..errors import UserError
from .branches import BranchParts, Projection, check_in_place
from .design import is_sharded

__all__ = [
    "BranchWeights",
    "heads_of",
    "inputs_of_last",
    "linear_paths",
    "misses_linear",
    "run_before_last",
    "start_of",
]


@dataclass(frozen=True)
class BranchWeights:
    """Views of the weights of a branch's linear layers: what is drawn into them is drawn into the layers.

    Args:
        queries_keys: those of an attention; else empty.
        gates: those of a gated MLP; else empty.
        values: that of an attention's values, or of the layer before an MLP's last that is not a gate.
        last: that of the layer that makes the output.
    """

    queries_keys: tuple[Tensor, ...]
    gates: tuple[Tensor, ...]
    values: Tensor
    last: Tensor

    def __iter__(self):
        return iter((*self.queries_keys, *self.gates, self.values, self.last))


def start_of(block: nn.Module, parts: BranchParts) -> BranchWeights | None:
    """Set the biases of a branch's declared linear layers to 0 and return their weights, to be initialized.

    None if transformers has loaded them, which it marks so that they are not initialized again.

    Raises:
        UserError: FSDP has sharded them: what is drawn into a view of them would be lost.
    """
    layers: list[Any] = [block.get_submodule(path) for path in linear_paths(parts)]
    if any(is_sharded(layer.weight) for layer in layers):
        kind = type(block).__name__
        raise UserError(
            f"residual: the weights of {kind} are already sharded, expected start values to be set before sharding"
        )
    if any(getattr(layer.weight, "_is_hf_initialized", False) for layer in layers):
        return None
    for layer in layers:
        if getattr(layer, "bias", None) is not None:
            nn.init.zeros_(layer.bias)
    *front, values = (_output_part(block, one) for one in parts.projections or parts.hidden)
    queries_keys, gates = (tuple(front), ()) if parts.projections else ((), tuple(front))
    return BranchWeights(queries_keys, gates, values, _output_part(block, (parts.last, 0, 1)))


def linear_paths(parts: BranchParts) -> list[str]:
    """The paths of a branch's linear layers, each once, with ``last`` at the end."""
    return [*dict.fromkeys(path for path, _, _ in parts.projections or parts.hidden), *[parts.last] * bool(parts.last)]


def misses_linear(block: nn.Module, parts: BranchParts) -> str:
    """The path of a declared layer that is not linear or cannot be cut into the declared equal parts; else ""."""
    for path, _, count in (*(parts.projections or parts.hidden), *[(parts.last, 0, 1)] * bool(parts.last)):
        layer: Any = attrgetter(path)(block)
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.shape[_dim_of_outputs(layer)] % count:
            return path
    return ""


def _output_part(block: nn.Module, projection: Projection) -> Tensor:
    """A weight (out, in) of nn.Linear, or (in, out) of transformers' Conv1D, which is the same to Xavier's rule."""
    path, part, count = projection
    layer: Any = block.get_submodule(path)
    return layer.weight.detach().chunk(count, _dim_of_outputs(layer))[part]


def _dim_of_outputs(layer: Any) -> int:
    return 0 if isinstance(layer, nn.Linear) else 1


def inputs_of_last(block: nn.Module, parts: BranchParts) -> int:
    """The width of what the last layer of a branch reads; 0 if it is not declared or not linear."""
    layer = block.get_submodule(parts.last) if parts.last else None
    weight = getattr(layer, "weight", None)
    return weight.shape[1 - _dim_of_outputs(layer)] if isinstance(weight, Tensor) and weight.ndim == 2 else 0


def heads_of(block: nn.Module, parts: BranchParts) -> int:
    """The number of heads of an attention whose last layer is declared, by its ``num_heads`` or else its ``head_dim``.

    0 for an MLP, for an attention that is given as a function, and if neither attribute is known.
    """
    if parts.projections is None or not parts.last or not parts.layer:
        return 0
    attention = attrgetter(parts.layer)(block)
    inputs, heads = inputs_of_last(block, parts), getattr(attention, "num_heads", 0)
    if isinstance(heads, int) and heads > 0 and inputs % heads == 0:
        return heads
    size = getattr(attention, "head_dim", 0)
    return inputs // size if size else 0


def run_before_last(block: Any, index: int, parts: BranchParts) -> None:
    """Put ``inner`` of the block's connection ``index`` in front of the last layer of its branch."""
    block.get_submodule(parts.last).register_forward_pre_hook(partial(_changed, block, index, parts.last))


def _changed(block: Any, index: int, path: str, layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    check_in_place(block, path, layer)
    return block.connections[index].inner(arguments[0]), *arguments[1:]
