"""Render the tables of README.md and docs/*.md from results/ and from the commands that stand beside them.

A block between ``<!-- begin: NAME … -->`` and ``<!-- end -->`` is replaced by what NAME gives:
``stepsnet …`` by the command's output, ``results FOLDER`` by the table of the runs in results/FOLDER,
``memory FILE`` by that of benchmarks/memory.py in results/memory/FILE, ``benchmarks`` and ``language`` by those
of the other benchmarks in results/benchmarks/.

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


# of each task: what is shown of a run, its digits, and its unit
MEASURES = {
    "train_top1": ("train accuracy", 1, "%", "points"),
    "train_loss": ("train loss", 3, "", ""),
    "val_top1": ("validation accuracy", 1, "%", "points"),
    "val_box_ap": ("box AP", 1, "%", "points"),
    "val_box_ap50": ("box AP50", 1, "%", "points"),
    "val_mask_ap": ("mask AP", 1, "%", "points"),
    "val_mask_ap50": ("mask AP50", 1, "%", "points"),
    "val_loss": ("validation loss", 3, "", ""),
    "val_perplexity": ("validation perplexity", 2, "", ""),
    "val_word_perplexity": ("per word", 1, "", ""),
}


def results_table(folder: str) -> str:
    """Mean ± sample standard deviation over the seeds, the paired difference, and where it was run."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "results" / folder).glob("*.json"))]
    summary = summarise(runs)
    keys = ["train_top1", "val_top1"]
    if "val_perplexity" in summary["difference"]:
        keys = ["train_loss", "val_loss", "val_perplexity"]
        keys += ["val_word_perplexity"] * (runs[0]["vocab_size"] > 256)
    elif "val_box_ap" in summary["difference"]:
        keys = ["train_loss", "val_box_ap", "val_box_ap50", "val_mask_ap", "val_mask_ap50"]
    heads = [MEASURES[key][0] for key in keys]
    lines = [
        f"| | blocks | layers | params | MACs | {' | '.join(heads)} | minutes |",
        "|---|---:|---:|---:|---:|" + "---:|" * len(keys) + "---:|",
    ]

    def spread(values: dict, key: str, unit: str) -> str:
        digits = MEASURES[key][1]
        deviation = "" if values["std"] is None else f" ± {values['std']:.{digits}f}"  # of one seed there is none
        return f"{values['mean']:.{digits}f}{deviation}{unit}"

    for label in ("StepsNet", "baseline"):
        mine = [run for run in runs if run["label"] == label]
        first, minutes = mine[0], statistics.median(run["seconds"] for run in mine) / 60
        cells = [spread(summary[label][key], key, MEASURES[key][2]) for key in keys]
        lines.append(
            f"| {label}, {steps(first['widths'])} | {first['blocks']} | {first['layers']} | "
            f"{first['params'] / 1e6:.2f}M | {first['macs'] / 1e6:.1f}M | {' | '.join(cells)} | {minutes:.1f} |"
        )
    difference = summary["difference"]
    cells = [spread(difference[key], key, f" {MEASURES[key][3]}".rstrip()) for key in keys]
    lines.append(f"| paired difference | | | | | {' | '.join(cells)} | |")
    seeds, versions = ", ".join(map(str, summary["seeds"])), runs[0]["versions"]
    commits = ", ".join(sorted({str(run["commit"]) for run in runs}))
    hardware = runs[0]["hardware"]
    which = f"Seeds {seeds}, mean ± sample standard deviation" if "," in seeds else f"Seed {seeds} only"
    lines += [
        "",
        f"{which}, after {runs[0]['epochs']} epochs; "
        f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} thread a run; "
        f"Python {versions['python']}, torch {versions['torch']}, timm {versions['timm']}; commit {commits}. "
        f"The runs are in `results/{folder}/`.",
    ]
    return "\n".join(lines)


def steps(widths: list[int]) -> str:
    return ", ".join(f"{width}×{widths.count(width)}" for width in sorted(set(widths)))


