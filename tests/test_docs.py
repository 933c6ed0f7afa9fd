"""The pages: their Python code runs, their commands parse, and their links, files and figures are there."""

import argparse
import itertools
import json
import re
import shlex
import statistics
import sys
import types
from pathlib import Path

import pytest
import torch

from stepsnet.cli import VERBS, _parser
from stepsnet.errors import UserError
from stepsnet.recipes import find_recipe, matching
from stepsnet.recipes.any_model import stepify_pair
from stepsnet.settings.config import Recipe
from stepsnet.settings.overrides import override

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


CODE = [(page, number) for page in PAGES for number in range(len(blocks(page, "python")))]


@pytest.mark.parametrize(("page", "number"), CODE, ids=[f"{named(page)}-{number}" for page, number in CODE])
@pytest.mark.usefixtures("own_registrations")
def test_python_code_runs(page, number, tmp_path, monkeypatch):
    """Each block in a namespace of its own; ``# continues`` goes on from the last that has a beginning."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    code = blocks(page, "python")
    begins = max(index for index in range(number + 1) if not code[index].startswith("# continues"))
    parts = [code[begins], code[number]] if begins < number else [code[number]]
    module = types.ModuleType("page")  # timm asks for the module of a model
    monkeypatch.setitem(sys.modules, "page", module)
    for part in parts:
        exec(compile(part, named(page), "exec"), vars(module))


def commands(page: Path) -> list[list[str]]:
    """Every ``stepsnet …`` of a page, in its shell blocks and in its text, as arguments."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    lines += [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", FENCE.sub("", text))]
    found = []
    for line in lines:
        if match := re.search(r"(?:^|-m -- )stepsnet (?=[a-z])(.*)", line):
            arguments = shlex.split(match[1], comments=True)
            found.append(list(itertools.takewhile(lambda argument: argument not in (">", "|"), arguments)))
    return [arguments for arguments in found if "VERB" not in arguments]


COMMANDS = [(named(page), arguments) for page in PAGES for arguments in commands(page)]


@pytest.mark.parametrize(("page", "arguments"), COMMANDS, ids=[" ".join(arguments) for _, arguments in COMMANDS])
def test_commands_parse(page, arguments):
    """The verb, the recipe and the options exist, and what changes a recipe is one of its fields."""
    if arguments[1:] in ([], ["N"]):  # the verb in general
        assert arguments[0] in VERBS
        return
    options, rest = _parser().parse_known_args(arguments)
    assert not [argument for argument in rest if argument.startswith("-")], page
    changes = [*getattr(options, "overrides", []), *rest]
    if "=" in (getattr(options, "recipe", None) or ""):  # beside --model
        changes.append(options.recipe)
    changes = [change for change in changes if not change.startswith("import=")]  # a module of the reader's
    for recipe in recipes_of(options):
        assert isinstance(override(recipe, [change for change in changes if "=" in change]), Recipe)


def recipes_of(options: argparse.Namespace) -> list[Recipe]:
    if hasattr(options, "recipe") and getattr(options, "model", None):
        return [stepify_pair(options.model, options.data)]
    if name := getattr(options, "recipe", None):
        return [] if is_anyones(name) else [find_recipe(name)]
    patterns = [pattern for pattern in getattr(options, "patterns", []) if "=" not in pattern]
    studies = [pattern for pattern in patterns if list((ROOT / "stepsnet").rglob(f"{pattern}.yaml"))]
    return matching([pattern for pattern in patterns if pattern not in studies and not is_anyones(pattern)])[:1]


def is_anyones(name: str) -> bool:
    """``RECIPE`` and ``mine.yaml`` stand for what a reader has."""
    return name.isupper() or name.endswith(".yaml")


def test_a_wrong_command_would_be_noticed():
    with pytest.raises(SystemExit):
        _parser().parse_known_args(["trian", "digits/tiny"])
    with pytest.raises(UserError, match="lr"):
        override(find_recipe("digits/tiny"), ["lrr=1"])


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_and_files_are_there(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("http") or (page.parent / target).is_file(), target
    for path in re.findall(r"`((?:stepsnet|benchmarks|docs|results|tests)/[\w./-]*\w/?)`", text):
        assert (ROOT / path).exists() or path.startswith("docs/_build"), path


def test_every_page_is_in_the_site():
    trees = [(ROOT / "docs" / folder / "index.md").read_text(encoding="utf-8") for folder in ("", "api", "evidence")]
    found = [block for tree in trees for block in re.findall(r"{toctree}(.*?)```", tree, re.DOTALL)]
    listed = {line for block in found for line in block.split()}
    pages = {page.stem for page in (ROOT / "docs").rglob("*.md")} - {"index"}
    assert pages <= {name.rpartition("/")[2] for name in listed}


def test_the_first_page_is_short_and_says_what_is_missing():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    written = re.sub(r"<!-- begin: .*?<!-- end -->\n", "", text, flags=re.DOTALL)  # tables grow with the results
    assert len(written.splitlines()) <= 140
    for said in (
        "The paper",
        "argues that",
        "arXiv:2511.14329",
        "not on PyPI",
        "make demo",
        "make test",
        "on a GPU",
        "accuracies has been reproduced",
    ):
        assert said in text, said


def results(folder: str) -> list[dict]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "results" / folder).glob("*.json"))]


def test_what_is_said_of_the_digits_is_in_the_results():
    """The sentences of docs/depth.md and the README that compare runs."""
    ablations = results("digits-ablations")
    first = {run["seed"]: run["metrics"] for run in ablations if run["recipe"].endswith("/steps_1")}
    others = [run for run in ablations if not run["recipe"].endswith("/steps_1")]
    assert len({run["recipe"] for run in others}) == 9
    assert all(run["metrics"]["train_loss"] > first[run["seed"]]["train_loss"] for run in others)

    by_recipe = {(run["recipe"].split("/")[1], run["seed"]): run["metrics"] for run in ablations}
    ahead = [by_recipe["wide_to_narrow", s]["train_top1"] - by_recipe["steps_3", s]["train_top1"] for s in (0, 1)]
    assert min(ahead) > 0

    simple = json.loads((ROOT / "results" / "benchmarks" / "logistic_regression.json").read_text(encoding="utf-8"))
    deep = [run["metrics"]["val_top1"] for folder in ("digits-deep", "digits-depth") for run in results(folder)]
    wide = statistics.mean(metrics["val_top1"] for metrics in first.values())
    assert max(deep) < wide < simple["metrics"]["val_top1"]
