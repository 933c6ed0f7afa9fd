"""What programs and notebooks call: the docs' notebook in a kernel of its own, and the objects in this process."""

import json
import threading
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import stepsnet
from stepsnet.errors import UserError
from stepsnet.recipes import find_recipe
from stepsnet.settings.config import ModelSpec
from stepsnet.settings.overrides import override_values

NOTEBOOK = Path(__file__).parent.parent / "docs" / "first-hour.ipynb"
SMALL = {"batch_size": 128, "model": {"args": {"depths": (1, 1, 1)}}}
INTERRUPTED = """
import os, signal
small = {"epochs": 2, "batch_size": 128, "model": {"args": {"depths": (1, 1, 1)}}, "stream_epochs": 0}
from stepsnet.output import console
show = console.NotebookBars.show
def interrupting(display, event):
    show(display, event)
    if event["kind"] == "epoch":
        os.kill(os.getpid(), signal.SIGINT)  # as the stop button does
console.NotebookBars.show = interrupting
stepsnet.train("digits/tiny", "runs/second", **small)
"""
RESUMED = """
console.NotebookBars.show = show
stepsnet.resume("runs/second").summary["epochs"]
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """The folder in which it was executed, and its cells; two more interrupt a training and resume it."""
    folder = tmp_path_factory.mktemp("notebook")
    content = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in content.cells), "it is kept without outputs"
    tagged = {"tags": ["raises-exception"]}
    content.cells.append(nbformat.v4.new_code_cell(INTERRUPTED, metadata=tagged))
    content.cells.append(nbformat.v4.new_code_cell(RESUMED))
    nbclient.NotebookClient(content, timeout=900, resources={"metadata": {"path": str(folder)}}).execute()
    return folder, [cell for cell in content.cells if cell.cell_type == "code"]


def outputs(cell, kind):
    return [output.data[kind] for output in cell.outputs if kind in output.get("data", {})]


def test_the_notebook_shows_what_it_says(notebook):
    _, cells = notebook
    (bars,) = outputs(cells[0], "text/html")  # one output, which was drawn anew
    assert "epoch 6/6" in bars and "first" in bars
    lines = "".join(output.text for output in cells[0].outputs if output.get("name") == "stdout").splitlines()
    epochs = [line.split(",")[0] for line in lines if line.startswith("first: epoch")]
    assert epochs == [f"first: epoch {number}/6" for number in range(1, 7)]
    pictures = [cell for cell in cells if "figure(" in cell.source]
    assert len(pictures) == 3 and all(len(outputs(cell, "image/png")) == 1 for cell in pictures)
    tables = [cell for cell in cells if "metrics[" in cell.source or "differences" in cell.source]
    assert all("dataframe" in outputs(cell, "text/html")[-1] for cell in tables)


def test_an_interrupted_training_leaves_the_kernel_and_a_checkpoint(notebook):
    folder, cells = notebook
    (error,) = [output for output in cells[-2].outputs if output.output_type == "error"]
    assert error.ename == "KeyboardInterrupt"
    assert error.evalue == "stopped by SIGINT after update 11; stepsnet.resume('runs/second') goes on from there"
    assert outputs(cells[-1], "text/plain")[-1] == "2" and "resumed after update 11" in str(cells[-1].outputs)
    assert len(stepsnet.load(folder / "runs" / "second").metrics) == 2


def test_a_run_as_an_object(notebook, tmp_path):
    folder, _ = notebook
    run = stepsnet.load(folder / "runs" / "first")
    assert isinstance(run, stepsnet.Run) and run.recipe.epochs == 6 and not run.model.training
    weights = load_file(run.folder / "model.safetensors")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in run.model.state_dict().items())
    assert run.summary["command"] == "stepsnet train digits/tiny epochs=6 --run runs/first"
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert run.metrics["val_top1"].tolist() == [line["val_top1"] for line in epochs]
    assert run.metrics.index.tolist() == [1, 2, 3, 4, 5, 6] and "kind" not in run.metrics
    assert run.evaluate()["top1"] == run.evaluate(max_undecodable=0)["top1"] == run.summary["metrics"]["val_top1"]
    assert {"loss", "top1", "shortcut-ratio"} <= set(run.figures)
    assert len(run.figure("loss").axes) == 2 and run.figure("loss")._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"figure: got 'los', expected one of loss, top1, .* \(did you mean loss\?\)"):
        run.figure("los")
    picture = np.zeros((8, 8), dtype=np.uint8)
    for name, value, least in (("top", 0, 1), ("top", 2.5, 1), ("seed", -1, 0)):
        with pytest.raises(UserError, match=f"--{name}: got {value}, expected a whole number of at least {least}"):
            run.predict(picture, **{name: value})
    with pytest.raises(UserError, match="eval: got 'lr=1', expected a key that begins with eval_"):
        run.evaluate(lr=1)


def test_an_image_is_the_same_whatever_it_comes_as(notebook, tmp_path):
    run = stepsnet.load(notebook[0] / "runs" / "first")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    image, tensor = Image.fromarray(pixels[0]), torch.from_numpy(pixels[0]).permute(2, 0, 1)
    image.save(tmp_path / "image.png")
    expected = run.predict(image, top=3)["classes"]
    assert len(expected) == 3 and list(expected.values()) == sorted(expected.values(), reverse=True)
    given = [str(tmp_path / "image.png"), pixels[0], pixels[0] / 255, tensor, tensor.float() / 255]
    records = run.predict(given, top=3)
    assert [record["classes"] for record in records] == [expected] * len(given)
    assert records[0]["file"] == str(tmp_path / "image.png") and "file" not in records[1]
    assert run.predict(pixels, top=3)[0]["classes"] == expected  # a batch
    assert run.predict(pixels[0, ..., 0]).keys() == run.predict(pixels[0, ..., :1]).keys() == {"classes"}
    assert run.predict([]) == [] and run.predict(tensor.bfloat16() / 255).keys() == {"classes"}
    wrong = (
        np.zeros((0, 8, 3)),
        Image.new("L", (0, 8)),
        pixels[0].astype(np.int64),
        tensor - 300.0,
        tensor[:2],
        np.zeros(3),
        7,
        tmp_path / "none.png",
    )
    said = (
        r"the shape \(0, 8, 3\), expected some pixels",
        "0 × 8 pixels, expected some pixels",
        "int64, expected bytes",
        "float32, expected bytes",
        r"shape \(2, 8, 8\)",
        r"shape \(3,\)",
        "a int",
        "no such",
    )
    for one, expected in zip(wrong, said):
        with pytest.raises(UserError, match=expected):
            run.predict(one)


def test_a_comparison_as_an_object(notebook):
    pair = stepsnet.load(notebook[0] / "runs" / "pair")
    assert isinstance(pair, stepsnet.Comparison) and pair.seeds == [0]
    (steps,), (plain,) = pair.steps, pair.baseline
    assert steps.recipe.model.args["depths"] == [2, 1, 1] and plain.recipe.model.args["depths"] == [2]
    for metric in ("val_loss", "train_top1"):
        ours, theirs = (run.summary["metrics"][metric] for run in (steps, plain))
        assert pair.differences.loc[0, metric] == pytest.approx(ours - theirs)
        assert pair.metrics.loc[("baseline", 0), metric] == theirs
    assert "loss" in pair.figures and len(pair.figure("loss").axes) == 2
    assert stepsnet.resume(pair.folder).differences.equals(pair.differences)  # every run in it has ended
    with pytest.raises(UserError, match=r"expected the folder of a finished comparison \(it has no comparison.json\)"):
        stepsnet.Comparison(steps.folder)


def test_training_in_a_thread_with_a_recipe_as_an_object(tmp_path, monkeypatch):
    """Signals reach the main thread alone; without pandas, everything but the tables is there."""
    recipe = override_values(find_recipe("digits/tiny"), {**SMALL, "epochs": 1, "name": "mine"})
    monkeypatch.chdir(tmp_path)
    found = []
    thread = threading.Thread(target=lambda: found.append(stepsnet.train(recipe, stream_epochs=0)))
    thread.start()
    thread.join()
    assert found[0].folder == Path("runs/mine") and found[0].summary["recipe"] == "mine"
    assert found[0].summary["command"] == "stepsnet train runs/mine/config.yaml"
    with pytest.raises(UserError, match="runs/mine is not empty"):
        stepsnet.train("runs/mine/config.yaml")
    again = stepsnet.train("runs/mine/config.yaml", resume="auto")
    assert again.summary == found[0].summary  # it has ended
    assert len(stepsnet.resume("runs/mine", epochs=2).metrics) == 2
    Path("runs/mine").rename("moved")
    assert stepsnet.train("moved/config.yaml", resume=True).folder == Path("moved")  # as `stepsnet train` has it
    Path("moved").rename("runs/mine")
    with pytest.raises(UserError, match="data is 'hfds:me/cats', which is fetched from the network only if you ask"):
        Path("theirs.yaml").write_text(Path("runs/mine/config.yaml").read_text().replace("digits\n", "hfds:me/cats\n"))
        stepsnet.train("theirs.yaml")
    with pytest.raises(UserError, match=r"--seeds: got 2 and \[\], expected at least 1 job and distinct seeds"):
        stepsnet.compare("digits/tiny", "none", seeds=[])
    assert not Path("none").exists()
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(UserError, match=r"pandas is not installed; `pip install '\.\[notebook\]'`"):
        _ = found[0].metrics


@pytest.mark.parametrize(
    ("recipe", "changes", "said"),
    [
        ("digits/tiny", {"epoch": 2}, r"unknown key 'epoch', expected a key of the recipe \(did you mean epochs"),
        ("digits/tiny", {"epochs": "2"}, "epochs: got '2', expected a valid integer"),
        ("digits/tiny", {"model": {"arg": {}}}, "unknown key 'model.arg'"),
        ("digits/tiny", {"lr": {1, 2}}, "got a set, expected text, numbers, lists and mappings"),
        ("digits/tini", {}, "did you mean digits/tiny"),
        (7, {}, "recipe: got 7, expected a name, a YAML file or a Recipe"),
    ],
)
def test_a_mistake_is_one_line(recipe, changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        stepsnet.train(recipe, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="expected the folder of a run"):
        stepsnet.load(tmp_path)


def test_changes_as_values():
    tiny = find_recipe("digits/tiny")
    merged = override_values(tiny, {"model": {"args": {"depths": (2, 1, 1)}}, "data": Path("some/folder")})
    assert merged.model.args == {**tiny.model.args, "widths": [24, 34, 48], "depths": [2, 1, 1], "num_heads": [2, 2, 3]}
    assert merged.data == "some/folder"
    dotted = override_values(tiny, {"model.args.depths": (2, 1, 1)})
    assert dotted.model == merged.model
    whole = override_values(tiny, {"model": ModelSpec("vit_tiny_patch16_224", {"num_classes": 10})})
    assert whole.model.args == {"num_classes": 10}
    assert override_values(find_recipe("cifar10/deep"), {"augment": {"mixup": 0.5}}).augment.mixup == 0.5
