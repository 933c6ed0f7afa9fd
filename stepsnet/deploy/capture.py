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

__all__ = ["Captured", "NotCaptured", "capture", "first_line", "flat_outputs", "quiet", "other_picture_sizes"]


class NotCaptured(UserError):
    """torch.export does not take a model, or not with these axes open."""


@dataclass(frozen=True)
class Captured:
    """A program with one input, and which axes of that are open."""

    program: ExportedProgram
    input: str  # its name
    shape: tuple[int, ...]  # of one sample
    open_axes: dict[int, str]  # with their names

    @property
    def input_shape(self) -> list[int | str]:
        """Of the input, with names in place of what is open: ``["batch", 3, "height", "width"]``."""
        return [self.open_axes.get(axis, size) for axis, size in enumerate((1, *self.shape))]


def capture(model: nn.Module, example: Tensor, name: str, open_axes: dict[int, str]) -> Captured:
    """Capture a model's forward pass on the CPU.

    Args:
        model: in evaluation mode; a function of one tensor.
        example: two samples, or one where the batch is not open: torch.export takes a size of 1 for fixed.
        name: of the input.
        open_axes: of the input, with their names: 0 is the batch, of pictures 2 and 3 height and width.

    Raises:
        NotCaptured: torch.export does not take the model, or not with these axes open.
    """
    shapes: Mapping[int, Any] = {axis: Dim.DYNAMIC for axis in open_axes}
    try:
        with torch.no_grad(), quiet():
            program = torch.export.export(_Flat(model), (example,), dynamic_shapes=(shapes,), strict=False)
    except Exception as error:  # whatever the model's own code and torch's tracing raise
        raise NotCaptured(f"torch.export does not take the model: {first_line(error)}") from error
    return Captured(program, name, tuple(example.shape[1:]), open_axes)


def other_picture_sizes(model: nn.Module, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Other sizes (C, H, W) than ``shape`` that the model takes; none where the size cannot be left open.

    The first differs by multiples of 32. The second is odd, for models that take any size: converters round its
    quotients in ways of their own.

    Shifted windows are laid out for one size: torch.export takes minutes over their arithmetic, and then fails.
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
    """The tensors of an output: of a classifier the logits, of a backbone its maps."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, Mapping):
        found = list(found.values())
    if isinstance(found, (list, tuple)) and all(isinstance(one, Tensor) for one in found):
        return list(found)
    raise UserError(f"export: the model returns a {type(found).__name__}, expected a tensor or several of them")


class _Flat(nn.Module):
    """The same with its outputs as a plain tuple."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(flat_outputs(self.model(x)))


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
