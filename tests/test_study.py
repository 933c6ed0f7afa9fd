"""Studies: what is run when, what the verdicts say, and what is refused."""

import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_folders import make_run
from segmentation_images import write_camvid
from segmentation_tasks import tiny_recipe
from toy_study import TOY, declared, run

from stepsnet.engine.update import Diverged
from stepsnet.errors import UserError
from stepsnet.files.writing import write_atomically
from stepsnet.recipes import find_recipe
from stepsnet.report.t_interval import tested as by_t_test
from stepsnet.residual import DESIGNS
from stepsnet.run_folder.provenance import provenance, write_process
from stepsnet.runs.train import train_run
from stepsnet.settings.overrides import read_recipe, to_yaml
from stepsnet.study import conductor
from stepsnet.study.declare import Cell, find_study, studies
from stepsnet.study.leaderboard import leaderboard
from stepsnet.study.record import _per_block, _spaced, record_of, settings_of, write_record
from stepsnet.study.render import render_study, rows_of
from stepsnet.study.results import flatness_of
from stepsnet.study.run_plan import Planned, check_models, choice_of, due, is_planned, progress, recipe_of
from stepsnet.study.verdict import judge, judge_study


@pytest.fixture
def in_process(monkeypatch):
    """Runs of a study one after the other in this process; a list of their names in order."""
    names = []

    def run_all(waiting, jobs, display, ended):
        while waiting:
            job = waiting.pop(0)
            names.append(job.name)
            train_run(read_recipe(Path(job.config)), Path(job.folder), display, "auto", job.label)
            ended(job, 0, "")

    monkeypatch.setattr(conductor, "run_all", run_all)
    monkeypatch.setattr("stepsnet.runs.train.report_or_tell", lambda *_: None)  # a second each
    return names


def test_a_study_from_tuning_to_the_claim(tmp_path, capsys, in_process):
    file, folder, results = declared(tmp_path), tmp_path / "run", tmp_path / "results"
    arguments = ("sweep", file, "--run", folder, "--results", results)
    status, out, err = run(*arguments, capsys=capsys)
    assert status == 0, err
    tuning = [f"plain-{point}-tuning-lr{rate}-seed0" for rate in ("0.001", "0.002", "0.004") for point in (1, 2)]
    assert in_process[:6] == tuning  # then the first seed of both, and the second last
    assert [name.split("-")[1] + name[-1] for name in in_process[6:]] == ["11", "21", "12", "22"]
    records = {file.stem: json.loads(file.read_text()) for file in results.glob("*.json")}
    assert set(in_process) == set(records) and str(tmp_path) not in "".join(f.read_text() for f in results.iterdir())
    for record in records.values():
        of_test = {key for key in record["metrics"] if key.startswith("test_")}
        assert bool(of_test) == (record["kind"] == "final")  # the test split, by final runs alone
        assert record["epochs"] == (2 if record["kind"] == "final" else 1) == len(record["curve"])
        assert {"rate", "seed", "batch_size", "data", "split", "hardware", "versions", "commit", "command"} <= set(
            record
        )
        assert record["split"] == "100 of train" and record["stream"][0]["step"] == 1
        assert record["stream"][0]["gamma_read"] and record["stream"][0]["gradient"]
    for point in (1, 2):
        tuned = {
            r["rate"]: r["metrics"]["val_top1"]
            for r in records.values()
            if (r["kind"], r["point"]) == ("tuning", point)
        }
        best = max(tuned.values())
        chosen = min(rate for rate, value in tuned.items() if value == best)  # the lower of two that are equal
        assert {r["rate"] for r in records.values() if (r["kind"], r["point"]) == ("final", point)} == {chosen}
    assert "10 of 10 runs have ended." in out and (folder / "study.png").exists() and (folder / "study.csv").exists()
    assert "10 of 10 runs have ended" in (folder / "leaderboard.md").read_text()
    # from the results alone, in another place: nothing is run, and the same is said
    before = len(in_process)
    status, again, err = run("sweep", file, "--run", tmp_path / "new", "--results", results, "--resume", capsys=capsys)
    assert status == 0 and len(in_process) == before and again.splitlines()[-1] == out.splitlines()[-1]
    status, rendered, err = run("sweep", file, "--results", results, "--render", capsys=capsys)
    assert status == 0 and rendered in out
    # one result less is one run more, and until then nothing is claimed
    (results / f"{in_process[-1]}.json").unlink()
    status, rendered, err = run("sweep", file, "--results", results, "--render", capsys=capsys)
    assert "9 of 10 runs have ended." in rendered and "Nothing is claimed yet" in rendered and "Depth" not in rendered
    # a criterion that the runs do not know decides nothing, and they keep those that they were started under
    wider = [TOY["criteria"][0] | {"margin": 50.0}]
    declared(tmp_path, criteria=wider)
    status, _, err = run(*arguments, "--resume", capsys=capsys)
    assert status == 0 and len(in_process) == before + 1
    rule = (
        "plain@2 above plain@1 by top1, margin 1, level 0.95, seeds 1 2, train_clean_loss within 10 over the last 0.5"
    )
    for name in in_process:
        record = json.loads((results / f"{name}.json").read_text())
        assert record.get("criteria") == record.get("claims") == ([rule] if record["kind"] == "final" else None)
        assert "flatness" not in record
        tuning = "rates 0.001 0.002 0.004, at most 3, seeds 0, length 0.5" if record["kind"] == "final" else None
        assert record.get("tuning") == tuning
    status, late, _ = run("sweep", declared(tmp_path, criteria=wider), "--results", results, "--render", capsys=capsys)
    reason = "declared, changed or given other seeds after 4 of its final runs had begun"
    assert status == 0 and f"| undecided: {reason} |" in late
    assert "changed" not in out and "**undecided**: Nothing is claimed" in late
    # results of other settings are not taken for these
    other = TOY["settings"] | {"weight_decay": 0.1}
    status, _, err = run("sweep", declared(tmp_path, settings=other), "--results", results, "--render", capsys=capsys)
    assert status == 2 and "was made with weight_decay 0.05, expected 0.1, as" in err
    status, _, err = run(*arguments, capsys=capsys)
    assert status == 2 and "is not empty" in err


