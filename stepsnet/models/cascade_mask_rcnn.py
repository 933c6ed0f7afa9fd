"""Cascade Mask R-CNN (Cai and Vasconcelos, 2019) as in Swin's detectors: torchvision's heads, stage after stage.

Each stage is a whole :class:`RoIHeads` of torchvision's with its own IoU, weights and losses, and starts from the
boxes that the stage before it has moved (Table 2b; the settings are in facts.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_inference, maskrcnn_loss
from torchvision.ops import clip_boxes_to_image, generalized_box_iou_loss, remove_small_boxes

from .mask_rcnn import BOXES, Detector, create_detector, create_roi_heads

__all__ = ["STAGES", "CascadeRoIHeads", "create", "giou_losses", "smooth_l1_losses"]

# IoU from which a box is positive, weight of the losses, weights of the regression
STAGES = (
    (0.5, 1.0, (10.0, 10.0, 5.0, 5.0)),
    (0.6, 0.5, (20.0, 20.0, 10.0, 10.0)),
    (0.7, 0.25, (30.0, 30.0, 15.0, 15.0)),
)
GIOU_WEIGHT = 10.0

Boxes = list[Tensor]  # (N, 4) for each image
Target = dict[str, Tensor]
# stage, logits (N, classes), deltas (N, 4 · classes), and by image: boxes, labels, regression targets -> two losses
BoxLosses = Callable[[RoIHeads, Tensor, Tensor, Boxes, list[Tensor], list[Tensor]], tuple[Tensor, Tensor]]


def giou_losses(
    stage: RoIHeads, logits: Tensor, deltas: Tensor, boxes: Boxes, labels: list[Tensor], targets: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Cross-entropy, and ten times the GIoU loss of the decoded boxes of the positives, a mean over all boxes."""
    classes, given = torch.cat(labels), torch.cat(boxes)
    positive = torch.where(classes > 0)[0]
    chosen = _of_class(deltas, classes)[positive]  # (P, 4)
    moved = stage.box_coder.decode_single(chosen, given[positive])
    wanted = stage.box_coder.decode_single(torch.cat(targets)[positive], given[positive])  # the boxes matched
    loss = generalized_box_iou_loss(moved, wanted, reduction="sum") / max(1, len(classes))
    return nn.functional.cross_entropy(logits, classes), GIOU_WEIGHT * loss


