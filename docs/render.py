"""Render the tables of README.md and docs/*.md from results/ and from the commands that stand beside them.

A block between ``<!-- begin: NAME … -->`` and ``<!-- end -->`` is replaced by what NAME gives:
``stepsnet …`` by the command's output, ``results FOLDER`` by the table of the runs in results/FOLDER,
``memory FILE`` by that of benchmarks/memory.py in results/memory/FILE.

    python docs/render.py            # rewrite
    python docs/render.py --check    # exit 1 where a block is out of date
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import statistics
import sys
from pathlib import Path

from stepsnet.cli import main as stepsnet
from stepsnet.compare import summarise

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- begin: (?P<name>[^\n]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def command_output(arguments: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert stepsnet(arguments) == 0
    return out.getvalue().strip()


def results_table(folder: str) -> str:
    """Mean ± sample standard deviation over the seeds, the paired difference, and where it was run."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "results" / folder).glob("*.json"))]
    summary = summarise(runs)
    lines = [
        "| | blocks | layers | params | MACs | train accuracy | validation accuracy | minutes |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]

    def spread(values: dict) -> str:
        return f"{values['mean']:.1f} ± {values['std']:.1f}"

    for label in ("StepsNet", "baseline"):
        mine = [run for run in runs if run["label"] == label]
        first, minutes = mine[0], statistics.median(run["seconds"] for run in mine) / 60
        lines.append(
            f"| {label}, {steps(first['widths'])} | {first['blocks']} | {first['layers']} | "
            f"{first['params'] / 1e6:.2f}M | {first['macs'] / 1e6:.1f}M | {spread(summary[label]['train_top1'])}% | "
            f"{spread(summary[label]['val_top1'])}% | {minutes:.1f} |"
        )
    difference = summary["difference"]
    lines.append(
        f"| paired difference | | | | | {spread(difference['train_top1'])} points | "
        f"{spread(difference['val_top1'])} points | |"
    )
    seeds, versions = ", ".join(map(str, summary["seeds"])), runs[0]["versions"]
    commits = ", ".join(sorted({str(run["commit"]) for run in runs}))
    hardware = runs[0]["hardware"]
    lines += [
        "",
        f"Seeds {seeds}, mean ± sample standard deviation, after {runs[0]['epochs']} epochs; "
        f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} thread a run; "
        f"Python {versions['python']}, torch {versions['torch']}, timm {versions['timm']}; commit {commits}. "
        f"The runs are in `results/{folder}/`.",
    ]
    return "\n".join(lines)


def steps(widths: list[int]) -> str:
    return ", ".join(f"{width}×{widths.count(width)}" for width in sorted(set(widths)))


def memory_table(file: str) -> str:
    """Predicted against measured bytes of benchmarks/memory.py, and where they were measured."""
    result = json.loads((ROOT / "results" / "memory" / file).read_text(encoding="utf-8"))
    lines = [
        "| model | samples | `amp_dtype` | `grad_checkpointing` | predicted | measured | predicted / measured "
        "| measured, one micro-batch |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]

    def mib(size: int) -> str:
        return f"{size / 2**20:.1f} MiB"

    for row in result["rows"]:
        predicted, measured = row["predicted"]["total"], row["measured"]
        lines.append(
            f"| {row['model']} | {row['micro_batch']} | {row['amp_dtype']} | {row['grad_checkpointing']:g} | "
            f"{mib(predicted)} | {mib(measured['accumulated'])} | {predicted / measured['accumulated']:.4f} | "
            f"{mib(measured['one_micro_batch'])} |"
        )
    hardware, versions = result["hardware"], result["versions"]
    lines += [
        "",
        f"`{result['command']}` on {hardware['cpu']}, {hardware['threads']} thread; Python {versions['python']}, "
        f"torch {versions['torch']}, timm {versions['timm']}; commit {result['commit']}.",
    ]
    return "\n".join(lines)


def render(text: str) -> str:
    kinds = {"results": results_table, "memory": memory_table}

    def replace(match: re.Match) -> str:
        kind, *arguments = shlex.split(match["name"])
        content = command_output(arguments) if kind == "stepsnet" else kinds[kind](*arguments)
        return f"{match[1]}{content}\n{match[3]}"

    return BLOCK.sub(replace, text)


def main() -> int:
    status = 0
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        rendered = render(text)
        if rendered == text:
            continue
        if "--check" in sys.argv:
            print(f"{page.relative_to(ROOT)}: a rendered block is out of date; run `make readme`", file=sys.stderr)
            status = 1
        else:
            page.write_text(rendered, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
