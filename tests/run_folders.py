"""Run folders as training leaves them, and pages as a reader sees them."""

import csv
import json
import math
import statistics
from html.parser import HTMLParser
from pathlib import Path

import yaml

from stepsnet.errors import UserError
from stepsnet.report.load_runs import group_runs, load_run
from stepsnet.report.words import summarize_results
from stepsnet.runs.launch import Failure
from stepsnet.runs.train import train_run
from stepsnet.settings.overrides import read_recipe
from stepsnet.tasks import open_data, resolve

WIDTHS = {"StepsNet": [24] * 4 + [34] * 2 + [48] * 2, "baseline": [32] * 8}
TOP1 = {"StepsNet": (61.25, 63.5, 60.75), "baseline": (52.5, 55.0, 54.25)}  # by seed


def closed(recipe):
    """A recipe with what its data decide, as a run writes it."""
    return resolve(recipe, open_data(recipe))[0]


def train_all(waiting, jobs, display):
    """In place of ``run_all``: here, one after the other, and not in processes of their own."""
    failed = []
    for job in waiting:
        recipe = read_recipe(Path(job.config))
        try:
            train_run(recipe, Path(job.folder), display, job.resume, job.label, job.lines_shown)
        except UserError as error:
            failed.append(Failure(job.name, error.status, f"stepsnet: {error}"))
    return failed


def make_run(folder, label="StepsNet", seed=0, epochs=8, done=8, top1=60.0, widths=None, stream=True, **settings):
    """A run folder with smooth curves that end at ``top1``."""
    folder.mkdir(parents=True)
    widths = widths or WIDTHS.get(label, [24] * 8)
    model = {"name": "steps_deit_tiny_patch16_224", "args": {"widths": sorted(set(widths))}}
    recipe = {"name": "digits/deep", "seed": seed, "epochs": epochs, "model": model, "data": "digits", **settings}
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


class Text(HTMLParser):
    """The text of a page, its attributes, and the tags that were left open."""

    def __init__(self, html):
        super().__init__()
        self.text, self.attributes, self.open = "", [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in ("br", "img", "meta"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data.replace("\u00a0", " ")


def read(page):
    return Text(page.read_text(encoding="utf-8"))


def rows(page, name):
    with (page.parent / "figures" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def said(runs):
    return summarize_results(group_runs([load_run(run) for run in runs]))[0].replace("\u00a0", " ")


def mean_std(values):
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"
