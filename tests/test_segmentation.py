"""Segmentation: what is read and refused, what crops depend on, the metrics by their formulas, and whole pictures."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from pycocotools import mask as coco_mask
from segmentation_images import CLASSES, TINY, write_camvid, write_pair
from torch import nn
from torchvision import tv_tensors

from stepsnet.checkpoint import save_weights
from stepsnet.cli import main
from stepsnet.config import ModelSpec, SegmentationAugment
from stepsnet.console import Lines
from stepsnet.engine.optim import build_optimizer, build_schedule
from stepsnet.engine.task import BatchShard
from stepsnet.errors import UserError
from stepsnet.overrides import override
from stepsnet.recipes import find_recipe
from stepsnet.runs.evaluate import evaluate_run
from stepsnet.runs.train import train_run
from stepsnet.tasks import build_task
from stepsnet.tasks.loading import sample_of_run
from stepsnet.tasks.segmentation import data as segmentation_data
from stepsnet.tasks.segmentation import task as segmentation
from stepsnet.tasks.segmentation.data import IGNORED, load_pairs
from stepsnet.tasks.segmentation.inference import Inference
from stepsnet.tasks.segmentation.predict import color_of, draw_segments, encode_rle, list_segments
from stepsnet.tasks.segmentation.task import AUXILIARY_WEIGHT, scores
from stepsnet.tasks.segmentation.transforms import fit_within, training_transform

CPU = torch.device("cpu")
NO_NORM = {"mean": (0.0,) * 3, "std": (1.0,) * 3}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def camvid(tmp_path):
    return write_camvid(tmp_path / "camvid")


def tiny_recipe(root, *overrides):
    recipe = dataclasses.replace(
        find_recipe("camvid/tiny"), model=ModelSpec("upernet", TINY), baseline=None, data=f"camvid:{root}"
    )
    shared = ["scale=[40,24]", "crop_size=32", "batch_size=2", "epochs=1", "warmup_epochs=0", "device=cpu"]
    return override(recipe, [*shared, "log_interval=1", "stream_epochs=0", *overrides])


def task_of(root, *overrides):
    return build_task(tiny_recipe(root, *overrides))[1]


def batches(task, epoch=0, start=0, share=BatchShard()):  # noqa: B008 - it is frozen
    return list(task.batches(epoch, start, share, CPU))


class Pointwise(nn.Module):
    """Logits of a pixel from its colour alone."""

    def __init__(self, classes=3):
        super().__init__()
        self.calls = 0
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(classes, 3, 1, 1, generator=generator)

    def forward(self, images):
        self.calls += 1
        return nn.functional.conv2d(images, self.weight)


# what is read, and what is refused


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
    picture, labels = data.read(pair)
    assert np.array_equal(labels, np.asarray(Image.open(pair.annotation))) and (labels[:2] == IGNORED).all()
    assert np.array_equal(np.asarray(picture), np.asarray(Image.open(pair.image)))


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


SPOILT = {
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
    "no_classes": (lambda root: (root / "classes.json").unlink(), "classes.json (no such file), expected classes"),
    "classes": (lambda root: (root / "classes.json").write_text('{"classes": ["a", "a"]}'), "2 to 255 distinct names"),
    "ignored": (
        lambda root: (root / "classes.json").write_text('{"classes": ["a", "b"], "ignore_index": 1}'),
        "ignore_index in {root}/classes.json: got 1, expected 2 to 255",
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_wrong_is_one_line_that_names_the_file(camvid, what):
    spoil, expected = SPOILT[what]
    spoil(camvid)
    with pytest.raises(UserError) as raised:
        load_pairs(f"camvid:{camvid}")
    assert "\n" not in str(raised.value) and expected.replace("{root}", str(camvid)) in str(raised.value)


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
        (["batch_size=7"], "batch_size: got 7, expected 1 to the 6 training images"),
        (["batch_size=1"], "batch_size: got 1 images per forward pass, expected at least 2 for batch norm"),
        (["eval_stride=4"], "eval_stride: got 4, expected at most eval_window, None"),
        (["eval_scales=[]"], "eval_scales: got [], expected at least 1 of them"),
        (["augment.scale_range=[2,1]"], "augment.scale_range: got 2.0, 1.0, expected the smaller one first"),
        (["model.args.backbone=swin_tny"], "backbone: got 'swin_tny', expected a timm or StepsNet model"),
        (["model.args.width=3"], "unexpected keyword argument 'width'"),
        (["backbone=nowhere"], "backbone: got nowhere, expected the folder of a run or a checkpoint file"),
    ],
)
def test_settings_that_do_not_fit_are_refused(camvid, overrides, expected):
    with pytest.raises(UserError) as raised:
        model, task = build_task(tiny_recipe(camvid, *overrides))
        task.load_pretrained(model)
        batches(task)
    assert expected in str(raised.value)
    with pytest.raises(UserError, match="has no split 'test', expected one of train, val"):
        build_task(tiny_recipe(camvid), f"camvid:{camvid}@test")


# crops


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


def test_every_picture_comes_once_a_pass_whatever_an_epoch_is(camvid):
    task = task_of(camvid, "epoch_updates=4", "batch_size=2")
    assert task.steps_per_epoch == 4
    keys = [sample_of_run(0, number, 6) for number in range(18)]
    assert [number_of_pass for number_of_pass, _ in keys] == [0] * 6 + [1] * 6 + [2] * 6
    for turn in range(3):
        assert sorted(index for number_of_pass, index in keys if number_of_pass == turn) == list(range(6))
    second = batches(task, epoch=1)[0][1]  # the crops number 8 and 9
    assert torch.equal(second, torch.stack([task.samples[key][1] for key in keys[8:10]]).long())


def apply(picture, labels, scale=(40, 24), crop=16, **augment):
    quiet = {"scale_range": (1.0, 1.0), "hflip": 0.0, "photometric": False, **augment}
    transform = training_transform(SegmentationAugment(**quiet), scale, crop, (0.5,) * 3, (0.5,) * 3)
    return transform(tv_tensors.Image(picture), tv_tensors.Mask(labels))


def coded(height, width):
    """A picture whose red and green are row and column, and labels that are the row."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack((rows, columns, rows * 0)).to(torch.uint8), rows.to(torch.uint8)


