"""Cascade Mask R-CNN (Cai and Vasconcelos, 2019) as in Swin's detectors: torchvision's heads, stage after stage.

Each stage is a :class:`RoIHeads` of torchvision with its own IoU threshold, weights and losses, and starts from the
boxes that the stage before it has refined (Table 2b). Without mask heads it is Cascade R-CNN (2018), for boxes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead
from torchvision.models.detection.roi_heads import RoIHeads, maskrcnn_inference, maskrcnn_loss
from torchvision.ops import clip_boxes_to_image, generalized_box_iou_loss, remove_small_boxes

from .mask_rcnn import BOXES, Detector, create_detector, create_roi_heads

__all__ = ["STAGES", "CascadeRoIHeads", "create", "create_heads", "giou_losses"]

# per stage: least IoU of a positive box, weight of the losses, weights of the box regression
STAGES = (
    (0.5, 1.0, (10.0, 10.0, 5.0, 5.0)),
    (0.6, 0.5, (20.0, 20.0, 10.0, 10.0)),
    (0.7, 0.25, (30.0, 30.0, 15.0, 15.0)),
)
GIOU_WEIGHT = 10.0

Boxes = list[Tensor]  # (N, 4) per image
Target = dict[str, Tensor]


def giou_losses(
    stage: RoIHeads, logits: Tensor, deltas: Tensor, boxes: Boxes, labels: list[Tensor], targets: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Cross-entropy, and ten times the GIoU loss of the decoded positive boxes, divided by the number of all boxes.

    Shape: logits (N, classes), deltas (N, 4 · classes), and boxes, labels and regression targets per image.
    """
    classes, proposals = torch.cat(labels), torch.cat(boxes)
    positive = torch.where(classes > 0)[0]
    positive_deltas = _of_class(deltas, classes)[positive]  # (P, 4)
    predicted = stage.box_coder.decode_single(positive_deltas, proposals[positive])
    matched = stage.box_coder.decode_single(torch.cat(targets)[positive], proposals[positive])
    loss = generalized_box_iou_loss(predicted, matched, reduction="sum") / max(1, len(classes))
    return nn.functional.cross_entropy(logits, classes), GIOU_WEIGHT * loss


class CascadeRoIHeads(nn.Module):
    """RoI heads in stages, to be used as ``roi_heads`` of a detector.

    Args:
        stages: torchvision's RoIHeads, all with mask heads or all without.
        weights: factor of the losses, per stage.

    Raises:
        ValueError: no stage, or not one weight per stage.
    """

    def __init__(self, stages: Sequence[RoIHeads], weights: Sequence[float]):
        super().__init__()
        if len(stages) != len(weights) or not stages:
            raise ValueError(f"weights: got {len(weights)}, expected one for each of the {len(stages)} stages")
        self.stages: Any = nn.ModuleList(stages)  # each a RoIHeads
        self.weights = tuple(weights)

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: Boxes,
        image_shapes: list[tuple[int, int]],
        targets: list[Target] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """As torchvision's RoIHeads: detections per image, or losses by name, with the stages counted from 1."""

        def pooled(pool: nn.Module, boxes: Boxes) -> Tensor:
            return pool(features, boxes, image_shapes)

        if self.training:
            assert targets is not None
            return [], self._losses(pooled, proposals, image_shapes, targets)
        return self._detections(pooled, proposals, image_shapes), {}

    def _losses(
        self, pooled: Callable, proposals: Boxes, image_shapes: list, targets: list[Target]
    ) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        for number, (stage, weight) in enumerate(zip(self.stages, self.weights), 1):
            boxes, matched, labels, box_targets = stage.select_training_samples(proposals, targets)
            logits, deltas = stage.box_predictor(stage.box_head(pooled(stage.box_roi_pool, boxes)))
            class_loss, box_loss = giou_losses(stage, logits, deltas, boxes, labels, box_targets)
            of_stage = {"classifier": class_loss, "box_reg": box_loss}
            if stage.has_mask():
                of_stage["mask"] = _mask_loss(stage, pooled, boxes, matched, labels, targets)
            losses |= {f"loss_{name}_{number}": weight * loss for name, loss in of_stage.items()}
            if number < len(self.stages):
                classes = torch.cat(labels)
                predicted = 1 + logits[:, 1:].argmax(-1)
                refined = self._refine(stage, deltas, torch.where(classes > 0, classes, predicted), boxes, image_shapes)
                proposals = [
                    image_boxes[~_among(sampled, target["boxes"])]  # the next stage adds the targets' boxes again
                    for image_boxes, sampled, target in zip(refined, boxes, targets)
                ]
                proposals = [image_boxes[remove_small_boxes(image_boxes, min_size=1e-2)] for image_boxes in proposals]
        return losses

    def _detections(self, pooled: Callable, proposals: Boxes, image_shapes: list) -> list[dict[str, Tensor]]:
        """The boxes come from the last stage; class logits and mask probabilities are averaged over the stages."""
        all_logits = []
        for number, stage in enumerate(self.stages, 1):
            logits, deltas = stage.box_predictor(stage.box_head(pooled(stage.box_roi_pool, proposals)))
            all_logits.append(logits)
            if number < len(self.stages):
                predicted = 1 + logits[:, 1:].argmax(-1)
                proposals = self._refine(stage, deltas, predicted, proposals, image_shapes)
        mean = torch.stack(all_logits).mean(0)
        boxes, scores, labels = stage.postprocess_detections(mean, deltas, proposals, image_shapes)
        found = [dict(zip(("boxes", "labels", "scores"), of_image)) for of_image in zip(boxes, labels, scores)]
        if stage.has_mask():
            masks = [
                maskrcnn_inference(stage.mask_predictor(stage.mask_head(pooled(stage.mask_roi_pool, boxes))), labels)
                for stage in self.stages
            ]
            for of_image, image_masks in zip(found, zip(*masks)):
                of_image["masks"] = torch.stack(image_masks).mean(0)
        return found

    @staticmethod
    def _refine(stage: RoIHeads, deltas: Tensor, classes: Tensor, boxes: Boxes, image_shapes: list) -> Boxes:
        """Apply the deltas of the given classes (N), and clip the boxes to the images; no gradients pass through."""
        refined = stage.box_coder.decode_single(_of_class(deltas.detach(), classes), torch.cat(boxes))  # (N, 4)
        per_image = refined.split([len(image_boxes) for image_boxes in boxes])
        return [clip_boxes_to_image(image_boxes, shape) for image_boxes, shape in zip(per_image, image_shapes)]


