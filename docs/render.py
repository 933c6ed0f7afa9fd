"""Render the tables of README.md and docs/*.md from results/ and from the commands that stand beside them.

A block between ``<!-- begin: NAME … -->`` and ``<!-- end -->`` is replaced by what NAME gives:
``stepsnet …`` by the command's output, ``results FOLDER`` by the table of the runs in results/FOLDER (``results FOLDER
CONTROL 'HOW IT DIFFERS'`` with the runs of another folder below them),
``memory FILE`` by that of benchmarks/memory.py in results/memory/FILE, ``benchmarks`` and ``language`` by those
of the other benchmarks in results/benchmarks/, ``detectors NAME`` and ``segmenters`` of those two. ``depth FOLDER…``
is a row a depth, ``grid FOLDER TABLE`` a row a recipe beside the paper's table, ``methods FOLDER`` a row a depth
method, ``analysis FILE TABLE`` what ``stepsnet analyze --json`` printed, ``speed FILE`` what ``stepsnet bench``
wrote, ``paper-depths`` Table 5a, ``digits`` all that was trained on the digits under one setting.

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

from stepsnet.analysis.speed import quartiles
from stepsnet.cli import main as stepsnet
from stepsnet.commands.compare import summarize
from stepsnet.paper.rows import all_rows, printed_rows
from stepsnet.recipes.ablations import ROWS

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
    "val_miou": ("validation mIoU", 1, "%", "points"),
    "val_macc": ("mAcc", 1, "%", "points"),
    "val_pixel_accuracy": ("pixel accuracy", 1, "%", "points"),
    "val_perplexity": ("validation perplexity", 2, "", ""),
    "val_word_perplexity": ("per word", 1, "", ""),
}


def results_table(folder: str, control: str | None = None, said: str = "") -> str:
    """Mean ± sample standard deviation over the seeds, the paired difference, and where it was run.

    The runs of ``control``, ``said`` to differ in something, follow below the difference.
    """
    runs, controls = runs_of((folder,)), runs_of((control,) if control else ())
    summary = summarize(runs)
    keys = ["train_top1", "val_top1"]
    if "val_perplexity" in summary["difference"]:
        keys = ["train_loss", "val_loss", "val_perplexity"]
        keys += ["val_word_perplexity"] * (runs[0]["vocab_size"] > 256)
    if "val_miou" in summary["difference"]:
        keys = ["val_miou", "val_macc", "val_pixel_accuracy"]
    if "val_box_ap" in summary["difference"]:
        keys = ["train_loss", "val_box_ap", "val_box_ap50", "val_mask_ap", "val_mask_ap50"]
    heads = [MEASURES[key][0] for key in keys]
    lines = [
        f"| | blocks | layers | params | MACs | {' | '.join(heads)} | minutes |",
        "|---|---:|---:|---:|---:|" + "---:|" * len(keys) + "---:|",
    ]

    def size(run: dict) -> str:
        return f"{run['blocks']} | {run['layers']} | {run['params'] / 1e6:.2f}M | {run['macs'] / 1e6:.1f}M"

    def spread(values: dict, key: str, unit: str) -> str:
        digits = MEASURES[key][1]
        deviation = "" if values["std"] is None else f" ± {values['std']:.{digits}f}"  # of one seed there is none
        return f"{values['mean']:.{digits}f}{deviation}{unit}"

    for label in ("StepsNet", "baseline"):
        mine = [run for run in runs if run["label"] == label]
        first, minutes = mine[0], statistics.median(run["seconds"] for run in mine) / 60
        cells = [spread(summary[label][key], key, MEASURES[key][2]) for key in keys]
        lines.append(
            f"| {', '.join(filter(None, (label, steps(first['widths']))))} | {size(first)} | {' | '.join(cells)} | "
            f"{minutes:.1f} |"
        )
    difference = summary["difference"]
    cells = [spread(difference[key], key, f" {MEASURES[key][3]}".rstrip()) for key in keys]
    lines.append(f"| paired difference | | | | | {' | '.join(cells)} | |")
    for run in controls:
        cells = [f"{run['metrics'][key]:.{MEASURES[key][1]}f}{MEASURES[key][2]}" for key in keys]
        name = f"*{run['label']}, {said}* (seed {run['seed']})"
        lines.append(f"| {name} | {size(run)} | {' | '.join(cells)} | {run['seconds'] / 60:.1f} |")
    if told := runs[0].get("commonest_class"):
        constant = [f"{told[key.removeprefix('val_')]:.{MEASURES[key][1]}f}{MEASURES[key][2]}" for key in keys]
        lines.append(f"| *{told['name']} everywhere* | | | | | {' | '.join(constant)} | |")
    seeds, versions = ", ".join(map(str, summary["seeds"])), runs[0]["versions"]
    commits = ", ".join(sorted({str(run["commit"]) for run in [*runs, *controls]}))
    hardware = runs[0]["hardware"]
    which = f"Seeds {seeds}, mean ± sample standard deviation" if "," in seeds else f"Seed {seeds} only"
    lines += [
        "",
        f"{which}, after {runs[0]['epochs']} epochs; "
        f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} thread a run; "
        f"Python {versions['python']}, torch {versions['torch']}, timm {versions['timm']}; commit {commits}. "
        f"The runs are in {' and '.join(f'`results/{name}/`' for name in (folder, control) if name)}.",
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
    watching = read_benchmark("watching")
    share = 100 * watching["share_of_the_time"]["50"]
    lines.append(f"| `stream_interval=50`, % of the time of training | {share:.1f} |")
    lines.append(
        f"| of which each watched update takes more, as a share | {median(watching['extra_of_a_watched_update'])} |"
    )
    made = (engine, images, start, checkpoint, watching)
    return "\n".join([*lines, "", *(f"- {origin(result)}" for result in made)])


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


def runs_of(folders: tuple[str, ...]) -> list[dict]:
    paths = [path for folder in folders for path in sorted((ROOT / "results" / folder).glob("*.json"))]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def mean_std(values: list[float], digits: int = 1, unit: str = "") -> str:
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}{unit}"


def where_run(runs: list[dict], folders: tuple[str, ...]) -> str:
    seeds = ", ".join(map(str, sorted({run["seed"] for run in runs})))
    commits = ", ".join(sorted({str(run["commit"]) for run in runs}))
    hardware, versions = runs[0]["hardware"], runs[0]["versions"]
    return (
        f"Seeds {seeds}, mean ± sample standard deviation, after {runs[0]['epochs']} epochs; {hardware['cpu']}, "
        f"{hardware['threads']} thread a run; torch {versions['torch']}, timm {versions['timm']}; commit {commits}. "
        f"The runs are in {', '.join(f'`results/{folder}/`' for folder in folders)}."
    )


def by_seed(runs: list[dict], key: str) -> dict[int, float]:
    return {run["seed"]: run["metrics"][key] for run in runs}


def difference(ours: list[dict], theirs: list[dict], key: str = "val_top1") -> str:
    """Paired over the seeds that both have."""
    a, b = by_seed(ours, key), by_seed(theirs, key)
    pairs = [a[seed] - b[seed] for seed in sorted(a) if seed in b]
    return f"{statistics.fmean(pairs):+.1f}" + (f" ± {statistics.stdev(pairs):.1f}" if len(pairs) > 1 else "")


# rows of Tables 9 and 10 that are rows of Table 8 too
SAME = {"depths_0_0_12": "steps_1", "depths_12_6_6": "steps_3", "narrow_to_wide": "steps_3"}


def grid_table(folder: str, table: str) -> str:
    """A table of the paper in small: a row a recipe, the paired difference to the first, and the paper's accuracy."""
    runs, printed = runs_of((folder,)), {row["row"]: row["top1"] for row in printed_rows(table)}
    lines = [
        "| | widths × blocks | blocks | params | MACs | training | validation | over the first | paper |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    first: list[dict] = []
    for short, title in ROWS[table].items():
        mine = [run for run in runs if run["recipe"].endswith("/" + SAME.get(short, short))]
        train, val = (mean_std(list(by_seed(mine, f"{split}_top1").values()), unit="%") for split in ("train", "val"))
        over = difference(mine, first) if first else ""
        one, first = mine[0], first or mine
        size = f"{one['blocks']} | {one['params'] / 1e6:.2f}M | {one['macs'] / 1e6:.1f}M"
        lines.append(f"| {title} | {steps(one['widths'])} | {size} | {train} | {val} | {over} | {printed[title]}% |")
    return "\n".join([*lines, "", where_run(runs, (folder,)) + f" The last column is the paper's Table {table}."])


def depth_table(*folders: str) -> str:
    """StepsNet and its baseline at every depth."""
    runs = runs_of(folders)
    lines = ["| blocks | layers | params | baseline | StepsNet | paired difference | training: baseline | StepsNet |"]
    lines.append("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for blocks in sorted({run["blocks"] for run in runs}):
        ours, theirs = (
            [run for run in runs if run["blocks"] == blocks and run["label"] == label]
            for label in ("StepsNet", "baseline")
        )
        cells = [
            mean_std(list(by_seed(group, f"{split}_top1").values()), unit="%")
            for split in ("val", "train")
            for group in (theirs, ours)
        ]
        size = f"{ours[0]['layers']} | {ours[0]['params'] / 1e6:.2f}M"
        both = f"{cells[0]} | {cells[1]} | {difference(ours, theirs)} | {cells[2]} | {cells[3]}"
        lines.append(f"| {blocks} | {size} | {both} |")
    return "\n".join([*lines, "", where_run(runs, folders)])


def paper_depths() -> str:
    """Table 5a's accuracies."""
    found = {(row["row"].split(" ")[0], row["blocks"]): row["top1"] for row in printed_rows("5a")}
    depths = sorted({blocks for _, blocks in found})
    lines = [f"| the paper's Table 5a, ImageNet | {' | '.join(f'{blocks} blocks' for blocks in depths)} |"]
    lines.append("|---|" + "---:|" * len(depths))
    for name in ("DeiT", "Steps-DeiT"):
        lines.append(f"| {name} | {' | '.join(f'{found[name, blocks]}%' for blocks in depths)} |")
    return "\n".join(lines)


def digits_table() -> str:
    """The deep pair on digits beside a plain wide network of like compute, and logistic regression."""
    deep = runs_of(("digits-deep",))
    wide = [run for run in runs_of(("digits-ablations",)) if run["recipe"].endswith("/steps_1")]
    rows = [
        ("StepsNet", [run for run in deep if run["label"] == "StepsNet"]),
        ("plain, as deep", [run for run in deep if run["label"] == "baseline"]),
        ("plain, wide and shallow", wide),
    ]
    lines = [
        "| | widths × blocks | params | MACs | training accuracy | validation accuracy |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, runs in rows:
        one = runs[0]
        train, val = (mean_std(list(by_seed(runs, f"{split}_top1").values()), unit="%") for split in ("train", "val"))
        size = f"{steps(one['widths'])} | {one['params'] / 1e6:.2f}M | {one['macs'] / 1e6:.1f}M"
        lines.append(f"| {name} | {size} | {train} | {val} |")
    simple = read_benchmark("logistic_regression")
    train, val = (f"{simple['metrics'][f'{split}_top1']:.1f}%" for split in ("train", "val"))
    lines.append(f"| logistic regression on the pixels | | {simple['params']} | | {train} | {val} |")
    notes = [where_run(deep, ("digits-deep",)), where_run(wide, ("digits-ablations",)), origin(simple)]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)])