def test_a_study_that_is_killed_goes_on(tmp_path, capsys, in_process):
    one = [{"name": "plain", "points": {1: {"model.args.depths": [1]}}}]
    file, folder = declared(tmp_path, contenders=one, criteria=[], claims=[]), tmp_path / "run"
    command = [sys.executable, "-m", "stepsnet", "sweep", str(file), "--run", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    while not list((folder / "results").glob("*.json")):
        time.sleep(0.02)
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = {file: file.stat().st_mtime_ns for file in (folder / "results").glob("*.json")}
    status, out, err = run("sweep", file, "--run", folder, "--resume", capsys=capsys)
    assert status == 0 and "5 of 5 runs have ended." in out and len(in_process) == 5 - len(done), err
    assert all(file.stat().st_mtime_ns == written for file, written in done.items())


def test_a_folder_is_of_one_study(tmp_path, capsys, in_process):
    alone = {"contenders": [{"name": "plain", "points": {1: TOY["contenders"][0]["points"][1]}}]}
    alone |= {"criteria": [], "claims": []}
    folder = tmp_path / "run"
    status, _, err = run("sweep", declared(tmp_path, **alone), "--run", folder, capsys=capsys)
    assert status == 0, err
    assert (folder / "study.md").read_text().startswith("# toy\n\nDoes depth help?\n\nTrained on digits.\n\n")

    def content():
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before, other_settings = content(), TOY["settings"] | {"weight_decay": 0.1}
    for number, (changes, option, said) in enumerate(
        [
            ({"name": "other"}, "--resume", "has runs of toy, expected a folder for other"),
            ({"name": "other"}, "--render", "has runs of toy, expected a folder for other"),
            ({"settings": other_settings}, "--resume", "holds a run with weight_decay 0.05, got 0.1"),
        ]
    ):
        results = tmp_path / f"results{number}"
        results.mkdir()
        file = declared(tmp_path, **alone, **changes)
        status, _, err = run("sweep", file, "--run", folder, "--results", results, option, capsys=capsys)
        assert status == 2 and said in err and len(err.splitlines()) == 1, err
        assert content() == before


def test_a_run_folder_that_does_not_fit_leaves_its_cell_alone(tmp_path, capsys, in_process):
    file, folder = declared(tmp_path, criteria=[], claims=[]), tmp_path / "run"
    bad = folder / "plain-1-tuning-lr0.002-seed0" / "config.yaml"
    bad.parent.mkdir(parents=True)
    bad.write_text("lr: fast")
    status, _, err = run("sweep", file, "--run", folder, "--resume", capsys=capsys)
    assert status == 2 and "runs failed, such as plain-1-tuning-lr0.002-seed0: " in err and len(err.splitlines()) == 1
    assert [name for name in in_process if name.startswith("plain-2")][-1].startswith("plain-2-final")
    assert bad.read_text() == "lr: fast" and not (folder / "recipes" / f"{bad.parent.name}.yaml").exists()


def study_of(tmp_path, **changes):
    return find_study(str(declared(tmp_path, **changes)))


def tuned(cell, scores, seed=0):
    """Results of a cell's tuning, by rate."""
    runs = [Planned(cell, "tuning", "", rate, seed) for rate in scores]
    return {r.name: {"kind": "tuning", "metrics": {"val_top1": scores[r.rate]} if scores[r.rate] else {}} for r in runs}


def final(cell, rate, values, last=(1.0, 1.0)):
    curve = [{"epoch": epoch, "train_clean_loss": loss} for epoch, loss in ((1, last[0]), (2, last[1]))]
    runs = [Planned(cell, "final", "", rate, seed) for seed in (1, 2, 3)[: len(values)]]
    return {r.name: {"metrics": {"test_top1": value}, "curve": curve} for r, value in zip(runs, values)}


def test_what_is_kept_of_the_stream():
    assert _spaced([1, 10, 20, 100, 200, 1000], 4) == [1, 10, 100, 1000]
    values = {"gamma": [0.5], "gamma_read": [0.25], "gradient": [math.nan]}
    assert _per_block(SimpleNamespace(values=values.__getitem__)) == {**values, "gradient": [None]}


def test_the_grid_grows_at_its_edges(tmp_path):
    study = study_of(tmp_path, tuning={**TOY["tuning"], "most_rates": 5})
    cell, scores = Cell("plain", 1), {0.001: 3.0, 0.002: 2.0, 0.004: 1.0}

    def next_rates():
        return [p.rate for p in due(study, tuned(cell, scores)) if (p.cell, p.kind) == (cell, "tuning")]

    assert choice_of(study, cell, tuned(cell, scores)) is None and next_rates() == [0.0005]
    scores[0.0005] = 2.5
    found = choice_of(study, cell, tuned(cell, scores))
    assert (found.rate, found.at_edge) == (0.001, False) and next_rates() == []
    scores |= {0.0005: None, 0.001: 1.0, 0.004: 4.0}  # the other way, and one that diverged
    del scores[0.0005]
    assert next_rates() == [0.008]
    scores[0.008] = 5.0
    assert next_rates() == [0.016]
    scores[0.016] = 6.0
    found = choice_of(study, cell, tuned(cell, scores))  # five rates are tried: it grows no further
    assert (found.rate, found.at_edge) == (0.016, True) and next_rates() == []
    assert progress(study, tuned(cell, scores)) == (5, 5 + 3 + 4)
    everything = {0.001: None, 0.002: None, 0.004: None}
    assert [p.rate for p in due(study, tuned(cell, everything)) if p.cell == cell] == [0.0005]
    everything |= {0.0005: None, 0.00025: None}  # five rates, none of which trained: it has a verdict
    there = tuned(cell, everything)
    assert [p for p in due(study, there) if p.cell == cell] == [] and progress(study, there) == (5, 5 + 3 + 2)
    judged = judge(study, study.criteria[0], there)
    assert (judged.verdict, judged.reason) == ("undecided", "plain@1 has diverged at every rate")
    there = {
        name: {**record, "contender": "plain", "point": 1, "variant": "", "rate": float(name.split("-lr")[1][:-6])}
        for name, record in there.items()
    }
    assert "| diverged at every rate |" in render_study(study, there) and "| diverged |" in leaderboard(study, there)


def test_a_rate_is_chosen_by_the_mean_over_the_tuning_seeds(tmp_path):
    study = study_of(tmp_path, tuning={**TOY["tuning"], "seeds": [0, 7], "most_rates": 4}, seeds=[1, 2, 3])
    cell, first, second = Cell("plain", 1), {0.001: 3.0, 0.002: 6.0, 0.004: 5.0}, {0.001: 5.0, 0.002: 1.0, 0.004: 4.0}
    assert len([p for p in due(study, {}) if p.cell == cell]) == 2 * 3
    assert {(p.kind, p.seed) for p in due(study, tuned(cell, first)) if p.cell == cell} == {("tuning", 7)}
    there = tuned(cell, first) | tuned(cell, second, 7)  # means of 4, 3.5 and 4.5: the last is the best, at the edge
    assert [(p.rate, p.seed) for p in due(study, there) if p.cell == cell] == [(0.008, 0), (0.008, 7)]
    there |= tuned(cell, {0.008: 9.0}) | tuned(cell, {0.008: None}, 7)  # diverged with one of the seeds
    found = choice_of(study, cell, there)
    assert (found.rate, found.at_edge) == (0.004, False)
    assert {(p.kind, p.seed) for p in due(study, there) if p.cell == cell} == {("final", seed) for seed in study.seeds}
    assert progress(study, there) == (8, 8 + 3 + 6 + 3)
    assert is_planned(study, Planned(cell, "tuning", "", 0.008, 7), there)
    assert not is_planned(study, Planned(cell, "tuning", "", 0.002, 3), there)
    place = {"contender": "plain", "point": 1, "variant": ""}
    there = {
        name: {**record, **place, "rate": float(name.split("-lr")[1].split("-")[0])} for name, record in there.items()
    }
    text = render_study(study, there)
    assert "by rate, mean over 2 seeds:" in text
    assert "plain, 1 blocks: 0.001: 4.0, 0.002: 3.5, 0.004: 4.5, 0.008: diverged" in text
    assert "| in tuning, 8 runs |" in leaderboard(study, there)


def test_a_mean_over_some_of_the_tuning_seeds_says_over_how_many(tmp_path):
    study, cell = study_of(tmp_path, tuning={**TOY["tuning"], "seeds": [0, 7]}), Cell("plain", 1)
    there = placed(tuned(cell, MIDDLE))
    (line,) = [line for line in render_study(study, there).splitlines() if line.startswith("- plain, 1 blocks: ")]
    assert line.count("(1 of 2 seeds)") == 3


def test_what_is_due_follows_the_order(tmp_path):
    study = study_of(tmp_path, order=[["plain@2"]])
    assert [(p.cell.point, p.rate) for p in due(study, {})][:4] == [(2, 0.001), (2, 0.002), (2, 0.004), (1, 0.001)]
    there = tuned(Cell("plain", 2), {0.001: 1.0, 0.002: 2.0, 0.004: 1.0})
    left = [(p.cell.point, p.kind, p.seed) for p in due(study, there)]
    assert left == [(2, "final", 1), *[(1, "tuning", 0)] * 3, (2, "final", 2)]
    assert {p.cell.point for p in due(study, there, [study.cell("plain@1", "--cells")])} == {1}


def test_tuning_is_a_shorter_run_and_a_final_one_is_scored(tmp_path):
    study = study_of(tmp_path)
    tuning, last = (recipe_of(study, Planned(Cell("plain", 2), kind, "", 0.002, 7)) for kind in ("tuning", "final"))
    assert (tuning.epochs, tuning.warmup_epochs, tuning.score_test) == (1, 0.25, False)
    assert (last.epochs, last.warmup_epochs, last.score_test, last.lr, last.seed) == (2, 0.5, True, 0.002, 7)
    changed = {key for key, value in settings_of(last).items() if settings_of(tuning)[key] != value}
    assert changed == {"epochs", "warmup_epochs", "score_test"}
    assert last.model.args["depths"] == [2] and last.baseline is None
    settings = TOY["settings"] | {"epochs": 30, "sched": "multistep", "milestones": [15, 25]}
    study = study_of(tmp_path, settings=settings, tuning={**TOY["tuning"], "length": 0.2})
    tuning = recipe_of(study, Planned(Cell("plain", 2), "tuning", "", 0.002, 0))
    assert (tuning.epochs, tuning.milestones) == (6, (3, 5))
    settings |= {"milestones": [16, 28]}
    study = study_of(tmp_path, settings=settings, tuning={**TOY["tuning"], "length": 0.2})
    tuning = recipe_of(study, Planned(Cell("plain", 2), "tuning", "", 0.002, 0))
    assert tuning.milestones == pytest.approx((3.2, 5.6))


def with_variants(tmp_path):
    contender = {
        "name": "plain",
        "points": {1: {}},
        "variants": {"a": {"model.args.depths": [1]}, "b": {"model.args.depths": [2]}},
        "unequal": "a toy",
    }
    return study_of(tmp_path, contenders=[contender], criteria=[], claims=[])


def test_variants_are_tuned_beside_the_rates(tmp_path):
    study, cell = with_variants(tmp_path), Cell("plain", 1)
    assert [(p.variant, p.rate) for p in due(study, {})] == [(v, r) for v in "ab" for r in (0.001, 0.002, 0.004)]
    there = {p.name: {"metrics": {"val_top1": (p.variant == "b") - abs(p.rate - 0.002)}} for p in due(study, {})}
    found = choice_of(study, cell, there)
    assert (found.variant, found.rate, found.at_edge) == ("b", 0.002, False)
    check_models(study)
    # the best rate of the worse variant is at its edge: it could still become the better one
    for planned in (Planned(cell, "tuning", "a", 0.004, 0), Planned(cell, "tuning", "a", 0.002, 0)):
        there[planned.name] = {"metrics": {"val_top1": planned.rate}}
    study = dataclasses.replace(study, tuning=dataclasses.replace(study.tuning, most_rates=4))
    assert choice_of(study, cell, there) is None
    assert [(p.variant, p.rate) for p in due(study, there)] == [("a", 0.008)]
    there[due(study, there)[0].name] = {"metrics": {"val_top1": 0.5}}  # still its best, and it grows no further
    found = choice_of(study, cell, there)
    assert (found.variant, found.rate, found.at_edge) == ("b", 0.002, True)
    # so could one that no rate of its grid has trained
    for rate in (0.0005, 0.001, 0.002, 0.004, 0.008):
        there[Planned(cell, "tuning", "a", rate, 0).name] = {"diverged": "loss: got nan"}
    found = choice_of(study, cell, there)
    assert (found.variant, found.rate, found.at_edge) == ("b", 0.002, True)


# two-sided 95% quantiles of Student's t, from a printed table
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}


