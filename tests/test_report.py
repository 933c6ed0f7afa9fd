"""The page of a comparison and of a sweep: numbers and figures are those of the runs, and it needs nothing else."""

import html
import io
import json
import re
import shutil
import statistics
import subprocess
import sys
import warnings

import pytest
from matplotlib.figure import Figure
from PIL import Image
from run_folders import TOP1, WIDTHS, make_run, mean_std, read, rows
from scipy import stats

from stepsnet.report import write_report
from stepsnet.report.figure import in_style

FIGURES = ("loss", "shortcut-ratio", "top1", "widths")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    root = tmp_path_factory.mktemp("comparison")
    return [
        make_run(root / f"{label}-{seed}", label, seed, top1=TOP1[label][seed]) for seed in range(3) for label in TOP1
    ]


@pytest.fixture(scope="module")
def page(comparison, tmp_path_factory):
    return write_report(comparison, tmp_path_factory.mktemp("page") / "report.html", "digits/deep & <its> baseline")


@pytest.fixture(scope="module")
def page_of_a_sweep(tmp_path_factory):
    root = tmp_path_factory.mktemp("sweep")
    return write_report(grid_of_depths(root / "runs"), root / "report.html")


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
    assert {file.name for file in page.parent.iterdir() if file.is_file()} == {"report.html", ".stepsnet.sha256"}


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
    low, high = stats.ttest_1samp(difference, 0).confidence_interval(0.95)
    interval = f"95% interval {low:.2f} to {high:.2f}, paired over seeds 0, 1 and 2"
    assert f"StepsNet is better by {statistics.fmean(difference):.2f} points ({interval})" in text
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
    assert "8 blocks of 3 widths, from 24 channels in the first to 48 in the last, for StepsNet" in text
    for shown in ("24×4, 34×2, 48×2", "32×8", "1.23 M", "20.54 M", "4 min 00 s", "204.5", "AMD EPYC", "torch 2.15.0"):
        assert shown in text
    assert "stepsnet train digits/deep seed=2" in text and "not recorded" in text  # the command, and no commit
    assert text.count("name: digits/deep") == len(comparison)  # the recipes


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
    assert text.count("paired over seeds 0 and 1, the same difference with each") == 4
    assert text.index("Results by depth") < text.index("\nRuns\n")
    assert not (page.parent / "figures" / "top1.csv").exists()  # so many curves could not be told apart


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


def test_a_character_that_no_font_has_is_drawn_without_a_warning():
    drawn = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with in_style(svg_hashsalt="one"):
            for text in ("", "\ue123"):  # of the private use area
                figure, content = Figure(), io.BytesIO()
                figure.text(0.5, 0.5, text)
                figure.savefig(content, format="png")
                drawn.append(content.getvalue())
    assert drawn[0] != drawn[1]  # a box
