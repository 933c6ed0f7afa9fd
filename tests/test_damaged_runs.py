"""A run folder with something else in its files is read, or refused in one line that names the file."""

import json
import os
import shutil

import pytest
import timm
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from run_folders import make_run
from timm.models.vision_transformer import Block

from stepsnet.cli import main
from stepsnet.engine.metrics_log import trim_log
from stepsnet.errors import UserError
from stepsnet.report.load_runs import group_runs, load_run
from stepsnet.report.words import summarize_results
from stepsnet.residual import connect
from stepsnet.run_folder.folder import read_run_recipe
from stepsnet.run_folder.records import read_metrics, read_summary
from stepsnet.tasks.classification.predict import classes_of

FILES = ("config.yaml", "metrics.jsonl", "summary.json")
ODD = [None, True, -1, 10**400, 1e308, "x", "\x1b[31m", [], [[]], {}, {"a": None}]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("whole") / "run")
    return folder, {name: (folder / name).read_bytes() for name in FILES}


def damaged(content, draw):
    """Bytes with something cut off, flipped or put in."""
    at = draw(st.integers(0, len(content) - 1))
    return draw(
        st.sampled_from(
            [
                content[:at],
                content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :],
                content[:at] + b"\0\xff[" + content[at:],
                content[:at] + content[at + 7 :],
                content[:at] + b"9" * 5000 + content[at:],
                b"[" * 5000,
                b"",
            ]
        )
    )


def with_odd_value(text, draw):
    """JSON with one of its values replaced."""
    value = json.loads(text)
    key = draw(st.sampled_from(sorted(value)))
    value[key] = draw(st.sampled_from(ODD))
    return json.dumps(value)


def look(folder):
    """All that `report`, `eval` and `resume` read of these files."""
    run = load_run(folder)
    summarize_results(group_runs([run]))
    [run.value("top1"), run.widths, run.blocks, run.seed]
    read_run_recipe(folder)
    read_metrics(folder)
    read_summary(folder)


@given(data=st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate], print_blob=False
)
def test_damage_is_read_or_refused_in_a_line(whole, data):
    folder, contents = whole
    name = data.draw(st.sampled_from(FILES))
    if name != "config.yaml" and data.draw(st.booleans()):
        lines = contents[name].decode().splitlines()
        at = data.draw(st.integers(0, len(lines) - 1))
        lines[at] = with_odd_value(lines[at], data.draw)
        content = "\n".join(lines).encode()
    else:
        content = damaged(contents[name], data.draw)
    try:
        (folder / name).write_bytes(content)
        look(folder)
    except UserError as error:
        assert len(str(error).splitlines()) == 1
        assert str(folder) in str(error)
    finally:
        (folder / name).write_bytes(contents[name])


def test_a_metric_that_is_no_number_is_refused(whole):
    folder, contents = whole
    lines = contents["metrics.jsonl"].decode().replace('"val_top1": 15.0', '"val_top1": "x"')
    assert lines.encode() != contents["metrics.jsonl"]
    try:
        (folder / "metrics.jsonl").write_text(lines)
        words = r"metrics.jsonl, line 4: got val_top1 'x', expected a line as a run writes it"
        with pytest.raises(UserError, match=words):
            load_run(folder)
    finally:
        (folder / "metrics.jsonl").write_bytes(contents["metrics.jsonl"])


