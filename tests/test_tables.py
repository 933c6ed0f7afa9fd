"""The paper's tables: every counted cell as printed."""

import functools
import importlib.util
import re
from pathlib import Path

import pytest

from stepsnet.commands.table import as_printed, compare_table, render_table
from stepsnet.errors import UserError
from stepsnet.paper.rows import TABLE_1, printed_rows

ROOT = Path(__file__).parent.parent
compared = functools.cache(compare_table)

TABLES = ["1", "5a", "5b", "8", "9", "10", "11", "text 5.2"]


@pytest.mark.parametrize("table", TABLES)
def test_every_cell_is_as_printed(table):
    assert [entry["row"] for entry in compared(table)] == [row["row"] for row in printed_rows(table)]
    for entry in compared(table):
        printed = {key: entry["paper"][key] for key in entry["ours"] if key in entry["paper"]}
        assert {key: entry["ours"][key] for key in printed} == printed, entry["row"]
        assert entry["differs"] == []


def test_a_cell_that_differs_is_marked():
    entry = {"row": "a", "paper": {"blocks": 3}, "ours": {"blocks": 4}, "differs": ["blocks"], "note": "why"}
    text = render_table("1", [entry])
    assert "4 ≠ | 3" in text and "[1] why." in text


def test_rounding_is_the_papers():
    # Table 5a prints 3.948 as 4.0 and 11.247 as 11.3, and 28.74 would be 28.7
    assert [as_printed(value) for value in (3.948, 11.247, 28.744, 0.05)] == [4.0, 11.3, 28.7, 0.1]


def test_the_302_layer_model():
    (entry,) = compared("text 5.2")
    assert as_printed(entry["exact"]["params"] / 1e6) == 42.1 and as_printed(entry["exact"]["macs"] / 1e9) == 9.2


@pytest.mark.parametrize("table", ["2a", "2b"])
def test_detectors_are_within_three_percent(table):
    entries = compared(table)
    assert [entry["row"] for entry in entries] == [row["row"] for row in printed_rows(table)] and len(entries) == 6
    for entry in entries:
        assert entry["exact"]["macs"] / 1e9 == pytest.approx(entry["paper"]["flops_G"], rel=0.03)
        assert entry["differs"] == [] and entry["model"]["arguments"]["backbone"] in TABLE_1.values()
    assert "as mmdetection counts" in render_table(table, entries)


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


@pytest.mark.parametrize("table", [*TABLES[:-1], "3"])
def test_the_readme_shows_the_table_as_rendered(table):
    block = f"<!-- begin: stepsnet table {table} -->\n{render_table(table, compared(table))}\n<!-- end -->"
    assert block in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readmes_results_are_those_in_results():
    spec = importlib.util.spec_from_file_location("render", ROOT / "docs" / "render.py")
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    folders = re.findall(r"<!-- begin: results (\S+) -->", text)
    assert folders
    for folder in folders:
        assert f"<!-- begin: results {folder} -->\n{render.results_table(folder)}\n<!-- end -->" in text
