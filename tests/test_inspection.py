"""What a report shows of trained models: what is recorded, that it stays small, and that it costs no run."""

import dataclasses
import io
import json
import random
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from run_folders import make_run, read, rows

from stepsnet.errors import UserError
from stepsnet.output.console import Display
from stepsnet.recipes import find_recipe
from stepsnet.report import write_report
from stepsnet.report.confusion import confusion_figure
from stepsnet.report.load_runs import group_runs, load_run
from stepsnet.run_folder.checkpoint import load_weights
from stepsnet.run_folder.inspection import (
    Confusion,
    Picture,
    Pictures,
    Table,
    Text,
    Texts,
    read_inspection,
    write_inspection,
)
from stepsnet.runs.train import train_run
from stepsnet.settings.overrides import override
from stepsnet.tasks.classification.data import Samples
from stepsnet.tasks.classification.inspection import Mistakes
from stepsnet.tasks.classification.task import Classification
from stepsnet.tasks.detection.inspection import quality
from stepsnet.tasks.pictures import best_median_worst, spread_over

SMALL = ["epochs=1", "batch_size=128", "model.args.depths=[1,1,1]", "stream_epochs=0"]


class Shown(Display):
    """A display that keeps what it is told."""

    def __init__(self):
        self.notes = []

    def show(self, event):
        self.notes += [event["text"]] if event["kind"] == "note" else []


class Stored:
    """Images of one gray each."""

    def __init__(self, labels):
        self.labels = labels

    def read(self, index):
        return Image.new("RGB", (300, 200), (index, index, index))

    def name(self, index):
        return f"/home/me/data/<b>{index}.jpg"


def judged(logits, labels, classes, batch_size=7):
    """The sections for samples whose place in the source is 10 more than in the split."""
    mistakes = Mistakes()
    for first in range(0, len(labels), batch_size):
        part = slice(first, first + batch_size)
        mistakes.update(range(first, first + len(labels[part])), logits[part], labels[part])
    samples = Samples(Stored(labels), lambda image: image, np.arange(len(labels)) + 10)
    return mistakes, mistakes.sections(classes, samples)


def test_the_images_of_the_highest_loss_are_kept_whatever_is_evaluated():
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(200, 4), torch.randint(4, (200,))
    logits[150] = float("nan")  # is the worst
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    expected = [150, *losses.nan_to_num(nan=-1).argsort(descending=True)[:11].tolist()]
    mistakes, (confusion, pictures) = judged(logits, labels, ["a", "b", "c", "d"])
    assert len(mistakes.worst) == 12
    names = [re.search(r"(\d+)\.jpg", picture.detail)[1] for picture in pictures.pictures]
    assert names == [str(10 + index) for index in expected]
    first = pictures.pictures[1]
    assert f"loss {losses[expected[1]]:.2f}; data/<b>{10 + expected[1]}.jpg" in first.detail
    with Image.open(io.BytesIO(first.content)) as image:
        assert image.size == (192, 128) and abs(image.getpixel((9, 9))[0] - 10 - expected[1]) <= 2
    assert len(first.content) < 20_000 and first.mime == "image/jpeg"
    likeliest = logits.nan_to_num(nan=0).argmax(-1)
    expected_counts = [[int(((labels == t) & (likeliest == p)).sum()) for p in range(4)] for t in range(4)]
    assert confusion == Confusion(["a", "b", "c", "d"], expected_counts)


def test_a_name_that_is_no_utf8_is_escaped(tmp_path):
    images = Stored([0, 1])
    images.name = lambda index: f"data/\udcff{index}.jpg"
    mistakes = Mistakes()
    mistakes.update(range(2), torch.zeros(2, 2), torch.tensor([0, 1]))
    write_inspection(tmp_path, mistakes.sections(["a", "b\udcfe"], Samples(images, lambda image: image, np.arange(2))))
    confusion, pictures = read_inspection(tmp_path)
    assert confusion.classes == ["a", r"b\udcfe"] and all(
        r"data/\udcff" in picture.detail for picture in pictures.pictures
    )


def test_of_many_classes_the_pairs_are_listed():
    labels = torch.tensor([0] * 6 + [1] * 4 + [39] * 3)
    taken = torch.tensor([0, 0, 0, 1, 1, 39, 1, 1, 0, 0, 39, 39, 39])
    _, (table, _) = judged(torch.eye(40)[taken], labels, [f"class {number}" for number in range(40)])
    assert table.columns == ["class", "taken for", "images", "of", "share"]
    assert table.rows == [
        ["class 0", "class 1", "2", "6", "33.3%"],
        ["class 1", "class 0", "2", "4", "50.0%"],
        ["class 0", "class 39", "1", "6", "16.7%"],
    ]
    _, sections = judged(torch.eye(40)[labels], labels, [f"class {number}" for number in range(40)])
    assert [section.kind for section in sections] == ["pictures"]  # nothing is confused
    assert sections[0].pictures[0].title.endswith(", which is right")


