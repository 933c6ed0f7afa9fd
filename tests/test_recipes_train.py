"""Every shipped recipe takes two updates, on made-up data."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from coco_images import write_coco
from PIL import Image
from recipe_names import AT_SCALE, DETECTION, LANGUAGE, SEGMENTATION, SMALL, plain
from run_folders import closed
from segmentation_images import CLASSES as PIXEL_CLASSES
from segmentation_images import write_camvid

from stepsnet.engine.distributed import DistributedContext
from stepsnet.engine.train import train
from stepsnet.engine.train_state import TrainState
from stepsnet.models import FAMILIES
from stepsnet.models.build import build_model
from stepsnet.output.console import Lines
from stepsnet.recipes import find_recipe
from stepsnet.run_folder.checkpoint import load_weights
from stepsnet.runs.train import train_run
from stepsnet.settings.config import ModelSpec
from stepsnet.settings.overrides import override
from stepsnet.tasks import build_task

CLASSES = 3
ALONE = DistributedContext(0, 1, torch.device("cpu"))


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """ImageNet's layout with three classes: 9 images of noise to train on, 8 of which make two updates."""
    root, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, each in (("train", 3), ("val", 1)):
        for label in range(CLASSES):
            place = root / split / f"class{label}"
            place.mkdir(parents=True)
            for number in range(each):
                pixels = random.integers(0, 256, (48, 56, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.jpg")
    return root


# What a run is told besides its recipe, and how a model is shrunk for it: 32 pixels instead of 224, which are four
# tokens in a DeiT, and in Swin windows of 2×2 or 1. Blocks and steps are all there. A model of each family runs at its
# own widths, through `train_run`, which is a row a family; the others with widths of 8, 16, … in the same order and
# one head, since at full width the -S and -B models take 10 to 20 seconds each on a core.
SHORT = ["epochs=1", "batch_size=4", "workers=0", "device=cpu", "log_interval=1", "warmup_epochs=0"]
AT_FULL_WIDTH = ["steps_resnet18", "steps_deit_tiny", "steps_swin_tiny", "steps_swinpp_tiny"]


def short(recipe, images):
    overrides = [*SHORT, f"model.args.num_classes={CLASSES}"]
    overrides.append("img_size=32" if "resnet" in recipe.model.name else "model.args.img_size=32")
    if "swin" in recipe.model.name:
        overrides.append("model.args.window_size=2")
    if recipe.clean_samples:
        overrides.append("clean_samples=3")
    return override(dataclasses.replace(recipe, data=f"folder:{images}"), overrides)


def flat(value):
    return [leaf for part in value for leaf in flat(part)] if isinstance(value, (list, tuple)) else [value]


def mapped(function, value):
    return [mapped(function, part) for part in value] if isinstance(value, (list, tuple)) else function(value)


def narrow(recipe):
    """The model with widths of 8, 16, … in their order, and one head."""
    name, args = recipe.model.name, dict(recipe.model.args)
    family = next((family for family in FAMILIES if name in family.ARCHITECTURES), None)
    if "resnet" in name:
        return recipe  # widths are of the blocks and their stage; these are small enough
    if family is None:  # timm's own
        args |= {"embed_dim": 8, "num_heads": [1] * 4 if "swin" in name else 1}
    else:
        widths = args.get("widths") or family.ARCHITECTURES[name]["widths"]
        order = sorted(set(flat(widths)))
        args["widths"] = mapped(lambda width: 8 * (order.index(width) + 1), widths)
        args["num_heads"] = mapped(lambda width: 1, widths)
    return dataclasses.replace(recipe, model=ModelSpec(name, args))


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def first_of_a_kind(names):
    """The rows without those that repeat another's model and settings, as (12, 6, 6) does in two tables."""
    kept = {}
    for name in names:
        recipe = dataclasses.replace(find_recipe(name), name="any", title="", expected={}, baseline=None)
        kept.setdefault(json.dumps(plain(recipe), sort_keys=True), name)
    assert len(kept) < len(names)  # another field that only describes a row would make all of them differ
    return list(kept.values())


def take_two_updates(recipe, folder):
    torch.manual_seed(recipe.seed)
    model, task = build_task(recipe)
    before = {key: value.clone() for key, value in model.named_parameters()}
    train(model, task, recipe, folder, ALONE, report=lambda event: None)
    assert len(losses(folder)) == 2 and np.isfinite(losses(folder)).all()
    assert not all(torch.equal(before[key], value) for key, value in model.named_parameters())
    assert all(value.isfinite().all() for value in model.parameters())


@pytest.fixture
def without_checkpoints(monkeypatch):
    """tests/test_engine.py and the runs by `train_run` save."""
    monkeypatch.setattr(TrainState, "save", lambda *_: None)


@pytest.mark.parametrize(
    "name", [name for name in first_of_a_kind(AT_SCALE) if name.removeprefix("imagenet/") not in AT_FULL_WIDTH]
)
def test_two_updates(name, images, tmp_path, without_checkpoints):
    take_two_updates(short(narrow(find_recipe(name)), images), tmp_path)


@pytest.mark.parametrize("name", AT_FULL_WIDTH)
def test_two_updates_at_full_width(name, images, tmp_path):
    recipe = short(find_recipe(f"imagenet/{name}"), images)
    torch.manual_seed(recipe.seed)
    before = build_model(recipe.model).state_dict()
    with Lines() as display:
        summary = train_run(recipe, tmp_path / "run", display)
    assert len(losses(tmp_path / "run")) == 2 and np.isfinite(losses(tmp_path / "run")).all()
    assert summary["recipe"] == recipe.name and summary["expected"] == recipe.expected
    after = load_weights(tmp_path / "run" / "model.safetensors")
    assert before.keys() == after.keys()
    assert not all(torch.equal(before[key], after[key]) for key, _ in build_model(recipe.model).named_parameters())


def without_pages(monkeypatch):
    """Reports and examples of what a model does have tests of their own, and take most of the time of a short run."""
    monkeypatch.setattr("stepsnet.runs.train.report_or_tell", lambda *_: None)
    monkeypatch.setattr("stepsnet.runs.train.inspect_run", lambda *_: None)


@pytest.mark.parametrize("name", LANGUAGE)
def test_language_recipes_take_two_updates(name, tmp_path, monkeypatch):
    """As they are but for the text and the vocabulary that it gives."""
    without_pages(monkeypatch)
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))
    words = np.random.default_rng(0).choice(["step", "by", "the", "network", "widens\n"], 4000)
    data = tmp_path / "text" if find_recipe(name).score_test else tmp_path / "text.txt"
    if data.suffix:
        data.write_text(" ".join(words))
    else:
        data.mkdir()
        for split, part in zip(("train", "valid", "test"), np.split(words, [3200, 3600])):
            (data / f"{split}.txt").write_text(" ".join(part))
    sizes = ["model.args.vocab_size=280"] + ["vocab_size=270"] * (find_recipe(name).tokenizer == "bpe")
    recipe = override(find_recipe(name), [*SHORT, *sizes, "epoch_updates=2", f"data=text:{data}"])
    with Lines() as display:
        summary = train_run(recipe, tmp_path / "run", display)
    assert len(losses(tmp_path / "run")) == 2 and np.isfinite(losses(tmp_path / "run")).all()
    assert summary["expected"] == recipe.expected and summary["metrics"]["val_word_perplexity"] > 1


