"""Tables of training runs: results/FOLDER/*.json, and what ``stepsnet analyze`` printed about them."""

from __future__ import annotations

import dataclasses
import json
import statistics
from typing import Any

from render_parts import FIGURES, RESULTS, mean_difference, mean_std, origin, read_study, table_of_numbers

from stepsnet.metrics import find_metric, format_metric, metric_label
from stepsnet.output.markdown import markdown_table
from stepsnet.output.summary_stats import format_mean_std, percent
from stepsnet.paper.tables import all_rows, printed_rows
from stepsnet.plan import steps_as_text, steps_of
from stepsnet.recipes import ablations
from stepsnet.report.t_interval import tested
from stepsnet.report.words import join
from stepsnet.runs.compare import summarize
from stepsnet.study.declare import Claim, Contender, Criterion, Flatness, Study, Tuning
from stepsnet.study.leaderboard import leaderboard
from stepsnet.study.render import as_p_value, draw_study, on_other_machines, render_study
from stepsnet.study.run_plan import progress
from stepsnet.study.verdict import finals_of, judge, judge_study, unsound


def results_table(folder: str, control: str | None = None, difference_of_control: str = "") -> str:
    """Mean ± sample standard deviation over the seeds, the paired difference, and where it was run.

    The runs of ``control``, which differ in ``difference_of_control``, follow below the difference.
    """
    runs, controls = runs_of((folder,)), runs_of((control,) if control else ())
    summary = summarize(runs)
    keys = _shown_metrics(runs[0], summary["difference"])

    def formatted(found: dict) -> list[str]:
        return [mean_std(found[key]["values"], key) for key in keys]

    rows = []
    for label in ("StepsNet", "baseline"):
        mine = [run for run in runs if run["label"] == label]
        first, minutes = mine[0], statistics.median(run["seconds"] for run in mine) / 60
        name = ", ".join(filter(None, (label, steps_as_text(steps_of(first["widths"])))))
        rows.append([name, *_size(first), *formatted(summary[label]), f"{minutes:.1f}"])
    difference_cells = [mean_difference(summary["difference"][key]["values"], key) for key in keys]
    rows.append(["paired difference", "", "", "", "", *difference_cells, ""])
    for run in controls:
        name = f"*{run['label']}, {difference_of_control}* (seed {run['seed']})"
        values = [format_metric(key, run["metrics"][key]) for key in keys]
        rows.append([name, *_size(run), *values, f"{run['seconds'] / 60:.1f}"])
    if constant := runs[0].get("commonest_class"):
        values = [format_metric(key, constant[key.removeprefix("val_")]) for key in keys]
        rows.append([f"*{constant['name']} everywhere*", "", "", "", "", *values, ""])
    headers = ["", "blocks", "layers", "params", "MACs", *(metric_label(key) for key in keys), "minutes"]
    seeds, versions = ", ".join(map(str, summary["seeds"])), runs[0]["versions"]
    commits = ", ".join(sorted({str(run["commit"]) for run in [*runs, *controls]}))
    hardware = runs[0]["hardware"]
    which = f"Seeds {seeds}, mean ± sample standard deviation" if "," in seeds else f"Seed {seeds} only"
    note = (
        f"{which}, after {runs[0]['epochs']} epochs; "
        f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} thread per run; "
        f"Python {versions['python']}, torch {versions['torch']}, timm {versions['timm']}; commit {commits}. "
        f"The runs are in {' and '.join(f'`results/{name}/`' for name in (folder, control) if name)}."
    )
    return f"{table_of_numbers(headers, rows)}\n\n{note}"


def _shown_metrics(run: dict, found: dict) -> list[str]:
    """The metrics that are columns for a run's task."""
    if "val_perplexity" in found:
        return ["train_loss", "val_loss", "val_perplexity"] + ["val_word_perplexity"] * (run["vocab_size"] > 256)
    if "val_miou" in found:
        return ["val_miou", "val_macc", "val_pixel_accuracy"]
    if "val_box_ap" in found:
        return ["train_loss", "val_box_ap", "val_box_ap50", "val_mask_ap", "val_mask_ap50"]
    return ["train_top1", "val_top1"]


