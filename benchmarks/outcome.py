"""How a benchmark ends: its numbers and where they come from, as one JSON line, and in a file if one is named."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stepsnet.output.redact import public_command
from stepsnet.output.summary_stats import quartiles
from stepsnet.run_folder.provenance import provenance

__all__ = ["conclude", "record", "rounded_quartiles"]


def rounded_quartiles(values: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """Median and quartiles: on a shared machine, a mean would tell of its other users."""
    found = quartiles(values)
    return {
        "median": round(found["median"], digits),
        "quartiles": [round(value, digits) for value in found["quartiles"]],
        "n": found["n"],
    }


def record(benchmark: str, result: dict[str, Any]) -> dict[str, Any]:
    """A result and where it comes from; a result with a ``device`` was measured there."""
    device = torch.device(result["device"]) if "device" in result else None
    command = public_command(shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]))
    return {"benchmark": benchmark, **result, **provenance(device), "command": command}


def conclude(benchmark: str, result: dict[str, Any], out: Path | None = None) -> None:
    whole = record(benchmark, result)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(whole))