def put_no_file(path, kind):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("verb", "name"), [*(("report", name) for name in FILES), ("resume", FILES[0]), ("resume", FILES[2])]
)
@pytest.mark.parametrize("kind", ["pipe", "folder", "loop"])
def test_what_is_no_file_is_refused_and_not_waited_for(whole, tmp_path, capsys, name, kind, verb):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    (folder / name).unlink()
    put_no_file(folder / name, kind)
    status = main([verb, str(folder), *(["--out", str(tmp_path / "page")] if verb == "report" else [])])
    said = capsys.readouterr().err.splitlines()
    # to a report, a run may have neither metrics nor, where it goes on, a summary; a link to itself leads to none
    if verb == "report" and (name == "metrics.jsonl" or (name == "summary.json" and kind == "loop")):
        assert status == 0 and not said
    else:
        assert status == 2 and len(said) == 1 and str(folder) in said[0]
        assert kind == "loop" or f"{name}: it is not a file" in said[0]


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop"])
def test_a_log_that_is_no_file_is_refused_where_a_run_goes_on(tmp_path, kind):
    put_no_file(tmp_path / "metrics.jsonl", kind)
    with pytest.raises(UserError, match=r"metrics: cannot write .*metrics\.jsonl: "):
        trim_log(tmp_path / "metrics.jsonl", 0, 1)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["train", "digits/tiny", "--run", "/proc/nowhere"], "--run: cannot use /proc/nowhere"),
        (["predict", "RUN", "x.png", "--top", "0"], "argument --top: got 0, expected 1 to"),
        (
            ["stepify", "test_vit", "--widths", "32,64", "--depths", "1,1", "--blocks", "3"],
            "--blocks: got it beside a plan",
        ),
        (["stepify", "test_vit", "depth=" + "9" * 5000], "model: depth: got 9999999999999999999999999999999999999999…"),
        (["stepify", "test_vit", "plan=3"], "plan: got it as an argument of the model, expected the option --widths"),
        (["stepify", "test_vit", "steps=3"], "steps: got it as an argument of the model, expected the option --steps"),
        (["stepify", "test_vit", "checkpoint_path=/etc/passwd"], "checkpoint_path: got /etc/passwd, expected none"),
        (["stepify", "test_vit", "--stream-scale", "nan"], "stream_scale: got nan"),
        (["export", "test_resnet", "--weights", ""], "--weights: got '', expected a run"),
        (["compare", "digits/tiny", "--seeds", str(10**20)], f"argument --seeds: got {10**20}, expected 0 to"),
        (["compare", "digits/tiny", "--jobs", "0"], "argument --jobs: got 0, expected 1 to 1024"),
        (["resume", "run", "--data", ""], "argument --data: got '', expected a folder"),
        (["bench", "test_vit", "--rounds", "0"], "argument --rounds: got 0, expected 1 to"),
        (["bench", "test_vit", "--memory", "4,2"], "--memory: got 4,2, expected two increasing batch sizes"),
        (["bench", "test_vit", "--out", "RUN/config.yaml"], "expected a folder, but"),
        (["sweep", "evidence/cifar10-depth", "--render", "--results", "RUN/config.yaml"], "expected a folder"),
    ],
)
def test_numbers_and_places_that_no_verb_takes(whole, capsys, arguments, expected):
    assert main([argument.replace("RUN", str(whole[0])) for argument in arguments]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert expected in said


@pytest.mark.parametrize("ends", ["sys.exit(0)", "raise SystemExit('bye')", "raise GeneratorExit", "raise Odd"])
def test_a_module_that_ends_the_program_is_a_mistake(tmp_path, monkeypatch, capsys, ends):
    odd = "class Odd(BaseException):\n    def __str__(self):\n        raise ValueError\n"
    name = f"ending_{abs(hash(ends))}"
    (tmp_path / f"{name}.py").write_text(f"import sys\n{odd}{ends}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "digits/tiny", f"import={name}", "--dry-run"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"import: {name} fails: " in said


@pytest.mark.parametrize(
    ("blocks", "options", "expected"),
    [
        (3, {}, "got int, expected the blocks of a model"),
        ([None], {}, "got list, expected the blocks of a model"),
        ([], {}, "got list without blocks, expected at least one"),
        ("same", {}, "got the same block at several places"),
        ("widths", {}, r"got blocks of several widths \(32 in block 1, 64 in block 2\)"),
        ("own", {"width": -1}, "width: got -1, expected a whole number from 1 to 1,048,576"),
        ("own", {"first": 0}, "first: got 0, expected a whole number from 1 to 10,000"),
        ("own", {"num_blocks": 1}, "num_blocks: got 1, expected at least 2"),
    ],
)
def test_blocks_that_no_design_joins(blocks, options, expected):
    one, other, wide = Block(32, 2), Block(32, 2), Block(64, 2)
    given = {"same": [one, one], "widths": [one, wide], "own": [one, other]}.get(str(blocks), blocks)
    with pytest.raises(UserError, match=expected):
        connect(given, "mhc", **options)


def test_names_of_classes_that_are_not_the_models(tmp_path):
    model = timm.create_model("test_vit", num_classes=3)
    (tmp_path / "classes.json").write_text('["a", "b"]')
    with pytest.raises(UserError, match=r"got 2 names in .*, expected the model's 3"):
        classes_of(tmp_path, model)
