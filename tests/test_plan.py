"""The planner gives the paper's widths, heads and depths, and counts as the paper does."""

import json
import math
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from importlib import resources

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stepsnet import StepPlan, plan_steps
from stepsnet.models.steps_deit import ARCHITECTURES as STEPS_DEIT
from stepsnet.models.steps_swin import ARCHITECTURES as STEPS_SWIN
from stepsnet.plan import heads_for

torch.set_num_threads(1)  # xdist already uses the cores

ROWS = json.loads(resources.files("stepsnet").joinpath("paper/tables.json").read_text(encoding="utf-8"))
TOKENS = 197  # 14 × 14 patches and the class token


def rows(*tables):
    chosen = [row for row in ROWS if row["table"] in tables and "widths" in row.get("config", {}) and "layers" in row]
    chosen = [row for row in chosen if isinstance(row["config"]["widths"][0], int)]
    assert chosen
    return [pytest.param(row, id=f"{row['table']} {row['row']}") for row in chosen]


def as_printed(value):
    """To two decimals, then to one, halves up: with one rounding three cells of Table 5a would differ."""
    once = Decimal(value).quantize(Decimal("0.01"), ROUND_HALF_UP)
    return float(once.quantize(Decimal("0.1"), ROUND_HALF_UP))


def c2_law(depths):
    """The compute of blocks √2 apart in width, in full-width blocks, exactly."""
    return sum(Fraction(depth, 2**i) for i, depth in enumerate(reversed(depths)))


# ---- the paper's tables


@pytest.mark.parametrize("row", rows("8"))
def test_half_compute_gives_table_8(row):
    config = row["config"]
    plan = plan_steps(384, 12, len(config["widths"]))
    assert plan.widths == tuple(config["widths"])
    assert plan.depths == tuple(config["depths"])
    assert (plan.blocks, plan.layers + 2) == (row["blocks"], row["layers"])  # and patch embedding, head


@pytest.mark.parametrize("row", rows("9"))
def test_a_number_of_blocks_gives_table_9(row):
    plan = plan_steps(384, 12, 3, blocks=row["blocks"])
    assert plan.widths == tuple(row["config"]["widths"])
    assert plan.depths == tuple(row["config"]["depths"])
    assert c2_law(plan.depths) == 12


