"""torch.compile for deep models: one block at a time, or as one graph that holds the weights."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from ..errors import UserError
from ..residual.connected import ConnectedBlock
from ..residual.source_sum import SourceSum
from .blocks import blocks_of, step_sequences
from .stepify.sequence import StepSequence

__all__ = [
    "FrozenForward",
    "ReplacedForward",
    "being_traced",
    "buffers_as_before",
    "compile_blocks",
    "paused",
    "restore_forward",
    "running_eagerly",
]


def compile_blocks(model: nn.Module, recomputed: Sequence[nn.Module] = (), **kwargs: Any) -> None:
    """``torch.compile`` each block in place; the blocks of one width share a graph, whatever the depth.

    If a design's stream grows from block to block, each block's attention and MLP are compiled instead, and the sums
    over all earlier blocks (``residual/source_sum.py``).

    The rate of stochastic depth differs from block to block, and dynamo would take each rate for a constant and compile
    every block anew. It is therefore read from a tensor on the model's device; the draws have timm's distribution, but
    other values than without compilation.

    Args:
        recomputed: blocks that are passed to :func:`recompute_blocks` afterwards. dynamo compiles nothing that runs
            inside a checkpoint's function unless it was compiled before.
        **kwargs: arguments of ``torch.compile``.

    Raises:
        UserError: no sequence of blocks is found in the model.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UserError("compile: no sequence of blocks was found in the model")
    _share_stochastic_depth(blocks)
    for network in _narrowed(model):
        if _in_its_own_memory not in network._forward_pre_hooks.values():
            network.register_forward_pre_hook(_in_its_own_memory)
    parents = {id(child): id(parent) for parent in model.modules() for child in parent.children()}
    own: dict[Any, FunctionType] = {}  # one for each group of parts that share graphs
    for block in blocks:
        # of a block whose arguments grow from block to block, the parts that see one shape
        parts = block.parts_to_compile() if isinstance(block, ConnectedBlock) else [block]
        for part in parts:
            shapes = tuple(parameter.shape for parameter in part.parameters())
            _share_code(part, (parents.get(id(block)), type(part), shapes), own)
            if block in recomputed:
                part.forward = CompiledForward(part.forward, kwargs)
            else:
                part.compile(**kwargs)
    sums = [module for module in model.modules() if isinstance(module, SourceSum)]
    compiled = next((module.compiled for module in sums), None)
    if not isinstance(compiled, CompiledSums) or compiled.kwargs != kwargs:
        compiled = CompiledSums(kwargs)
    for module in sums:
        module.compiled = compiled


def _share_code(part: nn.Module, key: Any, own: dict[Any, FunctionType]) -> None:
    """Give the parts of a step or stage their own code object for their class's forward pass.

    A Swin has more than eight graphs: those of its stages, its steps and the two kinds of windows. dynamo also takes a
    size that differs between two calls for dynamic, and compiles with symbols in its place, which takes minutes for
    Swin's windows.
    """
    forward = type(part).forward
    if "forward" in part.__dict__ or not isinstance(forward, FunctionType):
        return
    if key not in own:
        own[key] = _with_own_code(forward)
    part.forward = MethodType(own[key], part)  # copies and pickles get their own


_numbers = itertools.count()


def _with_own_code(function: FunctionType) -> FunctionType:
    """The function with a code object of its own: dynamo counts graphs per code object, and gives up at the eighth."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")  # else the two would be equal
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _narrowed(model: nn.Module) -> list[nn.Module]:
    """The networks in a model's StepsNets that get their input from splitting the stream.

    A :class:`~.stepify.sequence.StepSequence` makes its networks anew each time, so they cannot be hooked: the first
    block of a narrower step gets its own graph there.
    """
    pairs = [
        (network, width, before)
        for steps in step_sequences(model)
        if not isinstance(steps, StepSequence)
        for network, width, before in zip(steps.networks, steps.widths, (steps.width, *steps.widths))
    ]
    return [network for network, width, before in pairs if width < before]


def _in_its_own_memory(network: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Copy what was split off the stream, whose strides would require another graph for a step's first block."""
    return inputs[0].clone(memory_format=torch.preserve_format)


