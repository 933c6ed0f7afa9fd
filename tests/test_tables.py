"""The paper's tables: every counted cell as printed."""

import functools
import importlib
from pathlib import Path

import pytest

from stepsnet.commands.table import as_printed, compare_table, render_table
from stepsnet.errors import UserError
from stepsnet.output.markdown import markdown_table
from stepsnet.paper.tables import TABLE_1, all_rows, model_of, note_of, printed_rows

ROOT = Path(__file__).parent.parent
compared = functools.cache(compare_table)

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLES = ["1", "5a", "5b", "8", "9", "10", "11", "text 5.2"]


@pytest.mark.parametrize("table", TABLES)
def test_every_cell_is_as_printed(table):
    assert [entry["row"] for entry in compared(table)] == [row["row"] for row in printed_rows(table)]
    for entry in compared(table):
        printed = {key: entry["paper"][key] for key in entry["ours"] if key in entry["paper"]}
        assert {key: entry["ours"][key] for key in printed} == printed, entry["row"]
        assert entry["differs"] == []
    if table != "text 5.2":
        assert_shown_as_rendered(table)
        assert_others_allocations_are_marked(table)


def assert_shown_as_rendered(table):
    """On a page, as the command prints it; each table is counted once for all its checks."""
    block = f"<!-- begin: stepsnet table {table} -->\n{render_table(table, compared(table))}\n<!-- end -->"
    assert any(block in page.read_text(encoding="utf-8") for page in PAGES)


def test_a_cell_that_differs_is_marked():
    entry = {"row": "a", "paper": {"blocks": 3}, "ours": {"blocks": 4}, "differs": ["blocks"], "note": "why"}
    text = render_table("1", [entry])
    assert "4 ≠ | 3" in text and "[1] why." in text


def test_a_markdown_table():
    assert markdown_table(["", "a"], [["x", 1], ["", ""]], "lr") == "| | a |\n|---|---:|\n| x | 1 |\n| | |"
    for rows, align in (([["x"]], "lr"), ([["x", 1]], "l")):
        with pytest.raises(ValueError, match=r"got 1 columns in .*, expected 2"):
            markdown_table(["", "a"], rows, align)


def test_rounding_is_the_papers():
    # Table 5a prints 3.948 as 4.0 and 11.247 as 11.3, and 28.74 would be 28.7
    assert [as_printed(value) for value in (3.948, 11.247, 28.744, 0.05)] == [4.0, 11.3, 28.7, 0.1]


def test_the_302_layer_model():
    (entry,) = compared("text 5.2")
    assert as_printed(entry["exact"]["params"] / 1e6) == 42.1 and as_printed(entry["exact"]["macs"] / 1e9) == 9.2


@pytest.mark.parametrize("table", ["2a", "2b"])
def test_detectors_are_within_a_percent(table):
    entries = compared(table)
    assert [entry["row"] for entry in entries] == [row["row"] for row in printed_rows(table)] and len(entries) == 6
    for entry in entries:
        assert entry["exact"]["macs"] / 1e9 == pytest.approx(entry["paper"]["flops_G"], rel=0.01)
        assert entry["differs"] == [] and entry["model"]["arguments"]["backbone"] in TABLE_1.values()
    assert "differs by more than 1%" in render_table(table, entries)


@pytest.mark.parametrize("table", ["12", ""])
def test_a_table_that_is_not_here(table):
    with pytest.raises(UserError, match="expected one of 1, 3, 4, 8, 9, 10, 11, 2a, 2b, 5a, 5b, text 5"):
        printed_rows(table)


def test_segmenters_are_within_a_percent_of_what_is_printed():
    for entry in compared("3"):
        exact, printed = entry["exact"], entry["paper"]
        assert exact["params"] / 1e6 == pytest.approx(printed["params_M"], rel=0.01)
        assert exact["macs"] / 1e9 == pytest.approx(printed["flops_G"], rel=0.01)
        assert entry["differs"] == [] and "512×2048" in entry["note"]
    swin, steps = compared("3")
    assert swin["ours"]["params_M"] == 60 and swin["ours"]["flops_G"] == 945 and steps["ours"]["params_M"] == 58
    assert steps["exact"]["macs"] < swin["exact"]["macs"]
    for table in ("3", "2a", "2b"):
        assert_shown_as_rendered(table)


def test_results_on_the_pages_are_those_in_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    render = importlib.import_module("render")
    found = 0
    for page in PAGES:
        for block in render.BLOCK.finditer(page.read_text(encoding="utf-8")):
            if not block["name"].startswith("stepsnet table"):  # those have tests of their own
                found += 1
                assert render.render(block[0], page) == block[0], (page.name, block["name"])
    assert found > 10


# rows whose widths and depths stand in the paper, by table; all others are marked as ours
PRINTED = {
    "1": {row for row in TABLE_1 if row not in ("Steps-DeiT-B", "Steps-ResNet-34", "Steps-ResNet-50")},
    "4": set(),
    "5a": {f"DeiT {blocks} blocks" for blocks in (24, 36, 48, 72, 96)},
    "5b": {"Swin 12 blocks", "Steps-Swin 26 blocks"},
    "8": {"1 steps", "3 steps"},
    "9": {row["row"] for row in printed_rows("9")},
    "10": {"Steps-Swin-T"},
    "11": {
        "StepsNet in stage 3",
        "StepsNet in stage 4",
        "StepsNet in stages 3 and 4",
        "StepsNet in none (Swin-T)",
    },
}


def assert_others_allocations_are_marked(table):
    """Those that the paper does not print. Counting a table takes a while: one test has all that is asked of it."""
    marked = {row["row"] for row in printed_rows(table) if note_of(row)}
    assert marked == {row["row"] for row in printed_rows(table)} - PRINTED[table]
    text = render_table(table, compared(table))
    for row in printed_rows(table):
        assert (f"| {row['row']} [" in text) == (row["row"] in marked)


def test_language_models_are_shown_and_their_allocations_marked():
    assert_others_allocations_are_marked("4")
    assert_shown_as_rendered("4")
    assert PRINTED.keys() == {*TABLES, "4"} - {"text 5.2"}


def test_the_half_compute_rule_gives_the_rows_that_say_so():
    said = [row for row in all_rows() if "half-compute rule" in note_of(row)]
    assert len(said) == 1 + 4 + 3  # of Tables 1, 5a and 8
    for row in said:
        _, arguments = model_of(row)
        depths = arguments.get("depths", (12, 6, 6))
        assert depths[0] == 2 * depths[1] and len(set(depths[1:])) == 1
