"""Time to the first update: from the command to the line that says it is done, imports, model and data included.

    python benchmarks/start.py [--recipe NAME --data …] [--out results/benchmarks/start.json]
    python benchmarks/start.py --imports [--out results/benchmarks/imports.json]

In turn with it, a bare `import torch, timm` is timed: no software built on these can be quicker. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from outcome import conclude, rounded_quartiles

RUNS = 5


def first_update(recipe: str, data: str | None) -> float:
    """Seconds until the run's first line of metrics, which is written after its first update."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        command = [sys.executable, "-m", "stepsnet", "train", recipe, "--run", f"{folder}/run", "log_interval=1"]
        command += ["--data", data] if data else []
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None:
                    raise SystemExit(f"{recipe} ended before its first update")
                time.sleep(0.01)
            return time.perf_counter() - started
        finally:
            process.kill()
            process.wait()


def seconds_of(*arguments: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def processor_seconds_of(*arguments: str) -> float:
    """Processor time of a command itself, without that of other programs on the machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds_of(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports() -> dict[str, Any]:
    """What the package adds to the import of timm, and what ``stepsnet --help`` takes; both in processor time."""
    timed: dict[str, list[float]] = {"timm": [], "both": [], "help": []}
    for _ in range(RUNS):
        timed["timm"].append(processor_seconds_of("-c", "import timm"))
        timed["both"].append(processor_seconds_of("-c", "import timm, stepsnet"))
        timed["help"].append(processor_seconds_of("-m", "stepsnet", "--help"))
    ratio = [both / alone for both, alone in zip(timed["both"], timed["timm"])]
    return {
        "import_over_timm": rounded_quartiles(ratio, 3),
        "seconds_of_timm": rounded_quartiles(timed["timm"], 2),
        "seconds_of_help": rounded_quartiles(timed["help"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", default="digits/deep")
    parser.add_argument("--data")
    parser.add_argument("--imports", action="store_true", help="the shares of import and --help instead")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.imports:
        conclude("imports", imports(), options.out)
        return
    ours, bare = [], []
    for turn in range(RUNS + 1):
        found = first_update(options.recipe, options.data), seconds_of("-c", "import torch, timm")
        if turn:  # the first fills the caches
            ours.append(found[0])
            bare.append(found[1])
    result = {
        "recipe": options.recipe,
        "seconds_to_first_update": rounded_quartiles(ours, 2),
        "seconds_of_imports": rounded_quartiles(bare, 2),
    }
    conclude("start", result, options.out)


if __name__ == "__main__":
    main()
