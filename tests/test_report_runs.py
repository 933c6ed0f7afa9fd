"""What a report says of runs: unfinished ones, few seeds, other metrics, labels."""

import dataclasses
import json
from pathlib import Path

import pytest
from run_folders import TOP1, Text, make_run, read, rows, said, stream_line
from scipy import stats

from stepsnet.analysis.block_statistics import BlockStatistics, StreamMeasurement
from stepsnet.errors import UserError
from stepsnet.report import residual_stream, write_report
from stepsnet.report.load_runs import comparable, group_runs, load_run, varied_settings
from stepsnet.report.page import figures_of
from stepsnet.report.words import pairs, summarize_results
from stepsnet.run_folder.folder import find_runs


@pytest.fixture
def undrawn(monkeypatch):
    """Pages and CSV files without drawings, which take most of the time: for tests of what a page says."""
    monkeypatch.setattr("stepsnet.report.page._draw", lambda figure, folder: [])


def interval(steps, base, sign=1, decimals=2):
    """The interval of the mean difference as a sentence has it, by scipy's paired test."""
    low, high = stats.ttest_rel(steps, base).confidence_interval(0.95)
    ends = sorted((sign * low, sign * high))
    return "95% interval " + " to ".join(f"{end:.{decimals}f}".replace("-", "−") for end in ends)


def of_seeds(tmp_path, steps, base):
    runs = [make_run(tmp_path / f"s{seed}", "StepsNet", seed, top1=top1) for seed, top1 in enumerate(steps)]
    return runs + [make_run(tmp_path / f"b{seed}", "baseline", seed, top1=top1) for seed, top1 in enumerate(base)]


ALONE, BOTH = "(one seed each, which decides nothing).", "paired over seeds 0 and 1"
APART = "but the two are not told apart"


@pytest.mark.parametrize(
    ("steps", "base", "words"),
    [
        ((50.0,), (52.5,), f"; the difference is 2.5 points in favour of the baseline {ALONE}"),
        ((50.0,), (50.0,), f"; StepsNet and the baseline are equal {ALONE}"),
        ((50.0, 53.0), (50.0, 53.0), f"StepsNet and the baseline are equal ({BOTH}"),
        (  # better with both seeds
            (53.0, 52.0),
            (50.0, 51.0),
            f"StepsNet has the higher mean, by 2.00 points, {APART} ({interval((53.0, 52.0), (50.0, 51.0))}, {BOTH}).",
        ),
        (
            (50.0, 51.0),
            (53.0, 52.0),
            f"the baseline has the higher mean, by 2.00 points, {APART} "
            f"({interval((50.0, 51.0), (53.0, 52.0), -1)}, {BOTH}).",
        ),
        (
            (50.0, 53.0),
            (51.0, 52.0),
            f"StepsNet and the baseline have the same mean ({interval((50.0, 53.0), (51.0, 52.0))}, {BOTH}).",
        ),
        (
            (50.0, 53.0),
            (49.0, 52.0),
            f"StepsNet has the higher mean, by 1.00 points, {APART} ({BOTH}, the same difference with each).",
        ),
        (
            (50.0, 51.0, 52.5),
            (52.0, 53.5, 54.5),
            "; the baseline is better by 2.17 points "
            f"({interval((50.0, 51.0, 52.5), (52.0, 53.5, 54.5), -1)}, paired over seeds 0, 1 and 2).",
        ),
    ],
)
def test_headline_announces_no_winner_that_is_not_told_apart(tmp_path, steps, base, words):
    assert words in said(of_seeds(tmp_path, steps, base))


def test_the_tile_has_the_interval_of_the_difference_itself(tmp_path):
    steps, base = (50.0, 51.0, 52.5), (52.0, 53.5, 54.5)
    groups = group_runs([load_run(run) for run in of_seeds(tmp_path, steps, base)])
    (tile,) = [tile for tile in summarize_results(groups)[1] if tile["name"] == "StepsNet minus baseline"]
    assert tile["value"].replace("\u00a0", " ") == "−2.2 ± 0.3 points"
    assert tile["note"] == f"{interval(steps, base)}, paired over seeds 0, 1 and 2"


