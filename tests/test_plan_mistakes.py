"""What cannot be planned: one line that names the value and what was expected."""

import math

import pytest

from stepsnet import StepPlan, plan_steps


@pytest.mark.parametrize(
    "plan, message",
    [
        (((0, 96), (1, 1), (1, 1)), r"widths: got \(0, 96\), expected positive integers"),
        (((48, 96), (1,), (1, 1)), r"depths: got \(1,\), expected one per width of \(48, 96\)"),
        (((48, 96), (1, -1), (1, 1)), r"depths: got \(1, -1\), expected integers of at least 0"),
        (((48, 96), (1, 1), (1, 5)), "num_heads: got 5, expected a divisor of the width 96"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_built(plan, message):
    with pytest.raises(ValueError, match=message):
        StepPlan(*plan)


@pytest.mark.parametrize("name", ["width", "depth", "steps", "head_dim", "tokens"])
@pytest.mark.parametrize("value", [0, -3])
def test_numbers_that_are_not_positive(name, value):
    with pytest.raises(ValueError, match=f"{name}: got {value}, expected an integer of at least 1"):
        plan_steps(**{"width": 384, "depth": 12, name: value})


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(width=64, depth=12, steps=13), "steps: got 13, too many for width 64"),
        (dict(width=128, depth=12, steps=3, round_to=128), "steps: got 3, too many for width 128"),
        (dict(width=384, depth=12, profile="bow"), "profile: got 'bow', expected steps, reverse, bowtie"),
        (dict(width=384, depth=12, steps=4, profile="bowtie"), "steps: got 4, expected an odd number for a bow-tie"),
        (dict(width=64, depth=12, steps=25, profile="bowtie"), "steps: got 25, too many for width 64"),
        (dict(width=384, depth=1, steps=2), "depth: got 1, expected at least 2 blocks for 2 widths"),
        (dict(width=384, depth=12, round_to=0), "round_to: got 0, expected 'heads' or a positive integer"),
        (dict(width=384, depth=12, round_to=-8), "round_to: got -8, expected 'heads' or a positive integer"),
        (dict(width=384, depth=12, blocks=11), "blocks: got 11, expected 12 to 36"),
        (dict(width=384, depth=12, blocks=37), "blocks: got 37, expected 12 to 36"),
        (dict(width=384, depth=12, steps=2, blocks=25), "blocks: got 25, expected 12 to 24"),
        (
            dict(width=384, depth=12, macs=1e6),
            "macs: got 1,000,000, expected at least [0-9,]+, those of one full-width block",
        ),
        (dict(width=384, depth=12.5), "depth: got 12.5, expected an integer of at least 1"),
        (dict(width=384, depth=math.inf), "depth: got inf, expected an integer of at least 1"),
        (dict(width=384, depth=10**6), "depth: got 1000000, expected at most 10,000"),
        (dict(width=384, depth=12, steps=10**6), "steps: got 1000000, too many for width 384"),
        (dict(width=2**30, depth=12), "width: got 1073741824, expected at most 1,048,576"),
        (dict(width=384, depth=12, macs=1e30), "blocks: got compute for up to .* of them, expected at most 10,000"),
        (dict(width=384, depth=12, macs=math.nan), "macs: got nan, expected a positive number"),
        (dict(width=384, depth=12, mlp_ratio=0), "mlp_ratio: got 0, expected a positive number"),
        (dict(width=384, depth=12, macs=-1), "macs: got -1, expected a positive number"),
        (dict(width=384, depth=12, steps=1, blocks=20), "blocks: got 20, expected 12"),
        (dict(width=384, depth=12, blocks=24.5), r"blocks: got 24\.5, expected"),
        (dict(width=384, depth=12, round_to="head"), "round_to: got 'head', expected 'heads' or a positive integer"),
    ],
    ids=str,
)
def test_errors_name_the_value_and_what_was_expected(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_steps(**arguments)
