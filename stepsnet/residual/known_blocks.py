"""What the blocks of timm, transformers and torch add to the residual stream: a row for each class.

Such a block computes x = x + F(x, …) for each F of its row, in order. Blocks that pass the sum through an activation or
a norm, like those of ResNet and BERT, have no row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError, in_a_line
from ..macs import OF_MODULES, held_tensors
from .branches import BoundBranch, BranchParts, Projection, through
from .linears import linear_paths

__all__ = [
    "BranchDeclaration",
    "branches_of",
    "check_declared",
    "check_no_norm_behind",
    "declare_branches",
    "is_norm",
    "name_of",
    "parts_of",
    "undeclared",
]

# F by its parts; or by the paths that the stream goes through, such as "norm1 attn* ls1 drop_path1", where "*" marks
# what takes the block's other arguments, and parameters and numbers are factors; or as a function (block, x, …) -> F(x)
BranchDeclaration = BranchParts | str | Callable[..., Tensor]


def declare_branches(block_class: type[nn.Module], branches: Sequence[BranchDeclaration]) -> None:
    """Declare what blocks of your own class add to the residual stream, so that designs can join them.

    Args:
        branches: the F of x = x + F(x, …), in order. Each is given by the paths that the stream goes through, such as
            "norm1 attn* ls1 drop_path1", where "*" marks what takes the block's other arguments, and parameters and
            numbers are factors; by a function (block, x, …) -> F(x), which hides the norm; or by its
            :class:`BranchParts`, for the designs that work on linear layers.

    Raises:
        UserError: ``branches`` is something else, or ``block_class`` is no class.
    """
    if not isinstance(block_class, type):
        kind = type(block_class).__name__
        raise UserError(f"residual: branches: got an instance of {kind}, expected the class of the blocks")

    def is_one(branch: Any) -> bool:
        if isinstance(branch, BranchParts):
            return bool(branch.layer or branch.function)
        return bool(branch.split()) if isinstance(branch, str) else callable(branch)

    if not isinstance(branches, list | tuple) or not branches or not all(map(is_one, branches)):
        expected = 'a list of paths such as "norm1 attn*", functions or BranchParts'
        raise UserError(f"residual: branches of {block_class.__name__}: got {branches!r}, expected {expected}")
    _DECLARED[block_class] = tuple(branches)


def parts_of(block: nn.Module) -> Sequence[BranchParts] | None:
    """The branches of a block with their parts, as far as they are known; None for blocks without a row.

    Raises:
        UserError: a declared path leads nowhere in the block, or that of a norm or linear layer leads to no module.
    """
    cls = type(block)
    row = _DECLARED.get(cls) or _ROWS.get(name_of(block))
    if not (branches := row(block) if callable(row) else row):
        return None
    found = [_parts_along(one, block) for one in branches]
    if cls not in _DECLARED:
        found = [_without_lost_linears(one, block) for one in found]
    for one in found:
        for path in filter(None, (one.layer, *one.after)):
            _at(block, path)
        for path in filter(None, (one.norm, *linear_paths(one))):
            if not isinstance(part := _at(block, path), nn.Module):
                raise UserError(
                    f"residual: branches of {cls.__name__}: {path}: got {type(part).__name__}, expected a module"
                )
    return found


def name_of(block: nn.Module) -> str:
    """The class of a block with its module: timm alone has several called Block."""
    return f"{type(block).__module__}.{type(block).__qualname__}"


def undeclared(block: nn.Module) -> str:
    """What an error message says of a block that :func:`parts_of` does not know."""
    name = name_of(block)
    if only := _ONLY.get(name):
        return f"those of {name} are declared only {only}"
    return (
        f"those of {name} are not declared; if it computes x + F(x), declare them with "
        f"stepsnet.residual.declare_branches({type(block).__name__}, […])"
    )


def _without_lost_linears(parts: BranchParts, block: nn.Module) -> BranchParts:
    """Leave out the linear layers if a user has replaced the attention or MLP of a library's block by another."""
    try:
        for path in linear_paths(parts):
            attrgetter(path)(block)
    except AttributeError:
        return replace(parts, projections=None, hidden=(), last="")
    return parts