def test_a_crop_is_a_part_of_the_picture_with_its_own_labels():
    torch.manual_seed(0)
    image, labels = apply(*coded(24, 40), max_class_share=1.0)
    rows = ((image[0] * 0.5 + 0.5) * 255).round().to(torch.uint8)
    assert image.shape == (3, 16, 16) and torch.equal(rows, labels) and labels[0, 0] + 15 == labels[15, 0]
    flipped, _ = apply(*coded(24, 40), max_class_share=1.0, hflip=1.0, crop=40)
    assert flipped[1, 0, 0] > flipped[1, 0, 39]


def test_what_a_small_picture_does_not_fill_is_the_mean_and_ignored():
    image, labels = apply(*coded(24, 40), crop=48, max_class_share=1.0)
    assert (image[:, 24:] == 0).all() and (image[:, :, 40:] == 0).all()
    assert (labels[24:] == IGNORED).all() and (labels[:24, :40] != IGNORED).all()


def test_pictures_are_scaled_to_fit_and_drawn_within_their_range():
    assert fit_within((600, 800), (2048, 512)) == (512, 683)
    assert fit_within((200, 4000), (2048, 512)) == (102, 2048)
    sizes = []
    for seed in range(20):
        torch.manual_seed(seed)
        _, labels = apply(*coded(24, 40), scale_range=(0.5, 2.0), crop=80, max_class_share=1.0)
        sizes.append(int((labels != IGNORED).any(1).sum()))
    assert 12 <= min(sizes) < 18 and 36 < max(sizes) <= 48


def test_no_class_has_more_than_its_share_of_a_crop_where_that_can_be():
    labels = torch.zeros(16, 64, dtype=torch.uint8)
    labels[:, 32:] = 1
    picture = torch.zeros(3, 16, 64, dtype=torch.uint8)
    most = []
    for seed in range(30):
        torch.manual_seed(seed)
        _, cropped = apply(picture, labels, scale=(64, 16), max_class_share=0.75)
        most.append(cropped.flatten().bincount(minlength=2).max().item() / 256)
    free = []
    for seed in range(30):
        torch.manual_seed(seed)
        _, cropped = apply(picture, labels, scale=(64, 16), max_class_share=1.0)
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
        picture, labels = task.data.read(pair)
        found = task.inference(model, torch.from_numpy(np.array(picture)).permute(2, 0, 1))
        for y, x in zip(*np.nonzero(labels != IGNORED)):
            truth.append(int(labels[y, x]))
            predicted.append(int(found[:, y, x].argmax()))
            terms.append(-found[labels[y, x], y, x].item())
    return truth, predicted, sum(terms) / len(terms)


def test_evaluation_counts_every_labelled_pixel_of_whole_pictures(camvid):
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


