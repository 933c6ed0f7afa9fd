"""Segmentation's crops: what they depend on, and how images become crops."""

import colorsys
import math
from collections import defaultdict

import pytest
import torch
from segmentation_tasks import batches, task_of
from torchvision import tv_tensors

from stepsnet.engine.randomness import sample_of_run
from stepsnet.engine.task import BatchShard
from stepsnet.settings.config import SegmentationAugment
from stepsnet.tasks.segmentation.data import IGNORED
from stepsnet.tasks.segmentation.transforms import PhotometricDistortion, fit_within, training_transform

pytestmark = pytest.mark.usefixtures("own_cache")


def test_crops_depend_on_seed_and_place_and_on_nothing_else(camvid):
    def make(*overrides):
        return task_of(camvid, *overrides)

    expected = batches(make())
    assert len(expected) == 3 and expected[0][0].shape == (2, 3, 32, 32) and expected[0][1].shape == (2, 32, 32)
    torch.rand(5)
    for workers, start in ((0, 1), (2, 0)):
        got = batches(make(f"workers={workers}"), start=start)
        for (images, labels), (images_0, labels_0) in zip(got, expected[start:], strict=True):
            assert torch.equal(images, images_0) and torch.equal(labels, labels_0)
    for other in (batches(make(), epoch=1), batches(make("seed=1"))):
        assert not torch.equal(other[0][0], expected[0][0])
    whole = torch.cat([images for images, _ in batches(make("batch_size=6"))])
    shares = [batches(make("batch_size=6"), share=BatchShard(0, 1, 3))]
    assert torch.equal(torch.cat([images for images, _ in shares[0]]), whole)


def test_every_image_comes_once_a_pass_whatever_an_epoch_is(camvid):
    task = task_of(camvid, "epoch_updates=4", "batch_size=2")
    assert task.steps_per_epoch == 4
    keys = [sample_of_run(0, number, 6) for number in range(18)]
    assert [number_of_pass for number_of_pass, _ in keys] == [0] * 6 + [1] * 6 + [2] * 6
    for turn in range(3):
        assert sorted(index for number_of_pass, index in keys if number_of_pass == turn) == list(range(6))
    second = batches(task, epoch=1)[0][1]  # the crops number 8 and 9
    assert torch.equal(second, torch.stack([task.samples[key][1] for key in keys[8:10]]).long())


def apply(image, labels, scale=(40, 24), crop=16, **augment):
    quiet = {"scale_range": (1.0, 1.0), "hflip": 0.0, "photometric": False, **augment}
    transform = training_transform(SegmentationAugment(**quiet), scale, crop, (0.5,) * 3, (0.5,) * 3)
    return transform(tv_tensors.Image(image), tv_tensors.Mask(labels))