def smooth_l1_losses(
    stage: RoIHeads, logits: Tensor, deltas: Tensor, boxes: Boxes, labels: list[Tensor], targets: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """torchvision's."""
    return fastrcnn_loss(logits, deltas, labels, targets)


class CascadeRoIHeads(nn.Module):
    """Heads in stages, in the place of a detector's ``roi_heads``.

    Args:
        stages: with masks.
        weights: of each stage's losses.
        box_losses: of every stage, as :func:`giou_losses`.
    """

    def __init__(self, stages: Sequence[RoIHeads], weights: Sequence[float], box_losses: BoxLosses = giou_losses):
        super().__init__()
        if len(stages) != len(weights) or not stages:
            raise ValueError(f"weights: got {len(weights)}, expected one for each of {len(stages)} stages")
        self.stages: Any = nn.ModuleList(stages)  # each a RoIHeads
        self.weights, self.box_losses = tuple(weights), box_losses

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: Boxes,
        image_shapes: list[tuple[int, int]],
        targets: list[Target] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """As torchvision's: detections of each image, or losses by name, the stages numbered from 1."""

        def cut(pool: nn.Module, boxes: Boxes) -> Tensor:
            return pool(features, boxes, image_shapes)

        if self.training:
            assert targets is not None
            return [], self._losses(cut, proposals, image_shapes, targets)
        return self._detections(cut, proposals, image_shapes), {}

    def _losses(self, cut: Callable, proposals: Boxes, image_shapes: list, targets: list[Target]) -> dict[str, Tensor]:
        losses = {}
        for number, (stage, weight) in enumerate(zip(self.stages, self.weights), 1):
            boxes, matched, labels, wanted = stage.select_training_samples(proposals, targets)
            logits, deltas = stage.box_predictor(stage.box_head(cut(stage.box_roi_pool, boxes)))
            of_class, of_box = self.box_losses(stage, logits, deltas, boxes, labels, wanted)
            positive = [torch.where(of_image > 0)[0] for of_image in labels]
            positive_boxes = [of_image[index] for of_image, index in zip(boxes, positive)]
            masks = stage.mask_predictor(stage.mask_head(cut(stage.mask_roi_pool, positive_boxes)))
            of_mask = maskrcnn_loss(
                masks,
                positive_boxes,
                [target["masks"] for target in targets],
                [target["labels"] for target in targets],
                [of_image[index] for of_image, index in zip(matched, positive)],
            )
            for name, loss in (("classifier", of_class), ("box_reg", of_box), ("mask", of_mask)):
                losses[f"loss_{name}_{number}"] = weight * loss
            if number < len(self.stages):
                classes = torch.cat(labels)
                likeliest = 1 + logits[:, 1:].argmax(-1)
                moved = self._moved(stage, deltas, torch.where(classes > 0, classes, likeliest), boxes, image_shapes)
                proposals = [
                    of_image[~_among(sampled, target["boxes"])]  # each stage adds them anew
                    for of_image, sampled, target in zip(moved, boxes, targets)
                ]
                proposals = [of_image[remove_small_boxes(of_image, min_size=1e-2)] for of_image in proposals]
        return losses

    def _detections(self, cut: Callable, proposals: Boxes, image_shapes: list) -> list[dict[str, Tensor]]:
        """Class logits are averaged over the stages, the last one says where; masks are averaged as probabilities."""
        all_logits = []
        for number, stage in enumerate(self.stages, 1):
            logits, deltas = stage.box_predictor(stage.box_head(cut(stage.box_roi_pool, proposals)))
            all_logits.append(logits)
            if number < len(self.stages):
                likeliest = 1 + logits[:, 1:].argmax(-1)
                proposals = self._moved(stage, deltas, likeliest, proposals, image_shapes)
        mean = torch.stack(all_logits).mean(0)
        boxes, scores, labels = stage.postprocess_detections(mean, deltas, proposals, image_shapes)
        masks = [
            maskrcnn_inference(stage.mask_predictor(stage.mask_head(cut(stage.mask_roi_pool, boxes))), labels)
            for stage in self.stages
        ]
        return [
            {"boxes": boxes[i], "labels": labels[i], "scores": scores[i], "masks": torch.stack(of_image).mean(0)}
            for i, of_image in enumerate(zip(*masks))
        ]

    @staticmethod
    def _moved(stage: RoIHeads, deltas: Tensor, classes: Tensor, boxes: Boxes, image_shapes: list) -> Boxes:
        """The boxes as the stage moves those of these classes, within their images; no gradient goes through."""
        moved = stage.box_coder.decode_single(_of_class(deltas.detach(), classes), torch.cat(boxes))  # (N, 4)
        split = moved.split([len(of_image) for of_image in boxes])
        return [clip_boxes_to_image(of_image, shape) for of_image, shape in zip(split, image_shapes)]


def _of_class(deltas: Tensor, classes: Tensor) -> Tensor:
    """(N, 4 · classes), (N) -> (N, 4)."""
    return deltas.unflatten(-1, (-1, 4))[torch.arange(len(classes), device=classes.device), classes]


def _among(boxes: Tensor, others: Tensor) -> Tensor:
    """(N, 4), (M, 4) -> (N), whether a box is one of the others to the bit."""
    return (boxes[:, None] == others.to(boxes)).all(-1).any(-1)


def _heads(channels: int, hidden: int, num_classes: int, samples: int) -> CascadeRoIHeads:
    stages = []
    for iou, _, weights in STAGES:
        head = FastRCNNConvFCHead((channels, BOXES, BOXES), [channels] * 4, [hidden], norm_layer=nn.BatchNorm2d)
        stages.append(create_roi_heads(head, hidden, num_classes, channels, samples, iou, weights))
    return CascadeRoIHeads(stages, [weight for _, weight, _ in STAGES])


def create(backbone: str, *args: Any, **kwargs: Any) -> Detector:
    """Cascade Mask R-CNN; the arguments are those of :func:`.mask_rcnn.create_detector`.

    A box head is four 3×3 convolutions with batch norm and one linear layer.
    """
    return create_detector(_heads, backbone, *args, **kwargs)
