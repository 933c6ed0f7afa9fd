"""benchmarks/gpu.sh: its arguments, and that a part which fails loses nothing of the others."""

import json
import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.sh"
# In the place of Python: the tests fail, `bench` and `compare` write what the real ones would, `speed` is killed.
STUB = """#!/usr/bin/env bash
case "$*" in
    *"import sys, torch"*) [ "${@: -1}" = cpu ] || { echo "Traceback"; echo "RuntimeError: no such device"; exit 1; } ;;
    *"import xdist"*) exit 1 ;;
    *"-m pytest"*) echo "device $STEPSNET_TEST_DEVICE"; exit 1 ;;
    *device_speed.py*) echo '{"pairs": {}}' >"${@: -1}"; kill -9 $$ ;;
    *" bench "*) mkdir -p "${@: -1}"; echo '{"rows": []}' >"${@: -1}/speed.json" ;;
    *" compare "*) mkdir -p "${@: -2:1}"; echo "{}" >"${@: -2:1}/comparison.json"; echo "$*" ;;
esac
"""


def run_script(folder, *arguments):
    stub = folder / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    return subprocess.run(
        [str(SCRIPT), *arguments], env={**os.environ, "PYTHON": str(stub)}, cwd=folder, capture_output=True, text=True
    )


def test_each_part_stands_alone(tmp_path):
    out = tmp_path / "out"
    done = run_script(tmp_path, "--device", "cpu", "--quick", "--out", str(out))
    parts = [json.loads(line) for line in (out / "parts.jsonl").read_text().splitlines()]
    assert done.returncode == 1
    assert {part["part"]: part["status"] for part in parts} == {"tests": 1, "speed": 137, "memory": 0, "pair": 0}
    assert sorted(path.name for path in out.iterdir()) == [
        *("log.txt", "memory.json", "pair.json", "parts.jsonl", "speed.json"),
    ]
    log = (out / "log.txt").read_text()
    assert "== tests: status 1\ndevice cpu\n" in log and "digits/tiny epochs=1" in log


def test_chosen_parts_and_data(tmp_path):
    out = tmp_path / "out"
    done = run_script(tmp_path, "--device", "cpu", "--out", str(out), "pair")
    assert done.returncode == 1 and "pair needs --data with CIFAR-10, such as cifar10:PATH" in done.stdout
    assert run_script(tmp_path, "--device", "cpu", "--out", str(out), "--data", "/cifar10", "pair").returncode == 0
    assert "compare cifar10/deep --data folder:/cifar10 amp_dtype=bfloat16" in (out / "log.txt").read_text()
    assert len((out / "parts.jsonl").read_text().splitlines()) == 1  # of the last call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devise", "cpu"], "gpu.sh: got --devise, expected --device DEVICE, --quick"),
        (["speeds"], "gpu.sh: got speeds, expected"),
        (["--out"], "gpu.sh: --out needs a value"),
        (["--device", "tpu"], "gpu.sh: torch cannot use the device tpu (RuntimeError: no such device)"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, tmp_path):
    done = run_script(tmp_path, *arguments)
    assert done.returncode == 2 and done.stderr.startswith(message) and len(done.stderr.splitlines()) == 1
