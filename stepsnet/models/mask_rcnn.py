"""Mask R-CNN (He et al., 2017) from torchvision's parts, on the backbone of any Steps or timm model (Table 2).

The settings are those of Swin's detectors (facts.md). Labels are 1 … num_classes, 0 is the background.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from .backbone import PyramidBackbone, create_backbone, normalisation_of

__all__ = [
    "BOXES",
    "MASKS",
    "BoxPredictor",
    "Detector",
    "FeaturePyramid",
    "create",
    "create_detector",
    "create_roi_heads",
]

ANCHORS = (32, 64, 128, 256, 512)  # sides in pixels, one a level
RATIOS = (0.5, 1.0, 2.0)
BOXES, MASKS = 7, 14  # sides of what is cut out of the maps
_LEVELS = ["0", "1", "2", "3"]  # those that boxes are cut out of: not the coarsest, which only the RPN sees


class FeaturePyramid(nn.Module):
    """A backbone with torchvision's FPN: five levels of ``out_channels``.

    Shape: (B, 3, H, W) -> {"0", …, "3", "pool"}: (B, out_channels, ⌈H / s⌉, ⌈W / s⌉), s = 4, 8, 16, 32, 64.
    """

    def __init__(self, body: PyramidBackbone, out_channels: int):
        super().__init__()
        self.body, self.out_channels = body, out_channels
        self.fpn = FeaturePyramidNetwork(body.channels, out_channels, extra_blocks=LastLevelMaxPool())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.fpn(OrderedDict(zip(_LEVELS, self.body(images))))


class _RPNHead(RPNHead):
    """In float32 under autocast too: the boxes are made in its outputs' type, and bfloat16 has steps of 8 pixels."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        objectness, deltas = super().forward(x)
        return [level.float() for level in objectness], [level.float() for level in deltas]


class _AnchorGenerator(AnchorGenerator):
    """In float32 under autocast too: it takes its type from the maps, and anchors at x = 1100 would move by pixels."""

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        alike = [torch.empty((), dtype=torch.float32, device=one.device).expand(one.shape) for one in feature_maps]
        return super().forward(image_list, alike)


class BoxPredictor(FastRCNNPredictor):
    """In float32 under autocast too. Shape: (N, hidden) -> (N, classes), (N, 4 · classes)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, deltas = super().forward(x)
        return logits.float(), deltas.float()


class _MaskPredictor(MaskRCNNPredictor):
    """In float32 under autocast too. Shape: (N, C, 14, 14) -> (N, classes, 28, 28)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class Detector(GeneralizedRCNN):
    """FPN, RPN and any heads.

    In training it takes images (3, H, W) in 0 … 1 that are resized already, with targets ("boxes" (N, 4) as
    x1, y1, x2, y2 in pixels, "labels" (N), "masks" (N, H, W)), and returns losses. In evaluation it resizes the
    images itself and returns boxes, labels, scores and soft masks (N, 1, H, W) of each at its own size.

    Args:
        num_classes: of objects, without the background.
        size, max_size: of an image's shorter and longer side in evaluation, in pixels.
        mean, std: of a channel, which the backbone was trained with.
    """

    def __init__(
        self,
        backbone: FeaturePyramid,
        roi_heads: nn.Module,
        num_classes: int,
        size: int = 800,
        max_size: int = 1333,
        anchors: Sequence[int] = ANCHORS,
        mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
        std: Sequence[float] = IMAGENET_DEFAULT_STD,
    ):
        generator = _AnchorGenerator(tuple((side,) for side in anchors), (RATIOS,) * len(anchors))
        rpn = RegionProposalNetwork(
            generator,
            _RPNHead(backbone.out_channels, len(RATIOS)),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=256,
            positive_fraction=0.5,
            pre_nms_top_n={"training": 2000, "testing": 1000},  # a level
            post_nms_top_n={"training": 1000, "testing": 1000},  # an image
            nms_thresh=0.7,
        )
        transform = GeneralizedRCNNTransform(
            size, max_size, list(mean), list(std), size_divisible=32, _skip_resize=True
        )
        super().__init__(backbone, rpn, roi_heads, transform)
        self.num_classes = num_classes

    @property
    def trunk(self) -> nn.Module:
        """Where the residual blocks are (:func:`.stream.blocks_of`)."""
        return self.backbone.body.features

    def no_weight_decay(self) -> set[str]:
        return {f"backbone.body.{name}" for name in self.backbone.body.no_weight_decay()}


def create_roi_heads(
    box_head: nn.Module,
    hidden: int,
    num_classes: int,
    channels: int,
    samples: int,
    iou: float,
    weights: Sequence[float],
) -> RoIHeads:
    """torchvision's heads for boxes and masks.

    Args:
        box_head: (N, channels, 7, 7) -> (N, hidden).
        samples: boxes an image that are trained on, a quarter of them positive.
        iou: from which overlap on a box is positive.
        weights: of a box's regression, x, y, width and height.
    """
    return RoIHeads(
        box_roi_pool=MultiScaleRoIAlign(_LEVELS, BOXES, sampling_ratio=2),
        box_head=box_head,
        box_predictor=BoxPredictor(hidden, 1 + num_classes),
        fg_iou_thresh=iou,
        bg_iou_thresh=iou,
        batch_size_per_image=samples,
        positive_fraction=0.25,
        bbox_reg_weights=tuple(weights),
        score_thresh=0.05,
        nms_thresh=0.5,
        detections_per_img=100,
        mask_roi_pool=MultiScaleRoIAlign(_LEVELS, MASKS, sampling_ratio=2),
        mask_head=MaskRCNNHeads(channels, (channels,) * 4, dilation=1),
        mask_predictor=_MaskPredictor(channels, channels, 1 + num_classes),
    )


def create_detector(
    make_heads: Callable[[int, int, int, int], nn.Module],
    backbone: str,
    backbone_args: Mapping[str, Any] | None = None,
    num_classes: int = 80,
    *,
    size: int = 800,
    max_size: int = 1333,
    anchors: Sequence[int] = ANCHORS,
    channels: int = 256,
    hidden: int = 1024,
    samples: int = 512,
) -> Detector:
    """A detector on a timm or StepsNet model.

    Args:
        make_heads: from (channels, hidden, num_classes, samples).
        backbone_args: of :func:`create_backbone`.
        anchors: sides in pixels, one for each of the five levels.
        channels: of the FPN and of what follows it. The last three are the paper's unless one wants it smaller.
        hidden: width of the box head.
        samples: boxes an image that are trained on.

    Raises:
        ValueError: a backbone that is none, or a number out of range.
    """
    if num_classes < 1:
        raise ValueError(f"num_classes: got {num_classes}, expected at least 1")
    if len(anchors) != len(ANCHORS):
        raise ValueError(f"anchors: got {len(anchors)} sides, expected {len(ANCHORS)}, one a level")
    pyramid = FeaturePyramid(create_backbone(backbone, **(backbone_args or {})), channels)
    heads = make_heads(channels, hidden, num_classes, samples)
    return Detector(pyramid, heads, num_classes, size, max_size, anchors, *normalisation_of(backbone))


def _heads(channels: int, hidden: int, num_classes: int, samples: int) -> RoIHeads:
    box_head = TwoMLPHead(channels * BOXES**2, hidden)
    return create_roi_heads(box_head, hidden, num_classes, channels, samples, 0.5, (10.0, 10.0, 5.0, 5.0))


def create(backbone: str, *args: Any, **kwargs: Any) -> Detector:
    """Mask R-CNN; the arguments are those of :func:`create_detector`."""
    return create_detector(_heads, backbone, *args, **kwargs)
