"""Every metric once: its key, name, unit, decimals and which way is better.

A task gives metrics by their keys; in ``metrics.jsonl`` and ``summary.json`` each key follows the name of its
split, as in ``val_top1``. Tables, figures, sentences and the terminal take their text from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

__all__ = [
    "METRICS",
    "SPLIT_NAMES",
    "Metric",
    "find_metric",
    "format_metric",
    "headline",
    "higher_is_better",
    "metric_label",
    "split_and_key",
]


@dataclass(frozen=True)
class Metric:
    """``name`` is written as it would be within a sentence; values and standard deviations have ``decimals``."""

    key: str
    name: str
    unit: str = ""  # "%" or nothing
    decimals: int = 2
    higher_is_better: bool = True
    is_headline: bool = False  # a task's first one is shown where there is room for one number
    is_detail: bool = False  # recorded, but left out of a report's table of runs

    @property
    def difference_unit(self) -> str:
        """The unit of a difference between two values: points, if these are percentages."""
        return " points" if self.unit == "%" else self.unit

    @property
    def spec(self) -> str:
        """The format of a value, such as ".1f"."""
        return f".{self.decimals}f"

    @property
    def heading(self) -> str:
        """The name at the beginning of a line: "Box AP", but "mIoU"."""
        return self.name[0].upper() + self.name[1:] if self.name.split()[0].islower() else self.name

    @property
    def axis_label(self) -> str:
        """The name with its unit, such as "top-1 accuracy (%)"."""
        return _with_unit(self.name, self)


def _average_precisions(of: str) -> list[Metric]:
    return [
        Metric(f"{of}_ap", f"{of} AP", "%", 1, is_headline=True),
        Metric(f"{of}_ap50", f"{of} AP50", "%", 1),
        Metric(f"{of}_ap75", f"{of} AP75", "%", 1, is_detail=True),
        *(
            Metric(f"{of}_ap_{size}", f"{of} AP of {size} objects", "%", 1, is_detail=True)
            for size in ("small", "medium", "large")
        ),
    ]


METRICS: dict[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric("top1", "top-1 accuracy", "%", 1, is_headline=True),
        Metric("top5", "top-5 accuracy", "%", 1, is_detail=True),
        Metric("mixed_top1", "accuracy on the first of two mixed images", "%", 1, is_detail=True),
        Metric("miou", "mIoU", "%", 1, is_headline=True),
        Metric("macc", "mAcc", "%", 1),
        Metric("iou", "IoU", "%", 1, is_detail=True),  # of a class
        Metric("pixel_accuracy", "pixel accuracy", "%", 1, is_headline=True),
        *_average_precisions("box"),
        *_average_precisions("mask"),
        Metric("objects", "objects", decimals=0, is_detail=True),  # of a class
        Metric("perplexity", "perplexity", decimals=2, higher_is_better=False, is_headline=True),
        Metric("word_perplexity", "perplexity per word", decimals=1, higher_is_better=False),
        Metric("bits_per_character", "bits per character", decimals=3, higher_is_better=False, is_detail=True),
        Metric("loss", "loss", decimals=3, higher_is_better=False),
        Metric("router_loss", "loss of the router", decimals=3, higher_is_better=False, is_detail=True),
    )
}
SPLIT_NAMES = {"train": "training", "val": "validation", "test": "test"}


def split_and_key(name: str) -> tuple[str, str]:
    """``val_top1`` -> ("val", "top1"); the split of a bare key is empty."""
    split, _, key = name.partition("_")
    return (split, key) if split in SPLIT_NAMES else ("", name)


def find_metric(name: str) -> Metric:
    """Return a metric by its key, with or without its split; one that is not listed is named by its key.

    After ``clean_`` it is the metric of training samples as evaluation sees them, as in ``train_clean_loss``.
    """
    _, key = split_and_key(name)
    if key not in METRICS and (metric := METRICS.get(key.removeprefix("clean_"))):
        return replace(metric, key=key, name=f"{metric.name}, clean", is_headline=False, is_detail=True)
    return METRICS.get(key, Metric(key, key.replace("_", " "), decimals=4))


def metric_label(name: str, with_unit: bool = False) -> str:
    """The name with its split: ``val_top1`` -> "validation top-1 accuracy", or "validation top-1 accuracy (%)"."""
    split, _ = split_and_key(name)
    metric = find_metric(name)
    label = f"{SPLIT_NAMES[split]} {metric.name}" if split else metric.name
    return _with_unit(label, metric) if with_unit else label


def _with_unit(text: str, metric: Metric) -> str:
    return f"{text} ({metric.unit})" if metric.unit else text


def higher_is_better(name: str) -> bool:
    return find_metric(name).higher_is_better


def format_metric(name: str, value: float, unit: bool = True) -> str:
    """A value with its unit, such as 71.0%."""
    metric = find_metric(name)
    return f"{value:{metric.spec}}{metric.unit if unit else ''}"


def headline(metrics: Mapping[str, float], split: str = "") -> str:
    """The metrics that a user knows best, in words: ``top-1 accuracy 71.0%``; empty if there is none."""
    prefix = f"{split}_" if split else ""
    shown = [metric for metric in METRICS.values() if metric.is_headline and prefix + metric.key in metrics]
    if any(metric.key == "miou" for metric in shown):
        shown = [metric for metric in shown if metric.key != "pixel_accuracy"]
    return ", ".join(f"{metric.name} {format_metric(metric.key, metrics[prefix + metric.key])}" for metric in shown)