def _size(run: dict) -> list[str]:
    return [run["blocks"], run["layers"], f"{run['params'] / 1e6:.2f}M", f"{run['macs'] / 1e6:.1f}M"]


def depth_table(*folders: str) -> str:
    """StepsNet and its baseline at every depth."""
    runs = runs_of(folders)
    headers = ["blocks", "layers", "params", "baseline", "StepsNet", "paired difference"]
    headers += ["training: baseline", "StepsNet"]
    rows = []
    for blocks in sorted({run["blocks"] for run in runs}):
        ours, theirs = (
            [run for run in runs if run["blocks"] == blocks and run["label"] == label]
            for label in ("StepsNet", "baseline")
        )
        validation, training = (
            [mean_std(list(by_seed(group, key).values()), key) for group in (theirs, ours)]
            for key in ("val_top1", "train_top1")
        )
        size = [blocks, ours[0]["layers"], f"{ours[0]['params'] / 1e6:.2f}M"]
        rows.append([*size, *validation, difference(ours, theirs), *training])
    return f"{markdown_table(headers, rows, 'r' * len(headers))}\n\n{where_run(runs, folders)}"


# rows of Tables 9 and 10 that are rows of Table 8 too
SAME = {"depths_0_0_12": "steps_1", "depths_12_6_6": "steps_3", "narrow_to_wide": "steps_3"}


def grid_table(folder: str, table: str) -> str:
    """A table of the paper in small: one row per recipe, paired differences to the first, and the paper's accuracy."""
    runs, printed = runs_of((folder,)), {row["row"]: row["top1"] for row in printed_rows(table)}
    keys = {"training": "train_top1", "training loss": "train_loss", "validation": "val_top1"}
    headers = ["", "widths × blocks", "blocks", "params", "MACs", *keys, *(f"{name}, over the first" for name in keys)]
    rows = []
    first: list[dict] = []
    for short, title in _titles_of_rows(table).items():
        mine = [run for run in runs if run["recipe"].endswith("/" + SAME.get(short, short))]
        of_runs = [mean_std(list(by_seed(mine, key).values()), key) for key in keys.values()]
        over = [difference(mine, first, key) if first else "" for key in keys.values()]
        one, first = mine[0], first or mine
        size = [one["blocks"], f"{one['params'] / 1e6:.2f}M", f"{one['macs'] / 1e6:.1f}M"]
        rows.append([title, steps_as_text(steps_of(one["widths"])), *size, *of_runs, *over, f"{printed[title]}%"])
    note = f"{where_run(runs, (folder,))} The last column is the paper's Table {table}."
    return f"{markdown_table([*headers, 'paper'], rows, 'll' + 'r' * 10)}\n\n{note}"


def _titles_of_rows(table: str) -> dict[str, str]:
    """The recipes of a table of the paper, without their folder, and the titles of their rows."""
    start = f"Table {table}, "
    found = [recipe for recipe in ablations.RECIPES.values() if recipe.title.startswith(start)]
    return {recipe.name.partition("/")[2]: recipe.title.removeprefix(start) for recipe in found}


def digits_table() -> str:
    """The deep pair on digits, beside a wide plain network of similar compute and logistic regression."""
    deep = runs_of(("digits-deep",))
    wide = [run for run in runs_of(("digits-ablations",)) if run["recipe"].endswith("/steps_1")]
    simple = json.loads((RESULTS / "benchmarks" / "logistic_regression.json").read_text(encoding="utf-8"))
    kinds = {
        "StepsNet": [run for run in deep if run["label"] == "StepsNet"],
        "plain, as deep": [run for run in deep if run["label"] == "baseline"],
        "plain, wide and shallow": wide,
    }
    rows = []
    for name, runs in kinds.items():
        accuracies = [mean_std(list(by_seed(runs, key).values()), key) for key in ("train_top1", "val_top1")]
        size = [f"{runs[0]['params'] / 1e6:.2f}M", f"{runs[0]['macs'] / 1e6:.1f}M"]
        rows.append([name, steps_as_text(steps_of(runs[0]["widths"])), *size, *accuracies])
    accuracies = [format_metric(key, value) for key, value in simple["metrics"].items()]
    rows.append(["logistic regression on the pixels", "", simple["params"], "", *accuracies])
    headers = ["", "widths × blocks", "params", "MACs", "training accuracy", "validation accuracy"]
    notes = [where_run(deep, ("digits-deep",)), where_run(wide, ("digits-ablations",)), origin(simple)]
    return "\n".join([markdown_table(headers, rows, "llrrrr"), "", *(f"- {note}" for note in notes)])