@pytest.mark.parametrize("values", [(1.0, 2.0), (0.5, 0.9, 0.1), (3.0, 3.5, 2.5, 3.1), (-1.0, 0.0, 1.0, 2.0, 0.3)])
def test_the_interval_and_p_are_students(values):
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    half = T_95[len(values) - 1] * deviation / math.sqrt(len(values))
    *interval, p = by_t_test(values, 0.95)
    assert interval == pytest.approx([mean, mean - half, mean + half], abs=2e-4 * half)
    angle = math.atan(abs(mean) / deviation * math.sqrt(len(values) / (len(values) - 1)))
    within = {  # the share of Student's distribution nearer to 0, by its degrees of freedom
        1: 2 / math.pi * angle,
        2: math.sin(angle),
        3: 2 / math.pi * (angle + math.sin(angle) * math.cos(angle)),
        4: math.sin(angle) * (1 + math.cos(angle) ** 2 / 2),
    }
    assert p == pytest.approx(1 - within[len(values) - 1])


def test_nothing_is_tested_where_differences_do_not_differ():
    for values in ([1.0, 1.0], [0.0, 0.0], [0.1 + 0.2, 0.3], [1e-17, 0.0]):
        mean = statistics.fmean(values)
        assert by_t_test(values, 0.95) == (mean, mean, mean, None)
    with pytest.raises(ValueError, match="got 1 differences, expected at least 2"):
        by_t_test([1.0], 0.95)


MIDDLE = {0.001: 1.0, 0.002: 2.0, 0.004: 1.0}