def _mask_loss(
    stage: RoIHeads, pooled: Callable, boxes: Boxes, matched: list[Tensor], labels: list[Tensor], targets: list[Target]
) -> Tensor:
    positive = [torch.where(image_labels > 0)[0] for image_labels in labels]
    positive_boxes = [image_boxes[index] for image_boxes, index in zip(boxes, positive)]
    head: Any = stage  # by torchvision's types, its mask head may be missing
    return maskrcnn_loss(
        head.mask_predictor(head.mask_head(pooled(head.mask_roi_pool, positive_boxes))),
        positive_boxes,
        [target["masks"] for target in targets],
        [target["labels"] for target in targets],
        [image_matches[index] for image_matches, index in zip(matched, positive)],
    )


def _of_class(deltas: Tensor, classes: Tensor) -> Tensor:
    """The deltas of one class per box: (N, 4 · classes), (N) -> (N, 4)."""
    return deltas.unflatten(-1, (-1, 4))[torch.arange(len(classes), device=classes.device), classes]


def _among(boxes: Tensor, others: Tensor) -> Tensor:
    """Whether each box is exactly equal to one of the others: (N, 4), (M, 4) -> (N)."""
    return (boxes[:, None] == others.to(boxes)).all(-1).any(-1)


def create_heads(channels: int, hidden: int, num_classes: int, samples: int, masks: bool = True) -> CascadeRoIHeads:
    """The heads of Cascade Mask R-CNN or, without ``masks``, those of Cascade R-CNN."""
    stages = []
    for iou, _, weights in STAGES:
        head = FastRCNNConvFCHead((channels, BOXES, BOXES), [channels] * 4, [hidden], norm_layer=nn.BatchNorm2d)
        stages.append(create_roi_heads(head, hidden, num_classes, channels, samples, iou, weights, masks))
    return CascadeRoIHeads(stages, [weight for _, weight, _ in STAGES])


def create(backbone: str, *args: Any, masks: bool = True, **kwargs: Any) -> Detector:
    """Cascade Mask R-CNN or, without ``masks``, Cascade R-CNN; the arguments are those of
    :func:`.mask_rcnn.create_detector`.

    Each box head is four 3×3 convolutions with batch norm and one linear layer.
    """
    return create_detector(partial(create_heads, masks=masks), backbone, *args, **kwargs)
