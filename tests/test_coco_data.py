"""COCO data: what a sample is, and in which order they come."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from coco_images import SIZES, write_coco
from detection_tasks import load, samples_of
from PIL import Image
from pycocotools.coco import COCO as CocoTool

from stepsnet.errors import UserError
from stepsnet.recipes.coco import COCO
from stepsnet.settings.config import DetectionAugment
from stepsnet.tasks.detection.data import DetectionSamples, grouped_order
from stepsnet.tasks.detection.transforms import resized_size

PLAIN = DetectionAugment(sizes=(48,), max_size=96, flip=0.0, crop=0.0)
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def coco(tmp_path):
    return write_coco(tmp_path / "coco")


def test_objects_of_every_kind_of_segmentation(coco):
    data, samples = load(coco), samples_of(coco)
    assert data.classes == ("square", "disc") and data.train.labels == {3: 1, 7: 2}  # by their ids
    for index in range(len(samples)):
        image, target = samples[0, index]
        width, height = SIZES[(index + 1) % len(SIZES)]
        assert image.shape == (3, height, width) and image.min() >= 0 and image.max() <= 1
        assert target["labels"].tolist() == [1, 2]  # the crowd of the first image is no object
        first = [5 + index, 5, 23 + index, 25]
        assert target["boxes"].tolist() == [first, [26, 9 + index, 40, min(31 + index, height)]]
        assert target["masks"].shape == (2, height, width) and target["masks"].dtype == torch.uint8
        for mask, (x1, y1, x2, y2) in zip(target["masks"], target["boxes"].int().tolist()):
            expected = torch.zeros(height, width, dtype=torch.uint8)
            expected[y1:y2, x1:x2] = 1
            assert torch.equal(mask, expected)
        assert image[:, 6, 8 + index].min() > 0.9 and image[:, 20 + index // 2, 30].max() < 0.1
    crowds = [a for a in data.train.content()["annotations"] if a["iscrowd"]]
    assert len(crowds) == 1  # the evaluation knows of it


@pytest.mark.parametrize("sliver", [[3, 5, 9, 9], [2, 2], [0, 5, 0, 9, 0, 12], [60, 1, 60, 9, 60, 12]])
@pytest.mark.parametrize("place", [0, 1])
def test_parts_that_cover_nothing_are_left_out_beside_others(coco, sliver, place):
    """Such as annotation programs write; [60, …] is the right edge."""
    before = samples_of(coco)
    file = coco / "instances_train.json"
    content = json.loads(file.read_text())
    ours = next(a for a in content["annotations"] if isinstance(a["segmentation"], list))
    index = next(i for i, image in enumerate(content["images"]) if image["id"] == ours["image_id"])
    width = content["images"][index]["width"]
    ours["segmentation"].insert(place, [width if x == 60 else x for x in sliver])
    file.write_text(json.dumps(content))
    after = samples_of(coco)
    assert torch.equal(after[0, index][1]["masks"], before[0, index][1]["masks"])
    ground_truth = CocoTool()
    ground_truth.dataset = after.split.content()
    ground_truth.createIndex()
    masks = [ground_truth.annToMask(a) for a in ground_truth.imgToAnns[ours["image_id"]] if not a["iscrowd"]]
    assert torch.equal(torch.from_numpy(np.stack(masks)), before[0, index][1]["masks"])


@pytest.mark.parametrize("masks", [True, False])
def test_an_area_that_is_not_given_is_that_of_the_mask(coco, masks):
    """In COCO's files it is so too, and the AP of boxes by size goes by it."""
    expected, file = {}, coco / "instances_val.json"
    content = json.loads(file.read_text())
    for number, record in enumerate(content["annotations"]):
        x, y, wide, high = record["bbox"]
        if number == 0:
            expected[record["id"]] = record["area"] = 7.5
            continue
        record["area"] = None
        record["segmentation"] = [[x, y, x + wide, y, x, y + high]]  # half of the box
        if number == 1:
            del record["area"]
        if number == 2:
            record["segmentation"] = [[x, y, x + 0.1, y, x, y + 0.1]]  # covers the middle of no pixel
            expected[record["id"]] = wide * high
        if number == 3 and not masks:
            record["segmentation"] = [[-5000, 2, 5, 5, 8, 8]]  # cannot be read
            expected[record["id"]] = wide * high
        if number == 4 and not masks:
            record["segmentation"] = []
            expected[record["id"]] = wide * high
    file.write_text(json.dumps(content))
    judge = CocoTool()
    judge.dataset = {**content, "annotations": [a for a in content["annotations"] if a["id"] not in expected]}
    judge.createIndex()
    count, of_boxes = len(content["annotations"]), len(expected) - 1
    expected |= {number: judge.annToMask(record).sum() for number, record in judge.anns.items()}
    data = load(coco, masks=masks)
    assert {a["id"]: a["area"] for of_image in data.val.annotations.values() for a in of_image} == expected
    assert all(a["area"] for a in data.val.content()["annotations"])
    line = data.val.notices[-1]
    assert line.startswith(f"{count - 1} of {count} annotations of instances_val.json have no area")
    assert line.endswith(f": it is that of the mask for {count - 1 - of_boxes} and of the box for {of_boxes}")
    assert not data.train.notices  # all areas are given


