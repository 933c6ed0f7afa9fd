"""How pictures that are not square are evaluated: as the model's own config says, in training, files and folders."""

import dataclasses

import numpy as np
import pytest
import timm
import torch
from classification_tasks import sample
from deploy_page import documented_preprocess
from PIL import Image
from test_from_data import write_images

from stepsnet.models.build import build_model
from stepsnet.run_folder.checkpoint import save_weights
from stepsnet.run_folder.folder import read_run_recipe
from stepsnet.run_folder.resuming import open_run_folder
from stepsnet.runs.evaluate import evaluate_checkpoint
from stepsnet.settings.config import ClassificationRecipe, ModelSpec
from stepsnet.settings.from_data import as_begun, with_baseline
from stepsnet.settings.overrides import to_yaml
from stepsnet.tasks import build_opened, open_data, resolve
from stepsnet.tasks.class_names import save_classes
from stepsnet.tasks.classification.data import evaluation_transform
from stepsnet.tasks.classification.deployment import deployment
from stepsnet.tasks.classification.publish import publish
from stepsnet.tasks.classification.task import input_spec
from stepsnet.tasks.classification.transforms import InputSpec
from stepsnet.tasks.images import open_image

SQUASH, CENTER = ModelSpec("tf_efficientnetv2_b3"), ModelSpec("test_steps_resnet")
BORDER = ModelSpec("test_vit", {"pretrained_cfg_overlay": {"crop_mode": "border"}})
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 210, 3), dtype=np.uint8))


@pytest.fixture
def data(tmp_path):
    return f"folder:{write_images(tmp_path / 'data', (24, 16), classes=('ant', 'bee'), train=2, val=1)}"


def recipe_of(model, data, **settings):
    return ClassificationRecipe(name="mine", model=model, data=data, batch_size=2, device="cpu", **settings)


def timms(model):
    return timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)


@pytest.mark.parametrize("spec, mode", [(SQUASH, "squash"), (CENTER, None), (BORDER, "border")])
def test_evaluation_is_the_transform_of_the_models_own_config(spec, mode, data):
    recipe, lines = resolve(recipe_of(spec, data), opened := open_data(recipe_of(spec, data)))
    assert recipe.crop_mode == mode and any(f"crop_mode {mode}, from {spec.name}" in line for line in lines) == bool(
        mode
    )
    model, task = build_opened(recipe, opened)
    expected = timms(model)
    assert torch.equal(task.data.read(PICTURE), expected(PICTURE))
    stored = Image.open(f"{data.removeprefix('folder:')}/val/ant/0.png")
    assert torch.equal(sample(task.data.val, 0, 0, 0)[0], expected(stored))
    assert task.data.read(Image.new("RGB", (1, 900))).shape == task.data.read(PICTURE).shape  # it may be a line
    assert resolve(recipe, opened) == (recipe, [])
    chosen = dataclasses.replace(recipe, crop_mode="center")
    assert resolve(chosen, opened) == (chosen, []) and input_spec(chosen, model).crop_mode == "center"


def test_a_run_of_before_is_scored_as_it_was_and_goes_on(data, tmp_path):
    """Earlier versions evaluated the center, whatever the model's config says, and recorded no crop."""
    assert InputSpec((3, 8, 8), (0.5,) * 3, (0.5,) * 3).crop_mode == "center"
    recipe = recipe_of(ModelSpec(SQUASH.name, {"num_classes": 2}), data)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text(to_yaml(recipe).replace("crop_mode: null\n", ""))
    old = read_run_recipe(tmp_path / "old")
    model = build_model(old.model)
    config = timm.data.resolve_model_data_config(model) | {"crop_mode": "center"}
    read = evaluation_transform(old.data, input_spec(old, model))
    assert torch.equal(read(PICTURE), timm.data.create_transform(**config, is_training=False)(PICTURE))
    assert open_run_folder(tmp_path / "old", recipe, resume=True).crop_mode is None
    begun = dataclasses.replace(recipe, crop_mode="squash")
    open_run_folder(tmp_path / "new", begun)
    assert open_run_folder(tmp_path / "new", recipe, resume=True) == begun
    assert as_begun(dataclasses.replace(recipe, crop_mode="border"), begun).crop_mode == "border"


