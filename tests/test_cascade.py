"""A cascade's own parts, written out: its stages, its losses, and what goes from stage to stage."""

from itertools import pairwise

import torch
from small_detectors import CLASSES, build, images_of, targets_of
from torch import nn

from stepsnet.models.cascade_mask_rcnn import CascadeRoIHeads, giou_losses


def giou(a, b):
    """Rezatofighi et al., 2019, for two boxes: IoU less the share of the enclosing box that neither covers."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(0, width) * max(0, height)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both
    hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
    return both / union - (hull - union) / hull


def moved(box, deltas, weights):
    """Girshick et al., 2014, with the weights that the regression is divided by."""
    dx, dy, dw, dh = (delta / weight for delta, weight in zip(deltas, weights))
    width, height = box[2] - box[0], box[3] - box[1]
    x, y = box[0] + width / 2 + dx * width, box[1] + height / 2 + dy * height
    width, height = width * torch.exp(dw), height * torch.exp(dh)
    return torch.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2])


def test_the_stages_are_swins():
    stages = build("cascade_mask_rcnn").roi_heads.stages
    assert [stage.proposal_matcher.high_threshold for stage in stages] == [0.5, 0.6, 0.7]
    assert [stage.proposal_matcher.low_threshold for stage in stages] == [0.5, 0.6, 0.7]
    expected = [(10, 10, 5, 5), (20, 20, 10, 10), (30, 30, 15, 15)]
    assert [stage.box_coder.weights for stage in stages] == expected
    for stage in stages:
        kinds = [type(module) for module in stage.box_head.modules() if not list(module.children())]
        conv = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]
        assert kinds == [*conv * 4, nn.Flatten, nn.Linear, nn.ReLU]
        assert stage.box_predictor.bbox_pred.out_features == 4 * (1 + CLASSES)  # of each class
    assert len({id(stage.mask_head) for stage in stages}) == 3


def test_giou_losses_are_the_formula():
    torch.manual_seed(0)
    stage = build("cascade_mask_rcnn").roi_heads.stages[1]
    boxes = [torch.tensor([[0.0, 0, 20, 30], [5, 5, 50, 25]]), torch.tensor([[10.0, 10, 40, 60]])]
    matched = [torch.tensor([[2.0, 1, 22, 28], [0, 0, 9, 9]]), torch.tensor([[8.0, 14, 45, 55]])]
    labels = [torch.tensor([2, 0]), torch.tensor([1])]
    logits, deltas = torch.randn(3, 1 + CLASSES), torch.randn(3, 4 * (1 + CLASSES))
    of_class, of_box = giou_losses(stage, logits, deltas, boxes, labels, list(stage.box_coder.encode(matched, boxes)))
    weights = (20, 20, 10, 10)
    first = giou(moved(boxes[0][0], deltas[0, 8:12], weights), matched[0][0])
    last = giou(moved(boxes[1][0], deltas[2, 4:8], weights), matched[1][0])
    torch.testing.assert_close(of_box, 10 * ((1 - first) + (1 - last)) / 3)  # of three boxes, one is background
    chosen = logits.log_softmax(-1)[torch.arange(3), torch.tensor([2, 0, 1])]
    torch.testing.assert_close(of_class, -chosen.mean())


class Fixed(nn.Module):
    """Heads that answer what they were given, and remember what they were asked."""

    def __init__(self, *answers):
        super().__init__()
        self.answers, self.asked = answers, []

    def forward(self, *asked):
        self.asked.append(asked)
        return self.answers if len(self.answers) > 1 else self.answers[0]


def test_boxes_go_from_stage_to_stage_and_scores_and_masks_are_averaged():
    """With heads whose outputs are given: two stages, one image of 100 × 100, two proposals."""
    torch.manual_seed(0)
    model = build("cascade_mask_rcnn", num_classes=2).eval()
    stages = list(model.roi_heads.stages)[:2]
    logits = [torch.tensor([[0.0, 3, 1], [0, 1, 4]]), torch.tensor([[1.0, 2, 0], [0, 0, 5]])]
    deltas = [torch.randn(2, 12), torch.randn(2, 12)]
    masks = [torch.randn(2, 3, 28, 28), torch.randn(2, 3, 28, 28)]
    for stage, classes, boxes, mask in zip(stages, logits, deltas, masks):
        stage.box_roi_pool, stage.box_head, stage.box_predictor = Fixed(None), Fixed(None), Fixed(classes, boxes)
        stage.mask_roi_pool, stage.mask_head, stage.mask_predictor = Fixed(None), Fixed(None), Fixed(mask)
        stage.score_thresh, stage.nms_thresh = 0.3, 1.0
    heads = CascadeRoIHeads(stages, [1.0, 0.5]).eval()
    proposals = torch.tensor([[10.0, 10, 50, 60], [20, 30, 80, 90]])
    ((found,), losses) = heads({}, [proposals], [(100, 100)])
    assert losses == {}
    first = [moved(proposals[i], deltas[0][i, 4 * c : 4 * c + 4], (10, 10, 5, 5)) for i, c in ((0, 1), (1, 2))]
    _, (asked,), _ = stages[1].box_roi_pool.asked[0]
    torch.testing.assert_close(asked, torch.stack(first).clamp(0, 100))  # each moved as its likeliest class
    scores = ((logits[0] + logits[1]) / 2).softmax(-1)
    last = [moved(asked[i], deltas[1][i, 4 * c : 4 * c + 4], (20, 20, 10, 10)) for i, c in ((0, 1), (1, 2))]
    order = torch.tensor([scores[0, 1], scores[1, 2]]).argsort(descending=True)
    torch.testing.assert_close(found["scores"], torch.stack([scores[0, 1], scores[1, 2]])[order])
    assert found["labels"].tolist() == [[1, 2][i] for i in order]
    torch.testing.assert_close(found["boxes"], torch.stack(last).clamp(0, 100)[order])
    for stage in stages:  # every mask head sees the final boxes
        assert torch.equal(stage.mask_roi_pool.asked[0][1][0], found["boxes"])
    average = (masks[0].sigmoid() + masks[1].sigmoid()) / 2
    expected = torch.stack([average[i, label] for i, label in enumerate(found["labels"])])
    torch.testing.assert_close(found["masks"][:, 0], expected)


def test_training_hands_moved_boxes_on_without_the_objects_own_and_weighs_the_losses():
    torch.manual_seed(0)
    model = build("cascade_mask_rcnn", backbone_args={"drop_path_rate": 0.0}).train()
    stages = list(model.roi_heads.stages)
    seen = []
    for stage in stages:
        select = stage.select_training_samples
        stage.select_training_samples = lambda p, t, s=select: seen.append((p, s(p, t))) or seen[-1][1]
    images, targets = images_of((64, 80)), targets_of((64, 80))
    losses = model(images, targets)
    assert len(seen) == 3
    for (_, (boxes, *_)), (handed_on, _) in pairwise(seen):
        own = (boxes[0][:, None] == targets[0]["boxes"]).all(-1).any(-1)
        assert own.sum() == 2 and 0 < len(handed_on[0]) <= len(boxes[0]) - 2
        inside = handed_on[0] >= 0
        assert inside.all() and (handed_on[0][:, 2] <= 80).all() and (handed_on[0][:, 3] <= 64).all()
        assert not handed_on[0].requires_grad
    # a positive is moved as the class of its object, another box as the likeliest class
    _, (boxes, _, labels, _) = seen[0]
    x = stages[0].box_roi_pool(model.backbone(model.transform(images)[0].tensors), boxes, [(64, 80)])
    logits, deltas = stages[0].box_predictor(stages[0].box_head(x))
    classes = [int(c) or 1 + int(row[1:].argmax()) for c, row in zip(labels[0], logits)]
    expected = torch.stack(
        [moved(b, d[4 * c : 4 * c + 4], (10, 10, 5, 5)) for b, d, c in zip(boxes[0], deltas, classes)]
    )
    expected[:, 0::2], expected[:, 1::2] = expected[:, 0::2].clamp(0, 80), expected[:, 1::2].clamp(0, 64)
    own = (boxes[0][:, None] == targets[0]["boxes"]).all(-1).any(-1)
    torch.testing.assert_close(seen[1][0][0], expected[~own].detach(), atol=1e-3, rtol=1e-4)
    # the same draw without weights
    model.roi_heads.weights, seen[:] = (1.0, 1.0, 1.0), []
    torch.manual_seed(7)
    plain = model(images, targets)
    model.roi_heads.weights, seen[:] = (1.0, 0.5, 0.25), []
    torch.manual_seed(7)
    weighted = model(images, targets)
    for number, weight in enumerate((1.0, 0.5, 0.25), 1):
        for name in ("classifier", "box_reg", "mask"):
            key = f"loss_{name}_{number}"
            torch.testing.assert_close(weighted[key], weight * plain[key])
    assert losses.keys() == plain.keys()