def inner_box(mask):
    ys, xs = np.nonzero(mask.numpy())
    return [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]


@pytest.mark.parametrize(
    "augment",
    [
        DetectionAugment(sizes=(96,), max_size=300, flip=0.0, crop=0.0),
        DetectionAugment(sizes=(96,), max_size=300, flip=1.0, crop=0.0),
        DetectionAugment(sizes=(96, 120), max_size=300, flip=0.5, crop=1.0, crop_sizes=(80, 100), crop_range=(60, 90)),
    ],
)
def test_boxes_and_masks_go_with_the_image(coco, augment):
    samples = samples_of(coco, augment)
    seen = 0
    for epoch in range(4):
        for index in range(len(samples)):
            image, target = samples[epoch, index]
            assert min(image.shape[1:]) in augment.sizes and target["masks"].shape[1:] == image.shape[1:]
            for box, mask, label in zip(target["boxes"], target["masks"], target["labels"]):
                if mask.sum() < 100:
                    continue  # hardly in the crop
                seen += 1
                assert np.abs(np.array(inner_box(mask)) - box.numpy()).max() <= 2.0
                inside = image.mean(0)[mask.bool()].median()
                assert (inside > 0.8) == (label == 1) and (inside < 0.2) == (label == 2)
    assert seen > 20


def test_sizes_are_written_out(coco):
    assert resized_size(480, 640, 800, 1333) == (800, 1066)
    assert resized_size(400, 1000, 800, 1333) == (533, 1333)  # the longer side
    defaults = COCO.augment
    assert defaults.sizes == (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800) and defaults.max_size == 1333
    assert (defaults.flip, defaults.crop, defaults.crop_sizes) == (0.5, 0.5, (400, 500, 600))
    assert defaults.crop_range == (384, 600)
    image, target = samples_of(coco, DetectionAugment(sizes=(96,), max_size=100, flip=0.0, crop=0.0))[0, 1]
    assert image.shape == (3, 74, 100) and torch.isfinite(target["boxes"]).all()  # of 70×52


def test_a_sample_is_a_function_of_seed_epoch_and_index(coco):
    augment = DetectionAugment(
        sizes=(48, 64, 80), max_size=120, flip=0.5, crop=0.5, crop_sizes=(60, 70), crop_range=(40, 60)
    )
    first, _ = samples_of(coco, augment)[3, 2]
    torch.rand(3)
    assert torch.equal(first, samples_of(coco, augment)[3, 2][0])
    others = [samples_of(coco, augment, seed)[epoch, 2][0] for seed, epoch in ((0, 4), (0, 5), (1, 3))]
    assert any(other.shape != first.shape or not torch.equal(other, first) for other in others)


