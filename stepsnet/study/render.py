"""The results of a study as a table, verdicts and a figure; partial results say how many of the runs have ended."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from matplotlib.figure import Figure

from ..metrics import find_metric
from ..output.colors import OKABE_ITO, OKABE_ITO_AGAIN
from ..output.markdown import markdown_table
from ..output.summary_stats import format_mean_std, percent
from ..report.figure import in_style, make_panels, scale_by_size
from ..report.words import count, number
from .declare import Cell, Study
from .results import flatness_of, modules_of
from .run_plan import choice_of, diverged_everywhere, progress
from .verdict import Judged, finals_of, judge_study

__all__ = [
    "as_p_value",
    "doubts_about",
    "draw_study",
    "known",
    "on_other_machines",
    "remarks_on",
    "render_study",
    "rows_of",
]

Results = Mapping[str, Mapping[str, Any]]


def rows_of(study: Study, results: Results) -> list[dict[str, Any]]:
    """Return one row per cell: its model, the rate that was chosen, and the values of its final runs.

    Values are in the order of ``seeds``, with None for a seed that has none, such as one that diverged.
    """
    rows = []
    for cell in study.cells:
        choice, finals = choice_of(study, cell, results), finals_of(study, cell, results)
        tuned = [record for record in results.values() if _is_tuning(record, cell)]
        chosen = [record for record in tuned if choice and record["variant"] == choice.variant]
        facts: Mapping[str, Any] = next((r for r in [*finals.values(), *chosen, *tuned] if "macs" in r), {})
        trained = [record for record in finals.values() if record.get("metrics")]
        moved = [flatness_of(study, record) for record in trained]
        tried: dict[str, list[float | None]] = {}
        for record in tuned:
            tried.setdefault(f"{record['variant']} {record['rate']:g}".strip(), []).append(_tuned_value(study, record))
        rows.append(
            {
                "contender": study.contender(cell.contender).title,
                "point": cell.point,
                **{key: facts.get(key) for key in ("blocks", "params", "macs")},
                "rate": choice.rate if choice else None,
                "variant": choice.variant if choice else None,
                "at_edge": choice.at_edge if choice else None,
                "diverged_everywhere": diverged_everywhere(study, cell, results),
                "seeds": list(finals),
                "test": _values(finals, f"{study.scored_on}_{study.metric}"),
                "val": _values(finals, f"{study.tuned_on}_{study.metric}"),
                "clean_loss": _values(finals, "train_clean_loss"),
                "clean_top1": _values(finals, "train_clean_top1"),
                "moved": max(known(moved)) if moved and None not in moved else None,
                "tried": tried,  # the values with each seed, by variant and rate
            }
        )
    return rows


def render_study(study: Study, results: Results) -> str:
    """Return Markdown: how many runs have ended, the cells, the rates that were tried, and the verdicts."""
    there, total = progress(study, results)
    rows = rows_of(study, results)
    name = find_metric(study.metric).name
    each = f", mean over {len(study.tuning.seeds)} seeds" if len(study.tuning.seeds) > 1 else ""
    note = (
        "Mean ± sample standard deviation over the final seeds; the last column is of the seed whose loss moved most. "
        f"{name[:1].upper()}{name[1:]} in tuning, on the held-out split, by rate{each}:"
    )
    tried = [f"- {line}" for line in _tried(study, rows)] or ["- none yet"]
    lines = [f"{there} of {total} runs have ended.", "", _cells_table(study, rows), "", note, "", *tried]
    outcome = judge_study(study, results)
    if study.criteria:
        lines += ["", _criteria_table(study, outcome.criteria)]
    for claim in outcome.claims:
        lines += ["", f"**{claim.verdict}**: {claim.text}"]
    return "\n".join([*lines, *remarks_on(study, results)])


def remarks_on(study: Study, results: Results) -> list[str]:
    """Return what readers of any table of a study must know, as lines of Markdown after an empty one: how contenders,
    counts, modules and rules differ, and on which machines and from which commits the runs were made."""
    remarks = [*_unequal(study), *_counted_anew(study, results), *_of_changed_modules(results)]
    remarks += _no_longer_declared(study, results)
    lines = ["", *(f"- {remark}" for remark in remarks)] if remarks else []
    if any("hardware" in record for record in results.values()):
        lines += ["", _made_with(results.values()), *on_other_machines(study, results)]
    return lines


def _unequal(study: Study) -> list[str]:
    """A line for each contender whose compute or training differs from the others' at its points."""
    return [f"{one.title} is not like the others: {one.unequal}" for one in study.contenders if one.unequal]


