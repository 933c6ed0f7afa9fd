"""The command line as a user meets it: the main job end to end, and one mistake after the other."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from stepsnet.cli import main

SMALL = ["epochs=2", "batch_size=128", "model.args.depths=[1,1,1]", "baseline.args.depths=[2]"]


def run(*arguments, capsys):
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert main(["train", "digits/tiny", "--run", str(folder), *SMALL]) == 0
    return folder


def test_a_run_folder_holds_what_it_should(trained):
    names = {path.name for path in trained.iterdir()}
    expected = {"config.yaml", "metrics.jsonl", "checkpoints", "model.safetensors", "summary.json", "report.html"}
    assert expected <= names
    config = yaml.safe_load((trained / "config.yaml").read_text())
    assert config["epochs"] == 2 and config["model"]["args"]["depths"] == [1, 1, 1]
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert [line["epoch"] for line in epochs] == [1, 2] and epochs[-1]["train_loss"] < epochs[0]["train_loss"]
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["metrics"]["val_top1"] == epochs[-1]["val_top1"]
    assert (summary["blocks"], summary["layers"], summary["widths"]) == (3, 17, [24, 34, 48])
    assert {"command", "commit", "hardware", "versions"} <= set(summary)


def test_the_config_alone_replays_the_run(trained, tmp_path, capsys):
    status, _, _ = run("train", trained / "config.yaml", "--run", tmp_path / "again", capsys=capsys)
    assert status == 0
    ours, theirs = load_file(tmp_path / "again" / "model.safetensors"), load_file(trained / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_eval_gives_the_last_epochs_metrics(trained, capsys):
    status, out, _ = run("eval", trained, "--json", capsys=capsys)
    summary = json.loads((trained / "summary.json").read_text())["metrics"]
    assert status == 0 and json.loads(out) == {key[4:]: summary[key] for key in ("val_loss", "val_top1", "val_top5")}


def test_predict_reads_files_folders_and_patterns(trained, tmp_path, capsys):
    from sklearn.datasets import load_digits

    for index in range(3):
        pixels = (load_digits().images[index] * 255 / 16).round().astype(np.uint8)
        Image.fromarray(pixels).resize((32, 32), Image.Resampling.NEAREST).save(tmp_path / f"{index}.png")
    status, out, _ = run("predict", trained, tmp_path, "--json", capsys=capsys)
    predictions = json.loads(out)
    assert status == 0 and [os.path.basename(entry["file"]) for entry in predictions] == ["0.png", "1.png", "2.png"]
    assert all(len(entry["classes"]) == 5 for entry in predictions)
    # enlarged by whole factors, a picture reads as the very digit that was trained on
    from stepsnet.models.build import build_model
    from stepsnet.settings.overrides import read_recipe
    from stepsnet.tasks.classification.data import load_images
    from stepsnet.tasks.classification.task import input_spec

    recipe = read_recipe(trained / "config.yaml")
    model = build_model(recipe.model).eval()
    data = load_images("digits", input_spec(recipe, model))
    model.load_state_dict(load_file(trained / "model.safetensors"))
    pixels = (load_digits().images[0] * 255 / 16).round().astype(np.uint8)
    probabilities = model(data.read(Image.fromarray(pixels))[None]).softmax(-1)[0]
    for name, probability in predictions[0]["classes"].items():
        assert probability == pytest.approx(probabilities[int(name)].item(), abs=1e-5)
    status, out, _ = run("predict", trained, tmp_path / "[12].png", "--top", 2, capsys=capsys)
    assert status == 0 and len(out.splitlines()) == 2 and out.count("%") == 4


def test_resume_of_another_recipe_is_refused(trained, capsys):
    status, _, err = run("train", "digits/tiny", "--run", trained, "--resume", *SMALL, "lr=0.5", capsys=capsys)
    assert status == 2 and "lr 0.004, got 0.5" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "digits/tini"], "did you mean digits/tiny"),
        (["train", "missing.yaml"], "cannot read missing.yaml"),
        (["train", "digits/tiny", "epoch=3"], "unknown key 'epoch', expected a key of the recipe (did you mean epochs"),
        (["train", "digits/tiny", "epochs=many"], "epochs: got 'many', expected a valid integer"),
        (["train", "digits/tiny", "epochs=1.5"], "epochs: got 1.5, expected a valid integer"),
        (["train", "digits/tiny", "epochs=true"], "epochs: got True, expected a valid integer"),
        (["train", "digits/tiny", "epochs"], "got 'epochs', expected key=value"),
        (["train", "digits/tiny", "model.nam=x"], "unknown key 'model.nam'"),
        (["train", "digits/tiny", "model.name=steps_diet_tiny_patch16_224"], "mean steps_deit_tiny_patch16_224"),
        (
            ["train", "digits/tiny", "model.args.num_heads=[5,2,3]"],
            "num_heads: got 5, expected a divisor of the width 24\n",
        ),
        (["train", "digits/tiny", "model.args.depths=[1,1]"], "depths: got (1, 1), expected one per width"),
        (
            ["train", "digits/tiny", "model.args.widths=[24,0,48]"],
            "widths: got (24, 0, 48), expected positive integers",
        ),
        (["train", "digits/tiny", "model.args.nonsense=1"], "nonsense"),
        (
            ["train", "digits/tiny", "model.args.residul=mhc"],
            "'residul' (mhc), expected an argument of VisionTransformer (did",
        ),
        (["train", "digits/tiny", "model.args.residual=MHC"], "attention_residuals_block (did you mean mhc?)"),
        (
            ["train", "digits/tiny", "residual=mhc"],
            "a key of the recipe, or model.args.residual for an argument of the model",
        ),
        (
            ["train", "digits/tiny", "model.args.residual=mhc", "model.args.residual_options={stream: 2}"],
            "mhc got the option 'stream', expected streams, iterations (did you mean streams?)",
        ),
        (
            ["train", "digits/tiny", "model.args.residual=mhc", "model.args.residual_options.streams=0"],
            "streams of mhc: got 0, expected 2 to 64",
        ),
        (["train", "digits/tiny", "data=digit"], "data: got 'digit', expected a folder or one of digits"),
        (["train", "digits/tiny", "batch_size=0"], "batch_size: got 0, expected at least 1"),
        (
            ["train", "digits/tiny", "batch_size=9999"],
            "batch_size: got 9999, expected 1 to 1437, the number of training images",
        ),
        (["train", "digits/tiny", "milestones=3"], "milestones: got 3, expected a list, such as [1, 2]"),
        (["train", "digits/tiny", "augment=3"], "augment: got 3, expected a mapping of keys to values"),
        (["train", "digits/tiny", "epochs=0"], "epochs: got 0, expected at least 1"),
        (["train", "digits/tiny", "lr=-1"], "lr: got -1, expected at least 0"),
        (["train", "digits/tiny", "opt=adamww"], "opt: got 'adamww'"),
        (["train", "digits/tiny", "device=abacus"], "device: got 'abacus'"),
        (["compare", "digits/tiny", "baseline=null"], "has no baseline"),
        (["compare", "digits/tiny", "--seeds", "0,0"], "--jobs and --seeds: got 2 and [0, 0]|[0, 0]"),
        (["compare", "digits/tiny", "baseline.args.widths=[40]"], "baseline|num_heads: got 3"),
        (["eval", "w", "a=5", "--model", "m", "--data", "x", "--stride", "3"], "got a=5 --stride 3 with --model"),
        (["eval", "nowhere"], "run: got nowhere, expected the folder of a run"),
        (["predict", "nowhere", "x.png"], "run: got nowhere"),
        (["table", "12"], "table: got '12', expected one of"),
        (["plan", "--width", "384", "--depth", "0"], "plan: depth: got 0, expected an integer of at least 1"),
        (["plan", "--width", "384", "--depth", "12", "--round-to", "x"], "--round-to: got 'x'"),
        (["plan", "--width", "4", "--depth", "12", "--steps", "9"], "steps: got 9, too many for width 4"),
        (
            ["plan", "--width", "384", "--depth", "12", "--steps", "4", "--profile", "bowtie"],
            "steps: got 4, expected an odd",
        ),
        (["plan", "--width", "384", "--depth", "12", "--blocks", "99"], "blocks: got 99, expected 12 to 36"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(*arguments, capsys=capsys)
    assert status == 2 and out == ""
    assert len(err.splitlines()) == 1 and err.startswith("stepsnet: ")
    assert any(part in err for part in expected.split("|")), err
    assert not (tmp_path / "runs" / "digits-tiny" / "checkpoints").exists()


def test_a_stride_is_of_language_models(trained, capsys):
    status, _out, err = run("eval", trained, "--stride", "4", capsys=capsys)
    assert status == 2 and err.endswith("is a run of classification, expected one of language\n")


def test_a_run_is_taken_apart(trained, tmp_path, capsys):
    status, out, err = run("analyze", "mask", trained, "--json", capsys=capsys)
    assert status == 0, err
    found = json.loads(out)
    rows = found["rows"]
    scored = json.loads(run("eval", trained, "--json", capsys=capsys)[1])
    assert len(rows) == 12 and rows[0]["metrics"] == {name: [value] for name, value in scored.items()}
    assert found["command"].startswith("stepsnet") and found["versions"]["torch"]
    half = shutil.copytree(trained, tmp_path / "half")
    config = (half / "config.yaml").read_text()
    (half / "config.yaml").write_text(config.replace("amp_dtype: float32", "amp_dtype: bfloat16"))
    of_half = json.loads(run("eval", half, "--json", capsys=capsys)[1])
    whole = json.loads(run("analyze", "mask", half, "--json", capsys=capsys)[1])["rows"][0]["metrics"]
    assert whole == {name: [value] for name, value in of_half.items()} and of_half["loss"] != scored["loss"]
    second = shutil.copytree(trained, tmp_path / "second")  # as if they were two seeds
    status, out, err = run("analyze", "drop", trained, second, trained, capsys=capsys)
    assert status == 0 and out.startswith("| dropped | loss | top1 | top5 |") and "last 1 of width 48" in out
    assert f"{scored['top1']:.4g} ± 0 |" in out
    (half / "summary.json").unlink()
    (second / "config.yaml").write_text(config.replace("batch_size: ", "batch_size: 1"))  # another recipe
    status, out, err = run("analyze", "drop", trained, second, half, capsys=capsys)
    assert status == 0 and err == f"stepsnet: {half} has not ended, and is left out\n"
    rows = [line.strip("| ").split(" | ")[:2] for line in out.splitlines()[2:] if "nothing" in line]
    assert rows == [[trained.name, "nothing"], ["second", "nothing"]]
    status, out, err = run("analyze", "shortcut", trained, "--out", tmp_path / "look", "--json", capsys=capsys)
    assert status == 0, err
    rows = json.loads(out)["rows"]
    assert [row["update"] for row in rows] == sorted({row["update"] for row in rows}) and len(rows) >= 1
    lines = (tmp_path / "look" / "stream.csv").read_text().splitlines()
    assert len(lines) == 1 + len(rows) * len(json.loads((trained / "summary.json").read_text())["widths"])
    assert (tmp_path / "look" / "stream.png").stat().st_size > 10_000 and (tmp_path / "look" / "stream.svg").exists()
    status, out, err = run("analyze", "mask", trained, "--each", capsys=capsys)
    assert status == 2 and "got --each with mask" in err
    for option in (("--out", tmp_path / "unused"), ("--force",)):
        status, out, err = run("analyze", "drop", trained, *option, capsys=capsys)
        assert status == 2 and f"got {option[0]} with drop, expected it only with shortcut" in err
    (tmp_path / "file").write_text("")
    status, out, err = run("analyze", "shortcut", trained, "--out", tmp_path / "file", capsys=capsys)
    assert status == 2 and f"--out: got {tmp_path / 'file'}, expected a folder" in err


def test_a_report_of_any_runs(trained, tmp_path, capsys):
    status, out, err = run("report", trained, "--out", tmp_path / "page.html", capsys=capsys)
    assert status == 0 and out.startswith(f"report: {tmp_path / 'page.html'}")
    assert "digits/tiny" in (tmp_path / "page.html").read_text()
    status, out, err = run("report", tmp_path / "nowhere", capsys=capsys)
    assert status == 2 and "it has no config.yaml" in err and not out


def test_nothing_is_overwritten(trained, tmp_path, capsys):
    (tmp_path / "diary.txt").write_text("mine")
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    for folder, hint in ((tmp_path, "nothing in it is overwritten"), (trained, "--resume continues")):
        status, _, err = run("train", "digits/tiny", "--run", folder, *SMALL, capsys=capsys)
        assert status == 2 and f"{folder} is not empty" in err and hint in err
    assert (tmp_path / "diary.txt").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    assert before == {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}


def test_unreadable_inputs_are_named(trained, tmp_path, capsys):
    (tmp_path / "words.png").write_text("no picture")
    (tmp_path / "empty").mkdir()
    for file, reason in (("words.png", "as an image"), ("none.png", "no such file"), ("empty", "is empty")):
        status, _, err = run("predict", trained, tmp_path / file, capsys=capsys)
        assert status == 2 and file in err and reason in err
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    status, _, err = run("eval", copy, capsys=capsys)
    assert status == 2 and "has no weights yet" in err
    (copy / "model.safetensors").write_bytes(b"torn")
    status, _, err = run("eval", copy, capsys=capsys)
    assert status == 2 and "model.safetensors as safetensors" in err and len(err.splitlines()) == 1
    (copy / "config.yaml").write_text("epochs: [")
    status, _, err = run("eval", copy, capsys=capsys)
    assert status == 2 and "cannot read" in err and len(err.splitlines()) == 1


def test_debug_shows_the_traceback():
    from stepsnet.errors import UserError

    with pytest.raises(UserError):
        main(["train", "digits/tini", "--debug"])


def test_listing_needs_nothing_heavy():
    code = (
        "import sys; from stepsnet.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "main(['recipes']); main(['plan', '--width', '384', '--depth', '12'])\n"
        "heavy = {'torch', 'timm', 'numpy', 'yaml', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_tables_and_models_for_machines(capsys):
    status, out, _ = run("table", "10", "--json", capsys=capsys)
    rows = json.loads(out)
    assert status == 0 and [row["row"] for row in rows] == ["Reverse", "Steps-Swin-T"]
    assert rows[0]["ours"] == {"blocks": 26, "layers": 135, "params_M": 27.8, "flops_G": 4.5}
    status, out, _ = run("plan", "--width", "384", "--depth", "12", "--json", capsys=capsys)
    assert json.loads(out)["plan"]["depths"] == [12, 6, 6]
    status, out, _ = run("plan", "--width", "384", "--depth", "12", "--profile", "bowtie", "--json", capsys=capsys)
    assert json.loads(out)["plan"]["widths"] == [384, 272, 384]
    status, out, _ = run("plan", "--width", "384", "--depth", "12", capsys=capsys)
    assert out.startswith("192×12, 272×6, 384×6")


def test_a_sweep_trains_what_is_missing_and_draws_it(tmp_path, capsys):
    folder, short = tmp_path / "grid", ["epochs=1", "train_samples=128", "stream_epochs=0"]
    names = ["digits/steps_12", "digits/fixed_width_1[2]"]
    status, out, err = run("sweep", *names, *short, "--run", folder, capsys=capsys)
    assert status == 0 and out.splitlines()[-1] == f"report: {folder / 'report.html'} — 2 runs of 2 recipes", err
    first = (folder / "digits-steps_12-seed0" / "summary.json").stat().st_mtime_ns
    status, out, err = run("sweep", *names, *short, "--run", folder, capsys=capsys)
    assert status == 2 and "is not empty" in err
    status, out, err = run("sweep", *names, *short, "--run", folder, "--resume", "--seeds", "0,3", capsys=capsys)
    assert status == 0 and (folder / "digits-steps_12-seed0" / "summary.json").stat().st_mtime_ns == first
    status, out, err = run("sweep", *names, *short, "lr=3e-3", "--run", folder, "--resume", capsys=capsys)
    assert status == 2 and "holds a run with lr 0.001, got 0.003" in err  # it is not taken for one of these settings
    rows = json.loads((folder / "sweep.json").read_text())
    expected = [(label, seed, 12) for seed in (0, 3) for label in ("StepsNet", "baseline")]
    assert sorted((r["label"], r["seed"], r["blocks"]) for r in rows) == sorted(expected)
    page = (folder / "report.html").read_text()
    assert "digits: 2 recipes" in page and "paired over seeds 0 and 3" in page
    status, out, err = run("sweep", "digits/stps_*", capsys=capsys)
    assert status == 2 and "digits/stps_*" in err
