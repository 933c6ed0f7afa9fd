"""What is wrong with a declaration or a command is one line, before anything is trained."""

import dataclasses
import errno
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import yaml
from PIL import Image
from toy_study import TOY, declared, run

from stepsnet.errors import UserError
from stepsnet.files.writing import write_new
from stepsnet.recipes import find_recipe
from stepsnet.settings.overrides import override, to_plain, to_yaml
from stepsnet.study.declare import Cell, read_study, studies
from stepsnet.study.record import diverged_record, settings_of, write_record
from stepsnet.study.results import read_results
from stepsnet.study.run_plan import Planned, _keys_of_training, check_models, data_of, recipe_of


def change(**of_contender):
    return {"contenders": [{**TOY["contenders"][0], **of_contender}]}


WIDE = {"name": "wide", "points": {2: {"model.args.widths": [32], "model.args.depths": [1]}}}
TUNING = Planned(Cell("plain", 1), "tuning", "", 0.001, 0)
LIKE_PLAIN = {"model.args.widths": [16], "model.args.depths": [2], "weight_decay": 0.1}
SAME = {"name": "same", "points": {2: {"model.args.depths": [2]}}}
TWINS = (("a", 1, {"variants": {"2": {}}}), ("a-1", 2, {}))


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"criteria": [{**TOY["criteria"][0], "left": "plian@2"}]},
            "got 'plian@2', expected a contender@point (did you",
        ),
        ({"criteria": [{**TOY["criteria"][0], "right": "plain@3"}]}, "got 'plain@3'"),
        ({"tuning": {"rates": [0.001, 0.002]}}, "tuning.rates: got [0.001, 0.002], expected at least 3"),
        ({"tuning": {"rates": [0.001, 0.004, 0.002]}}, "that increase"),
        ({"tuning": {"rates": [0.001, 0.002, "fast"]}}, "tuning.rates.2: got 'fast', expected a valid number"),
        ({"tuning": {**TOY["tuning"], "seeds": [0, 1]}}, "seeds: got 1, which is one of tuning.seeds too"),
        ({"tuning": {**TOY["tuning"], "seeds": [0, 5, 5]}}, "tuning.seeds: got 5 twice"),
        ({"tuning": {**TOY["tuning"], "seeds": []}}, "tuning.seeds: got [], expected at least 1"),
        ({"tuning": {**TOY["tuning"], "seed": 0}}, "unknown key 'tuning.seed'"),
        ({"seeds": [1]}, "seeds: got [1], expected at least 2"),
        ({"seeds": [1, -2]}, "seeds.1: got -2, expected at least 0"),
        ({"tuning": {**TOY["tuning"], "seeds": [-4]}}, "tuning.seeds.0: got -4, expected at least 0"),
        ({"tuning": {"rates": [0.001, 0.002, 1e300]}}, "tuning.rates.2: got 1e+300, expected at most 1e+06"),
        ({"tuning": {**TOY["tuning"], "length": 1e-9}}, "tuning.length: got 1e-09"),
        ({"tuning": {**TOY["tuning"], "most_rates": -4}}, "tuning.most_rates: got -4"),
        ({"macs_tolerance": -1}, "macs_tolerance: got -1"),
        ({"flatness": {"key": "nope"}}, "flatness.key: got 'nope'"),
        ({"flatness": {"key": "train_mixed_loss"}}, "flatness.key: got 'train_mixed_loss', expected a split and"),
        (
            {"tuning": {**TOY["tuning"], "rates": [1e-5, 2e-5, 4e-5], "most_rates": 5}},
            "plain@1: min_lr: got 5e-06, expected at most lr, 2.5e-06 (the lowest rate that the grid may grow to)",
        ),
        ({"name": "../up"}, "name: got '../up'"),
        ({"settings": {**TOY["settings"], "seed": 3}}, "settings: got seed among the settings"),
        ({"criteria": [{**TOY["criteria"][0], "right": TOY["criteria"][0]["left"]}]}, "on both sides"),
        (change(variants={"../x": {}}), "contenders.0.variants: got '../x', expected text of the form"),
        ({"seeds": [1, 1]}, "seeds: got [1, 1]"),
        ({"recipe": "digits/tyni"}, "plain@1: recipe: got 'digits/tyni'"),
        ({"recipe": "gone.yaml"}, "cannot read gone.yaml"),
        ({"contenders": [*TOY["contenders"], WIDE]}, "wide@2: got 0.22M multiply-accumulates"),
        (change(settings={"model.args.num_heads": [3]}), "model steps_deit_tiny_patch16_224"),
        (change(settings={"epoch": 3}), "plain@1: unknown key 'epoch'"),
        (change(points={}), "contenders.0.points: got {}, expected at least 1 of them"),
        (change(points={0: {}}), "contenders.0.points"),
        (change(name="a b"), "contenders.0.name: got 'a b', expected text of the form"),
        (change(pionts={}), "points, variants, unequal (did you mean points"),
        (
            {"settings": {**TOY["settings"], "holdout": None}},
            "plain@1: score_test: got true, but digits has no test split besides",
        ),
        ({"metric": "top2"}, "metric: got 'top2'"),
        ({"order": [["plain@2", "plain@2"]]}, "order: got plain@2 twice"),
        (
            {"claims": [{**TOY["claims"][0], "criteria": ["gian"]}]},
            "got the criterion 'gian', expected a declared one (did",
        ),
        ({"recipe": "pennfudan/tiny"}, "recipe: got 'pennfudan/tiny'"),
        ({"seed": 3}, "unknown key 'seed'"),
        ({"settings": {**TOY["settings"], "data": "digits"}}, "settings: got data among the settings"),
        (
            {"metric": "miou"},
            "metric: got 'miou' for plain@1, a recipe of classification, expected one of top1, top5, loss",
        ),
        ({"settings": {**TOY["settings"], "clean_samples": 0}}, "flatness.key: got train_clean_loss, but plain@1 has"),
        ({"flatness": {"key": "train_clean_miou"}}, "flatness.key: got train_clean_miou, which the runs of plain@1"),
        ({"settings": {**TOY["settings"], "holdout": 5000}}, "plain@1: holdout: got 5000"),
        ({"settings": {**TOY["settings"], "epochs": 1}}, "tuning.length: plain@1: got 0.5 of 1 epoch"),
        (
            {"criteria": [{**TOY["criteria"][0], "expect": "not_above", "margin": 0.0}]},
            "got not_above without a margin",
        ),
        (
            {"contenders": [*TOY["contenders"], {**TOY["contenders"][0], "name": "b", "label": "plain"}]},
            "got plain twice",
        ),
        (
            {
                "contenders": [{"name": name, "points": {point: {}}, **more} for name, point, more in TWINS],
                **{"criteria": [], "claims": []},
            },
            "got a@1 and a-1@2, which would both have a run named a-1-2-tuning-lr0.001-seed0",
        ),
        (
            {"contenders": [*TOY["contenders"], SAME]},
            "got the same settings for plain@2 and same@2, expected different",
        ),
        (
            {"contenders": [*TOY["contenders"], {**SAME, "settings": {"epochs": 4}}]},
            "same@2: got epochs 4, where plain@2 has 2, expected the same (or `unequal` with the reason)",
        ),
        (
            {"contenders": [*TOY["contenders"], {**SAME, "settings": {"batch_size": 32}}]},
            "same@2: got batch_size 32, where plain@2 has 64, expected the same (or `unequal` with the reason)",
        ),
        (
            {"contenders": [*TOY["contenders"], {**SAME, "settings": {"holdout": 50}}]},
            "same@2: got holdout 50, where plain@2 has 100, expected the same",
        ),
        # the first of two variants is checked too
        (
            {"contenders": [*TOY["contenders"], {**WIDE, "variants": {"wide": {}, "like": LIKE_PLAIN}}]},
            "wide@2, wide: got 0.22M multiply-accumulates",
        ),
        ({"claims": [{"text": "Depth helps.", "criteria": ["gain"]}]}, "claims.0.denial: got none, expected one"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_trained(tmp_path, capsys, changes, words):
    status, _, err = run("sweep", declared(tmp_path, **changes), "--run", tmp_path / "run", capsys=capsys)
    assert status == 2 and words in err and len(err.splitlines()) == 1, err
    assert not (tmp_path / "run").exists()


RECORD = {
    "study": "toy",
    "run": "plain-1-tuning-lr0.001-seed0",
    "contender": "plain",
    "point": 1,
    "kind": "tuning",
    "variant": "",
    "rate": 0.001,
    "seed": 0,
    "settings": {},
    "data": "digits",
    "samples": {"train": 128, "evaluated": 100},
    "metrics": {"val_top1": 50.0},
}
FINAL = {**RECORD, "run": "plain-1-final-lr0.001-seed1", "kind": "final", "seed": 1}


def write(results, study, *records, **others):
    """With the settings that such a run of the study has."""
    results.mkdir(exist_ok=True)
    for record in records:
        planned = Planned(Cell("plain", 1), record.get("kind", "tuning"), "", record.get("rate"), record.get("seed"))
        try:
            settings = settings_of(recipe_of(study, planned)) | others
        except (ValueError, UserError):  # of a record that is refused for its rate or seed
            settings = others
        whole = {**record, "settings": settings} if "settings" in record else record
        (results / f"{record['run']}.json").write_text(json.dumps(whole))


def test_a_record_of_a_model_whose_blocks_are_not_found_is_read(tmp_path):
    study = read_study(declared(tmp_path))
    write(tmp_path / "results", study, {**RECORD, "blocks": None, "layers": None, "commit": None})
    assert list(read_results(tmp_path / "results", study)) == [RECORD["run"]]


@pytest.mark.parametrize(
    "record, words",
    [
        (
            {"study": "toy", "run": "plain-1-tuning"},
            "has no contender, expected a record as a run of the study writes it",
        ),
        ({**RECORD, "rate": "fast"}, "has rate 'fast', expected a record as a run of the study writes it"),
        ({**RECORD, "claims": [1]}, "has claims '[1]', expected a list of sentences"),
        ({**RECORD, "criteria": None}, "has criteria 'None', expected a list of sentences"),
        ({**RECORD, "seed": None}, "has seed 'None', expected"),
        ({**RECORD, "metrics": None}, "has metrics 'None', expected a record as a run of the study writes it"),
        ({**RECORD, "metrics": {"val_top1": "50"}}, "has val_top1 '50', expected a number"),
        ({**RECORD, "curve": None}, "has curve 'None', expected a record as a run"),
        ({**RECORD, "curve": ["a"]}, "has a curve with 'a', expected a record as a run"),
        ({**RECORD, "curve": [{"epoch": "1"}]}, "has a curve with "),
        ({**RECORD, "hardware": {"cpu": 3}}, "has hardware with cpu '3', expected"),
        ({**RECORD, "versions": {"torch": None}}, "has versions with torch 'None', expected"),
        ({**RECORD, "macs": "many"}, "has macs 'many', expected"),
        ({**RECORD, "commit": 5}, "has commit 5, expected"),
        ({**RECORD, "rate": -1}, "has rate -1, expected"),
        (
            {**FINAL, "params": 99},
            "has {'params': 98}, but plain-1-final-lr0.001-seed1 has {'params': 99}, expected",
        ),
        (
            {**FINAL, "tuning": "rates 0.001 0.002 0.003, at most 3, seeds 0, length 0.5"},
            "under the tuning rates 0.001 0.002 0.003, at most 3, seeds 0, length 0.5, but the study now declares "
            "rates 0.001 0.002 0.004, at most 3, seeds 0, length 0.5: its test score is known, so another tuning needs "
            "a study of another name",
        ),
        ({**RECORD, "study": "other"}, "belongs to the study other, expected results of toy"),
        ({**RECORD, "run": "plain-1-tuning-lr0.002-seed0"}, "holds the record of plain-1-tuning-lr0.001-seed0"),
        ({**RECORD, "contender": "wide", "run": "wide-1-tuning-lr0.001-seed0"}, "is of wide@1, which is not declared"),
        ({**RECORD, "variant": "b", "run": "plain-1-b-tuning-lr0.001-seed0"}, "is of the variant 'b', expected one of"),
        (
            {**FINAL, "seed": 7, "run": "plain-1-final-lr0.001-seed7"},
            "has a rate or seed that the study does not declare",
        ),
        (
            {**RECORD, "rate": 0.003, "run": "plain-1-tuning-lr0.003-seed0"},
            "a run that has a result cannot be left out",
        ),
        # without the data nothing says which of two is meant: the first result's
        (
            {**FINAL, "data": "hfds:a/digits"},
            {
                "--render": "was trained on digits, expected one data set for all, hfds:a/digits",
                "--dry-run": "was trained on hfds:a/digits, expected one data set for all, digits",
            },
        ),
        (
            {**FINAL, "data": "folder:b"},
            {
                "--render": "was trained on digits, expected one data set for all, folder:b",
                "--dry-run": "was trained on folder:b, expected one data set for all, digits",
            },
        ),
        ({**FINAL, "samples": {"train": 999}}, "was trained on {'samples': {'train': 128"),
    ],
)
def test_a_result_that_does_not_belong_is_one_line(tmp_path, capsys, record, words):
    file, results = declared(tmp_path), tmp_path / "results"
    write(results, read_study(file), RECORD, record)
    if "params" in record:
        write(results, read_study(file), {**record, "run": f"{record['run'][:-1]}2", "seed": 2, "params": 98})
    for option in ("--render", "--dry-run"):
        status, _, err = run("sweep", file, option, "--results", results, "--run", tmp_path / "run", capsys=capsys)
        expected = words[option] if isinstance(words, dict) else words
        assert status == 2 and expected in err and len(err.splitlines()) == 1, err


def test_a_final_run_is_at_the_rate_that_was_chosen(tmp_path, capsys):
    file, results = declared(tmp_path), tmp_path / "results"
    tuned = [
        {**RECORD, "run": f"plain-1-tuning-lr{rate:g}-seed0", "rate": rate, "metrics": {"val_top1": value}}
        for rate, value in ((0.001, 50.0), (0.002, 60.0), (0.004, 55.0))
    ]
    arguments = ("sweep", file, "--results", results, "--run", tmp_path / "run")
    write(results, read_study(file), *tuned[:2], {**FINAL, "metrics": {"test_top1": 50.0}})
    assert run(*arguments, "--dry-run", capsys=capsys)[0] == 0  # what is chosen is not yet known
    write(results, read_study(file), tuned[2])
    for option in ("--dry-run", "--render"):
        status, _, err = run(*arguments, option, capsys=capsys)
        words = "plain-1-final-lr0.001-seed1 is not at 0.002, which tuning has chosen: a run that has a result cannot"
        assert status == 2 and words in err and len(err.splitlines()) == 1, err


def test_a_copy_of_a_record_does_not_count_in_its_place(tmp_path, capsys):
    file, results = declared(tmp_path), tmp_path / "results"
    write(results, read_study(file), RECORD)
    (results / "zz-copy.json").write_text((results / f"{RECORD['run']}.json").read_text().replace("50.0", "99.0"))
    status, _, err = run("sweep", file, "--results", results, "--render", capsys=capsys)
    name = RECORD["run"]
    assert status == 2 and f"zz-copy.json holds the record of {name}, expected the name {name}.json" in err


def test_a_lost_record_of_a_grid_that_has_grown_is_made_again(tmp_path, capsys):
    """The rates beyond the first grid rest on it; how far they reach is not known without it."""
    file, results = declared(tmp_path, tuning={**TOY["tuning"], "most_rates": 5}), tmp_path / "results"
    scores = {0.001: 50.0, 0.002: 60.0, 0.004: 70.0, 0.008: 80.0, 0.016: 75.0}
    tuned = [
        {**RECORD, "run": f"plain-1-tuning-lr{rate:g}-seed0", "rate": rate, "metrics": {"val_top1": value}}
        for rate, value in scores.items()
    ]
    end = {**FINAL, "run": "plain-1-final-lr0.008-seed1", "rate": 0.008, "metrics": {"test_top1": 50.0}}
    write(results, read_study(file), *tuned, end)
    arguments = ("sweep", file, "--results", results, "--run", tmp_path / "run", "--dry-run")
    assert run(*arguments, capsys=capsys)[0] == 0
    (results / f"{tuned[1]['run']}.json").unlink()
    status, out, err = run(*arguments, capsys=capsys)
    assert status == 0 and f"  {tuned[1]['run']}" in out.splitlines(), err
    write(results, read_study(file), {**tuned[0], "run": "plain-1-tuning-lr0.0003-seed0", "rate": 0.0003})
    status, _, err = run(*arguments, capsys=capsys)
    assert status == 2 and "plain-1-tuning-lr0.0003-seed0 has a rate or seed that the study does not declare" in err


def made(study, planned, score):
    """The record of a run that has been run."""
    settings = settings_of(recipe_of(study, planned))
    place = {"run": planned.name, "point": planned.cell.point, "kind": planned.kind}
    place |= {"rate": planned.rate, "seed": planned.seed}
    return {**RECORD, **place, "metrics": {"val_top1": score, "test_top1": score}, "settings": settings}


@pytest.fixture
def at_once(monkeypatch):
    """Runs that take no time; their names in order, and the scores at a rate, by default 50."""
    names, scores = [], {}

    def run_all(waiting, jobs, display, ended):
        while waiting:
            job = waiting.pop(0)
            names.append(job.name)
            ended(job, 0, "")

    monkeypatch.setattr("stepsnet.study.conductor.run_all", run_all)
    monkeypatch.setattr(
        "stepsnet.study.conductor.record_of", lambda study, run, *_: made(study, run, scores.get(run.rate, 50.0))
    )
    return names, scores


def test_a_lost_record_that_comes_out_otherwise_starts_no_runs_at_a_second_rate(tmp_path, capsys, at_once):
    names, scores = at_once
    file, results = declared(tmp_path, criteria=[], claims=[]), tmp_path / "results"
    tuned = [
        {**RECORD, "run": f"plain-1-tuning-lr{rate:g}-seed0", "rate": rate, "metrics": {"val_top1": value}}
        for rate, value in ((0.001, 50.0), (0.002, 60.0))
    ]
    last = {**FINAL, "run": "plain-1-final-lr0.002-seed1", "rate": 0.002, "metrics": {"test_top1": 50.0}}
    write(results, read_study(file), *tuned, last)
    scores[0.004] = 60.5
    arguments = ("sweep", file, "--run", tmp_path / "run", "--results", results, "--resume", "--cells", "plain@1")
    for _ in range(2):
        status, _, err = run(*arguments, capsys=capsys)
        words = (
            "plain-1-final-lr0.002-seed1 is not at 0.004, which tuning has chosen: a run that has a result cannot be "
        )
        words += "left out"
        assert status == 2 and err.startswith(f"stepsnet: run {names[-1]} failed: results: {words}"), err
        assert not (results / f"{names[-1]}.json").exists()  # the record that was lost may be found
    assert names == ["plain-1-tuning-lr0.004-seed0"] * 2


def test_what_another_sweep_has_recorded_is_checked_record_by_record(tmp_path, capsys, at_once, monkeypatch):
    names, _ = at_once
    file, results = declared(tmp_path, criteria=[], claims=[]), tmp_path / "results"
    fits = {**RECORD, "run": "plain-1-tuning-lr0.004-seed0", "rate": 0.004}
    other = {**RECORD, "run": "plain-2-tuning-lr0.001-seed0", "point": 2}

    def record_of(study, planned, *_):
        write(results, study, other, weight_decay=0.9)
        write(results, study, fits)
        return made(study, planned, 50.0)

    monkeypatch.setattr("stepsnet.study.conductor.record_of", record_of)
    arguments = ("sweep", file, "--run", tmp_path / "run", "--results", results)
    status, out, err = run(*arguments, "--cells", "plain@1", capsys=capsys)
    words = f"results: {other['run']} was made with weight_decay 0.9, expected 0.05, as the study says"
    assert f"left out: {words}" in " ".join(out.split()) and status == 2 and err == f"stepsnet: {words}\n", err
    finals = [f"plain-1-final-lr0.001-seed{seed}" for seed in (1, 2)]  # by the record at 0.004 too
    assert names == ["plain-1-tuning-lr0.001-seed0", "plain-1-tuning-lr0.002-seed0", *finals]


def test_a_record_of_another_sweep_that_does_not_fit_is_not_taken_in_place_of_ones_own(
    tmp_path, capsys, at_once, monkeypatch
):
    names, _ = at_once
    file, results = declared(tmp_path, criteria=[], claims=[]), tmp_path / "results"

    def record_of(study, planned, *_):
        write(results, study, RECORD, weight_decay=0.9)
        return made(study, planned, 50.0)

    monkeypatch.setattr("stepsnet.study.conductor.record_of", record_of)
    arguments = ("sweep", file, "--run", tmp_path / "run", "--results", results, "--cells", "plain@1")
    status, _, err = run(*arguments, capsys=capsys)
    words = f"results: {RECORD['run']} was made with weight_decay 0.9, expected 0.05, as the study says"
    assert status == 2 and err == f"stepsnet: run {RECORD['run']} failed: {words}\n" and names == [RECORD["run"]]


def test_what_another_sweep_has_recorded_stays(tmp_path, capsys, monkeypatch):
    file, results, started = declared(tmp_path, criteria=[], claims=[]), tmp_path / "results", []
    study = read_study(file)

    def run_all(waiting, jobs, display, ended):
        job = waiting.pop(0)
        scores = {0.001: 50.0, 0.002: 60.0, 0.004: 55.0}
        for rate, value in scores.items():
            name = f"plain-1-tuning-lr{rate:g}-seed0"
            write(results, study, {**RECORD, "run": name, "rate": rate, "metrics": {"val_top1": value}})
        ended(job, 0, "")
        started.extend(one.name for one in waiting)

    monkeypatch.setattr("stepsnet.study.conductor.run_all", run_all)
    status, out, err = run("sweep", file, "--run", tmp_path / "run", "--results", results, capsys=capsys)
    assert status == 0 and "another sweep has already recorded this run" in out + err, err
    assert json.loads((results / f"{RECORD['run']}.json").read_text())["metrics"] == {"val_top1": 50.0}
    of_shallow = [name for name in started if name.startswith("plain-1")]
    assert of_shallow == ["plain-1-final-lr0.002-seed1", "plain-1-final-lr0.002-seed2"]


def test_of_two_records_written_at_once_the_first_stays(tmp_path, capsys, monkeypatch):
    """The other sweep's comes after this one has looked for it; and a file beside it that is no whole record."""
    file, results = declared(tmp_path, criteria=[], claims=[]), tmp_path / "results"
    study, theirs = read_study(file), {**RECORD, "metrics": {"val_top1": 50.0}}

    def run_all(waiting, jobs, display, ended):
        (results / "x (1).json").write_text(json.dumps({"study": "toy", "run": "x"}))
        write(results, study, {**RECORD, "run": "plain-1-tuning-lr0.002-seed0", "rate": 0.002})
        of_shallow = [job for job in waiting if job.name.startswith("plain-1-")][:2]
        for job in of_shallow:  # two at once
            waiting.remove(job)
        for job in of_shallow:
            ended(job, 0, "")

    def record_of(study, planned, *rest):
        assert planned.rate != 0.002, "the bad file hides the other sweep's record"
        write(results, study, theirs)
        return made(study, planned, 10.0)

    results.mkdir()
    monkeypatch.setattr("stepsnet.study.conductor.run_all", run_all)
    monkeypatch.setattr("stepsnet.study.conductor.record_of", record_of)
    status, out, err = run("sweep", file, "--run", tmp_path / "run", "--results", results, capsys=capsys)
    assert (out + err).count("another sweep has already recorded this run") == 2
    assert (out + err).count("left out: results:") == 1 and "x (1).json has no contender" in out + err
    assert json.loads((results / f"{RECORD['run']}.json").read_text())["metrics"] == {"val_top1": 50.0}
    assert status == 2 and "x (1).json has no contender" in err  # the page would be of less than there is


def test_a_new_file_is_written_by_one_of_many(tmp_path, monkeypatch):
    file = tmp_path / "folder" / "a.json"
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda number: write_new(file, str(number)), range(32)))
    assert written.count(True) == 1 and file.read_text() == str(written.index(True))

    def link(*_):
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr("os.link", link)
    assert not write_new(file, "again") and file.read_text() == str(written.index(True))
    assert write_new(tmp_path / "b.json", "b") and (tmp_path / "b.json").read_text() == "b"
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "a.json",
        "b.json",
    ]  # and nothing beside