@torch.no_grad()
def check_declared(block: nn.Module, *, may_call_block: bool = True) -> None:
    """Raise UserError if the branches that a user has declared do not add up to the block on a random stream.

    Blocks that do not run on a stream alone, or whose weights are on the meta device, are not checked.

    Args:
        may_call_block: False if a design is to run the branches: one that calls its block would then run the design.
    """
    if type(block) not in _DECLARED or any(parameter.is_meta for parameter in block.parameters()):
        return
    parts_of(block)  # raises if a path leads nowhere
    computed = (tensor for tensor in held_tensors(block) if not tensor.is_leaf)  # left by a pass; deepcopy refuses them
    copied = copy.deepcopy(block, {id(tensor): tensor.detach() for tensor in computed})
    block = copied.cpu().double().eval()  # a branch may be a millionth of the stream
    whole, called = block.forward, []

    def refuse(*_: Any, **__: Any) -> None:
        called.append(True)
        raise RuntimeError("a branch runs its block")

    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 16), (2, 4, 4)):  # of tokens, and of images
        for width in dict.fromkeys(one.shape[0] for one in block.parameters() if one.ndim == 1):
            x = torch.randn(*shape, width, generator=generator, dtype=torch.float64)
            running = 0  # the number of the branch
            try:
                block.forward = whole
                expected, y = block(x.clone()), x  # it may add in place
                block.forward = whole if may_call_block else refuse
                for branch in branches_of(block) or ():
                    running += 1
                    y = y + branch(y.clone())
                running = 0
                off = (y - expected).norm() / (expected - x).norm().clamp_min(1e-12)
            except OF_MODULES as error:
                if called:
                    raise UserError(
                        f"residual: a branch declared for {type(block).__name__} calls the block itself, which by "
                        "then runs the design, expected one that computes what the block adds from its layers"
                    ) from None
                if running:
                    raise UserError(
                        f"residual: branch {running} declared for {type(block).__name__} does not run on a stream that "
                        f"the block itself takes: {in_a_line(error, 200)}"
                    ) from error
                continue
            if off > 1e-2:
                raise UserError(
                    f"residual: the branches declared for {type(block).__name__} are not all that it adds to the "
                    f"stream, or not in this order: their sum is off by {100 * off:.0f}%"
                )
            return


def branches_of(block: nn.Module) -> list[Callable[..., Tensor]] | None:
    """What a block adds to the residual stream, in order: the block is x = x + branch(x, …) for each of them.

    None if the block computes something else or is not declared: a ResNet's block passes the sum through an activation,
    a post-norm block through a norm.
    """
    parts = parts_of(block)
    return None if parts is None else [partial(_branch, block, one) for one in parts]