def test_images_of_a_shape_lie_together(tmp_path):
    samples = samples_of(write_coco(tmp_path / "many", train=23, val=1))
    upright = {i for i, image in enumerate(samples.split.images) if image["height"] > image["width"]}
    assert 0 < len(upright) < 23
    orders = [grouped_order(samples, epoch, batch_size=8) for epoch in range(3)]
    assert all(len(order) == len(set(order)) == 16 for order in orders) and orders[0] != orders[1]
    assert orders[0] == grouped_order(samples, 0, batch_size=8)
    for order in orders:
        groups = [order[first : first + 4] for first in range(0, 16, 4)]
        whole = [group for group in groups if len({i in upright for i in group}) == 1]
        kept = len(upright & set(order))
        assert len(whole) >= kept // 4 + (16 - kept) // 4
    assert len({i in upright for i in grouped_order(samples, 0, batch_size=3)[:3]}) == 1
    other = DetectionSamples(samples.split, seed=1)
    assert grouped_order(other, 0, 8) != orders[0]


@pytest.mark.parametrize(("upright", "wide"), [(3, 100), (100, 3), (1, 9), (3, 3)])
def test_images_of_the_rare_shape_are_trained_on_as_often_as_the_others(tmp_path, upright, wide):
    """What does not fill a batch is another part of the data in each epoch."""
    sizes = [(48, 64)] * upright + [(64, 48)] * wide
    images = tuple({"id": i, "width": width, "height": height} for i, (width, height) in enumerate(sizes))
    split = replace(load(write_coco(tmp_path / "coco")).train, images=images)
    samples, epochs = DetectionSamples(split), 400
    orders = [grouped_order(samples, epoch, batch_size=4) for epoch in range(epochs)]
    kept = len(images) // 4 * 4
    assert all(len(order) == len(set(order)) == kept for order in orders)
    visits = np.bincount(np.concatenate(orders), minlength=len(images))
    share = kept / len(images)  # of the epochs in which an image is visited
    spread = (epochs * share * (1 - share)) ** 0.5
    assert np.abs(visits - epochs * share).max() <= 5 * spread
    # what the groups of either shape leave over is one group of both, at most
    for order in orders[:20]:
        of_shape = [sum(index < upright for index in order[first : first + 4]) for first in range(0, kept, 4)]
        assert sum(0 < count < 4 for count in of_shape) <= 1


def test_cocos_own_layout(coco):
    (coco / "annotations").mkdir()
    for split in ("train", "val"):
        (coco / f"instances_{split}.json").rename(coco / "annotations" / f"instances_{split}2017.json")
        (coco / f"{split}2017").mkdir()
        for image in (coco / "images").glob(f"{split}*"):
            image.rename(coco / f"{split}2017" / image.name)
    data = load(coco)
    assert len(data.train.images) == 6 and data.train.folder.name == "train2017"
    assert DetectionSamples(data.val)[0, 0][0].shape[0] == 3


def test_a_crop_may_leave_no_object(coco):
    augment = DetectionAugment(sizes=(48,), max_size=96, flip=0.5, crop=1.0, crop_sizes=(128,), crop_range=(24, 32))
    samples = samples_of(coco, augment)
    counts = []
    for epoch in range(20):
        image, target = samples[epoch, 0]
        assert min(image.shape[-2:]) == 48 and target["masks"].shape[-2:] == image.shape[-2:]
        assert len(target["boxes"]) == len(target["masks"]) == len(target["labels"])
        assert (target["boxes"][:, 2:] > target["boxes"][:, :2]).all()
        counts.append(len(target["boxes"]))
    assert min(counts) == 0 < max(counts)


