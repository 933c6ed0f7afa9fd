"""Exported files give torch's outputs in other runtimes, say how they are used, and are there whole or not at all."""

import json
import math
import os
import signal
import sys

import pytest
import timm
import torch
from deploy_page import documented_preprocess
from forks import KILLED, forked, status_of
from packaging.version import Version
from PIL import Image
from segmentation_images import write_camvid
from segmentation_tasks import tiny_recipe
from sklearn.datasets import load_sample_image
from torch import nn

import stepsnet
from stepsnet.analysis import speed
from stepsnet.bench import Candidate, bench, find_candidates
from stepsnet.cli import main
from stepsnet.deploy import export as exporting
from stepsnet.deploy.formats import FORMATS, read_metadata
from stepsnet.deploy.sessions import check_runtime, open_session
from stepsnet.errors import UserError
from stepsnet.models.build import build_model
from stepsnet.recipes import find_recipe
from stepsnet.run_folder.checkpoint import save_weights, untied
from stepsnet.settings.config import ClassificationRecipe, ModelSpec
from stepsnet.settings.overrides import override, to_yaml
from stepsnet.tasks.class_names import save_classes
from stepsnet.tasks.language.assets import save_assets
from stepsnet.tasks.language.data import load_text

for package in ("onnx", "onnxscript", "onnxruntime", "openvino"):
    pytest.importorskip(package)

CLASSES = ["ash", "birch", "café", "<elm>", "fir"]
WITH_NEWER_TORCH = pytest.mark.skipif(
    Version(torch.__version__).release < (2, 14), reason="refused in a line, or of one size, with the lowest versions"
)
MOVES = ("os.rename", "os.remove")  # audit events


def run_of(folder, recipe, classes=None):
    """A run's folder with random weights."""
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(recipe))
    torch.manual_seed(0)
    model = build_model(recipe.model)
    save_weights(folder / "model.safetensors", untied(model, model.state_dict()))
    if classes:
        save_classes(folder, classes)
    return folder, model.eval()


def classifier(folder):
    spec = ModelSpec("test_steps_resnet", {"num_classes": 5})
    settings = {"img_size": 64, "crop_pct": 0.8, "data": "folder:nowhere", "device": "cpu"}
    return run_of(folder, ClassificationRecipe(name="mine", model=spec, **settings), CLASSES)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_is_used_with_numpy_and_pillow_alone(here, capsys):
    """The same classes as `stepsnet predict`, from the file and its metadata, at any batch and picture size."""
    classifier(here / "trees")
    assert main(["export", "trees"]) == 0
    assert capsys.readouterr().out.startswith("trees.onnx: batch×3×height×width → batch×5, the same as torch's")
    metadata = read_metadata("trees.onnx")
    assert metadata["classes"] == CLASSES and metadata["task"] == "classification"
    config = metadata["preprocessing"]
    assert (config["input_size"], config["crop_pct"]) == ([3, 64, 64], 0.8)
    session, preprocess = open_session(here / "trees.onnx"), documented_preprocess()
    for number, size in enumerate(((320, 240), (90, 200), (64, 64))):
        photo = Image.fromarray(load_sample_image("china.jpg")).crop((0, 0, 420, 420)).resize(size)
        photo.save(f"{number}.png")
        (logits,) = session(torch.from_numpy(preprocess(Image.open(f"{number}.png"), config)))
        assert main(["predict", "trees", f"{number}.png", "--json"]) == 0
        expected = json.loads(capsys.readouterr().out)[0]["classes"]
        ours = dict(zip(CLASSES, logits.softmax(-1)[0].tolist()))
        assert max(ours, key=ours.get) == max(expected, key=expected.get)
        assert ours == pytest.approx(expected, abs=1e-4)

    import onnxruntime

    taken, given = (
        found()[0] for s in [onnxruntime.InferenceSession("trees.onnx")] for found in (s.get_inputs, s.get_outputs)
    )
    assert (taken.name, taken.shape) == ("images", ["batch", 3, "height", "width"])
    assert (given.name, given.shape) == ("logits", ["batch", 5])
    before = (here / "trees.onnx").read_bytes()
    assert main(["export", "trees"]) == 2
    assert "trees.onnx already exists; --force replaces it" in capsys.readouterr().err
    assert (here / "trees.onnx").read_bytes() == before


