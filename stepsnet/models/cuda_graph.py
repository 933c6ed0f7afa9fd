"""A model's forward and backward passes replayed as CUDA graphs, so that no kernel waits for its launch.

A narrow deep network has thousands of kernels that take a GPU less time than the processor needs to launch them.
torch.cuda.make_graphed_callables is not used: before torch 2.13, it forbids other threads, such as those
of loaders, to use CUDA during a capture.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import UserError, in_a_line, is_out_of_memory
from .compilation import ReplacedForward, being_traced, buffers_as_before

__all__ = ["GraphedInference", "GraphedTraining"]

_WARM_UPS = 2  # passes in which kernels are chosen and compiled, before one that is watched
_KINDS = 8  # of inputs, at most: each has its own graphs, and these have their own memory
_A_TENSOR = object()  # stands for a tensor among the arguments
_CONSTANTS = (bool, int, float, str, type(None))


class _Graphed(ReplacedForward):
    """A model's forward pass, captured for each kind of inputs and replayed.

    A kind is the inputs' shapes and types, the other arguments, and the modes of the modules and of autocast. The model
    runs as it was built for kinds beyond the eighth, for calls without tensors on a GPU and, in evaluation, if it is
    found before the capture begins that it cannot be captured. A capture that fails is an error even in evaluation,
    since torch may then no longer draw random numbers. Calls from several threads and streams run one after the other.
    Weights may be written to in place; if one is moved or replaced, everything is captured anew. A hook that is
    registered after the capture is not called. A new value of a plain attribute, such as a dropout rate, goes
    unnoticed; a tensor in one must not be replaced, since the graph reads where the first one was.
    """

    for_training = False

    def __init__(self, model: nn.Module, own: Any = None):
        super().__init__(model, own)
        self.captured: list[tuple[Any, _Passes | None]] = []
        self.seen: deque[Any] = deque(maxlen=_KINDS)  # the last kinds of inputs that were not captured in evaluation
        self.parts: list[nn.Module] = []  # set by the first capture
        self.slots: list[tuple[dict[str, Any], str, Any]] = []  # (the dictionary that holds it, its name, the value)
        self.sizes: list[tuple[dict[str, Any], int]] = []
        self.places: list[tuple[int, bool]] = []  # of the tensors in the slots
        self.lock = RLock()  # reentrant, since a model may contain itself

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        inputs = [value for value in given if isinstance(value, Tensor)]
        if not self._can_replay(given, inputs):
            return self.as_built(*args, **kwargs)
        with self.lock:
            passes = self._passes_for(given, list(kwargs), inputs)
            return passes(inputs) if passes else self.as_built(*args, **kwargs)

    def _passes_for(self, given: Sequence[Any], names: list[str], inputs: Sequence[Tensor]) -> _Passes | None:
        """The graphs for the ``given`` values, the last of which have ``names``; None if the model runs as built."""
        if not self.captured or self._is_changed():
            self._look_at_the_model()
        constants = [_A_TENSOR if isinstance(value, Tensor) else (type(value), value) for value in given]
        shapes = [(x.shape, x.dtype, x.device) for x in inputs]
        modes = bytes(part.training for part in self.parts)
        kind = (modes, _autocast_of(), len(given), names, constants, shapes)
        kinds = [other for other, _ in self.captured]
        if kind not in kinds:
            # in evaluation, many sizes come only once
            if len(kinds) == _KINDS or not (self.model.training or kind in self.seen):
                self.seen.append(kind)
                return None
            self.captured.append((kind, self._capture(partial(self._run, given, names), inputs)))
            kinds.append(kind)
        return self.captured[kinds.index(kind)][1]

    def _run(self, given: Sequence[Any], names: Sequence[str], tensors: Sequence[Tensor]) -> Any:
        """Run the forward pass with other tensors in place of the ``given`` ones; the last values have ``names``."""
        rest = iter(tensors)
        values = [next(rest) if isinstance(value, Tensor) else value for value in given]
        unnamed = len(values) - len(names)
        return self.as_built(*values[:unnamed], **dict(zip(names, values[unnamed:], strict=True)))

    def _can_replay(self, given: Sequence[Any], inputs: Sequence[Tensor]) -> bool:
        training = self.model.training
        if self.paused or torch.is_grad_enabled() != training or (training and not self.for_training):
            return False
        if others := [type(value).__name__ for value in given if not isinstance(value, (Tensor, *_CONSTANTS))]:
            if training:
                raise self._refusal(f"it is called with a {others[0]}")
            return False
        if hasattr(self.model, "generate") and not training:  # each token has another shape, and a cache is written to
            return False
        if torch.compiler.is_compiling() or being_traced():
            return False
        if not inputs or not all(x.is_cuda and not x.requires_grad for x in inputs):
            return False
        return not torch.cuda.is_current_stream_capturing()

    def _is_changed(self) -> bool:
        """Whether a module, a parameter or a buffer was added, replaced, moved, frozen or freed."""
        if any(len(held) != size for held, size in self.sizes):
            return True
        return any(held.get(name) is not was for held, name, was in self.slots) or self.places != _places(self.slots)

    def _look_at_the_model(self) -> None:
        self.captured.clear()
        self.parts = list(self.model.modules())
        kinds = ("_parameters", "_buffers", "_modules")
        held = [getattr(part, kind) for part in self.parts for kind in kinds]
        self.sizes = [(one, len(one)) for one in held]
        self.slots = [(one, name, value) for one in held for name, value in one.items()]
        self.places = _places(self.slots)

    def _capture(self, run: _Run, inputs: Sequence[Tensor]) -> _Passes | None:
        """Return the graphs, or None in evaluation if it is found beforehand that the model cannot be captured."""
        weights = [weight for weight in self.model.parameters() if weight.requires_grad] if self.model.training else []
        if any(weight._backward_hooks for weight in weights):
            raise self._refusal("a weight has a gradient hook")
        try:
            with torch.cuda.device(inputs[0].device), _as_if_not_run(self.model):
                return _Passes(run, inputs, weights)
        except (_NotCapturable, _CaptureFailed) as error:
            if isinstance(error, _NotCapturable) and not self.model.training:
                return None
            raise self._refusal(in_a_line(error)[:300]) from error

    def _refusal(self, reason: str) -> UserError:
        return UserError(
            f"cuda_graph: {type(self.model).__name__} cannot be captured: {reason}; expected a model that is a "
            "function of tensors on the GPU, or cuda_graph=false"
        )


class GraphedInference(_Graphed):
    """A forward pass replayed in evaluation, without gradients."""


class GraphedTraining(_Graphed):
    """Forward and backward passes replayed in training, as one graph each, and forward passes in evaluation.

    Random numbers that the forward pass draws on the GPU (dropout, stochastic depth) are those of an eager pass. The
    backward pass can run only once, before the next forward pass, and gradients of gradients cannot be taken.
    """

    for_training = True


_Run = Callable[[Sequence[Tensor]], Any]  # the forward pass as a function of its tensors alone


class _NotCapturable(RuntimeError):
    """The model cannot be captured, as found before a capture begins, so that CUDA's state is intact."""


