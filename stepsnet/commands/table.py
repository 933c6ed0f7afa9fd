"""`stepsnet table`: a table of the paper against our models."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from typing import Any

from ..files.writing import dump_json
from ..output.markdown import markdown_table
from ..output.terminal import say
from ..paper.tables import model_of, note_of, printed_rows
from .options import add_json_option

__all__ = ["compare_table", "render_table"]

HELP = "compare a table of the paper with our models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="TABLE", help="1, 2a, 2b, 3, 4, 5a, 5b, 8, 9, 10 or 11")
    add_json_option(parser)


def run(options: argparse.Namespace) -> None:
    compared = compare_table(options.table)
    say(dump_json(compared, indent=1) if options.json else render_table(options.table, compared))


def as_printed(value: float) -> float:
    """Round to two decimals, as counters print, and then to one.

    That the paper rounds twice is an inference of ours: with one rounding, three cells of Table 5a would differ
    (3.948 is printed as 4.0, 21.746 as 21.8 and 11.247 as 11.3); with two, every cell comes out.
    """
    two = Decimal(value).quantize(Decimal("0.01"), ROUND_HALF_UP)
    return float(two.quantize(Decimal("0.1"), ROUND_HALF_UP))


# Cells that are counted on the model, and how each is printed.
COUNTED: dict[str, Callable[[Any], float]] = {
    "blocks": lambda counts: counts.blocks,
    "layers": lambda counts: counts.layers,
    "params_M": lambda counts: as_printed(counts.params / 1e6),
    "flops_G": lambda counts: as_printed(counts.macs / 1e9),
}
HEADINGS = {"blocks": "#Blocks", "layers": "#Layers", "params_M": "Params (M)", "flops_G": "MACs (G)"}

DETECTORS_ARE_COUNTED = (
    "one image of 1280×800 through backbone, FPN and RPN head, 1,000 boxes through each box head and 100 through each "
    "mask head, as mmdetection counts; a cell is marked where it differs by more than 1%"
)
SEGMENTERS_ARE_COUNTED = (
    "one image of 512×2048 through backbone and decoder; the auxiliary head, which only training needs, counts in "
    "#Params; a cell is marked where it differs by more than 1%"
)
_SEGMENTED = (3, 512, 2048)
WIKITEXT_TOKENS = 128  # per sequence, Appendix A
_TOLERANCE = {"2a": 0.01, "2b": 0.01, "3": 0.01}  # for counts that depend on what other counters leave out; else 0
_NOTES = {"2a": DETECTORS_ARE_COUNTED, "2b": DETECTORS_ARE_COUNTED, "3": SEGMENTERS_ARE_COUNTED}


def compare_table(table: str) -> list[dict[str, Any]]:
    """Build every row's model on the meta device, count it, and set it beside the printed cells.

    Each entry holds ``row``, ``paper`` (all printed cells), ``ours`` (the counted ones, rounded as the
    paper prints them), ``exact`` (parameters and MACs), ``differs`` (keys) and ``note``.

    Raises:
        UserError: there is no such table, or its rows are not models.
    """
    rows = printed_rows(table)  # before the imports that take seconds

    import torch

    from ..analysis.complexity import count_complexity, count_detector, count_language_model
    from ..models.build import build_model
    from ..settings.config import ModelSpec

    counting: dict[str, Callable[[Any], Any]] = {
        "2a": count_detector,
        "2b": count_detector,
        "3": partial(count_complexity, input_size=_SEGMENTED),
        "4": partial(count_language_model, context=WIKITEXT_TOKENS),
    }
    compared = []
    for row in rows:
        found = model_of(row)
        assert found is not None  # printed_rows raised otherwise
        name, arguments = found
        with torch.device("meta"):
            model = build_model(ModelSpec(name, arguments))
            counts = counting.get(table, count_complexity)(model)
        paper = {key: value for key, value in row.items() if key not in ("table", "row", "config", "note")}
        ours = {key: value(counts) for key, value in COUNTED.items()}
        if isinstance(paper.get("params_M"), int):  # Tables 3 and 4 print whole millions
            ours["params_M"] = round(ours["params_M"])
        if isinstance(paper.get("flops_G"), int):  # and Tables 2 and 3
            ours["flops_G"] = round(ours["flops_G"])
        tolerance = _TOLERANCE.get(table, 0.0)
        compared.append(
            {
                "row": row["row"],
                "paper": paper,
                "ours": ours,
                "exact": {"params": counts.params, "macs": counts.macs},
                "differs": [
                    key for key in ours if key in paper and abs(paper[key] - ours[key]) > tolerance * paper[key]
                ],
                "note": note_of(row) or _NOTES.get(table, ""),
                "model": {"name": name, "arguments": arguments},
            }
        )
    return compared


def render_table(table: str, compared: list[dict[str, Any]]) -> str:
    """The comparison as Markdown: ours beside the paper's, with a mark where they differ."""
    keys = [key for key in HEADINGS if any(key in entry["paper"] for entry in compared)]
    headers = ["row", *(name for key in keys for name in (f"{HEADINGS[key]} ours", "paper"))]
    rows: list[list[str]] = []
    notes: list[str] = []
    for entry in compared:
        mark = ""
        if entry["note"]:
            if entry["note"] not in notes:
                notes.append(entry["note"])
            mark = f" [{notes.index(entry['note']) + 1}]"
        cells = []
        for key in keys:
            differs = " ≠" if key in entry["differs"] else ""
            cells += [f"{entry['ours'][key]}{differs}", str(entry["paper"].get(key, ""))]
        rows.append([f"{entry['row']}{mark}", *cells])
    lines = [markdown_table(headers, rows, "l" + "r" * (len(headers) - 1))]
    lines += [f"\n[{number}] {note}." for number, note in enumerate(notes, 1)]
    return "\n".join(lines)
