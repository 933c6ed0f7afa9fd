"""Pictures and the self-contained HTML page of one run or of a comparison of runs.

The data flow one way: folders -> :class:`Run` -> :class:`Group` (the seeds of one model) -> :class:`Picture`
-> page. Every sentence that states a result is computed from the numbers of the figure beside it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup
from matplotlib import colormaps, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from .errors import UserError

STEPS, BASELINE = "StepsNet", "baseline"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")  # Okabe-Ito, colour-blind safe
DASHES = ("-", "--", ":", "-.")
RESULTS = (("val_top1", "validation top-1", " %", 1), ("val_loss", "validation loss", "", -1))  # 1: more is better
STYLE = {
    "axes.edgecolor": "#9aa3b0",
    "axes.grid": True,
    "axes.labelcolor": "#3d4654",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],  # comes with matplotlib: the same layout everywhere
    "font.size": 8.5,
    "grid.color": "#e6e9ee",
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.title_fontsize": 9,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a "$" in a label is a dollar sign
    "xtick.color": "#5c6675",
    "ytick.color": "#5c6675",
}


@dataclass(frozen=True)
class Run:
    """What a run folder holds; ``summary`` is empty while the run is unfinished."""

    folder: Path
    recipe_text: str
    config: dict[str, Any]
    summary: dict[str, Any]
    epochs: dict[int, dict[str, Any]]  # the lines of kind "epoch" by their epoch
    ratios: dict[int, dict[str, Any]]  # those of kind "shortcut_ratio"

    @property
    def seed(self) -> Any:
        return self.summary.get("seed", self.config.get("seed"))

    @property
    def kind(self) -> tuple[str, str]:
        """What the seeds of one model have in common: the recipe's name and the model."""
        return str(self.config.get("name")), json.dumps(self.config.get("model"), sort_keys=True, default=str)

    @property
    def widths(self) -> list[int]:
        """One width a block; known from the first measurement on."""
        return self.summary.get("widths") or next((line["widths"] for line in self.ratios.values()), [])

    @property
    def last_epoch(self) -> int:
        return max(self.epochs, default=0)

    def value(self, key: str) -> float | None:
        """The result or, while there is none, the latest value."""
        latest = (self.epochs[epoch].get(key) for epoch in sorted(self.epochs, reverse=True))
        return self.summary.get("metrics", {}).get(key, next((v for v in latest if v is not None), None))


