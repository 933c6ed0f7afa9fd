"""What the results support: paired differences with t-intervals, and a verdict for each criterion and claim."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ..metrics import find_metric, higher_is_better, metric_label
from ..output.summary_stats import percent
from ..output.terminal import counted
from ..report.t_interval import tested
from .declare import Cell, Claim, Criterion, Study
from .results import flatness_of
from .run_plan import Planned, choice_of, diverged_everywhere

__all__ = [
    "Judged",
    "Outcome",
    "Said",
    "cannot_be_made",
    "finals_of",
    "judge",
    "judge_claim",
    "judge_study",
    "unsound",
]

LEAST_SEEDS, LEAST_LEVEL, MOST_CHANGE, LEAST_SHARE = 3, 0.95, 0.02, 0.1  # bounds on what a claim rests on
CLEAN_LOSS = "train_clean_loss"  # a schedule of augmentation or dropout does not move it

Verdict = Literal["for", "against", "undecided", "not yet"]
Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Judged:
    """The verdict of a criterion. The numbers are None until the runs have ended."""

    name: str
    verdict: Verdict
    mean: float | None = None  # of the paired differences, positive if ``left`` is better
    low: float | None = None
    high: float | None = None
    p: float | None = None  # two-sided, for a mean difference of zero; also None if the seeds do not differ
    differences: tuple[float, ...] = ()
    reason: str = ""  # why it is undecided or not yet known, unless the interval alone says so
    remark: str = ""  # on final runs that did not know the criterion, or did not record whether they knew it

    @property
    def explained(self) -> str:
        """What follows the verdict in a table: the reason and the remark, if there are any."""
        return f": {self.reason}" * bool(self.reason) + f" ({self.remark})" * bool(self.remark)


@dataclass(frozen=True)
class Said:
    """The verdict of a claim, and the sentence that may be stated."""

    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Outcome:
    """All verdicts of a study."""

    criteria: tuple[Judged, ...]
    claims: tuple[Said, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def finals_of(study: Study, cell: Cell, results: Results) -> dict[int, Mapping[str, Any]]:
    """The final runs of a cell at its chosen rate, by seed."""
    choice = choice_of(study, cell, results)
    if choice is None:
        return {}
    runs = {seed: Planned(cell, "final", choice.variant, choice.rate, seed).name for seed in study.seeds}
    return {seed: results[name] for seed, name in runs.items() if name in results}


def judge(study: Study, criterion: Criterion, results: Results) -> Judged:
    """Return the verdict of a criterion: ``not yet`` until all of its runs have ended.

    It is ``undecided``, whatever the interval, if a run diverged or was still changing at its end, if a rate was chosen
    at the edge of a grid that could not grow, if the seeds do not differ, or if the criterion was declared when final
    runs of both sides had begun. If those of one side had begun, the verdict has a remark.
    """
    cells = [study.cell(text, criterion.name) for text in (criterion.left, criterion.right)]
    finals = [finals_of(study, cell, results) for cell in cells]
    judged = _judge(study, criterion, cells, finals, results)
    return judged if judged.verdict == "not yet" else replace(judged, remark=_remark(study, criterion, cells, finals))


def _judge(
    study: Study,
    criterion: Criterion,
    cells: Sequence[Cell],
    finals: Sequence[Mapping[int, Mapping[str, Any]]],
    results: Results,
) -> Judged:
    for cell in cells:
        if diverged_everywhere(study, cell, results):
            return Judged(criterion.name, "undecided", reason=f"{cell} has diverged at every rate")
    missing = sum(len(study.seeds) - len(found) for found in finals)
    if missing:
        there, all_of = 2 * len(study.seeds) - missing, 2 * len(study.seeds)
        return Judged(criterion.name, "not yet", reason=f"{there} of {all_of} final runs have ended")
    key, sign = f"{study.scored_on}_{study.metric}", 1 if higher_is_better(study.metric) else -1
    values = [[found[seed].get("metrics", {}).get(key) for seed in study.seeds] for found in finals]
    for cell, found, column in zip(cells, finals, values):
        for seed, value in zip(study.seeds, column):
            if value is None or not math.isfinite(value):
                what = "has diverged" if "diverged" in found[seed] else f"has no {key}"
                return Judged(criterion.name, "undecided", reason=f"{cell} {what} with seed {seed}")
    differences = tuple(sign * (a - b) for a, b in zip(*values))
    mean, low, high, p = tested(differences, criterion.level)
    reason = _declared_late(study, criterion, finals) or unsound(study, cells, finals, results)
    if p is None:
        reason = reason or "the seeds do not differ"
    verdict = "undecided" if reason else _verdict(criterion, low, high)
    return Judged(criterion.name, verdict, mean, low, high, p, differences, reason)


def _verdict(criterion: Criterion, low: float, high: float) -> Verdict:
    above, matched = low > 0, low <= 0 and high < criterion.margin
    if criterion.expect == "not_above":
        above, matched = matched, above
    return "for" if above else "against" if matched else "undecided"


def _declared_late(study: Study, criterion: Criterion, finals: Sequence[Mapping[int, Any]]) -> str:
    """Say so if final runs of both sides do not know the criterion: their difference could be seen before it."""
    late = _unaware(finals, "criteria", study.rule(criterion))
    return f"declared, changed or given other seeds after {late} of its final runs had begun" if late else ""


def _remark(
    study: Study, criterion: Criterion, cells: Sequence[Cell], finals: Sequence[Mapping[int, Mapping[str, Any]]]
) -> str:
    """Say so if final runs of one cell do not know the criterion, or if runs did not record what they were started
    under. If runs of both cells do not know it, the verdict's reason says so."""
    rule = study.rule(criterion)
    late = [(cell, count) for cell, side in zip(cells, finals) if (count := _unaware_of(side, "criteria", rule))]
    remarks = []
    if len(late) == 1:
        ((cell, count),) = late
        remarks.append(f"declared or changed after {counted(count, 'final run')} of {cell} had begun")
    unrecorded = sum("criteria" not in run for side in finals for run in side.values())
    of_all = sum(map(len, finals))
    remarks += [f"declaration not recorded by {unrecorded} of {of_all} final runs"] * bool(unrecorded)
    return "; ".join(remarks)


