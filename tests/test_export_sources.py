"""What an exported file says of its inputs and classes, and which models can be exported at all."""

import json

import pytest
import timm
import torch
from run_folders import closed
from test_export import CLASSES, classifier, run_of
from torch import nn

import stepsnet
from stepsnet.cli import main
from stepsnet.deploy import source
from stepsnet.deploy.sessions import open_session
from stepsnet.deploy.source import described, find_source
from stepsnet.errors import UserError
from stepsnet.models.build import build_model
from stepsnet.recipes import find_recipe
from stepsnet.settings.config import ClassificationRecipe, ModelSpec
from stepsnet.tasks.classification.task import input_spec

for package in ("onnx", "onnxscript", "onnxruntime", "openvino"):
    pytest.importorskip(package)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_name_with_the_weights_of_a_run_is_used_as_the_run(here):
    recipe = closed(find_recipe("digits/tiny"))
    digits, _ = run_of(here / "digits", recipe, tuple("0123456789"))
    trees, _ = classifier(here / "trees")
    for run, spec in ((digits, recipe.model), (trees, ModelSpec("test_steps_resnet", {"num_classes": 5}))):
        of_run = find_source(run)
        by_name = find_source(spec.name, weights=run, model_args=spec.args)
        assert by_name.use == of_run.use and not by_name.notes
        maps, by_name = (
            find_source(one, features=True, **more)
            for one, more in ((run, {}), (spec.name, {"weights": run, "model_args": spec.args}))
        )
        assert maps.use == by_name.use
    assert of_run.use.classes == CLASSES and of_run.use.preprocessing["crop_pct"] == 0.8
    maps = find_source("test_steps_resnet", features=True, weights=trees)  # named without the run's number of classes
    assert maps.use.classes is None and maps.use.preprocessing == of_run.use.preprocessing


def test_the_weights_of_an_unfinished_run_are_told_of(here, monkeypatch):
    trees, _ = classifier(here / "trees")
    monkeypatch.setattr(source, "on_unfinished", lambda run: [f"{run} has not ended"])
    for features in (False, True):
        found = find_source("test_steps_resnet", weights=trees, features=features, model_args={"num_classes": 5})
        assert found.notes == (f"{trees} has not ended",)


def test_a_model_of_the_hub_is_a_name(monkeypatch):
    model = timm.create_model("test_resnet", num_classes=3)
    monkeypatch.setattr(source, "build_model", lambda spec: model)
    assert find_source("hf-hub:someone/cats", model_args={"pretrained": True}).model is model


