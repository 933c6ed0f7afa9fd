"""The paper's tables: every counted cell as printed."""

import pytest

from stepsnet.errors import UserError
from stepsnet.paper.tables import as_printed, compare_table, printed_rows, render_table

TABLES = ["1", "5a", "5b", "8", "9", "10", "11", "text 5.2"]


@pytest.mark.parametrize("table", TABLES)
def test_every_cell_is_as_printed(table):
    compared = compare_table(table)
    assert [entry["row"] for entry in compared] == [row["row"] for row in printed_rows(table)]
    for entry in compared:
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
    (entry,) = compare_table("text 5.2")
    assert as_printed(entry["exact"]["params"] / 1e6) == 42.1 and as_printed(entry["exact"]["macs"] / 1e9) == 9.2


@pytest.mark.parametrize("table", ["2a", "4", "12", ""])
def test_a_table_that_is_not_here(table):
    with pytest.raises(UserError, match="expected one of 1, 8, 9, 10, 11, 5a, 5b, text 5"):
        printed_rows(table)