@dataclass(frozen=True)
class Group:
    """The runs of one model by one recipe: its seeds."""

    label: str
    suffix: str  # tells apart groups of the same label
    colour: str
    dash: str
    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        return self.label + self.suffix

    @property
    def the(self) -> str:
        """The name within a sentence."""
        return f"the {self.name}" if self.label == BASELINE else self.name

    @property
    def counted(self) -> tuple[Run, ...]:
        """The finished runs (all, if none is), so that no mean over seeds jumps where one of them stops."""
        return tuple(run for run in self.runs if run.summary) or self.runs

    @property
    def widths(self) -> list[int]:
        return next((run.widths for run in self.runs if run.widths), [])

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(width, blocks) of each stretch of blocks of equal width."""
        return [(width, len(list(blocks))) for width, blocks in groupby(self.widths)]

    def fact(self, key: str) -> Any:
        return next((run.summary[key] for run in self.runs if run.summary.get(key) is not None), None)

    def results(self, key: str) -> dict[Any, float]:
        """The final value by seed, of the finished runs; a seed that was run twice counts once, by its mean."""
        found: dict[Any, list[float]] = {}
        for run in self.runs:
            value = run.value(key)
            if run.summary and value is not None:
                found.setdefault(run.seed, []).append(value)
        return {seed: statistics.mean(values) for seed, values in found.items()}


@dataclass(frozen=True)
class Picture:
    """A figure in two layouts (``draw(narrow)``), its numbers, and what is seen in it, in words."""

    name: str
    heading: str
    about: str
    caption: str
    rows: list[dict[str, Any]]
    draw: Callable[[bool], Figure]


def load_run(folder: Path) -> Run:
    """Read a run folder; a last line of metrics that a crash cut off is left out."""
    if not (folder / "config.yaml").is_file():
        raise UserError(f"run folder {folder}: no config.yaml in it, expected the output folder of a training run")
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    metrics, summary = folder / "metrics.jsonl", folder / "summary.json"
    lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines() if metrics.exists() else []
    kinds: dict[str, dict[int, dict[str, Any]]] = {"epoch": {}, "shortcut_ratio": {}}
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{metrics}, line {number}: not JSON ({error})") from error
        if entry["kind"] in kinds:
            kinds[entry["kind"]][entry["epoch"]] = entry  # of an epoch repeated by a resumed run, the later line
    result = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    return Run(folder, text, yaml.safe_load(text) or {}, result, kinds["epoch"], kinds["shortcut_ratio"])


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Put the seeds of each model together, in the order given.

    An unfinished run, which has no label yet, takes that of a finished run of the same recipe and model.
    """
    labels = {run.kind: str(run.summary["label"]) for run in runs if run.summary}
    kinds: dict[tuple[str, tuple[str, str]], list[Run]] = {}
    for run in runs:
        label = run.summary.get("label") or labels.get(run.kind) or run.config.get("label") or run.kind[0]
        kinds.setdefault((str(label), run.kind), []).append(run)
    blocks = [next((len(run.widths) for run in members if run.widths), "?") for members in kinds.values()]
    for suffixes in (
        [""] * len(kinds),
        [f" · {count} blocks" for count in blocks],
        [f" · {recipe}" for _, (recipe, _) in kinds],
        [f" · {number}" for number in range(1, len(kinds) + 1)],
    ):
        if len({label + suffix for (label, _), suffix in zip(kinds, suffixes, strict=True)}) == len(kinds):
            break
    order = list(dict.fromkeys([STEPS, BASELINE, *(label for label, _ in kinds)]))  # these two keep their colours
    groups: list[Group] = []
    for ((label, _), members), suffix in zip(kinds.items(), suffixes, strict=True):
        colour = COLOURS[order.index(label) % len(COLOURS)]
        dash = DASHES[sum(group.label == label for group in groups) % len(DASHES)]
        groups.append(Group(label, suffix, colour, dash, tuple(members)))
    return groups