def test_a_name_with_the_weights_of_a_file_says_what_nobody_knows(here, capsys):
    trees, _ = classifier(here / "trees")
    file = str(trees / "model.safetensors")
    assert main(["export", "test_steps_resnet", "num_classes=5", "--weights", file, "--format", "torch", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["notes"]
    assert line == f"{file} does not say how pictures are preprocessed: the metadata state test_steps_resnet's default"


def test_a_tag_has_the_preprocessing_of_its_own(monkeypatch):
    """timm's vit_tiny was trained with a mean of 0.5, and its deit_tiny with ImageNet's; the models are the same."""
    weights = timm.create_model("vit_tiny_patch16_224").state_dict()
    monkeypatch.setattr("stepsnet.deploy.source.read_pretrained", lambda source, key: weights)
    tag = "timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    source = find_source("deit_tiny_patch16_224", weights=tag)
    assert source.use.preprocessing["mean"] == (0.5, 0.5, 0.5) and not source.notes
    assert find_source("deit_tiny_patch16_224").use.preprocessing["mean"] == (0.485, 0.456, 0.406)


def test_what_nobody_knows_is_said_until_it_is_told(tmp_path):
    torch.save(timm.create_model("test_vit", num_classes=2).state_dict(), tmp_path / "w.pth")
    about = {"classes": ["cat", "dog"]}
    given = {"weights": tmp_path / "w.pth", "model_args": {"num_classes": 2}}
    assert "does not say how pictures are preprocessed" in find_source("test_vit", **given, about=about).notes[0]
    about |= {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    assert not find_source("test_vit", **given, about=about).notes


def test_names_of_the_weights_classes_go_with_their_number():
    model = timm.create_model("test_vit", num_classes=3, pretrained_cfg_overlay={"label_names": ["a", "b", "c"]})
    assert described("vit", model, True, {}).use.classes == ["a", "b", "c"]
    for classes in (2, 0):  # a head of other classes, and none
        model.reset_classifier(classes)
        assert described("vit", model, True, {}).use.classes is None


def test_maps_of_a_model_of_one_size():
    small = {"embed_dim": 48, "depth": 4, "num_heads": 3}
    given = {"features": True, "model_args": small}
    with pytest.raises(UserError, match="refuses 331×245 pixels"):
        find_source("beit_base_patch16_224", **given)
    source = find_source("beit_base_patch16_224", **given, fixed_size=True)
    maps = source.model(torch.randn(1, *source.use.shape))
    assert [one.shape[-1] for one in maps] == [56, 28, 14, 7]


def test_one_channel_by_name_and_as_a_module(here):
    recipe = ClassificationRecipe(name="one", model=ModelSpec("test_resnet", {"in_chans": 1}), data="digits")
    spec = input_spec(recipe, build_model(recipe.model))
    exported = [stepsnet.export("test_resnet", "name.pt2", in_chans=1, num_classes=3)]
    exported.append(stepsnet.export(timm.create_model("test_resnet", in_chans=1, num_classes=3), "module.pt2"))
    for one in exported:
        said = one.metadata["preprocessing"]
        assert (said["mode"], said["input_size"]) == ("L", list(spec.input_size)) and not one.notes
        assert (said["mean"], said["std"]) == (list(spec.mean), list(spec.std))
        assert one.metadata["inputs"][0]["shape"][1] == 1
    four = find_source(timm.create_model("test_vit", in_chans=4)).use.preprocessing
    assert (four["mode"], four["mean"], four["std"], four["input_size"]) == (None, None, None, (4, 160, 160))
    # its stem rearranges space to channels, so that the first convolution has other channels than a picture
    assert find_source(timm.create_model("tresnet_m", num_classes=2)).use.shape == (3, 224, 224)


def test_a_module_of_nobody_says_what_its_user_says():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    source = find_source(model)
    assert source.use.shape == (1, 224, 224)
    assert {source.use.preprocessing[name] for name in ("mean", "std", "crop_pct", "crop_mode", "interpolation")} == {
        None
    }
    assert source.notes[0].startswith("sequential does not say how pictures are preprocessed: this is null")
    about = {"input_size": (1, 28, 20), "mean": (0.13,), "std": (0.3,), "classes": ["cat", "dog"]}
    source = find_source(model, about=about)
    assert source.use.shape == (1, 28, 20) and source.use.classes == ["cat", "dog"] and not source.notes
    assert source.use.preprocessing["mean"] == (0.13,)
    for wrong, message in (
        ({"mean": (0.1, 0.2)}, r"mean: got \(0.1, 0.2\), expected 1 numbers"),
        ({"input_size": (28, 28)}, r"input_size: got \(28, 28\), expected three whole numbers"),
        ({"mean": 0.5}, "mean: got 0.5, expected 1 numbers"),
        ({"std": ["a"]}, r"std: got \['a'\], expected 1 numbers"),
        ({"std": (0.0,)}, r"std: got \(0.0,\), expected 1 numbers"),
        ({"mean": (123.7,)}, r"mean: got \(123.7,\), expected that of pixels from 0 to 1, not from 0 to 255"),
        ({"std": (58.4,)}, r"std: got \(58.4,\), expected that of pixels from 0 to 1"),
        ({"input_size": 224}, "input_size: got 224, expected three whole numbers"),
        ({"classes": 5}, "classes: got 5, expected a list of names"),
        ({"classes": ["cat"]}, "classes: got 1, expected 2 names, one for each output"),
    ):
        with pytest.raises(UserError, match=message):
            find_source(model, about=wrong)
    with pytest.raises(UserError, match="classes: got 2, expected 1000 names, one for each output"):
        find_source("test_vit", about={"classes": ["cat", "dog"]})


def test_a_module_that_takes_no_such_pictures_is_refused_with_their_size(capfd):
    """At once, before torch.export writes pages about it."""
    for size, tried in ((None, "3×224×224"), ((1, 8, 8), "1×8×8")):
        said = (
            rf"sequential does not take pictures of {tried} \(RuntimeError: .*\), expected a model that does \(input_"
        )
        with pytest.raises(UserError, match=said):
            stepsnet.export(nn.Sequential(nn.Linear(7, 64), nn.ReLU()), "t.pt2", input_size=size)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_module_of_another_precision_is_refused(dtype):
    with pytest.raises(UserError, match=rf"the module has weights of {str(dtype)[6:]}, expected float32, as module"):
        stepsnet.export(timm.create_model("test_resnet").to(dtype), "half.onnx")


class _Parts(nn.Module):
    def forward(self, x):
        return {"mask": x.mean(1), "score": x.mean((1, 2, 3)), "colors": x.mean((0, 2, 3))}


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (lambda: timm.create_model("test_steps_swin", features_only=True), ["map_1", "map_2", "map_3", "map_4"]),
        (_Parts, ["mask", "score", "colors"]),
    ],
)
def test_all_outputs_of_a_module_are_named(model, names, here):
    exported = stepsnet.export(model().eval(), "several.pt2")
    described = exported.metadata["outputs"]
    assert [one["name"] for one in described] == names and exported.metadata["task"] == "features"
    found = open_session(exported.path)(torch.randn(1, 3, 224, 224))
    assert [len(one["shape"]) for one in described] == [one.ndim for one in found]
    assert [one["shape"][0] for one in described] == [3 if name == "colors" else "batch" for name in names]


@pytest.mark.parametrize(
    "arguments", [["stepify", "model=test_vit", "steps=2"], ["grow", "model=test_vit", "weights=timm:test_vit"]]
)
def test_what_is_made_by_name(arguments, here, capsys):
    assert main(["export", *arguments, "--out", "made.pt2", "--fixed-size"]) == 0, capsys.readouterr().err
    assert (here / "made.pt2").exists()


def test_arguments_of_a_model_with_the_names_of_ours(here, capsys):
    for argument in ("format=1", "path=1", "note=1", "features=1"):
        assert main(["export", "test_vit", argument]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "(for " not in line]
        assert "model test_vit" in line and argument.partition("=")[0] in line, line


@pytest.mark.parametrize("name", ["test_vit", "test_steps_swin"])
def test_an_optimized_model(name, here):
    model = stepsnet.optimize(timm.create_model(name, num_classes=3))
    before = dict(vars(model))
    exported = stepsnet.export(model, "model.pt2", fixed_size=True)
    assert exported.path.exists() and vars(model).get("forward") is before["forward"]