def test_contenders_that_are_unlike_say_so_on_the_page(tmp_path, capsys):
    longer = {**SAME, "settings": {"epochs": 4}, "unequal": "it has twice the epochs"}
    file, results = declared(tmp_path, contenders=[*TOY["contenders"], longer]), tmp_path / "results"
    write(results, read_study(file), RECORD)
    status, out, err = run("sweep", file, "--results", results, "--render", capsys=capsys)
    assert status == 0 and "- same is not like the others: it has twice the epochs" in out, err


def test_a_record_that_nobody_could_read_is_not_written(tmp_path):
    with pytest.raises(UserError, match="results: a: Out of range"):
        write_record(tmp_path, {"run": "a", "seconds": float("inf")})
    assert not list(tmp_path.iterdir())


def test_results_of_other_data_are_not_gone_on_with(tmp_path, capsys):
    results = tmp_path / "results"
    write(results, read_study(declared(tmp_path)), {**RECORD, "data": "folder:a"})
    arguments = (
        "sweep",
        declared(tmp_path, data="digits"),
        "--results",
        results,
        "--run",
        tmp_path / "run",
        "--resume",
    )
    status, _, err = run(*arguments, capsys=capsys)
    assert status == 2 and "was trained on folder:a, expected one data set for all, digits" in err
    for options in (("--dry-run", "--data", "digits"), ("--render", "--data", "digits"), ("--resume",), ("--dry-run",)):
        file = declared(tmp_path, data="")  # and those of the recipe are the digits
        status, _, err = run("sweep", file, "--results", results, "--run", tmp_path / "run", *options, capsys=capsys)
        assert status == 2 and "was trained on folder:a, expected one data set for all, digits" in err
    declared(tmp_path, data="digits")
    status, _, err = run(*arguments[:2], "--render", "--results", tmp_path / "typo", capsys=capsys)
    assert status == 2 and "typo does not exist, expected a folder with the results of runs" in err