class SharedDropPath(DropPath):
    """timm's stochastic depth (arXiv 1603.09382) with its rate in a tensor, so that one graph serves all rates."""

    def __init__(self, drop_prob: float, scale_by_keep: bool, device: torch.device):
        super().__init__(drop_prob, scale_by_keep)
        self.kept = torch.tensor(1.0 - drop_prob, device=device)  # not a buffer: state dicts and DDP leave it alone

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move the rate to another device, but keep its precision and value."""
        device = fn(torch.empty(0, device=self.kept.device)).device
        if device != self.kept.device:  # otherwise it stays where graphs read it
            with torch.inference_mode(False):
                self.kept = torch.tensor(1.0 - self.drop_prob, device=device)
        return super()._apply(fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "drop_prob" and hasattr(self, "kept"):  # as a schedule of stochastic depth sets it
            self.kept.fill_(1.0 - value)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        factor = (torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) < self.kept).to(x.dtype)
        # where nothing is kept, there is nothing to scale
        return x * (factor / self.kept.clamp(min=1e-6).to(x.dtype) if self.scale_by_keep else factor)


def _share_stochastic_depth(blocks: Sequence[nn.Module]) -> None:
    """Make blocks with different rates alike; those with rate 0 have an Identity where others have a DropPath."""
    children = [
        (block, parent, name, child)
        for block in blocks
        for parent in block.modules()
        for name, child in parent.named_children()
    ]
    paths = {name for *_, name, child in children if isinstance(child, DropPath)}
    for block, parent, name, child in children:
        if isinstance(child, DropPath) or (name in paths and isinstance(child, nn.Identity)):
            rate, scale = getattr(child, "drop_prob", None) or 0.0, getattr(child, "scale_by_keep", True)
            shared = SharedDropPath(rate, scale, next(block.parameters()).device)
            setattr(parent, name, shared.train(child.training))


class CompiledForward:
    """A part's compiled forward pass, in place of ``part.forward``; a copy of the part has one with its own weights."""

    def __init__(self, forward: Callable[..., Any], kwargs: dict[str, Any]):
        functools.update_wrapper(self, forward)
        self.forward, self.kwargs = forward, kwargs
        self.compiled = torch.compile(forward, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        return type(self)(copy.deepcopy(self.forward, memo), self.kwargs)


class CompiledSums:
    """The compiled functions of sums over sources; they hold no weights.

    Each number and width of sources has its own code object, with and without gradients, and with and without a total
    to continue from: dynamo would give up at the eighth graph of a shared one.
    """

    def __init__(self, kwargs: dict[str, Any]):
        self.kwargs = kwargs
        self.found: dict[Any, Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Any], sources: tuple[Tensor, ...], *arguments: Any) -> Any:
        first, begins = sources[0], arguments[0] is None
        key = (function, len(sources), first.shape[-1], first.dtype, first.device, begins, torch.is_grad_enabled())
        if key not in self.found:
            if not isinstance(function, FunctionType):
                raise UserError(f"compile: got {function!r} as add of a SourceSum, expected a static method")
            self.found[key] = torch.compile(_with_own_code(function), **self.kwargs)
        return self.found[key]

    def __reduce__(self) -> Any:
        return _not_compiled, ()  # copies and pickles of a part are not compiled either


def _not_compiled() -> None:
    return None


class ReplacedForward:
    """A quicker pass in place of ``model.forward``; a copy or a pickle of the model has its own.

    Args:
        own: the forward pass that a user has set on the model itself; None for that of its class.
    """

    def __init__(self, model: nn.Module, own: Any = None):
        self.model, self.own = model, own
        self.paused = False
        # for whoever asks for the arguments: transformers' Trainer, torch.export
        built = own if own is not None else type(model).forward.__get__(model)
        functools.update_wrapper(cast(Any, self), built, updated=())

    @property
    def __code__(self) -> Any:
        return self.__wrapped__.__code__  # type: ignore[attr-defined] # set by update_wrapper

    def as_built(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward pass."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacedForward:
        # a model's copy is registered before its attributes are copied
        return type(self)(memo[id(self.model)], copy.deepcopy(self.own, memo))

    def __reduce__(self) -> Any:
        return type(self), (self.model, self.own)


def being_traced() -> bool:
    """Whether torch.export or torch.jit.trace is recording, which want the operations of the model as it was built."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


@contextmanager
def paused(model: nn.Module, kind: type[ReplacedForward]) -> Iterator[None]:
    """Let a model's replaced forward passes, those of one kind, run as they were built while in the context."""
    found = [module.__dict__.get("forward") for module in model.modules()]
    replaced = [(forward, forward.paused) for forward in found if isinstance(forward, kind)]
    for forward, _ in replaced:
        forward.paused = True
    try:
        yield
    finally:
        for forward, before in replaced:  # contexts may be nested
            forward.paused = before


@contextmanager
def running_eagerly(model: nn.Module) -> Iterator[None]:
    """Run neither compiled code nor graphs while in the context, since both leave out hooks."""
    with paused(model, ReplacedForward), torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def buffers_as_before(model: nn.Module) -> Iterator[None]:
    """Restore the buffers, such as running statistics, on leaving the context."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


class FrozenForward(ReplacedForward):
    """A model's forward pass as one graph that holds its weights as constants.

    inductor then lays the weights out for the CPU's matrix kernels, folds batch norms into convolutions and runs
    activations and additions inside the products. One graph is compiled for each input shape. With gradients, in
    training, and once a weight has changed, the model's own forward pass runs; a write through ``.data`` goes
    unnoticed.
    """

    def __init__(self, model: nn.Module, own: Any = None):
        super().__init__(model, own)
        self.versions: list[tuple[int, int]] = []  # of the weights that the graphs hold; set by the first call
        eager = self.as_built

        def whole(*args: Any, **kwargs: Any) -> Any:
            return eager(*args, **kwargs)

        self.compiled = torch.compile(_with_own_code(cast(FunctionType, whole)), dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.paused or torch.is_grad_enabled() or self.model.training or being_traced():
            return self.as_built(*args, **kwargs)
        self.versions = self.versions or _versions(self.model)
        if self.versions != _versions(self.model):
            return self.as_built(*args, **kwargs)
        import torch._inductor.config as inductor_config  # takes half a second, which only a compiled model should pay

        with inductor_config.patch(freezing=True):  # dynamo reads it too, so torch.compile's options do not suffice
            return self.compiled(*args, **kwargs)


def restore_forward(model: nn.Module) -> None:
    """Give a model back the forward pass that it had before a :class:`ReplacedForward`."""
    if isinstance(replaced := model.__dict__.get("forward"), ReplacedForward):
        del model.forward
        if replaced.own is not None:
            model.forward = replaced.own


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """Where each weight and statistic is, and how often it was written to: this changes when any of them does."""
    tensors = [*model.parameters(), *model.buffers()]
    return [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
