"""How the blocks of a container differ: in kinds that alternate, as shifted windows do, and in rates that grow."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from numbers import Number
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import type_before_parametrizations

from ...macs import HOOKS
from .roles import get_path, has_path, set_path

__all__ = [
    "OF_TORCH",
    "PLAIN",
    "Rates",
    "number",
    "originals_of",
    "period_of",
    "rate_at",
    "rates_that_grow",
    "signature_of",
    "spread_rates",
]

# attributes that torch itself keeps in every module, whatever its constructor was given
OF_TORCH = {"training", "_parameters", "_buffers", "_modules", "_compiled_call_impl"} | {
    name for name in vars(nn.Module()) if "hook" in name
}
PLAIN = (bool, int, float, str, tuple, type(None))
_OF_ONE_VALUE = (
    *(*PLAIN, Number, bytes, Enum, slice, range, type, BuiltinFunctionType, torch.dtype, torch.device),
    PurePath,  # it caches its text in a slot when that is first needed
)
Kind = list[tuple[str, type, dict[str, Any], dict[str, Any]]]
Rates = dict[tuple[str, str], list[float]]  # (path of a part, name of its rate) -> the rate in each block


def signature_of(block: nn.Module, ignored: Sequence[str] = ()) -> Kind:
    """Classes, attributes and shapes of a block's modules: equal for blocks that differ only in their weights.

    Buffers count as attributes, except for the running statistics of norms, which training changes.

    Args:
        ignored: paths of modules that are left out, such as stochastic depth.
    """
    inside = tuple(f"{path}." for path in ignored)
    kept = [(path, module) for path, module in block.named_modules() if not f"{path}.".startswith(inside or "\0")]
    return [
        (
            path,
            type_before_parametrizations(module),  # torch gives each parametrized module a class of its own
            {name: value for name, value in _attributes(module).items() if name not in _numbers_of(module)}
            | _constants(module),
            {k: v if v is None else v.shape for k, v in (module._parameters | module._buffers).items()},
        )
        for path, module in kept
    ]


def _numbers_of(module: nn.Module) -> set[str]:
    """Attributes that number a block: for transformers' layers their index, which each new layer gets anew."""
    return {"layer_idx"} if type(module).__module__.startswith("transformers.") else set()


def _attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes that may come from constructor arguments, in a form that can be compared."""
    return {name: _comparable(value) for name, value in vars(module).items() if name not in OF_TORCH}


def _constants(module: nn.Module) -> dict[str, Any]:
    """What a module holds in buffers, such as a mask."""
    return {} if isinstance(module, _NormBase) else {k: _comparable(v) for k, v in module._buffers.items()}


class _Values:
    """A tensor that equals any of the same shape and values, whatever their types; without data, only shapes count."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Values) or self.tensor.shape != other.tensor.shape:
            return False
        if self.tensor.is_meta or other.tensor.is_meta:
            return True
        try:
            return torch.equal(self.tensor, other.tensor.to(self.tensor))
        except RuntimeError:  # a kind that torch.equal does not compare, such as sparse tensors
            return type(self.tensor) is type(other.tensor)


def _comparable(value: Any, depth: int = 4) -> Any:
    """A form of the value that equals that of another block of its kind, which may have an object of its own there.

    A function becomes its code with its defaults and what it closes over; any other object its class and attributes, or
    stays itself if it has none but can be compared, such as a compiled pattern. A module, and what lies deeper than
    ``depth``, becomes just its class.
    """

    def inner(*values: Any) -> list[Any]:
        return [_comparable(one, depth - 1) for one in values]

    if isinstance(value, Tensor):
        return _Values(value)
    if isinstance(value, nn.Module) or depth == 0:
        return type(value)
    if isinstance(value, np.ndarray):
        return [value.dtype, value.shape, value.tobytes()]
    if isinstance(value, list | tuple | deque):
        return tuple(inner(*value)) if isinstance(value, tuple) else inner(*value)
    if isinstance(value, _OF_ONE_VALUE):
        return value
    if isinstance(value, Mapping):
        return [inner(*item) for item in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, inner(*value)))
    if isinstance(value, partial):
        return inner(value.func, value.args, value.keywords)
    if isinstance(value, MethodType):
        return inner(value.__func__, value.__self__)
    if isinstance(value, FunctionType):
        held = [_content(cell) for cell in value.__closure__ or ()]
        return [value.__code__, *inner(value.__defaults__, value.__kwdefaults__, held)]
    state = object.__getstate__(value)  # its dictionary, or that and its slots
    if state is None and type(value).__eq__ is not object.__eq__:
        return value
    if isinstance(state, tuple):
        state = {**(state[0] or {}), **state[1]}
    return [type(value), *inner(state)]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return None