def _counted_anew(study: Study, results: Results) -> list[str]:
    """A line for each cell whose runs record different compute, since the count or the model was changed meanwhile."""
    found: dict[tuple[str, int, str], set[int]] = {}
    for record in results.values():
        if "macs" in record:
            found.setdefault((record["contender"], record["point"], record["variant"]), set()).add(record["macs"])
    return [
        f"The runs of {study.contender(name).title} at {point} {study.point} record {count(min(macs))} to "
        f"{count(max(macs))} MACs: the way of counting, or the model, was changed while the study went on."
        for (name, point, _), macs in found.items()
        if len(macs) > 1
    ]


def _of_changed_modules(results: Results) -> list[str]:
    """A line for each user module that was not the same for all runs."""
    lines = []
    for module, versions in modules_of(results.values()).items():
        if len({*chain(*versions)}) > 1:
            runs = ", ".join(f"{count} with {' and then '.join(of_run)}" for of_run, count in versions.items())
            lines.append(f"The module {module} was changed while the study went on; runs: {runs}.")
    return lines


def _no_longer_declared(study: Study, results: Results) -> list[str]:
    """A line for each criterion or claim that final runs were started under but that is no longer declared."""
    declared = {*map(study.rule, study.criteria), *(claim.sentence for claim in study.claims)}
    noted = (rule for record in results.values() for key in ("criteria", "sentences") for rule in record.get(key, []))
    return [f"No longer declared: {rule}" for rule in sorted({*noted} - declared)]


def _made_with(records: Iterable[Mapping[str, Any]]) -> str:
    """The machines, versions of torch and commits that any of these runs, or a part of one, was made with."""
    parts = [part for record in records for part in _parts(record)]
    machines, torch = sorted(set(map(_machine, parts))), sorted(set(map(_torch, parts)))
    # a plus marks a tree that was changed since
    recorded = {part.get("commit") or "unknown" for part in parts}
    commits = sorted({f"{commit[:7]}{'+' * commit.endswith('+')}" for commit in recorded})
    return f"{', '.join(machines)}; torch {', '.join(torch)}; commit {', '.join(commits)}."