def test_a_setting_that_a_result_does_not_know_had_its_default(tmp_path, capsys):
    """A record may be older than a setting of its recipe."""
    file, results = declared(tmp_path), tmp_path / "results"
    write(results, study := read_study(file), RECORD)
    path = results / f"{RECORD['run']}.json"
    record = json.loads(path.read_text())
    assert record["settings"].pop("betas") == settings_of(recipe_of(study, TUNING))["betas"] is None
    path.write_text(json.dumps(record))
    arguments = ("--results", results, "--dry-run", "--run", tmp_path / "run")
    assert run("sweep", file, *arguments, capsys=capsys)[0] == 0
    file = declared(tmp_path, settings={**TOY["settings"], "betas": [0.8, 0.999]})
    write(results, read_study(file), RECORD)
    record = json.loads(path.read_text())
    del record["settings"]["betas"]
    path.write_text(json.dumps(record))
    status, _, err = run("sweep", file, *arguments, capsys=capsys)
    assert status == 2 and "was made with betas None, expected [0.8, 0.999]" in err


def test_all_runs_of_a_study_have_one_data_set(tmp_path, capsys):
    (tmp_path / "other.yaml").write_text(to_yaml(dataclasses.replace(find_recipe("digits/tiny"), data="folder:there")))
    other = {**TOY["contenders"][0], "name": "other", "recipe": "other.yaml"}
    file = declared(tmp_path, contenders=[*TOY["contenders"], other])
    status, _, err = run("sweep", file, "--run", tmp_path / "run", capsys=capsys)
    assert status == 2 and "data: got digits for plain@1 and folder:there for other@1, expected one data set" in err
    assert data_of(read_study(file), "digits") == "digits"