def test_images_are_chosen_by_a_rule_that_does_not_flatter():
    assert spread_over(5) == [0, 1, 2, 3, 4] and spread_over(10, most=5) == [0, 2, 4, 6, 8]
    assert len(spread_over(10_000)) == 60
    scores = {4: 0.5, 7: 0.9, 9: 0.1, 12: 0.4, 13: 0.9}
    assert best_median_worst(scores) == {"best": 7, "median": 4, "worst": 9}
    assert best_median_worst({3: 0.2}) == {"best": 3}
    assert best_median_worst({3: 0.2, 5: 0.1}) == {"best": 3, "median": 5}


def test_the_quality_of_detections_counted_by_hand():
    def record(x, y, w, h, category=1, score=0.9):
        return {"bbox": [x, y, w, h], "category_id": category, "score": score}

    there = [record(0, 0, 10, 10), record(20, 0, 10, 10, category=2)]
    assert quality(there, there) == 1.0 and quality(there, []) == 0.0 and quality([], there) == 0.0
    assert quality(there, [record(0, 0, 10, 8)]) == pytest.approx(0.8 / 1.5)
    assert quality(there, [record(0, 0, 10, 4)]) == 0.0  # an IoU of 0.4
    assert quality(there, [record(0, 0, 10, 10, category=2)]) == 0.0
    twice = [record(0, 0, 10, 8, score=0.6), record(0, 0, 10, 10, score=0.8)]  # the surer one takes the object
    assert quality(there, twice) == pytest.approx(1 / 2)


def picture(color=(200, 30, 30), title="a <cat>"):
    content = io.BytesIO()
    Image.new("RGB", (12, 8), color).save(content, "PNG")
    return Picture(content.getvalue(), "image/png", title, "b&w")


SECTIONS = [
    Confusion(["<i>cat</i>", "dog"], [[3, 1], [0, 6]]),
    Table("Most <confused>", "of all", ["class", "times"], [["<script>", "5"]]),
    Pictures("Worst", "the worst first", [picture(), picture((10, 200, 40), title="<img src=x onerror=y>")]),
    Texts("How it goes on", "drawn", [Text("To be <or>", "not\n  to & be", "</pre><b>that")]),
]


def test_what_was_written_is_read_and_what_is_damaged_is_named(tmp_path):
    assert read_inspection(tmp_path) == []
    write_inspection(tmp_path, SECTIONS)
    assert read_inspection(tmp_path) == SECTIONS
    content = json.loads((tmp_path / "inspection.json").read_text())
    said = r"cannot read .*inspection.json .* if you remove it, the page is drawn without it"
    for spoil in ({"kind": "film"}, {"mime": "text/html"}):
        spoilt = json.loads(json.dumps(content))
        (spoilt[2] if "kind" in spoil else spoilt[2]["pictures"][0]).update(spoil)
        (tmp_path / "inspection.json").write_text(json.dumps(spoilt))
        with pytest.raises(UserError, match=said):
            read_inspection(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def undrawn():
    """Pages and CSV files without the drawings, which take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepsnet.report.page._draw", lambda figure, folder: [])
        yield


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two models, of which one has two seeds."""
    root = tmp_path_factory.mktemp("shown")
    runs = [make_run(root / name, label, seed) for name, label, seed in (("s0", "StepsNet", 0), ("s1", "StepsNet", 1))]
    runs.append(make_run(root / "b0", "baseline"))
    for run in runs:
        write_inspection(run, SECTIONS)
        summary = json.loads((run / "summary.json").read_text())
        summary["class_iou"] = {"road": 80.0 + summary["seed"], "<i>tree</i>": None}
        summary["class_objects"] = {"road": 5, "<i>tree</i>": 0}
        first = {"file": "instances_train.json", "what": "annotations", "count": 2, "total": 9, "first": "a box <0>"}
        summary["left_out"] = [first] if run.name == "b0" else []
        (run / "summary.json").write_text(json.dumps(summary))
    return write_report(runs, root / "report.html", "t"), runs


def test_a_page_shows_what_was_recorded_and_escapes_it(page):
    page, _ = page
    html, parsed = page.read_text(encoding="utf-8"), read(page)
    assert parsed.open == [] and "<script" not in html and "<cat>" not in html
    assert "onerror" not in [name for name, _ in parsed.attributes]
    sources = [value for name, value in parsed.attributes if name == "src"]
    assert len(sources) == 4 and all(source.startswith("data:image/png;base64,iVBOR") for source in sources)
    for said in ("a <cat>", "<img src=x onerror=y>", "Most <confused>", "To be <or>not\n  to & be", "</pre><b>that"):
        assert said in parsed.text, said
    assert parsed.text.count("</pre><b>that") == 1  # the text itself is shown once
    assert "a box <0> (baseline, seed 0)" in parsed.text and "what was left" not in parsed.text
    assert parsed.text.count("StepsNet, seed 0") >= 3 and "class" in parsed.text
    table = re.search(r"<h2>By class</h2>.*?</table>", html, re.DOTALL)[0]
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)]
    assert cells[0] == ["class", "IoU (%), StepsNet", "IoU (%), baseline", "objects"]
    assert [cell.replace("\u00a0", " ") for cell in cells[1]] == ["road", "80.5 ± 0.7", "80.0", "5"]
    assert cells[2] == ["&lt;i&gt;tree&lt;/i&gt;", "—", "—", "0"]


