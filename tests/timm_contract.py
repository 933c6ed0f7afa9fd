"""Run timm's own tests of its models on ours: ``python tests/timm_contract.py [pytest arguments]``.

timm's wheel comes without its tests, and we keep no copy of them: they are taken from the source
distribution of the version that is installed. Exits with pytest's status, or with 1 and one line.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
MODULES = ("steps_deit", "steps_swin", "swin_plus", "steps_resnet")
NOT_CONVOLUTIONAL = ("steps_deit*", "test_steps_deit")
# line of timm's test_models.py -> what stands there instead
EDITS = {
    "import timm\n": "import stepsnet\nimport timm\n",
    "FEAT_INTER_FILTERS = [\n": f"FEAT_INTER_FILTERS = [\n    *{MODULES},\n",  # modules with forward_intermediates
    "NON_STD_FILTERS = [\n": f"NON_STD_FILTERS = [\n    *{NOT_CONVOLUTIONAL},\n",  # as timm lists its own vit and deit
}
ARGUMENTS = ["-k", "test_steps_", "-n", "2", "-q", "-W", "ignore", "-p", "no:cacheprovider"]


def download(version: str, folder: Path) -> Path:
    """The source distribution of timm, by the pip and the index that installed it."""
    requirement = ["--no-deps", "--no-binary", "timm", f"timm=={version}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = list(folder.glob("timm-*.tar.gz"))
    if done.returncode or not found:
        lines = done.stderr.splitlines() or ["no reason given"]
        reason = [line for line in lines if "ERROR" in line] or lines
        sys.exit(f"timm: got no source distribution of {version} from pip ({reason[-1].strip()})")
    return found[0]


def read_tests(archive: Path) -> str:
    """timm's tests/test_models.py, with our models in its lists."""
    with tarfile.open(archive) as files:
        members = [member for member in files if member.name.endswith("/tests/test_models.py")]
        content = files.extractfile(members[0]) if members else None
        if content is None:
            sys.exit(f"timm: got no tests/test_models.py in {archive.name}")
        tests = content.read().decode()
    for line, instead in EDITS.items():
        if tests.count(f"\n{line}") != 1:
            sys.exit(f"timm: got {tests.count(line)} lines {line.strip()!r} in its tests/test_models.py, expected 1")
        tests = tests.replace(f"\n{line}", f"\n{instead}")
    return tests


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive = download(importlib.metadata.version("timm"), folder)
        (folder / "test_timm_models.py").write_text(read_tests(archive), encoding="utf-8")
        (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")  # ours is for our own tests
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "pytest", "test_timm_models.py", *ARGUMENTS, *arguments]
        return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