@pytest.mark.parametrize("split", ["test", "train", "val"])
def test_a_study_takes_no_split_of_its_data(tmp_path, capsys, split):
    """Rates would be chosen by the images, or the text, that final runs are scored by."""
    data = f"digits@{split}"
    (tmp_path / "part.yaml").write_text(to_yaml(dataclasses.replace(find_recipe("digits/tiny"), data=data)))
    for changes, more in (({"data": data}, ()), ({"recipe": "part.yaml"}, ()), ({}, ("--data", data))):
        for option in ("--resume", "--dry-run", "--render"):
            where = ("--run", tmp_path / "run", "--results", tmp_path)
            status, _, err = run("sweep", declared(tmp_path, **changes), *more, option, *where, capsys=capsys)
            expected = (
                f"stepsnet: data: got {data}, expected digits: a study is tuned on one split and scored on another"
            )
            assert status == 2 and err.splitlines() == [expected] and not (tmp_path / "run").exists()


def test_images_with_a_test_split_of_their_own_need_no_holdout(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    for split in ("train", "val", "test"):
        for name in ("ant", "bee"):
            for number in range(40):
                place = tmp_path / "own" / split / name / f"{number}.png"
                place.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(place)
    settings = {**TOY["settings"], "holdout": None, "train_samples": None, "batch_size": 16, "model.args.in_chans": 3}
    study = read_study(declared(tmp_path, settings=settings, data=f"folder:{tmp_path / 'own'}"))
    assert len(check_models(study)) == 2


def test_a_text_without_a_test_split_is_refused_before_anything_is_trained(tmp_path, capsys):
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be " * 200)
    settings = {"epochs": 2, "clean_samples": 2, "model.args.widths": [16], "model.args.num_attention_heads": [1]}
    changes = {"recipe": "tinyshakespeare/shallow", "data": f"text:{text}", "metric": "loss", "settings": settings}
    arguments = ("sweep", declared(tmp_path, **changes), "--run", tmp_path / "run")
    status, _, err = run(*arguments, capsys=capsys)
    assert status == 2 and "has no split 'test'" in err and not (tmp_path / "run").exists()


def test_a_recipe_beside_the_study_is_found_from_anywhere(tmp_path):
    (tmp_path / "recipe.yaml").write_text(to_yaml(find_recipe("digits/tiny")))
    study = read_study(declared(tmp_path, recipe="recipe.yaml"))
    assert study.recipe == str(tmp_path / "recipe.yaml") and check_models(study).keys() == {
        *((c, "") for c in study.cells)
    }


def test_a_study_declares_all_but_the_machine(tmp_path, capsys):
    file = declared(tmp_path)
    for extra, words in (
        ("lr=0.1", "expected one of cache, checkpoint_interval"),
        ("digits/deep", "got digits/deep with the study toy"),
        ("--seeds=0,1", "got --seeds 0,1 with the study toy"),
        ("--cells=plain@2,plain@3", "--cells: got 'plain@3', expected a contender@point (did you mean plain@2"),
    ):
        status, _, err = run("sweep", file, extra, "--run", tmp_path / "run", capsys=capsys)
        assert status == 2 and words in err
    for extra in ("--render", "--cells=plain@2"):
        status, _, err = run("sweep", "digits/tiny", extra, capsys=capsys)
        assert status == 2 and f"expected a study for {extra.partition('=')[0]}" in err
    status, _, err = run("sweep", "evidence/cifar10-dept", capsys=capsys)
    assert status == 2 and "did you mean evidence/cifar10-depth" in err
    status, out, _ = run("sweep", capsys=capsys)
    assert status == 0 and out.split() == list(studies())
    for option in ("--resume", "--auto-resume", "--dry-run", "lr=0.1"):
        status, out, err = run("sweep", option, capsys=capsys)
        assert status == 2 and not out and "sweep: got neither a study nor recipes" in err


def test_a_recipe_is_no_study_and_a_study_no_recipe(tmp_path, capsys):
    study, recipe = declared(tmp_path), tmp_path / "recipe.yaml"
    recipe.write_text("name: mine\nmodel: {name: test_vit}\ndata: digits\n")
    status, _, err = run("train", study, capsys=capsys)
    assert status == 2 and f"{study}: got a study, expected a recipe; `stepsnet sweep" in err
    status, _, err = run("sweep", recipe, capsys=capsys)
    assert status == 2 and f"{recipe}: got a recipe, expected a study; `stepsnet train" in err


def test_a_misspelt_key_is_named_before_the_one_that_it_was_meant_to_be(tmp_path, capsys):
    values = {key.removesuffix("s") if key == "contenders" else key: value for key, value in TOY.items()}
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(values))
    status, _, err = run("sweep", tmp_path / "toy.yaml", capsys=capsys)
    assert status == 2 and "unknown key 'contender'" in err and "did you mean contenders" in err


