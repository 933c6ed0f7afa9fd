"""Counting, against fvcore and against formulas written out here."""

from types import SimpleNamespace

import pytest
import timm
import torch
from small_detectors import build
from timm.layers import set_fused_attn
from torch import nn

import stepsnet
from stepsnet.analysis.complexity import count_complexity, count_detector, count_language_model, count_macs
from stepsnet.macs import count_forward
from stepsnet.models.blocks import is_in_steps

SIZES = {
    "resnet18": (3, 64, 64),
    "test_steps_resnet": (3, 64, 64),
    "test_steps_deit": (3, 160, 160),
    "test_steps_swin": (3, 224, 224),
    "test_steps_swinpp": (3, 224, 224),
}


@pytest.mark.parametrize("name", SIZES)
def test_macs_agree_with_fvcore(name):
    analysis = pytest.importorskip("fvcore.nn").FlopCountAnalysis
    set_fused_attn(False)  # fvcore knows no fused attention
    try:
        model = timm.create_model(name).eval()
    finally:
        set_fused_attn(True)
    theirs = analysis(model, torch.zeros(1, *SIZES[name])).unsupported_ops_warnings(False)
    pooling = theirs.by_operator().get("adaptive_avg_pool2d", 0)  # which the paper's counts leave out
    assert count_macs(model, SIZES[name]) == theirs.total() - pooling


def test_macs_of_a_deit_written_out():
    tokens, classes, patch = 197, 1000, 3 * 16 * 16
    macs = (tokens - 1) * patch * 384 + 384 * classes + 5 * tokens * 384  # embedding, head, final norm
    for width, depth in ((192, 12), (272, 6), (384, 6)):
        macs += depth * (12 * tokens * width**2 + 2 * tokens**2 * width + 2 * 5 * tokens * width)
    with torch.device("meta"):
        model = timm.create_model("steps_deit_small_patch16_224")
    assert count_complexity(model).macs == macs


def test_a_matrix_by_a_vector_is_counted_too():
    class Scores(torch.nn.Module):
        def forward(self, x):
            return x @ x.new_empty(7)

    assert count_forward(Scores(), torch.empty(2, 5, 7, device="meta"))[0] == 2 * 5 * 7


@pytest.mark.parametrize("fused", [True, False])
def test_the_count_does_not_depend_on_device_or_fusion(fused):
    set_fused_attn(fused)
    try:
        here = timm.create_model("test_steps_deit")
        with torch.device("meta"):
            nowhere = timm.create_model("test_steps_deit")
    finally:
        set_fused_attn(True)
    assert count_complexity(here, (3, 160, 160)) == count_complexity(nowhere, (3, 160, 160))
    tokens, blocks = 101, ((32, 4), (48, 2), (64, 3))
    expected = 100 * 3 * 16 * 16 * 64 + 64 * 1000 + 5 * tokens * 64
    for width, depth in blocks:  # an MLP ratio of 3
        expected += depth * (10 * tokens * width**2 + 2 * tokens**2 * width + 2 * 5 * tokens * width)
    assert count_macs(here, (3, 160, 160)) == expected


def test_counting_leaves_the_model_as_it_was():
    model = timm.create_model("test_steps_resnet").train()
    model.layer1.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    count_complexity(model, (3, 64, 64))
    assert model.training and not model.layer1.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_blocks_and_layers():
    # He et al.'s names count convolutions and the head, without the shortcuts' projections
    for depth in (18, 34, 50):
        with torch.device("meta"):
            assert count_complexity(timm.create_model(f"resnet{depth}")).layers == depth
    counts = count_complexity(timm.create_model("test_steps_deit"), (3, 160, 160))
    assert (counts.blocks, counts.layers) == (9, 5 * 9 + 2)


def test_norms_without_parameters_are_free():
    class Norms(nn.Module):
        def __init__(self, affine):
            super().__init__()
            self.layer, self.batch = nn.LayerNorm(8, elementwise_affine=affine), nn.BatchNorm2d(4, affine=affine)

        def forward(self, x):
            return self.layer(self.batch(x))

    assert count_macs(Norms(False), (4, 8, 8)) == 0
    assert count_macs(Norms(True), (4, 8, 8)) == (5 + 2) * 4 * 8 * 8