@pytest.mark.parametrize(
    "differences, expect, margin, verdict",
    [
        ((2.0, 2.2, 1.8), "above", 0.0, "for"),
        ((2.0, -2.0, 1.0), "above", 0.0, "undecided"),
        ((-2.0, -2.2, -1.8), "above", 0.0, "against"),
        ((0.0, 0.1, -0.1), "above", 1.0, "against"),  # matched within the margin
        ((0.0, 0.1, -0.1), "above", 0.0, "undecided"),
        ((0.5, 0.52, 0.48), "above", 1.0, "for"),  # small and sure
        ((0.0, 0.1, -0.1), "not_above", 1.0, "for"),
        ((2.0, 2.2, 1.8), "not_above", 1.0, "against"),
        ((2.0, -2.0, 1.0), "not_above", 1.0, "undecided"),
    ],
)
def test_verdicts(tmp_path, differences, expect, margin, verdict):
    criterion = {"name": "gain", "left": "plain@2", "right": "plain@1", "expect": expect, "margin": margin}
    study = study_of(tmp_path, seeds=[1, 2, 3], criteria=[criterion], flatness={"share": 0.5, "within": 0.02})
    base = (50.0, 60.0, 55.0)  # pairs, not means: the seeds differ by far more
    there = tuned(Cell("plain", 1), MIDDLE) | tuned(Cell("plain", 2), MIDDLE) | final(Cell("plain", 1), 0.002, base)
    there |= final(Cell("plain", 2), 0.002, [b + d for b, d in zip(base, differences)])
    judged = judge(study, study.criteria[0], there)
    assert (judged.verdict, judged.reason) == (verdict, "")
    assert judged.mean == pytest.approx(statistics.fmean(differences))
    half = T_95[2] * statistics.stdev(differences) / math.sqrt(3)
    assert (judged.low, judged.high) == pytest.approx((judged.mean - half, judged.mean + half), rel=1e-3, abs=1e-3)
    said = judge_study(study, there).claims[0]
    expected = {"for": "Depth helps.", "against": "Depth does not help: "}.get(verdict, "Nothing is claimed")
    assert said.verdict == verdict and said.text.startswith(expected)
    for lenient, reason in (
        ({"flatness": {"share": 0.5, "within": 10.0}}, "runs may change by 1000% over their last 50%"),
        ({"flatness": {"share": 0.01, "within": 0.02}}, "runs may change by 2% over their last 1%"),
        ({"criteria": [criterion | {"level": 0.5}]}, "an interval of 50%, expected at least 95%"),
        ({"flatness": {"key": "train_loss"}}, "runs are judged long enough by train_loss, expected train_clean_loss"),
    ):
        rules = {"seeds": [1, 2, 3], "criteria": [criterion], "flatness": {"share": 0.5, "within": 0.02}} | lenient
        said = judge_study(study_of(tmp_path, **rules), there).claims[0]
        assert said.verdict == "undecided" and (verdict == "undecided" or reason in said.text)


def test_what_is_due_is_printed_with_what_the_seeds_can_decide(tmp_path, capsys, monkeypatch):
    rules = {"seeds": [1, 2, 3], "flatness": {"share": 0.5, "within": 0.02}}
    status, out, _ = run("sweep", declared(tmp_path, **rules), "--dry-run", "--run", tmp_path, capsys=capsys)
    lines = out.splitlines()
    reach = f"{T_95[2] / math.sqrt(3):.1f} standard deviations of the paired differences"
    assert status == 0 and lines[-1] == f"an interval of 95% over 3 seeds reaches {reach} to each side"
    assert lines[0].startswith("0 of 12 runs of toy are done") and len(lines) == 2 + 6 + 3
    assert "multiply-accumulates of a forward pass, per image or token:" in lines
    monkeypatch.setattr("os.access", lambda *_, **__: False)  # what is only shown needs no folder to write to
    assert run("sweep", declared(tmp_path, **rules), "--dry-run", "--run", tmp_path, capsys=capsys)[0] == 0
    monkeypatch.undo()
    criteria = [TOY["criteria"][0] | {"level": 0.949}]
    for more, reason in (
        ({"seeds": [1, 2]}, "2 seeds, expected at least 3"),
        ({"criteria": criteria}, "an interval of 94.9%, expected at least 95%"),
        (
            {"flatness": {"share": 0.095, "within": 0.02}},
            "2% over their last 9.5%, expected at most 2% over at least 10%",
        ),
    ):
        file = declared(tmp_path, **rules | more)
        status, _, err = run("sweep", file, "--dry-run", "--run", tmp_path, "workers=-1", capsys=capsys)
        assert status == 2 and "workers: got -1, expected at least 0" in err
        status, out, _ = run("sweep", file, "--dry-run", "--run", tmp_path, capsys=capsys)
        last = out.splitlines()[-1]
        assert last.startswith("claims: 'Depth helps.' will be neither claimed nor denied: ") and last.endswith(reason)


def test_less_is_better_of_a_loss(tmp_path):
    study = study_of(tmp_path, metric="loss", seeds=[1, 2])
    there = {}
    for point, losses in ((1, (1.0, 1.1)), (2, (0.5, 0.601))):
        cell = Cell("plain", point)
        there |= {p.name: {"metrics": {"val_loss": abs(p.rate - 0.002)}} for p in due(study, {}) if p.cell == cell}
        flat = [{"epoch": 1, "train_clean_loss": 1.0}, {"epoch": 2, "train_clean_loss": 1.0}]
        for seed, loss in zip((1, 2), losses):
            there[Planned(cell, "final", "", 0.002, seed).name] = {"metrics": {"test_loss": loss}, "curve": flat}
    judged = judge(study, study.criteria[0], there)
    assert judged.verdict == "for" and judged.mean == pytest.approx(0.4995)


def test_a_contender_may_be_declared_later_than_the_one_it_is_held_against(tmp_path):
    study = study_of(tmp_path, seeds=[1, 2, 3], flatness={"share": 0.5, "within": 0.02})
    low, high = Cell("plain", 1), Cell("plain", 2)
    before, after = final(low, 0.002, (50.0, 51.0, 52.0)), final(high, 0.002, (60.0, 61.0, 62.1))
    for record in before.values():
        record["criteria"] = []
    for record in after.values():
        record["criteria"] = [study.rule(study.criteria[0])]
    there = tuned(low, MIDDLE) | tuned(high, MIDDLE) | before | after
    judged = judge(study, study.criteria[0], there)
    assert (judged.verdict, judged.remark) == ("for", "declared or changed after 3 final runs of plain@1 had begun")
    assert f"| for ({judged.remark}) |" in render_study(study, placed(there))
    next(iter(after.values()))["criteria"] = ["another"]
    judged = judge(study, study.criteria[0], there)
    assert (
        judged.reason == "declared, changed or given other seeds after 4 of its final runs had begun"
        and judged.mean > 0
        and not judged.remark
    )


def test_a_verdict_on_runs_that_recorded_no_declaration_says_so(tmp_path):
    study = study_of(tmp_path, seeds=[1, 2, 3], flatness={"share": 0.5, "within": 0.02})
    low, high = Cell("plain", 1), Cell("plain", 2)
    old, new = final(low, 0.002, (50.0, 51.0, 52.0)), final(high, 0.002, (60.0, 61.0, 62.1))
    there = tuned(low, MIDDLE) | tuned(high, MIDDLE) | old | new

    def remark():
        return judge(study, study.criteria[0], there).remark

    assert remark() == "declaration not recorded by 6 of 6 final runs"
    for record in new.values():
        record["criteria"] = [study.rule(study.criteria[0])]
    assert remark() == "declaration not recorded by 3 of 6 final runs"
    next(iter(new.values()))["criteria"] = []
    late = "declared or changed after 1 final run of plain@2 had begun"
    assert remark() == f"{late}; declaration not recorded by 3 of 6 final runs"
    for record in there.values():
        record["criteria"] = [study.rule(study.criteria[0])]
    assert judge(study, study.criteria[0], there).explained == ""
    fewer = {name: record for name, record in there.items() if name != next(iter(new))}
    judged = judge(study, study.criteria[0], fewer)
    assert (judged.verdict, judged.remark) == ("not yet", "")