def test_positions_and_windows(here, monkeypatch):
    """timm's test_vit interpolates its position embeddings, for which OpenVINO's converter has no operator."""
    exported = stepsnet.export("test_steps_deit", "deit.xml", img_size=32, num_classes=4)
    assert exported.metadata["inputs"][0]["shape"] == ["batch", 3, "height", "width"] and not exported.notes
    assert read_metadata("deit.xml") == exported.metadata
    assert exported.metadata["checked_shapes"] == [[1, 3, 32, 32], [3, 3, 32, 32], [2, 3, 64, 96]]
    exported = stepsnet.export("test_steps_swin", "swin.pt2", img_size=56)
    assert exported.metadata["inputs"][0]["shape"] == ["batch", 3, 56, 56]
    assert exported.notes == ("the size is fixed at 56×56: the model's windows or positions are laid out for it",)
    with monkeypatch.context() as patched:  # which runs what a file has pickled
        patched.setattr(torch.export, "load", lambda *arguments, **options: pytest.fail("the program is loaded"))
        assert read_metadata("swin.pt2") == exported.metadata
    assert {path.name for path in here.iterdir()} == {"deit.xml", "deit.bin", "swin.pt2"}


def test_a_segmenter(here, own_cache):
    """In torch's format, which is the quickest; the others take the same programs."""
    backbone = ["model.args.backbone=test_steps_resnet", "model.args.backbone_args={}"]
    recipe = tiny_recipe(write_camvid(here / "camvid"), *backbone)
    run, model = run_of(here / "streets", recipe, ["road", "sky", "tree"])
    exported = stepsnet.export(stepsnet.load(run), format="torch", fixed_size=True)
    side = recipe.crop_size
    assert exported.metadata["outputs"] == [{"name": "logits", "shape": ["batch", 3, side, side]}]
    assert exported.metadata["classes"] == ["road", "sky", "tree"]
    x = torch.randn(2, 3, side, side)
    with torch.no_grad():
        torch.testing.assert_close(open_session(exported.path)(x)[0], model(x), atol=1e-4, rtol=1e-4)


