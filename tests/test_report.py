"""The page states what the run folders hold: its numbers, figures and files are theirs, and it needs nothing else."""

import csv
import html
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import yaml
from PIL import Image

from stepsnet.errors import UserError
from stepsnet.report import write_report
from stepsnet.report.runs import group_runs, load_run
from stepsnet.report.words import summarize_results

FIGURES = ("loss", "shortcut-ratio", "top1", "widths")
WIDTHS = {"StepsNet": [24] * 4 + [34] * 2 + [48] * 2, "baseline": [32] * 8}
TOP1 = {"StepsNet": (61.25, 63.5, 60.75), "baseline": (52.5, 55.0, 54.25)}  # by seed


def make_run(folder, label="StepsNet", seed=0, epochs=8, done=8, top1=60.0, widths=None, stream=True, **settings):
    """A run folder with smooth curves that end at ``top1``."""
    folder.mkdir(parents=True)
    widths = widths or WIDTHS.get(label, [24] * 8)
    model = {"name": "steps_deit_tiny_patch16_224", "args": {"widths": sorted(set(widths))}}
    recipe = {"name": "digits/deep", "seed": seed, "epochs": epochs, "model": model, **settings}
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    lines = []
    for epoch in range(done + 1):
        grown, line = epoch / epochs, {"epoch": epoch, "step": 22 * epoch}
        if epoch:
            results = {"train_loss": 2.3 - grown, "train_top1": 10 + (top1 - 5) * grown}
            results |= {"val_loss": 2.3 - 0.9 * grown, "val_top1": top1 * grown}
            lines.append({"kind": "epoch", **line, "lr": 1e-3, **results, "samples_per_second": 200.0 + epoch})
        if stream:
            gamma = [1 / math.sqrt(1 + block * (1 + grown) / 4 + seed / 100) for block in range(1, len(widths) + 1)]
            lines.append({**line, **stream_line("epoch_end", widths, gamma)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done == epochs:
        counts = {"blocks": len(widths), "layers": 5 * len(widths) + 2, "params": 1_234_567, "macs": 20_540_000}
        summary = {"recipe": "digits/deep", "label": label, "seed": seed, "model": model, **counts, "widths": widths}
        origin = {"command": f"stepsnet train digits/deep seed={seed}", "commit": None}
        origin["hardware"] = {"cpu": "AMD EPYC", "cores": 2, "threads": 1, "memory_gib": 23, "gpu": None}
        origin["versions"] = {"python": "3.11.7", "torch": "2.15.0"}
        summary |= {"metrics": results, "seconds": 240.1, "samples_per_second": 204.5, **origin}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def stream_line(at, widths, gamma, **columns):
    """What the blocks read is a little less than the whole stream, except at full width."""
    read = [g if width == max(widths) else 0.9 * g for width, g in zip(widths, gamma)]
    per_block = {"width": widths, "gamma": gamma, "gamma_read": read, "branch": [0.1] * len(widths)}
    per_block |= {"correlation": gamma, "gradient": [None] * len(widths), **columns}
    return {"kind": "stream", "at": at, "per_block": per_block}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    root = tmp_path_factory.mktemp("comparison")
    return [
        make_run(root / f"{label}-{seed}", label, seed, top1=TOP1[label][seed]) for seed in range(3) for label in TOP1
    ]


@pytest.fixture(scope="module")
def page(comparison, tmp_path_factory):
    return write_report(comparison, tmp_path_factory.mktemp("page") / "report.html", "digits/deep & <its> baseline")


class Text(HTMLParser):
    """The text of a page, its attributes, and the tags that were left open."""

    def __init__(self, html):
        super().__init__()
        self.text, self.attributes, self.open = "", [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in ("br", "meta"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data.replace("\u00a0", " ")


@pytest.fixture
def undrawn(monkeypatch):
    """Pages and CSV files without drawings, which take most of the time: for tests of what a page says."""
    monkeypatch.setattr("stepsnet.report.page._draw", lambda figure, folder: [])


def read(page):
    return Text(page.read_text(encoding="utf-8"))


def rows(page, name):
    with (page.parent / "figures" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def said(runs):
    return summarize_results(group_runs([load_run(run) for run in runs]))[0].replace("\u00a0", " ")


def mean_std(values):
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def test_page_is_self_contained_and_well_formed(page):
    parsed = read(page)
    assert parsed.open == []
    for name, value in parsed.attributes:
        if name in ("src", "href", "xlink:href", "srcset", "data", "poster"):
            assert value.startswith("#"), (name, value)
        assert "url(" not in (value or "").replace("url(#", "")
    html = page.read_text(encoding="utf-8")
    assert not re.search(r"<(script|link|img|iframe|object)\b|@import", html)
    assert "url(" not in html.replace("url(#", "")
    assert "digits/deep & <its> baseline" in parsed.text
    ids = [value for name, value in parsed.attributes if name == "id"]
    assert len(ids) == len(set(ids)), "two elements share an id"
    references = {value for name, value in parsed.attributes if name == "xlink:href"}
    references |= set(re.findall(r"url\((#[^)]+)\)", html))
    assert {reference[1:] for reference in references} <= set(ids)


def test_every_figure_has_its_files(page):
    found = {file.name for file in (page.parent / "figures").iterdir()}
    assert found == {f"{name}.{kind}" for name in FIGURES for kind in ("csv", "png", "svg")}
    for name in FIGURES:
        assert (page.parent / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (page.parent / "figures" / f"{name}.svg").read_text(encoding="utf-8")
    assert [file.name for file in page.parent.iterdir() if file.is_file()] == ["report.html"]


def test_csv_holds_the_numbers_of_the_runs(page, comparison):
    loss, top1, gamma = rows(page, "loss"), rows(page, "top1"), rows(page, "shortcut-ratio")
    measured = 0
    for folder in comparison:
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):

            def mine(table, folder=folder, line=line):
                return [row for row in table if row["run"] == folder.name and int(row["epoch"]) == line["epoch"]]

            if line["kind"] == "epoch":
                for table, key in ((loss, "train_loss"), (loss, "val_loss"), (top1, "train_top1"), (top1, "val_top1")):
                    assert [float(row[key]) for row in mine(table)] == [line[key]]
            elif shown := mine(gamma):
                measured += 1
                for name in ("gamma", "gamma_read", "width"):
                    assert [float(row[name]) for row in shown] == line["per_block"][name]
                assert [float(row["depth"]) for row in shown] == [block / 8 for block in range(1, 9)]
    assert measured == 6 * len(comparison)  # six of the nine epochs
    assert {int(row["epoch"]) for row in gamma} >= {0, 1, 8}
    for label, widths in WIDTHS.items():
        assert [int(row["width"]) for row in rows(page, "widths") if row["label"] == label] == widths
    assert [int(row["step"]) for row in rows(page, "widths")] == [1] * 4 + [2] * 2 + [3] * 2 + [1] * 8


def test_headline_has_the_statistics(page):
    text = read(page).text
    for label, name in (("StepsNet", "StepsNet"), ("baseline", "the baseline")):
        assert f"{mean_std(TOP1[label])}% for {name} (3 seeds)" in text
    difference = [a - b for a, b in zip(TOP1["StepsNet"], TOP1["baseline"])]
    over = "(paired over seeds 0, 1 and 2, better in 3 of 3)"
    assert f"StepsNet is better by {mean_std(difference)} points {over}" in text
    assert f"+{mean_std(difference)} points" in text


def test_captions_and_tables_are_computed(page, comparison):
    text = read(page).text
    mean = {
        (label, name): statistics.fmean(
            json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["per_block"][name][-1]
            for folder in comparison
            if folder.name.startswith(label)
        )
        for label in TOP1
        for name in ("gamma", "gamma_read")
    }
    both = f"{mean['StepsNet', 'gamma']:.2f} for StepsNet and {mean['baseline', 'gamma']:.2f} for the baseline"
    assert f"After the last block, γ of the whole stream is {both} after epoch 8" in text
    of_part = f"γ of the part that is read is {mean['StepsNet', 'gamma_read']:.2f} for StepsNet after epoch 8"
    assert of_part in text  # a baseline's blocks read the whole stream
    svg = (page.parent / "figures" / "shortcut-ratio.svg").read_text(encoding="utf-8")
    titles = re.findall(r"(\w+): γ of the (whole stream|part that is read)", svg)
    assert titles == [("StepsNet", "whole stream"), ("StepsNet", "part that is read"), ("baseline", "whole stream")]
    top1 = {label: f"{statistics.mean(values):.1f}%" for label, values in TOP1.items()}
    assert f"accuracy is {top1['StepsNet']} for StepsNet and {top1['baseline']} for the baseline after epoch 8" in text
    assert "8 blocks in 3 steps, from 24 channels in the first to 48 in the last for StepsNet" in text
    for shown in ("24×4, 34×2, 48×2", "32×8", "1.23 M", "20.54 M", "4 min 00 s", "204.5", "AMD EPYC", "torch 2.15.0"):
        assert shown in text
    assert "stepsnet train digits/deep seed=2" in text and "not recorded" in text  # the command, and no commit
    assert text.count("name: digits/deep") == len(comparison)  # the recipes


UNCLEAR = "(paired over seeds 0 and 1, better in 1 of 2, not larger than its standard deviation)"


@pytest.mark.parametrize(
    ("steps", "base", "words"),
    [
        ((50.0,), (52.5,), "the baseline is better by 2.5 points (seed 0 only, so the standard deviation is unknown)"),
        ((50.0, 53.0), (51.0, 51.0), f"StepsNet is better by 0.5 ± 2.1 points {UNCLEAR}"),
        ((50.0,), (50.0,), "StepsNet and the baseline are equal"),
    ],
)
def test_headline_hides_no_loser(tmp_path, steps, base, words):
    runs = [make_run(tmp_path / f"s{seed}", "StepsNet", seed, top1=top1) for seed, top1 in enumerate(steps)]
    runs += [make_run(tmp_path / f"b{seed}", "baseline", seed, top1=top1) for seed, top1 in enumerate(base)]
    assert words in said(runs)


def test_the_difference_takes_common_seeds_only(tmp_path):
    runs = [make_run(tmp_path / f"s{seed}", "StepsNet", seed, top1=60.0 + seed) for seed in (0, 1)]
    runs += [make_run(tmp_path / f"b{seed}", "baseline", seed, top1=50.0) for seed in (1, 2)]
    assert "StepsNet is better by 11.0 points (seed 1 only" in said(runs)
    assert "have no seed in common" in said([runs[0], runs[3]])


def test_unfinished_run_is_said_to_be_and_is_not_counted(tmp_path, undrawn):
    runs = [make_run(tmp_path / f"run{seed}", "StepsNet", seed, top1=60.0) for seed in (0, 1)]
    runs.append(make_run(tmp_path / "run2", "StepsNet", 2, done=3, top1=90.0))
    text = read(write_report(runs, tmp_path / "report.html", "t")).text
    assert "60.0 ± 0.0% for StepsNet (2 seeds); not finished: seed 2 of StepsNet." in text
    assert "not finished: 3 of 8 epochs" in text
    assert "33.8" in text  # its accuracy so far
    assert said(runs[2:]) == "No result yet; not finished: seed 2 of digits/deep."


def test_torn_last_line_is_left_out(tmp_path):
    run = make_run(tmp_path / "run", done=3)
    whole = load_run(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "epoch": 4, "val_to')
    assert load_run(run) == whole
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines, lines[0]]))
    with pytest.raises(UserError, match=rf"metrics.jsonl, line {len(lines)}: not JSON"):
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
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "shortcut-ratio.png").write_bytes(b"an earlier report's")
    page = write_report([make_run(tmp_path / "run", stream=False)], tmp_path / "report.html", "t")
    assert "Shortcut ratio" not in read(page).text and "Loss" in read(page).text
    assert not list((tmp_path / "figures").glob("shortcut-ratio.*"))


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
    assert f"the baseline is better by {0.25:.{decimals}f} (seed 0 only" in text
    figures = {file.stem for file in (tmp_path / "figures").iterdir()}
    assert figures == {"loss", metric, "shortcut-ratio", "widths"}  # γ is drawn whatever the task


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


def grid_of_depths(root, seeds=(0, 1), depths=(12, 24, 48, 96)):
    """Folders whose accuracy is 50 + blocks / 8 + seed for StepsNets, 10 less for baselines."""
    return [
        make_run(
            root / f"{label}-{blocks}-{seed}",
            label,
            seed,
            top1=(50 if label == "StepsNet" else 40) + blocks / 8 + seed,
            widths=[24] * (blocks // 2) + [48] * (blocks // 2) if label == "StepsNet" else [32] * blocks,
            name=f"digits/{label}_{blocks}",
        )
        for label in ("StepsNet", "baseline")
        for blocks in depths
        for seed in seeds
    ]


@pytest.fixture(scope="module")
def page_of_a_sweep(tmp_path_factory):
    root = tmp_path_factory.mktemp("sweep")
    return write_report(grid_of_depths(root / "runs"), root / "report.html")


def test_a_sweep_is_drawn_against_the_depth(page_of_a_sweep):
    page = page_of_a_sweep
    table = rows(page, "depth")
    expected = [
        (label, blocks, seed) for label in ("StepsNet", "baseline") for blocks in (12, 24, 48, 96) for seed in "01"
    ]
    assert [(r["label"].split(" ")[0], int(r["blocks"]), r["seed"]) for r in table] == expected
    for row in table:
        top1 = (50 if "Steps" in row["label"] else 40) + int(row["blocks"]) / 8 + int(row["seed"])
        assert float(row["val"]) == pytest.approx(top1) and float(row["train"]) == pytest.approx(top1 + 5)
    text = html.unescape(re.sub(r"<svg.*?</svg>|<[^>]+>", "", page.read_text(), flags=re.S)).replace("\u00a0", " ")
    assert "52.0 ± 0.7% for StepsNet at 12 blocks and 42.0 ± 0.7% for the baseline at 12 blocks" in text
    assert "62.5 ± 0.7% for StepsNet at 96 blocks and 52.5 ± 0.7% for the baseline at 96 blocks" in text
    assert "Of 8 models, the validation top-1 accuracy is best for StepsNet · 96 blocks, 62.5 ± 0.7%" in text
    assert "worst for the baseline · 12 blocks, 42.0 ± 0.7%" in text
    assert text.count("paired over seeds 0 and 1, better in 2 of 2") == 4
    assert text.index("Results by depth") < text.index("\nRuns\n")
    assert not (page.parent / "figures" / "top1.csv").exists()  # so many curves could not be told apart


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
    ratio = "the gradient after the first block over that after the last is 3 for StepsNet"
    assert ratio in text if last_gradient else "the gradient after the first block" not in text
    assert last_gradient is not None or "not measured" in text
    assert (
        len({row["epoch"] for row in rows(page, "shortcut-ratio")}) == 2
    )  # those of the epochs' ends are not mixed in


def test_lines_of_earlier_versions_are_read(tmp_path, undrawn):
    """γ of the whole stream at the ends of epochs was of kind "shortcut_ratio", updates were "stream_signal"."""
    run, position = make_run(tmp_path / "run", stream=False), {"epoch": 8, "step": 176}
    ratio = {"kind": "shortcut_ratio", **position, "widths": [24, 48], "gamma": [0.9, 0.75]}
    update = {**stream_line("update", [24, 48], [0.9, 0.5]), "kind": "stream_signal", **position}
    del update["at"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(ratio) + "\n" + json.dumps(update) + "\n")
    page = write_report([run], tmp_path / "report.html")
    assert "After the last block, γ of the whole stream is 0.75 for StepsNet after epoch 8." in read(page).text
    assert [float(row["gamma"]) for row in rows(page, "shortcut-ratio")] == [0.9, 0.75]
    assert [float(row["gamma"]) for row in rows(page, "stream")] == [0.9, 0.5]
    assert "part that is read" not in read(page).text


def test_bad_input_is_named(tmp_path):
    with pytest.raises(UserError, match="expected at least one"):
        write_report([], tmp_path / "report.html", "t")
    with pytest.raises(UserError, match=r"no config\.yaml"):
        write_report([tmp_path / "nothing"], tmp_path / "report.html", "t")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_report([make_run(tmp_path / "run")], tmp_path / "file" / "report.html", "t")


def test_the_same_runs_give_the_same_bytes(page, comparison, tmp_path):
    """Also in another process, with other hashes of strings and settings of matplotlib's user."""
    (tmp_path / "matplotlibrc").write_text("font.size: 20\nsvg.fonttype: path\n")
    code = "import sys; from pathlib import Path; from stepsnet.report import write_report\n"
    code += "write_report([Path(p) for p in sys.argv[2:]], Path(sys.argv[1]), 'digits/deep & <its> baseline')\n"
    code += "assert 'torch' not in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    again = tmp_path / "report.html"
    subprocess.run(
        [sys.executable, "-c", code, again, *comparison],
        check=True,
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(tmp_path)},
    )
    assert again.read_bytes() == page.read_bytes()
    for file in (page.parent / "figures").iterdir():
        assert (tmp_path / "figures" / file.name).read_bytes() == file.read_bytes(), file.name


def colors_of_a_screenshot(page, folder, width):
    shot = folder / "page.png"
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    quiet += ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--hide-scrollbars"]
    where = [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},6000", f"--screenshot={shot}"]
    subprocess.run(["chromium", *quiet, *where, page.as_uri()], check=True, capture_output=True, timeout=120)
    with Image.open(shot) as image:
        return {color for _, color in image.convert("RGB").getcolors(1 << 24)}


CURVES = {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)}  # of a StepsNet and of its baseline
in_a_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")


@in_a_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_page(page, tmp_path, width):
    assert colors_of_a_screenshot(page, tmp_path, width) >= CURVES


@in_a_browser
def test_a_browser_shows_a_sweep(page_of_a_sweep, tmp_path):
    assert colors_of_a_screenshot(page_of_a_sweep, tmp_path, 1280) >= CURVES
