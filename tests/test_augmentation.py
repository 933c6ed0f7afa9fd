"""Every recipe's real augmentation, with the Pillow that is installed: policies, and whole data paths with workers."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from coco_images import write_coco
from detection_tasks import make_task
from PIL import Image
from run_folders import closed
from segmentation_images import write_camvid
from sklearn.datasets import load_sample_images
from timm.data import auto_augment
from torch import nn

from stepsnet.engine.randomness import seed_sample
from stepsnet.engine.task import BatchShard
from stepsnet.errors import UserError
from stepsnet.models.build import build_model
from stepsnet.recipes import RECIPES, find_recipe
from stepsnet.settings.config import Augment
from stepsnet.settings.overrides import override
from stepsnet.tasks import build_task
from stepsnet.tasks.classification.data import InputSpec, load_images
from stepsnet.tasks.classification.task import Classification, input_spec
from stepsnet.tasks.classification.transforms import augmenting_transform, posterize

CPU = torch.device("cpu")
PICTURES = 5_000  # 4 of 3,000 failed


def first_of_each(task, *keys):
    """The name of one recipe for each way in which pictures of a task become batches."""
    found = {}
    for name in RECIPES:
        if (recipe := find_recipe(name)).task == task:
            args = recipe.model.args
            kind = [getattr(recipe, key) for key in keys]
            found.setdefault(repr([kind, [args.get(key) for key in ("img_size", "in_chans", "size")]]), name)
    return list(found.values())


CLASSIFICATION = first_of_each("classification", "augment", "label_smoothing", "img_size", "crop_pct")
POLICIES = [name for name in first_of_each("classification", "augment") if find_recipe(name).augment]


@functools.cache
def photographs(count, side):
    """Cuts from scikit-learn's two photographs."""
    random, photos, cuts = np.random.default_rng(0), load_sample_images().images, []
    for number in range(count):
        pixels = photos[number % 2]
        y, x = (random.integers(0, length - side) for length in pixels.shape[:2])
        cuts.append(pixels[y : y + side, x : x + side])
    return cuts


def small_spec(chans=3):
    return InputSpec((chans, 24, 24), (0.45,) * chans, (0.22,) * chans)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("jpegs")
    for number, pixels in enumerate(photographs(24, 96)):
        place = root / ("val" if number < 4 else "train") / ("china", "flower")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number}.jpg")
    Image.fromarray(pixels).convert("L").save(place / "grey.jpg")
    Image.fromarray(pixels).convert("CMYK").save(place / "cmyk.jpg")
    return root


@pytest.mark.parametrize("chans", [3, 1])
@pytest.mark.parametrize("name", POLICIES)
def test_a_recipes_policy_takes_thousands_of_pictures(name, chans):
    transform = augmenting_transform(small_spec(chans), find_recipe(name).augment)
    cuts = [Image.fromarray(pixels).convert("RGB" if chans == 3 else "L") for pixels in photographs(50, 32)]
    for number in range(PICTURES // (1 if chans == 3 else 5)):
        seed_sample(0, 0, number)
        assert transform(cuts[number % len(cuts)]).shape == (chans, 24, 24)


@pytest.mark.parametrize("increasing", [0, 1])
def test_every_operation_takes_every_magnitude(increasing):
    """Of RandAugment with ``mmax``, of which 10 is the end without it."""
    transform = augmenting_transform(small_spec(), Augment(auto_augment=f"rand-m9-mmax20-inc{increasing}"))
    (policy,) = (part for part in transform.transforms if hasattr(part, "ops"))
    weighted = augmenting_transform(small_spec(), Augment(auto_augment="rand-m9-mmax20-t3a")).transforms
    operations = [*policy.ops, *(one for part in weighted for one in getattr(part, "ops", ()))]
    assert len(operations) > 15
    picture = Image.fromarray(photographs(1, 32)[0])
    for operation in operations:
        operation.prob = 1.0
        for step in range(81):
            operation.magnitude = step / 4
            out = operation(picture)
            assert (out.mode, out.size) == (picture.mode, picture.size), operation


@pytest.mark.parametrize("policy", ["augmix-m10-w3", "augmix-m10-mstd2-b1", "v0r-mstd3", "originalr-mstd3"])
def test_other_policies_of_timms_are_guarded_too(policy):
    transform = augmenting_transform(small_spec(), Augment(auto_augment=policy))
    for number, pixels in enumerate(photographs(300, 32)):
        seed_sample(0, 1, number)
        transform(Image.fromarray(pixels))


def test_no_bits_are_black_and_the_rest_is_timms():
    picture = Image.fromarray(photographs(1, 32)[0])
    for bits in range(1, 10):
        assert np.array_equal(posterize(picture, bits), auto_augment.posterize(picture, bits))
    for bits in (0, -4):
        assert not np.asarray(posterize(picture, bits)).any()
        assert posterize(picture.convert("L"), bits).mode == "L"


def test_a_policy_that_timm_does_not_know_is_one_line():
    with pytest.raises(UserError, match=r"augment.auto_augment: got 'rand-z9', expected a policy of timm's"):
        augmenting_transform(small_spec(), Augment(auto_augment="rand-z9"))


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_a_classifiers_recipe_goes_through_an_epoch(name, folder):
    recipe = find_recipe(name)
    if recipe.data == "digits":
        recipe = closed(recipe)
    with torch.device("meta"):
        spec = input_spec(recipe, build_model(recipe.model))
    data = load_images(recipe.data if recipe.data == "digits" else f"folder:{folder}", spec, recipe.augment)
    task = Classification(dataclasses.replace(recipe, batch_size=len(data.train) // 4 * 2, workers=2), data, spec)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * spec.input_size[0], len(data.classes)))
    batches = list(task.batches(0, 0, BatchShard(), CPU))
    assert len(batches) == 2
    for images, labels in batches:
        assert images.shape[1:] == spec.input_size and images.isfinite().all()
        assert task.loss(model, (images, labels))[0].isfinite()
    assert 0 <= task.evaluate(model, BatchShard(), CPU)["top1"] <= 100
    assert not task.undecodable


@pytest.mark.parametrize("name", first_of_each("detection", "augment"))
def test_a_detectors_recipe_goes_through_an_epoch(name, tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))
    coco = write_coco(tmp_path / "coco", train=6, val=1)
    task = make_task(coco, batch_size=2, workers=2, augment=find_recipe(name).augment)
    for epoch in range(2):
        for images, targets in task.batches(epoch, 0, BatchShard(), CPU):
            for image, target in zip(images, targets, strict=True):
                assert image.isfinite().all() and target["masks"].shape[1:] == image.shape[1:]


@pytest.mark.parametrize("name", first_of_each("segmentation", "augment", "scale", "crop_size"))
def test_a_segmenters_recipe_goes_through_an_epoch(name, tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))
    data = write_camvid(tmp_path / "camvid", train=6, val=1, size=(60, 80))
    recipe = override(
        find_recipe(name),
        [f"data=camvid:{data}", "model.args.num_classes=3", "workers=2", "batch_size=2", "epoch_updates=3"],
    )
    for images, labels in build_task(recipe)[1].batches(0, 0, BatchShard(), CPU):
        assert images.shape == (2, 3, recipe.crop_size, recipe.crop_size) == (2, 3, *labels.shape[1:])
        assert images.isfinite().all()
