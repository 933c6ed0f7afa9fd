"""``DATA@test`` of a classifier: a split of its own, or the one that holdout leaves, in every kind of data."""

import numpy as np
import pytest
from classification_tasks import sample
from PIL import Image
from test_held_out import recipe_on
from test_sources import SPEC, png, shades, write_shard

from stepsnet.cli import main
from stepsnet.errors import UserError
from stepsnet.output.console import Display
from stepsnet.runs.evaluate import evaluate_run
from stepsnet.runs.train import train_run
from stepsnet.tasks import build_task
from stepsnet.tasks.classification import sources
from stepsnet.tasks.classification.data import load_images
from stepsnet.tasks.classification.sources import Arrays, Splits, register_source
from stepsnet.tasks.images import shape_of

SHADES = {"train": 10, "val": 60, "validation": 60, "valid": 60, "test": 110}
NOT_OF_ITS_OWN = "no test split besides the one to validate on; expected a recipe with holdout"


def write_folders(root, *splits, classes=("cat", "dog")):
    """Four pictures of each class to train on, and in another split as many as its name has letters."""
    for split in splits:
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for index in range(4 if split == "train" else len(split)):
                (root / split / name / f"{index}.png").write_bytes(png(SHADES[split] + label))
    return root


def seen(data, split=None, **settings):
    """The number of images that are evaluated, and their shades."""
    found = load_images(f"folder:{data}{f'@{split}' * bool(split)}", SPEC, **settings)
    images = [sample(found.val, 0, index, 0) for index in range(len(found.val))]
    assert [shade % 10 for shade in shades(image for image, _, _ in images)] == [label for _, label, _ in images]
    return found.evaluated, len(images), {shade // 10 * 10 for shade in shades(image for image, _, _ in images)}


@pytest.mark.parametrize("second", ["val", "validation", "valid"])
def test_a_folder_of_three_splits(second, tmp_path):
    root = write_folders(tmp_path, "train", second, "test")
    assert seen(root) == seen(root, "val") == ("val", 2 * len(second), {60})
    assert seen(root, "test") == ("test", 8, {110})
    assert seen(root, "train") == ("train", 8, {10})
    for split in (None, "val", "test", "train"):
        with pytest.raises(UserError, match="holdout: got 2, but the data set has a test split of its own, expected"):
            seen(root, split, holdout=2)


def test_with_two_splits_all_is_as_it_was(tmp_path):
    """CIFAR-10 in folders has train and test."""
    for second, shade in (("test", 110), ("val", 60)):
        root = write_folders(tmp_path / second, "train", second)
        assert seen(root) == ("val", 2 * len(second), {shade})
        assert seen(root, holdout=2) == ("2 of train", 2, {10})
        assert seen(root, "test", holdout=2) == ("test", 2 * len(second), {shade})
        assert seen(root, "train", holdout=2) == ("train", 6, {10})
        with pytest.raises(UserError, match=NOT_OF_ITS_OWN):
            seen(root, "test")


def test_pictures_without_labels_are_no_split(tmp_path):
    root = write_folders(tmp_path, "train", "val")
    (root / "test" / ".ipynb_checkpoints").mkdir(parents=True)
    (root / "test" / "1.png").write_bytes(png(0))
    assert seen(root, "test", holdout=2) == ("test", 6, {60})
    with pytest.raises(UserError, match=NOT_OF_ITS_OWN):
        seen(root, "test")


def test_pictures_without_labels_are_not_validated_on_either(tmp_path):
    """Kaggle's layout."""
    root = write_folders(tmp_path, "train")
    (root / "test").mkdir()
    (root / "test" / "1.png").write_bytes(png(0))
    expected = r"no folder val or .* or test with class folders, got test, train; a recipe with holdout=N validates on"
    with pytest.raises(UserError, match=expected):
        seen(root)
    assert seen(root, holdout=2) == ("2 of train", 2, {10})
    write_folders(root, "validation")
    assert seen(root) == ("val", 20, {60})


@pytest.mark.parametrize("kind", ["folder", "flat", "wds", "hfds"])
def test_a_training_split_alone_is_divided_by_holdout(kind, tmp_path, capsys):
    if kind == "wds":
        samples = [(f"{n:03}", {"png": png(10 + n % 2), "cls": str(n % 2).encode()}) for n in range(8)]
        write_shard(tmp_path / "set-train-00.tar", samples)
    else:
        write_folders(tmp_path, "train")
    if kind == "hfds":
        pytest.importorskip("datasets")
    data = f"{'folder' if kind == 'flat' else kind}:{tmp_path / 'train' if kind == 'flat' else tmp_path}"

    def counts(split, **settings):
        found = load_images(f"{data}@{split}", SPEC, **settings)
        return len(found.train), len(found.val), found.evaluated

    assert counts("val", holdout=2) == (6, 2, "2 of train")
    assert counts("train") == (8, 8, "train")
    with pytest.raises(UserError, match="a recipe with holdout=N validates on N"):
        counts("val")
    with pytest.raises(UserError, match="has no test split: with holdout, runs are validated on training images"):
        counts("test", holdout=2)
    if kind == "flat":
        left_out = load_images(data, SPEC, holdout=2).train.images.left_out
        assert (
            left_out
            == f"{tmp_path / 'train'} has no folder train: all of its 2 folders are read as classes to train on"
        )
        changes = ["epochs=1", "batch_size=2", "warmup_epochs=0"]
        asked = ["train", "cifar10/shallow", "--data", data, "--run", str(tmp_path / "run"), *changes, "img_size=16"]
        assert main([*asked, "holdout=null"]) == 2 and "holdout=N validates on N" in capsys.readouterr().err
        assert main([*asked, "holdout=2", "score_test=true"]) == 2
        assert "has no test split: with holdout" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_a_folder_of_data_sets_is_no_folder_of_classes(tmp_path):
    """Their pictures lie deeper; two folders with pictures could be classes, one of them could not."""
    for name in ("one", "other"):
        write_folders(tmp_path / name, "train", "val")
    with pytest.raises(UserError, match="has no folder train or val or validation or valid or test, got one, other"):
        seen(tmp_path, holdout=2)


def test_the_test_split_is_listed_when_it_is_scored(tmp_path):
    root = write_folders(tmp_path, "train", "val")
    write_folders(root, "test", classes=("cat", "gnu"))
    assert seen(root) == ("val", 6, {60})
    with pytest.raises(UserError, match=r"test/gnu: got images of a class that has no folder in .*train"):
        seen(root, "test")


def test_it_is_scored_when_the_training_has_ended(tmp_path):
    root = tmp_path / "data"
    for split, count in (("train", 8), ("val", 3), ("test", 5)):
        for name, shade in (("cat", 0), ("dog", 200)):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                picture = Image.new("RGB", (8, 8), (shade, 3 * index, 90))
                picture.save(root / split / name / f"{index}.png")
    changes = ["holdout=null", "score_test=true", "cache=memory", "clean_samples=0"]
    summary = train_run(recipe_on(root, *changes), tmp_path / "run", Display())
    assert summary["split"] == "val" and summary["samples"] == {"train": 16, "evaluated": 6}
    scores = evaluate_run(tmp_path / "run", f"folder:{root}@test")
    assert {f"test_{name}": value for name, value in scores.items()}.items() <= summary["metrics"].items()
    _, task = build_task(recipe_on(root, *changes), f"folder:{root}@test")
    assert task.facts()["samples"]["evaluated"] == 10 and task.facts()["split"] == "test"
    (root / "test").rename(tmp_path / "test")
    with pytest.raises(UserError, match=r"score_test: got true, but .* has no test split besides"):
        train_run(recipe_on(root, *changes), tmp_path / "other", Display())  # refused before the training
    assert not (tmp_path / "other").exists()


def test_shards_of_three_splits(tmp_path):
    for split, numbers in (("train", range(6)), ("val", range(6, 9)), ("test", range(12, 16))):
        samples = [(f"{n:03}", {"png": png(10 * n), "cls": str(n % 3).encode()}) for n in numbers]
        write_shard(tmp_path / f"set-{split}-00.tar", samples)

    def of(split, **settings):
        val = load_images(f"wds:{tmp_path}@{split}", SPEC, **settings).val
        return shades(sample(val, 0, index, 0)[0] for index in range(len(val)))

    assert of("val") == [60, 70, 80] and of("test") == [120, 130, 140, 150]
    with pytest.raises(UserError, match="holdout: got 3, but the data set has a test split of its own"):
        of("val", holdout=3)
    (tmp_path / "set-val-00.tar").unlink()
    assert of("val") == of("test", holdout=3) == [120, 130, 140, 150]
    with pytest.raises(UserError, match=NOT_OF_ITS_OWN):
        of("test")


def test_a_kind_of_the_users_may_have_three():
    pictures = np.zeros((6, 16, 16, 3), dtype=np.uint8)

    def split(count, label=1):
        return Arrays(pictures[:count], [0, *[label] * (count - 1)], Image.fromarray)

    def kind(**more):
        register_source("mine")(lambda path, mode: Splits(("a", "b"), split(4), split(3), **more))

    try:
        kind(test=lambda: split(5))
        sizes = {part: len(load_images(f"mine:x@{part}", SPEC).val) for part in ("train", "val", "test")}
        assert sizes == {"train": 4, "val": 3, "test": 5}
        kind(test=lambda: split(5, label=2))
        with pytest.raises(
            UserError, match="mine: got labels from 0 to 2 in test, expected the numbers of its 2 classes"
        ):
            load_images("mine:x@test", SPEC)
        kind(test=lambda: split(5, label="b"))
        with pytest.raises(UserError, match="mine: got labels such as '0' in test, expected the numbers of its 2"):
            load_images("mine:x@test", SPEC)
        with pytest.raises(UserError, match="data: got ndarray from read, expected a Pillow image"):
            shape_of(pictures[0])
        kind(test=split(5))
        with pytest.raises(UserError, match="mine: got Arrays as test, expected a function that opens it"):
            load_images("mine:x", SPEC)
        kind()
        with pytest.raises(UserError, match=NOT_OF_ITS_OWN):
            load_images("mine:x@test", SPEC)
    finally:
        sources.SOURCES.pop("mine", None)