def test_the_difference_takes_common_seeds_only(tmp_path):
    runs = [make_run(tmp_path / f"s{seed}", "StepsNet", seed, top1=60.0 + seed) for seed in (0, 1)]
    runs += [make_run(tmp_path / f"b{seed}", "baseline", seed, top1=50.0) for seed in (1, 2)]
    words = "the difference is 11.0 points in favour of StepsNet (only seed 1 in common, which decides nothing)."
    assert words in said(runs)
    assert "have no seed in common" in said([runs[0], runs[3]])


@pytest.mark.parametrize("names", [("digits/a", "digits/b"), ("digits/a", "digits/a")])
def test_each_stepsnet_is_paired_with_the_baseline_of_its_own_comparison(tmp_path, names):
    """Also where one comparison's StepsNet has as many blocks as another's baseline."""
    runs = [
        make_run(tmp_path / folder / label, label, name=name, widths=[blocks] * blocks)
        for folder, name, sizes in (("small", names[0], (24, 12)), ("large", names[1], (48, 24)))
        for label, blocks in zip(TOP1, sizes)
    ]
    found = [(steps.blocks, base.blocks) for steps, base in pairs(group_runs([load_run(run) for run in runs]))]
    assert found == [(24, 12), (48, 24)]
    other = make_run(tmp_path / "other", "baseline", widths=[24] * 48, task="language", name="text/a")
    assert pairs(group_runs([load_run(run) for run in (runs[2], other)])) == []


def test_recipes_of_names_of_their_own_are_paired_by_their_size(tmp_path):
    sizes = [(label, blocks) for label in TOP1 for blocks in (4, 8)]
    runs = [make_run(tmp_path / f"{s}{n}", s, name=f"digits/{s}_{n}", widths=[n] * n) for s, n in sizes]
    groups = group_runs([load_run(run) for run in runs])
    assert [(steps.blocks, base.blocks) for steps, base in pairs(groups)] == [(4, 4), (8, 8)]


def test_seeds_of_two_versions_are_of_one_model(tmp_path):
    """An older version wrote out what is now left to the optimizer, and did not have all settings of augmentation."""
    old = {"betas": [0.9, 0.999], "eps": 1e-8, "augment": {"hflip": 0.5}}
    new = {"betas": None, "eps": None, "augment": {"hflip": 0.5, "aug_repeats": 1}}
    runs = [make_run(tmp_path / f"{seed}", seed=seed, **settings) for seed, settings in enumerate((old, new))]
    (group,) = group_runs([load_run(run) for run in runs])
    assert group.results("val_top1").keys() == {0, 1}


def test_runs_of_several_tasks_are_not_ranked(tmp_path):
    """The page says the result of each; the loss, which all have, is of something else in each."""
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", widths=[8] * 4)]
    runs.append(make_run(tmp_path / "c", "other", top1=2.7, task="language"))
    for file in (runs[2] / "summary.json", runs[2] / "metrics.jsonl"):
        file.write_text(file.read_text().replace("top1", "perplexity"))
    words = said(runs)
    assert words.startswith("The validation top-1 accuracy is 60.0% for StepsNet · 8 blocks (one seed) and 60.0%")
    assert words.endswith("The validation perplexity is 2.70 for other · 8 blocks (one seed).")
    assert words.count("the best mean is that of") == 1 and "loss" not in words
    figures = figures_of(group_runs([load_run(run) for run in runs]))
    assert figures["results"] is figures["depth"] is None
    (legend,) = figures["perplexity"].draw(False).legends
    assert [text.get_text() for text in legend.get_texts()] == ["other · 8 blocks"]