def analysis_table(file: str, table: str) -> str:
    """Tables 6 and 7 over the seeds of a model, beside the paper's."""
    result = json.loads((RESULTS / "analysis" / file).read_text(encoding="utf-8"))
    rows = result["rows"]
    (papers,) = (row["top1"] for row in printed_rows("8") if row["row"] == "3 steps")  # Steps-DeiT-S as it is
    printed = [row["top1"] for row in all_rows() if row["table"] == table]
    whole = rows[0]["metrics"]["top1"]
    done = [key for key in rows[0] if key not in ("metrics", "blocks")]
    table_rows = []
    for row, theirs in zip(rows, [papers] * (len(rows) - len(printed)) + printed, strict=True):
        change = [value - before for value, before in zip(row["metrics"]["top1"], whole)]
        cells = [mean_std(row["metrics"]["top1"], "top1"), format_mean_std(change, ".1f"), f"{theirs - papers:+.1f}"]
        table_rows.append([*(row[key] for key in done), *cells])
    headers = [*done, "top-1", "change", "the paper's change"]
    note = f"Mean ± sample standard deviation of {len(whole)} runs, points of accuracy. {origin(result)}"
    return f"{markdown_table(headers, table_rows, 'l' * len(done) + 'rrr')}\n\n{note}"


def paper_depths() -> str:
    """Table 5a's accuracies."""
    found = {(row["row"].split(" ")[0], row["blocks"]): row["top1"] for row in printed_rows("5a")}
    depths = sorted({blocks for _, blocks in found})
    headers = ["the paper's Table 5a, ImageNet", *(f"{blocks} blocks" for blocks in depths)]
    rows = [[name, *(f"{found[name, blocks]}%" for blocks in depths)] for name in ("DeiT", "Steps-DeiT")]
    return table_of_numbers(headers, rows)


def runs_of(folders: tuple[str, ...]) -> list[dict]:
    paths = [path for folder in folders for path in sorted((RESULTS / folder).glob("*.json"))]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def where_run(runs: list[dict], folders: tuple[str, ...]) -> str:
    seeds = ", ".join(map(str, sorted({run["seed"] for run in runs})))
    commits = ", ".join(sorted({str(run["commit"]) for run in runs}))
    hardware, versions = runs[0]["hardware"], runs[0]["versions"]
    return (
        f"Seeds {seeds}, mean ± sample standard deviation, after {runs[0]['epochs']} epochs; {hardware['cpu']}, "
        f"{hardware['threads']} thread per run; torch {versions['torch']}, timm {versions['timm']}; commit {commits}. "
        f"The runs are in {', '.join(f'`results/{folder}/`' for folder in folders)}."
    )


def by_seed(runs: list[dict], key: str) -> dict[int, float]:
    return {run["seed"]: run["metrics"][key] for run in runs}


def difference(ours: list[dict], theirs: list[dict], key: str = "val_top1") -> str:
    """The paired difference over the seeds that both have."""
    a, b = by_seed(ours, key), by_seed(theirs, key)
    pairs = [a[seed] - b[seed] for seed in sorted(a) if seed in b]
    return format_mean_std(pairs, f"+{find_metric(key).spec}", std_spec=find_metric(key).spec)


