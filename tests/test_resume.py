"""`stepsnet resume`, --resume and --auto-resume: what a folder knows, what is refused, and what a kill leaves."""

import json
import re
import shutil

import pytest
import torch
import yaml
from forks import KILLED, forked, status_of
from safetensors.torch import load_file

from stepsnet.cli import main
from stepsnet.engine.optim import rate_at
from stepsnet.errors import UserError
from stepsnet.run_folder.folder import lock_folder
from stepsnet.run_folder.provenance import provenance_of, trained_before, write_process
from stepsnet.settings.overrides import override, read_recipe

SMALL = ["batch_size=32", "train_samples=64", "model.args.depths=[1,1,1]", "stream_epochs=0", "warmup_epochs=1"]
SMALL += ["device=cpu", "log_interval=1"]
TRAIN = ["train", "digits/tiny", "epochs=2", *SMALL]


def run(*arguments, capsys):
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def refused(*arguments, capsys):
    status, out, err = run(*arguments, capsys=capsys)
    assert status == 2 and len(err.splitlines()) == 1, out + err
    return err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert main([*TRAIN, "--run", str(folder)]) == 0
    return folder


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "copy")


def assert_same_weights(folder, other):
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, other))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.trains_in_a_fork
def test_a_run_goes_on_for_more_epochs_and_its_config_alone_replays_that(trained, copy, tmp_path, capsys):
    status, out, err = run("resume", copy, "epochs=4", capsys=capsys)
    recipe = read_recipe(trained / "config.yaml")
    assert status == 0 and recipe.epochs == 2, err
    rates = [rate_at(read_recipe(path / "config.yaml"), 4, 2) for path in (copy, trained)]
    told = f"4 epochs instead of 2: after update 4 lr is {rates[0]:.3g} instead of {rates[1]:.3g}, and the "
    assert told + "schedule ends at update 8 instead of 4" in out and "resumed after update 4" in out
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    used = {line["step"]: line["lr"] for line in lines if line["kind"] == "step"}
    assert used[5] == rates[0] and used[4] < used[5] and rates[1] == 5e-6  # the old end of the cosine
    # the result of the shorter run
    for name in ("model.safetensors", "summary.json", "report.html", "inspection.json", "figures/loss.csv"):
        assert (copy / "epochs-2" / name).read_bytes() == (trained / name).read_bytes()
    assert json.loads((copy / "summary.json").read_text())["epochs"] == 4

    killed = shutil.copytree(trained, tmp_path / "killed")
    process = forked(
        lambda: main(["resume", str(killed), "epochs=4"]), lambda event, names: "step-00000008" in str(names)
    )
    assert status_of(process) == KILLED and not (killed / "summary.json").exists()
    assert run("train", killed / "config.yaml", "--resume", capsys=capsys)[0] == 0  # it means that very folder
    out = run("train", copy / "config.yaml", "--run", tmp_path / "again", capsys=capsys)[1]
    assert "earlier_epochs: the schedule is that of 4 epochs, but that of 2 until update 4, as in the run that" in out
    assert override(read_recipe(copy / "config.yaml"), ["epochs=6"]).earlier_epochs == ()  # a new length, a new run
    for folder in (killed, tmp_path / "again"):
        assert read_recipe(folder / "config.yaml").earlier_epochs == ((4, 2),)
        assert_same_weights(folder, copy)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "copy", "killed"]

    before = (copy / "metrics.jsonl").read_bytes()
    assert "after 4 epochs" in run("resume", copy, "workers=1", capsys=capsys)[1]  # it has ended
    assert (copy / "metrics.jsonl").read_bytes() == before
    err = refused("resume", copy, "epochs=3", capsys=capsys)
    assert f"epochs: got 3, expected at least 4: {copy} has done 8 updates, 2 per epoch" in err
    shutil.rmtree(copy / "checkpoints")
    assert "has no checkpoint left to go on from" in refused("resume", copy, "epochs=9", capsys=capsys)
    assert run("resume", copy, capsys=capsys)[0] == 0


