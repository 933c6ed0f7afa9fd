"""A baseline that is a plain timm model: its blocks are found and drawn, or nothing is said of them."""

import csv
import json
import re

import pytest
import timm
import torch
from run_folders import make_run
from torch import nn

from stepsnet.analysis.complexity import count_complexity
from stepsnet.bench import bench, find_candidates, render_bench
from stepsnet.cli import main
from stepsnet.report import write_report
from stepsnet.report.load_runs import group_runs, load_run


@pytest.mark.parametrize(
    ("name", "blocks", "layers"),
    [
        ("resnet18", 8, 18),
        ("resnet50", 16, 50),
        ("vit_tiny_patch16_224", 12, 62),
        ("convnext_atto", 12, 41),
        ("mixer_s16_224", 8, 34),
        ("steps_resnet18", 18, 38),
        ("regnety_002", None, None),  # its stages are no sequences
        ("efficientnet_b0", None, None),  # its sequences are of stages
        ("fastvit_t8", None, None),  # its stem is such a sequence too
        ("cait_xxs24_224", None, None),  # its groups are a function
        ("inception_v3", None, None),
    ],
)
def test_the_blocks_of_a_timm_model_are_found_or_nothing_is_said(name, blocks, layers):
    with torch.device("meta"):
        model = timm.create_model(name)
    counts = count_complexity(model, model.pretrained_cfg["input_size"])
    assert counts.blocks == blocks and layers in (None, counts.layers)
    assert count_complexity(nn.Linear(2, 2), (2,)).blocks is None


def test_the_blocks_of_a_model_of_ones_own_are_those_of_its_sequence():
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(5)))
    )
    assert count_complexity(model, (8,)).blocks == 5


def plain(folder, blocks, label="baseline", **settings):
    """A finished run without widths, as a timm model's."""
    run = make_run(folder, label, widths=[32] * 8, **settings)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "widths": [], "blocks": blocks}))
    return run


def text_of(page):
    return re.sub(r"<svg.*?</svg>|<[^>]+>", "", page.read_text(), flags=re.S).replace("\u00a0", " ")


def drawn(page):
    with (page.parent / "figures" / "depth.csv").open(newline="") as file:
        return [(row["label"].split(" ")[0], row["blocks"]) for row in csv.DictReader(file)]


def test_a_comparison_of_two_depths_is_not_drawn_against_the_depth(tmp_path):
    runs = [make_run(tmp_path / "ours", widths=[24] * 6), plain(tmp_path / "theirs", 12)]
    page = write_report(runs, tmp_path / "report.html")
    assert not (tmp_path / "figures" / "depth.csv").exists() and "Results by depth" not in page.read_text()
    assert "0 blocks" not in text_of(page) and [
        group.blocks for group in group_runs([load_run(run) for run in runs])
    ] == [6, 12]
    models = page.read_text().split(">width × blocks<")[1]
    assert "<td>—</td><td>12</td>" in models  # no widths, but blocks


def test_a_baseline_of_one_depth_is_a_point_and_is_said_once(tmp_path):
    deep = [make_run(tmp_path / f"{n}", widths=[24] * n, top1=50 + n, name=f"digits/{n}") for n in (6, 12)]
    unknown = plain(tmp_path / "unknown", None, label="other", top1=30)
    page = write_report([*deep, plain(tmp_path / "theirs", 8, top1=40), unknown], tmp_path / "report.html")
    assert drawn(page) == [("StepsNet", "6"), ("StepsNet", "12"), ("baseline", "8")]
    caption = "56.0% for StepsNet at 6 blocks and 40.0% for the baseline at 8 blocks; 62.0% for StepsNet at 12 blocks."
    assert caption in text_of(page) and "other at" not in text_of(page)


def test_groups_whose_blocks_are_not_known_have_no_number(tmp_path):
    runs = [plain(tmp_path / "a", None, name="x/a"), plain(tmp_path / "b", 12, name="x/b")]
    assert [group.name for group in group_runs([load_run(run) for run in runs])] == ["baseline", "baseline · 12 blocks"]
    runs.append(plain(tmp_path / "c", None, name="x/c"))
    assert [group.suffix for group in group_runs([load_run(run) for run in runs])] == [" · x/a", " · x/b", " · x/c"]


def test_speed_is_drawn_of_models_whose_blocks_are_known(tmp_path):
    names = ["inception_v3", "resnet10t"]
    candidates = find_candidates(names)
    result = bench(candidates, batch_size=1, rounds=1, memory_batches=None, train=False, device="cpu")
    assert [row["blocks"] for row in result["rows"]] == [None, 4]
    assert "| inception_v3 | — |" in render_bench(result)


def test_a_run_of_a_timm_model_says_its_blocks(tmp_path):
    model = {"name": "resnet10t", "args": {"num_classes": 10, "in_chans": 1}}
    changes = [f"model={json.dumps(model)}", "epochs=1", "train_samples=64", "warmup_epochs=0", "img_size=8"]
    assert main(["train", "digits/tiny", *changes, "device=cpu", "--run", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["blocks"], summary["widths"]) == (4, [])
    assert "<td>—</td><td>4</td>" in (tmp_path / "run" / "report.html").read_text()
