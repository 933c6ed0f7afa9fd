"""What the program says: any name, any encoding, a stream that is full, closed or gone, and how a command ends."""

import errno
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stepsnet.cli import VERBS, main
from stepsnet.errors import Stopped, UserError, exit_status
from stepsnet.output.terminal import OutputLost, counted, printable, say
from stepsnet.run_folder.folder import folder_name, lock_folder

STEPSNET = [sys.executable, "-m", "stepsnet"]
FULL = "/dev/full"
needs_full = pytest.mark.skipif(not os.path.exists(FULL), reason="this system has no stream that is always full")
PLAN = ["plan", "--width", "384", "--depth", "12"]  # needs no torch


def run(*arguments, **settings):
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 240, **settings}
    return subprocess.run([*STEPSNET, *arguments], **settings)


def test_control_characters_are_written_out():
    name = "a\x1b]0;title\x07\u202eb\x9b31m\x7f\r\n\tc"
    assert printable(name) == "a\\x1b]0;title\\x07\\u202eb\\x9b31m\\x7f\\x0d\n\tc"
    assert counted(1, "epoch") == "1 epoch" and counted(2000, "image") == "2,000 images"


@pytest.mark.parametrize(
    "arguments", [["train", "\x1b[31mred"], ["\x1b[31mred"], ["train", "digits/tiny", "--\x1b[31m"]]
)
def test_no_message_holds_a_control_character(arguments, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said and "\\x1b[31m" in said and len(said.splitlines()) == 1


def test_a_message_is_one_line_whatever_it_quotes():
    for line_end in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029":
        said = str(UserError(f"name: got {line_end}, expected a word"))
        assert len(said.splitlines()) == 1 and "\\" in said, line_end


def test_an_encoding_without_our_characters_gets_others(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert exit_status(lambda: say("3 × 4 ± 1 — σ \udcff")) == 0
    assert out.buffer.getvalue() == b"3 x 4 +- 1 - \\u03c3 \\udcff\n"


@needs_full
def test_streams_that_are_full_closed_or_in_ascii():
    with open(FULL, "w") as full:
        done = run(*PLAN, stdout=full)
        assert (
            done.returncode == 74
            and done.stderr == "stepsnet: cannot write to standard output: No space left on device\n"
        )
        assert run(*PLAN, "--depth", "0", stderr=full).returncode == 2
    reader, writer = os.pipe()
    os.close(reader)
    done = run(*PLAN, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    command = " ".join([*STEPSNET, *PLAN])
    assert subprocess.run(["sh", "-c", f"exec {command} >&- 2>&- <&-"], timeout=240).returncode == 0
    done = run(*PLAN, env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONOPTIMIZE": "1"})
    assert done.returncode == 0 and done.stdout.startswith("192x12, 272x6, 384x6")


@needs_full
def test_a_run_is_whole_whatever_becomes_of_its_output(tmp_path):
    """With a full standard output, no home, and a terminal of one line of 20 letters."""
    plain = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER", "LOGNAME")}
    environment = {**plain, "TERM": "dumb", "COLUMNS": "20", "LINES": "1"}
    with open(FULL, "w") as full:
        short = ["epochs=1", "train_samples=64", "model.args.depths=[1,1,1]"]
        done = run("train", "digits/tiny", *short, "--run", str(tmp_path / "run"), stdout=full, env=environment)
    assert done.returncode == 74 and done.stderr.count("\n") == 1, done.stderr
    assert {"model.safetensors", "summary.json", "report.html"} <= {path.name for path in (tmp_path / "run").iterdir()}


def test_help_and_mistyped_verbs_and_options(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and all(verb in err for verb in VERBS)
    assert main(["--help"]) == 0 and capsys.readouterr().out == err
    assert main(["trian", "digits/tiny"]) == 2 and "(did you mean train?)" in capsys.readouterr().err
    assert main(["compare", "digits/tiny", "--sedes", "1"]) == 2
    assert "got --sedes, expected no such argument (did you mean --seeds" in capsys.readouterr().err
    assert main(["train"]) == 2
    assert capsys.readouterr().err.endswith(
        "the following arguments are required: RECIPE (see stepsnet train --help)\n"
    )


def test_arguments_may_stand_behind_options(tmp_path, capsys):
    for words, said in (
        (["bench", "test_vit", "--rounds", "1", "test_vitt"], "model: got 'test_vitt'"),
        (
            ["report", str(tmp_path / "a"), "--out", str(tmp_path / "page.html"), str(tmp_path / "b")],
            "a, expected the folder of a run",
        ),
        (["push", str(tmp_path), "--private", "me/mine"], "expected the folder of a run"),
        (
            ["train", "digits/tiny", "--dry-run", "epochs=1", "--device", "cpu"],
            "got --device, expected no such argument",
        ),
        (["train", "digits/tiny", "--dry-run", "--run", str(tmp_path / "run"), "epochs=none"], "epochs: got 'none'"),
        (["--debug", "models"], "got --debug, expected no such argument before the verb"),
    ):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tr"], {"train"}),
        (["train", "digits/ti"], {"digits/tiny"}),
        (["sweep", "evidence/t"], {"evidence/tinyshakespeare"}),
        (["train", "digits/tiny", "--dry"], {"--dry-run"}),
        (["plan", "--profile", "b"], {"bowtie"}),
        (["resume", "run"], {"runs"}),
        (["grow", "run"], {"runs"}),
        (["export", "run"], {"runs", "run.onnx"}),  # as bench, which takes files too
    ],
)
@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_bash_completes(words, expected, tmp_path, capsys):
    assert main(["--print-completion", "bash"]) == 0
    (tmp_path / "script.sh").write_text(capsys.readouterr().out)
    (tmp_path / "runs").mkdir()
    (tmp_path / "run.onnx").touch()
    line = ["stepsnet", *words]
    called = shlex.join(["_shtab_stepsnet", "stepsnet", line[-1], line[-2]])
    code = f". ./script.sh; COMP_WORDS=({shlex.join(line)}); COMP_CWORD={len(words)}; {called}; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert set(done.stdout.split()) == expected, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell, capsys):
    assert main(["--print-completion", shell]) == 0
    assert "digits/tiny" in capsys.readouterr().out


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("lr: got -1"), 2, "stepsnet: lr: got -1\n"),
        (PermissionError(13, "Permission denied", "data/\x1bx"), 2, "stepsnet: data/\\x1bx: Permission denied\n"),
        (OSError(28, "No space left on device"), 2, "stepsnet: No space left on device\n"),
        *(
            (OSError(number, "gone", "runs/a"), 2, "stepsnet: runs/a: gone\n")
            for number in (errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.ENOLCK)
        ),
        (
            ModuleNotFoundError("none", name="pycocotools"),
            2,
            "`pip install '.[detection]'` in a clone of stepsnet installs it",
        ),
        (MemoryError("Unable to allocate 8 TiB"), 2, "out of memory: Unable to allocate 8 TiB"),
        (KeyboardInterrupt(), 130, "stepsnet: interrupted\n"),
        (SystemExit(3), 3, ""),
    ],
)
def test_how_a_command_ends(error, status, said, capsys):
    assert exit_status(lambda: fail(error)) == status
    assert said in capsys.readouterr().err


