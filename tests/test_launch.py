"""Children of a comparison: whatever one prints, and however it ends, the parent says it in a line."""

import sys

import pytest

from stepsnet.errors import UserError
from stepsnet.runs import launch
from stepsnet.runs.launch import Job, run_all


class Shown(list):
    show = list.append


def run_child(monkeypatch, code):
    """Run ``code`` in the place of a training."""
    popen = launch.subprocess.Popen
    monkeypatch.setattr(
        launch.subprocess, "Popen", lambda command, **kwargs: popen([sys.executable, "-c", code], **kwargs)
    )
    shown = Shown()
    run_all([Job("a", "a", "config.yaml", "folder")], 1, shown)
    return shown


def test_only_events_are_shown(monkeypatch):
    lines = ["3", "null", '{"a": 1}', "text", '{"kind": "note", "text": "hello"}']
    code = f"import sys; input(); sys.stdout.buffer.write(b'\\xff\\n'); print({chr(10).join(lines)!r})"
    assert run_child(monkeypatch, code) == [{"kind": "note", "text": "hello", "run": "a"}]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import sys; sys.stdin.readline(); sys.exit('data: got x, expected y')",
            "run a failed: data: got x, expected y",
        ),
        ("import os; os.kill(os.getpid(), 9)", "run a failed: it was killed by SIGKILL"),
    ],
)
def test_a_child_that_fails_is_named_with_its_reason(monkeypatch, code, said):
    with pytest.raises(UserError, match=said):
        run_child(monkeypatch, code)