@pytest.mark.parametrize(
    ("lead", "denial"),
    [
        (
            (0.1, -0.1, 0.1),
            'Depth does not help: a lead of 1 point or more is ruled out, a smaller one is not ("gain").',
        ),
        ((-2.0, -2.2, -1.8), 'Depth does not help: "gain" is ruled out.'),
    ],
)
def test_a_denial_says_which_leads_are_ruled_out(tmp_path, lead, denial):
    study = study_of(tmp_path, seeds=[1, 2, 3], flatness={"share": 0.5, "within": 0.02})
    low, high, base = Cell("plain", 1), Cell("plain", 2), (50.0, 60.0, 55.0)
    there = tuned(low, MIDDLE) | tuned(high, MIDDLE) | final(low, 0.002, base)
    there |= final(high, 0.002, [score + ahead for score, ahead in zip(base, lead)])
    said = judge_study(study, there).claims[0]
    assert (said.verdict, said.text) == ("against", denial)


def test_a_denial_names_all_criteria_that_it_rests_on(tmp_path):
    names = {"first": {"margin": 1.0}, "second": {"margin": 1.0}, "third": {"margin": 2.0, "level": 0.96}}
    criteria = [{"name": name, "left": "plain@2", "right": "plain@1", **rule} for name, rule in names.items()]
    criteria += [{"name": "no loss", "left": "plain@3", "right": "plain@1", "expect": "not_above", "margin": 1.0}]
    points = {point: {"model.args.depths": [point]} for point in (1, 2, 3)}
    claim = TOY["claims"][0] | {"criteria": [*names, "no loss"]}
    rules = {"seeds": [1, 2, 3], "flatness": {"share": 0.5, "within": 0.02}, "criteria": criteria, "claims": [claim]}
    study, there = study_of(tmp_path, contenders=[{"name": "plain", "points": points}], **rules), {}
    for point, scores in ((1, (50.0, 60.0, 55.0)), (2, (50.1, 59.9, 55.1)), (3, (53.0, 63.0, 58.1))):
        there |= tuned(Cell("plain", point), MIDDLE) | final(Cell("plain", point), 0.002, scores)
    assert judge_study(study, there).claims[0].text == (
        'Depth does not help: a lead of 1 point or more is ruled out, a smaller one is not ("first", "second"); '
        'a lead of 2 points or more is ruled out, a smaller one is not ("third"); "no loss" is ruled out.'
    )


def test_a_run_is_called_what_it_is(tmp_path):
    """Not what its recipe is, of another model against another baseline."""
    study = study_of(tmp_path)
    recipe = recipe_of(study, Planned(Cell("plain", 2), "tuning", "", 0.002, 0))
    assert recipe.title == "plain, at 2 blocks of the study toy" != find_recipe("digits/tiny").title
    settings = settings_of(recipe)  # by which records are known
    assert "title" not in settings
    named = study_of(tmp_path, settings=TOY["settings"] | {"title": "mine"})
    assert recipe_of(named, Planned(Cell("plain", 2), "tuning", "", 0.002, 0)).title == "mine"
    variants = with_variants(tmp_path)
    title = recipe_of(variants, Planned(Cell("plain", 1), "final", "b", 0.002, 1)).title
    assert title == "plain (b), at 1 blocks of the study toy"


def test_a_denial_waits_for_no_verdict_that_could_not_change_it(tmp_path):
    """A claim does: it needs all of its criteria."""
    points = {point: {"model.args.depths": [point]} for point in (1, 2, 3)}
    more = {"name": "more", "left": "plain@3", "right": "plain@1"}
    rules = {"seeds": [1, 2, 3], "flatness": {"share": 0.5, "within": 0.02}}
    rules |= {"contenders": [{"name": "plain", "points": points}], "criteria": [TOY["criteria"][0], more]}
    study = study_of(tmp_path, **rules, claims=[TOY["claims"][0] | {"criteria": ["gain", "more"]}])
    low, high = Cell("plain", 1), Cell("plain", 2)
    there = tuned(low, MIDDLE) | tuned(high, MIDDLE) | final(low, 0.002, (50.0, 51.0, 52.0))
    for scores, verdict, text in (
        ((40.0, 41.0, 42.1), "against", 'Depth does not help: "gain" is ruled out.'),
        ((60.0, 61.0, 62.1), "not yet", 'Nothing is claimed yet: no verdict for "more".'),
    ):
        said = judge_study(study, there | final(high, 0.002, scores)).claims[0]
        assert (said.verdict, said.text) == (verdict, text)


def test_a_claim_is_not_cut_down_to_what_came_out_well(tmp_path):
    other = {"name": "other", "left": "plain@1", "right": "plain@2", "margin": 1.0}
    rules = {"seeds": [1, 2, 3], "flatness": {"share": 0.5, "within": 0.02}, "criteria": [TOY["criteria"][0], other]}
    both = study_of(tmp_path, **rules, claims=[TOY["claims"][0] | {"criteria": ["gain", "other"]}])
    one = study_of(tmp_path, **rules)
    low, high = Cell("plain", 1), Cell("plain", 2)
    finals = final(low, 0.002, (50.0, 51.0, 52.0)) | final(high, 0.002, (60.0, 61.0, 62.1))
    there = tuned(low, MIDDLE) | tuned(high, MIDDLE) | finals
    said = [judge_study(study, there).claims[0].verdict for study in (both, one)]
    assert said == ["against", "for"]  # records from before claims were noted
    for record in finals.values():
        record["claims"] = both.claims_of(low)
    late = judge_study(one, there).claims[0]
    assert late.verdict == "undecided" and "declared or changed after 6 final runs of gain had begun" in late.text
    assert judge_study(both, there).claims[0].verdict == "against"
    for record in final(low, 0.002, (0, 0, 0)):
        finals[record]["claims"] = one.claims_of(low)  # one side knows it, as that of a contender declared later
    assert judge_study(one, there).claims[0].verdict == "for"


def test_a_claim_that_is_worded_anew_says_so(tmp_path):
    rules = {"seeds": [1, 2, 3], "flatness": {"share": 0.5, "within": 0.02}}
    study = study_of(tmp_path, **rules)
    low, high = Cell("plain", 1), Cell("plain", 2)
    finals = final(low, 0.002, (50.0, 51.0, 52.0)) | final(high, 0.002, (60.0, 61.0, 62.1))
    there = tuned(low, MIDDLE) | tuned(high, MIDDLE) | finals
    assert judge_study(study, there).claims[0].text == "Depth helps."  # records from before sentences were noted
    for record in finals.values():
        record["sentences"] = study.sentences_of(low)
    assert study.sentences_of(low) == ["Depth helps. / Depth does not help."]
    assert judge_study(study, there).claims[0].text == "Depth helps."
    other = study_of(tmp_path, **rules, claims=[TOY["claims"][0] | {"text": "Depth helps everybody."}])
    said = judge_study(other, there).claims[0]
    assert (said.verdict, said.text) == ("for", "Depth helps everybody. (Reworded after final runs had begun.)")


def test_a_claim_says_what_its_criteria_leave_open(tmp_path):
    rules = {"seeds": [1, 2, 3], "flatness": {"share": 0.5, "within": 0.02}}
    criterion = {"name": "no gain", "left": "plain@2", "right": "plain@1", "expect": "not_above", "margin": 50.0}
    claim = {"text": "Depth does not help.", "denial": "Depth helps.", "criteria": ["no gain"]}
    study = study_of(tmp_path, **rules, criteria=[criterion], claims=[claim])
    low, high = Cell("plain", 1), Cell("plain", 2)
    there = tuned(low, MIDDLE) | tuned(high, MIDDLE) | final(low, 0.002, (50.0, 51.0, 52.0))
    said = judge_study(study, there | final(high, 0.002, (62.0, 53.0, 62.0))).claims[0]
    assert said.text == 'Depth does not help. (Not ruled out: a difference in "no gain" of less than 50 points.)'