def methods_table(folder: str) -> str:
    """Each depth method in a StepsNet and in its baseline."""
    runs = runs_of((folder,))
    lines = ["| method | baseline | StepsNet | paired difference |", "|---|---:|---:|---:|"]
    for method in dict.fromkeys(run["recipe"].split("_", 2)[-1].removeprefix("width_") for run in runs):
        both = [
            [run for run in runs if run["recipe"].split("/")[1] == f"{kind}_{method}"]
            for kind in ("fixed_width", "steps")
        ]
        if all(both):
            cells = [mean_std(list(by_seed(group, "val_top1").values()), unit="%") for group in both]
            lines.append(f"| {method} | {' | '.join(cells)} | {difference(both[1], both[0])} |")
    return "\n".join([*lines, "", where_run(runs, (folder,))])


def analysis_table(file: str, table: str) -> str:
    """Tables 6 and 7 over the seeds of a model, beside the paper's."""
    result = json.loads((ROOT / "results" / "analysis" / file).read_text(encoding="utf-8"))
    rows = result["rows"]
    (papers,) = (row["top1"] for row in printed_rows("8") if row["row"] == "3 steps")  # Steps-DeiT-S as it is
    printed = [row["top1"] for row in all_rows() if row["table"] == table]
    whole = rows[0]["metrics"]["top1"]
    done = [key for key in rows[0] if key not in ("metrics", "blocks")]
    lines = [f"| {' | '.join(done)} | top-1 | change | the paper's change |", "|" + "---|" * len(done) + "---:|" * 3]
    for row, theirs in zip(rows, [papers] * (len(rows) - len(printed)) + printed, strict=True):
        change = [value - before for value, before in zip(row["metrics"]["top1"], whole)]
        what = " | ".join(str(row[key]) for key in done)
        lines.append(
            f"| {what} | {mean_std(row['metrics']['top1'], unit='%')} | {mean_std(change)} | {theirs - papers:+.1f} |"
        )
    note = f"Mean ± sample standard deviation of {len(whole)} runs, points of accuracy. {origin(result)}"
    return "\n".join([*lines, "", note])


