"""timm's residual blocks: the roles of their sizes, and how timm initializes their models.

Dropout rates, activations, windows and other options stay those of the block that is rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from timm.layers import AttentionRope, GluMlp
from timm.models import beit, convnext, eva, metaformer, mlp_mixer, resnet, swin_transformer, swin_transformer_v2
from timm.models import vision_transformer as vit
from timm.models._manipulate import named_apply

from .adapters import HeadRule, declare, initialize_like
from .roles import Roles

_HEADS = {
    "attn.num_heads": "N",
    "attn.head_dim": "D",
    "attn.attn_dim": "A",
    "attn.scale": "1/sqrt(D)",
    "attn.num_kv_heads": "M",
    "attn.kv_dim": "K",
    "attn.num_kv_groups": "N/M",
}
_QKV = {
    "norm?": "C",
    "attn.qkv": "C 3A",
    "attn.[qkv]_bias": "A",
    "attn.[qk]_norm": "D",
    "attn.norm": "A",
    "attn.gate": "C A",
    "attn.proj": "A C",
}


def _with_mlp(roles: Roles, *names: str) -> Callable[[Any], Roles]:
    """Return a function that adds the roles of a block's MLPs; the first layer of a gated MLP has two halves."""

    def of_block(block: Any) -> Roles:
        tensors = dict(roles.tensors)
        for name, (inputs, hidden) in zip(names or ("mlp",), (("C", "H"), ("*", "T"))):
            halves = "2" if isinstance(getattr(block, name), GluMlp) else ""
            tensors |= {
                f"{name}.fc1": f"{inputs} {halves}{hidden}",
                f"{name}.fc1_[gx]": f"{inputs} {hidden}",
                f"{name}.norm": hidden,
                f"{name}.grn": hidden,
                f"{name}.fc2": f"{hidden} {inputs}",
            }
        return replace(roles, tensors=tensors)

    return of_block


# ---- ViT, DeiT, DeiT-III (vision_transformer.py)


def _vit_heads(block: Any) -> HeadRule:
    return "divide" if block.attn.attn_dim == block.attn.qkv.in_features else "any"


_VIT = _with_mlp(Roles({**_QKV, "ls?.gamma": "C"}, _HEADS, heads="attn.num_heads"))
declare(
    vit.Block,
    _VIT,
    head_rule=_vit_heads,
    drop_paths=("drop_path1", "drop_path2"),
    outputs=("attn.proj", "mlp.fc2"),
    initialize=initialize_like,
)
declare(
    vit.ResPostBlock,
    _VIT,
    head_rule=_vit_heads,
    drop_paths=("drop_path1", "drop_path2"),
    initialize=initialize_like,
)

# ---- BEiT (beit.py): its attention has the width of the stream

declare(
    beit.Block,
    _with_mlp(
        Roles(
            {
                **_QKV,
                "gamma_?": "C",
                "attn.relative_position_bias_table": "* N",
                "attn.relative_position_index": "* *",
            },
            _HEADS,
            heads="attn.num_heads",
        )
    ),
    drop_paths=("drop_path1", "drop_path2"),
    initialize=initialize_like,
)

# ---- EVA, EVA-02 (eva.py): rotary positions are made for one head size, which therefore stays


def _eva_heads(block: Any) -> HeadRule:
    return "any" if isinstance(block.attn, AttentionRope) else "multiple"


_EVA = _with_mlp(
    Roles(
        {**_QKV, "attn.q_proj": "C A", "attn.[kv]_proj": "C K", "gamma_?": "C"},
        _HEADS,
        heads="attn.num_heads",
        kv_heads="attn.num_kv_heads",
    )
)
declare(
    eva.EvaBlock,
    _EVA,
    head_rule=_eva_heads,
    kv_groups=lambda block: getattr(block.attn, "num_kv_groups", 1),
    drop_paths=("drop_path1", "drop_path2"),
    initialize=initialize_like,
)
declare(
    eva.EvaBlockPostNorm,
    _EVA,
    head_rule=_eva_heads,
    drop_paths=("drop_path1", "drop_path2"),
    initialize=initialize_like,
)

# ---- Swin (swin_transformer.py) and Swin-V2 (swin_transformer_v2.py)


_WINDOWS = {"attn.relative_position_index": "* *", "attn_mask": "* * *"}
declare(
    swin_transformer.SwinTransformerBlock,
    _with_mlp(
        Roles(
            {**_QKV, **_WINDOWS, "attn.relative_position_bias_table": "* N"},
            {**_HEADS, "dim": "C", "attn.dim": "C"},
            heads="attn.num_heads",
        )
    ),
    head_rule=lambda block: "divide" if block.attn.proj.in_features == block.dim else "any",
    drop_paths=("drop_path1", "drop_path2"),
    initialize=initialize_like,
)
declare(
    swin_transformer_v2.SwinTransformerV2Block,
    _with_mlp(
        Roles(
            {
                **_QKV,
                **_WINDOWS,
                "attn.logit_scale": "N * *",
                "attn.cpb_mlp.0": "* *",
                "attn.cpb_mlp.2": "* N",
                "attn.relative_coords_table": "* * * *",
            },
            {**_HEADS, "dim": "C", "num_heads": "N", "attn.dim": "C"},
            heads="attn.num_heads",
        )
    ),
    drop_paths=("drop_path1", "drop_path2"),
    initialize=initialize_like,
)