@pytest.mark.trains_in_a_fork
def test_a_run_does_not_go_on_with_data_of_another_length(tmp_path, capsys):
    text = tmp_path / "a@b.txt"  # which is a name and no split
    text.write_text("step by step\n" * 400)
    small = ["batch_size=4", "seq_len=64", "epoch_updates=4", "stream_epochs=0", "tokenizer=characters"]
    small += ["vocab_size=null", "epochs=1", "device=cpu"]
    folder = tmp_path / "run"
    assert main(["train", "python-docs/tiny", "--data", f"text:{text}", "--run", str(folder), *small]) == 0
    capsys.readouterr()
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    for length, tokens in ((401, "train 4691, evaluated 522"), (399, "train 4668, evaluated 519")):
        text.write_text("step by step\n" * length)
        err = refused("resume", folder, "epochs=2", capsys=capsys)
        assert (
            f"--resume: the data have {tokens}, updates an epoch 4, expected the counts that the run began with: "
            in err
        )
        assert "train 4680, evaluated 520, updates an epoch 4" in err
        assert all(file.read_bytes() == content for file, content in before.items())  # nothing has been moved
    text.write_text("stap by stap\n" * 400)  # as many tokens, of which one means another letter
    err = refused("resume", folder, "epochs=2", capsys=capsys)
    assert f"data: got text whose tokenizer is not that of {folder}, expected the data that it was trained on" in err
    assert all(file.read_bytes() == content for file, content in before.items())
    text.rename(tmp_path / "elsewhere.txt").write_text("step by step\n" * 400)
    assert run("resume", folder, "epochs=2", "--data", f"text:{tmp_path / 'elsewhere.txt'}@val", capsys=capsys)[0] == 0
    assert json.loads((folder / "summary.json").read_text())["epochs"] == 2


def test_what_a_run_was_made_with_before_is_recorded(copy, capsys, monkeypatch):
    """It began with one version and ended with another; updates that were trained again are of the later one."""
    first = json.loads((copy / "summary.json").read_text())
    assert "trained_before" not in first
    monkeypatch.setattr("stepsnet.run_folder.provenance._commit", lambda: "other")
    assert run("resume", copy, "epochs=3", capsys=capsys)[0] == 0
    summary = json.loads((copy / "summary.json").read_text())
    kept = {key: first[key] for key in ("commit", "hardware", "versions", "ranks")}
    assert summary["commit"] == "other" and summary["trained_before"] == [{"from_update": 0, "until_update": 4, **kept}]
    page = (copy / "report.html").read_text()
    assert f"<dt>Until update 4</dt><dd>{first['commit'] or ''}</dd>" in page and "<dd>other</dd>" in page
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    (copy / "processes.jsonl").write_text((copy / "processes.jsonl").read_text() + '{"torn')
    monkeypatch.setattr("stepsnet.run_folder.provenance._commit", lambda: "third")
    (copy / "summary.json").unlink()
    assert run("resume", copy, capsys=capsys)[0] == 0
    before = json.loads((copy / "summary.json").read_text())["trained_before"]
    assert [(part["until_update"], part["commit"]) for part in before] == [(4, first["commit"])]
    monkeypatch.setattr("stepsnet.run_folder.provenance._commit", lambda: "fourth")  # behind the torn line
    (copy / "summary.json").unlink()
    assert run("resume", copy, capsys=capsys)[0] == 0
    before = json.loads((copy / "summary.json").read_text())["trained_before"]
    assert [(part["until_update"], part["commit"]) for part in before] == [(4, first["commit"]), (6, "third")]


def test_another_number_of_ranks_is_recorded(tmp_path):
    """Of a start by an earlier version, which has not recorded it, nothing is known."""
    made_with = {"commit": "one", "hardware": {"cpu": "AMD EPYC"}, "versions": {}}
    starts = [(0, made_with), (4, {**made_with, "ranks": 8}), (8, {**made_with, "ranks": 2})]
    for begun, one in starts:
        write_process(tmp_path, begun, one)
    assert provenance_of(tmp_path)["ranks"] == 2
    part = {"from_update": 4, "until_update": 8, **made_with, "ranks": 8}
    assert trained_before(tmp_path, starts[-1][1]) == [part]


def test_the_parts_of_a_run_say_which_updates_they_have_made(copy, capsys):
    """Those of another machine than the last one's; successive ones of one machine are one part."""
    summary = json.loads((copy / "summary.json").read_text())
    own = {key: summary[key] for key in ("commit", "hardware", "versions", "ranks")}
    other = {**own, "hardware": {"cpu": "another"}}
    starts = [(0, own), (100, other), (150, other), (200, own), (300, other), (400, other), (380, own)]
    (copy / "processes.jsonl").unlink()
    for begun, one in starts:
        write_process(copy, begun, one)
    parts = trained_before(copy, own)
    assert parts == [{"from_update": a, "until_update": b, **other} for a, b in ((100, 200), (300, 380))]
    of_earlier = [{"until_update": until, **other} for until in (2, 4)]  # versions, in their summaries
    for before, shown in ((parts, ["Updates 101 to 200", "Updates 301 to 380"]), (of_earlier, ["Until update 4"])):
        (copy / "summary.json").write_text(json.dumps(summary | {"trained_before": before}))
        assert run("report", copy, "--out", copy, capsys=capsys)[0] == 0
        page = (copy / "report.html").read_text()
        assert re.findall(r"<dt>((?:Until u|U)pdates? .*?)</dt>", page) == shown