def _unaware(finals: Sequence[Mapping[int, Any]], key: str, rule: str) -> int:
    """How many final runs do not know a rule; 0 if one side has none that does not."""
    late = [_unaware_of(side, key, rule) for side in finals]
    return sum(late) if all(late) else 0


def _unaware_of(side: Mapping[int, Any], key: str, rule: str) -> int:
    """How many final runs of one cell do not know a rule, not counting runs that recorded no rules."""
    return sum(key in run and rule not in run[key] for run in side.values())


def _seen_before(study: Study, claim: Claim, results: Results, key: str, rule: str) -> tuple[str, int] | None:
    """The first of a claim's criteria whose verdict could be seen before a rule of the claim, and by how many runs."""
    for criterion in study.criteria:
        if criterion.name in claim.criteria:
            sides = [study.cell(text, criterion.name) for text in (criterion.left, criterion.right)]
            if late := _unaware([finals_of(study, cell, results) for cell in sides], key, rule):
                return criterion.name, late
    return None


def _claimed_late(study: Study, claim: Claim, results: Results) -> str:
    """Say so if a verdict of one of its criteria could be seen before the claim was made of these criteria."""
    seen = _seen_before(study, claim, results, "claims", study.rule_of_claim(claim))
    return f"declared or changed after {seen[1]} final runs of {seen[0]} had begun" if seen else ""


def unsound(study: Study, cells: Sequence[Cell], finals: Sequence[Mapping[int, Any]], results: Results) -> str:
    """Return why these cells' final runs decide nothing, whatever their numbers: a rate at an edge, or a run that was
    too short; an empty string if there is no such reason."""
    for cell, found in zip(cells, finals):
        choice = choice_of(study, cell, results)
        if choice and choice.at_edge:
            which = f"a variant of {cell}" if choice.variant else f"{cell}, {choice.rate:g},"
            return f"the best rate of {which} is at the edge of its grid"
        for seed, record in found.items():
            moved = flatness_of(study, record)
            if moved is None:
                return f"{cell} has no {study.flatness.key} that would show whether seed {seed} was trained long enough"
            if moved >= study.flatness.within:
                of_clean = study.flatness.key == "train_clean_loss"
                loss = "the clean training loss" if of_clean else metric_label(study.flatness.key)
                share = percent(study.flatness.share)
                return f"{loss} of {cell} still moved by {moved:.2%} over the last {share} of the run (seed {seed})"
    return ""


