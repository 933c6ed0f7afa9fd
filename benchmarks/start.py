"""Time to the first update: from the command to the line that says it is done, imports, model and data included.

    python benchmarks/start.py [--recipe NAME --data …] [--out results/benchmarks/start.json]

Beside it, in turn, a bare `import torch, timm`, which no software on them can be quicker than. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from outcome import conclude, rounded_quartiles

RUNS = 5


def first_update(recipe: str, data: str | None) -> float:
    """Until the run's first line of metrics, which is written after its first update."""
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


def bare_import() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, timm"], check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", default="digits/deep")
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ours, bare = [], []
    for turn in range(RUNS + 1):
        found = first_update(options.recipe, options.data), bare_import()
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
