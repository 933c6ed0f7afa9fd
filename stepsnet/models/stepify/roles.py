"""A residual block at another width, from a copy of the block and a declared table of its sizes.

Constructor arguments cannot be read back from a module without losing some, such as dropout or an activation. So
the new block is a copy in which each tensor gets the shape that its declared roles say: "norm1": "C",
"attn.qkv": "C 3A". The roles are checked against the block's own shapes first, and a tensor without a role is an
error, so that nothing is lost silently.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UserError
from ...macs import HOOKS

__all__ = ["Roles", "get_path", "has_path", "note_sizes", "rebuild", "set_path", "sizes_of"]

Sizes = dict[str, int]


@dataclass(frozen=True)
class Roles:
    """What the sizes of a block's tensors and attributes stand for.

    The letters: C is the width of the residual stream; N heads of size D make A = N·D, and M key and value heads
    K = M·D; every other letter, such as H for the hidden units of an MLP, is in proportion to C. "*" is a size that
    stays as it is. Factors and sums can be written: "3A", "2A+H".

    Args:
        tensors: roles by the path of a module or a tensor in the block; a path may have wildcards, and the first match
            counts. A linear layer or a convolution has "in out"; a depthwise convolution, a norm or another module of
            vectors has one role; a single tensor has one role for each of its dimensions.
        attributes: roles of numbers and tuples that hold sizes, by path; those that a block does not have are skipped.
        heads: the path of N, or None in a block without heads.
        kv_heads: the path of M, if it may differ from N.
    """

    tensors: Mapping[str, str]
    attributes: Mapping[str, str] = field(default_factory=dict)
    heads: str | None = None
    kv_heads: str | None = None


def sizes_of(roles: Roles, block: nn.Module) -> Sizes:
    """The value of each letter in a block, such as ``{"C": 192, "A": 192, "N": 3, "D": 64, "H": 768}``.

    Raises:
        UserError: a tensor without a role, or a tensor or attribute of another size than its role says.
    """
    sizes: Sizes = {}
    if roles.heads:
        if has_path(block, roles.heads):
            sizes["N"] = sizes["M"] = get_path(block, roles.heads)
        if roles.kv_heads and has_path(block, roles.kv_heads):
            sizes["M"] = get_path(block, roles.kv_heads)
    shapes = [(path, tensor.shape, dims) for path, tensor, dims in _tensors(roles, block)]
    for attempt in range(2):  # a sum can be checked once its letters are known
        for path, shape, dims in shapes:
            for size, role in zip(shape, dims, strict=True):
                _bind(sizes, role, size, f"{path} of {type(block).__name__}", final=attempt == 1)
    if {"A", "N"} <= sizes.keys():
        _bind(sizes, "D", sizes["A"] // sizes["N"], f"heads of {type(block).__name__}", final=True)
        _bind(sizes, "K", sizes["M"] * sizes["D"], f"key and value heads of {type(block).__name__}", final=True)
    for path, role in roles.attributes.items():
        if has_path(block, path) and _evaluated(role, sizes, get_path(block, path)) != get_path(block, path):
            raise UserError(
                f"{type(block).__name__}.{path}: got {get_path(block, path)}, expected {role} = "
                f"{_evaluated(role, sizes, get_path(block, path))} by its adapter"
            )
    return sizes


def rebuild(roles: Roles, block: nn.Module, width: int, heads: int | None, keep_head_size: bool) -> nn.Module:
    """A copy of the block for a stream of ``width`` channels, without its hooks, which are for the block itself.

    Its parameters are NaN until they are initialized.

    Args:
        heads: N of the new block.
        keep_head_size: if true, D stays and A = N·D, whatever the width; else A keeps its ratio to C, and D = A/N.

    Raises:
        UserError: as :func:`sizes_of`, or a number of heads that does not divide.
    """
    own = sizes_of(roles, block)
    new = _scaled(own, width, heads, keep_head_size, type(block).__name__)
    _fit_groups(roles, block, own, new)
    # deepcopy does not copy what this memo holds: each tensor is made anew
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*block.parameters(), *block.buffers())}
    for module in block.modules():
        memo |= {id(hooks): type(hooks)() for name, hooks in vars(module).items() if name in HOOKS}
    copied = copy.deepcopy(block, memo)
    for path, module in copied.named_modules():
        if isinstance(module, _CONVOLUTIONS) and module.groups == module.in_channels:
            module.groups = _inputs(roles, module, path, new)  # depthwise
        for name, tensor, dims in list(_own_tensors(roles, module, path)):
            shape = [_value(role, new, size) for role, size in zip(dims, tensor.shape)]
            if isinstance(module, _CONVOLUTIONS) and name == "weight":
                shape[1] = _inputs(roles, module, path, new) // module.groups
            _replace(module, name, tensor, shape, keep=all(role == "*" for role in dims))
        note_sizes(module)
        if isinstance(module, nn.LayerNorm) and module.weight is None and (role := _match(roles, path)):
            module.normalized_shape = (_value(role, new, module.normalized_shape[-1]),)
    for path, role in roles.attributes.items():
        if has_path(block, path):
            set_path(copied, path, _evaluated(role, new, get_path(block, path)))
    return copied


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _scaled(own: Sizes, width: int, heads: int | None, keep_head_size: bool, name: str) -> Sizes:
    new = {letter: size * width // own["C"] for letter, size in own.items()}
    new["C"] = width
    if "N" in own:
        assert heads is not None
        if not keep_head_size and new.get("A", width) % heads:
            raise UserError(f"num_heads: got {heads} for {name} at width {width}, expected a divisor of the width")
        groups = own["N"] // own["M"]
        if heads % groups:
            raise UserError(f"num_heads: got {heads} for {name}, expected a multiple of {groups}, its heads per group")
        new["N"], new["M"] = heads, heads // groups
        if "A" in own:
            new["D"] = own["D"] if keep_head_size else new["A"] // heads
            new["A"], new["K"] = heads * new["D"], new["M"] * new["D"]
    return new


def _tensors(roles: Roles, block: nn.Module) -> Iterator[tuple[str, Tensor, list[str]]]:
    for path, module in block.named_modules():
        for name, tensor, dims in _own_tensors(roles, module, path):
            if isinstance(module, _CONVOLUTIONS) and name == "weight":
                weight = tensor.new_empty((tensor.shape[0], module.in_channels, *tensor.shape[2:]), device="meta")
                yield f"{path}.{name}", weight, dims
            else:
                yield f"{path}.{name}".lstrip("."), tensor, dims


def _own_tensors(roles: Roles, module: nn.Module, path: str) -> Iterator[tuple[str, Tensor, list[str]]]:
    """(name, tensor, role of each dimension) of a module's own parameters and buffers."""
    named = {**module._parameters, **module._buffers}
    for name, tensor in named.items():
        if tensor is None:
            continue
        of_module = _match(roles, path)
        found = (of_module or _match(roles, f"{path}.{name}".lstrip("."))).split()
        if not found:
            raise UserError(
                f"{path}.{name}: got a tensor of shape {tuple(tensor.shape)}, but the adapter of its block has no "
                "role for it. stepsnet.register_block(…) takes a function that builds the block at a width"
            )
        if of_module and isinstance(module, (nn.Linear, *_CONVOLUTIONS)):
            inputs, outputs = found[0], found[-1]
            found = [outputs, inputs][: tensor.ndim] + ["*"] * (tensor.ndim - 2)
        elif of_module:
            found = found * tensor.ndim  # vectors; a counter has no dimension
        if len(found) != tensor.ndim:
            raise UserError(f"{path}.{name}: got {tensor.ndim} dimensions, expected {len(found)}: {' '.join(found)}")
        yield name, tensor, found