def _parts(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A run's last part, and earlier ones if it went on with something else; none for an old record that diverged."""
    return [part for part in (record, *record.get("trained_before", [])) if "hardware" in part]


def _machine(part: Mapping[str, Any]) -> str:
    return part["hardware"].get("gpu") or part["hardware"].get("cpu", "unknown")


def on_other_machines(study: Study, results: Results) -> list[str]:
    """Lines that name the criteria with pairs of runs made on two kinds of machine, or with two versions of torch,
    whose rounding differs."""
    found: dict[str, list[str]] = {}
    for one in study.criteria:
        left, right = (finals_of(study, study.cell(text, one.name), results) for text in (one.left, one.right))
        pairs = [(left[seed], right[seed]) for seed in study.seeds if seed in left and seed in right]
        for what, of in (("kinds of machine", _machine), ("versions of torch", _torch)):
            unlike = sum(len({of(part) for record in pair for part in _parts(record)}) > 1 for pair in pairs)
            if unlike:
                found.setdefault(what, []).append(f"{one.name} ({unlike} of {len(pairs)} pairs)")
    return [
        f"\nPairs of runs from two {what}, whose rounding differs: {'; '.join(names)}." for what, names in found.items()
    ]


def _torch(part: Mapping[str, Any]) -> str:
    return part.get("versions", {}).get("torch", "unknown")


def _cells_table(study: Study, rows: Sequence[Mapping[str, Any]]) -> str:
    metric = find_metric(study.metric)
    unit = f" ({metric.unit})" if metric.unit else ""
    with_top1 = any(known(row["clean_top1"]) for row in rows)
    headers = [
        "contender",
        "point" if study.point == "blocks" else study.point,
        "blocks",
        "parameters",
        "MACs",
        "rate",
        "seeds",
    ]
    headers += [f"test {metric.name}{unit}", f"held-out {metric.name}{unit}", "train loss, clean"]
    headers += [*["train accuracy, clean (%)"] * with_top1, f"loss moved in the last {percent(study.flatness.share)}"]
    cells = []
    for row in rows:
        rate = "–" if row["rate"] is None else f"{row['variant']} {row['rate']:g}".strip()
        rate += f" ({'a variant is ' if row['variant'] else ''}at the edge of its grid)" * bool(row["at_edge"])
        scores = [_mean_std(row["test"], metric.spec), _mean_std(row["val"], metric.spec)]
        scores += [_mean_std(row["clean_loss"], ".3f"), *[_mean_std(row["clean_top1"], ".1f")] * with_top1]
        moved = "–" if row["moved"] is None else f"{row['moved']:.2%}"
        moved += " (too much)" * (row["moved"] is not None and row["moved"] >= study.flatness.within)
        size = [row["blocks"] or "–", count(row["params"]), count(row["macs"])]
        diverged = row["test"].count(None)
        seeds = f"{len(row['seeds'])}, {diverged} diverged and not in the means" if diverged else len(row["seeds"])
        seeds = "diverged at every rate" if row["diverged_everywhere"] else seeds
        cells.append([row["contender"], row["point"], *size, rate, seeds, *scores, moved])
    return markdown_table(headers, cells, "l" + "r" * (len(headers) - 1))


def _criteria_table(study: Study, judgements: Sequence[Judged]) -> str:
    metric = find_metric(study.metric)
    unit = f" ({metric.difference_unit.strip()})" if metric.difference_unit else ""
    cells = []
    for criterion, judged in zip(study.criteria, judgements):
        expected = criterion.expect.replace("_", " ") + (f", margin {criterion.margin:g}" if criterion.margin else "")
        spec = f".{metric.decimals + 1}f"  # one digit more, for an interval
        mean, interval, p = "–", "–", "–"
        if judged.mean is not None:
            mean = number(judged.mean, spec)
            interval = f"{number(judged.low, spec)} to {number(judged.high, spec)} ({percent(criterion.level)})"
            p = as_p_value(judged.p)
        verdict = judged.verdict + judged.explained
        cells.append([criterion.name, criterion.left, criterion.right, expected, mean, interval, p, verdict])
    headers = ["criterion", "left", "right", "expected", f"difference{unit}", "interval", "p", "verdict"]
    return markdown_table(headers, cells, "llllrrrl")


def as_p_value(p: float | None) -> str:
    """Format p with two digits and no exponent."""
    return "–" if p is None else "below 0.0001" if p < 1e-4 else f"{float(f'{p:.2g}'):f}".rstrip("0").rstrip(".")


def draw_study(study: Study, results: Results) -> Figure | None:
    """Draw the test metric and the loss on clean training samples against the points, one curve per contender.

    A contender at a single point is a marker. A marker is hollow where something is in doubt, which the title names:
    see :func:`doubts_about`. Bands and bars reach from the lowest to the highest of at least two seeds. Returns None
    without a final run.
    """
    rows = [row for row in rows_of(study, results) if known(row["test"])]
    if not rows:
        return None
    metric = find_metric(study.metric)
    name, unit = metric.name, metric.unit
    panels = [("test", f"test {name}" + (f" ({unit})" if unit else ""))]
    panels += (
        [("clean_loss", "loss on training samples, clean")] if any(known(row["clean_loss"]) for row in rows) else []
    )
    points = sorted({row["point"] for row in rows})
    by_compute = any(row["blocks"] not in (None, row["point"]) for row in rows)  # then a point is not the depth
    of_first = f"compute, in {study.point} of {study.contenders[0].title}"
    labels = [contender.title for contender in study.contenders]
    there, all_of = progress(study, results)
    with in_style():
        figure, axes = make_panels(False, len(panels), 2, 2.9)
        for ax, (key, title) in zip(axes, panels):
            ax.set(xlabel=of_first if by_compute else study.point, ylabel=title)
            scale_by_size(ax, points)
            for place, label in enumerate(labels):
                of_label = sorted(
                    (r for r in rows if r["contender"] == label and known(r[key])), key=lambda r: r["point"]
                )
                if not of_label:
                    continue
                aside = 2 ** ((place + 0.5) / len(labels) - 0.5) if len(points) == 1 else 1  # so as not to overlap
                colour, x = OKABE_ITO_AGAIN[place % len(OKABE_ITO_AGAIN)], [row["point"] * aside for row in of_label]
                values = [known(row[key]) for row in of_label]
                low, high, several = list(map(min, values)), list(map(max, values)), [len(v) > 1 for v in values]
                ax.fill_between(x, low, high, where=several, color=colour, alpha=0.15)
                beside = [any(pair) for pair in zip([False, *several], [*several[1:], False])]
                for i in range(len(x)):
                    if several[i] and not beside[i]:  # a band needs two points
                        ax.vlines(x[i], low[i], high[i], color=colour, alpha=0.5)
                more = place >= len(OKABE_ITO)
                marker = "os"[more] if len(study.contenders[place].points) > 1 else "Dsv^P*X"[place % 7]
                line = marker + ("--" if more else "-")
                means = [statistics.fmean(v) for v in values]
                ax.plot(x, means, line, color=colour, label=label, markersize=4)
                hollow = [i for i, row in enumerate(of_label) if doubts_about(study, row)]
                at = [x[i] for i in hollow], [means[i] for i in hollow]
                ax.plot(*at, marker, color=colour, mfc="white", markersize=4)
        remarks = [f"{there} of {all_of} runs"] * (there < all_of)
        remarks += ["from the lowest to the highest seed"] * (len(study.seeds) > 1)
        kinds = dict.fromkeys(kind for row in rows for kind in doubts_about(study, row))
        axes[0].set_title("; ".join(remarks) + f"\nhollow: {', '.join(kinds)}" * bool(kinds))
        handles = {text: handle for ax in axes for handle, text in zip(*ax.get_legend_handles_labels())}
        figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=min(len(handles), 3))
    return figure