def test_contenders_differ_in_neither_length_nor_what_a_loss_is_of():
    text = _keys_of_training(override(find_recipe("tinyshakespeare/deep"), ["epoch_updates=5"]))
    assert {"epochs", "epoch_updates", "batch_size", "tokenizer", "vocab_size", "eval_stride"} <= set(text)
    images = _keys_of_training(find_recipe("digits/tiny"))
    assert {"epochs", "batch_size"} <= set(images) and "eval_batch_size" not in {*images, *text}


OWN_METRIC = """
from typing import ClassVar, Literal
from pydantic.dataclasses import dataclass
import stepsnet
from stepsnet.settings.config import ClassificationRecipe
from stepsnet.settings.field_types import STRICT
from stepsnet.metrics import Metric

@dataclass(frozen=True, kw_only=True, config=STRICT)
class Scored(ClassificationRecipe):
    task: Literal["scored"] = "scored"
    scores: ClassVar = ("my_score", "my_cost")

stepsnet.register_task(Scored, build=None, metrics=[Metric("my_score", "score"), Metric("my_cost", "cost")])
"""


@pytest.mark.usefixtures("own_registrations")
def test_a_study_is_judged_by_a_metric_of_a_task_of_ones_own(tmp_path, capsys):
    """Its module is imported when the recipes are read, after the declaration."""
    (tmp_path / "my_scored.py").write_text(OWN_METRIC)
    recipe = to_plain(find_recipe("digits/tiny")) | {"task": "scored", "import": ["my_scored"]}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(recipe))
    changes = {"recipe": "own.yaml", "metric": "my_score", "flatness": {**TOY["flatness"], "key": "val_my_cost"}}
    check_models(read_study(declared(tmp_path, **changes)), open_data=False)
    for wrong, words in (
        ({"metric": "my_scroe"}, "metric: got 'my_scroe', expected one of top1"),
        ({"flatness": {"key": "val_my_cots"}}, "flatness.key: got 'val_my_cots', expected a split and a metric"),
    ):
        file = declared(tmp_path, **changes | wrong)
        status, _, err = run("sweep", file, "--run", tmp_path / "run", capsys=capsys)
        assert status == 2 and words in err and len(err.splitlines()) == 1, err