def _match(roles: Roles, path: str) -> str:
    return next((role for pattern, role in roles.tensors.items() if fnmatchcase(path, pattern)), "") if path else ""


def _inputs(roles: Roles, module: Any, path: str, sizes: Sizes) -> int:
    return _value(_match(roles, path).split()[0], sizes, module.in_channels)


def _fit_groups(roles: Roles, block: nn.Module, own: Sizes, new: Sizes) -> None:
    """Keep the inner channels of a grouped convolution a multiple of its number of groups, as in ResNeXt."""
    for path, module in block.named_modules():
        if isinstance(module, _CONVOLUTIONS) and 1 < module.groups < module.in_channels:
            for letter in set(_match(roles, path).split()) - {"C"}:
                new[letter] = module.groups * max(1, own[letter] // module.groups * new["C"] // own["C"])


def _replace(module: nn.Module, name: str, tensor: Tensor, shape: list[int], keep: bool) -> None:
    is_parameter = name in module._parameters
    if not tensor.is_floating_point() or (keep and not is_parameter):
        module._buffers[name] = tensor.clone()
        return
    new = torch.full(shape, float("nan"), dtype=tensor.dtype, device=tensor.device)
    if is_parameter:
        module._parameters[name] = nn.Parameter(new)  # to be trained, even if the original is frozen
    else:
        module._buffers[name] = new


def note_sizes(module: Any) -> None:
    """Update the attributes in which torch's and timm's layers hold the sizes of their weights."""
    weight: Any = getattr(module, "weight", None)
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, _CONVOLUTIONS):
        module.out_channels, module.in_channels = weight.shape[0], weight.shape[1] * module.groups
    elif isinstance(weight, Tensor):
        for name in ("num_features", "num_channels", "normalized_shape"):
            if hasattr(module, name):
                setattr(module, name, tuple(weight.shape) if name == "normalized_shape" else weight.shape[0])


def _bind(sizes: Sizes, role: str, size: int, where: str, final: bool) -> None:
    """Learn a letter's value from a size, or check the size if the letters are known."""
    letters = set(re.findall("[A-Z]", role))
    if len(letters) == 1 and "+" not in role and letters.isdisjoint(sizes):
        sizes[letters.pop()] = size // int(role[:-1] or 1)
    if letters <= sizes.keys() and _value(role, sizes, size) != size:
        raise UserError(f"{where}: got size {size}, expected {role} = {_value(role, sizes, size)} by its adapter")
    if final and not letters <= sizes.keys():
        raise UserError(f"{where}: got {role}, expected letters of a size that other tensors have")


def _value(role: str, sizes: Sizes, same: int) -> int:
    if role == "*":
        return same
    return sum(int(term[:-1] or 1) * sizes[term[-1]] for term in role.split("+"))


def _evaluated(role: str, sizes: Sizes, same: Any) -> Any:
    """The value of an attribute: a size, a tuple of sizes, N/M, or 1/sqrt(D), the scale of attention."""
    if role == "1/sqrt(D)":
        return sizes["D"] ** -0.5
    if role == "N/M":
        return sizes["N"] // sizes["M"]
    if isinstance(same, tuple):
        return tuple(_value(part, sizes, old) for part, old in zip(role.split(), same))
    return _value(role, sizes, same)


def get_path(module: Any, path: str) -> Any:
    return attrgetter(path)(module)


def has_path(module: Any, path: str) -> bool:
    try:
        get_path(module, path)
    except AttributeError:
        return False
    return True


def set_path(module: Any, path: str, value: Any) -> None:
    parent, _, name = path.rpartition(".")
    setattr(get_path(module, parent) if parent else module, name, value)
