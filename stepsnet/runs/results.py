"""Runs and comparisons as objects: weights, metrics as tables, figures and predictions."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..device import pick_device_of_run
from ..errors import UserError, import_extra
from ..files.reading import read_json
from ..models.trained import trained_model
from ..report.load_runs import BASELINE, STEPS, load_run
from ..report.single import draw_figure, figure_names
from ..run_folder.folder import find_runs, read_run_recipe
from ..run_folder.records import read_summary
from ..tasks import predict
from ..tasks.images import as_image
from ..tasks.prediction import PredictInputs
from .evaluate import evaluate_run
from .grid import COMPARISON_FILE

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

__all__ = ["Comparison", "Run"]


class Run:
    """The folder of a run, finished or not. Its contents are read on demand."""

    def __init__(self, folder: str | Path):
        """Raises UserError if the folder is not a run's."""
        self.folder = Path(folder)
        self.recipe = read_run_recipe(self.folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def summary(self) -> dict[str, Any] | None:
        """The content of ``summary.json``: final metrics, counts, hardware, versions; None for an unfinished run."""
        return read_summary(self.folder)

    @cached_property
    def model(self) -> nn.Module:
        """The model with the run's weights, or those of its latest checkpoint, on the recipe's device and in evaluation
        mode. Raises UserError if there are none yet."""
        return trained_model(self.folder, self.recipe).to(pick_device_of_run(self.recipe.device))

    @property
    def metrics(self) -> pandas.DataFrame:
        """One row per epoch, with the columns of ``metrics.jsonl`` such as ``train_loss`` and ``val_top1``.

        Raises:
            UserError: pandas is not installed.
        """
        lines = [line for _, line in sorted(load_run(self.folder).epochs.items())]
        table = import_extra("pandas").DataFrame(lines, columns=None if lines else ["kind", "epoch"])
        return table.drop(columns="kind").set_index("epoch")

    @property
    def figures(self) -> list[str]:
        """The names that :meth:`figure` takes."""
        return figure_names([self.folder])

    def figure(self, name: str = "loss") -> Figure:
        """Return a figure of the run's report, which a notebook shows.

        Raises:
            UserError: the report of this run has no such figure.
        """
        return draw_figure([self.folder], name)

    def evaluate(self, data: str | None = None, **changes: Any) -> dict[str, float]:
        """Return metrics on the validation split, or on that of other ``data`` such as ``"folder:PATH@test"``.

        Args:
            **changes: to fields of the recipe that begin with ``eval_``, or to ``max_invalid``, ``max_undecodable`` and
                ``without_objects``.

        Raises:
            UserError: the run has no weights, the data do not fit, or another key is changed.
        """
        return evaluate_run(
            self.folder, data, overrides=[f"{key}={json.dumps(value)}" for key, value in changes.items()]
        )

    def predict(
        self,
        inputs: Any,
        *,
        top: int = 5,
        min_score: float = 0.5,
        out: str | Path | None = None,
        max_new_tokens: int = 200,
        temperature: float = 0.8,
        seed: int = 0,
    ) -> Any:
        """Return what ``stepsnet predict --json`` prints: a record for one input, or a list of records for several.

        Args:
            inputs: an image or a sequence of images, each a path, a Pillow image, an array (H, W) or (H, W, C), or a
                tensor (H, W) or (C, H, W) of bytes, or of floats from 0 to 1; several of one size may be one array
                (N, H, W, C) or tensor (N, C, H, W). For a language model, a prompt or a sequence of prompts.
            top: for a classifier, the number of classes per image.
            min_score: for a detector, the score below which objects are not drawn.
            out: for a detector or a segmenter, a folder for the drawn images; None: nothing is drawn.
            max_new_tokens, temperature, seed: for a language model, see ``stepsnet predict --help``.

        Raises:
            UserError: an input is not an image, a file is missing, or the run has no weights.
        """
        settings: dict[str, Any] = {
            "top": top,
            "min_score": min_score,
            "out": Path(out) if out else None,
            "writes": bool(out),
        }
        settings |= {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "model": self.model}
        several = isinstance(inputs, (list, tuple)) or getattr(inputs, "ndim", 0) == 4
        given = list(inputs) if several else [inputs]
        if self.recipe.predicts_from == "prompt":
            asked = [PredictInputs(prompt=_prompt(prompt), **settings) for prompt in given]
        else:
            asked = [PredictInputs(files=[as_image(image) for image in given], **settings)]
        records = [prediction.record for one in asked for prediction in predict(self.folder, one)]
        return records if several else records[0]


def _prompt(prompt: Any) -> str:
    if not isinstance(prompt, str):
        raise UserError(f"predict: got a {type(prompt).__name__}, expected a string, the prompt for a language model")
    return prompt


class Comparison:
    """The folder of a comparison that has ended: runs of a StepsNet and of its baseline, a pair for each seed.

    Attributes:
        steps, baseline: the runs, in the order of the seeds.
    """

    def __init__(self, folder: str | Path):
        """Raises UserError if the folder is not that of a comparison that has ended."""
        self.folder = Path(folder)
        if not (self.folder / COMPARISON_FILE).is_file():
            raise UserError(
                f"comparison: got {folder}, expected the folder of a finished comparison (it has no {COMPARISON_FILE})"
            )
        file = self.folder / COMPARISON_FILE
        self.summary: dict[str, Any] = read_json(file, "comparison", dict)
        if not isinstance(seeds := self.summary.get("seeds"), list):
            raise UserError(f"comparison: {file}: got seeds {str(seeds)[:40]!r}, expected a list of whole numbers")
        self.seeds: list[int] = seeds
        # runs of seeds that were added since may not have ended
        ended = [run for run in map(load_run, find_runs([self.folder])) if run.summary]
        runs = {(run.summary["label"], run.seed): Run(run.folder) for run in ended}
        for name, seed in itertools.product((STEPS, BASELINE), self.seeds):
            if (name, seed) not in runs:
                raise UserError(f"comparison: {self.folder} has no finished run of the {name} with seed {seed}")
        self.steps, self.baseline = ([runs[name, seed] for seed in self.seeds] for name in (STEPS, BASELINE))

    def __repr__(self) -> str:
        return f"Comparison({str(self.folder)!r})"

    @property
    def metrics(self) -> pandas.DataFrame:
        """The final metrics, one row per network and seed. Raises UserError if pandas is not installed."""
        pandas = import_extra("pandas")
        tables = {name: self._by_seed(name) for name in (STEPS, BASELINE)}
        return pandas.concat(tables, names=["network"])

    @property
    def differences(self) -> pandas.DataFrame:
        """The paired differences, StepsNet minus baseline: one row per seed, one column per metric.

        Raises:
            UserError: pandas is not installed.
        """
        return self._by_seed("difference")

    def _by_seed(self, name: str) -> pandas.DataFrame:
        index = import_extra("pandas").Index(self.seeds, name="seed")
        columns = {metric: found["values"] for metric, found in self.summary[name].items()}
        return import_extra("pandas").DataFrame(columns, index=index)

    @property
    def figures(self) -> list[str]:
        """The names that :meth:`figure` takes."""
        return figure_names(self._folders)

    def figure(self, name: str = "loss") -> Figure:
        """Return a figure of the comparison's report, with both networks.

        Raises:
            UserError: the report has no such figure.
        """
        return draw_figure(self._folders, name)

    @property
    def _folders(self) -> Sequence[Path]:
        return [run.folder for run in (*self.steps, *self.baseline)]
