"""Blocks of timm at another width: those that the library makes there, whatever their options; and what goes wrong."""

import copy

import pytest
import torch
from timm.layers import GluMlp, GroupNorm1, RmsNorm, SwiGLU, SwiGLUPacked
from timm.models import beit, convnext, eva, metaformer, mlp_mixer, resnet, swin_transformer, swin_transformer_v2
from timm.models import vision_transformer as vit
from torch import nn

from stepsnet.errors import UserError
from stepsnet.models.stepify.adapters import declare, register_block
from stepsnet.models.stepify.differences import signature_of
from stepsnet.models.stepify.find_adapter import adapter_of
from stepsnet.models.stepify.roles import Roles, rebuild
from stepsnet.residual.known_blocks import branches_of

WIDTHS, TOKENS = (48, 32), 16
ALL_OF_VIT = dict(
    **dict(qkv_bias=True, qk_norm=True, init_values=0.1, scale_attn_norm=True, scale_mlp_norm=True, mlp_ratio=3),
    **dict(drop_path=0.1, proj_drop=0.2, mlp_layer=SwiGLUPacked, act_layer=nn.SiLU, norm_layer=RmsNorm),
)
ALL_OF_EVA = dict(
    **dict(swiglu_mlp=True, scale_mlp=True, qkv_fused=False, mlp_ratio=8 / 3, scale_attn_inner=True, qk_norm=True),
    **dict(init_values=0.1, drop_path=0.1),
)
GROUPED = dict(attn_type="rope", attn_head_dim=16, qkv_fused=False, gated_attn=True, qkv_bias=True)
POOLED = dict(layer_scale_init_value=0.5, norm_layer=GroupNorm1, mlp_act=nn.GELU, mlp_bias=True)
SEPARABLE = dict(token_mixer=metaformer.SepConv, norm_layer=metaformer.LayerNorm2dNoBias, res_scale_init_value=0.9)
ATTENDING = dict(norm_layer=metaformer.LayerNormNoBias, res_scale_init_value=0.9, use_nchw=False)
WINDOWS = dict(input_resolution=(8, 8), window_size=4)
# (constructor of (width, heads), heads at both widths, shape of the input without the width)
NLC, NHWC, NCHW = "NLC", "NHWC", "NCHW"
CASES = {
    "ViT": (lambda c, n: vit.Block(c, n, qkv_bias=True), (4, 2), NLC),
    "ViT, all options": (lambda c, n: vit.Block(c, n, **ALL_OF_VIT), (4, 2), NLC),
    "ViT, SwiGLU": (lambda c, n: vit.Block(c, n, mlp_layer=SwiGLU), (4, 2), NLC),
    "ViT, post-norm": (lambda c, n: vit.ResPostBlock(c, n, init_values=1e-3), (4, 2), NLC),
    "BEiT": (lambda c, n: beit.Block(c, n, qkv_bias=True, init_values=0.1, drop_path=0.1), (4, 2), NLC),
    "BEiT, biased": (lambda c, n: beit.Block(c, n, window_size=(3, 5), swiglu_mlp=True, scale_mlp=True), (4, 2), NLC),
    "EVA-02": (lambda c, n: eva.EvaBlock(c, n, swiglu_mlp=True, mlp_ratio=8 / 3), (3, 2), NLC),
    "EVA-02, all options": (lambda c, n: eva.EvaBlock(c, n, **ALL_OF_EVA), (3, 2), NLC),
    "EVA, grouped heads": (lambda c, n: eva.EvaBlock(c, n, num_kv_heads=n // 2, **GROUPED), (4, 2), NLC),
    "EVA, rotary": (lambda c, n: eva.EvaBlock(c, n, attn_type="rope", attn_head_dim=16), (3, 2), NLC),
    "EVA, post-norm": (lambda c, n: eva.EvaBlockPostNorm(c, n), (3, 2), NLC),
    "Swin": (lambda c, n: swin_transformer.SwinTransformerBlock(c, num_heads=n, **WINDOWS), (4, 2), NHWC),
    "Swin, shifted": (
        lambda c, n: swin_transformer.SwinTransformerBlock(c, num_heads=n, shift_size=2, drop_path=0.1, **WINDOWS),
        *((4, 2), NHWC),
    ),
    "Swin-V2": (
        lambda c, n: swin_transformer_v2.SwinTransformerV2Block(c, num_heads=n, shift_size=2, **WINDOWS),
        *((4, 2), NHWC),
    ),
    "ConvNeXt": (lambda c, n: convnext.ConvNeXtBlock(c, ls_init_value=0.5), (None, None), NCHW),
    "ConvNeXt-V2": (
        lambda c, n: convnext.ConvNeXtBlock(c, use_grn=True, ls_init_value=None, conv_mlp=True),
        *((None, None), NCHW),
    ),
    "MLP-Mixer": (lambda c, n: mlp_mixer.MixerBlock(c, TOKENS), (None, None), NLC),
    "MLP-Mixer, gated": (lambda c, n: mlp_mixer.MixerBlock(c, TOKENS, mlp_layer=GluMlp), (None, None), NLC),
    "ResMLP": (lambda c, n: mlp_mixer.ResBlock(c, TOKENS), (None, None), NLC),
    "gMLP": (lambda c, n: mlp_mixer.SpatialGatingBlock(c, TOKENS), (None, None), NLC),
    "PoolFormer": (lambda c, n: metaformer.MetaFormerBlock(c, **POOLED), (None, None), NCHW),
    "ConvFormer": (lambda c, n: metaformer.MetaFormerBlock(c, **SEPARABLE), (None, None), NCHW),
    "CAFormer": (
        lambda c, n: metaformer.MetaFormerBlock(c, token_mixer=metaformer.Attention, head_dim=c // n, **ATTENDING),
        *((4, 2), NLC),
    ),
    "ResNet": (lambda c, n: resnet.BasicBlock(c, c), (None, None), NCHW),
    "ResNeXt": (lambda c, n: resnet.Bottleneck(c, c // 4, cardinality=4, base_width=32), (None, None), NCHW),
}
EVERY = pytest.mark.parametrize("case", CASES)
NOT_A_SUM = {"ResNet", "ResNeXt"}


def inputs(width, layout):
    shape = {NLC: (2, TOKENS, width), NHWC: (2, 8, 8, width), NCHW: (2, width, 8, 8)}[layout]
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@EVERY
def test_a_rebuilt_block_is_the_librarys(case):
    """Modules, plain attributes and shapes are those of a new block; with its weights the outputs are equal."""
    make, heads, layout = CASES[case]
    block, expected = make(WIDTHS[0], heads[0]), make(WIDTHS[1], heads[1]).eval()
    before = copy.deepcopy(block.state_dict())
    ours = adapter_of(block, WIDTHS[0]).rebuild(block, WIDTHS[1], heads[1]).eval()
    ours.load_state_dict(expected.state_dict())
    # some are memory that their model fills
    for (name, mine), (_, theirs) in zip(ours.named_buffers(), expected.named_buffers(), strict=True):
        mine.copy_(theirs) if mine.is_floating_point() and not name.endswith("mask") else None
    assert signature_of(ours) == signature_of(expected)
    x = inputs(WIDTHS[1], layout)
    torch.testing.assert_close(ours(x), expected(x), rtol=0, atol=0)
    assert all(torch.equal(before[name], tensor) for name, tensor in block.state_dict().items())  # not touched


@EVERY
def test_a_block_is_the_stream_and_its_branches(case):
    make, heads, layout = CASES[case]
    torch.manual_seed(0)
    block = make(WIDTHS[0], heads[0]).eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    branches, x = branches_of(block), inputs(WIDTHS[0], layout)
    if case in NOT_A_SUM:
        assert branches is None
        return
    z = x
    for branch in branches:
        z = z + branch(z)
    torch.testing.assert_close(z, block(x), rtol=1e-4, atol=1e-4)


def test_branches_take_what_the_block_takes():
    block, x = vit.Block(48, 4).eval(), inputs(48, NLC)
    mask = torch.zeros(TOKENS, TOKENS).masked_fill(torch.ones(TOKENS, TOKENS).triu(1) > 0, float("-inf"))
    attention, mlp = branches_of(block)
    z = x + attention(x, attn_mask=mask)
    torch.testing.assert_close(z + mlp(z), block(x, attn_mask=mask))


def test_what_a_user_registers_stands_before_the_table():
    class Own(vit.Block):
        pass

    def own(block, width, heads):
        return Own(width, 4)

    register_block(Own, own)
    declare(Own, Roles({}))  # as a row of the table, which is read when the first block of timm is met
    assert adapter_of(Own(48, 4), 48).rebuild is own


def test_nothing_is_lost_silently():
    """A tensor without a role, a size that is not its role's, heads that do not divide: one line each."""

    class Odd(vit.Block):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.extra = nn.Linear(7, 7)

    roles = Roles({"norm?": "C", "attn.qkv": "C 3A", "attn.proj": "A C", "mlp.fc1": "C H", "mlp.fc2": "H C"})
    with_heads = Roles(roles.tensors, {"attn.num_heads": "N"}, heads="attn.num_heads")
    with pytest.raises(UserError, match=r"extra.weight: got a tensor of shape \(7, 7\)"):
        rebuild(with_heads, Odd(48, 4), 32, 2, False)
    with pytest.raises(UserError, match=r"mlp.fc2.weight of Block: got size 192, expected C = 48"):
        rebuild(Roles({**roles.tensors, "mlp.fc2": "C C"}), vit.Block(48, 4), 32, None, False)
    with pytest.raises(UserError, match=r"Block.attn.num_heads: got 4, expected C = 48"):
        rebuild(Roles(roles.tensors, {"attn.num_heads": "C"}), vit.Block(48, 4), 32, None, False)
    with pytest.raises(UserError, match="num_heads: got 3 for Block at width 32"):
        rebuild(with_heads, vit.Block(48, 4), 32, 3, False)
    assert adapter_of(Odd(48, 4), 48) is None


def test_parameters_wait_for_their_initialization_and_keep_their_kind():
    block = convnext.ConvNeXtBlock(48).double()
    block.gamma.requires_grad_(False)  # a frozen network's new blocks are there to be trained
    ours = adapter_of(block, 48).rebuild(block, 32, None)
    assert all(p.isnan().all() and p.dtype == torch.float64 for p in ours.parameters())
    assert all(p.requires_grad for p in ours.parameters()) and not block.gamma.requires_grad
    shared = {tensor.data_ptr() for tensor in block.parameters()}
    assert not shared & {tensor.data_ptr() for tensor in ours.parameters()}
