"""Children of a comparison: what they are given, whatever one prints, and however it or the parent ends."""

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from forks import forked, status_of

from stepsnet.cli import main
from stepsnet.engine.interrupt import Interrupted, catch_signals
from stepsnet.errors import Fault, UserError, exit_status
from stepsnet.machine import available_memory, cores
from stepsnet.output.console import Display
from stepsnet.recipes import find_recipe
from stepsnet.run_folder.folder import lock_folder, updates_done
from stepsnet.run_folder.records import diverged_at
from stepsnet.runs import grid as grids
from stepsnet.runs import launch
from stepsnet.runs.grid import Entry, plan_grid, train_grid
from stepsnet.runs.launch import Failure, Job, error_of, run_all
from stepsnet.runs.sweep import sweep
from stepsnet.settings.overrides import override, read_recipe, to_yaml


class Shown(list, Display):
    show = list.append


def run_child(monkeypatch, code):
    """Run ``code`` in the place of a training."""
    popen = launch.subprocess.Popen
    monkeypatch.setattr(
        launch.subprocess, "Popen", lambda command, **kwargs: popen([sys.executable, "-c", code], **kwargs)
    )
    shown = Shown()
    if failed := run_all([Job("a", "a", "config.yaml", "folder")], 1, shown):
        raise error_of(failed, 1)
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


def test_children_end_in_good_order_where_the_parent_meets_an_error(tmp_path, monkeypatch):
    code = f"""
import json, signal, sys, time
name, folder = json.loads(sys.stdin.readline())["name"], {str(tmp_path)!r}
if name == "ends":
    while not __import__("os").path.exists(folder + "/ready"): time.sleep(0.01)
    sys.exit()
def stop(*_):
    print("x" * 200_000)  # more than a pipe holds
    time.sleep(0.1)
    open(folder + "/checkpoint", "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, stop)
open(folder + "/ready", "w").close()
while True: time.sleep(1)
"""
    popen = launch.subprocess.Popen
    monkeypatch.setattr(launch.subprocess, "Popen", lambda command, **kw: popen([sys.executable, "-c", code], **kw))

    def ended(job, status, said):
        raise UserError("no space")

    jobs = [Job(name, name, "config.yaml", "folder") for name in ("trains", "ends")]
    with pytest.raises(UserError, match="no space"):
        run_all(jobs, 2, Shown(), ended)
    assert (tmp_path / "checkpoint").exists()


def test_a_child_waits_for_the_last_checkpoint_of_the_one_before(tmp_path, monkeypatch):
    job, shown = Job("a", "a", "a.yaml", str(tmp_path / "a")), []
    (holds, held), (let_go, go) = os.pipe(), os.pipe()

    def hold():
        with lock_folder(tmp_path / "a"):
            os.write(held, b".")
            os.read(let_go, 1)

    class LetGo(Display):
        def show(self, event):
            shown.append(event["text"])
            os.write(go, b".")

    def train(*_):
        with lock_folder(tmp_path / "a"):  # which is free by now
            shown.append("trained")

    other = forked(hold)
    os.read(holds, 1)
    monkeypatch.setattr(launch, "_stop_with_parent", lambda: None)
    monkeypatch.setattr("stepsnet.output.console.Events", LetGo)
    monkeypatch.setattr("stepsnet.runs.train.train_run", train)
    monkeypatch.setattr("stepsnet.settings.overrides.read_recipe", lambda _: find_recipe("digits/tiny"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(dataclasses.asdict(job)) + "\n"))
    launch._run_job()
    note = "waiting at most 60 s for an earlier process to write this run's last checkpoint"
    assert shown == [note, "trained"] and status_of(other) == 0
    too_long = pytest.raises(UserError, match="in use by a run that is still alive")
    with lock_folder(tmp_path / "a"), too_long, lock_folder(tmp_path / "a", wait=0.05):
        pass


