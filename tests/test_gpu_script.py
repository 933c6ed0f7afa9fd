"""benchmarks/gpu.sh: its arguments, and that a part which fails loses nothing of the others."""

import json
import math
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.sh"
# In the place of Python: tests and `sweep` fail, `speed` is killed; the others write their files.
STUB = """#!/usr/bin/env bash
case "$*" in
    *"import sys, torch"*) [ "${@: -1}" = cpu ] || { echo "Traceback"; echo "RuntimeError: no such device"; exit 1; } ;;
    *find_spec*) echo "$MISSING" ;;
    *"import xdist"* | *"import pytest_timeout"*) exit 1 ;;
    *"-m pytest"*) echo "device $STEPSNET_TEST_DEVICE"; exit 1 ;;
    *device_speed.py*) echo '{"pairs": {}}' >"${@: -1}"; kill -9 $$ ;;
    *" bench "*) mkdir -p "${@: -1}"; echo '{"rows": []}' >"${@: -1}/speed.json" ;;
    *" compare "*) mkdir -p "${@: -2:1}"; echo "{}" >"${@: -2:1}/comparison.json"; echo "$*" ;;
    *" sweep "*) mkdir -p "${@: -1}"; echo "{}" >"${@: -1}/plain-96.json"; echo "$*"; exit 1 ;;
esac
"""


def run_script(folder, *arguments, **variables):
    stub = folder / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    return subprocess.run(
        [str(SCRIPT), *arguments],
        env={**os.environ, "PYTHON": str(stub), **variables},
        cwd=folder,
        capture_output=True,
        text=True,
    )


def log_of(out):
    return (out / "log.txt").read_text()


def test_each_part_stands_alone(tmp_path):
    out = tmp_path / "out"
    done = run_script(tmp_path, "--device", "cpu", "--quick", "--out", str(out))
    parts = [json.loads(line) for line in (out / "parts.jsonl").read_text().splitlines()]
    assert done.returncode == 1
    assert {part["part"]: part["status"] for part in parts} == {"tests": 1, "speed": 137, "memory": 0, "deep": 0}
    assert sorted(path.name for path in out.iterdir()) == [
        *("log.txt", "memory.json", "pair.json", "parts.jsonl", "speed.json"),
    ]
    log = (out / "log.txt").read_text()
    assert "== tests: status 1\ndevice cpu\n" in log and "digits/tiny epochs=1" in log


def test_chosen_parts_and_data(tmp_path):
    out = tmp_path / "out"
    done = run_script(tmp_path, "--device", "cpu", "--out", str(out), "deep")
    expected = "deep needs --data with what evidence/cifar10-paper-widths is of, such as cifar10:PATH"
    assert done.returncode == 1 and expected in done.stdout
    work = tmp_path / "work"
    options = {"device": "cpu", "out": out, "data": "/cifar10", "work": work, "seconds": 9}
    arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))] + ["deep"]
    done = run_script(tmp_path, *arguments)  # the study is stopped, and what it has is kept
    assert done.returncode == 1 and re.search(r"== deep, at most [1-9] s", done.stdout)  # fewer than 9 under load
    assert "sweep evidence/cifar10-paper-widths --data folder:/cifar10" in log_of(out)
    assert len((out / "parts.jsonl").read_text().splitlines()) == 1  # of the last call
    there = "results/evidence-cifar10-paper-widths"
    with tarfile.open(out / "deep.tgz") as packed:
        assert f"{there}/plain-96.json" in packed.getnames()
    assert (work / there / "plain-96.json").exists()  # from which a later call goes on
    assert f"--jobs 4 --run {work}/evidence-cifar10-paper-widths --resume --results {work}/{there}" in log_of(out)
    assert (work / there / "plain-24-tuning-lr0.001-seed0.json").exists()  # of the repository: not run again


def test_another_study_and_some_of_its_cells(tmp_path):
    out, work = tmp_path / "out", tmp_path / "work"
    options = {"study": "depth-bench/prose", "cells": "plain@24,steps@24", "jobs": 16, "data": "text:/prose"}
    options["work"] = work
    arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    run_script(tmp_path, "--device", "cpu", "--out", str(out), *arguments, "deep")
    workers = max(1, math.ceil(len(os.sched_getaffinity(0)) / 16) - 1)
    expected = f"--cells plain@24,steps@24 --data text:/prose device=cpu workers={workers} --jobs 16"
    assert f"sweep depth-bench/prose {expected}" in log_of(out)
    with tarfile.open(out / "deep.tgz") as packed:
        assert "results/depth-bench-prose/plain-96.json" in packed.getnames()


def test_mps_runs_beside_the_parts_and_is_ended(tmp_path):
    said, tool = tmp_path / "said", tmp_path / "nvidia-cuda-mps-control"
    arguments = ("--device", "cpu", "--out", str(tmp_path / "out"), "--mps", "memory")
    done = run_script(tmp_path, *arguments, PATH="/usr/bin:/bin")
    assert done.returncode == 2 and done.stderr == "gpu.sh: --mps: no nvidia-cuda-mps-control is installed\n"
    tool.write_text(f'#!/bin/sh\necho "$* $CUDA_MPS_PIPE_DIRECTORY" >>{said}; [ "$1" = -d ] || cat >>{said}\n')
    tool.chmod(0o755)
    done = run_script(tmp_path, *arguments, PATH=f"{tmp_path}:/usr/bin:/bin")
    started, ended, command = said.read_text().splitlines()
    folder = started.removeprefix("-d ")
    assert done.returncode == 0 and ended.strip() == folder and command == "quit" and not Path(folder).exists()


def test_no_part_begins_without_what_it_needs(tmp_path):
    done = run_script(tmp_path, "--device", "cpu", "--out", str(tmp_path / "out"), MISSING="pydantic pycocotools")
    assert done.returncode == 2 and not (tmp_path / "out" / "parts.jsonl").exists()
    assert done.stderr.strip().endswith(
        "cannot import pydantic pycocotools, expected the extras detection and language, pytest and hypothesis"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devise", "cpu"], "gpu.sh: got --devise, expected --device DEVICE, --quick"),
        (["speeds"], "gpu.sh: got speeds, expected"),
        (["--out"], "gpu.sh: --out needs a value"),
        (["--seconds", "1m"], "gpu.sh: --seconds: got 1m, expected a positive whole number"),
        (["--jobs", "all"], "gpu.sh: --jobs: got all, expected a positive whole number"),
        (["--jobs", "0"], "gpu.sh: --jobs: got 0, expected a positive whole number"),
        (["--device", "tpu"], "gpu.sh: torch cannot use the device tpu (RuntimeError: no such device)"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, tmp_path):
    done = run_script(tmp_path, *arguments)
    assert done.returncode == 2 and done.stderr.startswith(message) and len(done.stderr.splitlines()) == 1
