"""Mask R-CNN (He et al., 2017) from torchvision's modules, on the backbone of a Steps or timm model (Table 2).

Without its mask head it is Faster R-CNN (Ren et al., 2015), for data that have only boxes. The settings are those of
Swin's detectors. Labels are 1 … num_classes; 0 is the background.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from torchvision.ops.poolers import initLevelMapper

from .backbone import STRIDES, PyramidBackbone, check_color, create_backbone, mean_and_std_of

__all__ = [
    "BOXES",
    "MASKS",
    "BoxPredictor",
    "Detector",
    "FeaturePyramid",
    "create",
    "create_detector",
    "create_heads",
    "create_roi_heads",
]

ANCHORS = (32, 64, 128, 256, 512)  # side lengths in pixels, one per level
RATIOS = (0.5, 1.0, 2.0)  # height over width
BOXES, MASKS = 7, 14  # side lengths of the RoI features of the box head and of the mask head
_LEVELS = ["0", "1", "2", "3"]  # from which RoIs are pooled; the coarsest level, "pool", is for the RPN alone


class FeaturePyramid(nn.Module):
    """A backbone with torchvision's FPN: five levels with ``out_channels`` channels.

    Shape: (B, 3, H, W) -> {"0", …, "3", "pool"}: (B, out_channels, ⌈H / s⌉, ⌈W / s⌉), s = 4, 8, 16, 32, 64.
    """

    def __init__(self, body: PyramidBackbone, out_channels: int):
        super().__init__()
        self.body, self.out_channels = body, out_channels
        self.fpn = FeaturePyramidNetwork(body.channels, out_channels, extra_blocks=LastLevelMaxPool())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.fpn(OrderedDict(zip(_LEVELS, self.body(images))))


class _RPNHead(RPNHead):
    """Outputs float32 even under autocast: boxes get the dtype of the outputs, and near 1,100 pixels bfloat16 resolves
    only 8 pixels."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        objectness, deltas = super().forward(x)
        return [level.float() for level in objectness], [level.float() for level in deltas]


class _AnchorGenerator(AnchorGenerator):
    """Anchors in float32 even under autocast, where torchvision gives them the dtype of the maps; see above."""

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        float_maps = [torch.empty((), dtype=torch.float32, device=x.device).expand(x.shape) for x in feature_maps]
        return super().forward(image_list, float_maps)  # only the maps' shape, dtype and device are used


class BoxPredictor(FastRCNNPredictor):
    """Outputs float32 even under autocast. Shape: (N, hidden) -> (N, classes), (N, 4 · classes)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, deltas = super().forward(x)
        return logits.float(), deltas.float()


class _MaskPredictor(MaskRCNNPredictor):
    """Outputs float32 even under autocast. Shape: (N, C, 14, 14) -> (N, classes, 28, 28)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class _Transform(GeneralizedRCNNTransform):
    """Gives the short side of a very elongated image one pixel, which torchvision's transform would round to none."""

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        short, long = sorted(image.shape[-2:])
        scale = min(self.min_size[-1] / short, self.max_size / long)
        if self.training or int(short * scale) >= 1:
            return super().resize(image, target)
        size = [max(1, int(side * scale)) for side in image.shape[-2:]]
        return nn.functional.interpolate(image[None], size=size, mode="bilinear", align_corners=False)[0], target


