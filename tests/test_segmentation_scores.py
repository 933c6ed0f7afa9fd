"""Segmentation's loss, schedule and metrics by their formulas, and inference on whole images."""

import dataclasses

import numpy as np
import pytest
import torch
from segmentation_images import CLASSES
from segmentation_tasks import CPU, Pointwise, task_of, tiny_recipe
from torch import nn

from stepsnet.engine.optim import Schedule, build_optimizer
from stepsnet.engine.task import BatchShard
from stepsnet.recipes import find_recipe
from stepsnet.tasks import build_task
from stepsnet.tasks.segmentation import task as segmentation
from stepsnet.tasks.segmentation.data import IGNORED
from stepsnet.tasks.segmentation.inference import Inference
from stepsnet.tasks.segmentation.scores import scores
from stepsnet.tasks.segmentation.task import AUXILIARY_WEIGHT

NO_NORM = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
pytestmark = pytest.mark.usefixtures("own_cache")


# loss, metrics and schedule


def test_the_loss_is_the_mean_over_labelled_pixels_and_the_auxiliary_heads(camvid):
    task = task_of(camvid)
    logits, auxiliary = torch.randn(2, 2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 3, (2, 4, 5), generator=torch.Generator().manual_seed(1))
    labels[0, 0, :3] = IGNORED
    loss, others = task.loss(lambda images: (logits, auxiliary), (torch.zeros(2, 3, 4, 5), labels))

    def by_hand(scored):
        terms = [
            -scored[b, :, y, x].log_softmax(0)[labels[b, y, x]]
            for b in range(2)
            for y in range(4)
            for x in range(5)
            if labels[b, y, x] != IGNORED
        ]
        assert len(terms) == 37
        return sum(terms) / 37

    assert AUXILIARY_WEIGHT == 0.4
    assert loss == pytest.approx((by_hand(logits) + 0.4 * by_hand(auxiliary)).item(), abs=1e-5)
    right = ((logits.argmax(1) == labels) & (labels != IGNORED)).sum().item()
    assert others["pixel_accuracy"] == pytest.approx(100 * right / 37)


def by_formula(truth, predicted, classes):
    """mIoU, mAcc and accuracy from lists of pixels; a class that nothing has is left out."""
    ious, accuracies = [], []
    for k in range(classes):
        both = sum(t == k and p == k for t, p in zip(truth, predicted))
        either = sum(t == k or p == k for t, p in zip(truth, predicted))
        of_class = sum(t == k for t in truth)
        ious += [both / either] if either else []
        accuracies += [both / of_class] if of_class else []
    right = sum(t == p for t, p in zip(truth, predicted)) / len(truth)
    return [100 * value for value in (sum(ious) / len(ious), sum(accuracies) / len(accuracies), right)]


def test_scores_are_their_formulas():
    truth, predicted = [0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 0, 1, 1, 4, 2, 1]
    confusion = torch.zeros(5, 5, dtype=torch.long)
    for t, p in zip(truth, predicted):
        confusion[t, p] += 1
    found, of_class = scores(confusion)
    assert list(found.values()) == pytest.approx(by_formula(truth, predicted, 5), abs=1e-3)
    assert of_class[3] is None and of_class[4] == 0.0  # neither there nor predicted; predicted only


def pixels_of(task, model):
    truth, predicted, terms = [], [], []
    for pair in task.split.pairs:
        image, labels = task.data.read(pair)
        found = task.inference(model, torch.from_numpy(np.array(image)).permute(2, 0, 1))
        for y, x in zip(*np.nonzero(labels != IGNORED)):
            truth.append(int(labels[y, x]))
            predicted.append(int(found[:, y, x].argmax()))
            terms.append(-found[labels[y, x], y, x].item())
    return truth, predicted, sum(terms) / len(terms)


def test_evaluation_counts_every_labelled_pixel_of_whole_images(camvid):
    task, model = task_of(camvid), Pointwise()
    truth, predicted, loss = pixels_of(task, model)
    assert len(truth) == (22 + 26 + 22) * 40
    metrics = task.evaluate(model, BatchShard(), CPU)
    expected = by_formula(truth, predicted, 3)
    assert [metrics[name] for name in ("miou", "macc", "pixel_accuracy")] == pytest.approx(expected, abs=1e-3)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-4)
    facts = task.facts()
    assert set(facts["class_iou"]) == set(CLASSES)
    most = max(set(truth), key=truth.count)
    told = facts["commonest_class"]
    assert told.pop("name") == CLASSES[most]
    assert list(told.values()) == pytest.approx(by_formula(truth, [most] * len(truth), 3), abs=1e-3)


