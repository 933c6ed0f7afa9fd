"""A real process in a poor environment trains as anywhere else: no home, no terminal to speak of, no assertions."""

import json
import subprocess
import sys
from pathlib import Path

import stepsnet


def test_a_run_without_home_terminal_locale_and_assertions(tmp_path):
    environment = {
        "PYTHONPATH": str(Path(stepsnet.__file__).parents[1]),
        "PYTHONOPTIMIZE": "1",
        "HOME": "/nonexistent",
        "TERM": "dumb",
        "COLUMNS": "1",
        "LANG": "C",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "stepsnet", "train", "digits/tiny", "epochs=1", "train_samples=64", "--run", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Matplotlib" not in done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]["train_loss"] > 0
    assert (tmp_path / "run" / "report.html").exists()
    unknown = subprocess.run([*command[:-2], "lrr=1"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert unknown.returncode == 2 and len(unknown.stderr.splitlines()) == 1