def _branch(block: nn.Module, parts: BranchParts, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return BoundBranch(block, parts, args, kwargs)(x)


def _parts_along(declared: BranchDeclaration, block: nn.Module) -> BranchParts:
    """The parts of a declared branch. Paths other than "norm layer* after …" become a function that follows them."""
    if isinstance(declared, BranchParts):
        return declared
    if callable(declared):
        return BranchParts(function=declared)
    paths = declared.split()
    parts = [_at(block, path.rstrip("*")) for path in paths]
    begins = int(len(paths) > 1 and not paths[0].endswith("*") and is_norm(parts[0]))
    norm, layer, after = "".join(paths[:begins]), paths[begins], tuple(paths[begins + 1 :])
    if any(path.endswith("*") for path in after):
        return BranchParts(function=partial(_along, paths))
    return BranchParts(norm, layer.rstrip("*"), after, takes_arguments=layer.endswith("*"))


def _along(paths: Sequence[str], block: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    for path in paths:
        part = attrgetter(path.rstrip("*"))(block)
        x = through(part, x, *args, **kwargs) if path.endswith("*") else through(part, x)
    return x


def _at(block: nn.Module, path: str) -> Any:
    try:
        return attrgetter(path)(block)
    except AttributeError:
        kind = type(block).__name__
        raise UserError(f"residual: branches of {kind}: got the path {path!r}, which {kind} does not have") from None


def is_norm(module: Any) -> bool:
    """Whether a module counts as a norm: it has no submodules, and its weight is one number per channel."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 1 and next(module.children(), None) is None


def check_no_norm_behind(design: str, block: nn.Module, parts: Sequence[BranchParts]) -> None:
    """Raise UserError for a block with a norm at the end of a branch, before the sum, as in Gemma 2."""
    for path in (path for one in parts for path in one.after):
        if is_norm(attrgetter(path)(block)):
            kind = type(block).__name__
            raise UserError(
                f"residual: {design}: {path} of {kind} is a norm at the end of a branch, expected none there"
            )


# ---- timm

_FUSED = ("attn.qkv", 0, 3), ("attn.qkv", 1, 3), ("attn.qkv", 2, 3)
_GAMMA = ("norm1 attn* gamma_1 drop_path1", "norm2 mlp gamma_2 drop_path2")
_NORM_BEHIND = ("attn* norm1 drop_path1", "mlp norm2 drop_path2")


def _vit(block: Any) -> Sequence[BranchParts]:
    """timm's Block, which takes MLPs of several classes."""
    mlp = block.mlp
    hidden: tuple[Projection, ...] = ()
    kind = f"{type(mlp).__module__}.{type(mlp).__qualname__}"
    if kind == "timm.layers.mlp.Mlp":
        hidden = (("mlp.fc1", 0, 1),)
    elif kind == "timm.layers.mlp.SwiGLU":
        hidden = (("mlp.fc1_g", 0, 1), ("mlp.fc1_x", 0, 1))
    elif kind == "timm.layers.mlp.GluMlp":  # the gate and what it is multiplied with, in one layer
        gate = int(mlp.gate_last)
        hidden = (("mlp.fc1", gate, 2), ("mlp.fc1", 1 - gate, 2))
    behind_1, behind_2 = ("ls1", "drop_path1"), ("ls2", "drop_path2")
    return (
        BranchParts("norm1", "attn", behind_1, takes_arguments=True, projections=_FUSED, last="attn.proj"),
        BranchParts("norm2", "mlp", behind_2, hidden=hidden, last="mlp.fc2"),
    )


def _windows(block: Any, x: Tensor) -> Tensor:
    return block.drop_path1(block._attn(block.norm1(x)))


def _windows_v2(block: Any, x: Tensor) -> Tensor:
    return block.drop_path1(block.norm1(block._attn(x)))


def _convnext(block: Any, x: Tensor) -> Tensor:
    return block(x) - x


def _mixed_tokens(block: Any, x: Tensor) -> Tensor:
    return block.drop_path(block.mlp_tokens(block.norm1(x).transpose(1, 2)).transpose(1, 2))


def _linear_tokens(block: Any, x: Tensor) -> Tensor:
    return block.drop_path(block.ls1 * block.linear_tokens(block.norm1(x).transpose(1, 2)).transpose(1, 2))


def _metaformer_mixer(block: Any, x: Tensor) -> Tensor:
    mixed = block.layer_scale1(block.drop_path1(block.token_mixer(block.norm1(x))))
    return mixed + (block.res_scale1(x) - x)  # a learned scale of the stream is part of what is added


def _metaformer_mlp(block: Any, x: Tensor) -> Tensor:
    mixed = block.layer_scale2(block.drop_path2(block.mlp(block.norm2(x))))
    return mixed + (block.res_scale2(x) - x)


# ---- transformers

_APART = ("self_attn.q_proj", 0, 1), ("self_attn.k_proj", 0, 1), ("self_attn.v_proj", 0, 1)
_GATED = ("mlp.gate_proj", 0, 1), ("mlp.up_proj", 0, 1)
_ROTARY = (
    BranchParts("input_layernorm", "self_attn", takes_arguments=True, projections=_APART, last="self_attn.o_proj"),
    BranchParts("post_attention_layernorm", "mlp", hidden=_GATED, last="mlp.down_proj"),
)
_PHI3 = ("input_layernorm self_attn* resid_attn_dropout", "post_attention_layernorm mlp resid_mlp_dropout")
_OLMO2 = ("self_attn* post_attention_layernorm", "mlp post_feedforward_layernorm")
_GEMMA2 = (
    "input_layernorm self_attn* post_attention_layernorm",
    "pre_feedforward_layernorm mlp post_feedforward_layernorm",
)
_GRANITE = ("input_layernorm self_attn* residual_multiplier", "post_attention_layernorm mlp residual_multiplier")
_GPT_NEOX = ("input_layernorm attention* post_attention_dropout", "post_attention_layernorm mlp post_mlp_dropout")


def _gpt_neox(block: Any) -> Sequence[BranchDeclaration]:
    """GPT-NeoX has attention and MLP side by side, unless its configuration says otherwise."""
    return (_gpt_neox_side_by_side,) if block.use_parallel_residual else _GPT_NEOX


def _gpt_neox_side_by_side(block: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    attended, mixed = (_along(paths.split(), block, x, *args, **kwargs) for paths in _GPT_NEOX)
    return mixed + attended


_CONV1D = ("attn.c_attn", 0, 3), ("attn.c_attn", 1, 3), ("attn.c_attn", 2, 3)
_GPT2 = (
    BranchParts("ln_1", "attn", takes_arguments=True, projections=_CONV1D, last="attn.c_proj"),
    BranchParts("ln_2", "mlp", hidden=(("mlp.c_fc", 0, 1),), last="mlp.c_proj"),
)


def _gpt2(block: Any) -> Sequence[BranchParts]:
    """No row with cross-attention, where a third branch comes between these two if an encoder's output is given."""
    return () if hasattr(block, "crossattention") else _GPT2


def _mamba(block: Any) -> Sequence[BranchDeclaration]:
    if not block.residual_in_fp32:
        return ("norm mixer*",)
    return (BranchParts("norm", takes_arguments=True, function=_mamba_in_float32),)


def _mamba_in_float32(block: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """With weights of lower precision the stream is in float32 from the first sum on."""
    return block.mixer(block.norm(x.to(block.norm.weight.dtype)), *args, **kwargs).float()


# ---- torch


def _encoder_layer(block: Any) -> Sequence[BranchParts]:
    """A row only for layers whose norms come first; with norms after the sums they are no residual blocks."""
    if not block.norm_first:
        return ()
    return (
        BranchParts("norm1", after=("dropout1",), function=_encoder_attention),
        BranchParts("norm2", after=("dropout2",), function=_encoder_mlp),
    )


def _encoder_attention(
    block: Any, x: Tensor, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False
) -> Tensor:
    x = block.norm1(x)
    masks = dict(attn_mask=src_mask, key_padding_mask=src_key_padding_mask, is_causal=is_causal)
    return block.self_attn(x, x, x, **masks, need_weights=False)[0]


def _encoder_mlp(block: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return block.linear2(block.dropout(block.activation(block.linear1(block.norm2(x)))))


# by the name of the class, so that no library is imported for a row; a function makes the row of a given block,
# which is empty if its branches are not always these
_ROWS: dict[str, Sequence[BranchDeclaration] | Callable[[Any], Sequence[BranchDeclaration]]] = {
    "torch.nn.modules.transformer.TransformerEncoderLayer": _encoder_layer,
    "timm.models.vision_transformer.Block": _vit,
    "timm.models.vision_transformer.ResPostBlock": _NORM_BEHIND,
    "timm.models.beit.Block": _GAMMA,
    "timm.models.eva.EvaBlock": _GAMMA,
    "timm.models.eva.EvaBlockPostNorm": _NORM_BEHIND,
    "timm.models.swin_transformer.SwinTransformerBlock": (_windows, "norm2 mlp drop_path2"),
    "timm.models.swin_transformer_v2.SwinTransformerV2Block": (_windows_v2, "mlp norm2 drop_path2"),
    "timm.models.convnext.ConvNeXtBlock": (_convnext,),
    "timm.models.mlp_mixer.MixerBlock": (_mixed_tokens, "norm2 mlp_channels drop_path"),
    "timm.models.mlp_mixer.ResBlock": (_linear_tokens, "norm2 mlp_channels ls2 drop_path"),
    "timm.models.mlp_mixer.SpatialGatingBlock": ("norm mlp_channels drop_path",),
    "timm.models.metaformer.MetaFormerBlock": (_metaformer_mixer, _metaformer_mlp),
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer": _ROTARY,
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer": _ROTARY,
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer": _ROTARY,
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer": _ROTARY,
    "transformers.models.phi3.modeling_phi3.Phi3DecoderLayer": _PHI3,
    "transformers.models.granite.modeling_granite.GraniteDecoderLayer": _GRANITE,
    "transformers.models.olmo2.modeling_olmo2.Olmo2DecoderLayer": _OLMO2,
    "transformers.models.olmo3.modeling_olmo3.Olmo3DecoderLayer": _OLMO2,
    "transformers.models.gemma.modeling_gemma.GemmaDecoderLayer": _ROTARY,
    "transformers.models.gemma2.modeling_gemma2.Gemma2DecoderLayer": _GEMMA2,
    "transformers.models.gemma3.modeling_gemma3.Gemma3DecoderLayer": _GEMMA2,
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXLayer": _gpt_neox,
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": _gpt2,
    "transformers.models.mamba.modeling_mamba.MambaBlock": _mamba,
}
# which blocks have branches, for error messages, if a function makes the row
_ONLY = {
    "torch.nn.modules.transformer.TransformerEncoderLayer": "with norm_first=True",
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": "without cross-attention",
}
_DECLARED: dict[type[nn.Module], Sequence[BranchDeclaration]] = {}
