"""Images from folders: what the batches depend on, what is skipped, and what is refused."""

import dataclasses
import hashlib
import json
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from classification_tasks import recipe_of, sample
from PIL import Image
from run_folders import closed
from safetensors.torch import save_file
from timm.data import Mixup
from torch import nn
from torchmetrics.classification import MulticlassAccuracy
from torchvision.datasets import CIFAR10

from stepsnet.cli import main
from stepsnet.engine.task import BatchShard
from stepsnet.errors import UserError
from stepsnet.recipes import find_recipe
from stepsnet.recipes.imagenet import IMAGENET
from stepsnet.run_folder.checkpoint import save_weights
from stepsnet.run_folder.folder import lock_folder
from stepsnet.run_folder.resuming import open_run_folder
from stepsnet.runs.evaluate import evaluate_checkpoint
from stepsnet.settings.config import Augment, ClassificationRecipe, ModelSpec
from stepsnet.tasks import build_task
from stepsnet.tasks.classification.data import Samples, load_images
from stepsnet.tasks.classification.task import Classification
from stepsnet.tasks.classification.transforms import InputSpec
from stepsnet.tasks.images import UnreadableImage
from stepsnet.tasks.prediction import PredictInputs, read_again

SPEC = InputSpec((3, 16, 16), (0.5,) * 3, (0.25,) * 3, crop_pct=1.0)
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """Two classes of eight training and three validation pictures."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 3)):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{index}.jpg")
    return tmp_path


def make_task(folder, batch_size=4, **settings):
    for_training = settings.pop("for_training", True)
    recipe = recipe_of(batch_size, **{"augment": IMAGENET.augment, **settings})
    data = load_images(f"folder:{folder}", SPEC, recipe.augment, recipe.seed, recipe.train_samples)
    return Classification(recipe, data, SPEC, for_training=for_training)


def batches(task, epoch=0, start=0, share=BatchShard()):  # noqa: B008 - it is frozen
    return list(task.batches(epoch, start, share, CPU))


def test_batches_depend_on_seed_and_epoch_and_on_nothing_else(folder):
    expected = batches(make_task(folder))
    assert len(expected) == 4 and expected[0][0].shape == (4, 3, 16, 16)
    torch.rand(5)
    for workers, start in ((0, 0), (4, 0), (0, 2), (4, 3)):
        got = batches(make_task(folder, workers=workers), start=start)
        for (images, labels), (images_0, labels_0) in zip(got, expected[start:], strict=True):
            assert torch.equal(images, images_0) and torch.equal(labels, labels_0), (workers, start)
    for other in (batches(make_task(folder), epoch=1), batches(make_task(folder, seed=1))):
        assert not torch.equal(other[0][0], expected[0][0])


def test_ranks_and_parts_share_out_the_very_same_batch(folder):
    whole = torch.cat([images for images, _ in batches(make_task(folder, 8))])
    for world_size, parts in ((2, 1), (1, 2), (2, 2)):
        ranks = [BatchShard(rank, world_size, parts) for rank in range(world_size)]
        shares = [batches(make_task(folder, 8), share=share) for share in ranks]
        size = 8 // (world_size * parts)
        turns = zip(*[iter(zip(*shares))] * parts)  # an update: parts × ranks
        ours = [images for update in turns for part in update for images, _ in part]
        assert all(len(images) == size for images in ours)
        assert torch.equal(torch.cat(ours), whole)
    with pytest.raises(UserError, match="batch_size: got 4, expected a multiple of 3"):
        batches(make_task(folder), share=BatchShard(0, 3, 1))


def test_repeated_augmentation_shows_copies_that_differ(folder):
    task = make_task(folder, augment=dataclasses.replace(IMAGENET.augment, aug_repeats=2))
    order = task.order(0)
    assert len(order) == 16 and len({index for _, index, _ in order}) == 8
    assert [copy for _, _, copy in order] == [0, 1] * 8
    images, labels = batches(task)[0]
    assert labels[0] == labels[1] and not torch.equal(images[0], images[1])


def test_validation_is_timms_transform_and_counts_what_it_sees(folder):
    task = make_task(folder)

    class Fixed(nn.Module):
        def forward(self, images):
            return torch.stack([images.mean((1, 2, 3)), torch.zeros(len(images))], -1)

    picture = Image.open(folder / "val" / "cat" / "0.jpg")
    resized = np.asarray(picture.resize((19, 16), Image.Resampling.BICUBIC))[:, 2:18] / 255  # the shorter side to 16
    assert task.data.read(picture).permute(1, 2, 0).numpy() == pytest.approx((resized - 0.5) / 0.25, abs=0.05)
    inputs = torch.stack([sample(task.data.val, 0, index, 0)[0] for index in range(6)])
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    logits = Fixed()(inputs)
    metrics = task.evaluate(Fixed(), BatchShard(), CPU)
    assert metrics["top1"] == pytest.approx(100 * (logits.argmax(-1) == labels).float().mean().item(), abs=1e-3)
    assert metrics["loss"] == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), abs=1e-5)
    assert metrics["top5"] == 100


def test_one_batch_without_a_finite_loss_is_not_left_out(folder):
    losses = []
    for factors in ([1.0, 1.0], [torch.nan, 1.0], [1.0, torch.nan]):
        given = iter(factors)
        model = lambda images, given=given: images.mean((2, 3))[:, :2] * next(given)  # noqa: E731
        task = make_task(folder, eval_batch_size=4)  # batches of 4 and 2
        losses.append(task.evaluate(model, BatchShard(), CPU)["loss"])
    assert np.isnan(losses).tolist() == [False, True, True]


@pytest.mark.parametrize("samples, batch_size, world_size", [(6, 4, 1), (6, 1, 4), (7, 2, 2), (2, 8, 3), (33, 8, 4)])
def test_ranks_evaluate_each_sample_once_in_equally_many_batches(samples, batch_size, world_size):
    ranks = [BatchShard(rank, world_size).evaluation_batches(samples, batch_size) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    visited = [index for batches in ranks for batch in batches if not batch.is_padding for index in batch.indices]
    assert sorted(visited) == list(range(samples))
    assert all(1 <= len(batch.indices) <= batch_size for batches in ranks for batch in batches)
    padding = [batch.indices for batches in ranks for batch in batches if batch.is_padding]
    assert all(indices == range(1) for indices in padding)
    assert len(padding) < world_size


def test_evaluation_by_four_ranks_counts_each_image_once(folder, monkeypatch):
    seen = []
    update = MulticlassAccuracy.update
    monkeypatch.setattr(
        MulticlassAccuracy, "update", lambda self, *given: seen.append(len(given[1])) or update(self, *given)
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 2))
    for rank in range(4):
        make_task(folder).evaluate(model, BatchShard(rank, 4), CPU)
    assert sum(seen) == 2 * 6  # top-1 and top-5


def test_mixup_needs_even_parts_and_keeps_the_batch(folder):
    task = make_task(folder)
    (images, labels), *_ = batches(task)
    before = images.clone()
    np.random.seed(0)
    loss, others = task.loss(nn.Sequential(nn.Flatten(), nn.Linear(768, 2)), (images, labels))
    assert torch.equal(images, before) and loss.isfinite() and 0 <= others["mixed_top1"] <= 100
    with pytest.raises(UserError, match="got 1 per forward pass, expected an even number of images"):
        batches(task, share=BatchShard(0, 1, 4))


@pytest.mark.parametrize("seed", range(6))
def test_a_mixed_batch_and_its_loss_are_timms(folder, seed):
    augment = dataclasses.replace(IMAGENET.augment, mixup_prob=0.8, mixup_switch_prob=0.3)
    task = make_task(folder, augment=augment, label_smoothing=0.1)
    (images, labels), *_ = batches(task)
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 2))
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, prob=0.8, switch_prob=0.3, label_smoothing=0.1, num_classes=2)
    np.random.seed(seed)
    mixed, targets = mixup(images.clone(), labels)
    np.random.seed(seed)
    loss, others = task.loss(model, (images, labels))
    logits = model(mixed)
    torch.testing.assert_close(loss, -(targets * logits.log_softmax(-1)).sum(-1).mean())
    assert others["mixed_top1"] == 100 * (logits.argmax(-1) == labels).float().mean()


def test_label_smoothing_is_of_training_alone(folder):
    task = make_task(folder, augment=None, label_smoothing=0.5)
    (images, labels), *_ = batches(task)
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 2))
    log = model(images).log_softmax(-1)
    right = -log[range(4), labels].mean()
    torch.testing.assert_close(task.loss(model.train(), (images, labels))[0], 0.5 * right - 0.5 * log.mean())
    torch.testing.assert_close(task.loss(model.eval(), (images, labels))[0], right)
    recipe = dataclasses.replace(find_recipe("digits/tiny"), label_smoothing=0.5)
    assert build_task(closed(recipe))[1].criterion.label_smoothing == 0.5


def test_top5_of_ten_classes():
    task = build_task(closed(find_recipe("digits/tiny")))[1]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    inputs, labels, _ = task.data.val.batch([(0, index, 0) for index in range(len(task.data.val))])
    found = (model(inputs).topk(5).indices == labels[:, None]).any(1).float().mean().item() * 100
    assert found < 100 and task.evaluate(model, BatchShard(), CPU)["top5"] == pytest.approx(found, abs=1e-2)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize("augment", [None, Augment(scale=(0.5, 1.0), hflip=0.5), Augment(re_prob=1.0)])
def test_a_batch_is_its_samples_to_the_bit(folder, mode, augment):
    """Batches are normalized as a whole, but for what random erasing or another mode of image asks."""
    task = make_task(folder)
    spec = InputSpec((len(mode), 16, 16), (0.48, 0.45, 0.4, 0.5)[: len(mode)], (0.22, 0.2, 0.25, 0.3)[: len(mode)])
    read = task.data.train.images.read
    images = SimpleNamespace(read=lambda index: read(index).convert(mode), labels=task.data.train.labels, name=str)
    samples = Samples(images, spec.training(augment), np.arange(8), seed=3)
    keys = [(2, index, 1) for index in (5, 0, 7)]
    inputs, labels, failed = samples.batch(keys)
    alone = [sample(samples, *key) for key in keys]
    assert torch.equal(inputs, torch.stack([image for image, _, _ in alone])) and inputs.is_contiguous()
    assert inputs.dtype == torch.float32 and labels.tolist() == [label for _, label, _ in alone]
    assert failed == ["", "", ""]


def test_part_of_the_data_takes_the_classes_in_turn(folder):
    assert sorted(make_task(folder, train_samples=5).data.train.labels) == [0, 0, 0, 1, 1]
    with pytest.raises(UserError, match="train_samples: got 17, expected 1 to 16, the number"):
        make_task(folder, train_samples=17)


def test_a_sample_that_cannot_be_decoded_gives_way_to_its_neighbour(folder):
    path = folder / "train" / "cat" / "3.jpg"
    path.write_bytes(path.read_bytes()[:400])  # a truncated JPEG
    (folder / "train" / "dog" / "2.jpg").write_text("this is a text")
    task = make_task(folder, augment=None)
    image, label, failed = sample(task.data.train, 0, 3, 0)
    assert label == 0 and torch.equal(image, sample(task.data.train, 0, 4, 0)[0])
    assert failed.startswith(str(path)) and "truncated" in failed.lower()
    first = batches(task)
    notices = task.notices()
    assert len(notices) == 2 and task.notices() == [] and str(path) in " ".join(notices)
    again = make_task(folder, augment=None, workers=2)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, batches(again), strict=True))
    with pytest.raises(UserError, match=r"\d samples cannot be decoded, expected at most max_undecodable=0"):
        batches(make_task(folder, max_undecodable=0))


def test_images_that_cannot_be_decoded_are_left_out_of_the_scores(folder):
    """Neither a neighbour nor a guess stands in for them, and they are named."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 2))
    task = make_task(folder, augment=None)
    logits = torch.cat([model(sample(task.data.val, 0, index, 0)[0][None]) for index in range(6)])
    labels = torch.from_numpy(task.data.val.labels)
    kept = [1, 2, 4]
    for index in {*range(6)} - {*kept}:
        Path(task.data.val.images.name(index)).write_text("this is a text")
    task = make_task(folder, augment=None)
    scores = task.evaluate(model, BatchShard(), CPU)
    assert scores["loss"] == pytest.approx(nn.functional.cross_entropy(logits[kept], labels[kept]).item(), abs=1e-5)
    assert scores["top1"] == pytest.approx((logits.argmax(1) == labels)[kept].float().mean().item() * 100, abs=1e-3)
    *skipped, told = task.notices()
    assert len(skipped) == task.facts()["undecodable"] == task.facts()["samples"]["evaluated"] == 3
    assert told == "the metrics cover 3 of the 6 images to evaluate"
    later = make_task(folder, augment=None)  # of a process that goes on from a checkpoint
    later.load_state_dict(task.state_dict())
    assert later.facts() == task.facts() and later.notices() == [] and later.state_dict() == task.state_dict()
    for count, index in reversed([*enumerate(kept)]):
        Path(task.data.val.images.name(index)).unlink()
        Path(task.data.val.images.name(index)).touch()
        with pytest.raises(UserError, match=f"{count} of the 6 images to evaluate can be decoded, expected at least"):
            make_task(folder, augment=None).evaluate(model, BatchShard(), CPU)


