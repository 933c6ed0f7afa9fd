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
from textwrap import fill
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
RESULTS = (("val_top1", "validation top-1", "\u00a0%", 1), ("val_loss", "validation loss", "", -1))  # 1: more is better
STYLE = {
    "axes.axisbelow": True,
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
    "legend.borderaxespad": 0.3,
    "legend.borderpad": 0.1,
    "legend.columnspacing": 1.2,
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
    def kind(self) -> str:
        """What the seeds of one model have in common: the rest of the recipe."""
        return json.dumps({k: v for k, v in self.config.items() if k != "seed"}, sort_keys=True, default=str)

    @property
    def widths(self) -> list[int]:
        """One width a block; known from the first measurement on."""
        return self.summary.get("widths") or next((line["widths"] for line in self.ratios.values()), [])

    def value(self, key: str) -> float | None:
        """The result or, while there is none, the latest value."""
        latest = (self.epochs[epoch].get(key) for epoch in sorted(self.epochs, reverse=True))
        return self.summary.get("metrics", {}).get(key, next((v for v in latest if v is not None), None))


@dataclass(frozen=True)
class Group:
    """The runs of one recipe and model: its seeds."""

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
            if run.summary and value is not None and math.isfinite(value):
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
    labels = {run.kind: run.summary["label"] for run in runs if run.summary.get("label")}
    kinds: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        label = labels.get(run.kind) or run.config.get("label") or run.config.get("name") or run.folder.name
        kinds.setdefault((str(run.summary.get("label") or label), run.kind), []).append(run)
    recipes = [members[0].config for members in kinds.values()]
    varied = [
        key
        for key in recipes[0]
        if key not in ("model", "baseline", "seed") and len({str(r.get(key)) for r in recipes}) > 1
    ]
    for suffixes in (
        [""] * len(kinds),
        [f" · {max(len(run.widths) for run in members) or '?'} blocks" for members in kinds.values()],
        [f" · {recipe.get('name')}" for recipe in recipes],
        [f" · {', '.join(f'{key} {recipe.get(key)}' for key in varied)}" for recipe in recipes],
        [f" · {number}" for number in range(1, len(kinds) + 1)],
    ):
        if len({label + suffix for (label, _), suffix in zip(kinds, suffixes)}) == len(kinds):
            break
    order = list(dict.fromkeys([STEPS, BASELINE, *(label for label, _ in kinds)]))  # these two keep their colours
    groups: list[Group] = []
    for ((label, _), members), suffix in zip(kinds.items(), suffixes):
        colour = COLOURS[order.index(label) % len(COLOURS)]
        dash = DASHES[sum(group.label == label for group in groups) % len(DASHES)]
        groups.append(Group(label, suffix, colour, dash, tuple(members)))
    return groups


def _join(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _sentence(*parts: str) -> str:
    return "; ".join(part for part in parts if part) + "."


def _number(value: float | None, digits: int = 2) -> str:
    return "—" if value is None else f"{value:.{digits}f}".replace("-", "−")


def _spread(values: Sequence[float], unit: str = "") -> str:
    """Mean ± sample standard deviation."""
    deviation = f"\u00a0±\u00a0{statistics.stdev(values):.2f}" if len(values) > 1 else ""
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
        return _sentence("No result yet", unfinished or "no run has a validation metric"), []
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
        words, tile = _difference(steps, base, key, sign, "\u00a0points" if unit else "")
        said.append(words)
        tiles += [tile] if tile else []
    if not said and len(finished) > 1:
        best = max(finished, key=lambda group: sign * statistics.fmean(group.results(key).values()))
        said.append(f"the best by its mean is {best.the}")
    return _sentence(f"The {what} is {_join(parts)}", *said, unfinished), tiles


def _value(value: float | None) -> float:
    return math.nan if value is None or math.isinf(value) else value  # nan is what a drawn line leaves out


def mean_curve(runs: Sequence[Run], key: str) -> dict[int, tuple[float, float, float]]:
    """By epoch: the mean, least and greatest value over the runs."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for epoch, line in run.epochs.items():
            if line.get(key) is not None:
                found.setdefault(epoch, []).append(_value(line[key]))
    return {epoch: (statistics.fmean(v), min(v), max(v)) for epoch, v in sorted(found.items())}


def _said(
    curves: Sequence[tuple[Group, dict[int, float]]], end: Callable[..., int], digits: int, unit: str = ""
) -> str:
    """Each group's value at the first (``end=min``) or last epoch (``max``), in words."""
    epochs = [end(curve) for _, curve in curves]
    when = ["before training" if epoch == 0 else f"after epoch {epoch}" for epoch in epochs]
    together = len(set(when)) == 1
    return _join(
        f"{_number(curve[epoch], digits)}{unit} for {group.the}" + ("" if together else f" ({moment})")
        for (group, curve), epoch, moment in zip(curves, epochs, when)
    ) + (f" {when[0]}" if together else "")


def _pairs(groups: Sequence[Group]) -> list[tuple[Group, Run]]:
    return [(group, run) for group in groups for run in group.runs]


def _rows(groups: Sequence[Group], lines: Callable[[Group, Run], Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {"label": group.name, "seed": run.seed, "run": run.folder.name, **line}
        for group, run in _pairs(groups)
        for line in lines(group, run)
    ]


def _panels(narrow: bool, count: int, columns: int, height: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """So many panels, in columns or, on a phone, one below the other."""
    columns = 1 if narrow else min(columns, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(3.7 if narrow else 7.8, 0.4 + height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    for ax in axes[:count]:
        ax.tick_params(labelleft=True, labelbottom=True)  # also where an axis is shared
    return figure, axes[:count]


def _legend_above(ax: Axes, title: str, handles: list[Any], names: list[str], columns: int) -> None:
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "alignment": "left", "handlelength": 1.3}
    ax.legend(handles, names, title=fill(title, 44), ncols=columns, **place)


def figure_curves(groups: Sequence[Group], quantity: str, heading: str, unit: str) -> Picture | None:
    """Training and validation ``loss`` or ``top1`` against the epoch; None when no run has recorded any."""
    panels = {f"train_{quantity}": "training", f"val_{quantity}": "validation"}
    found = {key: [(group, mean_curve(group.counted, key)) for group in groups] for key in panels}
    curves = {key: kept for key, lines in found.items() if (kept := [(g, curve) for g, curve in lines if curve])}
    if not curves:
        return None

    def draw(narrow: bool) -> Figure:
        figure, axes = _panels(narrow, len(curves), 2, 2.2 if narrow else 2.7, sharey=True)
        for ax, (key, lines) in zip(axes, curves.items()):
            ax.set(title=panels[key], xlabel="epoch", ylabel=heading.lower() + (f" ({unit.strip()})" if unit else ""))
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            for group, curve in lines:
                for run in group.runs if len(group.runs) > 1 else ():
                    one = mean_curve([run], key)
                    ax.plot(list(one), [v[0] for v in one.values()], color=group.colour, linewidth=0.7, alpha=0.5)
                epochs, (mean, low, high) = list(curve), zip(*curve.values())
                ax.fill_between(epochs, low, high, color=group.colour, alpha=0.15, linewidth=0)
                marker = "o" if len(epochs) == 1 else None
                ax.plot(epochs, mean, group.dash, color=group.colour, linewidth=1.9, marker=marker)
        names = [group.name.lstrip("_") for group in groups]  # a legend leaves out what begins with "_"
        handles = [Line2D([], [], color=g.colour, linestyle=g.dash, linewidth=1.9) for g in groups]  # type: ignore[arg-type]
        columns = max(1, (34 if narrow else 90) // (max(map(len, names)) + 6))
        figure.legend(handles, names, loc="outside upper left", ncols=columns)
        return figure

    said: list[str] = []
    for key, lines in curves.items():
        means = [(group, {epoch: v[0] for epoch, v in curve.items()}) for group, curve in lines]
        said.append(
            f"{'the' if said else 'The'} {panels[key]} {heading.lower()} is {_said(means, max, 1 if unit else 3, unit)}"
        )
    about = "Bold: the mean over seeds; thin: single seeds; the band reaches from the lowest to the highest seed."
    rows = _rows(
        groups,
        lambda _, run: (
            {"epoch": epoch, **{key: line.get(key) for key in curves}} for epoch, line in sorted(run.epochs.items())
        ),
    )
    several = any(len(group.runs) > 1 for group in groups)
    return Picture(quantity, heading, about if several else "", _sentence(*said), rows, draw)


def figure_shortcut_ratio(groups: Sequence[Group]) -> Picture | None:
    """γ against the depth at up to six epochs, a panel a group, as in Fig. 2; None when it was not measured."""
    curves: dict[str, dict[int, list[float]]] = {}
    for group in groups:
        measured = sorted({epoch for run in group.counted for epoch in run.ratios})
        if len(measured) > 6:  # the start, the first trained epoch, the last, and evenly between
            measured = [measured[0], *(measured[1 + round(i * (len(measured) - 2) / 4)] for i in range(5))]
        for epoch in measured:
            seeds = [run.ratios[epoch]["gamma"] for run in group.counted if epoch in run.ratios]
            means = [statistics.fmean(map(_value, gammas)) for gammas in zip(*seeds)]
            curves.setdefault(group.name, {})[epoch] = means
    shown = [group for group in groups if group.name in curves]
    if not shown:
        return None
    epochs = sorted({epoch for curve in curves.values() for epoch in curve})
    top = max(g for c in curves.values() for gammas in c.values() for g in [1.0, *gammas] if not math.isnan(g))

    def draw(narrow: bool) -> Figure:
        figure, axes = _panels(narrow, len(shown), 2, 2.7 if narrow else 3.0, sharex=True, sharey=True)
        for ax, group in zip(axes, shown):
            ax.set(xlabel="depth (0: input, 1: output)", ylabel="shortcut ratio γ", xlim=(0, 1), ylim=(0, 1.05 * top))
            handles: list[Any] = []
            for epoch, gammas in curves[group.name].items():
                colour = colormaps["viridis_r"](0.12 + 0.88 * epochs.index(epoch) / max(1, len(epochs) - 1))
                depth = [block / len(gammas) for block in range(len(gammas) + 1)]
                handles += ax.plot(depth, [1, *gammas], "-" if epoch else "--", color=colour, linewidth=1.5)
            names = [str(epoch) if epoch else "0 (untrained)" for epoch in curves[group.name]]
            _legend_above(ax, f"{group.name}, after epoch", handles, names, 3)
        return figure

    last_block = [(group, {epoch: gammas[-1] for epoch, gammas in curves[group.name].items()}) for group in shown]
    said = f"At the last block γ is {_said(last_block, max, 2)}"
    before = f"it is {_said(last_block, min, 2)}" if len(epochs) > 1 else ""
    rows = _rows(
        shown,
        lambda group, run: (
            {"epoch": epoch, "block": block, "depth": block / len(line["gamma"]), "width": width, "gamma": gamma}
            for epoch, line in sorted(run.ratios.items())
            if epoch in curves[group.name]
            for block, (width, gamma) in enumerate(zip(line["widths"], line["gamma"]), 1)
        ),
    )
    about = Markup(
        "γ<sub>l</sub> = σ<sub>0</sub>/σ<sub>l</sub> compares the spread of what enters the blocks with that of the "
        "features after block <i>l</i>. Where it nears zero, a block hardly sees the input and hardly sends gradient "
        "back to it. Depth is <i>l</i> over the number of blocks; in a hierarchical model each stage starts anew."
    )
    return Picture("shortcut-ratio", "Shortcut ratio", about, _sentence(said, before), rows, draw)


def figure_widths(groups: Sequence[Group]) -> Picture | None:
    """The width of every block, a row a group, coloured by step; None when no widths are known."""
    shown = [group for group in groups if group.widths]
    if not shown:
        return None
    blocks, widest = max(len(group.widths) for group in shown), max(max(group.widths) for group in shown)
    most = max(len(group.steps) for group in shown)

    def draw(narrow: bool) -> Figure:
        figure, axes = _panels(narrow, len(shown), 1, 1.75, sharex=True, sharey=True)
        for ax, group in zip(axes, shown):
            ax.set(xlabel="block", ylabel="width (channels)", xlim=(0.5, blocks + 0.5), ylim=(0, 1.05 * widest))
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            ax.grid(axis="x", visible=False)
            handles: list[Any] = []
            start = 1
            for number, (width, depth) in enumerate(group.steps):
                colour = colormaps["viridis_r"](0.2 + 0.75 * number / max(1, most - 1))
                ax.bar(range(start, start + depth), width, width=0.82, color=colour)
                handles, start = [*handles, Patch(color=colour)], start + depth
            names = [f"{width}×{depth}" for width, depth in group.steps]
            _legend_above(ax, f"{group.name}: width × blocks", handles, names, 3 if narrow else 8)
        return figure

    said = []
    for group in shown:
        steps, n = group.steps, len(group.widths)
        many = f"in {len(steps)} steps, from {steps[0][0]} channels in the first to {steps[-1][0]} in the last"
        said.append(f"{n} blocks " + (many if len(steps) > 1 else f"of {steps[0][0]} channels") + f" for {group.the}")
    rows = [
        {"label": group.name, "step": step, "block": block, "width": width}
        for group in shown
        for block, (step, width) in enumerate(
            ((step, width) for step, (width, depth) in enumerate(group.steps, 1) for _ in range(depth)), 1
        )
    ]
    return Picture("widths", "Width of each block", "", "There are " + _sentence(*said), rows, draw)


def _write(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(data)
        os.replace(beside, path)  # a reader sees the old file or the new one, never half of it
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def _save(picture: Picture, folder: Path) -> list[Markup]:
    """Write a picture's PNG, SVG and CSV; returns the SVG of both layouts, for the page."""
    table, inline = io.StringIO(), []
    writer = csv.DictWriter(table, picture.rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(picture.rows)
    _write(folder / f"{picture.name}.csv", table.getvalue().encode())
    for layout in ("wide", "narrow"):
        # a salt of its own keeps the ids of each SVG apart, as all of them share the page
        with style.context(["default", {**STYLE, "svg.hashsalt": f"{picture.name}-{layout}"}]):
            figure, svg, png = picture.draw(layout == "narrow"), io.BytesIO(), io.BytesIO()
            figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
            if layout == "wide":
                figure.set_layout_engine("none")  # it is laid out by now
                figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
                _write(folder / f"{picture.name}.svg", svg.getvalue())
                _write(folder / f"{picture.name}.png", png.getvalue())
        _, box, body = re.split(r'<svg[^>]* viewBox="([^"]+)"[^>]*>', svg.getvalue().decode())
        body = re.sub(r"(?s)<metadata>.*?</metadata>|<style.*?</style>", "", body)
        body = re.sub(r'(<g) id="[^"]*"', r"\1", body)  # names of groups, to which nothing refers
        body = re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), body)
        inline.append(
            Markup(f'<svg class="{layout}" viewBox="{box}" role="img" aria-labelledby="{picture.name}">{body}')
        )
    return inline


def _speed(run: Run) -> float | None:
    measured = [line["samples_per_second"] for line in run.epochs.values() if line.get("samples_per_second")]
    return run.summary.get("samples_per_second") or (statistics.median(measured) if measured else None)


def _table_of_runs(groups: Sequence[Group]) -> list[dict[str, Any]]:
    rows = []
    for group, run in _pairs(groups):
        get = run.summary.get
        results = [_number(run.value("val_top1")), _number(run.value("train_top1")), _number(run.value("val_loss"), 3)]
        size = (get("blocks") or len(run.widths) or "—", get("layers", "—"), _count(get("params")), _count(get("macs")))
        cells = [run.seed, *results, *size, _duration(get("seconds")), _number(_speed(run), 1)]
        note = f"unfinished: {max(run.epochs, default=0)} of {run.config.get('epochs', '?')} epochs"
        rows.append({"group": group, "cells": cells, "note": "" if run.summary else note})
    return rows


def _table_of_models(groups: Sequence[Group]) -> list[dict[str, Any]]:
    rows = []
    for group in groups:
        steps = ", ".join(f"{width}×{blocks}" for width, blocks in group.steps) or "—"
        cells = [steps, len(group.widths) or "—", group.fact("layers") or "—"]
        rows.append({"group": group, "cells": [*cells, _count(group.fact("params")), _count(group.fact("macs"))]})
    return rows


def _origins(groups: Sequence[Group]) -> list[tuple[dict[str, str], list[tuple[Group, Run]]]]:
    """The finished runs, those of one commit, machine and set of versions together."""
    found: dict[tuple[str, ...], list[tuple[Group, Run]]] = {}
    for group, run in _pairs(groups):
        if run.summary:
            machine, versions = run.summary.get("hardware") or {}, run.summary.get("versions") or {}
            hardware = [f"{key.replace('_gib', ' in GiB')}: {value or 'none'}" for key, value in machine.items()]
            numbers = [f"{name} {number}" for name, number in versions.items()]
            place = (str(run.summary.get("commit") or ""), ", ".join(hardware), ", ".join(numbers))
            found.setdefault(place, []).append((group, run))
    return [(dict(zip(("Commit", "Hardware", "Versions"), place)), runs) for place, runs in found.items()]


def write_report(runs: Sequence[Path], out: Path, title: str) -> Path:
    """Write the page of one run or of a comparison, and beside it ``figures/`` with PNG, SVG and CSV files.

    Args:
        runs: run folders, finished or not.
        out: the page to write, or an existing folder to write ``report.html`` in.
        title: the page's.

    Returns:
        The page: one HTML file that needs nothing else. The same runs give the same bytes.

    Raises:
        UserError: no run, a folder that holds none, or a place that cannot be written.
    """
    if not runs:
        raise UserError("report: got no run folder, expected at least one")
    out = Path(out)
    page = out / "report.html" if out.is_dir() else out
    groups = group_runs([load_run(Path(run)) for run in runs])
    candidates = {
        "loss": figure_curves(groups, "loss", "Loss", ""),
        "top1": figure_curves(groups, "top1", "Top-1 accuracy", "\u00a0%"),
        "shortcut-ratio": figure_shortcut_ratio(groups),
        "widths": figure_widths(groups),
    }
    for name in (name for name, picture in candidates.items() if picture is None):
        for kind in ("csv", "png", "svg"):  # an earlier report's would be taken for this one's
            (page.parent / "figures" / f"{name}.{kind}").unlink(missing_ok=True)
    sentence, tiles = headline(groups)
    html = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE)
    text = html.render(
        title=title,
        sentence=sentence,
        tiles=tiles,
        pictures=[(picture, _save(picture, page.parent / "figures")) for picture in candidates.values() if picture],
        groups=groups,
        runs=_table_of_runs(groups),
        models=_table_of_models(groups),
        origins=_origins(groups),
    )
    _write(page, text.encode())
    return page


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
body { margin: 0 auto; max-width: 64rem; padding: 2.5rem 1.25rem 4rem; background: #fff; color: var(--ink);
  overflow-wrap: anywhere; -webkit-text-size-adjust: 100% }
body, svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif !important }
body { font-size: 16px; line-height: 1.55 }
h1 { font-size: clamp(1.6rem, 5vw, 2.3rem); line-height: 1.15; letter-spacing: -.02em; margin: 0 0 .8rem }
h2 { font-size: 1.25rem; letter-spacing: -.01em; margin: 3rem 0 .5rem }
p { margin: .5rem 0; max-width: 47rem }
.lead { font-size: 1.1rem }
.soft { color: var(--soft); font-size: .92rem }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .75rem; margin: 1.5rem 0 }
.tiles > div { background: var(--wash); border-left: 4px solid; border-radius: 4px; padding: .7rem .9rem }
.tiles b { display: block; font-size: 1.35rem; line-height: 1.4; font-variant-numeric: tabular-nums }
.tiles span { color: var(--soft); font-size: .88rem }
figure { margin: 1rem 0 }
figcaption { max-width: 47rem; margin-top: .4rem; font-size: .95rem }
svg { display: block; width: 100%; height: auto }
svg * { stroke-linejoin: round; stroke-linecap: butt }
.narrow { display: none }
.scroll { overflow-x: auto; margin: .8rem 0 }
table { border-spacing: 0; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums }
th, td { padding: .45rem .5rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
thead th { color: var(--soft); border-color: #b9c1cc; vertical-align: bottom; font-weight: 600; white-space: normal;
  overflow-wrap: normal }
th:first-child { text-align: left; position: sticky; left: 0; background: #fff; padding-left: 0; font-weight: 600;
  white-space: normal; min-width: 7.5rem }
.models th:nth-child(2), .models td:nth-child(2) { text-align: left; white-space: normal; min-width: 10rem }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .45em }
em { display: block; font-size: .82rem; font-weight: 400; color: #9a3b00 }
code, pre { font: .85rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
pre { background: var(--wash); border-radius: 4px; padding: .8rem 1rem; overflow-x: auto; white-space: pre-wrap }
dl { display: grid; grid-template-columns: 9rem 1fr; gap: .3rem 1rem; font-size: .92rem }
dt { color: var(--soft) }
dd { margin: 0 }
summary { cursor: pointer; padding: .35rem 0 }
@media (max-width: 40rem) {
  body { padding-top: 1.5rem }
  .wide { display: none }
  .narrow { display: block }
  dl { display: block }
  dd { margin-bottom: .5rem }
}
@media print { figure, tr { break-inside: avoid } }
</style>
</head>
<body>
{% macro table(kind, columns, rows) %}
<div class="scroll" tabindex="0"><table class="{{ kind }}">
<thead><tr>{% for column in columns %}<th scope="col">{{ column }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr><th scope="row"><span class="dot" style="background:{{ row.group.colour }}"></span>{{ row.group.name }}
{%- if row.note %}<em>{{ row.note }}</em>{% endif %}</th>
{%- for cell in row.cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}
<h1>{{ title }}</h1>
<p class="lead">{{ sentence }}</p>
{% if tiles %}
<div class="tiles">
{% for tile in tiles %}
<div style="border-color:{{ tile.colour }}"><span>{{ tile.name }}</span><b>{{ tile.value }}</b>
<span>{{ tile.note }}</span></div>
{% endfor %}
</div>
<p class="soft">Results are those of the last epoch, not of the best one; ± is the sample standard deviation over
seeds.</p>
{% endif %}

<h2>Runs</h2>
{{ table("runs", ["model", "seed", "validation top-1 %", "training top-1 %", "validation loss", "blocks", "layers",
  "parameters", "MACs", "time", "images/s"], runs) }}
<p class="soft">MACs are those of one image; time is that of the process that ended the run.
{% if origins | length > 1 %}
The runs are not all of one machine, commit and set of versions, so their times do not compare.
{% endif %}
</p>

{% for picture, layouts in pictures %}
<h2 id="{{ picture.name }}">{{ picture.heading }}</h2>
{% if picture.about %}<p class="soft">{{ picture.about }}</p>{% endif %}
<figure>
{{ layouts | join }}
<figcaption>{{ picture.caption }}</figcaption>
</figure>
{% endfor %}

<h2>Complexity</h2>
{{ table("models", ["model", "steps (width × blocks)", "blocks", "layers", "parameters", "MACs"], models) }}

<h2>Where the numbers come from</h2>
{% for place, made in origins %}
<dl>
{% for name, value in place.items() %}<dt>{{ name }}</dt><dd>{{ value or "not recorded" }}</dd>
{% endfor %}
{% for group, run in made %}
<dt>{{ group.name }}, seed {{ run.seed }}</dt><dd><code>{{ run.summary.command or "not recorded" }}</code></dd>
{% endfor %}
</dl>
{% endfor %}
{% for group in groups %}
{% for run in group.runs %}
<details><summary>Recipe of {{ group.the }}, seed {{ run.seed }}</summary><pre>{{ run.recipe_text }}</pre></details>
{% endfor %}
{% endfor %}
<p class="soft">Each figure is in the folder <code>figures</code> beside this page as SVG and PNG, and its numbers as
CSV.</p>
</body>
</html>
"""