def originals_of(
    blocks: Sequence[nn.Module], count: int, ignored: Sequence[str], rates: Sequence[str] = ()
) -> list[int]:
    """For each of ``count`` new blocks, the index of the original block that it copies.

    If the blocks repeat with a period, block j copies original j modulo the period. If they repeat only when attributes
    of each block's own (such as its index) are ignored, block j copies the original at about the same relative depth
    and the same place in the period. Two blocks that differ alternate, unless only their rates differ.

    Args:
        ignored: paths of modules that do not decide what kind a block is.
        rates: paths of modules whose rates grow with the depth.
    """
    depth = len(blocks)
    if period := period_of([signature_of(block, ignored) for block in blocks]):
        return [j % period for j in range(count)]
    kinds = [signature_of(block, [*ignored, *rates]) for block in blocks]
    period = period_of(_without_own(kinds)) or (depth if depth <= 2 else 1)
    apart = (depth - 1) / max(1, count - 1)
    found = []
    for j in range(count):
        first = j % period
        last = first + (depth - 1 - first) // period * period
        found.append(min(last, max(first, first + period * round((j * apart - first) / period))))
    return found


def period_of(kinds: Sequence[Any]) -> int | None:
    """The number of entries after which a sequence repeats; None if it does not.

    Three entries repeat even if only the last equals the first. In a longer sequence this is not enough, since both
    ends may be special.
    """
    count = len(kinds)
    periods = range(1, count if count <= 3 else count - 1)
    return next((p for p in periods if all(kinds[i] == kinds[i - p] for i in range(p, len(kinds)))), None)


def _without_own(kinds: Sequence[Kind]) -> list[Kind]:
    """The kinds without those attributes that have a value of their own in each block."""
    attributes = [{(path, name): v for path, _, named, _ in kind for name, v in named.items()} for kind in kinds]
    shared = [key for key in attributes[0] if all(key in one for one in attributes)]
    own = {key for key in shared if _is_own([one[key] for one in attributes])}
    return [
        [
            (path, cls, {k: v for k, v in named.items() if (path, k) not in own}, sizes)
            for path, cls, named, sizes in kind
        ]
        for kind in kinds
    ]


def _is_own(values: list[Any]) -> bool:
    """Whether values are numbers that rise or fall, or all differ; for two blocks, which may alternate, only rates."""
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    rises = are_numbers and values[0] != values[-1] and sorted(values) in (values, values[::-1])
    if len(values) <= 2:
        return rises and any(isinstance(value, float) for value in values)
    return rises or all(value not in values[:i] for i, value in enumerate(values))


def rate_at(rates: Sequence[float], index: int, count: int) -> float:
    """The rate of block ``index`` of ``count``, in equal steps from the first rate to the last."""
    return rates[0] + (rates[-1] - rates[0]) * index / max(1, count - 1)