def ratio(over: list[float], under: list[float]) -> str:
    """Of two models' seconds in the same rounds."""
    return median(quartiles([a / b for a, b in zip(over, under, strict=True)]))


def speed_table(file: str) -> str:
    """What stepsnet bench wrote: medians with quartiles, and each StepsNet over the baseline of nearest depth."""
    result = json.loads((ROOT / "results" / "speed" / file).read_text(encoding="utf-8"))
    rows = result["rows"]
    kinds = [kind for kind in ("inference", "training") if kind in rows[0]]
    memory = list(rows[0].get("memory", {}))
    heads = [f"{kind} /s" for kind in kinds] + ["latency (ms)"] + [f"{kind}, MiB a sample" for kind in memory]
    lines = [f"| | blocks | MACs (G) | {' | '.join(heads)} |", "|---|---:|---:|" + "---:|" * len(heads)]
    for row in rows:
        cells = [median(row[kind]) for kind in kinds] + [median(row["latency_ms"], 0)]
        cells += [f"{row['memory'][kind]['per_sample'] / 2**20:.1f}" for kind in memory]
        lines.append(f"| {row['model']} | {row['blocks']} | {row['macs'] / 1e9:.2f} | {' | '.join(cells)} |")
    for ours, theirs in [(a, b) for a in rows for b in rows if a["curve"] == f"Steps-{b['curve']}"]:
        if ours["model"] == f"Steps-{theirs['model']}":
            cells = [ratio(theirs["seconds"][kind], ours["seconds"][kind]) for kind in kinds]
            cells.append(ratio(ours["seconds"]["latency"], theirs["seconds"]["latency"]))
            cells += [
                f"{ours['memory'][kind]['per_sample'] / theirs['memory'][kind]['per_sample']:.2f}" for kind in memory
            ]
            lines.append(f"| {ours['model']} / {theirs['model']} | | | {' | '.join(cells)} |")
    batch = f"Batches of {result['batch_size']}, {result['amp_dtype']}, {result['rounds']} interleaved rounds"
    return "\n".join([*lines, "", f"{batch}, median (quartiles). {origin(result)}"])


