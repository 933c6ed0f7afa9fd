"""A model as torch.export captures it, with its batch and picture size left open where the model allows it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from timm.models.swin_transformer import SwinTransformerBlock
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ..errors import UserError

__all__ = ["Captured", "capture", "flat_outputs", "first_line", "quiet", "takes_other_sizes"]

AXES = ("batch", "channels", "height", "width")


@dataclass(frozen=True)
class Captured:
    """A program and which axes of its input are open."""

    program: ExportedProgram
    shape: tuple[int, ...]  # of one sample
    open_axes: tuple[int, ...]  # of the input, batch first

    @property
    def input_shape(self) -> list[int | str]:
        """Of the input, with names in place of what is open: ``["batch", 3, "height", "width"]``."""
        return [AXES[axis] if axis in self.open_axes else size for axis, size in enumerate((1, *self.shape))]


def capture(model: nn.Module, example: Tensor, open_axes: Sequence[int]) -> Captured:
    """Capture a model's forward pass on the CPU.

    Args:
        model: in evaluation mode.
        example: (2, C, H, W), or one sample where the batch is not open: torch.export takes a size of 1 for fixed.
        open_axes: of the input: 0 the batch, 2 and 3 the picture's height and width.

    Raises:
        UserError: torch.export does not take the model, or not with these axes open.
    """
    shapes: Mapping[int, Any] = {axis: Dim.DYNAMIC for axis in open_axes}
    try:
        with torch.no_grad(), quiet():
            program = torch.export.export(_Flat(model), (example,), dynamic_shapes=(shapes,), strict=False)
    except Exception as error:  # whatever the model's own code and torch's tracing raise
        raise UserError(f"torch.export does not take the model: {first_line(error)}") from error
    return Captured(program, tuple(example.shape[1:]), tuple(open_axes))


def takes_other_sizes(model: nn.Module, shape: Sequence[int]) -> bool:
    """Whether pictures of another height and width than ``shape`` (C, H, W) can be left to the exported model.

    Shifted windows are laid out for one size: torch.export takes minutes over their arithmetic, and then fails.
    """
    if len(shape) != 3 or any(isinstance(module, SwinTransformerBlock) for module in model.modules()):
        return False
    channels, height, width = shape
    try:
        with torch.inference_mode():
            model(torch.zeros(1, channels, height + 32, width + 64))
    except Exception:  # each model says in its own way that it takes one size
        return False
    return True


def flat_outputs(found: Any) -> list[Tensor]:
    """The tensors of an output: of a classifier the logits, of a backbone its maps."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, Mapping):
        found = list(found.values())
    if isinstance(found, (list, tuple)) and all(isinstance(one, Tensor) for one in found):
        return list(found)
    raise UserError(f"export: the model returns a {type(found).__name__}, expected a tensor or several of them")


class _Flat(nn.Module):
    """Has outputs as a plain tuple, and one input whose name does not depend on the model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(flat_outputs(self.model(images)))


def first_line(error: BaseException) -> str:
    """The first sentence or so of what an exporter says, which may be pages."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}"


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings and the log of the exporters, which are about their own inner work."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
