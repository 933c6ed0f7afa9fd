"""`stepsnet recipes`: every key of every recipe explains itself, and what is printed is a recipe."""

import itertools
import json

import pytest
from recipe_names import plain

from stepsnet.cli import main
from stepsnet.commands.recipes import explain
from stepsnet.recipes import RECIPES, find_recipe
from stepsnet.settings.overrides import override, read_recipe
from stepsnet.study.declare import studies

ONE_OF_EACH_TASK = ["digits/tiny", "cifar10/shallow", "camvid/tiny", "pennfudan/mask_rcnn", "python-docs/tiny"]


@pytest.mark.parametrize("name", ONE_OF_EACH_TASK)
def test_what_is_printed_is_the_recipe_with_every_key_explained(name, tmp_path, capsys):
    assert main(["recipes", name]) == 0
    said = capsys.readouterr().out
    (tmp_path / "mine.yaml").write_text(said)
    assert plain(read_recipe(tmp_path / "mine.yaml")) == plain(find_recipe(name))
    assert main(["recipes", str(tmp_path / "mine.yaml")]) == 0 and capsys.readouterr().out == said
    lines = said.splitlines()
    depth_of_args = None
    for above, line in itertools.pairwise(lines):
        depth = len(line) - len(line.lstrip())
        if depth_of_args is not None and depth > depth_of_args:
            continue  # the model's own arguments
        depth_of_args = depth if line.strip().startswith(("args:", "expected:")) else None
        key = line.partition(":")[0]
        if not line.lstrip().startswith("#"):
            assert (above.lstrip().startswith("# ") and above.endswith(")")) or above.startswith("#   "), key


def test_types_bounds_and_defaults_are_words():
    said = explain(find_recipe("cifar10/shallow"))
    for line in (
        "# samples per update, over all ranks and accumulated parts (whole number, at least 1; default 1024)",
        "# for optimizers that have two; null: the optimizer's own default, for adamw 0.9 and 0.999 "
        "(list of 2, each a number, at least 0, less than 1 or null; default null)",
        "  # alpha; 0: no Mixup (number, at least 0, at most 1000; default 0.0)",
        "betas: null",
    ):
        assert f"{line}\n" in said
    assert "#   hflip: probability of a horizontal flip (number" in explain(find_recipe("digits/tiny"))  # of none yet


def test_patterns_and_lists(capsys):
    assert main(["recipes"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(RECIPES)
    assert main(["recipes", "cifar10/*", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {name for name in RECIPES if name.startswith("cifar10/")}
    assert main(["recipes", "cifar11/*"]) == 2 and "did you mean cifar10/" in capsys.readouterr().err
    assert main(["recipes", "nowhere.yaml"]) == 2 and "cannot read nowhere.yaml" in capsys.readouterr().err


def test_an_unknown_key_says_where_the_keys_are(tmp_path, capsys):
    assert main(["train", "digits/tiny", "augment.hflipp=1"]) == 2
    assert capsys.readouterr().err.endswith(
        "(did you mean augment.hflip or augment.mixup or augment.mixup_prob?); "
        "`stepsnet recipes NAME` explains each of them\n"
    )
    (tmp_path / "mine.yaml").write_text("name: mine\ndata: digits\nmodel: {name: resnet18, arg: {}}\n")
    assert main(["train", str(tmp_path / "mine.yaml")]) == 2
    assert "unknown key 'model.arg', expected a key of the recipe (did you mean model.args" in capsys.readouterr().err
    (tmp_path / "mine.yaml").write_text("name: mine\ndata: digits\nmodel: {name: resnet18}\n")
    assert main(["train", str(tmp_path / "mine.yaml"), "baseline.args.x=1"]) == 2
    assert "baseline.name: got none, expected one" in capsys.readouterr().err
    assert override(find_recipe("digits/tiny"), ["model.args.mine=1"]).model.args["mine"] == 1


def test_a_study_is_printed_as_it_is_declared(capsys):
    assert main(["recipes", "stepify/convnext"]) == 0
    assert capsys.readouterr().out.rstrip() == studies()["stepify/convnext"].read_text(encoding="utf-8").rstrip()
    assert main(["recipes", next(iter(studies())), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["contenders"]