def detection_table(file: str) -> str:
    """What benchmarks/detection.py measured."""
    result = read_benchmark(file)
    lines = [
        "| | params | inference: images/s | over Swin-T | peak MiB | training: images/s | over Swin-T | peak MiB |",
        "|---|" + "---:|" * 7,
    ]
    for row in result["rows"]:
        cells = [
            f"{median(row[f'{kind}_images_per_second'])} | {median(row[f'{kind}_speed_over_swin'])} | "
            f"{row[f'{kind}_peak_mib']:.0f}"
            for kind in ("inference", "training")
        ]
        lines.append(f"| {row['model']} | {row['parameters'] / 1e6:.1f}M | {' | '.join(cells)} |")
    size = f"{result['batch_size']} image of {result['size']}×{round(1.6 * result['size'])}"
    what = f"{size}, {result['samples']} boxes trained on and {result['detections']} kept, {result['amp_dtype']}"
    return "\n".join([*lines, "", f"{what}; median (quartiles), ratios of the same round. {origin(result)}"])


def segmentation_table() -> str:
    """What benchmarks/segmentation.py measured."""
    result = read_benchmark("segmentation")
    lines = [
        "| | params | MACs | inference: images/s | over the baseline | MiB an image "
        "| training: images/s | over the baseline | MiB an image |",
        "|---|" + "---:|" * 8,
    ]
    for name, row in result["models"].items():
        cells = [
            f"{median(row[f'{kind}_images_per_second'], 1)} | {median(row[f'{kind}_speed_over_baseline'])} | "
            f"{row['memory_mib_per_image'][kind]:.1f}"
            for kind in ("inference", "training")
        ]
        lines.append(f"| {name} | {row['params'] / 1e6:.2f}M | {row['macs'] / 1e9:.2f}G | {' | '.join(cells)} |")
    what = f"`{result['recipe']}`, batches of {result['batch_size']} crops of {result['crop_size']}×"
    what += f"{result['crop_size']}, {result['amp_dtype']}"
    return "\n".join([*lines, "", f"{what}; median (quartiles), ratios of the same round. {origin(result)}"])


def render(text: str) -> str:
    kinds = {"results": results_table, "memory": memory_table}
    kinds |= {"benchmarks": benchmarks_table, "language": language_table, "scale": scale_table}
    kinds |= {"detectors": detection_table, "segmenters": segmentation_table}
    kinds |= {"grid": grid_table, "depth": depth_table, "methods": methods_table}
    kinds |= {"paper-depths": paper_depths, "analysis": analysis_table, "speed": speed_table}
    kinds |= {"digits": digits_table}

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
