"""Results in words, computed from the numbers that the sentences state."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..metrics import METRICS, SPLIT_NAMES, Metric, find_metric, higher_is_better, metric_label
from ..output.summary_stats import format_count, format_mean_std, percent
from .load_runs import BASELINE, STEPS, Group, comparable
from .t_interval import tested

__all__ = [
    "count",
    "duration",
    "join",
    "key_in_words",
    "mean_std",
    "number",
    "pairs",
    "result_metric",
    "sentence",
    "summarize_results",
    "typeset",
    "updates_in_words",
    "values_in_words",
]

Tile = dict[str, str]  # name, value, note, color
_LEVEL = 0.95  # of the intervals, as in a study by default
_MAX_IN_A_SENTENCE = 6  # models; more are in the tables
_DIFFERENT = "differ in their data or length of training, so no difference between their results is stated"


def join(parts: Iterable[str]) -> str:
    """a, b and c"""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def sentence(*parts: str) -> str:
    """The parts that are not empty, as one sentence."""
    return "; ".join(part for part in parts if part) + "."


def typeset(text: str) -> str:
    """A number with a real minus sign, and with spaces at which no line breaks."""
    return text.replace("-", "−").replace(" ", "\u00a0")


def number(value: float | None, spec: str = ".2f") -> str:
    return "—" if value is None else typeset(f"{value:{spec}}")


def mean_std(values: Sequence[float], metric: Metric) -> str:
    """Mean ± sample standard deviation with the metric's unit."""
    return typeset(format_mean_std(values, metric.spec, metric.unit))


def count(value: float | None) -> str:
    """Parameters and MACs as 1.23 M."""
    return "—" if value is None else format_count(value)


def key_in_words(key: str) -> str:
    """A key of the facts about hardware, with its unit."""
    return key.replace("_gib", " in GiB")


def updates_in_words(part: Mapping[str, Any]) -> str:
    """Which updates a part of a run made; in an earlier version's summary a part says only where it ends."""
    begun, until = part.get("from_update", 0), part["until_update"]
    if not begun:
        return f"until update {until}"
    return f"update {until}" if until == begun + 1 else f"updates {begun + 1} to {until}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "—"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def values_in_words(values: Sequence[tuple[Group, int, float]], show: Callable[[float], str]) -> str:
    """Put triples (group, epoch, value) in words: "1 for A and 2 for B after epoch 3"."""
    times = ["after epoch " + str(epoch) if epoch else "before training" for _, epoch, _ in values]
    one_time = len(set(times)) == 1
    return join(
        f"{show(value)} for {group.the}" + ("" if one_time else f" ({time})")
        for (group, _, value), time in zip(values, times)
    ) + (f" {times[0]}" if one_time else "")


def result_metric(groups: Sequence[Group], split: str = "val") -> Metric | None:
    """The metric by which these models are compared: the first that all have on the split; None for several tasks."""
    if len({group.task for group in groups}) > 1:
        return None
    candidates = [metric for metric in METRICS.values() if metric.is_headline or metric.key == "loss"]
    return next((m for m in candidates if groups and all(group.results(f"{split}_{m.key}") for group in groups)), None)


def summarize_results(groups: Sequence[Group], split: str = "val") -> tuple[str, list[Tile]]:
    """The results in one sentence per task and as tiles: one per group, and one per paired difference."""
    if len(tasks := dict.fromkeys(group.task for group in groups)) > 1:
        of_tasks = [summarize_results([group for group in groups if group.task == task], split) for task in tasks]
        return " ".join(words for words, _ in of_tasks), [tile for _, tiles in of_tasks for tile in tiles]
    finished = [group for group in groups if any(run.summary for run in group.runs)]
    without = [(run, f"seed {run.seed} of {group.the}") for group in groups for run in group.runs if not run.summary]
    waiting = [name for run, name in without if run.diverged is None]
    gone = [f"{name} at update {run.diverged}" for run, name in without if run.diverged is not None]
    listed = {"not finished": waiting, "diverged and left out of the means": gone}
    unfinished = "; ".join(f"{what}: {join(names)}" for what, names in listed.items() if names)
    metric = result_metric(finished, split)
    if metric is None:
        return sentence("No result yet", unfinished or f"no run has a {SPLIT_NAMES[split]} metric"), []
    name = metric_label(key := f"{split}_{metric.key}")
    differences = [_difference(steps, base, key) for steps, base in pairs(finished)]
    difference_tiles = [tile for _, tile in differences if tile]
    if len(finished) > _MAX_IN_A_SENTENCE:
        if not comparable(finished):
            return sentence(f"The {len(finished)} models {_DIFFERENT}", unfinished), difference_tiles
        best, worst = _best(finished, key), _best(finished, key, worst=True)
        ends = " and worst for ".join(f"{g.the}, {mean_std(_values(g, key), metric)}" for g in (best, worst))
        return sentence(f"Of {len(finished)} models, the {name} is best for {ends}", unfinished), difference_tiles
    parts, tiles = [], []
    for group in finished:
        values = _values(group, key)
        value, note = mean_std(values, metric), f"{len(values)} seeds" if len(values) > 1 else "one seed"
        parts.append(f"{value} for {group.the} ({note})")
        tiles.append({"name": group.name, "value": value, "note": f"{name}, {note}", "color": group.color})
    conclusions = [words for words, _ in differences]
    if not conclusions and len(finished) > 1:
        best_mean = f"the best mean is that of {_best(finished, key).the}"
        conclusions.append(best_mean if comparable(finished) else f"they {_DIFFERENT}")
    return sentence(f"The {name} is {join(parts)}", *conclusions, unfinished), tiles + difference_tiles