def test_the_confusion_is_a_figure_with_its_numbers(page):
    page, runs = page
    table = rows(page, "confusion")
    assert [(row["run"], row["class"], row["predicted"], row["count"]) for row in table[:3]] == [
        ("s0", "<i>cat</i>", "<i>cat</i>", "3"),
        ("s0", "<i>cat</i>", "dog", "1"),
        ("s0", "dog", "dog", "6"),
    ]
    text = read(page).text
    assert "Of 20 predictions of StepsNet, 18 are right (90.0%); the most frequent mistake is dog in place of" in text
    assert "Of 10 predictions of the baseline, 9 are right (90.0%)" in text
    assert "dog in place of <i>cat</i> (2 of 8)" in text
    drawn = io.StringIO()
    confusion_figure(group_runs([load_run(run) for run in runs])).draw(False).savefig(drawn, format="svg")
    texts = re.findall(r"<!-- (.*?) -->", drawn.getvalue())
    assert {"StepsNet", "baseline", "predicted", "true", "12", "6", "2"} <= set(texts)  # sums over seeds


def test_earlier_runs_keep_their_pages(tmp_path):
    page = write_report([make_run(tmp_path / "run")], tmp_path / "report.html")
    text = read(page).text
    assert "Confusion" not in text and "By class" not in text and "left out" not in text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run, and the random states before and after it; it draws when it is inspected."""
    folder, display = tmp_path_factory.mktemp("run") / "run", Shown()

    def drawing(self, model, device, inspect=Classification.inspect):
        torch.rand(3), np.random.rand(2), random.random()
        return inspect(self, model, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Classification, "inspect", drawing)
        train_run(override(find_recipe("digits/tiny"), SMALL), folder, display)
    assert not any("no examples" in note for note in display.notes)
    return folder, (torch.get_rng_state(), np.random.get_state()[1], random.getstate())


def test_a_classifiers_report_has_its_confusion_and_its_worst_images(run):
    folder, _ = run
    confusion, pictures = read_inspection(folder)
    assert sum(map(sum, confusion.counts)) == 360 and confusion.classes == [str(digit) for digit in range(10)]
    right = sum(confusion.counts[digit][digit] for digit in range(10))
    metrics = json.loads((folder / "summary.json").read_text())["metrics"]
    assert 100 * right / 360 == pytest.approx(metrics["val_top1"], abs=1e-3)
    assert len(pictures.pictures) == 12 and (folder / "inspection.json").stat().st_size < 20_000
    assert "data:image/png;base64," in (folder / "report.html").read_text()
    again = write_report([folder], folder.parent / "again.html")  # which needs no data
    assert again.read_text().count("data:image/png;base64,") == 12


def test_a_run_whose_inspection_fails_is_whole(run, tmp_path, monkeypatch):
    def fail(self, model, device):
        torch.rand(5)
        raise RuntimeError("out of\nmemory")

    folder, states = run
    monkeypatch.setattr(Classification, "inspect", fail)
    display, recipe = Shown(), override(find_recipe("digits/tiny"), SMALL)
    summary = train_run(recipe, tmp_path / "run", display)
    assert display.notes[-1].endswith("examples of what the model does: RuntimeError: out of memory")
    assert not (tmp_path / "run" / "inspection.json").exists() and (tmp_path / "run" / "report.html").exists()
    whole = json.loads((folder / "summary.json").read_text())
    assert summary["metrics"] == whole["metrics"]
    ours, theirs = (load_weights(place / "model.safetensors") for place in (folder, tmp_path / "run"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    now = (torch.get_rng_state(), np.random.get_state()[1], random.getstate())
    assert torch.equal(now[0], states[0]) and np.array_equal(now[1], states[1]) and now[2] == states[2]
    # a run that was stopped before its page was written gets it, and nothing else is done again
    (tmp_path / "run" / "report.html").unlink()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("[!.]*.*")}
    assert train_run(dataclasses.replace(recipe), tmp_path / "run", display, resume=True) == summary
    assert (tmp_path / "run" / "report.html").exists()
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    shutil.rmtree(tmp_path / "run")
