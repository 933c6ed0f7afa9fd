"""What is trained on, what settings are chosen by, and what is opened last."""

import dataclasses
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.model_selection import train_test_split

from stepsnet.cli import main
from stepsnet.engine.task import BatchShard
from stepsnet.errors import UserError
from stepsnet.metrics import find_metric, format_metric, headline, higher_is_better, metric_label
from stepsnet.output.console import Display
from stepsnet.recipes import find_recipe
from stepsnet.runs.evaluate import evaluate_run
from stepsnet.runs.train import train_run
from stepsnet.settings.overrides import override
from stepsnet.tasks import build_task
from stepsnet.tasks.classification.held_out import InMemory, divide
from stepsnet.tasks.language.data import load_text
from stepsnet.tasks.splits import divided_for, split_of

CPU = torch.device("cpu")
LABELS = [0] * 40 + [1] * 20 + [2] * 60


@pytest.fixture
def pictures(tmp_path):
    """Two classes of ten training pictures, and a test split that nobody can decode."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        for split in ("train", "test"):
            (tmp_path / split / name).mkdir(parents=True)
        for index in range(10):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(
                tmp_path / f"train/{name}/{index}.png"
            )
        (tmp_path / f"test/{name}/0.png").write_bytes(b"not a picture")
    return tmp_path


def recipe_on(pictures, *changes):
    recipe = find_recipe("cifar10/shallow")
    small = [
        "model.args.depths=[1,1,1]",
        "model.args.img_size=8",
        "model.args.patch_size=4",
        "model.args.num_classes=2",
    ]
    small += ["epochs=1", "batch_size=4", "train_samples=null", "holdout=4", f"data=folder:{pictures}"]
    return override(recipe, [*small, *changes])


def test_the_division_is_stratified_disjoint_and_a_function_of_the_labels():
    parts = divide(LABELS, 7, "val", holdout=12, clean_samples=9)
    labels = np.asarray(LABELS)
    assert np.bincount(labels[parts.evaluated]).tolist() == [4, 2, 6] and parts.of_training
    assert sorted([*parts.train, *parts.evaluated]) == list(range(120))
    assert set(parts.clean) <= set(parts.train) and np.bincount(labels[parts.clean]).tolist() == [3, 3, 3]
    again = divide(LABELS, 7, "val", holdout=12)
    assert np.array_equal(again.evaluated, parts.evaluated)
    test = divide(LABELS, 7, "test", holdout=12)
    assert test.evaluated.tolist() == list(range(7)) and not test.of_training
    train = divide(LABELS, 7, "train", holdout=12)
    assert np.array_equal(train.train, train.evaluated) and np.array_equal(train.train, parts.train)
    alone = divide(LABELS, 7, "val", train_samples=6)
    assert np.bincount(labels[alone.train]).tolist() == [2, 2, 2] and len(alone.evaluated) == 7


def test_a_class_of_one_image_is_trained_on_and_the_others_are_divided_as_without_it():
    """As in data of a long tail, of which scikit-learn cannot stratify the classes of one."""
    kept, aside = train_test_split(np.arange(len(LABELS)), test_size=12, random_state=0, stratify=LABELS)
    plain = divide(LABELS, 7, "val", holdout=12)
    assert plain.train.tolist() == sorted(kept) and plain.evaluated.tolist() == sorted(aside)
    tail = divide([3, *LABELS, 4], 7, "val", holdout=12)
    assert tail.evaluated.tolist() == [index + 1 for index in sorted(aside)]
    assert tail.train.tolist() == [0, *(index + 1 for index in sorted(kept)), 121]
    for count in (2, 118):
        expected = "expected 3 to 117 of the 122 training images, of which 2 are the only ones of their class"
        with pytest.raises(UserError, match=f"holdout: got {count}, {expected}"):
            divide([3, *LABELS, 4], 7, "val", holdout=count)
    for count in (1, 3):
        with pytest.raises(UserError, match=f"holdout: got {count}, .* 3 training images, of which 3 are the only"):
            divide([0, 1, 2], 7, "val", holdout=count)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"split": "test"}, "expected a recipe with holdout"),
        ({"split": "val", "holdout": 2}, "expected 3 to 117 of the 120"),
        ({"split": "val", "holdout": 119}, "expected 3 to 117"),
        (
            {"split": "val", "holdout": 20, "train_samples": 101},
            "train_samples: got 101, expected 1 to 100, the number",
        ),
        ({"split": "val", "clean_samples": 121}, "clean_samples: got 121, expected 1 to 120, the number"),
    ],
)
def test_a_part_that_is_not_there_is_refused(settings, words):
    with pytest.raises(UserError, match=words):
        divide(LABELS, 7, **settings)


def test_a_split_is_named_behind_the_data():
    assert split_of("folder:a@b/c@test") == ("folder:a@b/c", "test")
    assert split_of("folder:a@b") == ("folder:a@b", "val") and split_of("digits") == ("digits", "val")


def test_the_test_split_is_opened_at_the_end_and_not_before(pictures, tmp_path):
    summary = train_run(recipe_on(pictures, "clean_samples=6"), tmp_path / "run", Display())
    assert summary["split"] == "4 of train" and summary["samples"] == {"train": 16, "evaluated": 4}
    assert {"val_top1", "train_clean_loss", "train_clean_top1"} <= summary["metrics"].keys()
    assert not any(key.startswith("test_") for key in summary["metrics"])
    assert (summary["lr"], summary["batch_size"], summary["data"]) == (1e-3, 4, f"folder:{pictures.name}")
    with pytest.raises(UserError, match="cannot be decoded"):
        train_run(recipe_on(pictures, "score_test=true", "max_undecodable=0"), tmp_path / "scored", Display())
    assert (tmp_path / "scored" / "model.safetensors").exists()  # what was trained is there, whatever the test split is
    for name in ("cat", "dog"):
        Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(pictures / f"test/{name}/0.png")
    resumed = train_run(
        recipe_on(pictures, "score_test=true", "max_undecodable=0"), tmp_path / "scored", Display(), True
    )
    assert resumed["metrics"]["test_top1"] == 50.0  # two equal pictures of two classes
    assert resumed["test"]["samples"]["evaluated"] == 2 and not resumed["test"]["undecodable"]
    (pictures / "test/dog/0.png").write_text("this is a text")
    noted = []
    display = SimpleNamespace(show=lambda event: None, note=lambda run, text: noted.append(text))
    spoiled = train_run(recipe_on(pictures, "score_test=true"), tmp_path / "spoiled", display)
    assert spoiled["test"]["samples"]["evaluated"] == spoiled["test"]["undecodable"] == 1 and not spoiled["undecodable"]
    assert "test: the metrics cover 1 of the 2 images to evaluate, none of them of dog" in noted
    Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(pictures / "test/dog/0.png")
    (pictures / "test/dog/0.png").rename(pictures / "test/cat/1.heic")
    (pictures / "test/loose.png").touch()
    noted.clear()
    train_run(recipe_on(pictures, "score_test=true"), tmp_path / "uncovered", display)
    assert "test: left out 1 file (.heic) and 1 image beside the class folders in test" in noted
    assert "test: no evaluated images of dog: the metrics cover only the other classes" in noted
    (pictures / "test/cat/1.heic").rename(pictures / "test/dog/0.png")
    (pictures / "test/loose.png").unlink()
    named = recipe_on(pictures, "score_test=true", f"data=folder:{pictures}@val")
    assert train_run(named, tmp_path / "named", Display())["metrics"]["test_top1"] == 50.0
    assert resumed["metrics"]["val_top1"] == summary["metrics"]["val_top1"]
    assert evaluate_run(tmp_path / "run", f"folder:{pictures}@test")["top1"] == 50.0
    train = evaluate_run(tmp_path / "run", f"folder:{pictures}@train")
    assert train.keys() == {"loss", "top1", "top5"}


def test_other_data_may_have_fewer_images_to_train_on(pictures, tmp_path):
    changes = ["holdout=null", "train_samples=12", "batch_size=12", "clean_samples=12"]
    for name in ("cat", "dog"):
        Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(pictures / f"test/{name}/0.png")
    train_run(recipe_on(pictures, *changes), tmp_path / "run", Display())
    other = tmp_path / "other"
    for name in ("cat", "dog"):
        for split in ("train", "val"):
            (other / split / name).mkdir(parents=True)
            Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(other / split / name / "0.png")
    assert evaluate_run(tmp_path / "run", f"folder:{other}")["top1"] == 50.0
    with pytest.raises(UserError, match="train_samples: got 12, expected 1 to 2, the number of training images"):
        train_run(recipe_on(other, *changes), tmp_path / "new", Display())


def test_other_data_are_divided_as_they_come(pictures, tmp_path, capsys):
    """Of their training split nothing was held out; and where the same data have moved, the same part is."""
    run, other, moved = tmp_path / "run", tmp_path / "other", tmp_path / "elsewhere" / pictures.name
    for name in ("cat", "dog"):
        Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(pictures / f"test/{name}/0.png")
        for split in ("train", "val", "test"):
            (other / split / name).mkdir(parents=True)
            Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(other / split / name / "0.png")
    metrics = train_run(recipe_on(pictures, "holdout=4"), run, Display())["metrics"]
    for split in ("val", "test"):
        assert evaluate_run(run, f"folder:{other}@{split}")["top1"] == 50.0
        said = f"stepsnet: folder:{other} keeps its own splits: holdout 4 applies only to folder:{pictures}"
        assert said in capsys.readouterr().err
    shutil.copytree(pictures, moved)
    for data in (None, f"folder:{moved}", str(moved), f"{moved}/"):
        assert evaluate_run(run, data)["loss"] == pytest.approx(metrics["val_loss"])
        said = f"stepsnet: {data} is taken to be folder:{pictures} in a new place: holdout 4 applies to it too\n"
        assert capsys.readouterr().err == (said if data else "")
    _, task = build_task(dataclasses.replace(recipe_on(pictures, "holdout=4"), score_test=True), f"folder:{other}", run)
    assert task.facts()["split"] == "val"


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        ("folder:a/cats", "folder:/b/cats/", True),
        ("folder:a/cats", "b/cats", True),
        ("folder:a/cats", "folder:a/dogs", False),
        ("folder:a/cats", "wds:b/cats", False),
        ("cifar10:a", "cifar10:/b", True),
        ("cifar10:a", "cifar100:a", False),
        ("hfds:me/cats", "hfds:you/cats", False),
        ("hfds:/a/cats", "hfds:/b/cats", True),
        ("text:a.txt", "text:/b/a.txt", True),
    ],
)
def test_data_that_have_moved_are_known_by_kind_and_name(before, now, same):
    recipe = dataclasses.replace(find_recipe("cifar10/deep"), data=before, holdout=4)
    assert (divided_for(recipe, f"{now}@val")[0].holdout == 4) == same


def test_pictures_in_memory_give_the_same_batches(pictures):
    kept, read = (build_task(recipe_on(pictures, f"cache={cache}"))[1] for cache in ("memory", "null"))
    for epoch in (0, 1):
        ours, theirs = (list(task.batches(epoch, 0, BatchShard(), CPU)) for task in (kept, read))
        assert all(torch.equal(a, b) for one, other in zip(ours, theirs) for a, b in zip(one, other))
    for file in pictures.glob("train/*/*.png"):
        file.unlink()
    assert len(list(kept.batches(2, 0, BatchShard(), CPU))) == 4


def test_an_evaluation_does_not_decode_what_was_trained_on(pictures, tmp_path, monkeypatch):
    recipe, read = recipe_on(pictures, "cache=memory"), []
    monkeypatch.setattr(
        InMemory,
        "__init__",
        lambda self, images, indices, own=InMemory.__init__: (read.append(len(indices)), own(self, images, indices))[1],
    )
    build_task(recipe)
    for_training = sum(read)
    read.clear()
    _, task = build_task(recipe, run=tmp_path)
    assert sum(read) == len(task.data.val) < for_training


def test_clean_samples_are_scored_as_evaluation_sees_them(pictures):
    task = build_task(recipe_on(pictures, "clean_samples=16"))[1]
    model = build_task(recipe_on(pictures))[0].eval()
    scores = task.evaluate(model, BatchShard(), CPU)
    alone = build_task(recipe_on(pictures), f"folder:{pictures}@train")[1].evaluate(model, BatchShard(), CPU)
    assert scores["train_clean_loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert scores["train_clean_top1"] == alone["top1"]


def test_a_training_that_validates_on_another_split_has_clean_samples_and_its_images_in_memory(pictures):
    for name in ("cat", "dog"):
        Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(pictures / f"test/{name}/0.png")
    for split in ("test", "train"):
        recipe = recipe_on(pictures, f"data=folder:{pictures}@{split}", "cache=memory", "clean_samples=6")
        _, task = build_task(recipe)
        assert len(task.data.clean) == 6 and set(task.data.train.images.kept) >= set(task.data.train.indices)


def test_a_text_gives_three_parts(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))
    text = "".join(chr(97 + i % 26) for i in range(1000))
    (tmp_path / "text.txt").write_text(text)
    splits = load_text(f"text:{tmp_path / 'text.txt'}", "characters", None, holdout=1 / 9).splits
    assert {name: split.characters for name, split in splits.items()} == {"train": 800, "val": 100, "test": 100}
    whole = load_text(f"text:{tmp_path / 'text.txt'}", "characters", None).splits
    assert np.array_equal(splits["test"].tokens, whole["val"].tokens)
    with pytest.raises(UserError, match="holdout: got 1\\.5"):
        load_text(f"text:{tmp_path / 'text.txt'}", "characters", None, holdout=1.5)
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.txt").write_text(text)
    with pytest.raises(UserError, match="has a test split of its own"):
        load_text(f"text:{tmp_path}", "characters", None, holdout=0.1)


def test_a_language_model_scores_its_training_text_and_the_test_split(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 60)
    changes = ["model.args.widths=[16]", "model.args.depths=[1]", "model.args.num_attention_heads=[1]", "epochs=1"]
    changes += ["epoch_updates=3", "seq_len=16", "batch_size=4", "holdout=0.1111", "clean_samples=8", "score_test=true"]
    recipe = override(find_recipe("tinyshakespeare/shallow"), changes)
    recipe = dataclasses.replace(recipe, data=f"text:{tmp_path / 'text.txt'}")
    metrics = train_run(recipe, tmp_path / "run", Display())["metrics"]
    assert {"val_loss", "train_clean_loss", "test_loss", "test_bits_per_character"} <= metrics.keys()
    (tmp_path / "other.txt").write_text("to be or not to be, that is the ")  # less than a batch
    other = evaluate_run(tmp_path / "run", f"text:{tmp_path / 'other.txt'}")
    assert "loss" in other and "train_clean_loss" not in other  # the run was not trained on it
    assert "scored is the whole of" in capsys.readouterr().err
    (tmp_path / "other.txt").write_text("that is the question. to be or not to be, that is the ")
    assert evaluate_run(tmp_path / "run", f"text:{tmp_path / 'other.txt'}")["loss"] != other["loss"]
    last = evaluate_run(tmp_path / "run", f"text:{tmp_path / 'other.txt'}@val")["loss"]
    (tmp_path / "other.txt").write_text("not that is the question. or not to be, that is the ".rjust(54, "x"))
    assert evaluate_run(tmp_path / "run", f"text:{tmp_path / 'other.txt'}@val")["loss"] == last
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "test.txt").write_text("to be or not to be, that is the ")
    assert evaluate_run(tmp_path / "run", f"text:{tmp_path / 'folder'}@test") == other  # there is no train.txt
    assert metrics["test_loss"] == evaluate_run(tmp_path / "run", f"text:{tmp_path / 'text.txt'}@test")["loss"]
    assert main(["eval", str(tmp_path / "run")]) == 0
    shown = f"training loss, clean {metrics['train_clean_loss']:.3f}"
    assert capsys.readouterr().out.strip().endswith(shown)
    assert metric_label("train_clean_top1", with_unit=True) == "training top-1 accuracy, clean (%)"
    assert format_metric("train_clean_top1", 93) == "93.0%" and not higher_is_better("train_clean_loss")
    assert find_metric("train_clean_top1").is_detail and headline({"train_clean_top1": 93.0}, "train") == ""