# ---- ConvNeXt, and V2 with its global response norm (convnext.py)


def _init_convnext(model: Any, originals: Sequence[Any]) -> None:
    named_apply(convnext._init_weights, model)


declare(
    convnext.ConvNeXtBlock,
    _with_mlp(Roles({"conv_dw": "C", "norm": "C", "gamma": "C"})),
    drop_paths=("drop_path",),
    initialize=_init_convnext,
    start={"gamma": 1e-6, "mlp.grn.weight": 0.0, "mlp.grn.bias": 0.0},
    dim=1,
)

# ---- MLP-Mixer, ResMLP, gMLP (mlp_mixer.py): tokens are mixed by T hidden units


declare(
    mlp_mixer.MixerBlock,
    _with_mlp(Roles({"norm?": "C"}), "mlp_channels", "mlp_tokens"),
    drop_paths=("drop_path",),
    initialize=initialize_like,
)
declare(
    mlp_mixer.ResBlock,
    _with_mlp(
        Roles({"norm?.alpha": "* * C", "norm?.beta": "* * C", "ls?": "C", "linear_tokens": "* *"}), "mlp_channels"
    ),
    drop_paths=("drop_path",),
    initialize=initialize_like,
    start={"norm?.alpha": 1.0, "norm?.beta": 0.0, "ls?": 1e-4},
)
declare(
    mlp_mixer.SpatialGatingBlock,
    Roles(
        {
            "norm": "C",
            "mlp_channels.fc1": "C 2G",
            "mlp_channels.gate.norm": "G",
            "mlp_channels.gate.proj": "* *",
            "mlp_channels.fc2": "G C",
        }
    ),
    drop_paths=("drop_path",),
    initialize=initialize_like,
)

# ---- PoolFormer, ConvFormer, CAFormer (metaformer.py): tokens are mixed by pooling, convolutions or attention


_SCALES = ("layer_scale1", "layer_scale2", "res_scale1", "res_scale2")
declare(
    metaformer.MetaFormerBlock,
    _with_mlp(
        Roles(
            {
                "norm?": "C",
                "*_scale?.scale": "C",
                "token_mixer.qkv": "C 3A",
                "token_mixer.proj": "A C",
                "token_mixer.pwconv1": "C E",
                "token_mixer.dwconv": "E",
                "token_mixer.pwconv2": "E C",
                "token_mixer.act?.*": "*",
                "mlp.act.*": "*",
            },
            {
                **{name.replace("attn", "token_mixer"): role for name, role in _HEADS.items()},
                "token_mixer.attention_dim": "A",
                **{f"{scale}.shape": "C * *" for scale in _SCALES},
            },
            heads="token_mixer.num_heads",
        )
    ),
    drop_paths=("drop_path1", "drop_path2"),
    initialize=initialize_like,
    start={
        **{"layer_scale?.scale": 1e-5, "res_scale?.scale": 1.0},
        **{"*.act*.scale": 1.0, "*.act*.bias": 0.0},  # StarReLU's
    },
)

# ---- ResNet, ResNeXt (resnet.py): the widths are those of the stream, so 4 times those of the bottleneck


def _init_resnet(model: Any, originals: Sequence[Any]) -> None:
    """Start each block's last norm at zero, timm's default, unless the originals' are all one, so this was turned off.

    Originals on the meta device have no values to tell; their new blocks start at zero.
    """
    last = [block.bn3 if hasattr(block, "bn3") else block.bn2 for block in originals]
    were_told = all(not norm.weight.is_meta and bool((norm.weight == 1).all()) for norm in last)
    start = type(model).init_weights if isinstance(model, resnet.ResNet) else resnet.ResNet.init_weights
    start(model, zero_init_last=not were_told)


declare(
    resnet.BasicBlock,
    Roles({"conv1": "C F", "bn1": "F", "conv2": "F C", "bn2": "C"}),
    drop_paths=("drop_path",),
    initialize=_init_resnet,
    dim=1,
)
declare(
    resnet.Bottleneck,
    Roles({"conv1": "C F", "bn1": "F", "conv2": "F W", "bn2": "W", "conv3": "W C", "bn3": "C"}),
    drop_paths=("drop_path",),
    initialize=_init_resnet,
    dim=1,
)
