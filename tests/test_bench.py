"""Speed and memory: what is written is what was timed, and every model is visited in every round."""

import csv
import itertools
import json
import re

import pytest
import timm
import torch
from PIL import Image

from stepsnet.analysis import speed
from stepsnet.analysis.complexity import count_language_model
from stepsnet.analysis.memory import activation_bytes
from stepsnet.analysis.speed import Measured, measure_memory, measure_speed
from stepsnet.bench import _sample_and_counts, bench, find_candidates, render_bench
from stepsnet.cli import main
from stepsnet.errors import UserError
from stepsnet.models.build import build_model
from stepsnet.models.cuda_graph import GraphedInference
from stepsnet.output.summary_stats import format_mean_std, format_number, format_quartiles, quartiles
from stepsnet.paper.tables import printed_rows
from stepsnet.recipes import find_recipe
from stepsnet.report import speed as report_speed
from stepsnet.settings.config import ModelSpec
from stepsnet.settings.overrides import override, to_yaml

CPU = torch.device("cpu")


def tiny(name="a", **kwargs):
    return Measured(name, timm.create_model("test_steps_deit", img_size=32, num_classes=5, **kwargs), (3, 32, 32))


def test_rounds_visit_all_models_in_turn(monkeypatch):
    visited = []

    def timed(function, device, what):
        visited.append((what.partition(":")[0], type(function).__name__, len(function.x), function.training))
        function.model.train(function.training)
        function()
        return float(len(visited))

    monkeypatch.setattr(speed, "_time", timed)
    models = [tiny(name) for name in "abc"]
    before = {name: value.clone() for name, value in models[0].model.state_dict().items()}
    found = measure_speed(models, batch_size=4, rounds=3, device=CPU)
    assert [name for name, kind, *_ in visited if kind == "_Training"] == [*"bca", *"cab", *"abc", *"bca", *"cab"]
    ours = [entry[1:] for entry in visited if entry[0] == "a"][:3]
    assert ours == [("_Inference", 4, False), ("_Inference", 1, False), ("_Training", 4, True)]
    assert {name: {kind: len(s) for kind, s in kinds.items()} for name, kinds in found.items()} == {
        name: {"inference": 3, "latency": 3, "training": 3} for name in "abc"
    }
    assert [visited[int(s) - 1][:3] for s in found["b"]["latency"]] == [("b", "_Inference", 1)] * 3
    after = models[0].model.state_dict()
    assert any(not torch.equal(value, after[name]) for name, value in before.items())  # it was really trained


def test_memory_grows_with_the_batch():
    found = measure_memory(tiny(), (64, 128), CPU, "float32")
    predicted = activation_bytes(tiny().model, (3, 32, 32), 128) - activation_bytes(tiny().model, (3, 32, 32), 64)
    training = found["training"]
    assert training["128"] - training["64"] == 64 * training["per_sample"]
    assert training["128"] - training["64"] == pytest.approx(predicted, rel=1e-3)
    assert 0 <= found["inference"]["per_sample"] < 0.5 * training["per_sample"]


def test_what_would_not_fit_is_said_before_it_is_tried(monkeypatch):
    monkeypatch.setattr(speed, "available_memory", lambda: 2.0**20)
    with pytest.raises(
        UserError, match=r"a is predicted to take .* GiB in training at a batch of 64, but only 0.0 GiB are"
    ):
        measure_memory(tiny(), (32, 64), CPU, "float32")
    with pytest.raises(UserError, match="got batches of 4 and 4, expected two that increase"):
        measure_memory(tiny(), (4, 4), CPU, "float32")


def test_quartiles():
    assert [format_number(value) for value in (0, 9.996, 0.00098765, -12.34)] == ["0", "10.0", "0.000988", "-12.3"]
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == {"median": 3.0, "quartiles": [2.0, 4.0], "n": 5}
    assert quartiles([0.1, 1.0])["quartiles"] == pytest.approx([0.325, 0.775])  # two rounds; none below zero
    assert quartiles([2.0]) == {"median": 2.0, "quartiles": [2.0, 2.0], "n": 1}
    assert format_quartiles(quartiles([5.0, 1.0, 3.0, 2.0, 4.0]), ".1f") == "3.0 (2.0 to 4.0)"


def test_mean_and_standard_deviation():
    assert format_mean_std([1.0, 2.0, 3.0], ".1f", "%") == "2.0 ± 1.0%"  # of a sample: over n - 1
    assert format_mean_std([2.0, 4.5], "+.2f", " points", ".1f") == "+3.25 ± 1.8 points"
    assert format_mean_std([2.0]) == "2.00"


def summary(folder, label, widths, depths, top1):
    args = {"img_size": 32, "num_classes": 5, "widths": widths, "depths": depths}
    model = {"name": "test_steps_deit", "args": args}
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"label": label, "model": model, "metrics": {"val_top1": top1}}))
    return folder


