"""What the rendered tables share: files, statistics and where a result comes from."""

from __future__ import annotations

import json
from pathlib import Path

from stepsnet.metrics import find_metric
from stepsnet.output.markdown import markdown_table
from stepsnet.output.summary_stats import format_mean_std
from stepsnet.study.declare import Study, find_study
from stepsnet.study.results import check_results

RESULTS = Path(__file__).parent.parent / "results"
FIGURES = Path(__file__).parent / "figures"


def table_of_numbers(headers: list[str], rows: list[list]) -> str:
    """A table whose first column is text."""
    return markdown_table(headers, rows, "l" + "r" * (len(headers) - 1))


def mean_std(values: list[float], key: str) -> str:
    """Mean ± sample standard deviation of a metric, with its unit."""
    metric = find_metric(key)
    return format_mean_std(values, metric.spec, metric.unit)


def mean_difference(values: list[float], key: str) -> str:
    metric = find_metric(key)
    return format_mean_std(values, metric.spec, metric.difference_unit)


def threads(hardware: dict) -> str:
    return f"{hardware['threads']} thread{'s' * (hardware['threads'] > 1)}"


def origin(result: dict) -> str:
    hardware, versions = result["hardware"], result["versions"]
    machine = hardware["gpu"] or f"{hardware['cpu']}, {threads(hardware)} of {hardware['cores']} cores"
    return f"`{result['command']}`: {machine}; torch {versions['torch']}, timm {versions['timm']}; {result['commit']}"


def has_benchmark(name: str) -> bool:
    return (RESULTS / "benchmarks" / f"{name}.json").exists()


def read_benchmark(name: str) -> dict:
    return json.loads((RESULTS / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def read_study(name: str) -> tuple[Study, dict]:
    """A declared study and the records of its runs, checked against its declaration."""
    study = find_study(name)
    assert study is not None, name
    return study, check_results(study, RESULTS / study.folder)
