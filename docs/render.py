"""Render the tables of README.md and docs/*.md from results/ and from the commands named beside them.

A block between ``<!-- begin: NAME … -->`` and ``<!-- end -->`` is replaced by what NAME gives:

    stepsnet …                     the output of the command
    results FOLDER                 the runs in results/FOLDER: a StepsNet and its baseline
    results FOLDER CONTROL 'HOW'   with the runs of results/CONTROL, which differ in HOW, below them
    depth FOLDER…                  runs at several depths, one row per depth
    grid FOLDER TABLE              runs of a table of the paper, one row per recipe
    digits                         the deep pair on digits, a wide plain network, and logistic regression
    study NAME, leaderboard NAME   a declared study as far as its runs have ended: by cell, or one row per contender
    study-keys                     the keys of a study's declaration
    stream NAME CELL…              γ by update in the final runs of a study's cells, and their gradients at the end
    verdicts NAME…                 the criteria of declared studies that have a verdict
    differences NAME LEFT-RIGHT…   paired differences of a study's cells, whether or not a criterion asks for them; for
                                   LEFT-RIGHT/LEFT-RIGHT, how much larger the first of two differences is
    answers NAME…                  one row per declared study: its question, and what can be said so far
    analysis FILE TABLE            what ``stepsnet analyze --json`` printed
    speed FILE                     what ``stepsnet bench`` wrote
    memory FILE                    what benchmarks/memory.py wrote
    benchmarks, stream_blocks, grow, grow_starts, compress, language [NAME], imports, optimized NAME, pairs, candidates,
    bounds, overheads, device NAME, device_pairs NAME, device_tests NAME…, designs NAME, detectors NAME, segmenters,
    scale FILE
                                   what the other benchmarks wrote
    paper-depths                   the accuracies of the paper's Table 5a

    python docs/render.py            # rewrite
    python docs/render.py --check    # exit 1 if a block is out of date
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path

import render_benchmarks
import render_runs
import render_speed
import render_stream

from stepsnet.cli import main as stepsnet

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- begin: (?P<name>[^\n]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES = {
    "results": render_runs.results_table,
    "depth": render_runs.depth_table,
    "grid": render_runs.grid_table,
    "digits": render_runs.digits_table,
    "analysis": render_runs.analysis_table,
    "study": render_runs.study_table,
    "leaderboard": render_runs.leaderboard_table,
    "study-keys": render_runs.study_keys,
    "stream": render_stream.stream_table,
    "verdicts": render_runs.verdicts_table,
    "differences": render_runs.differences_table,
    "answers": render_runs.answers_table,
    "paper-depths": render_runs.paper_depths,
    "benchmarks": render_benchmarks.benchmarks_table,
    "language": render_benchmarks.language_table,
    "imports": render_speed.imports_table,
    "pairs": render_speed.pairs_table,
    "candidates": render_speed.candidates_table,
    "bounds": render_speed.bounds_table,
    "overheads": render_speed.overheads_table,
    "optimized": render_speed.optimized_table,
    "device": render_speed.device_table,
    "device_pairs": render_speed.device_pairs_table,
    "device_tests": render_speed.device_tests_table,
    "designs": render_speed.designs_table,
    "stream_blocks": render_benchmarks.stream_blocks_table,
    "grow": render_benchmarks.grow_table,
    "grow_starts": render_benchmarks.grow_starts_table,
    "compress": render_benchmarks.compress_table,
    "memory": render_benchmarks.memory_table,
    "scale": render_benchmarks.scale_table,
    "speed": render_benchmarks.speed_table,
    "detectors": render_benchmarks.detection_table,
    "segmenters": render_benchmarks.segmentation_table,
}


# drawn anew if a page has changed
FIGURES = {
    "leaderboard": render_runs.study_figure,
    "study": render_runs.study_figure,
    "stream": render_stream.stream_figure,
}


def command_output(arguments: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert stepsnet(arguments) == 0
    return out.getvalue().strip()


def render(text: str, page: Path) -> str:
    """The text of a page with each of its blocks rendered anew."""
    figures = os.path.relpath(ROOT / "docs" / "figures", page.parent)

    def replace(match: re.Match) -> str:
        kind, *arguments = shlex.split(match["name"])
        content = command_output(arguments) if kind == "stepsnet" else TABLES[kind](*arguments)
        return f"{match[1]}{content.replace('](figures/', f']({figures}/')}\n{match[3]}"

    return BLOCK.sub(replace, text)


def main() -> int:
    status = 0
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        rendered = render(text, page)
        if rendered == text:
            continue
        if "--check" in sys.argv:
            print(f"{page.relative_to(ROOT)}: a rendered block is out of date; run `make readme`", file=sys.stderr)
            status = 1
        else:
            page.write_text(rendered, encoding="utf-8")
            for block in BLOCK.finditer(rendered):
                kind, *arguments = shlex.split(block["name"])
                if kind in FIGURES and "figures/" in block[0]:
                    FIGURES[kind](*arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
