"""The benchmarks can be started: each imports what is there, and explains itself."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_a_benchmark_starts(file, monkeypatch, capsys):
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [file.name, "--help"])
    if file.stem in ("outcome", "rate_grid"):  # what the others share
        assert runpy.run_path(str(file), run_name="__main__")
        return
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(file), run_name="__main__")
    assert ended.value.code == 0 and "out" in capsys.readouterr().out
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