def test_ranks_share_out_the_pictures_and_run_the_model_equally_often(camvid, monkeypatch):
    """Three pictures of two sizes on two ranks, by windows: what FSDP would wait for is run, and counted once."""
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
    schedule = build_schedule(optimizer, recipe, steps)

    def rate(step):
        schedule.step_update(step)
        return optimizer.param_groups[0]["lr"]

    assert recipe.epochs * steps == 160_000
    for step in (1500, 40_000, 80_000, 159_999):
        assert rate(step) == pytest.approx(6e-5 * (1 - step / 160_000) ** 1.0, rel=1e-6)
    assert rate(0) == pytest.approx(6e-11) and rate(750) == pytest.approx((6e-11 + 6e-5) / 2)


# whole pictures


def picture_of(height, width):
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 3), (16, 5), (64, None), (7, None)])
def test_windows_give_a_pointwise_model_what_the_whole_picture_gives(window, stride):
    whole = Inference(**NO_NORM, scale=(40, 24))
    model, picture = Pointwise(), picture_of(24, 40)
    expected = whole(Pointwise(), picture)
    assert expected.exp().sum(0) == pytest.approx(torch.ones(24, 40).numpy(), abs=1e-5)
    slid = dataclasses.replace(whole, window=window, stride=stride)
    assert torch.allclose(slid(model, picture), expected, atol=1e-5)
    assert model.calls == slid.passes((24, 40))
    flipped = dataclasses.replace(slid, flip=True)
    assert torch.allclose(flipped(model, picture), expected, atol=1e-5)
    assert flipped.passes((24, 40)) == 2 * slid.passes((24, 40))


def test_windows_cover_the_picture_as_written_out():
    slid = Inference(**NO_NORM, scale=(40, 24), window=10, stride=7)
    found = [(rows.start, columns.start) for rows, columns in slid._windows((10, 25))]
    assert found == [(0, 0), (0, 7), (0, 14), (0, 15)]


def test_scales_and_flips_average_probabilities():
    class Uneven(nn.Module):
        """Depends on where a pixel is and on how large the picture is."""

        def forward(self, images):
            return torch.stack([images[:, 0] * images.shape[-1], images[:, 1].cumsum(-1)], 1)

    model, picture = Uneven(), picture_of(12, 20)
    both = Inference(**NO_NORM, scale=(20, 12), scales=(1.0, 1.5), flip=True)
    single = [dataclasses.replace(both, scales=(ratio,), flip=False) for ratio in (1.0, 1.5)]
    parts = [one(model, picture).exp() for one in single]
    parts += [one(model, picture.flip(-1)).exp().flip(-1) for one in single]
    assert torch.allclose(both(model, picture).exp(), sum(parts) / 4, atol=1e-5)
    assert not torch.allclose(parts[0], parts[2], atol=1e-2) and both.passes((12, 20)) == 4


# a run