def study_keys() -> str:
    """The keys of a declaration with their defaults and descriptions."""
    of = {
        "": Study,
        "contenders": Contender,
        "tuning": Tuning,
        "flatness": Flatness,
        "criteria": Criterion,
        "claims": Claim,
    }
    rows = []
    for group, cls in of.items():
        for name, field in cls.__pydantic_fields__.items():
            key = f"{group}.{name}" if group else name
            rows.append(
                [f"`{key}`", "to be given" if field.is_required() else f"`{_default(field)}`", field.description]
            )
    return markdown_table(["key", "default", "what it is"], rows, "lll")


def _default(field: Any) -> str:
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Flatness):
        return "below"
    default = round(default, 3) if isinstance(default, float) else default
    return "()" if default == () else json.dumps(default)


def leaderboard_table(name: str) -> str:
    """A declared study with one row per contender, and its figure once a final run has ended."""
    study, results = read_study(name)
    if not results:
        designs = "; ".join(contender.label or contender.name for contender in study.contenders)
        return f"None of its {progress(study, results)[1]} runs has ended yet. Declared are: {designs}."
    drawn = draw_study(study, results) is not None
    return leaderboard(study, results) + ("\n\n" + _figure_line(study) if drawn else "")


def study_figure(name: str) -> None:
    study, results = read_study(name)
    figure = draw_study(study, results)
    if figure is not None:
        figure.savefig(FIGURES / f"{study.folder}.png", dpi=150)


def _figure_line(study: Study) -> str:
    metric = find_metric(study.metric).name
    return f"![Test {metric} by {study.point}, a curve a contender](figures/{study.folder}.png)"


def _has_curve(study: Study, results: dict) -> bool:
    """Whether a contender has final runs at two points."""
    cells = [cell.contender for cell in study.cells if finals_of(study, cell, results)]
    return len(set(cells)) < len(cells)


def verdicts_table(*names: str) -> str:
    """The criteria of studies that have a verdict: one row each, and how many are open."""
    rows, notes = [], []
    levels: set[float] = set()
    of_rows: list[float] = []
    for name in names:
        study, results = read_study(name)
        metric = find_metric(study.metric)
        spec = f"+.{metric.decimals + 1}f"  # as the page of the study has it
        asked_of = {criterion.name: criterion for criterion in study.criteria}
        levels |= {criterion.level for criterion in study.criteria}
        judged = [one for one in judge_study(study, results).criteria if one.verdict != "not yet"]
        for one in judged:
            between = f"{one.low:{spec}} to {one.high:{spec}}" if one.low is not None else ""
            mean = f"{one.mean:{spec}}{metric.difference_unit}" if one.mean is not None else ""
            asked = f"{one.name} (`{name}`, {len(study.seeds)} seeds)"
            verdict = f"**{one.verdict}**{one.explained}"
            rows.append([asked, mean, between, as_p_value(one.p), f"{asked_of[one.name].margin:g}", verdict])
            of_rows.append(asked_of[one.name].level)
        there, all_of = progress(study, results)
        if there < all_of:
            notes.append(
                f"- `{name}`: {there} of {all_of} runs have ended; {len(study.criteria) - len(judged)} of "
                f"{len(study.criteria)} criteria have no verdict yet."
            )
    of_all = f"{percent(min(levels))} " if len(levels) == 1 else ""
    for row, level in zip(rows, of_rows):
        row[2] += f" ({percent(level)})" if row[2] and not of_all else ""
    headers = ["asked", "difference", f"{of_all}interval", "p", "margin", "verdict"]
    return "\n".join([markdown_table(headers, rows, "lrrrrl"), *([""] if notes else []), *notes])


