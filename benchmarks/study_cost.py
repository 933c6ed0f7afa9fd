"""How long a declared study would take, estimated from a few updates of each cell's model on one thread.

    python benchmarks/study_cost.py STUDY [--samples 45000] [--updates 4] [--out FILE]

Times are processor time, with batches drawn at random: data, evaluation and grids of rates that grow are not counted.
Each variant is tuned, and the slowest counts as the one that is chosen.
``--samples`` is the number of training images, for a study of images. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from outcome import conclude
from torch import Tensor

from stepsnet.models.build import build_model
from stepsnet.models.compilation import compile_blocks
from stepsnet.study.declare import find_study
from stepsnet.study.run_plan import a_final, recipe_of
from stepsnet.tasks.classification.input_size import input_size

VOCABULARY = 70  # if the data decide it


def loss_of(recipe: Any) -> tuple[torch.nn.Module, Callable[[], Tensor]]:
    """A recipe's model, and a function that computes its loss on one batch."""
    args, size = recipe.model.args, recipe.batch_size
    if recipe.task == "language":
        entries = args.get("vocab_size") or VOCABULARY
        model = build_model(dataclasses.replace(recipe.model, args={**args, "vocab_size": entries})).train()
        tokens = torch.randint(0, entries, (size, recipe.seq_len))
        return model, lambda: F.cross_entropy(model(tokens, use_cache=False).logits.flatten(0, 1), tokens.flatten())
    model = build_model(recipe.model).train()
    images = torch.randn(size, *input_size(recipe, model))
    labels = torch.randint(0, model.num_classes, (size,))
    return model, lambda: F.cross_entropy(model(images), labels)


def seconds_per_update(recipe: Any, updates: int) -> float:
    """The time of the fastest of several updates, which is nearest to that on an idle core."""
    model, loss = loss_of(recipe)
    if recipe.compile:
        compile_blocks(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found = []
    for _ in range(2 + updates):
        begin = time.process_time()
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        found.append(time.process_time() - begin)
    return min(found[2:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("study")
    parser.add_argument("--samples", type=int, default=45000)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    study = find_study(options.study)
    assert study is not None, options.study
    rows = []
    tuning = study.tuning
    tuned = len(tuning.rates) * len(tuning.seeds) * tuning.length  # tuning of a variant, in lengths of a final run
    for cell in study.cells:
        contender = study.contender(cell.contender)
        hours, slowest = 0.0, 0.0
        for variant in contender.tried:
            recipe = recipe_of(study, a_final(study, cell, variant))
            of_epoch = recipe.epoch_updates if recipe.task == "language" else options.samples // recipe.batch_size
            if of_epoch is None:
                raise SystemExit(f"{cell}: epoch_updates is null, a pass over the text; expected a number of updates")
            updates = recipe.epochs * of_epoch
            seconds = seconds_per_update(recipe, options.updates)
            slowest = max(slowest, seconds)
            hours += seconds * updates * tuned / 3600
        hours += slowest * updates * len(study.seeds) / 3600  # of the variant that will be chosen, at most
        row = {"contender": contender.title, "point": cell.point, "updates": updates}
        rows.append({**row, "seconds_per_update": round(slowest, 4), "core_hours": round(hours, 2)})
        print(f"{cell}: {slowest * 1e3:.0f} ms an update, {rows[-1]['core_hours']} core-hours", file=sys.stderr)
    conclude("study_cost", {"study": study.name, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
