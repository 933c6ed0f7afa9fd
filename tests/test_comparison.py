"""A comparison from the command line, and what is done with its folder: each run inside, side by side."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from run_folders import make_run, train_all
from safetensors.torch import load_file, save_file

import stepsnet
from stepsnet.cli import main
from stepsnet.commands.eval import render_scores
from stepsnet.commands.predict import compare_answers
from stepsnet.errors import UserError
from stepsnet.files.writing import sha256
from stepsnet.report.load_runs import group_runs, load_run
from stepsnet.runs.launch import Failure
from stepsnet.runs.scores import evaluate_runs
from stepsnet.tasks.classification.task import Classification
from stepsnet.tasks.prediction import Prediction

SMALL = ["epochs=2", "batch_size=128", "model.args.depths=[1,1,1]", "baseline.args.depths=[2]"]
NAMES = [f"{label}-seed{seed}" for label in ("stepsnet", "baseline") for seed in (0, 1)]


def run(*arguments, capsys):
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparison") / "both"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("stepsnet.runs.grid.run_all", train_all)
        assert main(["compare", "digits/tiny", "--run", str(folder), "--seeds", "0,1", *SMALL]) == 0
    return folder


def read_json(path):
    return json.loads(path.read_text())


def test_both_are_trained_with_every_seed(both, capsys):
    summary = read_json(both / "comparison.json")
    accuracies = {}
    for label in ("StepsNet", "baseline"):
        for seed in (0, 1):
            of_run = read_json(both / f"{label.lower()}-seed{seed}" / "summary.json")
            assert (of_run["label"], of_run["seed"]) == (label, seed)
            accuracies[label, seed] = of_run["metrics"]["val_top1"]
    differences = [accuracies["StepsNet", seed] - accuracies["baseline", seed] for seed in (0, 1)]
    assert summary["difference"]["val_top1"]["values"] == differences
    assert summary["difference"]["val_top1"]["mean"] == pytest.approx(sum(differences) / 2)
    assert summary["difference"]["val_top1"]["std"] == pytest.approx(abs(differences[0] - differences[1]) / 2**0.5)
    # what is done is not done again
    before = (both / "stepsnet-seed0" / "metrics.jsonl").stat().st_mtime_ns
    status, out, _ = run("compare", "digits/tiny", "--run", both, "--seeds", "0,1", "--resume", *SMALL, capsys=capsys)
    assert status == 0 and (both / "stepsnet-seed0" / "metrics.jsonl").stat().st_mtime_ns == before
    assert out.splitlines()[-1].startswith(f"report: {both / 'report.html'}")
    page = (both / "report.html").read_text()
    assert "most frequent mistake" in page and page.count("data:image/png") == 2 * 12  # of the first seed of each


def test_a_comparison_that_goes_on_has_no_results_until_it_has_ended(both, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(both, tmp_path / "both")
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.suffix in (".json", ".html", ".yaml")}
    status, _, err = run("resume", folder, "epochs=1", capsys=capsys)  # fewer than it has had
    assert status == 2 and "epochs: got 1, expected at least 2: " in err and "has done 22 updates, 11 per epoch" in err
    with monkeypatch.context() as grown:
        grown.setattr(Classification, "sizes", lambda task: {"train": len(task.data.train) + 1})
        status, _, err = run("resume", folder, "epochs=3", capsys=capsys)
    assert status == 2 and "--resume: the data have train 1" in err
    assert all(file.read_bytes() == content for file, content in before.items())
    monkeypatch.setattr("stepsnet.runs.grid.run_all", lambda waiting, *_: [Failure(waiting[0].name, 2, "no")])
    status, _, err = run("resume", folder, "epochs=3", capsys=capsys)
    assert status == 2 and "4 of 4 runs failed" not in err and "1 of 4 runs failed, such as StepsNet, seed 0: no" in err
    for name in ("comparison.json", "report.html"):
        assert (folder / "epochs-2" / name).read_bytes() == before[folder / name]
    assert not (folder / "comparison.json").exists()
    (folder / "report.html").write_text("mine")  # it hides no failure, and what was put aside stays the whole result
    status, out, err = run("resume", folder, "epochs=3", capsys=capsys)
    assert status == 2 and "1 of 4 runs failed, such as" in err and "no report: " in out + err
    assert (folder / "report.html").read_text() == "mine"
    assert (folder / "epochs-2" / "report.html").read_bytes() == before[folder / "report.html"]
    with pytest.raises(UserError, match="expected the folder of a finished comparison"):
        stepsnet.load(folder)
    # with a seed more, what there is stays right
    other = shutil.copytree(both, tmp_path / "other")
    command = ["compare", "digits/tiny", "--run", other, "--seeds", "0,1,2", "--resume", *SMALL]
    assert run(*command, capsys=capsys)[0] == 2
    shutil.copytree(other / "stepsnet-seed0", other / "stepsnet-seed2")
    config = other / "stepsnet-seed2" / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 2"))
    (other / "stepsnet-seed2" / "summary.json").unlink()
    assert stepsnet.load(other).seeds == [0, 1]
    with (other / "stepsnet-seed2" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "diverged", "step": 12, "text": "loss: got nan"}\n')
    monkeypatch.setattr("stepsnet.runs.grid.run_all", lambda waiting, *_: [])
    command[command.index("--seeds") + 1] = "0,1"
    status, out, _ = run(*command, capsys=capsys)
    assert status == 0 and "mean of 2 seeds" in out and "; stepsnet-seed2 diverged, left out of the means" in out
    assert json.loads((other / "comparison.json").read_text())["diverged"] == ["stepsnet-seed2"]


def test_runs_that_have_begun_go_on_without_the_weights_they_started_from(
    both, tmp_path, capsys, grids_in_this_process
):
    weights = [tmp_path / name for name in ("stepsnet", "baseline")]
    for folder in weights:
        shutil.copytree(both / f"{folder.name}-seed0", folder)
    pair, grid = tmp_path / "pair", tmp_path / "grid"
    small = ["digits/tiny", *SMALL, "epochs=1", "train_samples=128", f"init={weights[0]}"]
    compared = ["compare", "--run", pair, *small, f"baseline_init={weights[1]}"]
    swept = ["sweep", "--run", grid, *small]
    for started in (compared, swept):
        assert run(*started, capsys=capsys)[0] == 0
    for folder in weights:
        shutil.rmtree(folder)
    (pair / "stepsnet-seed0" / "summary.json").unlink()
    shutil.rmtree(pair / "baseline-seed0" / "checkpoints")  # it has ended
    (grid / "digits-tiny-seed0" / "summary.json").unlink()
    for started in (compared, swept):
        assert run(*started, "--resume", "--dry-run", capsys=capsys)[0] == 0
    for folder in (pair, grid):
        status, _, err = run("resume", folder, capsys=capsys)
        assert status == 0 and len(list(folder.glob("*/summary.json"))) == len(list(folder.glob("recipes/*"))), err
    for started in (compared, swept):
        status, _, err = run(*started, "--resume", "--seeds", "0,1", capsys=capsys)  # a new run starts from them
        assert status == 2 and f"init: got {weights[0]}" in err


def test_a_page_of_the_users_keeps_no_comparison_from_its_end(both, tmp_path, capsys):
    folder = shutil.copytree(both, tmp_path / "both")
    (folder / "comparison.json").unlink()
    (folder / "report.html").write_text("mine")
    status, out, err = run("resume", folder, capsys=capsys)
    assert status == 0 and "no report: " in out and "`stepsnet report --force` replaces it" in out, err
    assert (folder / "comparison.json").read_bytes() == (both / "comparison.json").read_bytes()
    assert (folder / "report.html").read_text() == "mine"


def test_eval_scores_each_run_and_what_differs(both, capsys):
    status, out, err = run("eval", both, "--json", capsys=capsys)
    assert status == 0, err
    scores = json.loads(out)
    assert [row["run"] for row in scores["runs"]] == NAMES
    for row in scores["runs"]:
        metrics = read_json(both / row["run"] / "summary.json")["metrics"]
        assert row["metrics"]["top1"] == metrics["val_top1"] and row["seed"] == int(row["run"][-1])
    (difference,) = scores["differences"]
    assert difference["model"] == "StepsNet minus baseline" and difference["seeds"] == [0, 1]
    assert difference["metrics"]["top1"] == read_json(both / "comparison.json")["difference"]["val_top1"]
    assert [row["model"] for row in scores["models"]] == ["StepsNet", "baseline"]
    status, out, err = run("eval", both, "--data", "digits@train", capsys=capsys)
    assert status == 0 and out.startswith("| run | loss | top-1 accuracy (%) |"), err
    assert "The training top-1 accuracy is" in out and "| StepsNet minus baseline, 2 seeds |" in out
    assert out.count("\n| stepsnet-seed") == out.count("\n| baseline-seed") == 2


def test_a_page_that_cannot_be_written_hides_no_training(tmp_path, monkeypatch, capsys):
    def full(*arguments):
        raise UserError("cannot write report.html: No space left on device")

    monkeypatch.setattr("stepsnet.runs.report.write_report", full)
    folder = tmp_path / "run"
    status, out, err = run("train", "digits/tiny", "--run", folder, *SMALL, capsys=capsys)
    assert status == 0 and "report.html" not in out.splitlines()[-1], err
    assert out.splitlines()[-1].startswith(f"runs: {folder} — after 2 epochs: ")
    assert f"what was trained is kept, and `stepsnet report {folder} --out FILE.html` writes the report" in out + err


def scored_as(scores, monkeypatch):
    monkeypatch.setattr("stepsnet.runs.scores.evaluate_run", lambda folder, *_: scores[folder.name])


def test_eval_takes_nothing_from_the_training(tmp_path, monkeypatch):
    runs = [make_run(tmp_path / label, label, data="digits") for label in ("StepsNet", "baseline")]
    scored_as({"StepsNet": {"loss": 1.0}, "baseline": {"loss": 2.0, "top1": 9.0}}, monkeypatch)
    scores = evaluate_runs(runs)
    (difference,) = scores.differences
    assert difference["metrics"].keys() == {"loss"} and "top-1" not in scores.summary
    other = make_run(tmp_path / "other", data="digits@train")
    words = r"got runs of the splits val, train, expected one split for all \(--data names one\)"
    with pytest.raises(UserError, match=words):
        evaluate_runs([*runs, other])
    scored_as({run.name: {"loss": 3.0} for run in (*runs, other)}, monkeypatch)
    assert len(evaluate_runs([*runs, other], "digits@test").runs) == 3


def test_eval_of_several_tasks_ranks_each_by_itself(tmp_path, monkeypatch):
    runs = [make_run(tmp_path / label, label, data="digits") for label in ("StepsNet", "baseline")]
    text = {"task": "language", "name": "text/a", "data": "text:x"}
    runs.append(make_run(tmp_path / "text", "StepsNet", **text))
    scores = {"StepsNet": {"loss": 2.0, "top1": 60.0}, "baseline": {"loss": 2.5, "top1": 50.0}}
    scored_as({**scores, "text": {"loss": 1.0, "perplexity": 2.7}}, monkeypatch)
    table = render_scores(evaluate_runs(runs))
    assert [line.count(" — |") for line in table.splitlines() if line.startswith("| text |")] == [2 - 1]
    assert "the difference is 10.0 points in favour of StepsNet · data digits" in table
    assert "The validation perplexity is 2.70 for StepsNet" in table and "best" not in table


def test_predict_tells_where_runs_differ(both, tmp_path, capsys):
    pictures = [tmp_path / "1.png", tmp_path / "2.png"]
    for picture in pictures:
        Image.fromarray(np.eye(8, dtype=np.uint8) * 255).save(picture)
    folder = shutil.copytree(both, tmp_path / "both")
    given = {"3": ["baseline-seed0", "baseline-seed1"], "5": ["stepsnet-seed0", "stepsnet-seed1"]}
    for answer, names in given.items():  # whatever they have learnt
        for name in names:
            weights = load_file(folder / name / "model.safetensors")
            weights["head.bias"][int(answer)] += 1000
            save_file(weights, folder / name / "model.safetensors")
            summary = read_json(folder / name / "summary.json")
            summary["weights_sha256"] = sha256(folder / name / "model.safetensors")
            (folder / name / "summary.json").write_text(json.dumps(summary))
    status, out, err = run("predict", folder, *pictures, "--top", 1, "--out", tmp_path / "out", capsys=capsys)
    lines = out.splitlines()
    assert status == 0, err
    expected = [[name, str(picture)] for name in sorted(NAMES) for picture in pictures]
    assert [line.split(": ")[:2] for line in lines[:8]] == expected
    assert {path.parent.name for path in (tmp_path / "out").rglob("predictions.json")} == set(NAMES)
    said = "3 (baseline-seed0, baseline-seed1); 5 (stepsnet-seed0, stepsnet-seed1)"
    assert lines[8:] == ["the runs differ on 2 of 2 files:", *(f"{picture}: {said}" for picture in pictures)]
    status, out, err = run("predict", folder, pictures[0], "--json", capsys=capsys)
    found = json.loads(out)
    classes = {one["run"]: one["predictions"][0]["classes"] for one in found["runs"]}
    assert {name: max(of_run, key=of_run.get) for name, of_run in classes.items()} == {
        name: answer for answer, names in given.items() for name in names
    }
    assert found["differ"] == [{"file": str(pictures[0]), "answers": given}]


def test_answers_are_compared_file_by_file():
    def run_of(*answers):
        return [Prediction("", {}, f"{number}.png", answer) for number, answer in enumerate(answers)]

    found = {"a": run_of("cat", "dog", "cat", ""), "b": run_of("cat", "cat", "cat", "")}
    found["c"] = run_of("cat", "dog", "owl", "")
    differ = [
        {"file": "1.png", "answers": {"dog": ["a", "c"], "cat": ["b"]}},
        {"file": "2.png", "answers": {"cat": ["a", "b"], "owl": ["c"]}},
    ]
    assert compare_answers(found) == (3, differ)  # nothing can be compared of the last


def test_analyze_takes_each_model_apart(both, tmp_path, capsys):
    status, out, err = run("analyze", "mask", both, "--json", capsys=capsys)
    rows = json.loads(out)["rows"]
    assert status == 0 and len(rows) == 12 and all(row["runs"] == ["stepsnet-seed0", "stepsnet-seed1"] for row in rows)
    assert "the model has 1 step, expected a StepsNet of several; left out" in err
    status, out, err = run("analyze", "drop", both, "--each", capsys=capsys)
    assert status == 0 and out.count("| stepsnet-seed0, stepsnet-seed1 |") == 3
    assert out.count("| baseline-seed0, baseline-seed1 |") == 2
    status, out, err = run("analyze", "mask", both / "baseline-seed0", both / "baseline-seed1", capsys=capsys)
    assert status == 2 and "expected a StepsNet of several" in err
    twice = shutil.copytree(both / "baseline-seed0", tmp_path / "other" / "baseline-seed0").parent
    given = (both, both / "baseline-seed0", twice)  # one of them again, and one of the same name
    status, out, err = run("analyze", "shortcut", *given, "--out", tmp_path, "--json", capsys=capsys)
    names = {f"{both.parent.name}/both/{name}" for name in NAMES}
    rows = json.loads(out)["rows"]
    found = {"/".join(row["run"].split("/")[-3:]) for row in rows}
    assert status == 0 and len({(row["run"], row["update"]) for row in rows}) == len(rows), err
    assert len(found) == 5 and names < found and any(name.endswith("other/baseline-seed0") for name in found)


def test_runs_without_weights_are_left_out(both, tmp_path, capsys):
    folder = shutil.copytree(both, tmp_path / "both")

    def forget(name):
        shutil.rmtree(folder / name / "checkpoints")
        (folder / name / "model.safetensors").unlink()

    forget("stepsnet-seed1")
    status, out, err = run("eval", folder, capsys=capsys)
    assert (
        status == 0
        and "stepsnet-seed1 has no weights yet, and is left out" in err
        and "(only seed 0 in common, which decides nothing)" in out
    )
    for name in set(NAMES) - {"stepsnet-seed1"}:
        forget(name)
    status, out, err = run("predict", folder, "picture.png", capsys=capsys)
    assert status == 2 and f"none of the 4 runs in {folder} has weights yet" in err


def test_a_run_that_goes_on_alone_keeps_its_place_in_the_comparison(both, tmp_path, capsys):
    folder = shutil.copytree(both, tmp_path / "both")
    (folder / "stepsnet-seed0" / "summary.json").unlink()
    (folder / "comparison.json").unlink()
    assert group_runs([load_run(folder / "stepsnet-seed0")])[0].label == "StepsNet"
    assert run("resume", folder / "stepsnet-seed0", capsys=capsys)[0] == 0
    assert read_json(folder / "stepsnet-seed0" / "summary.json")["label"] == "StepsNet"
    # with some of its seeds, it keeps the others in its results
    again = ["compare", "digits/tiny", "--run", folder, "--resume", *SMALL]
    status, out, err = run(*again, "--seeds", "1", capsys=capsys)
    assert status == 0 and "mean of 2 seeds" in out, err
    assert read_json(folder / "comparison.json") == read_json(both / "comparison.json")


def test_a_pair_that_was_made_longer_at_different_updates_is_named(both, tmp_path, capsys, grids_in_this_process):
    folder = shutil.copytree(both, tmp_path / "both")
    late = folder / "stepsnet-seed1"  # as it is where it was stopped after its first epoch
    for name in ("summary.json", "model.safetensors", "report.html"):
        (late / name).unlink()
    shutil.rmtree(late / "checkpoints" / "step-00000022")
    status, out, err = run("resume", folder, "epochs=3", capsys=capsys)
    assert status == 0 and "seeds 1: when the epochs were changed, one of the two runs was ahead" in out, err
    assert read_json(folder / "comparison.json")["unlike_schedules"] == [1]
    assert "unlike_schedules" not in read_json(both / "comparison.json")


def test_what_is_no_comparison_is_one_line(both, tmp_path):
    folder = shutil.copytree(both, tmp_path / "both")
    for text, said in (
        ('{"seeds": [0', "cannot read .*comparison.json"),
        ("{}", "got seeds 'None', expected a list"),
        ('{"seeds": [7]}', "has no finished run of the StepsNet with seed 7"),
    ):
        (folder / "comparison.json").write_text(text)
        with pytest.raises(UserError, match=said):
            stepsnet.Comparison(folder)


def test_an_ended_run_looks_at_its_model_again_where_that_was_cut_off(both, tmp_path, capsys):
    folder = shutil.copytree(both / "stepsnet-seed0", tmp_path / "run")
    for name in ("report.html", "inspection.json"):
        (folder / name).unlink()
    assert run("resume", folder, capsys=capsys)[0] == 0
    assert (folder / "inspection.json").read_bytes() == (both / "stepsnet-seed0" / "inspection.json").read_bytes()
    assert "data:image/png" in (folder / "report.html").read_text(encoding="utf-8")


def test_a_run_that_was_stopped_is_scored_and_not_counted(both, tmp_path, capsys):
    folder = shutil.copytree(both, tmp_path / "both")
    (folder / "stepsnet-seed1" / "summary.json").unlink()
    status, out, err = run("eval", folder, capsys=capsys)
    assert status == 0 and "| stepsnet-seed1, after update 22 of 22 |" in out, err
    assert (
        "(only seed 0 in common, which decides nothing)" in out
        and "not finished: seed 1 of StepsNet" in out
        and "StepsNet, 2 seeds" not in out
    )
    alone = folder / "stepsnet-seed1"
    for line in (("eval", alone), ("export", alone, "--out", tmp_path / "stopped.pt2")):
        status, out, err = run(*line, capsys=capsys)
        assert status == 0 and f"{alone} has not ended: these are its weights after update 22 of 22" in out + err
    assert "has not ended" not in run("eval", folder / "stepsnet-seed0", capsys=capsys)[2]
    scores = json.loads(run("eval", folder, "--json", capsys=capsys)[1])
    assert [row.get("stopped") for row in scores["runs"]] == [None, "after update 22 of 22", None, None]


def test_a_comparison_does_not_go_on_with_other_data(both, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(both, tmp_path / "both")
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    monkeypatch.setattr(Classification, "sizes", lambda task: {"train": len(task.data.train) + 1})
    again = ["compare", "digits/tiny", "--run", folder, "--resume", *SMALL]
    for arguments in (again, [*again, "--seeds", "2"], ["resume", folder / "baseline-seed0"]):
        status, _, err = run(*arguments, capsys=capsys)
        assert status == 2 and "--resume: the data have train 1" in err and len(err.splitlines()) == 1
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
