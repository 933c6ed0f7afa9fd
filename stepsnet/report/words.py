"""Results in words, computed from the numbers that they speak of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from .runs import BASELINE, STEPS, Group

RESULTS = (  # 1: more is better
    ("val_top1", "validation top-1", "\u00a0%", 1),
    ("val_miou", "validation mIoU", "\u00a0%", 1),
    ("val_box_ap", "validation box AP", "\u00a0%", 1),
    ("val_perplexity", "validation perplexity", "", -1),
    ("val_loss", "validation loss", "", -1),
)


def join(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def sentence_of(*parts: str) -> str:
    return "; ".join(part for part in parts if part) + "."


def number(value: float | None, digits: int = 2) -> str:
    return "—" if value is None else f"{value:.{digits}f}".replace("-", "−")


def spread(values: Sequence[float], unit: str = "") -> str:
    """Mean ± sample standard deviation."""
    deviation = f"\u00a0±\u00a0{statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return number(statistics.mean(values)) + deviation + unit


def count(value: float | None) -> str:
    """Parameters and MACs as 1.23 M."""
    if value is None:
        return "—"
    size, unit = next(((s, u) for s, u in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= s), (1, ""))
    return f"{value / size:.2f} {unit}" if unit else str(value)


def duration(seconds: float | None) -> str:
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
        note = f"paired over seeds {join(map(str, seeds))}, better in {wins} of {len(pairs)}"
        note += ", within the spread of the seeds" if abs(mean) <= statistics.stdev(pairs) else ""
    size = spread([math.copysign(1, mean) * pair for pair in pairs], points)
    verdict = f"{better.the} is better by {size}" if mean else f"{steps.the} and {base.the} are equal"
    name = f"{steps.name} − {base.name}"
    value = ("+" if mean > 0 else "") + spread(pairs, points)
    return f"{verdict} ({note})", {"name": name, "value": value, "note": note, "colour": "#5c6675"}


def headline(groups: Sequence[Group]) -> tuple[str, list[dict[str, str]]]:
    """What came out, in one sentence and as tiles: every group's result, and the paired differences."""
    finished = [group for group in groups if any(run.summary for run in group.runs)]
    result = next((r for r in RESULTS if finished and all(group.results(r[0]) for group in finished)), None)
    waiting = [f"seed {run.seed} of {group.the}" for group in groups for run in group.runs if not run.summary]
    unfinished = f"unfinished: {join(waiting)}" if waiting else ""
    if result is None:
        return sentence_of("No result yet", unfinished or "no run has a validation metric"), []
    key, what, unit, sign = result
    ours, theirs = ([group for group in finished if group.label == label] for label in (STEPS, BASELINE))
    alone = len(ours) == len(theirs) == 1
    pairs = [(s, b) for s in ours for b in theirs if alone or s.suffix == b.suffix]
    if len(finished) > 6:  # more than a sentence holds; the table below has all
        ordered = sorted(finished, key=lambda group: sign * statistics.fmean(group.results(key).values()))
        ends = (f"{spread(list(g.results(key).values()), unit)} for {g.the}" for g in (ordered[-1], ordered[0]))
        sentence = f"Of {len(finished)} models the {what} is best with {' and worst with '.join(ends)}"
        differences = [_difference(steps, base, key, sign, "\u00a0points" if unit else "")[1] for steps, base in pairs]
        return sentence_of(sentence, unfinished), [tile for tile in differences if tile]
    parts, said, tiles = [], [], []
    for group in finished:
        values = list(group.results(key).values())
        value, note = spread(values, unit), f"{len(values)} seeds" if len(values) > 1 else "one seed"
        parts.append(f"{value} for {group.the} ({note})")
        tiles.append({"name": group.name, "value": value, "note": f"{what}, {note}", "colour": group.colour})
    for steps, base in pairs:
        words, tile = _difference(steps, base, key, sign, "\u00a0points" if unit else "")
        said.append(words)
        tiles += [tile] if tile else []
    if not said and len(finished) > 1:
        best = max(finished, key=lambda group: sign * statistics.fmean(group.results(key).values()))
        said.append(f"the best by its mean is {best.the}")
    return sentence_of(f"The {what} is {join(parts)}", *said, unfinished), tiles