def test_an_image_that_cannot_be_decoded_is_said(coco):
    samples = samples_of(coco, PLAIN)
    whole = (coco / "images" / "train2.png").read_bytes()
    (coco / "images" / "train2.png").write_bytes(whole[: len(whole) // 2])  # the header is there
    with pytest.raises(UserError, match=r"^data: cannot decode .*train2.png: .*truncated"):
        samples[0, 1]


@pytest.mark.parametrize("augment", [None, DetectionAugment(sizes=(48,), max_size=96, crop=1.0, crop_sizes=(64,))])
def test_boxes_alone_and_masks_that_are_not_asked_for(tmp_path, augment):
    boxes, both = write_coco(tmp_path / "boxes", masks=False), write_coco(tmp_path / "both")
    for epoch in range(3):
        of_boxes, of_both, whole = (
            samples_of(root, augment, masks=masks)[epoch, 2] for root, masks in ((boxes, 0), (both, 0), (both, 1))
        )
        for image, target in (of_boxes, of_both):
            assert torch.equal(image, whole[0]) and target.keys() == {"boxes", "labels"}
            assert all(torch.equal(target[key], whole[1][key]) for key in target)


def test_the_split_behind_an_at_is_evaluated(tmp_path):
    coco = write_coco(tmp_path / "coco", test=2)
    names = {
        split: [image["file_name"] for image in load(f"{coco}@{split}", training=False).val.images]
        for split in ("train", "val", "test")
    }
    assert names == {
        split: [f"{split}{number}.png" for number in range(1, count + 1)]
        for split, count in (("train", 6), ("val", 3), ("test", 2))
    }
    data = load(f"{coco}@test")
    assert (data.evaluated, len(data.train.images), len(data.val.images)) == ("test", 6, 2)
    with pytest.raises(UserError, match=r"holdout: got 2, but .*coco has a test split of its own, expected null"):
        load(coco, holdout=2)
    (coco / "instances_test.json").unlink()
    expected = r"coco has no test split, expected .*instances_test.json, or a recipe with holdout"
    with pytest.raises(UserError, match=expected):
        load(f"{coco}@test", training=False)


def test_images_are_held_out_for_validation(coco):
    """The data's val split is then scored as the test split, and not opened before."""

    def files(split):
        return {image["file_name"] for image in split.images}

    whole = load(coco)
    test = load(f"{coco}@test", holdout=2, training=False)
    (coco / "instances_val.json").unlink()
    data = load(coco, holdout=2)
    assert len(data.train.images) == 4 and len(data.val.images) == 2 and data.evaluated == "2 of train"
    assert files(data.train) | files(data.val) == files(whole.train) and files(test.val) == files(whole.val)
    assert files(load(f"{coco}@train", holdout=2, training=False).val) == files(data.train)
    for count in (6, 7):
        with pytest.raises(UserError, match=f"holdout: got {count}, expected 1 to 5 of the 6 training images"):
            load(coco, holdout=count)


def turn(file, orientation):
    """Have a file's EXIF say that the image is to be turned; its pixels stay."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.open(file).save(file, exif=exif)


def test_annotations_of_images_that_exif_turns(coco):
    """Where the size tells they fit; the others go with them, and what is taken for granted is said."""
    before = [samples_of(coco)[0, index][0] for index in range(6)]
    turn(coco / "images" / "train2.png", 3)  # upside down: of the same size both ways
    data = load(coco)
    (line,) = data.train.notices
    assert line.startswith("1 of 6 images of instances_train.json, such as train2.png,") and "read upright" in line
    assert torch.equal(samples_of(coco)[0, 1][0], before[1].flip(-1, -2)) and not data.val.notices
    turn(coco / "images" / "train1.png", 6)  # 48×64, annotated as 64×48 is stored
    data = load(coco)
    (line,) = data.train.notices
    assert "read as they are stored" in line
    assert all(torch.equal(samples_of(coco)[0, index][0], before[index]) for index in range(6))