def rates_that_grow(blocks: Sequence[nn.Module]) -> Rates:
    """Parts without weights in which blocks differ by one fraction that rises or falls, as in stochastic depth.

    An ``nn.Identity`` is a part whose rate is 0. A block that drops by a function holds its rate itself, under the
    path "". To count, the rate has to be the only fraction in which the blocks, at least three, differ, and has to
    change in equal steps: factors that depend on the depth follow other laws, and anything derived from the rate would
    stay as it is.
    """
    paths = dict.fromkeys(path for block in blocks for path, module in block.named_modules() if _can_have_rate(module))
    own = [_attributes(block) for block in blocks]
    held: dict[str, list[Any]] = {name: [one.get(name) for one in own] for name in own[0]}
    differing = {name: values for name, values in held.items() if float in map(type, values) and _differ(values)}
    found: Rates = {}
    if len(blocks) > 2 and len(differing) == 1:
        found = {("", name): held for name, held in differing.items() if _are_rates(held) and _in_equal_steps(held)}
    for path in filter(None, paths):
        parts = [_at(block, path) for block in blocks]
        with_rate = [part for part in parts if type(part) is not nn.Identity]
        if len({type(part) for part in with_rate}) != 1 or not all(map(_can_have_rate, with_rate)):
            continue
        attributes = [_attributes(part) for part in with_rate]
        names = [name for name in attributes[0] if _differ([one.get(name) for one in attributes])]
        rates = [vars(part).get(name, 0.0) for part in parts for name in names[:1]]
        if len(names) == 1 and _are_rates(rates):
            found[path, names[0]] = rates
    return found


def _can_have_rate(module: Any) -> bool:
    return isinstance(module, nn.Module) and not (module._modules or module._parameters or module._buffers)


def _are_rates(values: list[Any]) -> bool:
    if not all(isinstance(value, int | float) and 0 <= value < 1 for value in values):
        return False
    return len(set(values)) == len(values) and sorted(values) in (values, values[::-1])


def _in_equal_steps(values: list[float]) -> bool:
    steps = [rate_at(values, i, len(values)) for i in range(len(values))]
    return all(abs(value - step) < 1e-6 for value, step in zip(values, steps))


def _differ(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values)


def spread_rates(
    new: Sequence[nn.Module], templates: Sequence[nn.Module], originals: Sequence[nn.Module], rates: Rates
) -> None:
    """Spread each rate from the first to the last over new blocks, if these have the rates of their templates."""
    for (path, name), values in rates.items():
        parts = [_at(block, path) for block in new]
        of_templates = [_at(block, path) for block in templates]
        if not all(type(a) is type(b) and vars(a).get(name) == vars(b).get(name) for a, b in zip(parts, of_templates)):
            continue  # the user's own function has set it
        with_rate = next(part for block in originals if name in vars(part := _at(block, path)))
        without_hooks = {id(hooks): type(hooks)() for key, hooks in vars(with_rate).items() if key in HOOKS}
        for j, (block, part) in enumerate(zip(new, parts)):
            if name not in vars(part):
                part = copy.deepcopy(with_rate, dict(without_hooks)).train(block.training)
            setattr(part, name, rate_at(values, j, len(new)))
            if path:
                set_path(block, path, part)


def number(
    new: Sequence[nn.Module], templates: Sequence[nn.Module], originals: Sequence[nn.Module], first: int
) -> None:
    """Give new blocks indices of their own, where each original holds its index, as for its place in a cache.

    Two layers with one index would overwrite each other's keys and values. An index counts from 0 in the container, or
    from 0 behind the ``first`` blocks that stay as they are.
    """
    for path, _ in originals[0].named_modules():
        parts = [_at(block, path) for block in originals]
        for name, value in vars(parts[0]).items() if len(parts) > 1 else ():
            values = [vars(part).get(name) if isinstance(part, nn.Module) else None for part in parts]
            if type(value) is not int or values != list(range(value, value + len(parts))) or value not in (0, first):
                continue
            for j, (block, template) in enumerate(zip(new, templates)):
                part = _at(block, path)
                if vars(part).get(name) == vars(_at(template, path))[name]:  # else the user's own function has set it
                    setattr(part, name, value + j)


def _at(block: nn.Module, path: str) -> Any:
    if not path:
        return block
    return get_path(block, path) if has_path(block, path) else None
