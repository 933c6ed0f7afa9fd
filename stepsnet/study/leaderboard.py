"""A study by contender: its score at each point and what it costs; what has not been run is stated."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from ..analysis.design_costs import stream_traffic
from ..metrics import find_metric
from ..output.markdown import markdown_table
from ..output.summary_stats import format_mean_std
from ..output.terminal import counted
from ..report.words import count, join
from ..residual import DESIGNS
from ..settings.config import ModelSpec
from .declare import Cell, Contender, Study
from .render import doubts_about, known, remarks_on, rows_of
from .run_plan import a_final, choice_of, progress, recipe_of

__all__ = ["leaderboard"]

_STEPS, _PLAIN = "arXiv 2511.14329", "arXiv 1603.05027"


def leaderboard(study: Study, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return Markdown with one row per contender: the best at one point first, then those with a seed that diverged,
    and last those without results there.

    That point is the last at which all have ended, or else the one with the most results. Costs are those at that
    point, of the variant that tuning has chosen: parameters and MACs of a contender's runs, and the traffic of the
    residual stream relative to the first contender's. A contender that is not declared there has no costs.
    """
    rows = {(row["contender"], row["point"]): row for row in rows_of(study, results)}
    points = sorted({cell.point for cell in study.cells})
    ended = [
        point for point in points if all(_has_ended(study, rows.get((one.title, point))) for one in study.contenders)
    ]
    results_at = {point: sum(len(row["seeds"]) for (_, at), row in rows.items() if at == point) for point in points}
    ranked_at = ended[-1] if ended else max(points, key=lambda point: (results_at[point], point))
    metric = find_metric(study.metric)
    (there, total), first = progress(study, results), study.contenders[0]

    def place(contender: Contender) -> tuple[int, float]:
        row = rows.get((contender.title, ranked_at), {"test": [], "seeds": []})
        values = known(row["test"])
        mean = statistics.fmean(values) * (-1 if metric.higher_is_better else 1) if values else math.inf
        has_diverged = None in row["test"]  # worse than any score
        return 2 if not row["seeds"] else int(has_diverged), mean

    def traffic_of(contender: Contender) -> float | None:
        return _traffic(_model(study, contender, ranked_at, results)) if ranked_at in contender.points else None

    of_first, lines = traffic_of(first), []
    for contender in sorted(study.contenders, key=place):
        scores = [_score(study, rows.get((contender.title, point)), metric.spec) for point in points]
        rate, sizes = "–", ["–"] * 3  # not declared
        if row := rows.get((contender.title, ranked_at)):
            traffic = traffic_of(contender)
            relative = f"{traffic / of_first:.2f}" if traffic and of_first else "–"
            sizes = [count(row["params"]), count(row["macs"]), relative]
            rate = "–" if row["rate"] is None else f"{row['rate']:.2g}"
        model = _model(study, contender, max(contender.points), results)
        lines.append([contender.title, *scores, rate, *sizes, _source(model)])
    unit = f" ({metric.unit})" if metric.unit else ""
    headers = ["design", *(f"{point} {study.point}" for point in points)]
    headers += ["rate", "parameters", "MACs", "traffic", "source"]
    note = (
        f"Test {metric.name}{unit}, mean ± sample standard deviation over {len(study.seeds)} seeds; {there} of {total} "
        f"runs have ended. The order, rates and costs are those at {ranked_at} {study.point}; traffic is that of the "
        f"residual stream, as a multiple of {first.title}'s."
    )
    table = markdown_table(headers, lines, "l" + "r" * (len(headers) - 2) + "l")
    return "\n".join([table, "", note, *_diverged_in_tuning(study, results), *remarks_on(study, results)])


def _diverged_in_tuning(study: Study, results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines for the rates at which contenders diverged, which no score shows."""
    found: dict[str, dict[str, None]] = {}  # each rate once, whichever of its seeds diverged
    for record in sorted(results.values(), key=lambda record: (record["point"], record["rate"])):
        if record["kind"] == "tuning" and record.get("diverged"):
            place = f"{study.contender(record['contender']).title} at {record['point']} {study.point}"
            found.setdefault(place, {})[f"{record['variant']} {record['rate']:.2g}".strip()] = None
    places = "; ".join(f"{place} with {join(list(rates))}" for place, rates in found.items())
    return ["", f"Diverged in tuning, by rate: {places}."] if found else []


def _has_ended(study: Study, row: Mapping[str, Any] | None) -> bool:
    """Whether a cell's final runs have ended; a cell that is not declared has none."""
    return row is None or row["diverged_everywhere"] or len(row["seeds"]) == len(study.seeds)


def _score(study: Study, row: Mapping[str, Any] | None, spec: str) -> str:
    if row is None:
        return "–"  # not declared
    if row["diverged_everywhere"]:
        return "diverged"
    if not row["seeds"]:
        tuned = sum(map(len, row["tried"].values()))
        return f"in tuning, {counted(tuned, 'run')}" if tuned else "not yet run"
    values, doubts = known(row["test"]), doubts_about(study, row).values()
    score = format_mean_std(values, spec) if values else "diverged"
    return f"{score} ({', '.join(doubts)})" if doubts else score


def _model(study: Study, contender: Contender, point: int, results: Mapping[str, Any]) -> ModelSpec:
    """The contender's model; that of its first variant if none has been chosen yet."""
    cell = Cell(contender.name, point)
    choice = choice_of(study, cell, results)
    return recipe_of(study, a_final(study, cell, choice.variant if choice else contender.tried[0])).model


def _is_ours(model: ModelSpec) -> bool:
    """Whether ``widths``, ``depths`` and ``residual`` are a StepsNet's; in other models they mean other things."""
    return model.name.startswith(("steps_", "test_steps_"))


def _listed(value: Any) -> Any:
    """A StepsNet's widths or depths as a list: a language model takes an integer in place of a list of one."""
    return [value] if isinstance(value, int) else value


def _design(model: ModelSpec) -> str:
    return model.args.get("residual") or "plain"


def _traffic(model: ModelSpec) -> float | None:
    """Numbers read and written between the branches per token; None if the model is not ours, widths or depths are not
    declared, each stage has its own, or the design does not state its traffic."""
    if not _is_ours(model) or not {"widths", "depths"} <= model.args.keys() or _has_stages(model):
        return None
    widths, depths = _listed(model.args["widths"]), _listed(model.args["depths"])
    of_stream = stream_traffic(widths, depths, _design(model), model.args.get("residual_options"))
    return None if of_stream is None else of_stream * max(widths) * sum(depths)


def _source(model: ModelSpec) -> str:
    """The source of the design; unknown for models that are neither ours nor made by stepify or grow."""
    design, widths = DESIGNS.get(str(_design(model))), _listed(model.args.get("widths"))
    of_design = [] if design is None else [design.source.split(",")[0]]
    if model.name in ("stepify", "grow"):
        return ", ".join([_STEPS] * (model.args.get("steps", 3) != 1) + of_design) or "–"
    if not _is_ours(model):  # nor are its widths a StepsNet's
        return ", ".join(of_design) or "–"
    stages: Any = widths if _has_stages(model) else [widths or ()]
    in_steps = not widths or any(len(set(stage)) > 1 for stage in stages)  # the families' default widths are in steps
    return ", ".join([_STEPS] * in_steps + of_design) or _PLAIN


def _has_stages(model: ModelSpec) -> bool:
    """Whether the widths are nested, one list per stage, as for Swin and ResNet."""
    return any(isinstance(stage, (list, tuple)) for stage in _listed(model.args.get("widths")) or ())