def test_what_was_declared_and_is_no_more_is_on_the_page(tmp_path):
    other = {"name": "other", "left": "plain@1", "right": "plain@2", "margin": 1.0}
    claims = [TOY["claims"][0], {"text": "Shallow is better.", "denial": "It is not.", "criteria": ["other"]}]
    both = study_of(tmp_path, seeds=[1, 2, 3], criteria=[TOY["criteria"][0], other], claims=claims)
    low, high = Cell("plain", 1), Cell("plain", 2)
    there = placed(final(low, 0.002, (50.0, 51.0, 52.0)) | final(high, 0.002, (60.0, 61.0, 62.1)))
    for record in there.values():
        record |= {"criteria": both.rules_of(low), "sentences": both.sentences_of(low)}
    assert "No longer declared" not in render_study(both, there)
    lines = render_study(study_of(tmp_path, seeds=[1, 2, 3]), there).splitlines()
    gone = [line for line in lines if line.startswith("- No longer declared: ")]
    assert gone == [
        "- No longer declared: Shallow is better. / It is not.",
        f"- No longer declared: {both.rule(both.criteria[1])}",
    ]


def test_runs_of_one_cell_that_count_differently_are_said(tmp_path):
    study, cell = study_of(tmp_path, seeds=[1, 2, 3]), Cell("plain", 1)
    there = placed(tuned(cell, MIDDLE) | final(cell, 0.002, (50.0, 51.0, 52.0)))
    for record in there.values():
        record |= {"blocks": 1, "params": 10_000, "macs": 200_000}
    assert "the way of counting" not in render_study(study, there) + leaderboard(study, there)
    next(iter(there.values()))["macs"] = 210_000
    said = "The runs of plain at 1 blocks record 200.00 k to 210.00 k MACs: the way of counting, or the model"
    assert said in render_study(study, there) and said in leaderboard(study, there)


def placed(records):
    """With what the tables read of a record, from its name."""
    for name, record in records.items():
        _, point, kind, *_ = name.split("-")
        record |= {"kind": kind, "contender": "plain", "point": int(point), "variant": ""}
        record["rate"] = float(name.split("-lr")[1].split("-seed")[0])
    return records


def test_one_run_of_unknown_flatness_is_not_hidden_by_the_others(tmp_path):
    study = study_of(tmp_path, seeds=[1, 2, 3], flatness={"share": 0.5, "within": 0.02})
    cell = Cell("plain", 1)
    finals = final(cell, 0.002, (50.0, 51.0, 52.0))
    there = placed(tuned(cell, MIDDLE) | finals)
    assert next(row for row in rows_of(study, there) if row["point"] == 1)["moved"] is not None
    next(iter(finals.values()))["curve"] = []
    assert next(row for row in rows_of(study, there) if row["point"] == 1)["moved"] is None


def test_what_was_run_on_other_machines_is_said(tmp_path):
    study = study_of(tmp_path, seeds=[1, 2, 3])
    low, high = Cell("plain", 1), Cell("plain", 2)
    sides = final(low, 0.002, (50.0, 51.0, 52.0)), final(high, 0.002, (60.0, 61.0, 62.1))
    for side, cpu, commit in zip(sides, ("this", "that"), ("aaa", "bbb")):
        for record in side.values():
            record |= {"hardware": {"cpu": cpu, "gpu": None}, "versions": {"torch": "2"}, "commit": commit}
    there = placed(tuned(low, MIDDLE) | tuned(high, MIDDLE) | sides[0] | sides[1])
    lines = render_study(study, there).splitlines()
    assert "that, this; torch 2; commit aaa, bbb." in lines
    next(iter(sides[0].values()))["commit"] = "0123456789ab+"  # of a tree that was changed since
    assert "that, this; torch 2; commit 0123456+, aaa, bbb." in render_study(study, there).splitlines()
    assert lines[-1] == "Pairs of runs from two kinds of machine, whose rounding differs: gain (3 of 3 pairs)."
    assert leaderboard(study, there).splitlines()[-3:] == render_study(study, there).splitlines()[-3:]
    fewer = {name: record for name, record in there.items() if name != next(iter(sides[0]))}
    assert render_study(study, fewer).splitlines()[-1].endswith("gain (2 of 2 pairs).")
    for side in sides:  # all have ended on one machine, and one has begun on the other
        for record in side.values():
            record["hardware"] = {"cpu": "this", "gpu": None}
    begun = {"until_update": 5, "hardware": {"cpu": "that", "gpu": None}, "versions": {"torch": "2"}, "commit": "ccc"}
    next(iter(sides[0].values()))["trained_before"] = [begun]
    lines = render_study(study, there).splitlines()
    assert "that, this; torch 2; commit 0123456+, aaa, bbb, ccc." in lines
    assert lines[-1] == "Pairs of runs from two kinds of machine, whose rounding differs: gain (1 of 3 pairs)."
    del next(iter(sides[0].values()))["trained_before"]
    for record in sides[1].values():
        record["hardware"] = {"cpu": "that", "gpu": None}
    next(iter(sides[1].values())).update(hardware={"cpu": "this", "gpu": None}, versions={"torch": "3"})
    assert render_study(study, there).splitlines()[-3:] == [
        "Pairs of runs from two kinds of machine, whose rounding differs: gain (2 of 3 pairs).",
        "",
        "Pairs of runs from two versions of torch, whose rounding differs: gain (1 of 3 pairs).",
    ]


@pytest.mark.usefixtures("own_registrations")
def test_a_module_of_ones_own_that_changes_amid_a_study_is_noted(tmp_path, capsys, in_process, monkeypatch):
    """Its results stand beside each other as if nothing had been: the page and the next command say it."""
    monkeypatch.chdir(tmp_path)
    Path("my_gain.py").write_text("GAIN = 0.5\n")
    Path("my_halves.py").write_text(
        "import torch\nfrom my_gain import GAIN\nfrom stepsnet.residual import DESIGNS, Connection\n"
        "class Halves(Connection):\n    title = source = 'a test'\n"
        "    def forward(self, x, F):\n        return x + GAIN * F(x)\n"
        "DESIGNS['halves'] = Halves\n"
    )
    Path("base.yaml").write_text(to_yaml(dataclasses.replace(find_recipe("digits/tiny"), imports=("my_halves",))))
    contenders = [
        {"name": name, "settings": {"model.args.residual": name}, "points": {1: {"model.args.depths": [1]}}}
        for name in ("plain", "halves")
    ]
    changes = {"recipe": "base.yaml", "contenders": contenders, "criteria": [], "claims": []}
    file, results = declared(tmp_path, **changes), tmp_path / "results"
    arguments = ("sweep", file, "--run", "run", "--results", results, "--resume")
    status, _, err = run(*arguments, "--cells", "plain@1", capsys=capsys)
    assert status == 0 and "different content" not in err, err
    sys.modules.pop("my_halves"), sys.modules.pop("my_gain")
    Path("my_gain.py").write_text("GAIN = 0.25\n")
    status, out, err = run(*arguments, "--cells", "halves@1", capsys=capsys)
    said = "5 of the results were made, at least in part, with different content of the module my_halves"
    assert status == 0 and said in out + err, err
    page = next(line for line in (tmp_path / "run" / "study.md").read_text().splitlines() if "my_halves" in line)
    assert page.count("5 with sha256:") == 2 and "The module my_halves was changed while the study went on" in page


