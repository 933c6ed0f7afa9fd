"""Segmentation's data: what is read, and what is refused before a run."""

import json
import shutil
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from segmentation_images import CLASSES, write_camvid, write_pair
from segmentation_tasks import Pointwise, batches, task_of, tiny_recipe
from test_coco_data import turn

from stepsnet.cli import main
from stepsnet.errors import UserError
from stepsnet.tasks import build_task
from stepsnet.tasks.images import open_stored
from stepsnet.tasks.segmentation import data as segmentation_data
from stepsnet.tasks.segmentation.data import IGNORED, load_pairs

pytestmark = pytest.mark.usefixtures("own_cache")


def test_ade20k_ignores_0_and_shifts_the_others(tmp_path):
    labels = np.array([[0, 1], [150, 2]])
    for split in ("training", "validation"):
        write_pair(tmp_path, split, "a", (2, 2), labels)
    data = load_pairs(f"ade20k:{tmp_path}")
    assert data.read(data.splits["val"].pairs[0])[1].tolist() == [[IGNORED, 0], [149, 1]]
    assert len(data.classes) == 150 and data.classes[0] == "class 1"
    names = [f"{n}\t0.1\t5\t6\t{f'name{n}, synonym'}" for n in range(1, 151)]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tName", *names]))
    assert load_pairs(f"ade20k:{tmp_path}").classes[149] == "name150"


def test_camvid_is_read_as_it_is(camvid):
    data = load_pairs(f"camvid:{camvid}")
    assert data.classes == CLASSES and list(data.splits) == ["train", "val"]
    assert data.splits["val"].sizes == ((24, 40), (28, 40), (24, 40))
    pair = data.splits["train"].pairs[2]
    image, labels = data.read(pair)
    assert np.array_equal(labels, np.asarray(Image.open(pair.annotation))) and (labels[:2] == IGNORED).all()
    assert np.array_equal(np.asarray(image), np.asarray(Image.open(pair.image)))


@pytest.mark.parametrize(
    ("ignored", "stored"),
    [
        (255, [0, 1, 2]),  # of the three classes
        (3, [0, 1, 2]),
        (0, [1, 2, 3]),
        ([0, 255], [1, 2, 3]),
        ([1, 3], [0, 2, 4]),
        ([], [0, 1, 2]),
    ],
)
def test_any_values_may_be_ignored_and_the_others_are_the_classes(tmp_path, ignored, stored):
    expected = {value: label for label, value in enumerate(stored)}
    expected |= dict.fromkeys(ignored if isinstance(ignored, list) else [ignored], IGNORED)
    for split in ("train", "val"):
        write_pair(tmp_path, split, "a", (1, len(expected)), np.array([[*expected]]))
    (tmp_path / "classes.json").write_text(json.dumps({"classes": CLASSES, "ignore_index": ignored}))
    data = load_pairs(f"folder:{tmp_path}")
    assert data.read(data.splits["val"].pairs[0])[1].tolist() == [[*expected.values()]]
    assert data.splits["train"].class_pixels == (1, 1, 1)
    assert np.flatnonzero(data.table >= 0).tolist() == sorted(expected)  # all others are mistakes


def test_the_layout_has_two_names(camvid):
    first, second = (load_pairs(f"{kind}:{camvid}") for kind in ("folder", "camvid"))
    assert first.splits == second.splits and first.classes == second.classes
    with pytest.raises(UserError, match=r"expected folder:PATH or ade20k:PATH or camvid:PATH.*folder"):
        load_pairs(f"foldr:{camvid}")


def spoil_label(root):
    file = root / "annotations" / "train" / "train3.png"
    labels = np.array(Image.open(file))
    labels[5, 7] = 77
    Image.fromarray(labels).save(file)


def spoil_size(root):
    file = root / "annotations" / "val" / "val1.png"
    Image.open(file).resize((20, 20)).save(file)


def spoil_mode(root):
    file = root / "annotations" / "val" / "val0.png"
    Image.open(file).convert("RGB").save(file)


def spoil_bytes(root):
    file = root / "images" / "train" / "train1.png"
    file.write_bytes(file.read_bytes()[:900])


def dangle(root):
    file = root / "annotations" / "val" / "val2.png"
    file.unlink()
    file.symlink_to(root / "nowhere.png")