def judge_claim(study: Study, claim: Claim, judged: Sequence[Judged], results: Results) -> Said:
    """Return the claim once all of its criteria are met, its denial once one is met the other way, otherwise neither.

    It is also neither if the study has too few seeds or asks too little of an interval or of flatness, or if the claim
    was made when final runs of one of its criteria had begun. A claim that was reworded then says so.
    """
    verdicts = {found.name: found.verdict for found in judged if found.name in claim.criteria}
    against = [one for one in study.criteria if verdicts.get(one.name) == "against"]
    waiting = [name for name, verdict in verdicts.items() if verdict == "not yet"]
    if waiting and not against:  # no further verdict would change a denial
        return Said("not yet", f"Nothing is claimed yet: no verdict for {_quoted(waiting)}.")
    if reason := _too_lenient(study, claim) or _claimed_late(study, claim, results):
        return Said("undecided", f"Nothing is claimed: {reason}.")
    worded_late = _seen_before(study, claim, results, "sentences", claim.sentence)
    anew = " (Reworded after final runs had begun.)" if worded_late else ""
    if against:
        highs = {found.name: found.high for found in judged}
        excluded = _what_is_excluded(study, [(one, highs[one.name]) for one in against])
        return Said("against", f"{claim.denial.removesuffix('.')}: {excluded}.{anew}")
    open_ones = [name for name, verdict in verdicts.items() if verdict == "undecided"]
    if open_ones:
        return Said("undecided", f"Nothing is claimed; undecided: {_quoted(open_ones)}.")
    lenient = [one for one in study.criteria if one.name in claim.criteria and one.expect == "not_above"]
    left_open = "; ".join(f"{_quoted([one.name])} of less than {_margin(study, one)}" for one in lenient)
    return Said("for", claim.text + (f" (Not ruled out: a difference in {left_open}.)" if left_open else "") + anew)


def _margin(study: Study, criterion: Criterion) -> str:
    unit = find_metric(study.metric).difference_unit
    return f"{criterion.margin:g}{unit.removesuffix('s') if criterion.margin == 1 else unit}"


def _what_is_excluded(study: Study, against: Sequence[tuple[Criterion, float | None]]) -> str:
    """What criteria that are *against* rule out, each given with the upper end of its interval.

    With ``above`` and an interval that reaches above 0, that is a lead of the margin or more, and not every lead.
    """
    leads: dict[str, list[str]] = {}  # by the least that is ruled out
    others: list[str] = []
    for one, high in against:
        if one.expect == "above" and high is not None and high > 0:
            leads.setdefault(_margin(study, one), []).append(one.name)
        else:
            others.append(one.name)
    said = [
        f"a lead of {least} or more is ruled out, a smaller one is not ({_quoted(names)})"
        for least, names in leads.items()
    ]
    said += [f"{_quoted(others)} {'is' if len(others) == 1 else 'are'} ruled out"] * bool(others)
    return "; ".join(said)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def cannot_be_made(study: Study) -> list[str]:
    """A line for each claim that this study can neither make nor deny, whatever its runs show."""
    reasons = ((claim, _too_lenient(study, claim)) for claim in study.claims)
    return [
        f"claims: {claim.text!r} will be neither claimed nor denied: {reason}" for claim, reason in reasons if reason
    ]


def _too_lenient(study: Study, claim: Claim) -> str:
    """Name a rule by which nearly anything could be claimed; criteria without a claim are free to have one."""
    flat = study.flatness
    if len(study.seeds) < LEAST_SEEDS:
        return f"{len(study.seeds)} seeds, expected at least {LEAST_SEEDS}"
    if flat.key != CLEAN_LOSS:
        return f"runs are judged long enough by {flat.key}, expected {CLEAN_LOSS}"
    if flat.within > MOST_CHANGE or flat.share < LEAST_SHARE:
        got = f"runs may change by {percent(flat.within)} over their last {percent(flat.share)}"
        return f"{got}, expected at most {percent(MOST_CHANGE)} over at least {percent(LEAST_SHARE)}"
    level = min(criterion.level for criterion in study.criteria if criterion.name in claim.criteria)
    return f"an interval of {percent(level)}, expected at least {percent(LEAST_LEVEL)}" if level < LEAST_LEVEL else ""


def judge_study(study: Study, results: Results) -> Outcome:
    judged = tuple(judge(study, criterion, results) for criterion in study.criteria)
    return Outcome(judged, tuple(judge_claim(study, claim, judged, results) for claim in study.claims))