class _CaptureFailed(RuntimeError):
    """A capture failed, after which torch before 2.13 can no longer draw random numbers."""


class _Passes:
    """The graphs for inputs of one kind; inputs are copied to where the graphs read them, weights are read in place.

    Args:
        weights: those whose gradients the backward pass computes; without any, there is only a forward pass.

    Raises:
        _NotCapturable, _CaptureFailed: the forward or the backward pass does more than compute on the GPU, or a
            forward pass alone does not fit into its memory.
    """

    def __init__(self, run: _Run, inputs: Sequence[Tensor], weights: Sequence[Tensor]):
        self.weights, self.number = weights, 0  # the number counts passes
        self.is_read = torch.cuda.Event()
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written to outside it
            self.inputs = [x.detach().clone() for x in inputs]
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream), _without_cached_casts():
            try:
                for _ in range(_WARM_UPS):
                    self._once(run)
                with _watched():
                    self._once(run)
            except RuntimeError as error:
                current.wait_stream(stream)
                if weights or not is_out_of_memory(error):
                    raise
                raise _NotCapturable("it does not fit into the memory that the other graphs leave") from error
            with _without_collections():
                try:
                    self._capture(run, stream)
                except RuntimeError as error:
                    if is_out_of_memory(error):
                        raise
                    first = error.__context__ or error  # the end of the capture hides the first error
                    raise _CaptureFailed(in_a_line(first)) from error
        current.wait_stream(stream)

    def _once(self, run: _Run) -> None:
        outputs = tensors_of(run(self.inputs))
        if self.weights:
            gradients_of(outputs, self.weights, [torch.zeros_like(y) for y in outputs if y.requires_grad])

    def _capture(self, run: _Run, stream: torch.cuda.Stream) -> None:
        # other threads, such as a loader's that pins memory, may use CUDA meanwhile
        options: dict[str, Any] = {"stream": stream, "capture_error_mode": "thread_local"}
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.forward_graph, **options):
            self.leaves, self.structure = tree_flatten(run(self.inputs))
        outputs = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.differentiable = [y.requires_grad for y in outputs]
        self.output_gradients = [torch.zeros_like(y) for y in outputs if y.requires_grad]
        self.gradients: Sequence[Tensor | None] = []  # valid until the next forward pass
        if self.weights:
            with torch.cuda.graph(self.backward_graph, pool=self.forward_graph.pool(), **options):
                self.gradients = gradients_of(outputs, self.weights, self.output_gradients)
        self.leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        outputs = iter(_Replayed.apply(self, *inputs, *self.weights) if self.weights else self.forward(inputs))
        leaves = [next(outputs) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for weight, written in zip(self.weights, self.gradients, strict=True):
            # autograd leaves a weight's first gradient where it is, in memory that this pass writes to as well
            if weight.grad is not None and written is not None and weight.grad.data_ptr() == written.data_ptr():
                weight.grad = weight.grad.clone()
        stream = torch.cuda.current_stream(self.inputs[0].device)
        self.is_read.wait(stream)  # another stream may still be copying the last pass's outputs
        for place, x in zip(self.inputs, inputs, strict=True):
            place.copy_(x)
        self.number += 1
        self.forward_graph.replay()
        outputs = tuple(leaf.clone() for leaf in self.leaves if isinstance(leaf, Tensor))  # the next pass writes there
        self.is_read.record(stream)
        return outputs

    def backward(self, number: int, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        if number != self.number:
            raise UserError(
                "cuda_graph: the model was called again before this backward pass, or this is a second one; expected "
                "one backward pass after each forward pass, or cuda_graph=false"
            )
        self.number += 1
        given = [gradient for gradient, takes in zip(gradients, self.differentiable, strict=True) if takes]
        for place, gradient in zip(self.output_gradients, given, strict=True):
            place.copy_(gradient)
        self.backward_graph.replay()
        return [None if gradient is None else gradient.detach() for gradient in self.gradients]


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: _Passes, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = passes.forward(inputs[: len(passes.inputs)])
        ctx.passes, ctx.number = passes, passes.number
        ctx.mark_non_differentiable(*[y for y, takes in zip(outputs, passes.differentiable) if not takes])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[None] * len(ctx.passes.inputs), *ctx.passes.backward(ctx.number, gradients)


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors in a model's output. Raises _NotCapturable if the output holds anything that cannot be replayed."""
    leaves, _ = tree_flatten(output)
    if others := [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (Tensor, *_CONSTANTS))]:
        raise _NotCapturable(f"it returns a {others[0]}")
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def gradients_of(
    outputs: Sequence[Tensor], weights: Sequence[Tensor], of_outputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients, each in its own memory like ``weight.grad``, and without autocast, as in ``loss.backward()``."""
    differentiable = [y for y in outputs if y.requires_grad]
    with torch.autocast(weights[0].device.type, enabled=False):
        found = torch.autograd.grad(differentiable, weights, of_outputs, allow_unused=True)
    taken: set[int] = set()
    own: list[Tensor | None] = []
    for gradient in found:
        if gradient is not None and gradient.untyped_storage().data_ptr() in taken:
            gradient = gradient.clone()
        own.append(gradient)
        taken |= set() if gradient is None else {gradient.untyped_storage().data_ptr()}
    return own


def _places(slots: Sequence[tuple[dict[str, Any], str, Any]]) -> list[tuple[int, bool]]:
    return [(value.data_ptr(), value.requires_grad) for _, _, value in slots if isinstance(value, Tensor)]


def _autocast_of() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")


def _without_cached_casts() -> AbstractContextManager:
    """The caller's autocast without its cache: a cast cached before the capture would be missing from the graph."""
    enabled, dtype = _autocast_of()
    return torch.autocast("cuda", dtype=dtype, enabled=enabled, cache_enabled=False)


@contextmanager
def _watched() -> Iterator[None]:
    """Raise _NotCapturable if the processor waits for the GPU, or draws numbers that every replay would then repeat."""
    before, states = torch.cuda.get_sync_debug_mode(), _states_of_processor()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise _NotCapturable(in_a_line(error)) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
    if states != _states_of_processor():
        raise _NotCapturable("it draws random numbers on the processor")


@contextmanager
def _without_collections() -> Iterator[None]:
    """Suspend garbage collection: a graph that is freed during a capture would end it."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _states_of_processor() -> tuple[Any, ...]:
    _, keys, position, *_ = np.random.get_state()
    return random.getstate(), bytes(keys), position, bytes(torch.get_rng_state().numpy())  # type: ignore[arg-type]


@contextmanager
def _as_if_not_run(model: nn.Module) -> Iterator[None]:
    """Restore running statistics and the GPU's random state on leaving the context."""
    drawn = torch.cuda.get_rng_state()
    try:
        with buffers_as_before(model):
            yield
    finally:
        torch.cuda.set_rng_state(drawn)