@pytest.mark.parametrize(
    "other",
    [
        {"data": "folder:cats"},
        {"epochs": 4, "done": 4},
        {"holdout": 300},
        {"train_samples": 100},
        {"tokenizer": "characters"},
        {"seq_len": 64},
        {"epoch_updates": 10},
    ],
)
def test_results_of_other_data_or_lengths_are_not_subtracted(other, tmp_path, undrawn):
    kind = {"task": "language"} if {"tokenizer", "seq_len", "epoch_updates"} & {*other} else {}
    runs = [
        make_run(tmp_path / "s", "StepsNet", **kind),
        make_run(tmp_path / "b", "baseline", top1=90.0, **other, **kind),
    ]
    words = said(runs)
    assert "in favour of" not in words and words.endswith("no difference between their results is stated.")
    text = read(write_report(runs, tmp_path / "report.html", "t")).text
    (name, *_) = other
    assert f"the runs differ in {name}" in text and "with the same settings" not in text
    sizes = [
        make_run(tmp_path / f"n{size}", "one", widths=[8] * size, **(other if size == 8 else {})) for size in (4, 8)
    ]
    groups = group_runs([load_run(run) for run in sizes])
    assert figures_of(groups)["depth"] is None and f"· {name} " in groups[1].name
    assert said(sizes).endswith("no difference between their results is stated.")
    third = group_runs([load_run(run) for run in (*runs, make_run(tmp_path / "n6", "one", widths=[8] * 6, **kind))])
    assert len(third) == 3 and figures_of(third)["results"] is None  # which would range from one to another


def test_other_starts_and_places_of_this_machine(tmp_path):
    runs = [
        make_run(tmp_path / "s", "StepsNet", init="/home/me/weights.pth", import_from="/home/me/code"),
        make_run(tmp_path / "b", "baseline", top1=50.0, baseline_init="/home/me/weights.pth"),
    ]
    page = write_report(runs, tmp_path / "report.html", "t")
    assert "the runs differ in init" in read(page).text and "with the same settings" not in read(page).text
    assert "init: weights.pth" in read(page).text and "/home/me" not in page.read_text()


def test_a_name_that_is_no_utf_8_is_shown_as_python_writes_it(tmp_path):
    """As of a run's folder from another machine; bytes of a command come as halves of characters."""
    run = make_run(tmp_path / "caf\udce9", "caf\udce9", name="caf\udce9", stream=False)
    summary = json.loads((run / "summary.json").read_text())
    summary["command"] = "stepsnet train mine.yaml --run 'caf\udce9'"
    (run / "summary.json").write_text(json.dumps(summary))
    page = write_report([run], run / "report.html")
    assert r"--run 'caf\udce9'" in read(page).text and (run / "figures" / "loss.png").exists()


def test_widths_of_stages_are_no_steps(tmp_path):
    runs = [make_run(tmp_path / "b", "baseline", widths=[8] * 2 + [16] * 4), make_run(tmp_path / "s", widths=[4, 8, 4])]
    text = read(write_report(runs, tmp_path / "report.html", "t")).text
    assert "6 blocks of 2 widths, from 8 channels in the first to 16 in the last, for the baseline" in text
    assert "3 blocks of 2 widths, from 4 channels in the first to 4 in the last, for StepsNet" in text


def test_a_result_that_a_finished_run_lacks_is_not_an_earlier_epochs(tmp_path):
    run = make_run(tmp_path / "a")
    summary = json.loads((run / "summary.json").read_text())
    del summary["metrics"]["val_top1"]  # it was not finite at the end
    (run / "summary.json").write_text(json.dumps(summary))
    assert load_run(run).value("val_top1") is None and not group_runs([load_run(run)])[0].results("val_top1")


def test_data_that_lie_elsewhere_are_the_same(tmp_path):
    places = zip(TOP1, ("folder:data/cats", "folder:/elsewhere/cats/"))
    runs = [make_run(tmp_path / label, label, data=data) for label, data in places]
    assert len(pairs(group_runs([load_run(run) for run in runs]))) == 1


def test_pages_side_by_side_keep_their_figures(tmp_path, undrawn):
    for name, top1 in (("one", 60.0), ("two", 70.0)):
        write_report([make_run(tmp_path / name, top1=top1)], tmp_path / "pages" / f"{name}.html")
    for name, top1 in (("one", "60"), ("two", "70")):
        assert f",{top1}.0" in (tmp_path / "pages" / f"{name}-figures" / "top1.csv").read_text()
        assert f"{name}-figures" in read(tmp_path / "pages" / f"{name}.html").text


def test_a_run_that_is_given_twice_counts_once(tmp_path, monkeypatch):
    run = make_run(tmp_path / "both" / "a")
    monkeypatch.chdir(tmp_path)
    assert find_runs([tmp_path / "both", run, Path("both/a")]) == [run]