def test_of_several_ranks_that_can_decode_too_little_rank_0_says_it_and_none_goes_on(folder):
    for path in (folder / "val").rglob("*.jpg"):
        path.write_text("this is a text")
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 2))
    for rank, expected in ((0, UserError), (1, SystemExit)):
        with pytest.raises(expected):
            make_task(folder, augment=None).evaluate(model, BatchShard(rank, 2), CPU)


def test_a_class_of_which_no_image_is_scored_is_named(folder):
    """Its images cannot be decoded, so that the scores are of the other class alone."""
    task = make_task(folder, augment=None)
    for index in np.flatnonzero(task.data.val.labels == 1):
        Path(task.data.val.images.name(index)).write_text("this is a text")
    task = make_task(folder, augment=None)
    task.evaluate(nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 2)), BatchShard(), CPU)
    lost = task.data.classes[1]
    assert task.notices()[-1] == f"the metrics cover 3 of the 6 images to evaluate, none of them of {lost}"


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda f: [p.unlink() for p in (f / "train").rglob("*.jpg")], "found no images in "),
        (lambda f: (f / "val" / "dog").rename(f / "val" / "fox"), "val/fox: got images of a class that has no folder"),
        (lambda f: (f / "val").rename(f / "elsewhere"), "has no folder val or validation or valid or test"),
        (lambda f: (f / "train").rename(f / "training"), "has no folder train, got training, val"),
    ],
)
def test_folders_that_do_not_fit_are_refused(folder, capsys, spoil, expected):
    spoil(folder)
    status = main(["train", "cifar10/shallow", "--data", str(folder), "--run", str(folder / "run")])
    err = capsys.readouterr().err
    assert status == 2 and expected in err and len(err.splitlines()) == 1 and not (folder / "run").exists()