def differences_table(name: str, *pairs: str) -> str:
    """Paired differences of a study's cells, whether or not a criterion asks for them: ``LEFT-RIGHT``, or
    ``LEFT-RIGHT/LEFT-RIGHT`` for how much larger the first of two differences is.

    ``level=0.99`` among the pairs sets the level of the intervals, which is 0.95 by default. Below the table stands
    which of the differences remain if that level is corrected for their number.
    """
    study, results = read_study(name)
    metric = find_metric(study.metric)
    level = next((float(text.removeprefix("level=")) for text in pairs if text.startswith("level=")), 0.95)
    rows, doubts, compared = [], dict[str, None](), dict[Criterion, None]()
    found: dict[str, float | None] = {}  # p by the pair
    for pair in (text for text in pairs if not text.startswith("level=")):
        criteria = [_criterion(text) for text in pair.split("/")]
        sides = [_paired(study, criterion, results) for criterion in criteria]
        compared |= dict.fromkeys(criteria)
        for _, about in sides:
            doubts |= about
        values = sides[0][0]
        if len(sides) == 2:
            values = tuple(first - second for first, second in zip(values, sides[1][0], strict=True))
            cells = [side.replace("-", " minus ") for side in pair.split("/")]
        else:
            cells = pair.split("-")
        mean, low, high, p = tested(values, level)
        found[" against ".join(cells)] = p
        spec = f"+.{metric.decimals}f"
        rows.append([*cells, f"{mean:{spec}}", f"{low:{spec}} to {high:{spec}}", as_p_value(p)])
    headers = ["cell", "against", f"difference{metric.difference_unit and f' ({metric.difference_unit.strip()})'}"]
    table = markdown_table([*headers, f"{percent(level)} interval", "p"], rows, "llrrr")
    notes = ["", _corrected(found, level)] if len(found) > 1 else []
    notes += ["", "Of these cells,", *doubts] if doubts else []
    of_these = dataclasses.replace(study, criteria=tuple(compared))
    return "\n".join([table, *notes, *on_other_machines(of_these, results)])


def _corrected(found: dict[str, float | None], level: float) -> str:
    """Which of the differences remain if the level is corrected for their number (Bonferroni), by their p."""
    least = (1 - level) / len(found)
    remaining = [pair for pair, p in found.items() if p is not None and p < least]
    return (
        f"Corrected for there being {len(found)} differences (Bonferroni, at {percent(level)}: p below "
        f"{least:.2g}), {join(remaining) if remaining else 'none'} remain{'s' * (len(remaining) < 2)}."
    )


def _criterion(pair: str) -> Criterion:
    """A criterion that asks for the difference ``LEFT-RIGHT``."""
    left, right = pair.split("-")
    return Criterion(name=f"{left} against {right}", left=left, right=right)


def _paired(study: Study, criterion: Criterion, results: dict) -> tuple[tuple[float, ...], dict[str, None]]:
    """The differences of two cells by seed, and lines on what makes them doubtful."""
    cells = [study.cell(text, "differences") for text in (criterion.left, criterion.right)]
    judged = judge(study, criterion, results)
    if judged.mean is None:
        raise ValueError(f"{criterion.name}: {judged.reason}, expected cells whose runs have ended")
    doubts = dict[str, None]()
    if judged.p is None:
        doubts[f"- the seeds of {criterion.left} and {criterion.right} do not differ"] = None
    if reason := unsound(study, cells, [finals_of(study, cell, results) for cell in cells], results):
        doubts[f"- {reason}"] = None
    return judged.differences, doubts


def answers_table(*names: str) -> str:
    """One row per declared study: what it asks, how many of its runs have ended, and what can be said so far."""
    rows = []
    for name in names:
        study, results = read_study(name)
        there, all_of = progress(study, results)
        said = [
            f"**{one.verdict}**: {one.text}"
            if one.verdict in ("for", "against")
            else f'"{claim.text.removesuffix(".")}": **{one.verdict}**'
            for claim, one in zip(study.claims, judge_study(study, results).claims)
        ]
        rows.append([f"`{name}`", study.question, f"{there} of {all_of}", " ".join(said)])
    return markdown_table(["study", "question", "runs", "result so far"], rows, "llrl")


def study_table(name: str) -> str:
    """A declared study, as far as its runs have ended."""
    study, results = read_study(name)
    if not results:
        return "No run has ended yet."
    note = f"One thread per run. The runs are in `results/{study.folder}/`, each with its command."
    figure = [_figure_line(study)] if _has_curve(study, results) else []
    return "\n\n".join([render_study(study, results), *figure, note])