def test_only_what_changes_no_result_may_change(trained, copy, tmp_path, capsys):
    err = refused("resume", copy, "lr=0.5", capsys=capsys)
    assert f"{copy} holds a run with lr 0.004, got 0.5; only these may change: accumulation_steps, " in err
    err = refused(*TRAIN, "epochs=4", "--run", copy, "--resume", capsys=capsys)
    assert f"holds a run with epochs 2, got 4 (`stepsnet resume {copy} epochs=4` changes its length)" in err
    err = refused(*TRAIN, "epochs=1", "--run", copy, "--resume", capsys=capsys)
    assert f"holds a run with epochs 2, got 1 (`stepsnet resume {copy}` continues it)" in err
    err = refused("train", "python-docs/tiny", "--run", copy, "--resume", capsys=capsys)
    assert "holds a run with task 'classification', got 'language'" in err
    assert (copy / "config.yaml").read_bytes() == (trained / "config.yaml").read_bytes()


@pytest.mark.parametrize("verb", ["train", "compare", "sweep"])
def test_nothing_to_resume_is_an_error_and_starts_nothing(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments in ([], ["--run", "empty"]):
        err = refused(verb, "digits/tiny", *arguments, "--resume", capsys=capsys)
        folder = "empty" if arguments else "runs/sweep" if verb == "sweep" else "runs/digits-tiny"
        assert f"--resume: there is no run in {folder}, " in err and "--auto-resume" in err
        (tmp_path / "empty").mkdir(exist_ok=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]
    assert "got nowhere, expected the folder of a run" in refused("resume", "nowhere", capsys=capsys)
    assert "not allowed with argument --resume" in refused(
        verb, "digits/tiny", "--resume", "--auto-resume", capsys=capsys
    )


def test_a_folder_in_which_nothing_was_trained_is_as_good_as_new(tmp_path, capsys):
    folder = tmp_path / "run"
    assert "opt: got 'adamww'" in refused(*TRAIN, "opt=adamww", "--run", folder, capsys=capsys)
    assert not folder.exists()
    folder.mkdir()
    (folder / "fault-0.txt").write_text("")  # all that a fault before the first file has left
    assert "got steps [7]" in refused(*TRAIN, "grad_checkpointing=[7]", "--run", folder, capsys=capsys)
    assert (folder / "config.yaml").exists()
    (folder / "diary.txt").write_text("mine")
    assert "is not empty" in refused(*TRAIN, "--run", folder, capsys=capsys)
    (folder / "diary.txt").unlink()
    for name in ("label.txt", "tokenizer.json", "fault-1.txt"):  # of a start under another label, of another task
        (folder / name).write_text("{}")
    (folder / "checkpoints" / "best-of-may").mkdir(parents=True)  # the user's own
    threads = torch.get_num_threads()
    assert run(*TRAIN, "epochs=1", "threads=2", "lr=0.003", "--run", folder, capsys=capsys)[0] == 0
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["opt"], config["lr"], config["threads"], torch.get_num_threads()) == ("adamw", 0.003, 2, threads)
    assert "--resume continues" in refused(*TRAIN, "--run", folder, capsys=capsys)
    assert not (folder / "tokenizer.json").exists() and (folder / "fault-1.txt").exists()
    assert (folder / "checkpoints" / "best-of-may").is_dir()
    assert json.loads((folder / "summary.json").read_text())["label"] == config["model"]["name"]
    (folder / "summary.json").unlink()
    assert run("resume", folder, capsys=capsys)[0] == 0  # with the threads that it began with
    assert json.loads((folder / "summary.json").read_text())["hardware"]["threads"] == 2