def _join(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _number(value: float | None, digits: int = 2) -> str:
    return "—" if value is None else f"{value:.{digits}f}".replace("-", "−")


def _spread(values: Sequence[float], unit: str = "") -> str:
    """Mean ± sample standard deviation."""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return _number(statistics.mean(values)) + deviation + unit


def _count(value: float | None) -> str:
    """Parameters and MACs as 1.23 M."""
    if value is None:
        return "—"
    size, unit = next(((s, u) for s, u in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= s), (1, ""))
    return f"{value / size:.2f} {unit}" if unit else str(value)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "—"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _difference(steps: Group, base: Group, key: str, sign: int, points: str) -> tuple[str, dict[str, str] | None]:
    """The paired difference over common seeds, in words and as a tile."""
    a, b = steps.results(key), base.results(key)
    seeds = [seed for seed in a if seed in b]
    if not seeds:
        return f"{steps.the} and {base.the} share no seed, so there is no paired difference", None
    pairs = [a[seed] - b[seed] for seed in seeds]
    mean, note = statistics.fmean(pairs), f"seed {seeds[0]} only, so the spread is unknown"
    better = steps if mean * sign > 0 else base
    if len(pairs) > 1:
        wins = sum(pair * mean > 0 for pair in pairs)
        note = f"paired over seeds {_join(map(str, seeds))}, better in {wins} of {len(pairs)}"
        note += ", within the spread of the seeds" if abs(mean) <= statistics.stdev(pairs) else ""
    size = _spread([math.copysign(1, mean) * pair for pair in pairs], points)
    verdict = f"{better.the} is better by {size}" if mean else f"{steps.the} and {base.the} are equal"
    name = f"{steps.name} − {base.name}"
    value = ("+" if mean > 0 else "") + _spread(pairs, points)
    return f"{verdict} ({note})", {"name": name, "value": value, "note": note, "colour": "#5c6675"}


def headline(groups: Sequence[Group]) -> tuple[str, list[dict[str, str]]]:
    """What came out, in one sentence and as tiles: every group's result, and the paired differences."""
    finished = [group for group in groups if any(run.summary for run in group.runs)]
    result = next((r for r in RESULTS if finished and all(group.results(r[0]) for group in finished)), None)
    waiting = [f"seed {run.seed} of {group.the}" for group in groups for run in group.runs if not run.summary]
    unfinished = f"unfinished: {_join(waiting)}" if waiting else ""
    if result is None:
        return f"No result yet; {unfinished or 'no run has a validation metric'}.", []
    key, what, unit, sign = result
    parts, said, tiles = [], [], []
    for group in finished:
        values = list(group.results(key).values())
        value, note = _spread(values, unit), f"{len(values)} seeds" if len(values) > 1 else "one seed"
        parts.append(f"{value} for {group.the} ({note})")
        tiles.append({"name": group.name, "value": value, "note": f"{what}, {note}", "colour": group.colour})
    ours, theirs = ([group for group in finished if group.label == label] for label in (STEPS, BASELINE))
    alone = len(ours) == len(theirs) == 1
    for steps, base in [(s, b) for s in ours for b in theirs if alone or s.suffix == b.suffix]:
        words, tile = _difference(steps, base, key, sign, " points" if unit else "")
        said.append(words)
        tiles += [tile] if tile else []
    if not said and len(finished) > 1:
        best = max(finished, key=lambda group: sign * statistics.fmean(group.results(key).values()))
        said.append(f"the best by its mean is {best.the}")
    return f"The {what} is {'; '.join(filter(None, [_join(parts), *said, unfinished]))}.", tiles


def _panels(narrow: bool, count: int, columns: int, height: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """So many panels, in columns or, on a phone, one below the other."""
    columns = 1 if narrow else min(columns, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(3.7 if narrow else 7.8, 0.4 + height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    for ax in axes[:count]:
        ax.tick_params(labelleft=True, labelbottom=True)
    return figure, axes[:count]


def _legend_above(ax: Axes, title: str, handles: list[Any], names: list[str], columns: int) -> None:
    ax.legend(handles, names, title=title, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), alignment="left",
              borderpad=0.1, borderaxespad=0.3, columnspacing=1.2, handletextpad=0.5)  # fmt: skip


def _value(value: float | None) -> float:
    return math.nan if value is None or math.isinf(value) else value  # what a line leaves out


def mean_curve(runs: Sequence[Run], key: str) -> dict[int, tuple[float, float, float]]:
    """By epoch: the mean, least and greatest value over the runs."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for epoch, line in run.epochs.items():
            if line.get(key) is not None:
                found.setdefault(epoch, []).append(_value(line[key]))
    return {epoch: (statistics.fmean(v), min(v), max(v)) for epoch, v in sorted(found.items())}


def figure_curves(groups: Sequence[Group], quantity: str, heading: str, unit: str) -> Picture | None:
    """Training and validation ``loss`` or ``top1`` against the epoch; None when no run has recorded any."""
    panels = {f"train_{quantity}": "training", f"val_{quantity}": "validation"}
    curves = {key: [(group, mean_curve(group.counted, key)) for group in groups] for key in panels}
    curves = {key: kept for key, all_ in curves.items() if (kept := [(g, curve) for g, curve in all_ if curve])}
    if not curves:
        return None
    digits = 1 if unit else 3

    def draw(narrow: bool) -> Figure:
        figure, axes = _panels(narrow, len(curves), 2, 2.2 if narrow else 2.7, sharey=True)
        for ax, (key, lines) in zip(axes, curves.items(), strict=True):
            ax.set(title=panels[key], xlabel="epoch", ylabel=heading.lower() + (f" ({unit.strip()})" if unit else ""))
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            for group, curve in lines:
                for run in group.runs if len(group.runs) > 1 else ():
                    one = mean_curve([run], key)
                    ax.plot(list(one), [v[0] for v in one.values()], color=group.colour, linewidth=0.7, alpha=0.5)
                epochs, (mean, low, high) = list(curve), zip(*curve.values(), strict=True)
                ax.fill_between(epochs, low, high, color=group.colour, alpha=0.15, linewidth=0)
                marker = "o" if len(epochs) == 1 else None
                ax.plot(epochs, mean, group.dash, color=group.colour, linewidth=1.9, marker=marker)
        names = [group.name.lstrip("_") for group in groups]  # a legend leaves out what begins with "_"
        handles = [Line2D([], [], color=group.colour, linestyle=group.dash, linewidth=1.9) for group in groups]
        columns = max(1, (34 if narrow else 90) // (max(map(len, names)) + 6))
        figure.legend(handles, names, loc="outside upper left", ncols=columns)
        return figure

    said = [
        f"{panels[key]} {heading.lower()} is "
        + _join(f"{_number(c[max(c)][0], digits)}{unit} for {g.the} (epoch {max(c)})" for g, c in lines)
        for key, lines in curves.items()
    ]
    seeds = "Bold lines are means over the seeds, thin lines single seeds, and bands reach from the lowest to the " \
            "highest seed." if any(len(group.runs) > 1 for group in groups) else ""  # fmt: skip
    rows = [
        {"label": group.name, "seed": run.seed, "run": run.folder.name, "epoch": epoch}
        | {key: line.get(key) for key in curves}
        for group in groups for run in group.runs for epoch, line in sorted(run.epochs.items())
    ]  # fmt: skip
    return Picture(quantity, heading, seeds, f"At the end, {'; '.join(said)}.", rows, draw)


def figure_shortcut_ratio(groups: Sequence[Group]) -> Picture | None:
    """γ against the depth at up to six epochs, a panel a group, as in Fig. 2; None when it was not measured."""
    curves: dict[str, dict[int, list[float]]] = {}
    for group in groups:
        measured = sorted({epoch for run in group.counted for epoch in run.ratios})
        if len(measured) > 6:  # the start, the first trained epoch, the last, and evenly between
            measured = [measured[0], *(measured[1 + round(i * (len(measured) - 2) / 4)] for i in range(5))]
        for epoch in measured:
            seeds = [run.ratios[epoch]["gamma"] for run in group.counted if epoch in run.ratios]
            means = [statistics.fmean(map(_value, gammas)) for gammas in zip(*seeds, strict=True)]
            curves.setdefault(group.name, {})[epoch] = means
    shown = [group for group in groups if group.name in curves]
    if not shown:
        return None
    epochs = sorted({epoch for curve in curves.values() for epoch in curve})
    top = max(1.0, *(g for c in curves.values() for gammas in c.values() for g in gammas if not math.isnan(g)))

    def draw(narrow: bool) -> Figure:
        figure, axes = _panels(narrow, len(shown), 2, 2.7 if narrow else 3.0, sharex=True, sharey=True)
        for ax, group in zip(axes, shown, strict=True):
            ax.set(xlabel="depth (0: input, 1: output)", ylabel="shortcut ratio γ", xlim=(0, 1), ylim=(0, 1.05 * top))
            handles = []
            for epoch, gammas in curves[group.name].items():
                colour = colormaps["viridis_r"](0.12 + 0.88 * epochs.index(epoch) / max(1, len(epochs) - 1))
                depth = [block / len(gammas) for block in range(len(gammas) + 1)]
                handles += ax.plot(depth, [1, *gammas], "-" if epoch else "--", color=colour, linewidth=1.5)
            names = [str(epoch) if epoch else "0 (untrained)" for epoch in curves[group.name]]
            _legend_above(ax, f"{group.name}, after epoch", handles, names, 3 if narrow else 3)
        return figure

    first, last = ({g.name: pick(curves[g.name]) for g in shown} for pick in (min, max))
    said = [
        f"After {last[g.name]} epochs γ at the last block is {_number(curves[g.name][last[g.name]][-1])} for {g.the} "
        f"({_number(curves[g.name][first[g.name]][-1])} at epoch {first[g.name]})" for g in shown
    ]  # fmt: skip
    rows = [
        {"label": group.name, "seed": run.seed, "run": run.folder.name, "epoch": epoch, "block": block,
         "depth": block / len(line["gamma"]), "width": width, "gamma": gamma}
        for group in shown for run in group.runs for epoch, line in sorted(run.ratios.items())
        if epoch in curves[group.name]
        for block, (width, gamma) in enumerate(zip(line["widths"], line["gamma"], strict=True), 1)
    ]  # fmt: skip
    about = Markup(
        "γ<sub>l</sub> = σ<sub>0</sub>/σ<sub>l</sub> compares the spread of the input of the blocks with that of "
        "the features after block l. Where it nears zero, a block hardly sees the input any more and hardly sends "
        "gradient back to it. Depth is l over the number of blocks; in a hierarchical model, each stage starts "
        "again from its own input."
    )
    return Picture("shortcut-ratio", "Shortcut ratio", about, "; ".join(said) + ".", rows, draw)


def figure_widths(groups: Sequence[Group]) -> Picture | None:
    """The width of every block, a row a group, coloured by step."""
    shown = [group for group in groups if group.widths]
    if not shown:
        return None
    blocks, widest = max(len(group.widths) for group in shown), max(max(group.widths) for group in shown)

    def draw(narrow: bool) -> Figure:
        figure, axes = _panels(narrow, len(shown), 1, 1.75, sharex=True, sharey=True)
        for ax, group in zip(axes, shown, strict=True):
            ax.set(xlabel="block", ylabel="width (channels)", xlim=(0.5, blocks + 0.5), ylim=(0, 1.05 * widest))
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.grid(axis="x", visible=False)
            handles, start = [], 1
            for number, (width, depth) in enumerate(group.steps):
                colour = colormaps["viridis_r"](0.15 + 0.85 * (number + 1) / len(group.steps))
                ax.bar(range(start, start + depth), width, width=0.82, color=colour)
                handles, start = [*handles, Patch(color=colour)], start + depth
            names = [f"{width}×{depth}" for width, depth in group.steps]
            _legend_above(ax, f"{group.name}: width × blocks", handles, names, 4 if narrow else 9)
        return figure

    said = [
        f"{group.the} has {len(group.widths)} blocks in {len(group.steps)} steps, from {group.steps[0][0]} channels "
        f"to {group.steps[-1][0]}" if len(group.steps) > 1 else
        f"{group.the} has {len(group.widths)} blocks, all of {group.widths[0]} channels" for group in shown
    ]  # fmt: skip
    starts = [(group, [sum(d for _, d in group.steps[:i]) for i in range(len(group.steps))]) for group in shown]
    rows = [
        {"label": group.name, "block": block, "width": width, "step": sum(start < block for start in first)}
        for group, first in starts for block, width in enumerate(group.widths, 1)
    ]  # fmt: skip
    caption = "; ".join(said)
    return Picture("widths", "Width of each block", "", f"{caption[0].upper()}{caption[1:]}.", rows, draw)


def _write(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(data)
    os.replace(beside, path)  # a reader sees the old file or the new one, never half of it


def _save(picture: Picture, folder: Path) -> dict[str, Markup]:
    """Write a picture's PNG, SVG and CSV; returns its two layouts as SVG to be put into the page."""
    table = io.StringIO()
    writer = csv.DictWriter(table, picture.rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(picture.rows)
    _write(folder / f"{picture.name}.csv", table.getvalue().encode())
    inline = {}
    for layout in ("wide", "narrow"):
        # each SVG has ids of its own, as all of them share the page
        with style.context(["default", {**STYLE, "svg.hashsalt": f"{picture.name}-{layout}"}]):
            figure, svg, png = picture.draw(layout == "narrow"), io.BytesIO(), io.BytesIO()
            figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
            if layout == "wide":
                figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
                _write(folder / f"{picture.name}.svg", svg.getvalue())
                _write(folder / f"{picture.name}.png", png.getvalue())
        text = svg.getvalue().decode()
        box = re.search(r'viewBox="([^"]+)"', text)
        body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text[text.index(">", text.index("<svg")) + 1 :],
                      flags=re.DOTALL)  # fmt: skip
        body = re.sub(r' id="[a-z0-9]+(?:_[a-z0-9]+)*_\d+"', "", body)  # names of groups, which nothing refers to
        body = re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), body)
        tag = f'<svg class="{layout}" viewBox="{box[1]}" role="img" aria-labelledby="{picture.name}">'
        inline[layout] = Markup(tag + body)
    return inline


def write_report(runs: Sequence[Path], out: Path, title: str) -> Path:
    """Write the page of one run or of a comparison, and beside it ``figures/`` with PNG, SVG and CSV files.

    Args:
        runs: run folders, finished or not.
        out: the page to write, or the folder to write ``report.html`` in.
        title: its headline.

    Returns:
        The page: one HTML file that needs nothing else. The same runs give the same bytes.

    Raises:
        UserError: no run, or a folder that holds none.
    """
    if not runs:
        raise UserError("report: got no run folder, expected at least one")
    page = Path(out) / "report.html" if Path(out).is_dir() else Path(out)
    groups = group_runs([load_run(Path(run)) for run in runs])
    candidates = {
        "loss": figure_curves(groups, "loss", "Loss", ""),
        "top1": figure_curves(groups, "top1", "Top-1 accuracy", " %"),
        "shortcut-ratio": figure_shortcut_ratio(groups),
        "widths": figure_widths(groups),
    }
    folder = page.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for name, picture in candidates.items():
        if picture:
            pictures.append((picture, _save(picture, folder)))
        else:  # an earlier report's would be mistaken for this one's
            for kind in ("csv", "png", "svg"):
                (folder / f"{name}.{kind}").unlink(missing_ok=True)
    sentence, tiles = headline(groups)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    html = environment.from_string(PAGE).render(
        title=title, sentence=sentence, tiles=tiles, pictures=pictures, groups=groups,
        origins=_origins(groups), number=_number, count=_count, duration=_duration, speed=_speed,
    )  # fmt: skip
    _write(page, html.encode())
    return page


def _speed(run: Run) -> float | None:
    measured = [line["samples_per_second"] for line in run.epochs.values() if line.get("samples_per_second")]
    return run.summary.get("samples_per_second") or (statistics.median(measured) if measured else None)


def _origins(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The finished runs by where they ran: those of one commit, machine and set of versions together."""
    found: dict[str, dict[str, Any]] = {}
    for run in (run for group in groups for run in group.runs if run.summary):
        hardware, versions = run.summary.get("hardware") or {}, run.summary.get("versions") or {}
        place = {
            "Commit": run.summary.get("commit") or "not recorded",
            "Hardware": ", ".join(
                f"{value or 'none'} {key.replace('_gib', ' (GiB)')}" if isinstance(value, int | float)
                else f"{key.upper() if len(key) == 3 else key} {value or 'none'}" for key, value in hardware.items()),
            "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        }  # fmt: skip
        found.setdefault(json.dumps(place), {"place": place, "runs": []})["runs"].append(run)
    return list(found.values())


PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light; --ink: #1b222d; --soft: #5c6675; --line: #e2e6ec; --wash: #f6f8fa }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 62rem; padding: 2.5rem 1.25rem 4rem; background: #fff; color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  -webkit-text-size-adjust: 100% }
h1 { font-size: clamp(1.6rem, 5vw, 2.3rem); line-height: 1.15; letter-spacing: -.02em; margin: 0 0 .8rem; overflow-wrap: anywhere }
h2 { font-size: 1.25rem; letter-spacing: -.01em; margin: 3rem 0 .5rem }
p { margin: .5rem 0; max-width: 46rem }
.lead { font-size: 1.1rem; overflow-wrap: anywhere }
.soft, figcaption { color: var(--soft); font-size: .92rem }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .75rem; margin: 1.5rem 0 }
.tiles > div { background: var(--wash); border-left: 4px solid; border-radius: 4px; padding: .7rem .9rem; color: var(--ink) }
.tiles b { display: block; font-size: 1.5rem; line-height: 1.3; letter-spacing: -.01em; font-variant-numeric: tabular-nums }
.tiles span { color: var(--soft); font-size: .88rem; overflow-wrap: anywhere }
figure { margin: 1rem 0 }
figcaption { max-width: 46rem; margin-top: .4rem; color: var(--ink) }
svg { display: block; width: 100%; height: auto }
svg * { stroke-linejoin: round; stroke-linecap: butt }
svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif !important }
.narrow { display: none }
.scroll { overflow-x: auto; margin: .8rem 0; -webkit-overflow-scrolling: touch }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums }
th, td { padding: .45rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
thead th { color: var(--soft); font-weight: 600; border-bottom-color: #b9c1cc; vertical-align: bottom }
th:first-child { text-align: left; position: sticky; left: 0; background: #fff; padding-left: 0; font-weight: 600 }
.text { text-align: left; white-space: normal }
i { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .45em }
em { display: block; font: italic .85rem/1.3 system-ui, sans-serif; color: #9a3b00 }
code, pre { font: .85rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere }
pre { background: var(--wash); border-radius: 4px; padding: .8rem 1rem; overflow-x: auto }
dl { display: grid; grid-template-columns: 6.5rem 1fr; gap: .3rem 1rem; font-size: .92rem }
dt { color: var(--soft) } dd { margin: 0; overflow-wrap: anywhere }
summary { cursor: pointer; padding: .35rem 0 }
@media (max-width: 40rem) { body { padding-top: 1.5rem } .wide { display: none } .narrow { display: block }
  dl { grid-template-columns: 1fr; gap: 0 } dd { margin-bottom: .5rem } }
@media print { figure, tr { break-inside: avoid } }
</style>
</head>
<body>
{% macro swatch(group) %}<i style="background:{{ group.colour }}"></i>{{ group.name }}{% endmacro %}
<h1>{{ title }}</h1>
<p class="lead">{{ sentence }}</p>
{% if tiles %}
<div class="tiles">
{% for tile in tiles %}
<div style="border-color:{{ tile.colour }}"><span>{{ tile.name }}</span><b>{{ tile.value }}</b><span>{{ tile.note }}</span></div>
{% endfor %}
</div>
<p class="soft">Values are those after the last epoch, not of the best one; ± is the sample standard deviation over seeds.</p>
{% endif %}

<h2>Runs</h2>
<div class="scroll"><table>
<thead><tr><th>model</th><th>seed</th><th>blocks</th><th>layers</th><th>parameters</th><th>MACs</th>
<th>training<br>top-1 (%)</th><th>validation<br>top-1 (%)</th><th>validation<br>loss</th><th>time</th><th>images/s</th></tr></thead>
<tbody>
{% for group in groups %}{% for run in group.runs %}
<tr><th scope="row">{{ swatch(group) }}{% if not run.summary %}<em>unfinished: {{ run.last_epoch }} of {{ run.config.epochs or "?" }} epochs</em>{% endif %}</th>
<td>{{ run.seed }}</td><td>{{ run.summary.blocks or run.widths | length or "—" }}</td><td>{{ run.summary.layers or "—" }}</td>
<td>{{ count(run.summary.params) }}</td><td>{{ count(run.summary.macs) }}</td><td>{{ number(run.value("train_top1")) }}</td>
<td>{{ number(run.value("val_top1")) }}</td><td>{{ number(run.value("val_loss"), 3) }}</td><td>{{ duration(run.summary.seconds) }}</td>
<td>{{ number(speed(run), 1) }}</td></tr>
{% endfor %}{% endfor %}
</tbody></table></div>
<p class="soft">MACs are of one image. Time is that of the process that ended the run.
{% if origins | length > 1 %}The runs are not from one machine, commit and set of versions: do not compare their times.{% endif %}</p>

{% for picture, layouts in pictures %}
<h2 id="{{ picture.name }}">{{ picture.heading }}</h2>
{% if picture.about %}<p class="soft">{{ picture.about }}</p>{% endif %}
<figure>
{{ layouts.wide }}
{{ layouts.narrow }}
<figcaption>{{ picture.caption }}</figcaption>
</figure>
{% endfor %}

<h2>Complexity</h2>
<div class="scroll"><table>
<thead><tr><th>model</th><th class="text">steps (width × blocks)</th><th>blocks</th><th>layers</th><th>parameters</th><th>MACs</th></tr></thead>
<tbody>
{% for group in groups %}
<tr><th scope="row">{{ swatch(group) }}</th><td class="text">{% for width, depth in group.steps %}{{ width }}×{{ depth }}{{ ", " if not loop.last }}{% else %}—{% endfor %}</td>
<td>{{ group.widths | length or "—" }}</td><td>{{ group.fact("layers") or "—" }}</td><td>{{ count(group.fact("params")) }}</td><td>{{ count(group.fact("macs")) }}</td></tr>
{% endfor %}
</tbody></table></div>

<h2>Where the numbers come from</h2>
{% for origin in origins %}
<dl>
{% for name, value in origin.place.items() %}<dt>{{ name }}</dt><dd>{{ value or "not recorded" }}</dd>{% endfor %}
{% for run in origin.runs %}<dt>{{ "Command" if origin.runs | length == 1 else "Seed " ~ run.seed }}</dt><dd><code>{{ run.summary.command or "not recorded" }}</code></dd>{% endfor %}
</dl>
{% endfor %}
<p class="soft">The numbers of every figure are in <code>figures/</code> beside this page, as CSV, with the figures as SVG and PNG.</p>
{% for group in groups %}{% for run in group.runs %}
<details><summary>Recipe of {{ group.the }}, seed {{ run.seed }} (<code>{{ run.folder.name }}/config.yaml</code>)</summary><pre>{{ run.recipe_text }}</pre></details>
{% endfor %}{% endfor %}
</body>
</html>
"""