def test_classes_that_the_head_does_not_have_are_refused(folder, capsys):
    status = main(["train", "cifar10/shallow", "--data", str(folder), "--run", str(folder / "run"), "batch_size=4",
                   "train_samples=8", "img_size=32", "model.args.num_classes=10"])  # fmt: skip
    assert status == 2 and "model.args.num_classes: got 10, expected the data's 2" in capsys.readouterr().err


def test_cifar_is_read_as_torchvision_reads_it(tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").touch()
    with pytest.raises(UserError, match="has no CIFAR10 in torchvision's format"):
        load_images(f"cifar10:{mine}", SPEC)
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]  # nothing is downloaded among other files
    root = tmp_path / "cifar" / CIFAR10.base_folder
    root.mkdir(parents=True)

    def store(name, content):
        (root / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((root / name).read_bytes()).hexdigest()

    rng = np.random.default_rng(0)
    splits = {name: rng.integers(0, 256, (3, 3072), dtype=np.uint8) for name in ("train", "test")}
    for name, data in splits.items():
        monkeypatch.setattr(CIFAR10, f"{name}_list", [[name, store(name, {"data": data, "labels": [1, 0, 1]})]])
    meta = {"filename": "meta", "key": "label_names", "md5": store("meta", {"label_names": ["plane", "car"]})}
    monkeypatch.setattr(CIFAR10, "meta", meta)
    images = load_images(f"cifar10:{root.parent}", InputSpec((3, 32, 32), (0.5,) * 3, (0.25,) * 3, crop_pct=1.0))
    assert images.classes == ("plane", "car") and len(images.train) == len(images.val) == 3
    for samples, data in ((images.train, splits["train"]), (images.val, splits["test"])):
        image, label, failed = sample(samples, 0, 0, 0)
        expected = (torch.from_numpy(data[0].reshape(3, 32, 32) / 255.0).float() - 0.5) / 0.25
        assert (label, failed) == (1, "") and torch.allclose(image, expected, atol=1e-6)

    archive = Path(shutil.make_archive(str(tmp_path / "cifar"), "gztar", root.parent))
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setenv("NO_PROXY", "localhost")
    downloads = []

    class Server(SimpleHTTPRequestHandler):
        def do_GET(self):
            downloads.append(self.path)
            super().do_GET()

    with ThreadingHTTPServer(("localhost", 0), partial(Server, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(CIFAR10, "url", f"http://localhost:{server.server_port}/{archive.name}")
        # what the user has changed stays as it is
        (root / "train").write_bytes(b"labels of my own")
        with pytest.raises(UserError, match="Dataset not found or corrupted"):
            load_images(f"cifar10:{root.parent}", SPEC)
        assert (root / "train").read_bytes() == b"labels of my own"
        # also where a first try without network has left its mark before them
        (root.parent / ".downloading").touch()
        with pytest.raises(UserError, match=f"data: {root} is incomplete; remove it to have it downloaded again"):
            load_images(f"cifar10:{root.parent}", SPEC)
        assert (root / "train").read_bytes() == b"labels of my own" and (root.parent / ".downloading").exists()
        store("train", {"data": splits["train"], "labels": [1, 0, 1]})  # and what is whole is used
        copied = load_images(f"cifar10:{root.parent}", SPEC)
        assert np.array_equal(copied.train.images.images, images.train.images.images)
        assert not downloads and [path.name for path in root.parent.iterdir()] == [CIFAR10.base_folder]
        # of a download that was cut off nothing is kept that is not whole
        cut = tmp_path / "cut"
        parts = f".downloading.parts/{CIFAR10.base_folder}"
        (cut / parts).mkdir(parents=True)
        for name in (".downloading", f"{parts}/train", f"{parts}/meta"):
            (cut / name).touch()
        (cut / CIFAR10.filename).write_bytes(archive.read_bytes()[:100])
        for path in (cut, tmp_path / "new"):
            downloads.clear()
            with ThreadPoolExecutor(4) as ranks:  # at once
                for found in ranks.map(lambda path: load_images(f"cifar10:{path}", SPEC), [path] * 4):
                    assert np.array_equal(found.train.images.images, images.train.images.images)
            assert sorted(file.name for file in path.iterdir()) == [CIFAR10.base_folder, CIFAR10.filename]
            # torchvision asks for it twice
            assert len(downloads) == 2 and not (tmp_path / f".{path.name}.lock").exists()
        server.shutdown()


def test_a_folder_is_used_by_one_run_at_a_time(folder, capsys):
    run = folder / "run"
    open_run_folder(run, closed(find_recipe("digits/tiny")), resume=False)
    with lock_folder(run):
        assert main(["train", "digits/tiny", "--run", str(run), "--resume"]) == 2
    assert f"{run} is in use by a run that is still alive" in capsys.readouterr().err
    with lock_folder(run):  # the end of the block releases it
        pass


def test_eval_scores_a_file_of_weights_of_any_timm_model(folder, tmp_path, capsys):
    model = timm.create_model("test_vit", num_classes=1000)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    asked = ["--data", f"folder:{folder}", "--json"]
    assert main(["eval", str(tmp_path / "w.safetensors"), "--model", "test_vit", *asked]) == 2
    assert "do not fit the model: got head.weight (1000, 64), expected (2, 64)" in capsys.readouterr().err
    save_file(timm.create_model("test_vit", num_classes=2).state_dict(), tmp_path / "two.safetensors")
    assert main(["eval", str(tmp_path / "two.safetensors"), "--model", "test_vit", *asked]) == 0
    with pytest.raises(UserError, match="tensors do not fit the model"):
        evaluate_checkpoint(tmp_path / "two.safetensors", "test_vit2", f"folder:{folder}", {"num_classes": 2})
    scored = evaluate_checkpoint(tmp_path / "two.safetensors", "test_vit", f"folder:{folder}", {"num_classes": 2})
    assert 0 <= scored["top1"] <= 100 and scored == json.loads(capsys.readouterr().out)


def test_what_a_score_does_not_cover_is_said_with_it(folder, tmp_path, capsys):
    """An evaluation has no lines before the training, where a run is told of it."""
    for path in (folder / "val" / "dog").iterdir():
        path.unlink()
    for place in ("val/cat/a.heic", "val/0.png", "val/1.JPG", "val/.hidden.png", "val/notes.txt", "train/0.png"):
        (folder / place).touch()
    told = [
        "left out 1 file (.heic) and 2 images beside the class folders in val",
        "no evaluated images of dog: the metrics cover only the other classes",
    ]
    task = make_task(folder, for_training=False)
    assert (task.notices(), task.notices()) == (told, [])
    trained = make_task(folder)
    assert trained.notices() == []
    assert trained.remarks()[:3] == ["left out 1 image beside the class folders in train", *told]
    save_file(timm.create_model("test_vit", num_classes=2).state_dict(), tmp_path / "w.safetensors")
    asked = ["--model", "test_vit", "--data", f"folder:{folder}"]
    assert main(["eval", str(tmp_path / "w.safetensors"), *asked]) == 0
    assert capsys.readouterr().err.splitlines() == [f"stepsnet: {line}" for line in told]


def test_a_file_whose_classes_timm_may_have_ordered_in_its_way_is_told(tmp_path, capsys):
    """Numbers by their value, and without regard to case; a run has the names of its classes beside its weights."""
    images, file = tmp_path / "images", tmp_path / "w.safetensors"
    for split in ("train", "val"):
        for name in ("1", "2", "10"):
            (images / split / name).mkdir(parents=True)
            Image.new("RGB", (16, 16)).save(images / split / name / "0.png")
    save_file(timm.create_model("test_vit", num_classes=3).state_dict(), file)
    asked = ["eval", str(file), "--model", "test_vit", "--data", f"folder:{images}"]
    assert main(asked) == 0
    said = f"{file} does not name its classes: its output 1 is taken to be class 10; if timm's train.py trained"
    assert (
        said in (found := capsys.readouterr().err)
        and "it on these folders, that output is class 2, and others differ too" in found
    )
    (tmp_path / "classes.json").write_text('["1", "10", "2"]')
    assert main(asked) == 0 and "does not name" not in capsys.readouterr().err
    (tmp_path / "classes.json").write_text('["1", "2", "10"]')
    assert main(asked) == 2
    assert f"data: got '10' as class 1, expected '2' as in {tmp_path}" in capsys.readouterr().err
    (tmp_path / "classes.json").unlink()
    for split in ("train", "val"):
        (images / split / "10").rename(images / split / "3")
    assert main(asked) == 0 and "does not name" not in capsys.readouterr().err


def test_what_is_evaluated_needs_no_training_images(folder, tmp_path, capsys):
    data, run, weights = f"folder:{folder}", tmp_path / "run", tmp_path / "w.safetensors"
    short = ["img_size=32", "batch_size=4", "epochs=1", "warmup_epochs=0", "train_samples=16"]
    assert main(["train", "cifar10/shallow", "--data", data, "--run", str(run), *short]) == 0
    save_file(timm.create_model("test_vit", num_classes=2).state_dict(), weights)
    asked = (["eval", str(run), "--data", data], ["eval", str(weights), "--model", "test_vit", "--data", data])
    capsys.readouterr()
    expected = [main(command) or capsys.readouterr().out for command in asked]
    for image in (folder / "train").rglob("*.jpg"):
        image.unlink()  # the folders still say which classes there are
    assert [main(command) or capsys.readouterr().out for command in asked] == expected
    shutil.rmtree(folder / "train")
    assert [main(command) or capsys.readouterr().out for command in asked] == expected
    assert main(["eval", str(run), "--data", f"{data}@train"]) == 2
    assert "has no folder train, got " in capsys.readouterr().err
    assert len(load_images(f"{data}@test", SPEC, holdout=2, for_training=False).val) == 6
    for split in ("", "@train"):
        with pytest.raises(UserError, match="has no folder train, got "):
            load_images(f"{data}{split}", SPEC, holdout=2, for_training=False)
    with pytest.raises(UserError, match="has no folder train, got "):
        load_images(data, SPEC)
    (folder / "val" / "dog").rename(folder / "val" / "cow")
    assert main(asked[0]) == 2 and "expected 'dog' as in" in capsys.readouterr().err


def test_all_files_are_read_before_the_first_is_used_and_then_one_at_a_time(tmp_path, capsys):
    seen = []

    def read(file):
        seen.append(file.name)
        if not file.exists():
            raise UnreadableImage("no such file")
        return file.read_bytes()

    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_text(file.name)
    given = read_again(PredictInputs(files=files).readable(read).files, read)
    assert next(given) == b"a" and seen == ["a", "b", "a"]
    assert next(given) == b"b" and next(given, None) is None and seen == ["a", "b", "a", "b"]
    with pytest.raises(UserError, match=r"cannot read .*none as an image: no such file"):
        PredictInputs(files=[*files, tmp_path / "none"]).readable(read)
    assert capsys.readouterr() == ("", "")  # a bar is for a terminal


def test_predict_takes_the_classes_from_the_run_and_opens_no_data(folder, tmp_path, capsys):
    recipe = ClassificationRecipe(
        name="tiny",
        model=ModelSpec("test_vit", {"num_classes": 2, "img_size": 32}),
        data=f"folder:{folder}",
        batch_size=4,
    )
    model, task = build_task(recipe)
    run = tmp_path / "run"
    open_run_folder(run, recipe, resume=False)
    task.save_assets(model, run)
    save_weights(run / "model.safetensors", model.state_dict())
    asked = ["predict", str(run), str(folder / "val" / "cat" / "0.jpg"), "--json"]
    assert main(asked) == 0
    (expected,) = json.loads(capsys.readouterr().out)
    assert set(expected["classes"]) == {"cat", "dog"}
    shutil.rmtree(folder / "train")
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out) == [expected]
    (run / "classes.json").write_text("{}")
    assert main(asked) == 2 and "expected a list of class names" in capsys.readouterr().err
