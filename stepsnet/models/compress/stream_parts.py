"""What reads and writes the stream of a ViT or a LLaMA, to free its norms of gains and to rotate all of it.

A matrix M (C, C) acts on a stream x (…, C) as xM. A layer that writes y = Wh + b then has MᵀW and Mᵀb. One that reads
Wx has WM, which undoes an orthogonal M.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import RmsNorm
from timm.models.vision_transformer import LayerScale, VisionTransformer
from torch import Tensor, nn

from ...errors import UserError
from ...residual.branches import BranchParts
from ...residual.connected import has_design
from ...residual.known_blocks import parts_of
from ...residual.linears import linear_paths, misses_linear
from ...steps import StepsNet
from ..blocks import blocks_of, is_of_transformers, is_transformer_in_steps, method_of_its_own

__all__ = ["StreamParts", "stream_parts_of", "fold_norms", "rotate", "branches"]

_ADDED = ("pos_embed", "cls_token", "reg_token")  # (1, N, C)
_LLAMAS, _NAMES = ("llama", "mistral", "qwen2", "qwen3"), "LLaMA, Mistral, Qwen2 or Qwen3"


@dataclass(frozen=True)
class StreamParts:
    """The blocks of a model, and what stands around them.

    Args:
        width: C.
        embeddings: (module, name of a parameter, its channel dimension) for all that the stream begins with.
        norm: (owner, name) of the norm in front of the head.
        head: the linear layer that reads it.
    """

    width: int
    blocks: list[nn.Module]
    embeddings: list[tuple[nn.Module, str, int]]
    norm: tuple[nn.Module, str]
    head: nn.Linear

    def readers(self) -> list[tuple[nn.Module, str, list[nn.Linear]]]:
        """(owner, name of its norm, the linear layers that read the norm), for each norm of the stream."""
        found = []
        for block in self.blocks:
            for one in branches(block):
                layers = [block.get_submodule(path) for path in linear_paths(one)[:-1]]
                owner, _, name = one.norm.rpartition(".")
                found.append((block.get_submodule(owner), name, layers))
        return [*found, (*self.norm, [self.head])]  # type: ignore[list-item]

    def writers(self) -> list[nn.Linear]:
        return [block.get_submodule(one.last) for block in self.blocks for one in branches(block)]  # type: ignore[misc]


def branches(block: nn.Module) -> Sequence[BranchParts]:
    """The branches of a block. Raises UserError if not all of its norms and linear layers are declared."""
    parts = parts_of(block) or ()
    if not parts or not all(one.norm and one.linears for one in parts):
        raise UserError(
            f"compress: got blocks of {type(block).__name__}, expected timm's Block or the layers of {_NAMES}"
        )
    for one in parts:
        if path := misses_linear(block, one):
            raise UserError(f"compress: {path} of {type(block).__name__} is not a linear layer, expected one")
    known = {path for one in parts for path in linear_paths(one)}
    others = [path for path, part in block.named_modules() if isinstance(part, nn.Linear) and path not in known]
    if others:  # such as the gate of an attention, which reads the stream too
        raise UserError(f"compress: {others[0]} of {type(block).__name__}: got a layer that compress does not know")
    return parts


def stream_parts_of(model: Any) -> StreamParts:
    """The parts of a model. Raises UserError for one of another family, or with a part that is not known."""
    if is_of_transformers(model):
        return _parts_of_llama(model)
    if isinstance(model, VisionTransformer):
        return _parts_of_vit(model)
    raise UserError(f"compress: got {type(model).__name__}, expected a VisionTransformer of timm, or {_NAMES}")


def _parts_of_vit(model: Any) -> StreamParts:
    if name := method_of_its_own(model):
        raise UserError(f"compress: {type(model).__name__}.{name}: got a method of its own, expected timm's")
    if model.global_pool not in ("", "avg", "token"):
        raise UserError(
            f"compress: global_pool: got {model.global_pool!r}, which depends on how the stream is rotated, expected "
            "avg or token"
        )
    if not isinstance(model.patch_drop, nn.Identity):
        raise UserError(
            "compress: patch_drop_rate: got a model that drops patches, expected 0: the teacher sees all patches"
        )
    names = [name for name in ("norm", "fc_norm") if not isinstance(getattr(model, name), nn.Identity)]
    if not names:
        raise UserError(f"compress: {type(model).__name__} has no norm in front of its head, expected one")
    known = ("patch_embed.proj.", "blocks.", "head.", *(f"{name}." for name in names))
    others = [name for name, _ in model.named_parameters() if name not in _ADDED and not name.startswith(known)]
    if others or len(names) != 1:
        raise UserError(
            f"compress: {type(model).__name__}.{others[0] if others else 'norm'}: got an unknown part, expected "
            "only patches, learned positions, tokens, blocks, one norm and a linear head"
        )
    if not isinstance(model.head, nn.Linear):
        raise UserError(f"compress: {type(model).__name__}.head: got {type(model.head).__name__}, expected Linear")
    patches = model.patch_embed.proj
    embeddings: list[tuple[nn.Module, str, int]] = [(patches, "weight", 0)]
    embeddings += [(patches, "bias", 0)] if patches.bias is not None else []
    embeddings += [(model, name, -1) for name in _ADDED if getattr(model, name, None) is not None]
    return StreamParts(
        model.embed_dim, blocks_of(model) or list(model.blocks), embeddings, (model, names[0]), model.head
    )


def _parts_of_llama(model: Any) -> StreamParts:
    kind, head = model.config.model_type.removeprefix("steps_"), model.get_output_embeddings()
    if kind not in _LLAMAS or not isinstance(head, nn.Linear):
        raise UserError(f"compress: got {type(model).__name__}, expected a causal language model of {_NAMES}")
    embedding = (model.get_input_embeddings(), "weight", -1)
    return StreamParts(
        model.config.hidden_size, list(model.base_model.layers), [embedding], (model.base_model, "norm"), head
    )


@torch.no_grad()
def fold_norms(model: nn.Module) -> Any:
    """A copy that computes the same with RMSNorms whose gains are 1, without LayerScale, and with an untied head.

    LN(x) = RMSNorm(x - mean) γ + β: what writes the stream removes the mean, and γ and β go into what reads it.

    Raises:
        UserError: as :func:`stream_parts_of`, a model in steps or in a design, or a norm that is of neither kind.
    """
    if has_design(model):
        raise UserError("compress: a design of the residual stream joins the blocks, expected a model without one")
    if is_transformer_in_steps(model) or any(isinstance(module, StepsNet) for module in model.modules()):
        raise UserError(f"compress: {type(model).__name__} is in steps already, expected a network of one width")
    stream_parts_of(model)  # says what does not fit before anything is copied
    result: Any = copy.deepcopy(model).eval().requires_grad_(False)
    parts = stream_parts_of(result)
    if hasattr(result, "config"):
        _untie(result, parts)
    _fold_scales(parts)
    with_mean = [type(getattr(owner, name)) for owner, name, _ in parts.readers()]
    if len({issubclass(kind, nn.LayerNorm) for kind in with_mean}) > 1:
        raise UserError(f"compress: {type(model).__name__}: got LayerNorms beside other norms, expected one kind")
    for owner, name, layers in parts.readers():
        _fold(owner, name, layers)
    if issubclass(with_mean[0], nn.LayerNorm):
        _apply(parts, torch.eye(parts.width, dtype=torch.float64) - 1 / parts.width, to_readers=False)
    return result


def _fold(owner: Any, name: str, layers: list[nn.Linear]) -> None:
    norm = getattr(owner, name)
    gain, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if gain is None or not (isinstance(norm, nn.LayerNorm) or _is_rms_norm(norm, gain)):
        raise UserError(
            f"compress: {name} of {type(owner).__name__}: got {type(norm).__name__}, expected a LayerNorm or RMSNorm "
            "with gains"
        )
    for layer in layers:
        if bias is not None:
            if layer.bias is None:
                raise UserError(
                    f"compress: a linear layer after {name} of {type(owner).__name__} has no bias, expected one, to "
                    "which the norm's bias can be added"
                )
            layer.bias.add_(layer.weight @ bias)
        layer.weight.mul_(gain)
    if isinstance(norm, nn.LayerNorm):
        folded = RmsNorm(gain.numel(), eps=norm.eps).to(gain).train(norm.training).requires_grad_(False)
        setattr(owner, name, folded)
    else:
        nn.init.ones_(gain)


def _is_rms_norm(norm: nn.Module, gain: Tensor) -> bool:
    """Whether a norm gives x / RMS(x) times its weight: that of Gemma, for one, multiplies by 1 + weight."""
    x = torch.linspace(-3, 5, 2 * gain.numel()).view(2, -1).to(gain)
    expected = gain * x * x.square().mean(-1, keepdim=True).rsqrt()
    return (norm(x) - expected).norm() <= 1e-2 * expected.norm()


def _fold_scales(parts: StreamParts) -> None:
    """Fold each LayerScale into the layer in front of it."""
    for block in parts.blocks:
        for one in branches(block):
            last: Any = block.get_submodule(one.last)
            for path in one.after:
                if isinstance(scale := block.get_submodule(path), LayerScale):
                    last.weight *= scale.gamma[:, None]
                    if last.bias is not None:
                        last.bias *= scale.gamma
                    block.set_submodule(path, nn.Identity())


def _untie(model: Any, parts: StreamParts) -> None:
    """Give a head that shares the embedding weights of its own, since those cannot take the norm's gains."""
    if parts.head.weight is model.get_input_embeddings().weight:
        parts.head.weight = nn.Parameter(parts.head.weight.detach().clone(), requires_grad=False)
    model.config.tie_word_embeddings = False


def rotate(parts: StreamParts, q: Tensor) -> None:
    """Rotate the stream x to xQ, Q (C, C) orthogonal, in place; a model whose norms are folded computes the same."""
    _apply(parts, q, to_readers=True)


@torch.no_grad()
def _apply(parts: StreamParts, m: Tensor, to_readers: bool) -> None:
    for module, name, dim in parts.embeddings:
        _along(getattr(module, name), m, dim)
    for layer in parts.writers():
        _along(layer.weight, m, 0)
        if layer.bias is not None:
            _along(layer.bias, m, 0)
    for _, _, layers in parts.readers() if to_readers else ():
        for layer in layers:
            _along(layer.weight, m, -1)


def _along(weight: Tensor, m: Tensor, dim: int) -> None:
    """w -> wM along one dimension, computed in float64."""
    rotated = weight.cpu().double().movedim(dim, -1) @ m.cpu()  # some accelerators have no float64
    weight.copy_(rotated.movedim(-1, dim).to(weight.dtype))