SPOILT = {
    "dangling": (dangle, "annotations/val/val2.png is missing (No such file"),
    "half_character": (
        lambda root: (root / "classes.json").write_text('{"classes": ["a", "\\ud83d"]}'),
        "2 to 255 distinct names",
    ),
    "label": (spoil_label, "annotations/train/train3.png: got the label 77 in row 5, column 7 (1 pixels have no"),
    "size": (spoil_size, "annotations/val/val1.png: got 20×20 pixels, expected its image's 40×28"),
    "mode": (spoil_mode, "annotations/val/val0.png: got Pillow's mode RGB, expected one channel"),
    "truncated": (spoil_bytes, "cannot read {root}/images/train/train1.png as an image: "),
    "text": (lambda root: (root / "images/train/train2.png").write_text("hello"), "train2.png as an image: cannot"),
    "missing": (
        lambda root: (root / "annotations/val/val2.png").unlink(),
        "images/val/val2.png has no annotation, exp",
    ),
    "alone": (lambda root: (root / "images/val/val2.png").unlink(), "annotations/val/val2.png has no image"),
    "twice": (
        lambda root: shutil.copy(root / "images/val/val2.png", root / "images/val/val2.jpg"),
        "images/val has 2 images named val2, expected one",
    ),
    "no_split": (lambda root: shutil.rmtree(root / "images/val"), "images/val is not a folder, expected the images"),
    "empty": (
        lambda root: [file.unlink() for file in root.glob("*/train/*")],
        "images/train is empty, expected images",
    ),
    "no_classes": (lambda root: (root / "classes.json").unlink(), "classes.json: No such file or directory"),
    "classes": (lambda root: (root / "classes.json").write_text('{"classes": ["a", "a"]}'), "2 to 255 distinct names"),
    "ignored": (
        lambda root: (root / "classes.json").write_text('{"classes": ["a", "b"], "ignore_index": 256}'),
        "ignore_index in {root}/classes.json: got 256, expected a number from 0 to 255 or a list of them",
    ),
    "ignored_text": (
        lambda root: (root / "classes.json").write_text('{"classes": ["a", "b"], "ignore_index": [0, "255"]}'),
        "ignore_index in {root}/classes.json: got [0, '255'], expected a number from 0 to 255 or a list of them",
    ),
    "too_many_ignored": (
        lambda root: (root / "classes.json").write_text(
            json.dumps({"classes": ["a", "b"], "ignore_index": [*range(255)]})
        ),
        "ignore_index in {root}/classes.json: got 255 beside 2 classes, expected at most 254",
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_wrong_is_one_line_that_names_the_file(camvid, what):
    spoil, expected = SPOILT[what]
    spoil(camvid)
    with pytest.raises(UserError) as raised:
        load_pairs(f"camvid:{camvid}")
    assert "\n" not in str(raised.value) and expected.replace("{root}", str(camvid)) in str(raised.value)


def test_masks_of_one_bit_are_labels(camvid):
    (camvid / "classes.json").write_text('{"classes": ["ground", "thing"]}')
    expected = {}
    for file in sorted((camvid / "annotations").rglob("*.png")):
        expected[file] = np.array(Image.open(file)) % 2 > 0
        Image.fromarray(expected[file]).save(file)
        assert Image.open(file).mode == "1"
    data = load_pairs(f"camvid:{camvid}")
    for pair in data.splits["train"].pairs:
        assert np.array_equal(data.read(pair)[1], expected[pair.annotation])


def test_a_mistake_comes_before_the_run_folder(camvid, capsys):
    spoil_label(camvid)
    status = main(["train", "camvid/tiny", "--data", f"camvid:{camvid}", "--run", str(camvid.parent / "run")])
    err = capsys.readouterr().err
    assert status == 2 and len(err.splitlines()) == 1 and "got the label 77" in err
    assert not (camvid.parent / "run").exists()


def test_the_check_is_remembered_until_a_file_changes(camvid, monkeypatch):
    looked = []
    measure = segmentation_data._measure
    monkeypatch.setattr(segmentation_data, "_measure", lambda *args, **kw: looked.append(1) or measure(*args, **kw))
    first = load_pairs(f"camvid:{camvid}")
    assert len(looked) == 9
    again = load_pairs(f"camvid:{camvid}")
    assert len(looked) == 9 and again.splits == first.splits
    spoil_label(camvid)
    with pytest.raises(UserError, match="got the label 77"):
        load_pairs(f"camvid:{camvid}")
    with pytest.raises(UserError, match="got the label 77"):  # nothing wrong is remembered as right
        load_pairs(f"camvid:{camvid}")


def test_an_annotation_without_a_label_is_told_and_kept(camvid):
    write_pair(camvid, "train", "blank", (24, 40), np.full((24, 40), 255))
    task = task_of(camvid)
    (line,) = task.notices()
    assert "annotations/train/blank.png" in line and task.notices() == []
    assert task.facts()["unlabelled"] == 1 and len(task.samples) == 7
    images, labels = torch.zeros(2, 3, 8, 8), torch.full((2, 8, 8), IGNORED)
    loss, others = task.loss(Pointwise(), (images, labels))
    assert loss == 0 and others["pixel_accuracy"] == 0


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.args.num_classes=4"], "model.args.num_classes: got 4, expected the data's 3"),
        (['model={"name": "test_vit", "args": {}}'], "model: got 'test_vit', expected upernet for segmentation"),
        (["batch_size=7"], "batch_size: got 7, expected 1 to 6, the number of training images"),
        (["batch_size=1"], "batch_size: got 1 per forward pass, expected at least 2 images for batch norm"),
        (["eval_window=16", "eval_stride=17"], "eval_stride: got 17, expected at most eval_window, 16"),
        (["eval_stride=4"], "eval_stride: got 4, expected none without eval_window"),
        (["eval_scales=[]"], "eval_scales: got [], expected at least 1 of them"),
        (["augment.scale_range=[2,1]"], "augment.scale_range: got 2.0, 1.0, expected the smaller one first"),
        (["model.args.backbone=swin_tny"], "backbone: got 'swin_tny', expected a timm or StepsNet model"),
        (["model.args.width=3"], "got an unknown argument 'width' (3), expected an argument of UPerNet"),
        (["backbone=nowhere"], "backbone: got nowhere, expected the folder of a run, a checkpoint file or timm:NAME"),
    ],
)
def test_settings_that_do_not_fit_are_refused(camvid, overrides, expected):
    with pytest.raises(UserError) as raised:
        model, task = build_task(tiny_recipe(camvid, *overrides))
        task.load_pretrained(model)
        batches(task)
    assert expected in str(raised.value)
    with pytest.raises(UserError, match="has no split 'test', expected one of train, val; with holdout in the"):
        build_task(tiny_recipe(camvid), f"camvid:{camvid}@test")