@pytest.mark.parametrize("blocks", [24, 48, 72, 96])
def test_half_compute_gives_table_5a(blocks):
    (row,) = (row for row in ROWS if row["row"] == f"Steps-DeiT {blocks} blocks")
    plan = plan_steps(272, blocks // 4, 7)
    assert (list(plan.widths), list(plan.depths)) == (row["config"]["widths"], row["config"]["depths"])


@pytest.mark.parametrize("row", rows("1", "5a", "8", "9"))
def test_params_and_flops_are_the_printed_ones(row):
    """With DeiT's patch embedding (16 × 16 × 3 inputs), class token, positions, last norm and head around them."""
    config = row["config"]
    width = config["widths"][-1]
    heads = tuple(heads_for(w, 64) for w in config["widths"])
    plan = StepPlan(tuple(config["widths"]), tuple(config["depths"]), heads)
    params = plan.params + (768 * width + width) + width + TOKENS * width + 2 * width + (1000 * width + 1000)
    macs = plan.macs(TOKENS) + 196 * 768 * width + 5 * TOKENS * width + 1000 * width
    assert (plan.blocks, plan.layers + 2) == (row["blocks"], row["layers"])
    assert as_printed(params / 1e6) == row["params_M"]
    assert as_printed(macs / 1e9) == row["flops_G"]


# ---- widths and heads


def test_the_papers_widths():
    widths = (768, 544, 384, 272, 192, 136, 96, 68, 48, 34)
    assert plan_steps(768, 12, 10).widths == widths[::-1]
    for i, width in enumerate(widths):  # each of them can be the widest
        assert plan_steps(width, 12, 10 - i).widths == widths[i:][::-1]


def test_the_papers_widths_of_swin():
    base, tiny = (plan_steps(width, 12, 5, head_dim=32) for width in (1024, 768))
    assert (base.widths, base.num_heads) == ((256, 360, 512, 720, 1024), (8, 12, 16, 24, 32))
    assert (tiny.widths, tiny.num_heads) == ((192, 272, 384, 544, 768), (6, 8, 12, 16, 24))


PRINTED_HEADS = {
    # Table 13
    **{(width, 64): heads for width, heads in {96: 2, 136: 2, 192: 3, 272: 4, 384: 6, 544: 8, 768: 12}.items()},
    # Table 14
    **{(width, 32): heads for width, heads in {96: 3, 192: 6, 272: 8, 384: 12, 544: 16, 768: 24}.items()},
    **{(width, 32): heads for width, heads in {128: 4, 256: 8, 360: 12, 512: 16, 720: 24, 1024: 32}.items()},
}


@pytest.mark.parametrize("width, head_dim", PRINTED_HEADS)
def test_the_papers_heads(width, head_dim):
    assert heads_for(width, head_dim) == PRINTED_HEADS[width, head_dim]


def test_of_two_head_sizes_equally_near_the_smaller_one():
    assert heads_for(64, 48) == 2  # 64 or 32
    assert heads_for(320, 120) == 4  # 160 or 80


@pytest.mark.parametrize("row", [row for row in ROWS if "heads" in row.get("config", {})], ids=lambda row: row["row"])
def test_the_heads_of_every_printed_row(row):
    assert [heads_for(width, 64) for width in row["config"]["widths"]] == row["config"]["heads"]


def test_the_heads_of_every_architecture():
    def flat(nested):
        return [x for part in nested for x in (flat(part) if isinstance(part, tuple) else [part])]

    for head_dim, family in ((64, STEPS_DEIT), (32, STEPS_SWIN)):
        paper = {name: architecture for name, architecture in family.items() if not name.startswith("test_")}
        assert paper
        for architecture in paper.values():
            heads = [heads_for(width, head_dim) for width in flat(architecture["widths"])]
            assert heads == flat(architecture["num_heads"])


@pytest.mark.parametrize("round_to", [1, 8, 16, 64])
@pytest.mark.parametrize("width", [384, 768, 1024])
def test_rounding_to_a_multiple(width, round_to):
    plan = plan_steps(width, 12, 4, round_to=round_to)
    assert plan.widths[-1] == width
    for k, got in enumerate(plan.widths[::-1]):
        assert got % round_to == 0
        assert abs(got - width / math.sqrt(2) ** k) <= round_to / 2
    assert all(w % heads == 0 for w, heads in zip(plan.widths, plan.num_heads))


@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("width", [128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280])
def test_heads_divide_and_are_near_the_head_size(width, head_dim):
    plan = plan_steps(width, 12, 4, head_dim=head_dim)
    for k, (got, heads) in enumerate(zip(plan.widths[::-1], plan.num_heads[::-1])):
        assert got % heads == 0
        assert math.isclose(got, width / math.sqrt(2) ** k, rel_tol=0.05)
        assert head_dim / 2 < got / heads < head_dim * 2
    assert plan.head_dims == tuple(w // heads for w, heads in zip(plan.widths, plan.num_heads))


@pytest.mark.parametrize("width, head_dim, heads", [(1280, 64, 20), (1600, 64, 25), (896, 64, 14), (5120, 128, 40)])
def test_the_full_width_has_the_heads_of_the_residual_network(width, head_dim, heads):
    """GPT-2 large and XL, Qwen2 0.5B and LLaMA 13B: not powers of two, nor three times those."""
    assert plan_steps(width, 24, 1, head_dim=head_dim).num_heads == (heads,)
    for profile, place in {"steps": [-1], "reverse": [0], "bowtie": [0, -1]}.items():
        plan = plan_steps(width, 24, 3, head_dim=head_dim, profile=profile)
        assert [plan.num_heads[i] for i in place] == [heads] * len(place)


def test_half_a_width_stays_half_where_heads_divide_it():
    assert [plan_steps(width, 12, 3).widths[0] for width in (320, 640, 768, 1280)] == [160, 320, 384, 640]


# ---- depths


@pytest.mark.parametrize("steps", range(1, 7))
def test_half_compute_costs_what_one_step_costs(steps):
    """By the C² law, for odd depths too; and each step but the first (twice as deep) and last is alike."""
    for depth in range(2, 41):
        plan = plan_steps(384, depth, steps)
        assert c2_law(plan.depths) == depth
        assert len(plan.depths) == len(plan.widths) == len(plan.num_heads) == steps
        half = depth // 2
        assert plan.blocks == depth + (steps - 1) * half
        assert steps == 1 or plan.depths == (2 * half,) + (half,) * (steps - 2) + (depth - half,)


@pytest.mark.parametrize("steps", range(2, 7))
@pytest.mark.parametrize("depth", [2, 3, 7, 12, 24])
def test_a_number_of_blocks_is_met_at_the_same_compute(steps, depth):
    every = 1 if depth < 12 else depth * steps // 5
    for blocks in range(depth, steps * depth + 1, every):
        plan = plan_steps(384, depth, steps, blocks=blocks)
        assert plan.blocks == blocks
        assert min(plan.depths) >= 0
        assert abs(c2_law(plan.depths) / depth - 1) < 0.01


def test_no_step_is_empty_where_the_budget_holds_them_all():
    assert all(plan_steps(384, 12, 3, macs=macs).depths[-1] for macs in (0.9e9, 1e9, 1.5e9, 2e9))


@pytest.mark.parametrize("steps", range(1, 6))
@pytest.mark.parametrize("scale", [0.75, 1, 1.5, 3])
def test_a_budget_in_macs(steps, scale):
    budget = scale * plan_steps(384, 12, 1).macs(TOKENS)
    plan = plan_steps(384, 12, steps, macs=budget)
    # two steps have no narrow block to make up for the rounding of the wide ones
    assert plan.macs(TOKENS) == pytest.approx(budget, rel=0.01 if steps > 2 else 0.03)
    full = plan.depths[-1] + (plan.depths[-2] / 2 if steps > 1 else 0)  # near to (2j, j, …, j, D - j), j = D/2
    assert full == pytest.approx(12 * scale * (0.75 if steps > 1 else 1), rel=0.35)


@pytest.mark.parametrize("tokens", [49, 1024])
def test_a_budget_in_macs_of_other_lengths_and_ratios(tokens):
    budget = plan_steps(384, 12, 1, mlp_ratio=3.0).macs(tokens)
    plan = plan_steps(384, 12, 3, macs=budget, tokens=tokens, mlp_ratio=3.0)
    assert plan.mlp_ratio == 3.0
    assert plan.macs(tokens) == pytest.approx(budget, rel=0.015)


@pytest.mark.parametrize("blocks", [18, 24, 30])
def test_blocks_and_macs_together(blocks):
    budget = 1.25 * plan_steps(384, 12, 1).macs(TOKENS)
    plan = plan_steps(384, 12, 3, blocks=blocks, macs=budget)
    assert plan.blocks == blocks
    assert plan.macs(TOKENS) == pytest.approx(budget, rel=0.02)


# ---- profiles


@pytest.mark.parametrize("arguments", [{}, {"blocks": 29}, {"macs": 5e9}, {"round_to": 16}], ids=str)
@pytest.mark.parametrize("depth", [12, 13, 24])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_profiles_are_the_same_blocks_in_another_order(steps, depth, arguments):
    if steps == 1:
        arguments = {}
    plan = plan_steps(384, depth, steps, **arguments)
    reverse = plan_steps(384, depth, steps, profile="reverse", **arguments)
    assert (reverse.widths, reverse.depths) == (plan.widths[::-1], plan.depths[::-1])
    assert reverse.num_heads == plan.num_heads[::-1]
    bowtie = plan_steps(384, depth, 2 * steps - 1, profile="bowtie", **arguments)
    assert bowtie.widths == (*plan.widths[::-1], *plan.widths[1:])
    assert bowtie.depths[steps - 1] == plan.depths[0]
    before, behind = bowtie.depths[: steps - 1][::-1], bowtie.depths[steps:]
    assert all(a + b == d and 0 <= a - b <= 1 for a, b, d in zip(before, behind, plan.depths[1:]))
    for other in (reverse, bowtie):
        assert (other.blocks, other.params, other.macs(TOKENS)) == (plan.blocks, plan.params, plan.macs(TOKENS))
    assert bowtie.num_heads == tuple(heads_for(w, 64) for w in bowtie.widths)


def test_a_bow_tie_by_hand():
    assert str(plan_steps(384, 12, 5, profile="bowtie")) == "384×3, 272×3, 192×12, 272×3, 384×3"
    assert str(plan_steps(384, 6, 5, profile="bowtie")) == "384×2, 272×2, 192×6, 272×1, 384×1"


# ---- its counts


def explicit_macs(block, tokens, width):
    """Half of torch's own flops, and 5 per element of a LayerNorm."""
    elements = []
    for module in block.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(lambda module, args, output: elements.append(output.numel()))
    block.attn.fused_attn = False  # else the products are hidden from the counter on a CPU
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        block(torch.zeros(1, tokens, width))
    assert len(elements) == 2 and counter.get_total_flops() % 2 == 0
    return counter.get_total_flops() // 2 + 5 * sum(elements)


@pytest.mark.parametrize("tokens", [5, 50])
@pytest.mark.parametrize("mlp_ratio", [4.0, 3.0, 8 / 3])
def test_counts_are_those_of_timms_block(mlp_ratio, tokens):
    widths, depths, heads = (34, 48, 96), (4, 0, 3), (1, 2, 3)
    plan = StepPlan(widths, depths, heads, mlp_ratio)
    blocks = [Block(width, h, mlp_ratio=mlp_ratio, qkv_bias=True) for width, h in zip(widths, heads)]
    params = [sum(p.numel() for p in block.parameters()) for block in blocks]
    macs = [explicit_macs(block, tokens, width) for block, width in zip(blocks, widths)]
    assert plan.step_params == tuple(d * p for d, p in zip(depths, params))
    assert plan.step_macs(tokens) == tuple(d * m for d, m in zip(depths, macs))
    assert plan.params == 4 * params[0] + 3 * params[2]
    assert plan.macs(tokens) == 4 * macs[0] + 3 * macs[2]


def test_counts_by_hand():
    """12C² + 13C parameters and Eq. (3), 12NC² + 2N²C, with 10NC for the norms."""
    plan = StepPlan((100, 200), (2, 1), (1, 2))
    assert plan.step_params == (2 * (120_000 + 1_300), 480_000 + 2_600)
    assert plan.step_macs(10) == (
        2 * (12 * 10 * 100**2 + 2 * 10**2 * 100 + 10 * 10 * 100),
        12 * 10 * 200**2 + 2 * 10**2 * 200 + 10 * 10 * 200,
    )
    assert (plan.blocks, plan.layers, plan.head_dims, str(plan)) == (3, 15, (100, 100), "100×2, 200×1")


def test_a_plan_is_a_value():
    assert plan_steps(384, 12, 3) == plan_steps(384, 12, 3)
    assert len({plan_steps(384, 12, 3), plan_steps(384, 12, 3), plan_steps(384, 12, 2)}) == 2
    with pytest.raises(AttributeError):
        plan_steps(384, 12, 3).depths = ()


@pytest.mark.parametrize("blocks", [12, 36])
def test_the_ends_of_the_range_can_be_reached(blocks):
    assert plan_steps(384, 12, 3, blocks=blocks).depths == {12: (0, 0, 12), 36: (24, 12, 0)}[blocks]


def test_one_step_is_the_residual_network_itself():
    assert plan_steps(384, 12, 1) == StepPlan((384,), (12,), (6,))


def test_a_search_over_many_widths_ends_and_keeps_the_budget():
    plan = plan_steps(65536, 64, 20, blocks=300)
    assert plan.blocks == 300
    assert sum(depth * width**2 for width, depth in zip(plan.widths, plan.depths)) == pytest.approx(
        64 * 65536**2, rel=0.01
    )