def _values(group: Group, key: str) -> list[float]:
    return list(group.results(key).values())


def _best(groups: Sequence[Group], key: str, worst: bool = False) -> Group:
    choose = max if higher_is_better(key) != worst else min
    return choose(groups, key=lambda group: statistics.fmean(_values(group, key)))


def pairs(groups: Sequence[Group]) -> list[tuple[Group, Group]]:
    """Each StepsNet with its baseline of the same task, data and length of training.

    It is the only baseline, if there is also only one StepsNet; otherwise the baseline with the same recipe name; if
    several have it, the one in the same comparison's folder; and in a sweep, where each recipe has a name of its own,
    the one with the same suffix.
    """
    of_label = [[group for group in groups if group.label == label] for label in (STEPS, BASELINE)]
    keys: list[Callable[[Group], Any]] = [
        lambda group: (group.trained_on, group.recipe),
        lambda group: (group.trained_on, group.recipe, {run.folder.absolute().parent for run in group.runs}),
        lambda group: (group.trained_on, group.suffix),
    ]
    if all(len(of_one) == 1 for of_one in of_label):
        keys = [lambda group: group.trained_on]
    found: dict[str, Group] = {}  # by the name of the StepsNet
    for key in keys:
        taken = {*found, *(base.name for base in found.values())}
        steps, baselines = ([group for group in of_one if group.name not in taken] for of_one in of_label)
        for one in steps:
            ours, theirs = ([group for group in of_one if key(group) == key(one)] for of_one in (steps, baselines))
            if len(ours) == len(theirs) == 1:
                found[one.name] = theirs[0]
    return [(group, found[group.name]) for group in of_label[0] if group.name in found]


def _difference(steps: Group, base: Group, key: str) -> tuple[str, Tile | None]:
    """The paired difference over the seeds that both have, tested as in a study: in words and as a tile.

    In words, mean and interval are of how much better the one with the better mean is; the tile has those of the values
    themselves, StepsNet minus baseline.
    """
    metric = find_metric(key)
    a, b = (group.results(key) for group in (steps, base))
    seeds = [seed for seed in a if seed in b]
    if not seeds:
        return f"{steps.the} and {base.the} have no seed in common, so there is no paired difference", None
    differences = [a[seed] - b[seed] for seed in seeds]
    mean, unit, both = statistics.fmean(differences), metric.difference_unit, f"{steps.the} and {base.the}"
    equal = all(math.isclose(a[seed], b[seed], rel_tol=1e-9) for seed in seeds)  # up to rounding
    better = steps if (mean > 0) == metric.higher_is_better else base
    spec = f"z.{metric.decimals + (len(seeds) > 1)}f"  # one digit more for an interval, as in a study
    amount, over = number(abs(mean), spec) + typeset(unit), f"paired over seeds {join(map(str, seeds))}"
    mean_of = f"{better.the} has the {'higher' if metric.higher_is_better else 'lower'} mean, by {amount}"
    if len(seeds) == 1:
        alone = "one seed each" if len(a) == len(b) == 1 else f"only seed {seeds[0]} in common"
        words = f"{both} are equal" if equal else f"the difference is {amount} in favour of {better.the}"
        notes = [f"{alone}, which decides nothing"] * 2
    elif equal:
        words, notes = f"{both} are equal", [over] * 2
    elif (found := tested(differences, _LEVEL))[3] is None:
        words = f"{mean_of}, but the two are not told apart"
        notes = [f"{over}, the same difference with each"] * 2
    else:
        low, high = found[1:3]
        ends = (low, high) if mean >= 0 else (-high, -low)
        interval = f"{percent(_LEVEL)} interval"
        notes = [f"{interval} {number(x, spec)} to {number(y, spec)}, {over}" for x, y in (ends, (low, high))]
        words = f"{better.the} is better by {amount}"
        if low <= 0 <= high:
            is_seen = float(f"{mean:{spec}}") != 0
            words = f"{mean_of}, but the two are not told apart" if is_seen else f"{both} have the same mean"
    value = typeset(format_mean_std(differences, ("" if equal else "+") + metric.spec, unit, metric.spec))
    tile = {"name": f"{steps.name} minus {base.name}", "value": value, "note": notes[1], "color": "#5c6675"}
    return f"{words} ({notes[0]})", tile