@pytest.mark.parametrize("bits", [2, 4])
def test_labels_of_fewer_bits_are_those_that_are_stored(bits, tmp_path):
    values = np.arange(4, dtype=np.uint8).repeat(8)[None].repeat(6, 0)  # (6, 32)
    per_byte = 8 // bits
    packed = (values.reshape(6, -1, per_byte) << np.arange(8 - bits, -1, -bits)).sum(-1).astype(np.uint8)
    header = struct.pack(">IIBBBBB", 32, 6, bits, 0, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in packed)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    made = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    (tmp_path / "labels.png").write_bytes(b"\x89PNG\r\n\x1a\n" + made)
    stored = open_stored(tmp_path / "labels.png")
    assert stored.mode == "L" and np.array_equal(np.asarray(stored), values)


def test_images_are_held_out_for_validation(tmp_path):
    """The data's val split is then the test split; one with a test split of its own has no need of it."""

    def names(split):
        return [pair.image.stem for pair in split.pairs]

    data = f"camvid:{write_camvid(tmp_path / 'camvid')}"
    whole, parts = load_pairs(data), load_pairs(data, holdout=2)
    assert names(parts.splits["test"]) == names(whole.splits["val"])
    assert len(names(parts.splits["val"])) == 2
    assert sorted(names(parts.splits["train"]) + names(parts.splits["val"])) == names(whole.splits["train"])
    assert names(load_pairs(data, only="val", holdout=2).splits["val"]) == names(parts.splits["val"])
    _, task = build_task(tiny_recipe(tmp_path / "camvid", "holdout=2", "score_test=true"))
    assert len(task.samples) == 4 and task.facts()["images"] == {"train": 4, "val": 2, "test": 3}
    with pytest.raises(UserError, match="has no split 'test'"):
        build_task(tiny_recipe(tmp_path / "camvid", "score_test=true"))
    (tmp_path / "camvid" / "images" / "test").mkdir()
    (tmp_path / "camvid" / "images" / "test" / "test0.png").write_bytes(b"")
    build_task(tiny_recipe(tmp_path / "camvid"))  # which need not be annotated where it is not scored
    write_pair(tmp_path / "camvid", "test", "test0", (24, 40))
    assert load_pairs(f"{data}").splits["test"].sizes == ((24, 40),)
    with pytest.raises(UserError, match=r"holdout: got 2, but .* has a test split of its own, expected null"):
        load_pairs(data, holdout=2)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_split_of_ignored_pixels_alone_is_refused_where_it_is_used(camvid, split):
    for kind in ("images", "annotations"):
        shutil.copytree(camvid / kind / "val", camvid / kind / "test")
    for file in (camvid / "annotations" / split).iterdir():
        Image.fromarray(np.full_like(np.array(Image.open(file)), IGNORED)).save(file)
    expected = f"{camvid}: got only ignored pixels in the {split} split, expected some with a class"
    if split == "test":
        task_of(camvid)  # published test splits have no labels
    with pytest.raises(UserError, match=expected):
        task_of(camvid, *(["score_test=true"] if split == "test" else []))
    with pytest.raises(UserError, match=expected):
        build_task(tiny_recipe(camvid), f"camvid:{camvid}@{split}")


def test_annotations_of_images_that_exif_turns(camvid):
    """Where the size tells they fit; the others go with them, and what is taken for granted is said."""

    def opened():
        data = load_pairs(f"camvid:{camvid}")
        return [np.asarray(data.read(pair)[0]) for pair in data.splits["train"].pairs], data.notices

    before, told = opened()
    assert not told
    turn(camvid / "images" / "train" / "train1.png", 3)  # upside down: of the same size both ways
    images, (line,) = opened()
    assert line.startswith("1 of 6 images of train, such as train1.png,") and "read upright" in line
    assert np.array_equal(images[1], before[1][::-1, ::-1])
    turn(camvid / "images" / "train" / "train0.png", 6)  # annotated as it is stored
    images, (line,) = opened()
    assert "read as they are stored" in line and all(map(np.array_equal, images, before))
