"""Small detectors, and images with objects for them."""

import torch

from stepsnet.models.build import build_model
from stepsnet.settings.config import ModelSpec

CLASSES = 3
SMALL = {"num_classes": CLASSES, "size": 64, "max_size": 96, "channels": 16, "hidden": 24, "samples": 32}
SMALL["anchors"] = (8, 16, 32, 64, 128)


def build(name, backbone="test_steps_swin", **args):
    torch.manual_seed(0)
    return build_model(ModelSpec(name, {"backbone": backbone, **SMALL, **args}))


def targets_of(*sizes):
    """Two rectangles an image, filled."""
    found = []
    for height, width in sizes:
        boxes = torch.tensor([[4.0, 6.0, width / 2, height / 2], [width / 3, 10.0, width - 2.0, height - 5.0]])
        masks = torch.zeros(2, height, width, dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist()):
            mask[y1:y2, x1:x2] = 1
        found.append({"boxes": boxes, "labels": torch.tensor([1, 3]), "masks": masks})
    return found


def images_of(*sizes):
    torch.manual_seed(1)
    return [torch.rand(3, height, width) for height, width in sizes]