def test_a_run_that_diverges_keeps_no_other_from_its_start(tmp_path, grids_in_this_process):
    small = ["epochs=2", "warmup_epochs=0", "train_samples=64", "batch_size=32", "stream_epochs=0", "opt=sgd"]
    recipes = [override(find_recipe("digits/tiny"), [*small, f"lr={lr}"]) for lr in (1e6, 1e-3)]
    recipes = [dataclasses.replace(recipe, name=name) for recipe, name in zip(recipes, ("high", "low"))]
    folder = tmp_path / "sweep"
    for resume in (False, True):  # and a second time: it diverges again, and nothing else is trained
        with pytest.raises(UserError) as raised:
            sweep(recipes, folder, [0], 1, Shown(), resume)
        number = "1 of 2 runs failed, such as high" if not resume else "run high failed"
        assert re.match(rf"{number}: \w+: got (nan|inf) at update .*try a new run with a lower lr", str(raised.value))
        assert [row["recipe"] for row in json.loads((folder / "sweep.json").read_text())] == ["low"]
        page = (folder / "report.html").read_text()
        at = re.search(r"at update (\d+)", str(raised.value))[1]
        assert f"diverged and left out of the means: seed 0 of StepsNet at update {at}" in page
        assert f"diverged at update {at}: 0 of 2 epochs" in page and "not finished" not in page
        assert diverged_at(folder / "high-seed0") == int(at) and diverged_at(folder / "low-seed0") is None


def test_a_fault_of_the_program_stays_one(monkeypatch, capsys):
    code = "import sys; sys.stdin.readline(); print('stepsnet: this is a fault'); sys.exit(70)"
    assert exit_status(lambda: run_child(monkeypatch, code)) == 70
    assert capsys.readouterr().err == "stepsnet: run a failed: this is a fault\n"
    both = error_of([Failure("a", 2, "stepsnet: data: no"), Failure("b", 70, "stepsnet: this is a fault")], 3)
    assert isinstance(both, Fault) and str(both) == "2 of 3 runs failed, such as b: this is a fault"


def test_what_is_printed_after_the_reason_does_not_hide_it(monkeypatch):
    code = "import sys; sys.stdin.readline(); print('stepsnet: loss: got nan\\n\\nbye'); sys.exit(2)"
    with pytest.raises(UserError, match="run a failed: loss: got nan"):
        run_child(monkeypatch, code)


@pytest.fixture
def started(monkeypatch):
    """The jobs that would have been started, on a machine of 8 cores."""
    jobs = []
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(grids, "run_all", lambda waiting, at_once, display: jobs.append(waiting) or [])
    return jobs


def test_the_threads_of_a_run_are_kept_whatever_is_left_to_run(tmp_path, started, monkeypatch):
    recipe = find_recipe("digits/tiny")
    pair = [Entry("StepsNet", "StepsNet", recipe), Entry("baseline", "baseline", recipe.of_baseline())]

    def grid(folder, seeds, jobs, resume=False):
        train_grid(pair, folder, seeds, jobs, None, resume, recipe)
        return [(job.name, job.threads) for job in started.pop()]

    assert grid(tmp_path / "grid", [0], 2) == [("StepsNet", 4), ("baseline", 4)]
    assert [read_recipe(file).threads for file in (tmp_path / "grid" / "recipes").iterdir()] == [4, 4]
    ended = tmp_path / "grid" / "stepsnet-seed0"
    ended.mkdir()
    (ended / "summary.json").write_text(json.dumps({"epochs": recipe.epochs}))
    (ended / "report.html").touch()
    (ended / "config.yaml").write_bytes((tmp_path / "grid" / "recipes" / "stepsnet-seed0.yaml").read_bytes())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert grid(tmp_path / "grid", [0], 1, resume=True) == [("baseline", 4)]
    assert [threads for _, threads in grid(tmp_path / "other", [0, 1], 2)] == [1] * 4  # what the user has asked for
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert [threads for _, threads in grid(tmp_path / "third", [0], 2)] == [4, 4]  # no more than its share
    with pytest.raises(UserError, match="holds a run with lr"):
        train_grid(pair, tmp_path / "grid", [0], 1, None, True, override(recipe, ["lr=0.5"]))


@pytest.mark.parametrize(("asked", "expected"), [(None, "2"), ("5", "5")])
def test_runs_that_compile_side_by_side_share_the_cores(started, monkeypatch, asked, expected):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", asked)

    def popen(command, env, **_):
        raise RuntimeError(f"{env['TORCHINDUCTOR_COMPILE_THREADS']} {env['OMP_NUM_THREADS']}")

    monkeypatch.setattr(launch.subprocess, "Popen", popen)
    with pytest.raises(RuntimeError, match=f"^{expected} 3$"):
        run_all([Job("run", "", "config.yaml", "run", threads=3)], 4, None)