WHOLE = ["digits/tiny", "digits/deep", "cifar10/swin", "images/small"]


@pytest.mark.parametrize("name", WHOLE)
def test_small_recipes_are_run(name, images, tmp_path, monkeypatch):
    """The recipes as they are, on eight of the digits, or of the made-up images at CIFAR's size."""
    without_pages(monkeypatch)
    recipe = override(find_recipe(name), [*SHORT, "train_samples=8"])
    if name.startswith(("cifar", "images")):
        recipe = override(recipe, [f"data=folder:{images}", "img_size=32"])
    with Lines() as display:
        train_run(recipe, tmp_path / "run", display)
    assert len(losses(tmp_path / "run")) == 2 and np.isfinite(losses(tmp_path / "run")).all()


@pytest.mark.parametrize("name", [name for name in first_of_a_kind(SMALL) if name not in WHOLE])
def test_small_recipes_take_two_updates(name, images, tmp_path, without_checkpoints):
    """The others on the made-up images at the size of theirs; their residual stream is not measured."""
    size = 8 if name.startswith("digits") else 32
    short = [*SHORT, "train_samples=8", f"data=folder:{images}", f"img_size={size}", "stream_epochs=0"]
    take_two_updates(closed(override(find_recipe(name), short)), tmp_path)


@pytest.fixture(scope="session")
def coco(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp("coco") / "data", train=4, val=1)


@pytest.mark.parametrize("name", DETECTION)
def test_detection_recipes_take_two_updates(name, coco, tmp_path, monkeypatch):
    """Every block, at widths of 8, 16, … and on small images; heads of a few channels."""
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(TrainState, "save", lambda *_: None)
    recipe = find_recipe(name)
    args = recipe.model.args
    body = narrow(dataclasses.replace(recipe, model=ModelSpec(args["backbone"], args["backbone_args"]))).model.args
    args |= {
        "backbone_args": body,
        "num_classes": 2,
        "size": 64,
        "max_size": 96,
        "channels": 8,
        "hidden": 8,
        "samples": 8,
    }
    augment = dataclasses.replace(recipe.augment, sizes=(48, 64), max_size=96, crop_sizes=(64,), crop_range=(40, 64))
    recipe = dataclasses.replace(recipe, augment=augment, data=f"coco:{coco}", amp_dtype="float32")
    recipe = override(recipe, ["epochs=1", "batch_size=2", *SHORT[2:]])
    torch.manual_seed(recipe.seed)
    model, task = build_task(recipe)
    train(model, task, recipe, tmp_path, ALONE, report=lambda event: None)
    assert len(losses(tmp_path)) == 2 and np.isfinite(losses(tmp_path)).all()


@pytest.mark.parametrize("name", SEGMENTATION)
def test_segmentation_recipes_take_two_updates(name, tmp_path, monkeypatch):
    """On made-up images of CamVid's layout and small crops; those of the paper with a narrow decoder."""
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(TrainState, "save", lambda *_: None)
    data = write_camvid(tmp_path / "camvid", train=4, val=1)
    small = [*SHORT, "batch_size=2", "epoch_updates=2", "crop_size=32", "scale=[40,24]", "stream_epochs=0"]
    classes = f"model.args.num_classes={len(PIXEL_CLASSES)}"
    recipe = override(find_recipe(name), [*small, f"data=camvid:{data}", classes, "model.args.channels=16"])
    torch.manual_seed(recipe.seed)
    model, task = build_task(recipe)
    train(model, task, recipe, tmp_path, ALONE, report=lambda event: None)
    assert len(losses(tmp_path)) == 2 and np.isfinite(losses(tmp_path)).all()
