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

from ..errors import UserError, in_a_line

__all__ = ["Captured", "NotCaptured", "capture", "flat_outputs", "quiet", "other_picture_sizes"]


class NotCaptured(UserError):
    """torch.export cannot capture a model, or not with these axes open."""


@dataclass(frozen=True)
class Captured:
    """A captured program with one input, some of whose axes may be open."""

    program: ExportedProgram
    input: str  # its name
    shape: tuple[int, ...]  # of one sample
    open_axes: dict[int, str]  # with their names

    @property
    def input_shape(self) -> list[int | str]:
        """The input's shape, with names in place of open sizes: ``["batch", 3, "height", "width"]``."""
        return [self.open_axes.get(axis, size) for axis, size in enumerate((1, *self.shape))]


def capture(model: nn.Module, example: Tensor, name: str, open_axes: dict[int, str]) -> Captured:
    """Capture a model's forward pass on the CPU.

    Args:
        model: in evaluation mode; a function of one tensor.
        example: two samples, or one if the batch is not open: torch.export treats a size of 1 as fixed.
        name: the input's name.
        open_axes: the input's open axes and their names: 0 is the batch; for pictures, 2 and 3 are height and width.

    Raises:
        NotCaptured: torch.export cannot capture the model, or not with these axes open.
    """
    shapes: Mapping[int, Any] = {axis: Dim.DYNAMIC for axis in open_axes}
    try:
        with torch.no_grad(), quiet():
            program = torch.export.export(_Flat(model), (example,), dynamic_shapes=(shapes,), strict=False)
    except Exception as error:  # whatever the model's own code and torch's tracing raise
        raise NotCaptured(f"torch.export cannot capture the model: {in_a_line(error, 200, with_type=True)}") from error
    return Captured(program, name, tuple(example.shape[1:]), open_axes)


def other_picture_sizes(model: nn.Module, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Sizes (C, H, W) other than ``shape`` that the model takes; none if the size cannot be left open.

    The first differs by multiples of 32. The second, for models that take any size, is odd: converters round its
    quotients in ways of their own.

    Shifted windows are laid out for one size: torch.export spends minutes on their arithmetic, and then fails.
    """
    if any(isinstance(module, SwinTransformerBlock) for module in model.modules()):
        return ()
    channels, height, width = shape
    taken: list[tuple[int, ...]] = []
    for more in ((32, 64), (13, 27)):
        size = channels, height + more[0], width + more[1]
        try:
            with torch.inference_mode():
                model(torch.zeros(1, *size))
        except Exception:  # each model says in its own way which sizes it takes
            break
        taken.append(size)
    return tuple(taken)


def flat_outputs(found: Any) -> list[Tensor]:
    """A model's output as a list of tensors, such as a classifier's logits or a backbone's maps."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, Mapping):
        found = list(found.values())
    if isinstance(found, (list, tuple)) and all(isinstance(one, Tensor) for one in found):
        return list(found)
    raise UserError(f"export: the model returns a {type(found).__name__}, expected a tensor or several of them")


class _Flat(nn.Module):
    """A model with its outputs as a plain tuple."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(flat_outputs(self.model(x)))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporters' warnings and logs, which are about their own inner workings."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