def test_the_planner_counts_as_the_counter_does():
    plan = stepsnet.plan_steps(64, 4, 3, head_dim=32, tokens=17)
    with torch.device("meta"):
        arguments = dict(img_size=8, patch_size=2, in_chans=1, widths=plan.widths, depths=plan.depths)
        model = timm.create_model("steps_deit_tiny_patch16_224", num_heads=plan.num_heads, **arguments)
        rest = timm.create_model(
            "steps_deit_tiny_patch16_224",
            widths=(64,),
            depths=(0,),
            num_heads=(2,),
            **{k: v for k, v in arguments.items() if k in ("img_size", "patch_size", "in_chans")},
        )
    whole, without = count_complexity(model, (1, 8, 8)), count_complexity(rest, (1, 8, 8))
    assert whole.macs - without.macs == plan.macs(17)
    assert whole.params - without.params == plan.params
    assert whole.blocks == plan.blocks


def test_macs_of_a_language_model_count_attention_over_the_context():
    widths, depths, hidden, vocabulary, context = (32, 48), (2, 1), (85, 128), 100, 16
    config = stepsnet.StepsTransformerConfig(widths=list(widths), depths=list(depths), vocab_size=vocabulary)
    with torch.device("meta"):
        model = stepsnet.StepsTransformerForCausalLM(config)
    macs = vocabulary * widths[-1]  # the head
    for width, depth, inner in zip(widths, depths, hidden):
        macs += depth * (4 * width**2 + 3 * width * inner + 2 * context * width)
    assert count_language_model(model, context).macs == macs


class OfOwnMask(nn.Module):
    """A language model of the user's own, which takes one number of its mask per token, or none."""

    def __init__(self, error):
        super().__init__()
        self.config = SimpleNamespace(model_type="own", num_attention_heads=2, num_hidden_layers=2)
        self.embed, self.layers = nn.Embedding(10, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.error = error

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is not None and attention_mask.ndim != 2:
            raise self.error("expected a mask of tokens")
        return self.layers(self.embed(input_ids))


@pytest.mark.parametrize("error", [AssertionError, AttributeError, KeyError])
def test_a_model_that_takes_no_whole_mask_is_counted_without(error):
    assert count_language_model(OfOwnMask(error), 16).macs == 2 * 8 * 8


def test_the_blocks_of_a_detector_are_its_backbones():
    """None where they cannot be told, and not 0."""
    found = [count_detector(build("mask_rcnn", name), (3, 64, 96)).blocks for name in ("resnet18", "convnext_atto")]
    assert found == [8, None]


def test_the_mlps_of_each_stage_may_have_a_ratio_of_their_own():
    plain = {"widths": ((16,), (32,), (64,), (128,)), "depths": ((2,), (2,), (2,), (2,)), "mlp_ratio": (2, 2, 4, 3)}
    model = timm.create_model("test_steps_swin", **plain)
    ratios = [
        block.mlp.fc1.out_features / block.mlp.fc1.in_features
        for block in model.layers.modules()
        if hasattr(block, "mlp")
    ]
    assert ratios == [2, 2, 2, 2, 4, 4, 3, 3]
    with pytest.raises(ValueError, match=r"mlp_ratio: got .*, expected one number, or 4 numbers, one per stage"):
        timm.create_model("test_steps_swin", **{**plain, "mlp_ratio": (2, 2)})


def test_stages_of_one_width_each_are_not_in_steps():
    plain = {"widths": ((16,), (32,), (64,), (128,)), "depths": ((2,), (2,), (2,), (2,))}
    assert is_in_steps(timm.create_model("test_steps_swin"))
    assert not is_in_steps(timm.create_model("test_steps_swin", **plain))
    assert not is_in_steps(timm.create_model("test_steps_deit", widths=(32,), depths=(2,)))