@pytest.mark.usefixtures("own_registrations")
def test_contenders_of_equal_settings_are_refused_with_recipes_of_their_own(tmp_path, capsys):
    (tmp_path / "my_nothing.py").write_text("")
    more = {"title": "another title", "imports": ("my_nothing",), "import_from": str(tmp_path)}
    (tmp_path / "same.yaml").write_text(to_yaml(dataclasses.replace(find_recipe("digits/tiny"), **more)))
    file = declared(tmp_path, contenders=[*TOY["contenders"], {**SAME, "recipe": "same.yaml"}])
    status, _, err = run("sweep", file, "--run", tmp_path / "run", capsys=capsys)
    assert status == 2 and "got the same settings for plain@2 and same@2, expected different ones" in err, err


def test_weights_to_start_from_are_the_same_wherever_they_lie(tmp_path, capsys):
    def study_from(init):
        return declared(tmp_path, settings={**TOY["settings"], "init": init})

    def rendered(init):
        return run("sweep", study_from(init), "--render", "--results", results, capsys=capsys)

    results = tmp_path / "results"
    for there in ("/scratch/1/weights.pth", "weights.pth"):
        write(results, read_study(study_from(there)), RECORD)
        for init in ("/scratch/2/weights.pth", "here/weights.pth"):
            status, _, err = rendered(init)
            assert status == 0, err
        status, _, err = rendered("/scratch/1/others.pth")
        assert status == 2 and f"was made with init {there!r}, expected '/scratch/1/others.pth'" in err
    write(results, read_study(study_from("/scratch/plain/model.safetensors")), RECORD)
    assert rendered("/here/plain/model.safetensors")[0] == 0
    assert rendered("/here/other/model.safetensors")[0] == 2  # another run's, which is called the same
    study = read_study(study_from("/scratch/1/weights.pth"))
    record = diverged_record(study, TUNING, recipe_of(study, TUNING), tmp_path, "a loss of NaN", "stepsnet sweep")
    assert record["settings"]["init"] == "weights.pth"