def test_a_module_that_changes_amid_a_run_is_noted(tmp_path, monkeypatch):
    study, cell = study_of(tmp_path), Cell("plain", 1)
    there = placed(final(cell, 0.002, (50.0, 51.0)))
    first, second = there.values()
    first["versions"] = second["versions"] = {"torch": "2", "my_halves": "sha256:new"}
    assert "my_halves" not in render_study(study, there)
    first["trained_before"] = [{"until_update": 5, "versions": {"torch": "2", "my_halves": "sha256:old"}}]
    page = render_study(study, there)
    assert "The module my_halves was changed while the study went on" in page
    assert "; runs: 1 with sha256:old and then sha256:new, 1 with sha256:new." in page
    monkeypatch.setattr(conductor, "module_versions", lambda names: dict.fromkeys(names, "sha256:new"))
    (line,) = conductor._on_modules(there.values(), tmp_path)
    # a folder that stays has the old result, which would be recorded again
    assert f"remove their files from the results and the folders of these runs from {tmp_path}" in line
    assert line.startswith(
        "1 of the results were made, at least in part, with different content of the module my_halves"
    )
    second["trained_before"] = first["trained_before"]  # and so were all
    assert "; runs: 2 with sha256:old and then sha256:new." in render_study(study, there)


@pytest.mark.parametrize("better", (0.0, 0.3, -0.3))
def test_seeds_that_do_not_differ_decide_nothing(tmp_path, better):
    study = study_of(tmp_path, seeds=[1, 2, 3], flatness={"share": 0.5, "within": 0.02})
    low, high, base = Cell("plain", 1), Cell("plain", 2), (50.1, 51.2, 52.7)
    there = tuned(low, MIDDLE) | tuned(high, MIDDLE) | final(low, 0.002, base)
    judged = judge(study, study.criteria[0], there | final(high, 0.002, [value + better for value in base]))
    assert (judged.verdict, judged.reason) == ("undecided", "the seeds do not differ")


def test_nothing_is_claimed_of_runs_that_are_not_sound(tmp_path):
    study = study_of(tmp_path, seeds=[1, 2, 3], flatness={"share": 0.5, "within": 0.02})
    low, high, base, more = Cell("plain", 1), Cell("plain", 2), (50.0, 51.0, 52.0), (60.0, 61.0, 62.1)
    tuning = tuned(low, MIDDLE) | tuned(high, MIDDLE)

    def judged(there):
        return judge(study, study.criteria[0], there)

    sound = tuning | final(low, 0.002, base) | final(high, 0.002, more)
    assert judged(sound).verdict == "for"
    short = judged(tuning | final(low, 0.002, base) | final(high, 0.002, more[:2]))
    assert (short.verdict, short.reason) == ("not yet", "5 of 6 final runs have ended") and short.mean is None
    moving = judged(tuning | final(low, 0.002, base) | final(high, 0.002, more, last=(1.0, 0.9)))
    assert moving.verdict == "undecided" and "still moved by 10.00% over the last 50% of the run" in moving.reason
    edge = tuned(low, MIDDLE) | tuned(high, {0.001: 3.0, 0.002: 2.0, 0.004: 1.0})
    at_edge = judged(edge | final(low, 0.002, base) | final(high, 0.001, more))
    assert at_edge.verdict == "undecided" and "at the edge of its grid" in at_edge.reason
    gone = final(high, 0.002, more)
    gone[next(iter(gone))] = {"diverged": "loss: got nan"}
    assert judged(tuning | final(low, 0.002, base) | gone).reason == "plain@2 has diverged with seed 1"
    other_rate = judged(tuning | final(low, 0.002, base) | final(high, 0.004, more))  # of a rate that was not chosen
    assert other_rate.verdict == "not yet"


def test_flatness_is_the_relative_change_over_the_last_part(tmp_path):
    study = study_of(tmp_path, flatness={"share": 0.1, "within": 0.02})
    curve = [{"epoch": epoch, "train_clean_loss": 2.0 - 0.1 * epoch} for epoch in range(1, 16)]
    assert flatness_of(study, {"curve": curve}) == pytest.approx((0.65 - 0.5) / 0.65)  # from epoch 13.5 to 15
    assert flatness_of(study, {"curve": curve, "epochs": 15}) is not None
    for cut_off in ({"curve": curve[:1]}, {"curve": [{"epoch": 3}]}, {"curve": curve, "epochs": 20}, {}):
        assert flatness_of(study, cut_off) is None
    ends = [
        [{"epoch": 1, "train_clean_loss": a}, {"epoch": 2, "train_clean_loss": b}] for a, b in ((1, 0), (0, 1), (0, 0))
    ]
    study = study_of(tmp_path, flatness={"share": 0.5, "within": 0.02})
    assert [flatness_of(study, {"curve": end}) for end in ends] == [1.0, math.inf, 0.0]


def test_the_shipped_studies_hold():
    for name in studies():
        study = find_study(name)
        if name.startswith("depth-bench/"):  # many contenders: the shallowest of each, and the sweep checks all
            contenders = [dataclasses.replace(one, points=dict([min(one.points.items())])) for one in study.contenders]
            study = dataclasses.replace(study, contenders=tuple(contenders), order=(), criteria=(), claims=())
            assert {one.settings.get("model.args.residual", "plain") for one in contenders} <= set(DESIGNS)
        check_models(study, open_data=False)
    assert {"evidence/cifar10-depth", "depth-bench/cifar10", "depth-bench/tinyshakespeare"} <= set(studies())
    assert find_study("digits/steps_*") is None


def test_a_run_that_fails_is_named_and_one_that_diverges_is_a_result(tmp_path, monkeypatch, capsys):
    said = {"plain-2-tuning-lr0.004-seed0": "stepsnet: loss: got nan at update 3, expected a finite number"}
    said["plain-1-tuning-lr0.002-seed0"] = "stepsnet: cannot write: no space"

    def run_all(waiting, jobs, display, ended):
        for job in list(waiting):
            if job.name in said:
                waiting.remove(job)
                # a run tells of it in its own log too, where the other's is of a process before
                line = {"kind": "diverged", "step": 3, "text": "loss: got nan"}
                write_atomically(Path(job.folder) / "metrics.jsonl", json.dumps(line) + "\n")
                write_process(Path(job.folder), 0, made_with)
                ended(job, Diverged.status if "got nan" in said[job.name] else 2, said[job.name])
        left.extend(job.name for job in waiting)

    left, made_with = [], provenance()
    monkeypatch.setattr(conductor, "run_all", run_all)
    status, _, err = run("sweep", declared(tmp_path), "--run", tmp_path / "run", capsys=capsys)
    assert status == 2 and "1 of 2 runs failed, such as plain-1-tuning-lr0.002-seed0: cannot write: no space" in err
    assert left == ["plain-2-tuning-lr0.001-seed0", "plain-2-tuning-lr0.002-seed0"]  # the other cell goes on
    records = [json.loads(file.read_text()) for file in (tmp_path / "run" / "results").glob("*.json")]
    assert [record["rate"] for record in records] == [0.004] and "got nan" in records[0]["diverged"]
    assert records[0]["data"] == "digits" and records[0]["hardware"] == made_with["hardware"]
    assert "0.004: diverged" in (tmp_path / "run" / "study.md").read_text()  # what the other runs have given