def test_the_kind_of_a_folder_is_not_mistaken(tmp_path, started, capsys):
    recipe = find_recipe("digits/tiny")
    train_grid([Entry("StepsNet", "", recipe)], tmp_path / "pair", [0], 1, None, False, recipe)
    train_grid([Entry("digits/tiny", "", recipe)], tmp_path / "sweep", [0], 1, None)
    for verb, folder, said in (
        ("train", "pair", "holds a comparison, expected a new folder (`stepsnet resume"),
        ("train", "sweep", "is not empty"),
        ("compare", "sweep", "holds a sweep, with the run digits-tiny-seed0, expected a new"),
        ("sweep", "pair", "holds a run or a comparison, expected a new folder (`stepsnet resume"),
    ):
        assert main([verb, "digits/tiny", "--run", str(tmp_path / folder), "--resume"]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "pair" / "config.yaml").unlink()  # as where it was killed before its last file
    assert main(["resume", str(tmp_path / "pair")]) == 2
    assert "is not the folder of a sweep of recipes (it has the run stepsnet-seed0)" in capsys.readouterr().err


def test_children_end_with_a_parent_that_is_killed_and_the_folder_alone_goes_on(tmp_path):
    folder = tmp_path / "pair"
    small = ["batch_size=32", "train_samples=64", "model.args.depths=[1,1,1]", "baseline.args.depths=[2]"]
    command = ["compare", "digits/tiny", "--run", str(folder), "epochs=5000", "--jobs", "1", *small, "device=cpu"]
    parent = forked(lambda: main([*command, "stream_epochs=0"]))
    runs = [folder / "stepsnet-seed0", folder / "baseline-seed0"]
    while not updates_done(runs[0]):
        assert os.waitpid(parent, os.WNOHANG) == (0, 0)
        time.sleep(0.1)
    os.kill(parent, signal.SIGKILL)
    assert status_of(parent) == -signal.SIGKILL
    while True:
        try:
            with lock_folder(runs[0]):  # which the child holds for as long as it lives
                break
        except UserError:
            time.sleep(0.1)
    assert not runs[1].exists()
    epochs = 1 + -(-updates_done(runs[0]) // 2)
    assert main(["resume", str(folder), f"epochs={epochs}"]) == 0
    for run in runs:
        recipe, summary = read_recipe(run / "config.yaml"), json.loads((run / "summary.json").read_text())
        assert summary["epochs"] == recipe.epochs == epochs
        assert [before for _, before in recipe.earlier_epochs] == ([5000] if run == runs[0] else [])
    assert json.loads((folder / "comparison.json").read_text())["seeds"] == [0]
    assert read_recipe(folder / "config.yaml").epochs == epochs and os.path.exists(folder / "report.html")


def test_other_seeds_of_a_sweep_are_of_the_same_recipe(tmp_path):
    """They stand beside the new ones in its results."""
    recipe = dataclasses.replace(override(find_recipe("digits/tiny"), ["lr=0.1"]), baseline=None)
    for file in (tmp_path / "recipes" / "a-seed0.yaml", tmp_path / "a-seed0" / "config.yaml"):
        file.parent.mkdir()
        file.write_text(to_yaml(recipe))
    assert [job.name for job in plan_grid([Entry("a", "a", recipe)], tmp_path, [1], 1, "auto")[0]] == ["a"]
    longer = dataclasses.replace(recipe, epochs=recipe.epochs + 1)  # which the others may have yet to become
    assert plan_grid([Entry("a", "a", longer)], tmp_path, [1], 1, "auto")[0]
    with pytest.raises(UserError, match=r"a-seed0 holds a run with lr 0\.1, got 0\.2"):
        plan_grid([Entry("a", "a", dataclasses.replace(recipe, lr=0.2))], tmp_path, [1], 1, "auto")


def test_a_sweep_takes_the_seed_of_each_recipe(tmp_path, started):
    main(["sweep", "digits/tiny", "seed=3", "--run", str(tmp_path / "sweep")])
    assert [job.folder for job in started.pop()] == [str(tmp_path / "sweep" / "digits-tiny-seed3")]


def test_a_module_of_the_current_folder_does_not_stand_in_for_pythons(tmp_path, monkeypatch):
    """A child starts there, where `python -m` would look first."""
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong queue')")
    monkeypatch.chdir(tmp_path)
    job = Job("a", "a", str(tmp_path / "config.yaml"), str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"run a failed: .*config.yaml"):
        raise error_of(run_all([job], 1, Shown()), 1)


def test_no_more_threads_than_the_control_group_has_time_for(tmp_path, monkeypatch):
    monkeypatch.setattr("stepsnet.machine._LIMITS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    found = []
    for content in ("max 100000", "150000 100000", "10000 100000", "6400000 100000"):
        (tmp_path / "cpu.max").write_text(f"{content}\n")
        found.append(cores())
    assert found == [64, 2, 1, 64]


def test_no_more_memory_than_the_control_group_has_left(tmp_path, monkeypatch):
    monkeypatch.setattr("stepsnet.machine._LIMITS", tmp_path)
    on_machine = available_memory()
    (tmp_path / "memory.max").write_text("max\n")
    assert on_machine > 2**20 and available_memory() == pytest.approx(on_machine, rel=0.2)
    for name, content in (
        ("memory.max", 9000),
        ("memory.current", 5000),
        ("memory.stat", "anon 10\ninactive_file 700"),
    ):
        (tmp_path / name).write_text(f"{content}\n")
    assert available_memory() == 9000 - 5000 + 700


def test_a_second_interrupt_ends_at_once_but_not_the_same_one_twice(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("stepsnet.engine.interrupt.time", SimpleNamespace(monotonic=lambda: now[0]))
    with catch_signals() as caught:
        for _ in range(2):  # as from the terminal and from torchrun
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert caught == [signal.SIGINT, signal.SIGINT, signal.SIGTERM]
        now[0] = 1.1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    with catch_signals() as caught:  # after SIGTERM alone the first Ctrl-C is one
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] = 2.2
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert caught == [signal.SIGTERM, signal.SIGINT, signal.SIGINT]


def test_a_terminals_interrupts_are_left_to_the_parent_which_says_once_to_stop(tmp_path):
    """Ctrl-C reaches all processes of a terminal, but a child obeys its parent alone, however often it is pressed."""
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(override(find_recipe("digits/tiny"), ["baseline=null", "epochs=1000"])))
    job = Job("a", "a", str(config), str(tmp_path / "run"))
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(launch._command(), **pipe) as process:
        process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
        process.stdin.flush()
        assert any('"kind": "progress"' in line for line in iter(process.stdout.readline, ""))
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(1.1)
        assert process.poll() is None
        process.terminate()
        said = process.communicate(timeout=240)[0]
    assert process.returncode == 143 and "stopped by SIGTERM after update" in said
    assert updates_done(tmp_path / "run") > 0


def test_runs_at_once_have_a_slot_each_and_slots_are_used_again(monkeypatch):
    code = """
import json, sys, time
job = json.loads(sys.stdin.readline())
print(json.dumps({"kind": "slot", "slot": job["slot"]}), flush=True)
time.sleep({"a": 2.0, "b": 0.0, "c": 0.0}[job["name"]])
"""
    popen = launch.subprocess.Popen
    monkeypatch.setattr(
        launch.subprocess, "Popen", lambda command, **kwargs: popen([sys.executable, "-c", code], **kwargs)
    )
    shown = Shown()
    assert run_all([Job(name, name, "config.yaml", "folder") for name in "abc"], 2, shown) == []
    assert {event["run"]: event["slot"] for event in shown} == {"a": 0, "b": 1, "c": 1}


@pytest.mark.parametrize(
    ("given", "there", "expected"),
    [
        ("4,5,6", 0, ["4", "5", "6", "4"]),
        (None, 2, ["0", "1", "0", "1"]),
        ("7", 0, ["7"] * 4),
        ("", 3, [""] * 4),
        (None, 1, [None] * 4),
    ],
)
def test_each_slot_has_one_of_several_gpus(monkeypatch, given, there, expected):
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    for slot, gpu in enumerate(expected):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if given is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        launch.use_one_gpu(slot)
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == gpu


def test_a_signal_stops_the_children_and_starts_no_other(tmp_path, monkeypatch):
    code = f"""
import json, pathlib, signal, sys, time
name = json.loads(sys.stdin.readline())["name"]
def stop(*_):
    pathlib.Path({str(tmp_path)!r}, name).touch()
    sys.exit()
signal.signal(signal.SIGTERM, stop)
print(json.dumps({{"kind": "note", "text": "ready"}}), flush=True)
time.sleep(60)
"""

    class Signalled(Display):
        def show(self, event):
            os.kill(os.getpid(), signal.SIGTERM)

    popen = launch.subprocess.Popen
    monkeypatch.setattr(launch.subprocess, "Popen", lambda command, **kw: popen([sys.executable, "-c", code], **kw))
    with pytest.raises(Interrupted) as raised:
        run_all([Job(name, name, "config.yaml", "folder") for name in "ab"], 1, Signalled())
    assert raised.value.status == 143 and [file.name for file in tmp_path.iterdir()] == ["a"]