def coded(height, width):
    """A image whose red and green are row and column, and labels that are the row."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack((rows, columns, rows * 0)).to(torch.uint8), rows.to(torch.uint8)


def test_a_crop_is_a_part_of_the_image_with_its_own_labels():
    torch.manual_seed(0)
    image, labels = apply(*coded(24, 40), max_class_share=1.0)
    rows = ((image[0] * 0.5 + 0.5) * 255).round().to(torch.uint8)
    assert image.shape == (3, 16, 16) and torch.equal(rows, labels) and labels[0, 0] + 15 == labels[15, 0]
    flipped, _ = apply(*coded(24, 40), max_class_share=1.0, hflip=1.0, crop=40)
    assert flipped[1, 0, 0] > flipped[1, 0, 39]


def test_what_a_small_image_does_not_fill_is_the_mean_and_ignored():
    image, labels = apply(*coded(24, 40), crop=48, max_class_share=1.0)
    assert (image[:, 24:] == 0).all() and (image[:, :, 40:] == 0).all()
    assert (labels[24:] == IGNORED).all() and (labels[:24, :40] != IGNORED).all()


def test_images_are_scaled_to_fit_and_drawn_within_their_range():
    assert fit_within((600, 800), (2048, 512)) == (512, 683)
    assert fit_within((200, 4000), (2048, 512)) == (102, 2048)
    sizes = []
    for seed in range(20):
        torch.manual_seed(seed)
        _, labels = apply(*coded(24, 40), scale_range=(0.5, 2.0), crop=80, max_class_share=1.0)
        sizes.append(int((labels != IGNORED).any(1).sum()))
    assert 12 <= min(sizes) < 18 and 36 < max(sizes) <= 48


@pytest.mark.parametrize("factor", [0.6, 0.75, 1.3, 1.7])
def test_labels_lie_where_the_image_has_them(factor):
    """A picture of its own labels: the resized picture, at half of its brightness, is the resized labels."""
    labels = torch.randint(2, (6, 10), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    labels = labels.repeat_interleave(7, 0).repeat_interleave(7, 1)  # 42×70
    scale = (round(70 * factor), round(42 * factor))
    image, resized = apply((255 * labels).expand(3, -1, -1), labels, scale, 160, max_class_share=1.0)
    inside = resized != IGNORED
    assert inside.sum() == math.prod(fit_within((42, 70), scale))
    of_image, of_labels = (image[0] > 0) & inside, (resized == 1) & inside
    iou = (of_image & of_labels).sum() / (of_image | of_labels).sum()
    assert iou > 0.97


def test_no_class_has_more_than_its_share_of_a_crop_where_that_can_be():
    labels = torch.zeros(16, 64, dtype=torch.uint8)
    labels[:, 32:] = 1
    image = torch.zeros(3, 16, 64, dtype=torch.uint8)
    most = []
    for seed in range(30):
        torch.manual_seed(seed)
        _, cropped = apply(image, labels, scale=(64, 16), max_class_share=0.75)
        most.append(cropped.flatten().bincount(minlength=2).max().item() / 256)
    free = []
    for seed in range(30):
        torch.manual_seed(seed)
        _, cropped = apply(image, labels, scale=(64, 16), max_class_share=1.0)
        free.append(cropped.flatten().bincount(minlength=2).max().item() / 256)
    assert sum(share <= 0.75 for share in most) > 20 > 10 > sum(share <= 0.75 for share in free)


def test_colours_are_distorted_and_never_exchanged():
    red = torch.zeros(3, 24, 40, dtype=torch.uint8)
    red[0] = 200
    seen = set()
    for seed in range(30):
        torch.manual_seed(seed)
        image, _ = apply(red, torch.zeros(24, 40, dtype=torch.uint8), photometric=True, max_class_share=1.0)
        assert image[0].mean() >= image[1:].mean()
        seen.add(round(image.mean().item(), 3))
    assert len(seen) > 10


def distorted(pixel, changes):
    """mmsegmentation's operations on a pixel (r, g, b) in 0 … 255, written out with Python's HSV."""
    for name, amount in changes:
        if name in ("brightness", "contrast"):
            changed = [c + 255 * amount if name == "brightness" else c * amount for c in pixel]
            pixel = [min(max(c, 0), 255) for c in changed]
        else:
            h, s, v = colorsys.rgb_to_hsv(*(c / 255 for c in pixel))
            h, s = ((h + amount) % 1, s) if name == "hue" else (h, min(amount * s, 1))
            pixel = [255 * c for c in colorsys.hsv_to_rgb(h, s, v)]
    return torch.tensor(pixel)


def test_each_change_of_colour_is_mmsegmentations():
    flat = torch.full((3, 2, 2), 200 / 255)
    colours = [(200, 200, 200), (0, 0, 0), (255, 255, 255), (255, 0, 0), (250, 20, 90), (3, 2, 1), (40, 200, 120)]
    picture = torch.tensor(colours).T[:, None] / 255  # (3, 1, 7)
    transform, orders, amounts = PhotometricDistortion(), [], defaultdict(list)
    halved = transform.transform(tv_tensors.Image(flat), {"changes": [("contrast", 0.5)]})
    torch.testing.assert_close(255 * halved.as_subclass(torch.Tensor), torch.full((3, 2, 2), 100.0))
    torch.manual_seed(0)
    for _ in range(400):
        params = transform.make_params([])
        found = transform.transform(tv_tensors.Image(picture), params).as_subclass(torch.Tensor)
        expected = torch.stack([distorted(colour, params["changes"]) for colour in colours], 1)
        torch.testing.assert_close(255 * found[:, 0], expected.float(), atol=0.01, rtol=0)
        orders.append([name for name, _ in params["changes"]])
        for name, amount in params["changes"]:
            amounts[name].append(amount)
    limits = {"brightness": (-32 / 255, 32 / 255), "contrast": (0.5, 1.5), "saturation": (0.5, 1.5), "hue": (-0.1, 0.1)}
    for name, (low, high) in limits.items():
        assert 150 < len(amounts[name]) < 250 and low <= min(amounts[name]) < max(amounts[name]) <= high
        assert max(amounts[name]) - min(amounts[name]) > 0.95 * (high - low)
    with_both = [order for order in orders if {"contrast", "hue"} <= {*order}]
    first = sum(order.index("contrast") < order.index("hue") for order in with_both)
    assert 0.3 < first / len(with_both) < 0.7
    assert all(order.index("brightness") == 0 for order in orders if "brightness" in order)


def test_the_brightness_of_crops_spreads_as_the_formula_says():
    """A grey of 100 becomes (100 + b) c: b in ±32 and c in 1 ± 0.5, each half of the times, without clipping."""
    found = []
    for seed in range(1000):
        torch.manual_seed(seed)
        image, _ = apply(torch.full((3, 8, 8), 100, dtype=torch.uint8), torch.zeros(8, 8, dtype=torch.uint8),
                         scale=(8, 8), crop=8, photometric=True, max_class_share=1.0)  # fmt: skip
        found.append((image.mean().item() * 0.5 + 0.5) * 255)
    variance = (100**2 + 0.5 * 32**2 / 3) * (1 + 0.5 / 12) - 100**2  # E[(100 + b)²] E[c²] - (E[100 + b] E[c])²
    mean = sum(found) / len(found)
    spread = (sum((one - mean) ** 2 for one in found) / len(found)) ** 0.5
    assert abs(mean - 100) < 3 and abs(spread / variance**0.5 - 1) < 0.1