def doubts_about(study: Study, row: Mapping[str, Any]) -> dict[str, str]:
    """Why a cell's mean is not yet that of sound final runs with all seeds: kinds of reasons, each with its details.

    Args:
        row: of :func:`rows_of`, with at least one final run.
    """
    ran, values = len(row["seeds"]), known(row["test"])
    doubts = {}
    if ran < len(study.seeds):
        doubts["seeds missing"] = f"{ran} of {len(study.seeds)} seeds"
    if 0 < len(values) < ran:
        doubts["seeds diverged"] = f"{ran - len(values)} of {ran} diverged"
    if row["at_edge"]:
        doubts["rate at an edge"] = f"rate{' of a variant' * bool(row['variant'])} at an edge"
    if values and row["moved"] is None:
        doubts["convergence unknown"] = "convergence unknown"
    elif values and row["moved"] >= study.flatness.within:
        doubts["not converged"] = "not converged"
    return doubts


def _is_tuning(record: Mapping[str, Any], cell: Cell) -> bool:
    return record["kind"] == "tuning" and (record["contender"], record["point"]) == (cell.contender, cell.point)


def _tuned_value(study: Study, record: Mapping[str, Any]) -> float | None:
    return record.get("metrics", {}).get(f"{study.tuned_on}_{study.metric}")


def known(values: Iterable[float | None]) -> list[float]:
    """The values of the seeds that have one."""
    return [value for value in values if value is not None]


def _values(finals: Mapping[int, Mapping[str, Any]], key: str) -> list[float | None]:
    return [record.get("metrics", {}).get(key) for record in finals.values()]


def _mean_std(values: Sequence[float | None], spec: str) -> str:
    return format_mean_std(known(values), spec) if known(values) else "–"


def _mean(values: Sequence[float | None], seeds: int, spec: str) -> str:
    """The mean of the runs at one rate; as in choosing a rate, one that diverged outweighs the others."""
    trained = known(values)
    if len(trained) < len(values):
        return "diverged"
    waiting = f" ({len(values)} of {seeds} seeds)" if len(values) < seeds else ""
    return number(statistics.fmean(trained), spec) + waiting


def _tried(study: Study, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    spec = find_metric(study.metric).spec
    lines = []
    for row in rows:
        if row["tried"]:
            in_order = sorted(row["tried"].items(), key=lambda item: (item[0].split()[:-1], float(item[0].split()[-1])))
            tried = (f"{rate}: {_mean(values, len(study.tuning.seeds), spec)}" for rate, values in in_order)
            lines.append(f"{row['contender']}, {row['point']} {study.point}: {', '.join(tried)}")
    return lines