@pytest.mark.parametrize("how", ["--resume", "--auto-resume"])
def test_a_corrected_recipe_starts_where_nothing_was_trained(how, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    assert "got steps [7]" in refused(*TRAIN, "grad_checkpointing=[7]", "--run", folder, capsys=capsys)
    (folder / "classes.json").write_text('["another"]')
    (folder / "config.yaml").write_text("task: one that is not there any more\n")
    (folder / "checkpoints" / "best-of-may").mkdir(parents=True)
    corrected = [*TRAIN, "epochs=1", "lr=0.003", "--run", folder, how]
    assert run(*corrected, "--dry-run", capsys=capsys)[0] == 0

    def full(path, content):
        raise UserError(f"cannot write {path}")

    with monkeypatch.context() as patched:  # by which a start that is killed leaves one that can be corrected too
        patched.setattr("stepsnet.run_folder.resuming.write_atomically", full)
        assert "cannot write" in refused(*corrected, capsys=capsys)
    assert run(*corrected, capsys=capsys)[0] == 0
    assert read_recipe(folder / "config.yaml").lr == 0.003 and (folder / "summary.json").exists()
    assert "holds a run with lr 0.003, got 0.004" in refused(*corrected, "lr=0.004", capsys=capsys)


def test_whether_a_run_goes_on_is_asked_once(copy, monkeypatch, capsys):
    """Of rank 0 for all: on another rank it might be asked when rank 0 writes to the folder already."""
    asked = []
    monkeypatch.setattr("stepsnet.runs.train.can_go_on", lambda folder: asked.append(folder) or len(asked) == 1)
    (copy / "classes.json").write_text('["another"]')
    assert "classes" in refused("resume", copy, capsys=capsys)
    assert asked == [copy]


@pytest.mark.trains_in_a_fork
def test_a_run_that_is_killed_at_its_start_or_end_is_resumed(trained, tmp_path, capsys):
    """At each of these moments, the one after the other."""
    folder = tmp_path / "run"
    moments = [
        ("os.rename", r"\.config\.yaml\.\w+\.tmp'"),  # before the rename
        ("open", r"metrics\.jsonl"),  # before the first update
        ("os.rename", r"model\.safetensors'"),
        ("os.rename", r"summary\.json'"),
        ("open", r"figures/\.loss\.png"),  # within the report
    ]
    for event, pattern in moments:
        seen = lambda name, arguments, event=event, pattern=pattern: (  # noqa: E731
            name == event and re.search(pattern, str(arguments)) is not None
        )
        assert status_of(forked(lambda: main([*TRAIN, "--run", str(folder), "--auto-resume"]), seen)) == KILLED, pattern
        assert not (folder / "report.html").exists()
    assert (folder / "summary.json").exists()
    assert run(*TRAIN, "--run", folder, "--resume", capsys=capsys)[0] == 0
    assert_same_weights(folder, trained)
    assert {path.name for path in folder.iterdir()} == {path.name for path in trained.iterdir()}
    assert (folder / "report.html").exists() and not list(folder.rglob("*.tmp"))
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / f".config.yaml.{'0' * 16}.tmp").write_text("half")
    assert run(*TRAIN, "epochs=1", "--run", folder, "--resume", capsys=capsys)[0] == 0
    assert not list(folder.glob(".config*"))


@pytest.mark.trains_in_a_fork
def test_of_two_runs_that_start_at_once_in_one_folder_one_wins(tmp_path, capfd):
    def start(lr):
        return forked(lambda: main([*TRAIN, "epochs=1", f"lr={lr}", "--run", str(tmp_path / "run")]))

    statuses = [status_of(process) for process in [start(lr) for lr in (0.001, 0.002)]]
    assert sorted(statuses) == [0, 2]
    err = [line for line in capfd.readouterr().err.splitlines() if line.startswith("stepsnet: --run:")]
    assert len(err) == 1 and ("in use by a run that is still alive" in err[0] or "is not empty" in err[0])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["lr"] == (0.001, 0.002)[statuses.index(0)] == read_recipe(tmp_path / "run" / "config.yaml").lr


def test_a_config_of_the_users_own_is_no_start_of_a_run(tmp_path, capsys):
    own = tmp_path / "config.yaml"
    own.write_text("mine: 1\n")
    assert "is not empty, expected a new folder" in refused(*TRAIN, "--run", tmp_path, capsys=capsys)
    assert own.read_text() == "mine: 1\n" and [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_folder_in_use_is_not_resumed(copy, capsys):
    with lock_folder(copy):
        assert "is in use by a run that is still alive" in refused("resume", copy, capsys=capsys)


def test_weights_that_are_not_the_runs_own_are_refused(copy, trained, capsys):
    final = copy / "model.safetensors"
    content = bytearray(final.read_bytes())
    content[-1] ^= 1
    final.write_bytes(content)
    assert "does not match its checksum in summary.json" in refused("eval", copy, capsys=capsys)
    final.unlink()
    assert run("resume", copy, capsys=capsys)[0] == 0  # written again from the last checkpoint
    assert_same_weights(copy, trained)
    (copy / "summary.json").write_text("{")
    assert "cannot read" in refused("eval", copy, capsys=capsys)
