"""torch.compile for deep models: one block at a time, or as one graph that holds the weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from ..errors import UserError
from ..residual.connected import ConnectedBlock
from .blocks import blocks_of

__all__ = ["FrozenForward", "compile_blocks"]


def compile_blocks(model: nn.Module, recomputed: Sequence[nn.Module] = (), **kwargs: Any) -> None:
    """``torch.compile`` each block in place: the blocks of a width share their graphs, whatever the depth.

    Stochastic depth stays outside in training: its rate differs from block to block, and dynamo would take each for
    a constant and compile every block anew.

    Args:
        recomputed: blocks that :func:`recompute_blocks` gets afterwards. dynamo compiles nothing that runs
            inside a checkpoint's function unless it was compiled before.
        **kwargs: ``torch.compile``'s.

    Raises:
        UserError: no sequence of blocks is found in the model.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UserError("compile: no sequence of blocks was found in the model")
    for module in model.modules():
        if isinstance(module, DropPath) and "forward" not in module.__dict__:
            module.forward = partial(_outside_of_graphs, module)
    for block in blocks:
        # of a block whose arguments grow from block to block, what sees one shape
        parts = block.parts_to_compile() if isinstance(block, ConnectedBlock) else [block]
        for part in parts:
            if block in recomputed:
                part.forward = torch.compile(part.forward, **kwargs)
            else:
                part.compile(**kwargs)


def _outside_of_graphs(module: DropPath, x: Tensor) -> Tensor:
    return _drop_path(module, x) if module.training else x


@torch.compiler.disable
def _drop_path(module: DropPath, x: Tensor) -> Tensor:
    return type(module).forward(module, x)


class FrozenForward:
    """A model's forward pass as one graph that holds its weights as constants, in place of ``model.forward``.

    inductor then lays the weights out for the CPU's matrix kernels, folds batch norms into convolutions and runs
    activations and additions inside of the products. One graph is compiled for each shape of input. With gradients,
    in training, and once a weight has changed, the model's own forward pass runs.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.versions: list[tuple[int, int]] = []  # of the weights that the graphs hold, from the first call
        eager = self._eager

        def whole(*args: Any, **kwargs: Any) -> Any:
            return eager(*args, **kwargs)

        # dynamo counts the graphs of a code object, which all models would share, and gives up at the eighth
        code = whole.__code__.replace(co_name=f"forward_{id(self)}")
        self.compiled = torch.compile(FunctionType(code, globals(), closure=whole.__closure__), dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or self.model.training:
            return self._eager(*args, **kwargs)
        self.versions = self.versions or _versions(self.model)
        if self.versions != _versions(self.model):
            return self._eager(*args, **kwargs)
        import torch._inductor.config as inductor_config  # takes half a second, which only a compiled model pays

        with inductor_config.patch(freezing=True):  # dynamo asks it too, so torch.compile's options do not suffice
            return self.compiled(*args, **kwargs)

    def _eager(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.model).forward(self.model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenForward:
        return type(self)(memo[id(self.model)])  # the copy of a model is being made when its attributes are

    def __reduce__(self) -> Any:
        return type(self), (self.model,)


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """What changes with any weight or statistic: where each is, and how often it was written to."""
    tensors = [*model.parameters(), *model.buffers()]
    return [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
