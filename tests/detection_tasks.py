"""A tiny recipe and task for detection, and detectors that know what there is to be found."""

import dataclasses

import torch
from torch import nn

from stepsnet.recipes import find_recipe
from stepsnet.settings.config import DetectionAugment
from stepsnet.settings.overrides import override
from stepsnet.tasks import build_task
from stepsnet.tasks.detection.data import DetectionSamples, load_coco

CPU = torch.device("cpu")
AUGMENT = DetectionAugment(sizes=(48, 64), max_size=96, flip=0.5, crop=0.5, crop_sizes=(64, 80), crop_range=(40, 64))
TINY = ["epochs=2", "batch_size=2", "device=cpu", "log_interval=1", "warmup_epochs=0", "model.args.num_classes=2"]
TINY += ["model.args.backbone=test_steps_swin", "model.args.backbone_args={}", "model.args.size=64"]
TINY += ["model.args.max_size=96", "model.args.channels=8", "model.args.hidden=16", "model.args.samples=16"]
TINY += ["model.args.anchors=[8,16,32,64,128]", "augment.sizes=[48,64]", "augment.max_size=96"]


def tiny(coco, *changes, name="pennfudan/mask_rcnn"):
    return override(dataclasses.replace(find_recipe(name), data=f"coco:{coco}", baseline=None), [*TINY, *changes])


def make_task(coco, *changes, **settings):
    return build_task(dataclasses.replace(tiny(coco, *changes), **{"batch_size": 4, "augment": AUGMENT, **settings}))[1]


class Knowing(nn.Module):
    """A detector that finds what is there, each with its score."""

    def __init__(self, data, score=lambda index: 0.9):
        super().__init__()
        self.score = score
        self.samples = DetectionSamples(data.val)
        self.images = [self.samples[0, index][0] for index in range(len(self.samples))]

    def forward(self, images):
        (image,) = images
        index = next(i for i, other in enumerate(self.images) if other.shape == image.shape and other.equal(image))
        target = self.samples.target(index)
        scores = torch.tensor([self.score(i) for i in range(len(target["labels"]))])
        masks = {"masks": target["masks"][:, None].float()} if "masks" in target else {}
        return [{**target, "scores": scores, **masks}]


class Unsure(Knowing):
    """Surest of something that is not there; the objects of every image count, and each once."""

    def forward(self, images):
        (found,) = super().forward(images)
        height, width = images[0].shape[-2:]
        nothing = {"boxes": torch.tensor([[0.0, 0.0, 5.0, height]]), "labels": torch.tensor([1])}
        nothing |= {"scores": torch.tensor([0.95]), "masks": torch.zeros(1, 1, height, width)}
        return [{key: torch.cat([found[key], nothing[key]]) for key in found}]


def load(root, **settings):
    return load_coco(f"coco:{root}", **settings)


def samples_of(root, augment=None, seed=0, **settings):
    """Those to train on."""
    return DetectionSamples(load(root, **settings).train, augment, seed)
