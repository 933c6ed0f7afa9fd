"""Time to the first update: from the command to the line that says it is done, imports, model and data included.

    python benchmarks/start.py [--recipe NAME --data …] [--out results/benchmarks/start.json]

Beside it, in turn, a bare `import torch, timm`, which no software on them can be quicker than. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from outcome import conclude, rounded_quartiles

RUNS = 5


def first_update(recipe: str, data: str | None) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "stepsnet", "train", recipe, "--run", f"{folder}/run", "--progress", "events"]
        command += ["--data", data] if data else []
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{") and json.loads(line)["kind"] == "progress":
                seconds = time.perf_counter() - started
                break
        else:
            raise SystemExit(f"{recipe} ended before its first update")
        process.kill()
        process.wait()
        return seconds


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