def test_a_signal_has_the_status_that_it_brings(monkeypatch, capsys):
    class ByTerm(Stopped):
        status = 143

    class HttpError(Exception):
        status = 404

    assert exit_status(lambda: fail(ByTerm("stopped"))) == 143

    class Closed(io.StringIO):
        def flush(self):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stdout", Closed())  # a terminal: what ended the command is not hidden by its end
    assert exit_status(lambda: fail(ByTerm("stopped"))) == 143 and exit_status(lambda: None) == 74
    monkeypatch.undo()
    assert exit_status(lambda: fail(HttpError("not found"))) == 70  # some library's, which means something else


def test_a_fault_of_the_program_is_one_line_and_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "run").mkdir()

    def in_a_run():
        with lock_folder(tmp_path / "run"):
            fail(KeyError("a\nb"))

    for function, folder in ((in_a_run, "run"), (lambda: fail(KeyError("a\nb")), "temporary")):
        assert exit_status(function) == 70
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1 and said.startswith(
            "stepsnet: this is a fault of stepsnet, please report it"
        )
        (file,) = (tmp_path / folder).glob("*fault-*.txt")
        assert str(file) in said and "--debug" in said
        written = file.read_text()
        assert "in fail" in written and "KeyError" in written and "Python" in written
        with pytest.raises(KeyError):
            exit_status(function, debug=True)
    monkeypatch.setattr("tempfile.mkstemp", lambda *arguments: fail(PermissionError(13, "no")))
    assert exit_status(lambda: fail(KeyError("a"))) == 70 and "could not be written anywhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "expected"),
    [("InvalidCxxCompiler: No working C++ compiler found", "C++"), ("Failed to find C compiler. Please specify", "C")],
)
def test_a_missing_compiler_is_no_fault(said, expected, capsys):
    """inductor's own error on a CPU, and on CUDA Triton's, which comes behind inductor's words."""
    assert exit_status(lambda: fail(RuntimeError("x" * 300 * (expected == "C") + said))) == 2
    assert capsys.readouterr().err.startswith(f"stepsnet: compile: torch finds no {expected} compiler")


def test_saying_raises_what_the_boundary_knows(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    sys.stdout.close()
    with pytest.raises(OutputLost):
        say("a")
    say("a", error=True)


@pytest.mark.parametrize("name", ["../../x", "..", ".", "a/../../b", "~", "x" * 400, "a\x1b[31m\0b", "-rf", "é/ü"])
def test_a_name_is_one_folder(name):
    found = folder_name(name)
    assert Path(found).name == found and found not in (".", "..") and 0 < len(found.encode()) <= 240
    assert not found.startswith((".", "-")) and printable(found) == found


def test_every_print_is_at_the_boundary():
    """ruff keeps new ones out; this holds the rule itself."""
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert re.search(r"select = \[.*\"T20\"", text)