def test_many_updates_of_a_run_are_told_apart(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(residual_stream, "save_figure", lambda figure, path: drawn.update({path.name: figure}))
    block = BlockStatistics(*([1] + [0.5] * (len(dataclasses.fields(BlockStatistics)) - 1)))
    measured = [StreamMeasurement("epoch_end", step, step, [block, block]) for step in range(10)]
    residual_stream.draw_stream([residual_stream.LabelledMeasurement("run", one) for one in measured], tmp_path)
    lines = drawn["stream"].axes[0].lines
    assert len({(line.get_linestyle(), line.get_alpha()) for line in lines}) == 10
    assert (lines[-1].get_linestyle(), lines[-1].get_alpha()) == ("-", 1)


def test_unfinished_run_is_said_to_be_and_is_not_counted(tmp_path, undrawn):
    runs = [make_run(tmp_path / f"run{seed}", "StepsNet", seed, top1=60.0) for seed in (0, 1)]
    runs.append(make_run(tmp_path / "run2", "StepsNet", 2, done=3, top1=90.0))
    text = read(write_report(runs, tmp_path / "report.html", "t")).text
    assert "60.0 ± 0.0% for StepsNet (2 seeds); not finished: seed 2 of StepsNet." in text
    assert "not finished: 3 of 8 epochs" in text
    assert "33.8" in text  # its accuracy so far
    assert said(runs[2:]) == "No result yet; not finished: seed 2 of digits/deep."
    with (runs[2] / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "diverged", "step": 40, "text": "loss: got nan"}\n')
    assert said(runs[2:]) == "No result yet; diverged and left out of the means: seed 2 of digits/deep at update 40."


def test_torn_last_line_is_left_out(tmp_path):
    run = make_run(tmp_path / "run", done=3)
    whole = load_run(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "epoch": 4, "val_to')
    assert load_run(run) == whole
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines, lines[0]]))
    with pytest.raises(UserError, match=rf"metrics.jsonl, line {len(lines)}: Unterminated string"):
        load_run(run)


def test_an_epoch_that_was_repeated_counts_once(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "epoch", "epoch": 8, "step": 176, "val_top1": 12.5}) + "\n")
    assert [line["val_top1"] for line in load_run(run).epochs.values()][-1] == 12.5
    assert len(load_run(run).epochs) == 8


def test_labels_are_escaped_and_drawn_as_they_are(tmp_path):
    label = "_<b>$x_1$ & co</b> --><script>"
    runs = [make_run(tmp_path / "a", label), make_run(tmp_path / "b", "other", widths=[8, 8])]
    page = write_report(runs, tmp_path / "report.html", "t")
    html, parsed = page.read_text(encoding="utf-8"), read(page)
    assert "<b>$x" not in html and "<script" not in html
    assert parsed.open == [] and parsed.text.count(label) >= 8
    assert label[1:] in Text((tmp_path / "figures" / "loss.svg").read_text(encoding="utf-8")).text


def test_what_was_not_measured_is_left_out(tmp_path, undrawn):
    page = write_report([make_run(tmp_path / "run", stream=False)], tmp_path / "report.html", "t")
    assert "Shortcut ratio" not in read(page).text and "Loss" in read(page).text


def test_a_run_that_has_only_begun_has_a_page(tmp_path):
    run = make_run(tmp_path / "run", done=0, stream=False)
    assert "not finished: 0 of 8 epochs" in read(write_report([run], tmp_path, "t")).text
    assert not (tmp_path / "figures").exists() or not list((tmp_path / "figures").iterdir())


@pytest.mark.parametrize(("metric", "decimals"), [("loss", 3), ("perplexity", 2)])
def test_a_task_without_accuracy_is_judged_by_another_metric(tmp_path, metric, decimals, undrawn):
    runs = [make_run(tmp_path / label, label, top1=50) for label in TOP1]
    for run, value in zip(runs, (1.5, 1.25)):
        summary = json.loads((run / "summary.json").read_text())
        summary["metrics"] = {"train_loss": 1.0, "val_loss": 2.0, f"val_{metric}": value}
        (run / "summary.json").write_text(json.dumps(summary))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        kept = [{key.replace("top1", metric): value for key, value in line.items()} for line in lines]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, kept)))
    text = read(write_report(runs, tmp_path / "report.html", "t")).text
    assert f"The validation {metric} is {1.5:.{decimals}f} for StepsNet" in text
    assert f"the difference is {0.25:.{decimals}f} in favour of the baseline (one seed each, which" in text
    figures = {file.stem for file in (tmp_path / "figures").iterdir()}
    assert figures == {"loss", metric, "shortcut-ratio", "widths"}  # γ is drawn whatever the task