def test_a_gpu_that_was_left_alone_is_not_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    result = bench(
        find_candidates(["test_vit"]), batch_size=1, rounds=1, device="cpu", train=False, memory_batches=None
    )
    assert result["device"] == "cpu" and result["hardware"]["gpu"] is None


def test_a_sample_of_a_language_model_is_a_sequence():
    model = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    spec = ModelSpec("causal_lm", {"model_type": "llama", "num_attention_heads": 4, **model})
    sample, counts = _sample_and_counts(spec, build_model(spec))
    assert counts["macs"] == sample["shape"][0] * count_language_model(build_model(spec), *sample["shape"]).macs


def test_a_run_is_measured_at_its_own_size_and_fetches_nothing(tmp_path, monkeypatch):
    """Of a model that takes any size, the recipe alone has it; its weights are not needed."""
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("STEPSNET_FETCH", raising=False)
    model = {"name": "test_resnet", "args": {"pretrained": True, "in_chans": 3}}
    run = tmp_path / "run"
    run.mkdir()
    (run / "summary.json").write_text(json.dumps({"model": model, "metrics": {"val_top1": 70.0}}))
    asked = ["model.name=test_resnet", f"model.args={json.dumps(model['args'])}"]
    (run / "config.yaml").write_text(to_yaml(override(find_recipe("digits/tiny"), [*asked, "img_size=64"])))
    monkeypatch.setattr("timm.models._builder.load_pretrained", lambda *_, **__: pytest.fail("it fetches weights"))
    result = bench(find_candidates([str(run)]), batch_size=1, rounds=1, memory_batches=None, train=False, device="cpu")
    assert result["rows"][0]["shape"] == [3, 64, 64]
    alone = tmp_path / "alone.json"
    alone.write_text(json.dumps({"model": {"name": "hf-hub:someone/model", "args": {}}, "metrics": {}}))
    with pytest.raises(UserError, match="its model 'hf-hub:someone/model' is fetched from the network, expected"):
        find_candidates([str(alone)])


def test_runs_and_names_from_the_command_line(tmp_path, capsys):
    steps = summary(tmp_path / "steps", "StepsNet", [32, 64], [3, 2], 70.0)
    base = summary(tmp_path / "base", "baseline", [64], [3], 60.0)
    deeper = summary(tmp_path / "deeper", "baseline", [64], [6], 65.0)
    places = [str(steps), str(base), str(deeper / "summary.json"), "test_vit"]
    small = ["--rounds", "3", "--batch-size", "2", "--memory", "1,2", "--device", "cpu"]
    assert main(["bench", *places, *small, "--out", str(tmp_path / "out")]) == 0
    before = (tmp_path / "out" / "speed.json").read_bytes()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("| model | blocks | MACs (G) | inference /s | training /s | latency (ms) |")
    assert len(printed) == 6 and printed[2].startswith("| steps | 5 |")
    result = json.loads((tmp_path / "out" / "speed.json").read_text())
    assert result["batch_size"] == 2 and result["command"].startswith("stepsnet") and result["device"] == "cpu"
    rows = result["rows"]
    assert [row["model"] for row in rows] == ["steps", "base", f"{deeper.name}/summary", "test_vit"]
    assert [row["accuracy"] for row in rows] == [70.0, 60.0, 65.0, None]
    for row in rows:
        assert row["inference"]["median"] == pytest.approx(
            quartiles([2 / s for s in row["seconds"]["inference"]])["median"]
        )
        assert row["latency_ms"]["n"] == 3 and len(row["seconds"]["training"]) == 3
    table = list(csv.DictReader((tmp_path / "out" / "speed.csv").open()))
    assert [float(line["training"]) for line in table] == [row["training"]["median"] for row in rows]
    for name in ("speed-accuracy", "speed-depth"):
        with Image.open(tmp_path / "out" / f"{name}.png") as image:
            assert len(image.convert("RGB").getcolors(1 << 24)) > 50
        assert "</svg>" in (tmp_path / "out" / f"{name}.svg").read_text()
    assert main(["bench", *places, *small, "--out", str(tmp_path / "out")]) == 2  # at once
    assert "speed.json already exists; --force replaces it" in capsys.readouterr().err
    assert (tmp_path / "out" / "speed.json").read_bytes() == before


def test_what_was_measured_is_kept_where_memory_ends(tmp_path, monkeypatch, capsys):
    def one_fits(measured, *_):
        if measured.name == "test_vit":
            raise UserError("memory: test_vit is predicted not to fit")
        return {"inference": {"1": 5, "2": 7, "per_sample": 2.0}}

    monkeypatch.setattr("stepsnet.bench.measure_memory", one_fits)
    small = ["--batch-size", "1", "--rounds", "1", "--memory", "1,2", "--no-train", "--device", "cpu"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "speed-depth.png").write_text("of an earlier bench")
    assert main(["bench", "test_steps_deit", "test_vit", *small, "--force", "--out", str(tmp_path / "out")]) == 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["speed.json"]
    out, err = capsys.readouterr()
    assert "predicted not to fit" in err and [line.count("—") for line in out.splitlines()[2:]] == [0, 1]
    kept = json.loads((tmp_path / "out" / "speed.json").read_text())
    assert [(row["inference"]["n"], "memory" in row) for row in kept["rows"]] == [(1, True), (1, False)]


