"""What the residual branches of a block are: a row for each class of blocks, with the parts that designs work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

__all__ = ["BoundBranch", "BranchParts", "parts_of"]


@dataclass(frozen=True)
class BranchParts:
    """F(x) = after(layer(norm(x))) by the paths of its parts in the block.

    Args:
        norm: the norm in front; "" where it is not declared.
        layer: the attention or the MLP; of a tuple that it returns, the first is the output.
        after: what follows it, such as layer scale and stochastic depth.
        takes_arguments: whether ``layer`` takes what else the block is called with: masks, positions, a cache.
        values: the linear layer that makes the attention's values, and which part of its output they are: 2, 3 for
            the last of three. None for a branch without.
        function: (block, x, …) -> F(x), in place of the paths.
    """

    norm: str = ""
    layer: str = ""
    after: tuple[str, ...] = ()
    takes_arguments: bool = False
    values: tuple[str, int, int] | None = None
    function: Callable[..., Tensor] | None = None


class BoundBranch:
    """F of one block in one call: x -> F(x), both (B, N, C)."""

    __slots__ = ("args", "block", "kwargs", "parts")

    def __init__(self, block: nn.Module, parts: BranchParts, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.block, self.parts, self.args, self.kwargs = block, parts, args, kwargs

    def __call__(self, x: Tensor, behind: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """``behind`` is put between the layer and what follows it; it needs declared parts."""
        if self.parts.function is not None:
            return self.parts.function(self.block, x, *self.args, **self.kwargs)
        y = self.block.get_submodule(self.parts.norm)(x)
        layer = self.block.get_submodule(self.parts.layer)
        y = layer(y, *self.args, **self.kwargs) if self.parts.takes_arguments else layer(y)
        y = y[0] if isinstance(y, tuple) else y
        y = y if behind is None else behind(y)
        for path in self.parts.after:
            y = self.block.get_submodule(path)(y)
        return y


_AFTER_1, _AFTER_2 = ("ls1", "drop_path1"), ("ls2", "drop_path2")
_ROTARY = (
    BranchParts("input_layernorm", "self_attn", takes_arguments=True, values=("self_attn.v_proj", 0, 1)),
    BranchParts("post_attention_layernorm", "mlp"),
)
# by the name of the class, so that no library is imported for a row
_PARTS: dict[str, Sequence[BranchParts]] = {
    "timm.models.vision_transformer.Block": (
        BranchParts("norm1", "attn", _AFTER_1, takes_arguments=True, values=("attn.qkv", 2, 3)),
        BranchParts("norm2", "mlp", _AFTER_2),
    ),
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer": _ROTARY,
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer": _ROTARY,
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer": _ROTARY,
}


def parts_of(block: nn.Module) -> Sequence[BranchParts] | None:
    """The branches of a block; those of other classes without parts, as ``register_block`` has declared them."""
    cls = type(block)
    if (found := _PARTS.get(f"{cls.__module__}.{cls.__qualname__}")) is not None:
        return found
    from ..models.adapters import branch_functions  # not above: the families there are built of what is here

    functions = branch_functions(block)
    return None if functions is None else [BranchParts(function=function) for function in functions]
