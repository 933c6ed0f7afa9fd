"""Losses of short runs, written down: a refactoring that changes one of them changes what is trained."""

import json
from pathlib import Path

import pytest

from stepsnet.output.console import Lines
from stepsnet.recipes import find_recipe
from stepsnet.runs.train import train_run
from stepsnet.settings.overrides import override

# On one machine they are equal to the bit; other processors round differently.
GOLDEN = json.loads((Path(__file__).parent / "golden_losses.json").read_text())


@pytest.mark.parametrize("name", GOLDEN)
def test_losses_are_as_written_down(name, tmp_path):
    golden = GOLDEN[name]
    recipe = override(find_recipe(golden["recipe"]), golden["overrides"])
    with Lines() as display:
        train_run(recipe, tmp_path / "run", display)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [[line["train_loss"], line["val_loss"]] for line in lines if line["kind"] == "epoch"]
    assert losses == [pytest.approx(expected, rel=2e-4) for expected in golden["losses"]]