@WITH_NEWER_TORCH
def test_the_backbone_of_a_run(here):
    trees, _ = classifier(here / "trees")
    exported = stepsnet.export(trees, "maps.pt2", features=True)
    assert [one["name"] for one in exported.metadata["outputs"]] == ["map_1", "map_2", "map_3", "map_4"]
    assert all(one["shape"][2:] == [None, None] for one in exported.metadata["outputs"])
    backbone = stepsnet.models.backbone.create_backbone("test_steps_resnet").eval()
    stepsnet.models.backbone.load_backbone(backbone, trees)
    x = torch.randn(1, 3, 96, 64)
    with torch.no_grad():
        for ours, expected in zip(open_session(exported.path)(x), backbone(x), strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("features", [False, pytest.param(True, marks=WITH_NEWER_TORCH)])
def test_a_trained_bias_of_attention(features, here):
    """BEiT's relative positions are an attention mask made of parameters."""
    small = {"embed_dim": 32, "depth": 4, "num_heads": 2, "img_size": 32}
    model = timm.create_model("beit_base_patch16_224", num_classes=3, **small)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.relative_position_bias_table.normal_()  # timm's are zeros
    save_weights(here / "w.safetensors", model.state_dict())
    given = {"features": features, "fixed_size": True, "weights": here / "w.safetensors", "num_classes": 3}
    exported = stepsnet.export("beit_base_patch16_224", "beit.onnx", **given, **small)
    assert exported.metadata["inputs"][0]["shape"] == ["batch", 3, 32, 32]


@pytest.mark.parametrize(
    ("model", "name"),
    [("test_steps_resnet", "maps.onnx"), ("test_steps_resnet", "maps.xml"), ("test_convnext", "maps.onnx")],
)
def test_feature_maps_at_sizes_that_are_no_multiple_of_32(model, name, here):
    torch.manual_seed(0)
    exported = stepsnet.export(model, name, features=True)
    assert len(exported.metadata["checked_shapes"]) == 4 and not exported.notes
    backbone = stepsnet.models.backbone.create_backbone(model)
    for height, width in ((200, 200), (103, 117)):
        x = torch.randn(1, 3, height, width)
        with torch.inference_mode():
            expected = [one.shape for one in backbone(x)]
        assert [one.shape for one in open_session(here / name)(x)] == expected


def test_what_is_wrong_at_odd_sizes_alone_is_not_left_open(here):
    """The quotient of a negative, which ONNX rounds towards 0: the same at multiples of 32."""

    class Halves(nn.Module):
        def forward(self, x):
            return x[..., : -(-x.shape[-1] // 2)].mean((2, 3))

    _, line = stepsnet.export(Halves(), "halves.onnx").notes
    assert line.startswith("the size is fixed at 224×224: its outputs differ from torch's by")


def test_a_size_that_is_the_same_for_some_sizes_only_is_open(here):
    """Of heights of 40, 72 and 53 pixels every 32nd: 2, 3 and 2."""

    class Every32nd(nn.Module):
        def forward(self, x):
            return x[:, :, ::32, ::32]

    exported = stepsnet.export(Every32nd(), "coarse.pt2", input_size=(3, 40, 40))
    assert [shape[2] for shape in exported.metadata["checked_shapes"]] == [40, 40, 72, 53]
    assert exported.metadata["outputs"][0]["shape"] == ["batch", 3, None, None]
    exported = stepsnet.export(nn.ReLU(), "whole.pt2", input_size=(3, 40, 40))
    assert exported.metadata["outputs"][0]["shape"] == ["batch", 3, "height", "width"]


def test_a_language_model_with_its_tokenizer(here, own_cache):
    (here / "tale.txt").write_text("The stream reads what it wrote, and what it wrote it reads.\n" * 20)
    model = {"widths": [32, 48], "depths": [1, 1], "num_attention_heads": [1, 2], "vocab_size": 270}
    recipe = override(find_recipe("python-docs/tiny"), [f"data=text:{here}/tale.txt", "vocab_size=270"])
    recipe = override(recipe, [f"model.args={json.dumps(model)}", "baseline=null", "device=cpu"])
    run, model = run_of(here / "tale", recipe)
    save_assets(model, load_text(recipe.data, recipe.tokenizer, 270).tokenizer, run)
    exported = stepsnet.export(run)
    assert exported.metadata["inputs"] == [{"name": "input_ids", "dtype": "int64", "shape": ["batch", "tokens"]}]
    assert [one["shape"] for one in exported.metadata["outputs"]] == [["batch", "tokens", 270]]
    from tokenizers import Tokenizer

    ids = Tokenizer.from_str(read_metadata("tale.onnx")["tokenizer"]).encode("what it wrote").ids
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits
    torch.testing.assert_close(open_session(exported.path)(torch.tensor([ids]))[0], expected, atol=1e-4, rtol=1e-4)


def test_runtimes_are_measured_beside_torch(here):
    names = ["torch", "onnxruntime", "openvino"]
    found = bench(
        find_candidates(["test_steps_resnet"]),
        batch_size=2,
        rounds=2,
        memory_batches=None,
        device="cpu",
        runtimes=names,
    )
    assert [row["model"] for row in found["rows"]] == [f"test_steps_resnet, {name}" for name in names]
    for row in found["rows"]:
        assert row["inference"]["n"] == 2 and "training" not in row and row["blocks"] == 13


def test_a_language_model_is_measured_on_tokens_in_every_runtime(here, monkeypatch):
    given = []

    def timed(function, device, what):
        given.append((function.x.dtype, len(function.x)))
        function()  # a session refuses what is no token, or computes with it what it can
        return 1.0

    monkeypatch.setattr(speed, "_time", timed)
    args = {
        "vocab_size": 50,
        "widths": [16, 32],
        "depths": [1, 1],
        "num_attention_heads": [1, 2],
        "max_position_embeddings": 16,
    }
    candidate = Candidate("tale", "tale", ModelSpec("steps_transformer", args))
    names = ["torch", "onnxruntime", "openvino"]
    bench([candidate], batch_size=2, rounds=1, memory_batches=None, device="cpu", runtimes=names)
    assert {*given} == {(torch.int64, 2), (torch.int64, 1)} and len(given) == 3 * 2 * 3


class Odd(nn.Module):
    """An operator that only torch has."""

    def forward(self, x):
        return torch.special.bessel_j0(x).mean((2, 3))


class Branches(nn.Module):
    """What is computed depends on the values, which no capture knows."""

    def forward(self, x):
        return x.mean((2, 3)) if x.sum() > 0 else x.amax((2, 3))


def test_a_compiled_model_is_exported(here):
    stepsnet.export(torch.compile(timm.create_model("test_vit")), "compiled.pt2", fixed_size=True)
    assert (here / "compiled.pt2").exists()


def test_a_failed_export_leaves_nothing(here, monkeypatch):
    words = r"onnx cannot hold odd: it has no operator for prims.bessel_j0; expected --format torch"
    with pytest.raises(UserError, match=words):
        stepsnet.export(Odd(), fixed_size=True)
    with pytest.raises(UserError, match=r"cannot hold branches: ") as raised:
        stepsnet.export(Branches(), fixed_size=True)
    assert "--format" not in str(raised.value)  # which no other format would help with
    (here / "mine.pt2").write_text("mine")
    monkeypatch.setattr(exporting, "open_session", lambda path: lambda x: [torch.full((len(x), 1000), torch.nan)])
    with pytest.raises(UserError, match="outputs differ from torch's by nan"):
        stepsnet.export("test_steps_resnet", "mine.pt2", force=True, fixed_size=True)
    one = torch.ones(2)
    for got in ([one, one * torch.nan], [one * torch.nan, one]):  # whichever output it is
        assert math.isnan(exporting._error(got, [one, one]))
    assert math.isnan(exporting._largest([0.0, math.nan, 0.0]))

    def stopped(path):
        assert path.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "open_session", stopped)
    with pytest.raises(KeyboardInterrupt):
        stepsnet.export("test_steps_resnet", "mine.pt2", force=True, fixed_size=True)
    assert [path.name for path in here.iterdir()] == ["mine.pt2"] and (here / "mine.pt2").read_text() == "mine"


def test_a_killed_export_leaves_no_half_of_a_pair(here):
    """At each of its moves: the file that is opened is there with the one that it was written with, or not at all."""
    place, form = here / "model.xml", FORMATS["openvino"]

    def write(number, kill=lambda event, arguments: False, before_moving=lambda: None):
        def function():
            with exporting._staged(form, place, True) as path:
                for file in form.files(path):
                    file.write_text(f"{number}")
                before_moving()

        return status_of(forked(function, kill))

    assert write(0, before_moving=lambda: os.kill(os.getpid(), signal.SIGKILL)) == -signal.SIGKILL
    assert all(path.name.startswith(".") for path in here.iterdir())
    assert write(1) == 0
    for moves in range(3):
        seen = iter(range(moves))
        assert write(2, lambda event, _, seen=seen: event in MOVES and next(seen, None) is None) == KILLED
        if place.exists():
            assert place.read_text() == place.with_suffix(".bin").read_text()
    assert write(3) == 0 and place.read_text() == place.with_suffix(".bin").read_text() == "3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["test_vit", "--format", "onix"], "--format: got 'onix', expected one of onnx, torch, openvino (did you mean"),
        (["test_vit", "--out", "a.tflite"], "got a.tflite, expected a file that ends in one of .onnx, .pt2, .xml"),
        (["test_vit", "--format", "torch", "--out", "a.onnx"], "got a.onnx, expected a name that ends in .pt2"),
        (["runs/none"], "export: runs/none is not a folder, expected the folder of a run, or the name of a model"),
        (["test_vitt"], "model: got 'test_vitt', expected a timm or StepsNet model (did you mean test_vit"),
        (
            ["mask_rcnn"],
            "mask_rcnn is a detector, whose lists of objects differ in length from image to image, expected a",
        ),
        (["mask_rcnn", "--features"], "from image to image, expected a classifier's backbone"),
        (["test_vit", "depth"], "model: got 'depth', expected key=value"),
        (
            ["test_vit", "--weights", "none.pth"],
            "--weights: got none.pth, expected the folder of a run, a checkpoint",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments, message, here, capsys):
    assert main(["export", *arguments]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "(for " not in line]
    assert message in line and not list(here.iterdir())


def test_what_is_not_here_is_said(here, monkeypatch, capsys):
    cuda = torch.device("cuda")
    with pytest.raises(UserError, match="got the device cuda, expected cpu, or `pip install onnxruntime-gpu`"):
        check_runtime("onnxruntime", cuda)
    with pytest.raises(UserError, match="openvino: got the device cuda, expected cpu"):
        check_runtime("openvino", cuda)
    with pytest.raises(UserError, match="got amp_dtype bfloat16, expected float32"):
        check_runtime("onnxruntime", torch.device("cpu"), "bfloat16")
    assert main(["bench", "test_vit", "--runtime", "torch,onnx"]) == 2
    assert "--runtime: got 'onnx', expected one or more of torch,onnxruntime,openvino" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert main(["export", "test_vit", "--format", "openvino"]) == 2
    assert "openvino is not installed; `pip install '.[export]'` in a clone" in capsys.readouterr().err


def test_a_module_of_stepify_keeps_its_device_and_mode(here):
    model = stepsnet.stepify(timm.create_model("test_resnet", num_classes=3), steps=1).train()
    exported = stepsnet.export(model, "mine.pt2", fixed_size=True)
    assert model.training and exported.metadata["inputs"][0]["shape"][0] == "batch"
