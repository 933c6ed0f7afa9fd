"""Blocks joined by a design, and the container that takes the place of a residual model's ``nn.Sequential``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import cycle
from typing import Any

from torch import Tensor, nn

from ..errors import UserError
from ..steps import StepsNet
from ..stream import StreamBlock, check_stream, recomputed
from .branches import BoundBranch, BranchParts, SilentBranch
from .design import State, Unit, Wiring
from .passing import Passage, PassingBlock

__all__ = ["JOINED", "ConnectedBlock", "ConnectedSequence", "check_begins", "connected_class", "has_design"]

JOINED = (
    "blocks: got a replacement for a block that a design has joined to the stream, expected blocks to be replaced "
    "before they are joined"
)


class ConnectedBlock:
    """A block that joins its branches to the stream by connections: state, … -> state.

    Each class of blocks gets a subclass with this class as its first base; the block's parts keep their names.
    """

    connections: nn.ModuleList
    wiring: Wiring
    unit: Unit
    branch_parts: tuple[BranchParts, ...]
    block_class: Any
    training: bool
    gradient_checkpointing: bool  # of transformers' layers

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class is made at run time from the block's class, so pickle and deepcopy have to make it too."""
        of_module: Any = self
        return _blank, (self.block_class,), of_module.__getstate__()  # without what torch.compile has made

    def forward(self, state: State, *args: Any, **kwargs: Any) -> State:
        if isinstance(state, tuple):
            self._refuse_reentrant()
        elif isinstance(state, Tensor) and not self.wiring.may_be(state):
            raise UserError(
                f"residual: {self.block_class.__name__}: got a stream, expected the state of its design, which is more "
                "than that tensor: run the container that connect returned, in place of the one that it was given"
            )
        if self.unit == "block":
            return self.connections[0](state, lambda x: self._whole(x, *args, **kwargs))
        if (args or kwargs) and not any(one.takes_arguments or one.function for one in self.branch_parts):
            self._refuse(args, kwargs)
        branches = [BoundBranch(self, parts, args, kwargs) for parts in self.branch_parts]  # type: ignore[arg-type]
        if self.unit == "branches":
            return self.connections[0](state, branches)
        for connection, branch in zip(self.connections, branches, strict=True):
            state = connection(state, branch)
        return state

    def _whole(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        if y is None or isinstance(y, tuple | list | dict):
            raise UserError(
                f"residual: {self.block_class.__name__} returned {type(y).__name__}, expected one tensor, the stream"
            )
        return y

    def _refuse_reentrant(self) -> None:
        """Raise UserError under transformers' reentrant checkpointing, which does not look for tensors in a tuple."""
        recompute: Any = getattr(self, "_gradient_checkpointing_func", None)
        if (
            isinstance(recompute, partial)
            and recompute.keywords.get("use_reentrant")
            and self.gradient_checkpointing
            and self.training
        ):
            raise UserError(
                "gradient_checkpointing: got use_reentrant=True, with which a stream of several tensors gets no "
                "gradients, expected use_reentrant=False"
            )

    def _refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise UserError for arguments, such as a mask, if no branch takes them."""
        given = [name for name, value in kwargs.items() if value is not None]
        if given or any(value is not None for value in args):
            what = ", ".join(given) or f"{len(args)} positional argument(s) besides the stream"
            raise UserError(
                f"residual: {self.block_class.__name__} got {what}, which none of its declared branches takes; "
                'mark the part that does with a *, as in "norm1 attn*"'
            )

    def without_branches(self, state: State, *args: Any, **kwargs: Any) -> State:
        """Like ``forward`` with all branches giving zero: what remains if the block is dropped."""
        if self.unit == "block":
            return self.connections[0](state, lambda x: x)
        if self.unit == "branches":
            return self.connections[0](state, [SilentBranch() for _ in self.branch_parts])
        for connection in self.connections:
            state = connection(state, SilentBranch())
        return state

    def init_weights(self) -> None:
        """Initialize the block, then its branches. timm calls this to initialize a model again, parts first."""
        of_block = getattr(super(), "init_weights", None)
        if of_block is not None:
            of_block()
        self.init_branches()

    def reset_parameters(self) -> None:
        """Like :meth:`init_weights`, under the name that timm calls, parts first, if initialization was skipped."""
        of_block = getattr(super(), "reset_parameters", None)
        if of_block is not None:
            of_block()
        self.init_branches()

    def init_branches(self) -> None:
        """Set the start values of the branches' layers, if the design has its own."""
        connection: Any
        for connection, parts in zip(cycle(self.connections), self.branch_parts):  # perhaps one for all branches
            connection.init_branch(self, parts)

    def parts_to_compile(self) -> list[nn.Module]:
        """The block itself or, if the state grows from block to block, its attention and MLP, which see one shape."""
        module: Any = self
        if not self.wiring.grows:
            return [module]
        inside = [child for name, child in module.named_children() if name != "connections"]
        return [child for child in inside if next(child.children(), None) is not None]


def has_design(model: nn.Module) -> bool:
    """Whether a design joins some of a model's blocks."""
    return any(isinstance(module, ConnectedBlock) for module in model.modules())


@cache
def connected_class(block_class: Any) -> Any:
    """The subclass for blocks of a class that are joined by a design."""
    namespace = {"__module__": __name__, "block_class": block_class}
    return type(f"Connected{block_class.__name__}", (ConnectedBlock, block_class), namespace)


def _blank(block_class: Any) -> Any:
    """A connected block without its parts, which pickle adds."""
    made = connected_class(block_class)
    return made.__new__(made)


def check_begins(wiring: Wiring, begins: bool) -> None:
    """Raise UserError for blocks cut off from those before them: of their outputs they would get only the last."""
    if not begins and type(wiring) is not Wiring:
        raise UserError(
            "blocks: got a part of a connected sequence without its first block, expected a part that begins with that "
            "block, such as blocks[:6], since the stream of this design is more than one tensor"
        )


class ConnectedSequence(StepsNet):
    """Connected blocks named 0, 1, 2, …, as in an ``nn.Sequential``, and their wiring: (B, N, C) -> (B, N, C).

    Its length is the number of its blocks, and it can be iterated and sliced like a :class:`stepsnet.StepsNet` of one
    step. A slice without the first block runs only if the state of the design is the stream itself.
    """

    begins = True  # whether it starts with the first block of the stream

    def __init__(self, blocks: Iterable[nn.Module], wiring: Wiring):
        nn.Module.__init__(self)
        for index, block in enumerate(blocks):
            self.add_module(str(index), block)
        self.wiring = wiring
        self.width, self.widths, self.dim = wiring.width, (wiring.width,), -1
        self.grad_checkpointing = False

    @property
    def blocks(self) -> list[Any]:
        return [module for name, module in self._modules.items() if name != "wiring"]

    @property
    def networks(self) -> nn.ModuleList:  # type: ignore[override]
        """The one network of a StepsNet of one step; it shares the blocks."""
        return nn.ModuleList([nn.Sequential(*self.blocks)])

    def forward(self, x: Tensor) -> Tensor:
        check_stream(x, -1, self.width, 0)
        if not self.blocks:
            return x  # nothing is left of this step, but its end could still weight its one source
        check_begins(self.wiring, self.begins)
        state = self.wiring.start(x)
        for block in self.blocks:
            state = recomputed(block, state) if self.grad_checkpointing else block(state)
        return self.wiring.end(state)

    def __iter__(self) -> Iterator[StreamBlock]:
        """The blocks as functions of the stream. They run in order: each continues from the state of the one before."""
        if self.blocks:
            check_begins(self.wiring, self.begins)
        passage = Passage(self.wiring)
        for index, block in enumerate(self.blocks):
            run = PassingBlock(passage, block, index, self.grad_checkpointing)
            begin = None if index else self._begin_stream
            yield StreamBlock(block, self.width, self.width, -1, begin=begin, run=run)

    def _places(self) -> list[tuple[nn.Module, str]]:
        raise TypeError(JOINED)

    def _select(self, keep: Sequence[bool]) -> ConnectedSequence:
        kept = [block for block, chosen in zip(self.blocks, keep) if chosen]
        selected = ConnectedSequence(kept, self.wiring)
        selected.grad_checkpointing = self.grad_checkpointing
        selected.training = self.training  # not that of the blocks, which are shared
        selected.begins = self.begins and any(keep[:1])
        selected._stream_hooks = self._stream_hooks if any(keep[:1]) else ()
        return selected

    def extra_repr(self) -> str:
        return ""