def test_of_a_loss_the_lower_mean_is_the_better(tmp_path):
    steps, base = (1.5, 1.25), (1.75, 1.375)
    runs = of_seeds(tmp_path, (50.0, 50.0), (50.0, 50.0))
    for run, loss in zip(runs, (*steps, *base)):
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps(summary | {"metrics": {"val_loss": loss}}))
    words = f"StepsNet has the lower mean, by 0.1875, {APART} ({interval(steps, base, -1, decimals=4)}, {BOTH})."
    assert words in said(runs)


def test_groups_of_one_label_are_told_apart(tmp_path):
    def names(*runs):
        return [group.name for group in group_runs([load_run(run) for run in runs])]

    deep = make_run(tmp_path / "deep", "StepsNet", widths=[24] * 12)
    flat = make_run(tmp_path / "flat", "StepsNet", lr=0.001)
    fast = make_run(tmp_path / "fast", "StepsNet", lr=0.002)
    seed = make_run(tmp_path / "seed", "StepsNet", 1, lr=0.001)
    assert names(flat, seed) == ["StepsNet"]
    assert names(flat, deep) == ["StepsNet · 8 blocks", "StepsNet · 12 blocks"]
    assert names(flat, fast, seed) == ["StepsNet · lr 0.001", "StepsNet · lr 0.002"]


def test_seeds_of_a_version_with_new_fields_stay_together(tmp_path):
    """A comparison that goes on after an update: what the older config lacks has its default."""
    make_run(tmp_path / "old", seed=0)
    make_run(tmp_path / "new", seed=1, grad_checkpointing=0.0, opt="adamw")
    make_run(tmp_path / "other", seed=2, grad_checkpointing=0.5)
    assert seeds_of_groups(tmp_path, "old", "new", "other") == [[0, 1], [2]]


def test_seeds_stay_together_where_the_data_or_the_length_have_changed(tmp_path):
    """A comparison of which one seed had ended before the data were moved, and one was made longer later."""
    make_run(tmp_path / "before", seed=0, data="folder:/scratch/cats/images", earlier_epochs=[[22, 2]])
    make_run(tmp_path / "after", seed=1, data="folder:/data/cats/images")
    make_run(tmp_path / "dogs", seed=2, data="folder:/data/dogs/images")
    assert seeds_of_groups(tmp_path, "before", "after", "dogs") == [[0], [1], [2]]  # other data, for all we know
    (tmp_path / "recipes").mkdir()
    for name in ("before", "after"):
        (tmp_path / "recipes" / f"{name}.yaml").write_text("data: folder:/data/cats/images\n")
    assert seeds_of_groups(tmp_path, "before", "after", "dogs") == [[0, 1], [2]]


def of_sizes(run, sizes):
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"samples": sizes}))
    return run


def test_seeds_of_jobs_that_have_their_own_copies_of_the_data_are_one_model(tmp_path):
    """An unfinished one, which records no sizes, too. Data of the same name are others where their sizes are."""
    places = [f"folder:/scratch/{101 + seed}/images" for seed in range(4)]
    runs = [
        make_run(tmp_path / f"{seed}", "one", seed, done=3 if seed == 0 else 8, data=places[seed]) for seed in range(4)
    ]
    runs = [runs[0], *(of_sizes(run, {"train": 90, "val": 10}) for run in runs[1:])]
    (group,) = group_runs([load_run(run) for run in runs])
    assert group.name == "one" and len(group.runs) == 4
    fold = of_sizes(make_run(tmp_path / "fold", "one", 3, data="folder:/data/7/images"), {"train": 90, "val": 10})
    assert [len(group.runs) for group in group_runs([load_run(run) for run in (*runs, fold)])] == [4, 1]
    dogs = of_sizes(make_run(tmp_path / "dogs", "one", 5, data="folder:/data/dogs/images"), {"train": 70, "val": 8})
    groups = group_runs([load_run(run) for run in (*runs, dogs)])
    assert [group.name for group in groups] == ["one · data folder:images (1)", "one · data folder:images (2)"]
    assert [len(group.runs) for group in groups] == [4, 1] and varied_settings(groups) == ["data"]
    assert not comparable(groups)