class Detector(GeneralizedRCNN):
    """Backbone with FPN, RPN, and RoI heads such as those of Mask R-CNN.

    In training it takes images (3, H, W) in 0 … 1 that are already resized, with targets ("boxes" (N, 4) as
    x1, y1, x2, y2 in pixels, "labels" (N), "masks" (N, H, W)), and returns losses. In evaluation it resizes the
    images itself, and returns for each image the boxes, labels, scores and soft masks (N, 1, H, W) at its original
    size. Without mask heads, neither the targets nor the results have masks.

    Args:
        backbone: the five feature levels.
        roi_heads: torchvision's RoIHeads, or a module with the same signature.
        num_classes: number of object classes, without the background.
        size, max_size: length of an image's shorter side and most for its longer side, in evaluation, in pixels.
        anchors: side lengths in pixels, one per level.
        mean, std: those that the backbone was trained with, per channel.
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
            pre_nms_top_n={"training": 2000, "testing": 1000},  # per level
            post_nms_top_n={"training": 1000, "testing": 1000},  # per image
            nms_thresh=0.7,
        )
        transform = _Transform(size, max_size, list(mean), list(std), size_divisible=32, _skip_resize=True)
        super().__init__(backbone, rpn, roi_heads, transform)
        self.num_classes = num_classes

    @property
    def trunk(self) -> nn.Module:
        """The module that holds the residual blocks, for :func:`stepsnet.models.blocks.blocks_of`."""
        return self.backbone.body.features

    def no_weight_decay(self) -> set[str]:
        return {f"backbone.body.{name}" for name in self.backbone.body.no_weight_decay()}


def create_roi_pool(side: int) -> MultiScaleRoIAlign:
    """A pool of RoI features of ``side``² by the backbone's strides. torchvision would guess these once, from the first
    image, and wrongly if that is low and wide, since the maps are those of padded images."""
    pool = MultiScaleRoIAlign(_LEVELS, side, sampling_ratio=2)
    pool.scales = [1 / stride for stride in STRIDES]
    pool.map_levels = initLevelMapper(*(int(math.log2(stride)) for stride in (STRIDES[0], STRIDES[-1])))
    return pool


def create_roi_heads(
    box_head: nn.Module,
    hidden: int,
    num_classes: int,
    channels: int,
    samples: int,
    iou: float,
    weights: Sequence[float],
    masks: bool,
) -> RoIHeads:
    """torchvision's heads for boxes and, if wanted, for masks.

    Args:
        box_head: (N, channels, 7, 7) -> (N, hidden).
        hidden: width of the box head's output.
        num_classes: number of object classes, without the background.
        channels: number of the FPN's channels.
        samples: boxes per image to train on, a quarter of them positive.
        iou: least overlap of a positive box.
        weights: those of the box regression for x, y, width and height.
        masks: whether there is a mask head.
    """
    return RoIHeads(
        box_roi_pool=create_roi_pool(BOXES),
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
        mask_roi_pool=create_roi_pool(MASKS) if masks else None,
        mask_head=MaskRCNNHeads(channels, (channels,) * 4, dilation=1) if masks else None,
        mask_predictor=_MaskPredictor(channels, channels, 1 + num_classes) if masks else None,
    )


_SMALLEST = 16  # side of the smallest image that leaves something in the backbone's deepest map


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
        make_heads: a function of (channels, hidden, num_classes, samples) that returns the RoI heads.
        backbone: name of a timm or StepsNet model.
        backbone_args: arguments of :func:`create_backbone`.
        num_classes: number of object classes, without the background.
        size, max_size: see :class:`Detector`.
        anchors: side lengths in pixels, one for each of the five levels.
        channels: number of channels of the FPN and of the convolutions after it.
        hidden: width of the box head.
        samples: boxes per image to train on. The defaults of the last three are Swin's; tests use smaller ones.

    Raises:
        ValueError: an unknown backbone, or a number out of range.
    """
    if num_classes < 1:
        raise ValueError(f"num_classes: got {num_classes}, expected at least 1")
    if not _SMALLEST <= size <= max_size:
        raise ValueError(f"size, max_size: got {size} and {max_size}, expected {_SMALLEST} <= size <= max_size")
    if len(anchors) != len(ANCHORS):
        raise ValueError(f"anchors: got {len(anchors)} sides, expected {len(ANCHORS)}, one per level")
    check_color(backbone_args or {})
    pyramid = FeaturePyramid(create_backbone(backbone, **(backbone_args or {})), channels)
    heads = make_heads(channels, hidden, num_classes, samples)
    return Detector(pyramid, heads, num_classes, size, max_size, anchors, *mean_and_std_of(backbone))


def create_heads(channels: int, hidden: int, num_classes: int, samples: int, masks: bool = True) -> RoIHeads:
    """The heads of Mask R-CNN or, without ``masks``, those of Faster R-CNN."""
    box_head = TwoMLPHead(channels * BOXES**2, hidden)
    return create_roi_heads(box_head, hidden, num_classes, channels, samples, 0.5, (10.0, 10.0, 5.0, 5.0), masks)


def create(backbone: str, *args: Any, masks: bool = True, **kwargs: Any) -> Detector:
    """Mask R-CNN or, without ``masks``, Faster R-CNN; the arguments are those of :func:`create_detector`."""
    return create_detector(partial(create_heads, masks=masks), backbone, *args, **kwargs)
