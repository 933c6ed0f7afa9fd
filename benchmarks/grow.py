"""A grown network against the whole StepsNet trained from scratch, at equal total compute.

    python benchmarks/grow.py --cifar10 DIR --prose DIR --work DIR [--out results/benchmarks/grow.json]

DIR of CIFAR-10 has ``train/CLASS/*`` and ``test/CLASS/*``, that of the prose ``train.txt``, ``valid.txt`` and
``test.txt``. Runs are ordinary trainings in ``--work``; those that have ended there are not run again, so the command
can be stopped and repeated. Ends in one JSON line.

The protocol, written before the runs:

- *whole*: the StepsNet of two steps from random weights, for U updates.
- *grown*: the first step alone, as a plain network, for half of that compute; then ``stepsnet.grow`` to the
  architecture of *whole*, trained on for the other half. Compute is multiply-accumulates of a forward pass × samples.
- Each part has its own warmup, over an eighth of its length, and its own cosine to the same end. All other settings are
  equal.
- The rate of each part is chosen on held-out data with seed 0 from one grid, which grows by factors of 2 while the
  best rate is at an edge; first that of the plain network and then, with this, that of the grown one. So tuning costs
  the same for both contenders too.
- Then seeds 1, 2 and 3 at these rates, each scored on the test split once. The result is the paired difference over
  the seeds with its 95% t-interval, whatever it is.
- CIFAR-10: 10,000 training images, 2,000 held out, the recipe cifar10/shallow with batches of 100. Prose: the first
  4,000,000 characters, the first 200,000 of the validation text to choose by and of the test text to score, the recipe
  prose/small with 1,024 tokens and sequences of 64.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
from outcome import conclude
from rate_grid import best_rate

from stepsnet.files.writing import write_atomically
from stepsnet.output.console import choose_display
from stepsnet.recipes import find_recipe
from stepsnet.report.t_interval import tested
from stepsnet.run_folder.folder import has_ended
from stepsnet.run_folder.records import read_summary
from stepsnet.runs.train import train_run
from stepsnet.settings.config import ClassificationRecipe, LanguageRecipe, ModelSpec, Recipe
from stepsnet.tasks import macs_of

RATES = (0.001, 0.002, 0.004)
MOST_RATES = 6
SEEDS = (1, 2, 3)
CHARACTERS = {"train": 4_000_000, "valid": 200_000, "test": 200_000}
IMAGES = {"patch_size": 8, "class_token": False, "global_pool": "avg", "num_classes": 10, "img_size": 32}
TOKENS = {"embedding_scale": 7.0, "vocab_size": 1024, "max_position_embeddings": 64}
NARROW, WHOLE = (32,), (32, 48)
NARROW_TEXT, WHOLE_TEXT = (48,), (48, 66)


def cifar10(data: Path) -> tuple[ClassificationRecipe, ModelSpec, ModelSpec, int, str]:
    """(recipe, plain network, StepsNet, updates of the whole, metric)"""
    recipe = dataclasses.replace(
        find_recipe("cifar10/shallow"),
        data=f"folder:{data}",
        baseline=None,
        img_size=None,
        train_samples=10_000,
        holdout=2_000,
        cache="memory",
        batch_size=100,
        stream_epochs=0,
        keep_checkpoints=1,
    )
    name = "steps_deit_tiny_patch16_224"
    plain = ModelSpec(name, {**IMAGES, "widths": NARROW, "depths": (6,), "num_heads": (2,)})
    steps = ModelSpec(name, {**IMAGES, "widths": WHOLE, "depths": (6, 3), "num_heads": (2, 3)})
    return recipe, plain, steps, 800, "top1"


def prose(data: Path, work: Path) -> tuple[LanguageRecipe, ModelSpec, ModelSpec, int, str]:
    """The same for prose."""
    for split, count in CHARACTERS.items():
        with (data / f"{split}.txt").open(encoding="utf-8") as text:
            write_atomically(work / "text" / f"{split}.txt", text.read(count))
    recipe = dataclasses.replace(
        find_recipe("prose/small"),
        data=f"text:{work / 'text'}",
        baseline=None,
        vocab_size=1024,
        seq_len=64,
        keep_checkpoints=1,
    )
    heads = {"num_attention_heads": (3,)}
    plain = ModelSpec("steps_transformer", {**TOKENS, "widths": NARROW_TEXT, "depths": (6,), **heads})
    heads = {"num_attention_heads": (3, 3)}
    steps = ModelSpec("steps_transformer", {**TOKENS, "widths": WHOLE_TEXT, "depths": (6, 3), **heads})
    return recipe, plain, steps, 600, "loss"


@dataclasses.dataclass
class Experiment:
    """The runs of one data set."""

    name: str
    recipe: Any
    plain: ModelSpec
    steps: ModelSpec
    updates: int  # of the whole
    metric: str
    work: Path

    def __post_init__(self) -> None:
        self.macs = {"plain": self.macs_of(self.plain), "steps": self.macs_of(self.steps)}
        half = self.updates / 2
        first = round(half * self.macs["steps"] / self.macs["plain"])
        self.lengths = {"whole": self.updates, "before": first, "grown": round(half)}

    def macs_of(self, spec: ModelSpec) -> int:
        return macs_of(dataclasses.replace(self.recipe, model=spec))

    def run(self, part: str, model: ModelSpec, rate: float, seed: int, after: str = "") -> dict[str, Any]:
        """The summary of a training, which is run unless it has ended before."""
        final = seed in SEEDS
        name = f"{self.name}-{part}{after}-lr{rate:g}-seed{seed}"
        folder = self.work / name
        recipe: Recipe = dataclasses.replace(
            self.recipe, name=name, model=model, lr=rate, seed=seed, score_test=final, threads=1, **self.length(part)
        )
        if not has_ended(folder):
            with choose_display() as display:
                train_run(recipe, folder, display, "auto")
        return read_summary(folder) or {}

    def length(self, part: str) -> dict[str, Any]:
        """The settings that make a part as long as it has to be: whole epochs of images, or one epoch of text."""
        updates = self.lengths[part]
        if isinstance(self.recipe, LanguageRecipe):
            return {"epochs": 1, "epoch_updates": updates, "warmup_epochs": 1 / 8}
        epochs = round(updates * self.recipe.batch_size / self.recipe.train_samples)
        return {"epochs": epochs, "warmup_epochs": epochs / 8}

    def grown(self, before: float, seed: int) -> ModelSpec:
        run = self.work / f"{self.name}-before-lr{before:g}-seed{seed}"
        plan = {key: list(self.steps.args[key]) for key in ("widths", "depths")}
        return ModelSpec("grow", {"model": str(run), "plan": plan})

    def tuned(self, part: str, model: ModelSpec, after: str = "") -> tuple[float, dict[float, float]]:
        """The best rate of a part on held-out data, and the metric by rate."""
        sign = -1 if self.metric == "loss" else 1

        def score(rate: float) -> float:
            return sign * self.run(part, model, rate, 0, after)["metrics"][f"val_{self.metric}"]

        best, scores = best_rate(score, RATES, MOST_RATES)
        return best, {rate: sign * value for rate, value in scores.items()}

    def result(self) -> dict[str, Any]:
        whole, whole_scores = self.tuned("whole", self.steps)
        before, before_scores = self.tuned("before", self.plain)
        after = f"-after{before:g}"
        grown, grown_scores = self.tuned("grown", self.grown(before, 0), after)
        key = f"test_{self.metric}"
        rows: dict[str, dict[str, Any]] = {}
        runs: dict[str, list[dict[str, Any]]] = {"whole": [], "before": [], "grown": []}
        for seed in SEEDS:
            runs["whole"].append(self.run("whole", self.steps, whole, seed))
            runs["before"].append(self.run("before", self.plain, before, seed))
            runs["grown"].append(self.run("grown", self.grown(before, seed), grown, seed, after))
        chosen = {"whole": (whole, whole_scores), "before": (before, before_scores), "grown": (grown, grown_scores)}
        for part, (rate, scores) in chosen.items():
            summaries = runs[part]
            rows[part] = {
                "rate": rate,
                "held_out_by_rate": scores,
                "test": [summary["metrics"][key] for summary in summaries],
                "train_loss": [summary["metrics"]["train_loss"] for summary in summaries],
                "params": summaries[0]["params"],
                "macs": summaries[0]["macs"],
                "samples": self.samples(part),
            }
        differences = [a - b for a, b in zip(rows["grown"]["test"], rows["whole"]["test"])]
        mean, low, high, _ = tested(differences, 0.95)
        compute = {part: rows[part]["macs"] * rows[part]["samples"] for part in rows}
        return {
            "metric": self.metric,
            "parts": rows,
            "compute_of_grown_over_whole": (compute["before"] + compute["grown"]) / compute["whole"],
            "grown_minus_whole": {"mean": mean, "interval": [low, high], "values": differences},
        }

    def samples(self, part: str) -> int:
        """How many images or tokens a part trains on, for each of which a model's multiply-accumulates are counted."""
        length = self.length(part)
        if "epoch_updates" in length:
            return length["epoch_updates"] * self.recipe.batch_size * self.recipe.seq_len
        return length["epochs"] * self.recipe.train_samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cifar10", type=Path, required=True)
    parser.add_argument("--prose", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", choices=("cifar10", "prose"), help="one of the data sets")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {}
    if options.only != "prose":
        result["cifar10"] = Experiment("cifar10", *cifar10(options.cifar10), work=options.work).result()
    if options.only != "cifar10":
        result["prose"] = Experiment("prose", *prose(options.prose, options.work), work=options.work).result()
    conclude("grow", result, options.out)


if __name__ == "__main__":
    main()