def test_a_page_that_cannot_be_written_ends_no_sweep_and_replaces_no_file(tmp_path, capsys, in_process):
    one = [{"name": "plain", "points": {1: {"model.args.depths": [1]}}}]
    file, folder = declared(tmp_path, contenders=one, criteria=[], claims=[]), tmp_path / "run"
    folder.mkdir()
    (folder / "study.md").write_text("mine")
    status, out, err = run("sweep", file, "--run", folder, "--resume", capsys=capsys)
    assert status == 2 and f"{folder / 'study.md'} was not written by stepsnet" in err and len(in_process) == 5
    assert out.count(": no page: ") == 2 and (folder / "study.md").read_text() == "mine"
    (folder / "study.md").unlink()
    (folder / "leaderboard.md").write_text("mine")
    arguments = ("sweep", file, "--run", folder, "--render")
    status, _, err = run(*arguments, capsys=capsys)
    assert status == 2 and f"{folder / 'leaderboard.md'} was not written by stepsnet" in err and "--force" not in err
    (folder / "leaderboard.md").unlink()
    for _ in range(2):  # those of its own are replaced
        status, out, err = run(*arguments, capsys=capsys)
        assert status == 0 and (folder / "study.md").read_text().strip() == out.strip(), err


def test_a_row_tells_of_the_variant_that_was_chosen(tmp_path):
    study = with_variants(tmp_path)
    there = {}
    for p in due(study, {}):
        score = (p.variant == "b") - abs(p.rate - 0.002)
        run = {"kind": "tuning", "contender": "plain", "point": 1, "variant": p.variant, "rate": p.rate}
        facts = {"blocks": {"a": 1, "b": 2}[p.variant], "params": 100, "macs": 1000}
        there[p.name] = {**run, **facts, "metrics": {"val_top1": score}}
    [row] = rows_of(study, there)
    assert (row["variant"], row["blocks"]) == ("b", 2)


def test_the_edge_of_another_variant_is_not_said_to_be_the_rates(tmp_path):
    study, there = with_variants(tmp_path), {}
    for p in due(study, {}):
        score = 1 - abs(p.rate - 0.002) if p.variant == "b" else p.rate  # the other variant's best is at its edge
        there[p.name] = {"kind": "tuning", "variant": p.variant, "rate": p.rate, "metrics": {"val_top1": score}}
    for seed in study.seeds:
        last = Planned(Cell("plain", 1), "final", "b", 0.002, seed)
        there[last.name] = {"kind": "final", "variant": "b", "rate": 0.002, "metrics": {"test_top1": 50.0}}
    for record in there.values():
        record |= {"contender": "plain", "point": 1}
    assert "| b 0.002 (a variant is at the edge of its grid) |" in render_study(study, there)
    assert "| 50.0 ± 0.0 (rate of a variant at an edge, " in leaderboard(study, there)


def perplexity_of(tmp_path, recipe, **metrics):
    """The record of a tuning run with such metrics, for a study by the perplexity per word."""
    run = make_run(tmp_path / f"{recipe.task}-{len(list(tmp_path.iterdir()))}")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"metrics": metrics, "vocab_size": 65}))
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"kind": "epoch", "epoch": 9, "step": 200, "val_loss": 800.0, "val_word_perplexity": Infinity}\n')
    study = study_of(tmp_path, metric="word_perplexity")
    return record_of(study, Planned(Cell("plain", 1), "tuning", "", 0.002, 0), recipe, run, "a command")


def test_a_perplexity_beyond_all_bounds_is_the_worst(tmp_path):
    """One that the text has not, or the task, is a mistake in the declaration."""
    text = find_recipe("tinyshakespeare/shallow")
    record = perplexity_of(tmp_path, text, val_loss=7.0)  # characters at chance come to log 65, 4.2
    assert record["metrics"] == {"val_loss": 7.0, "val_word_perplexity": None}
    assert record["curve"][-1]["val_word_perplexity"] is None and write_record(tmp_path / "results", record)
    study, cell = study_of(tmp_path, metric="word_perplexity"), Cell("plain", 1)
    scores = {"plain-1-tuning-lr0.001-seed0": 300.0, "plain-1-tuning-lr0.004-seed0": 200.0}
    there = {name: {"metrics": {"val_word_perplexity": score}} for name, score in scores.items()}
    assert choice_of(study, cell, there | {record["run"]: record}).rate == 0.004
    for recipe, loss in ((text, 3.0), (find_recipe("digits/tiny"), 7.0)):
        with pytest.raises(UserError, match="has no val_word_perplexity, expected one of its metrics: val_loss"):
            perplexity_of(tmp_path, recipe, val_loss=loss)


def test_a_table_says_what_is_there(tmp_path):
    study = study_of(tmp_path, seeds=[1, 2, 3])
    study = dataclasses.replace(study)
    there = {}
    for name, record in (tuned(Cell("plain", 1), MIDDLE) | final(Cell("plain", 1), 0.002, (50.0, 52.0))).items():
        point, kind = int(name.split("-")[1]), name.split("-")[2]
        rate = float(name.split("-lr")[1].split("-")[0])
        there[name] = {**record, "contender": "plain", "point": point, "kind": kind, "variant": "", "rate": rate}
    text = render_study(study, there)
    assert text.startswith("5 of 12 runs have ended.") and "| plain | 1 |" in text and "51.0 ± 1.4" in text
    assert "plain, 1 blocks: 0.001: 1.0, 0.002: 2.0, 0.004: 1.0" in text
    assert "| not yet: 2 of 6 final runs have ended |" in text


def test_a_study_of_segmentation_is_tuned_and_scored(tmp_path, capsys, in_process):
    write_camvid(tmp_path / "data", train=6, val=2)
    recipe = tiny_recipe(tmp_path / "data", "holdout=2")
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    declaration = TOY | {
        "recipe": "recipe.yaml",
        "settings": {},
        "metric": "miou",
        "tuning": {"rates": [0.0001, 0.001, 0.01], "most_rates": 3, "length": 1.0},
        "flatness": {"key": "train_loss", "share": 0.5, "within": 10.0},
        "contenders": [{"name": "plain", "points": {1: {}}}],
        "criteria": [],
        "claims": [],
    }
    file = declared(tmp_path, **declaration)
    status, _out, err = run("sweep", file, "--run", tmp_path / "run", capsys=capsys)
    assert status == 0, err
    records = [json.loads(path.read_text()) for path in (tmp_path / "run" / "results").glob("*.json")]
    finals = [record for record in records if record["kind"] == "final"]
    assert len(records) == 5 and [len(finals), finals[0]["images"]["train"]] == [2, 4]
    assert all("test_miou" in record["metrics"] and record["macs"] > 0 for record in finals)
    wrong = declared(tmp_path, **declaration | {"metric": "top1"})
    status, _, err = run("sweep", wrong, "--run", tmp_path / "other", capsys=capsys)
    words = "metric: got 'top1' for plain@1, a recipe of segmentation, expected one of pixel_accuracy, miou"
    assert status == 2 and words in err