def test_a_model_is_compiled_where_it_is_measured(monkeypatch):
    found = []

    def optimize(model, for_):
        found.append((for_, next(model.parameters()).device.type))
        return model

    monkeypatch.setattr("stepsnet.bench.pick_device", torch.device)
    monkeypatch.setattr("stepsnet.bench.optimize", optimize)
    timed = {kind: [1.0] for kind in ("inference", "latency", "training")}
    monkeypatch.setattr("stepsnet.bench.measure_speed", lambda models, *_: {one.name: timed for one in models})
    bench(find_candidates(["test_vit"]), memory_batches=None, device="meta", compile=True)
    assert found == [("inference", "meta"), ("training", "meta")]


def test_memory_is_that_of_calls_and_not_of_captures():
    class Counted(GraphedInference):
        def __call__(self, x):
            (captured if not self.paused else as_built).append(len(x))
            return self.as_built(x)

    captured, as_built = [], []
    measured = tiny()
    model = measured.module_for(training=False)
    model.forward = Counted(model)
    measure_memory(measured, (2, 4), CPU, "float32", train=False)
    assert captured == [] and as_built == [2, 2, 4, 4]


def row(model, curve, blocks, speed):
    timed = {"median": speed, "quartiles": [0.9 * speed, 1.1 * speed], "n": 3}
    counts = {"blocks": blocks, "layers": 9, "params": 9, "macs": 12_345_678_900_000, "accuracy": 70.0}
    kind = {"curve": curve, "in_steps": "Steps" in curve, "accuracy_of": ""}
    return {"model": model, **kind, **counts, "inference": timed, "latency_ms": timed}


def test_numbers_are_plain_and_the_kinds_have_colors(monkeypatch, tmp_path):
    """Of two families, each StepsNet beside its baseline, and of a model that is neither."""
    curves = ("ResNet", "Steps-ResNet", "DeiT", "Steps-DeiT", "VGG")
    rows = [row(f"{curve} {n}", curve, n, speed) for curve in curves for n, speed in ((24, 1423.4), (25, 0.01234))]
    result = {"rows": rows, "device": "cpu", "amp_dtype": "float32", "batch_size": 2}
    table = render_bench(result)
    assert "| 12,346 | 1,423 (1,281 to 1,566) |" in table and "0.0123 (0.0111 to 0.0136)" in table
    assert not re.search(r"\de[+-]\d", table)
    figures = {}
    monkeypatch.setattr(report_speed, "save_figure", lambda figure, path: figures.update({path.name: figure}))
    report_speed.draw_speed(result, tmp_path)
    for figure in figures.values():
        lines = {line.get_label(): line for line in figure.axes[0].lines if not line.get_label().startswith("_")}
        colors = {name: line.get_color() for name, line in lines.items()}
        assert colors["Steps-ResNet"] == colors["Steps-DeiT"] != colors["ResNet"] == colors["DeiT"] != colors["VGG"]
        markers = {name: line.get_marker() for name, line in lines.items()}
        assert markers["Steps-ResNet"] == markers["ResNet"] != markers["DeiT"] == markers["Steps-DeiT"]
        figure.canvas.draw()
        boxes = [text.get_window_extent() for text in figure.axes[0].get_xticklabels() if text.get_text()]
        assert boxes and not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
        assert all(figure.bbox.contains(*text.get_window_extent().max) for text in figure.legends[0].get_texts())


def test_the_rows_of_a_table_carry_the_printed_accuracy():
    found = find_candidates(["table:5b"])
    assert [c.accuracy for c in found] == [row["top1"] for row in printed_rows("5b")]
    assert {c.curve for c in found} == {"Swin", "Steps-Swin"}
    assert {c.curve for c in find_candidates(["table:4"])} == {"Transformer", "Steps-Transformer"}
    assert {c.curve for c in find_candidates(["table:1"])} >= {"DeiT", "Steps-DeiT", "ResNet", "Steps-ResNet"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["deit_tny_patch16_224"],
            "model: got 'deit_tny_patch16_224', expected a timm or StepsNet model (did you mean deit_tiny_patch16_224",
        ),
        (["table:7"], "table: got '7', expected one of"),
        (["test_vit", "test_vit"], "bench: got test_vit twice, expected each model once"),
        (["nowhere.json"], "nowhere.json is not the summary of a run (FileNotFoundError"),
        (["test_vit", "--rounds", "0"], "--rounds: got 0, expected 1 to"),
        (["test_vit", "--memory", "32"], "--memory: got 32, expected two increasing batch sizes, such as 32,64"),
        (["test_vit", "--amp-dtype", "half"], "amp_dtype: got 'half', expected one of float32, bfloat16, float16"),
    ],
)
def test_a_mistake_is_said(arguments, message, tmp_path, capsys):
    assert main(["bench", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