def test_one_image_without_a_finite_loss_is_not_left_out(camvid):
    class BrokenOnce(Pointwise):
        def forward(self, images):
            return super().forward(images) * (torch.nan if self.calls == 1 else 1.0)

    assert np.isnan(task_of(camvid).evaluate(BrokenOnce(), BatchShard(), CPU)["loss"])


def test_ranks_share_out_the_images_and_run_the_model_equally_often(camvid, monkeypatch):
    """Three images of two sizes on two ranks, by windows: what FSDP would wait for is run, and counted once."""
    kept = []

    class Kept(segmentation.MulticlassConfusionMatrix):
        def compute(self):
            kept.append(self.confmat.clone())
            return super().compute()

    monkeypatch.setattr(segmentation, "MulticlassConfusionMatrix", Kept)
    recipe = tiny_recipe(camvid, "eval_window=16", "eval_stride=8", "scale=[400,28]")
    task, models = build_task(recipe)[1], [Pointwise(), Pointwise(), Pointwise()]
    for model, share in zip(models, (BatchShard(), BatchShard(0, 2), BatchShard(1, 2))):
        task.evaluate(model, share, CPU)
    assert torch.equal(kept[0], kept[1] + kept[2]) and kept[2].sum() > 0
    assert models[1].calls == models[2].calls
    assert len({task.inference.passes(size) for size in task.split.sizes}) == 2


def test_the_schedule_falls_to_zero_in_a_straight_line_after_the_warm_up():
    recipe = find_recipe("ade20k/steps_swin_tiny")
    steps, model = recipe.epoch_updates, nn.Linear(2, 2)
    optimizer = build_optimizer(model, recipe)
    schedule = Schedule(optimizer, recipe, steps)

    def rate(step):
        schedule.step_update(step)
        return optimizer.param_groups[0]["lr"]

    assert recipe.epochs * steps == 160_000
    for step in (1500, 40_000, 80_000, 159_999):
        assert rate(step) == pytest.approx(6e-5 * (1 - step / 160_000) ** 1.0, rel=1e-6)
    assert rate(0) == pytest.approx(6e-11) and rate(750) == pytest.approx((6e-11 + 6e-5) / 2)


# whole images


def image_of(height, width):
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 3), (16, 5), (64, None), (7, None)])
def test_windows_give_a_pointwise_model_what_the_whole_image_gives(window, stride):
    whole = Inference(**NO_NORM, scale=(40, 24))
    model, image = Pointwise(), image_of(24, 40)
    expected = whole(Pointwise(), image)
    assert expected.exp().sum(0) == pytest.approx(torch.ones(24, 40).numpy(), abs=1e-5)
    slid = dataclasses.replace(whole, window=window, stride=stride)
    assert torch.allclose(slid(model, image), expected, atol=1e-5)
    assert model.calls == slid.passes((24, 40))
    flipped = dataclasses.replace(slid, flip=True)
    assert torch.allclose(flipped(model, image), expected, atol=1e-5)
    assert flipped.passes((24, 40)) == 2 * slid.passes((24, 40))


def test_windows_cover_the_image_as_written_out():
    slid = Inference(**NO_NORM, scale=(40, 24), window=10, stride=7)
    found = [(rows.start, columns.start) for rows, columns in slid._windows((10, 25))]
    assert found == [(0, 0), (0, 7), (0, 14), (0, 15)]


def test_scales_and_flips_average_probabilities():
    class Uneven(nn.Module):
        """Depends on where a pixel is and on how large the image is."""

        def forward(self, images):
            return torch.stack([images[:, 0] * images.shape[-1], images[:, 1].cumsum(-1)], 1)

    model, image = Uneven(), image_of(12, 20)
    both = Inference(**NO_NORM, scale=(20, 12), scales=(1.0, 1.5), flip=True)
    single = [dataclasses.replace(both, scales=(ratio,), flip=False) for ratio in (1.0, 1.5)]
    parts = [one(model, image).exp() for one in single]
    parts += [one(model, image.flip(-1)).exp().flip(-1) for one in single]
    assert torch.allclose(both(model, image).exp(), sum(parts) / 4, atol=1e-5)
    assert not torch.allclose(parts[0], parts[2], atol=1e-2) and both.passes((12, 20)) == 4