EASY = ["augment.photometric=false", "augment.scale_range=[1,1]", "epoch_updates=15", "epochs=3", "lr=0.01"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a copy of the data of its own, and what it says at its end."""
    root = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch, Lines() as display:
        patch.setenv("STEPSNET_CACHE", str(root / "cache"))
        recipe = tiny_recipe(write_camvid(root / "camvid"), *EASY, "keep_checkpoints=3")
        return root / "run", recipe, train_run(recipe, root / "run", display)


def test_a_run_learns_and_is_scored(trained, camvid):
    run, _, summary = trained
    assert summary["metrics"]["val_miou"] > 40  # one class everywhere gives at most 17
    assert summary["class_iou"].keys() == set(CLASSES) and summary["images"] == {"train": 6, "val": 3}
    assert "mIoU" in (run / "report.html").read_text()
    scored = evaluate_run(run)
    assert scored["miou"] == pytest.approx(summary["metrics"]["val_miou"], abs=0.2)
    slid = evaluate_run(run, overrides=["eval_window=32", "eval_stride=16", "eval_flip=true"])
    assert slid["miou"] != scored["miou"] and slid["miou"] > 40
    for kind in ("images", "annotations"):
        shutil.rmtree(camvid / kind / "train")  # evaluation opens its own split only
    assert evaluate_run(run, f"camvid:{camvid}") == scored
    with pytest.raises(UserError, match="train is not a folder"):
        load_pairs(f"camvid:{camvid}")
    (camvid / "classes.json").write_text(json.dumps({"classes": CLASSES[::-1], "ignore_index": 255}))
    with pytest.raises(UserError, match=r"camvid has other classes than .*run was trained on"):
        evaluate_run(run, f"camvid:{camvid}")
    with pytest.raises(UserError, match="got 'lr=1', expected a key that begins with eval_"):
        evaluate_run(run, overrides=["lr=1"])


def test_a_run_resumes(trained, tmp_path, capsys):
    run, recipe, summary = trained
    shutil.copytree(run, tmp_path / "run")
    for later in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(later)
    (tmp_path / "run" / "summary.json").unlink()
    with Lines() as display:
        again = train_run(recipe, tmp_path / "run", display, resume=True)
    assert "mIoU" in capsys.readouterr().out
    assert again["metrics"] == summary["metrics"]

    def losses(folder):
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if line["kind"] == "step"]

    assert losses(tmp_path / "run") == losses(run)


def test_segments_are_in_cocos_form():
    labels = np.array([[2, 2, 0], [2, 0, 0]])
    first, second = list_segments(labels, np.full((2, 3), 0.5), ["a", "b", "c"])
    assert first["category"] == "a" and second["category_id"] == 2
    assert first["bbox"] == [1, 0, 2, 2] and first["area"] == 3 and first["share"] == 0.5 and first["score"] == 0.5
    for segment in (first, second):
        assert np.array_equal(coco_mask.decode(segment["segmentation"]), labels == segment["category_id"])
    mask = np.random.default_rng(0).random((7, 5)) > 0.5
    found = json.loads(json.dumps(encode_rle(mask)))
    assert found["size"] == [7, 5] and np.array_equal(coco_mask.decode(found), mask)


def test_segments_are_drawn_in_their_colors_between_white_lines():
    labels = np.zeros((12, 16), dtype=np.int64)
    labels[:, 8:] = 2
    image = torch.full((3, 12, 16), 100, dtype=torch.uint8)
    segments = list_segments(labels, np.ones((12, 16)), ["a", "b", "c"])
    drawn = np.asarray(draw_segments(image, labels, segments))
    for column, category in ((3, 0), (12, 2)):
        expected = 0.45 * 100 + 0.55 * np.array(color_of(category))
        assert np.abs(drawn[5, column] - expected).max() <= 1
    assert (drawn[:12, 8] == 255).all() and drawn.shape[1] > 16  # the legend


def test_classes_have_colors_that_differ():
    assert len({color_of(category) for category in range(150)}) == 150


def test_predict_draws_overlays_and_writes_segments(trained, camvid, tmp_path, capsys):
    shutil.copytree(trained[0], run := tmp_path / "run")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(trained[1].data, "camvid:nowhere"))  # a run is used without its data
    file = camvid / "images" / "val" / "val1.png"
    assert main(["predict", str(run), str(file), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{file}: ") and "%" in said and "val1.segments.png" in said
    found = json.loads((tmp_path / "out" / "val1.segments.json").read_text())
    assert found["image"] == {"file_name": "val1.png", "height": 28, "width": 40}
    assert sum(one["area"] for one in found["segments"]) == 28 * 40
    assert [one["name"] for one in found["categories"]] == list(CLASSES)
    drawn = Image.open(tmp_path / "out" / "val1.segments.png")
    assert drawn.width > 40 and drawn.height >= 28
    (tmp_path / "other").mkdir()
    shutil.copy(file, tmp_path / "other" / "val1.png")
    (tmp_path / "other" / "text.png").write_text("not an image")
    for names, expected in (
        ([file, tmp_path / "other" / "val1.png"], "expected names that differ"),
        ([tmp_path / "other" / "text.png"], "text.png as an image: cannot identify"),
        ([tmp_path / "other" / "none.png"], "none.png as an image: no such file"),
    ):
        assert main(["predict", str(run), *map(str, names), "--out", str(tmp_path / "no")]) == 2
        assert expected in capsys.readouterr().err and not (tmp_path / "no").exists()


def test_a_backbone_starts_from_a_classification_run(camvid, tmp_path):
    classifier = timm.create_model(TINY["backbone"], num_classes=2, **TINY["backbone_args"])
    save_weights(tmp_path / "model.safetensors", classifier.state_dict())
    model, task = build_task(tiny_recipe(camvid, f"backbone={tmp_path}"))
    task.load_pretrained(model)
    own = [value for name, value in model.state_dict().items() if name.endswith("patch_embed.proj.weight")]
    assert len(own) == 1 and torch.equal(own[0], classifier.state_dict()["patch_embed.proj.weight"])