def test_no_name_of_a_model_says_where_its_data_lay(tmp_path, undrawn):
    kinds = [{"lr": 1}, {"lr": 2}, {"lr": 1, "init": "/home/me/a.pth"}, {"lr": 1, "data": "hfds:/scratch/7/cats"}]
    settings = [{"data": f"folder:/scratch/{number}/cats", **kind} for number, kind in enumerate(kinds)]
    runs = [make_run(tmp_path / f"{number}", "one", **kind) for number, kind in enumerate(settings)]
    groups = group_runs([load_run(run) for run in runs])
    assert [group.name for group in groups] == [
        "one · lr 1.0, data folder:cats, init None",
        "one · lr 2.0, data folder:cats, init None",
        "one · lr 1.0, data folder:cats, init a.pth",
        "one · lr 1.0, data hfds:cats, init None",
    ]
    assert varied_settings(groups[:2]) == ["lr"]
    page = write_report(runs, tmp_path / "report.html", "t").read_text()
    assert "/scratch" not in page and "/home" not in page


def seeds_of_groups(folder, *names):
    groups = group_runs([load_run(folder / name) for name in names])
    return [[run.seed for run in group.runs] for group in groups]


def test_models_of_one_depth_are_set_in_rows(tmp_path):
    names = ("rezero", "fixup", "deepnorm")
    runs = [make_run(tmp_path / f"{n}", top1=50 + i, name=f"digits/{n}", depth=n) for i, n in enumerate(names)]
    page = write_report(runs, tmp_path / "report.html")
    assert not (tmp_path / "figures" / "depth.csv").exists()
    assert [float(row["val"]) for row in rows(page, "results")] == [50, 51, 52]
    assert (
        "The means range from 50.0% for StepsNet · digits/rezero to 52.0% for StepsNet · digits/deepnorm"
        in page.read_text()
    )


@pytest.mark.parametrize("last_gradient", [0.2, 0.0, None])
def test_measurements_in_training_are_drawn(tmp_path, last_gradient, request):
    run = make_run(tmp_path / "run", epochs=1, done=1)
    with (run / "metrics.jsonl").open("a") as file:
        for step in (1, 10, 20):
            gamma = [0.9 * (1 - step / 100), 0.8 * (1 - step / 100)]
            gradients = [0.6, last_gradient] if last_gradient is not None else [None, None]
            line = stream_line("update", [24, 48], gamma, branch=[0.1, None], gradient=gradients)
            file.write(json.dumps({**line, "epoch": 1, "step": step}) + "\n")
    if last_gradient is not None:
        request.getfixturevalue("undrawn")
    page = write_report([run], tmp_path / "report.html")
    table = rows(page, "stream")
    assert [(r["update"], r["block"]) for r in table] == [("1", "1"), ("1", "2"), ("20", "1"), ("20", "2")]
    assert float(table[3]["gamma"]) == pytest.approx(0.64) and table[3]["branch"] == "nan"
    text = read(page).text
    assert "after the last block, γ of the whole stream is 0.64 for StepsNet" in text
    assert "γ of the part that the block reads is 0.64 for StepsNet" in text
    ratio = "over that after the last, each over the channels that the block reads, is 3 for StepsNet"
    assert ratio in text if last_gradient else "the gradient after the first block" not in text
    assert last_gradient is not None or "not measured" in text
    assert (
        len({row["epoch"] for row in rows(page, "shortcut-ratio")}) == 2
    )  # those of the epochs' ends are not mixed in


def test_bad_input_is_named(tmp_path):
    with pytest.raises(UserError, match="expected at least one"):
        write_report([], tmp_path / "report.html", "t")
    with pytest.raises(UserError, match=r"no config\.yaml"):
        write_report([tmp_path / "nothing"], tmp_path / "report.html", "t")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_report([make_run(tmp_path / "run")], tmp_path / "file" / "report.html", "t")