def test_in_a_comparison_each_model_has_its_own():
    center = recipe_of(CENTER, "folder:nowhere", baseline=SQUASH)
    squash = dataclasses.replace(center.of_baseline(), crop_mode="squash")
    assert with_baseline(center, squash).crop_mode is with_baseline(squash, center).crop_mode is None
    assert with_baseline(squash, squash).crop_mode == "squash"


@pytest.mark.parametrize("chans", [3, 1])
@pytest.mark.parametrize("mode", ["center", "squash", "border"])
def test_what_is_published_and_exported_sees_what_was_scored(mode, chans, tmp_path):
    spec = ModelSpec("test_vit", {"num_classes": 2, "in_chans": chans, "img_size": 64})
    recipe = recipe_of(spec, "folder:nowhere", crop_mode=mode, crop_pct=0.9)
    model = build_model(spec)
    (tmp_path / "run").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(recipe))
    save_weights(tmp_path / "run" / "model.safetensors", model.state_dict())
    save_classes(tmp_path / "run", ["ant", "bee"])
    scored = evaluation_transform(recipe.data, input_spec(recipe, model))(PICTURE)
    publish(tmp_path / "run", recipe, tmp_path / "out")
    published = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    greyscale_or_color = PICTURE.convert("L" if chans == 1 else "RGB")
    assert torch.equal(timms(published)(greyscale_or_color), scored)
    config = deployment(tmp_path / "run", recipe, model).preprocessing
    assert config["crop_mode"] == mode
    np.testing.assert_allclose(documented_preprocess()(PICTURE, config)[0], scored, atol=1e-5)


@pytest.mark.parametrize("size", [(91, 200), (301, 77), (64, 64), (40, 50)])
@pytest.mark.parametrize("crop_pct", [0.8, 1.0])
@pytest.mark.parametrize("mode", ["center", "squash", "border"])
def test_the_documented_program_is_timms_transform(mode, crop_pct, size):
    config = {"input_size": (3, 64, 64), "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3), "interpolation": "bicubic"}
    config |= {"crop_pct": crop_pct, "crop_mode": mode}
    picture = PICTURE.resize(size)
    expected = timm.data.create_transform(**config, is_training=False)(picture)
    got = documented_preprocess()(picture, {**config, "mode": "RGB"})[0]
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["turned.jpg", "transparent.png"])
def test_the_documented_program_sees_pictures_as_the_training_does(name, tmp_path):
    """Upright by their EXIF orientation, and on white where they are transparent."""
    recipe = recipe_of(ModelSpec("test_vit", {"num_classes": 2, "img_size": 64}), "folder:nowhere")
    model = build_model(recipe.model)
    if name == "turned.jpg":
        exif = Image.Exif()
        exif[0x0112] = 6  # the camera was turned
        PICTURE.save(tmp_path / name, exif=exif)
    else:
        picture = PICTURE.convert("RGBA")
        picture.putalpha(Image.linear_gradient("L").resize(picture.size))
        picture.save(tmp_path / name)
    scored = evaluation_transform(recipe.data, input_spec(recipe, model))(open_image(tmp_path / name))
    config = {**timm.data.resolve_model_data_config(model), "input_size": (3, 64, 64), "mode": "RGB"}
    got = documented_preprocess()(Image.open(tmp_path / name), config)[0]
    np.testing.assert_allclose(got, scored, atol=1e-5)


def test_a_checkpoint_is_scored_with_its_models_crop(data, tmp_path, monkeypatch):
    """`stepsnet eval` of a file of weights."""
    model = timm.create_model(SQUASH.name, num_classes=2)
    save_weights(tmp_path / "weights.safetensors", model.state_dict())
    seen = []
    monkeypatch.setattr("stepsnet.runs.evaluate._scores", lambda task, model, device: seen.append(task.data.val))
    evaluate_checkpoint(tmp_path / "weights.safetensors", SQUASH.name, data)
    stored = Image.open(f"{data.removeprefix('folder:')}/val/ant/0.png")
    assert torch.equal(sample(seen[0], 0, 0, 0)[0], timms(model)(stored))
