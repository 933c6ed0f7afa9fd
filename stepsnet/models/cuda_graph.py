"""A model's forward and backward passes replayed as CUDA graphs, so that no kernel waits for its launch.

A narrow deep network has thousands of kernels that take a GPU less time than the processor needs to launch them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..errors import UserError, in_a_line, is_out_of_memory
from .compilation import ReplacedForward

__all__ = ["GraphedInference", "GraphedTraining"]

_WARM_UPS = 3  # passes in which kernels are chosen and compiled
_KINDS = 8  # of inputs: each has graphs of its own, and these their own memory
_CONSTANTS = (bool, int, float, str, type(None))


class _Graphed(ReplacedForward):
    """A model's forward pass, captured at its first call with inputs of some shapes and replayed at the next ones.

    Inputs of more than eight kinds, what is not called with tensors on a GPU, and in evaluation a model that cannot be
    captured, run as the model was built. Weights may be written to in place; where one was moved, everything is
    captured anew. A hook that is registered after the
    capture is not called, and what the model does besides computing on the GPU (a counter in Python, say) is not
    repeated.
    """

    for_training = False

    def __init__(self, model: nn.Module, own: Any = None):
        super().__init__(model, own)
        self.weights: list[Tensor] = []
        self.places: list[tuple[int, bool]] = []
        self.captured: list[tuple[Any, _Passes | None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        inputs = [value for value in given if isinstance(value, Tensor)]
        if not self._can_replay(given, inputs):
            return self.as_built(*args, **kwargs)
        self._forget_what_moved()
        constants = [None if isinstance(value, Tensor) else value for value in given]
        shapes = [(x.shape, x.dtype, x.device) for x in inputs]
        kind = (self.model.training, _autocast_of(), len(args), list(kwargs), constants, shapes)
        kinds = [other for other, _ in self.captured]
        if kind not in kinds:
            if len(kinds) == _KINDS:
                return self.as_built(*args, **kwargs)
            self.captured.append((kind, self._capture(partial(self._run, given, list(kwargs)), inputs)))
            kinds.append(kind)
        passes = self.captured[kinds.index(kind)][1]
        return passes(inputs) if passes else self.as_built(*args, **kwargs)

    def _run(self, given: Sequence[Any], names: Sequence[str], tensors: Sequence[Tensor]) -> Any:
        """The forward pass with other tensors in place of the ``given`` ones, the last of which have names."""
        rest = iter(tensors)
        values = [next(rest) if isinstance(value, Tensor) else value for value in given]
        unnamed = len(values) - len(names)
        return self.as_built(*values[:unnamed], **dict(zip(names, values[unnamed:], strict=True)))

    def _can_replay(self, given: Sequence[Any], inputs: Sequence[Tensor]) -> bool:
        training = self.model.training
        if torch.is_grad_enabled() != training or (training and not self.for_training):
            return False
        if hasattr(self.model, "generate") and not training:  # each token is another shape, and a cache is written to
            return False
        if self.paused or not inputs or any(not isinstance(value, (Tensor, *_CONSTANTS)) for value in given):
            return False
        if torch.compiler.is_compiling() or not all(x.is_cuda and not x.requires_grad for x in inputs):
            return False
        return not torch.cuda.is_current_stream_capturing()

    def _forget_what_moved(self) -> None:
        if not self.captured:
            self.weights = [*self.model.parameters(), *self.model.buffers()]
        places = [(weight.data_ptr(), weight.requires_grad) for weight in self.weights]
        if places != self.places:
            self.captured.clear()
            self.places = places

    def _capture(self, run: _Run, inputs: Sequence[Tensor]) -> _Passes | None:
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        drawn = torch.cuda.get_rng_state(inputs[0].device)
        trained = [weight for weight in self.weights if weight.requires_grad] if self.model.training else []
        try:
            return _Passes(run, inputs, trained)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            if not self.model.training:
                return None
            raise UserError(
                f"cuda_graph: {type(self.model).__name__} cannot be captured ({in_a_line(error)[:300]}), expected a "
                "model that computes on the GPU alone, or cuda_graph=false"
            ) from error
        finally:  # passes before the first one: statistics and random numbers are as they were
            torch.cuda.set_rng_state(drawn, inputs[0].device)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


class GraphedInference(_Graphed):
    """In evaluation, without gradients."""


class GraphedTraining(_Graphed):
    """In training, a graph of the forward pass and one of the backward pass; in evaluation as well.

    What is drawn in the forward pass (dropout, stochastic depth) is what an eager pass would draw. The backward pass
    has to follow its forward pass before the next one, and gradients of gradients cannot be taken.
    """

    for_training = True


_Run = Callable[[Sequence[Tensor]], Any]  # the forward pass, of its tensors alone


class _Passes:
    """The graphs for inputs of one kind; they read their input where it is copied to, and the weights where they are.

    Args:
        weights: whose gradients the backward pass has; without any, there is only a forward pass.
    """

    def __init__(self, run: _Run, inputs: Sequence[Tensor], weights: Sequence[Tensor]):
        self.weights, self.number = weights, 0  # of forward passes
        with torch.inference_mode(False):  # what is made within cannot be written to outside of it
            self.inputs = [x.detach().clone() for x in inputs]
        stream = torch.cuda.Stream(inputs[0].device)
        stream.wait_stream(torch.cuda.current_stream(inputs[0].device))
        with torch.cuda.stream(stream), _without_cached_casts():
            for _ in range(_WARM_UPS):
                outputs = _tensors(tree_leaves(run(self.inputs)))
                if weights:
                    _gradients(outputs, weights, [torch.zeros_like(y) for y in outputs if y.requires_grad])
                del outputs  # with what the backward pass would need
        # other threads, of loaders and of exchanges between ranks, may use CUDA meanwhile
        options: dict[str, Any] = {"stream": stream, "capture_error_mode": "thread_local"}
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.forward_graph, **options), _without_cached_casts():
            self.leaves, self.structure = tree_flatten(run(self.inputs))
        outputs = _tensors(self.leaves)
        self.differentiable = [y.requires_grad for y in outputs]
        self.output_gradients = [torch.zeros_like(y) for y in outputs if y.requires_grad]
        self.gradients: Sequence[Tensor | None] = []  # valid until the next forward pass
        if weights:
            with torch.cuda.graph(self.backward_graph, pool=self.forward_graph.pool(), **options):
                self.gradients = _gradients(outputs, weights, self.output_gradients)
        self.leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        outputs = iter(_Replayed.apply(self, *inputs, *self.weights) if self.weights else self.forward(inputs))
        leaves = [next(outputs) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for weight, written in zip(self.weights, self.gradients, strict=True):
            # autograd keeps a weight's first gradient where it is: in memory that this pass writes to as well
            if weight.grad is not None and written is not None and weight.grad.data_ptr() == written.data_ptr():
                weight.grad = weight.grad.clone()
        for place, x in zip(self.inputs, inputs, strict=True):
            place.copy_(x)
        self.number += 1
        self.forward_graph.replay()
        return tuple(leaf.clone() for leaf in self.leaves if isinstance(leaf, Tensor))  # the next pass writes there

    def backward(self, number: int, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        if number != self.number:
            raise RuntimeError(
                "cuda_graph: the model was called again before this backward pass, whose values are lost"
            )
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


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _gradients(
    outputs: Sequence[Tensor], weights: Sequence[Tensor], of_outputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    differentiable = [y for y in outputs if y.requires_grad]
    return torch.autograd.grad(differentiable, weights, of_outputs, allow_unused=True)


def _autocast_of() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")


def _without_cached_casts() -> AbstractContextManager:
    """The caller's autocast; a cast that was cached before the capture would be missing from the graph."""
    enabled, dtype = _autocast_of()
    return torch.autocast("cuda", dtype=dtype, enabled=enabled, cache_enabled=False)
