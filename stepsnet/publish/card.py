"""The card of a published run: everything in it comes from the run's folder."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..errors import UserError
from ..files.reading import read_yaml
from ..files.writing import dump_yaml, encodable
from ..metrics import find_metric, format_metric, metric_label, split_and_key
from ..output.markdown import markdown_table
from ..output.redact import public, public_command, public_value
from ..output.summary_stats import format_mean_std
from ..plan import steps_as_text, steps_of
from ..report.load_runs import LoadedRun, load_run
from ..report.words import count, duration, key_in_words, updates_in_words
from ..run_folder.folder import CONFIG, read_run_recipe
from ..run_folder.provenance import joined
from ..settings.config import Recipe
from ..settings.overrides import to_plain
from ..tasks.publication import Publication
from ..tasks.splits import split_of

__all__ = ["public_recipe", "published", "render_card"]

_LOCAL_ARGUMENTS = ("checkpoint_path", "cache_dir")  # of timm.create_model, for files on this machine
_LOCAL_SETTINGS = {"import_from": None, "device": "auto", "workers": 0, "tracker": None}
_HUB_METRICS = {"top1": "accuracy", "miou": "mean_iou"}  # our name -> the hub's; others keep ours


def render_card(run: Path, publication: Publication, repo: str, license: str | None = None) -> str:
    """The card as Markdown with metadata: what the model is, how it is used, its results and how it was trained.

    Args:
        repo: where the run will be published, such as USER/NAME.
        license: the hub's name for the licence of the weights; None states none.

    Raises:
        UserError: the run's folder cannot be read.
    """
    loaded, recipe = load_run(run), published(read_run_recipe(run), publication)
    summary, metrics = loaded.summary, _metrics(loaded.summary["metrics"])
    data, split = split_of(public_value(recipe.data))
    metadata = ModelCardData(
        library_name=publication.library,
        pipeline_tag=publication.pipeline,
        license=license,
        tags=["stepsnet", publication.library],
        model_name=repo.rpartition("/")[2],
        eval_results=_results(metrics, data, split, publication.pipeline),
    )
    seeds = _seeds(loaded, recipe.imports)
    card = ModelCard.from_template(
        metadata,
        template_str=files(__package__).joinpath("card.md").read_text(encoding="utf-8"),
        title=repo.rpartition("/")[2],
        summary=summary,
        recipe=recipe,
        data=data,
        shape=steps_as_text(steps_of(summary.get("widths", []))),
        params=count(summary["params"]),
        macs=count(summary["macs"]),
        usage=publication.usage.replace("SOURCE", repo).rstrip(),
        note=publication.note,
        modules=recipe.imports,
        results=_table(metrics, split, seeds),
        seeds=sorted(seed.seed for seed in seeds),
        command=public_command(summary["command"]),
        time=duration(summary["seconds"]),
        ranks_before=_ranks_before(summary),
        hardware=", ".join(f"{key_in_words(key)}: {value}" for key, value in summary["hardware"].items() if value),
        versions=", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
        settings=dump_yaml(public_recipe(recipe)).rstrip(),
        license=license,
    )
    return encodable(re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n")


def _metrics(found: Mapping[str, Any]) -> dict[str, float]:
    """The final metrics, the test split's first and the training split's last."""
    names = [name for name in found if not name.startswith("best_") and isinstance(found[name], (int, float))]
    order = {"test": 0, "val": 1, "train": 2}
    return {name: found[name] for name in sorted(names, key=lambda name: order.get(split_and_key(name)[0], 1))}


def _ranks_before(summary: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The updates that were made with other numbers of ranks than the last ones, and these numbers."""
    keys = ("from_update", "until_update", "ranks")
    parts = [{key: part[key] for key in keys if key in part} for part in summary.get("trained_before", [])]
    others = [part for part in joined(parts) if part.get("ranks") not in (None, summary.get("ranks"))]
    return [(updates_in_words(part), part["ranks"]) for part in others]


def _seeds(run: LoadedRun, modules: Sequence[str]) -> Sequence[LoadedRun]:
    """This run, and the finished runs beside it that differ from it in their seed alone.

    A run that names other modules than ``modules`` is skipped: nobody has asked for its modules to be imported.
    """
    found = {run.seed: run}
    for config in sorted(run.folder.resolve().parent.glob(f"*/{CONFIG}")):
        with suppress(UserError):
            named = read_yaml(config, "run").get("import") or []
            if ([named] if isinstance(named, str) else named) != list(modules):
                continue
            other = load_run(config.parent)
            if other.summary and (other.recipe_key, other.summary.get("label")) == _kind(run):
                found.setdefault(other.seed, other)
    return list(found.values())


def _kind(run: LoadedRun) -> tuple[str, Any]:
    return run.recipe_key, run.summary.get("label")


def _label(name: str, split: str, with_unit: bool = False) -> str:
    """A metric in words, with the split that its run evaluated, which with ``DATA@train`` is not validation."""
    found, key = split_and_key(name)
    if found != "val" or split == "val":
        return metric_label(name, with_unit=with_unit)
    return metric_label(f"{split}_{key}", with_unit=with_unit) + (", as evaluated" if split == "train" else "")


def _table(metrics: Mapping[str, float], split: str, seeds: Sequence[LoadedRun]) -> str:
    headers = ["", "these weights", *([f"mean ± standard deviation of {len(seeds)} seeds"] if len(seeds) > 1 else [])]
    rows = []
    for name, value in metrics.items():
        metric, values = find_metric(name), [seed.summary["metrics"].get(name) for seed in seeds]
        known = [one for one in values if one is not None]
        spread = [format_mean_std(known, metric.spec, metric.unit) if len(known) == len(seeds) else "—"]
        rows.append([_label(name, split), format_metric(name, value), *(spread if len(seeds) > 1 else [])])
    return markdown_table(headers, rows, "l" + "r" * (len(headers) - 1))


def _results(metrics: Mapping[str, float], data: str, evaluated: str, pipeline: str) -> list[EvalResult]:
    """What the hub lists: scores on images or texts that were not trained on."""
    found = []
    for name, value in metrics.items():
        split, key = split_and_key(name)
        split = evaluated if split == "val" else split
        if split != "train" and (find_metric(name).is_headline or key == "loss"):
            found.append(
                EvalResult(
                    task_type=pipeline,
                    dataset_type=data,
                    dataset_name=data,
                    dataset_split="validation" if split == "val" else split,
                    metric_type=_HUB_METRICS.get(key, key),
                    metric_name=_label(name, evaluated, with_unit=True),
                    metric_value=value,
                )
            )
    return found


def published(recipe: Recipe, publication: Publication) -> Recipe:
    """A run's recipe, with the model as others can build it."""
    return recipe if publication.model is None else dataclasses.replace(recipe, model=publication.model)


def public_recipe(recipe: Recipe) -> dict[str, Any]:
    """A recipe as ``config.yaml`` holds it, made fit for other machines and without the baseline."""
    values = public(to_plain(recipe))
    model = values["model"]
    args = {key: value for key, value in model["args"].items() if key not in _LOCAL_ARGUMENTS}
    return values | {"model": {**model, "args": args}, "baseline": None} | _LOCAL_SETTINGS