def read_benchmark(name: str) -> dict:
    return json.loads((ROOT / "results" / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def origin(result: dict) -> str:
    hardware, versions = result["hardware"], result["versions"]
    machine = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} thread of {hardware['cores']} cores"
    return f"`{result['command']}`: {machine}; torch {versions['torch']}, timm {versions['timm']}; {result['commit']}"


def median(found: dict, digits: int = 2) -> str:
    low, high = found["quartiles"]
    return f"{found['median']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def benchmarks_table() -> str:
    """Median and quartiles of what the engine costs."""
    engine, images, start, checkpoint = map(read_benchmark, ("engine", "images", "start", "checkpoint"))
    lines = ["| what | median (quartiles) |", "|---|---:|"]
    bare = f"the bare one of {engine['bare_ms']['median']:.0f} ms"
    lines.append(f"| an update in the engine / {bare} | {median(engine['ratio'], 3)} |")
    for name, found in images["images_per_second_per_core"].items():
        lines.append(f"| images a second on one core, {name} | {median(found, 0)} |")
    lines.append(
        f"| seconds to the first update, `{start['recipe']}` | {median(start['seconds_to_first_update'], 1)} |"
    )
    lines.append(f"| of which a bare `import torch, timm` | {median(start['seconds_of_imports'], 1)} |")
    size = f"{checkpoint['model']}, {checkpoint['mib']:.0f} MiB"
    for name, what in (("write", "write a checkpoint"), ("load", "load it")):
        ours, theirs = (
            checkpoint[f"{name}_seconds"],
            checkpoint[f"torch_{'save' if name == 'write' else 'load'}_seconds"],
        )
        lines.append(f"| seconds to {what}, {size} | {median(ours)} |")
        lines.append(f"| the same by torch alone, without checksum or flush | {median(theirs)} |")
    return "\n".join([*lines, "", *(f"- {origin(result)}" for result in (engine, images, start, checkpoint))])


def language_table() -> str:
    """Training, generation and cache of a Steps-Transformer over those of LLaMA."""
    result = read_benchmark("language")
    lines = [
        "| | layers | params | training speed / baseline | generation speed / baseline | cache a token |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        for name, found in row["models"].items():
            ratios = [median(found[f"{kind}_speed_over_baseline"]) for kind in ("train", "generate")]
            ratios = ["1", "1"] if name == "baseline" else ratios
            size = f"{found['cache_bytes_per_token'] / 1024:.1f} KiB"
            what = {"baseline": f"LLaMA, width {row['width']}", "as deep": "LLaMA, as deep"}.get(name, name)
            lines.append(
                f"| {what} | {found['layers']} | {found['params'] / 1e6:.2f}M | {' | '.join(ratios)} | {size} |"
            )
    return "\n".join([*lines, "", origin(result)])


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


def scale_table(file: str) -> str:
    """Training losses of a StepsNet and its baseline at two scales of the embedding."""
    result = json.loads((ROOT / "results" / file).read_text(encoding="utf-8"))
    updates = ["50", "100", "150", "200", "250"]
    lines = ["| | `embedding_scale` | " + " | ".join(f"update {u}" for u in updates) + " |"]
    lines.append("|---|---:|" + "---:|" * len(updates))
    for row in result["rows"]:
        losses = " | ".join(f"{row['train_loss'][update]:.2f}" for update in updates)
        lines.append(f"| {row['label']} | {row['embedding_scale']:g} | {losses} |")
    commits = ", ".join(dict.fromkeys(row["commit"] for row in result["rows"]))
    versions = result["versions"]
    where = f"{result['hardware']['cpu']}, torch {versions['torch']}; {commits}"
    return "\n".join(
        [*lines, "", f"`{result['command']}`, seed {result['rows'][0]['seed']}, {result['what']}: {where}"]
    )


def render(text: str) -> str:
    kinds = {"results": results_table, "memory": memory_table}
    kinds |= {"benchmarks": benchmarks_table, "language": language_table, "scale": scale_table}

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
