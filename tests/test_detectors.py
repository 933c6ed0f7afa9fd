"""Mask R-CNN is torchvision's, and so is a cascade of one stage; a cascade's own parts are written out here."""

from itertools import pairwise

import pytest
import timm
import torch
from timm.models.resnet import BasicBlock
from timm.models.swin_transformer import SwinTransformerBlock
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

from stepsnet.config import ModelSpec
from stepsnet.engine.distributed import sync_batch_norms
from stepsnet.errors import UserError
from stepsnet.models import cascade_mask_rcnn, mask_rcnn
from stepsnet.models.backbone import create_backbone
from stepsnet.models.blocks import blocks_of
from stepsnet.models.build import build_model
from stepsnet.models.cascade_mask_rcnn import CascadeRoIHeads, giou_losses, smooth_l1_losses

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


SIZES = ((64, 80), (50, 61))


def torchvisions(pyramid):
    """torchvision's own class, given the same settings."""
    torch.manual_seed(3)
    theirs = MaskRCNN(
        pyramid,
        num_classes=1 + CLASSES,
        min_size=64,
        max_size=96,
        rpn_anchor_generator=AnchorGenerator(tuple((side,) for side in SMALL["anchors"]), ((0.5, 1.0, 2.0),) * 5),
        rpn_post_nms_top_n_train=1000,
        box_head=TwoMLPHead(16 * 49, 24),
        box_predictor=None,
        box_batch_size_per_image=32,
        mask_head=MaskRCNNHeads(16, (16,) * 4, 1),
        _skip_resize=True,
    )
    theirs.roi_heads.box_predictor = mask_rcnn.FastRCNNPredictor(24, 1 + CLASSES)
    theirs.roi_heads.mask_predictor = MaskRCNNPredictor(16, 16, 1 + CLASSES)
    return theirs


def assert_same_losses_and_detections(ours, theirs):
    targets = targets_of(*SIZES)
    losses = []
    for model in (ours, theirs):
        model.train()
        torch.manual_seed(5)  # of the boxes that are sampled
        losses.append(model(images_of(*SIZES), targets))
    names = {name.removesuffix("_1"): value for name, value in losses[0].items()}
    assert names.keys() == losses[1].keys() and len(names) == 5
    for name, value in names.items():
        assert torch.equal(value, losses[1][name]), name
    images = images_of((40, 70), (90, 33))
    for model in (ours, theirs):
        model.eval()
        for stage in getattr(model.roi_heads, "stages", [model.roi_heads]):
            stage.score_thresh = 0.0  # untrained
    with torch.no_grad():
        found = [model(images) for model in (ours, theirs)]
    for mine, other, image in zip(*found, images):
        assert len(mine["boxes"]) > 10 and mine["masks"].shape == (len(mine["boxes"]), 1, *image.shape[1:])
        assert all(torch.equal(mine[key], other[key]) for key in ("boxes", "labels", "scores", "masks"))


def test_heads_share_their_statistics_on_many_gpus_only(monkeypatch):
    def norms(device):
        model = build("cascade_mask_rcnn")
        sync_batch_norms(model.roi_heads, device=device)
        return [type(module) for module in model.modules() if isinstance(module, _BatchNorm)]

    assert norms("cuda") == norms("cpu") == [nn.BatchNorm2d] * 12  # alone
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("stepsnet.engine.distributed.pick_device", torch.device)
    assert norms("cpu") == [nn.BatchNorm2d] * 12 and norms("cuda") == [nn.SyncBatchNorm] * 12


def test_mask_rcnn_is_torchvisions():
    ours = build("mask_rcnn")
    theirs = torchvisions(mask_rcnn.FeaturePyramid(create_backbone("test_steps_swin"), 16))
    theirs.load_state_dict(ours.state_dict())
    assert_same_losses_and_detections(ours, theirs)


def test_a_cascade_of_one_stage_is_torchvisions_mask_rcnn():
    ours, theirs = build("mask_rcnn"), build("mask_rcnn")
    ours.roi_heads = CascadeRoIHeads([ours.roi_heads], [1.0], smooth_l1_losses)
    assert_same_losses_and_detections(ours, theirs)


@pytest.mark.parametrize("backbone", ["test_steps_resnet", "test_steps_deit", "test_resnet", "test_steps_swinpp"])
@pytest.mark.parametrize("name", ["mask_rcnn", "cascade_mask_rcnn"])
def test_every_family_trains_every_parameter_and_detects(name, backbone):
    model = build(name, backbone).train()
    losses = model(images_of(*SIZES), targets_of(*SIZES))
    assert len(losses) == (5 if name == "mask_rcnn" else 2 + 3 * 3)
    sum(losses.values()).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    (found,) = model.eval()(images_of((33, 75)))
    assert found["masks"].shape == (len(found["boxes"]), 1, 33, 75) and len(found["boxes"]) <= 100


@pytest.mark.parametrize("name", ["mask_rcnn", "cascade_mask_rcnn"])
def test_an_image_without_objects_gives_every_parameter_a_gradient(name):
    model = build(name).train()
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    losses = model(images_of((64, 64)), [{**nothing, "masks": torch.zeros(0, 64, 64, dtype=torch.uint8)}])
    sum(losses.values()).backward()
    assert all(loss.isfinite() for loss in losses.values())
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_evaluation_resizes_and_pads_to_32():
    model = build("mask_rcnn").eval()
    images, _ = model.transform(images_of((128, 200), (40, 30)))
    assert images.image_sizes == [(61, 96), (85, 64)]  # short side 64, or long side 96
    assert images.tensors.shape == (2, 3, 96, 96)
    model.train()
    images, _ = model.transform(images_of((61, 96)))
    assert images.image_sizes == [(61, 96)] and images.tensors.shape == (1, 3, 64, 96)


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


@pytest.mark.parametrize("name", ["mask_rcnn", "cascade_mask_rcnn"])
def test_boxes_stay_in_float32_under_autocast(name):
    model = build(name).train()
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(images_of((64, 80)), targets_of((64, 80)))
        (found,) = model.eval()(images_of((64, 80)))
    assert {loss.dtype for loss in losses.values()} == {torch.float32}
    assert {found[key].dtype for key in ("boxes", "scores", "masks")} == {torch.float32}


@pytest.mark.parametrize("name", ["mask_rcnn", "cascade_mask_rcnn"])
def test_anchors_are_where_they_are_under_autocast(name):
    """bfloat16 has steps of 8 pixels at x = 1100."""
    model, anchors = build(name, max_size=1344).eval(), []
    model.rpn.anchor_generator.register_forward_hook(lambda module, inputs, found: anchors.append(found[0]))
    images = images_of((64, 1344))
    model(images)
    with torch.autocast("cpu", torch.bfloat16):
        model(images)
    assert torch.equal(*anchors) and anchors[0][:, 0].max() > 1300


@pytest.mark.parametrize("name", ["mask_rcnn", "cascade_mask_rcnn"])
def test_images_are_normalised_as_the_backbones_classifier_has_them(name):
    with torch.device("meta"):
        for backbone, mean in (("vit_tiny_patch16_224", 0.5), ("test_steps_swin", 0.485)):
            transform = build(name, backbone).transform
            config = timm.get_pretrained_cfg(backbone)
            assert transform.image_mean == list(config.mean) and transform.image_mean[0] == mean
            assert transform.image_std == list(config.std)


def test_the_blocks_of_a_dense_model_are_its_backbones():
    """They are what is recomputed, compiled and shared out, and a head may call a part's methods and not the part."""
    with torch.device("meta"):
        for name in ("mask_rcnn", "cascade_mask_rcnn"):
            blocks = blocks_of(build(name, "swin_tiny_patch4_window7_224"))
            assert len(blocks) == 12 and {type(block) for block in blocks} == {SwinTransformerBlock}
        segmenter = build_model(ModelSpec("upernet", {"backbone": "resnet18", "num_classes": 3, "channels": 16}))
        assert len(blocks_of(segmenter)) == 8 and {type(block) for block in blocks_of(segmenter)} == {BasicBlock}


def test_decay_spares_the_backbones_tables():
    model = build("mask_rcnn")
    assert model.no_weight_decay() and model.no_weight_decay() <= dict(model.named_parameters()).keys()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"backbone": "swin_giant"}, "backbone: got 'swin_giant', expected a timm or StepsNet model"),
        ({"num_classes": 0}, "num_classes: got 0"),
        ({"anchors": (8, 16)}, "anchors: got 2 sides, expected 5"),
        ({"colour": 1}, "colour"),
        ({"backbone_args": {"widths": ((16,),)}}, "widths"),
    ],
)
def test_what_cannot_be_built_is_said_in_a_line(args, expected):
    for name in ("mask_rcnn", "cascade_mask_rcnn"):
        with pytest.raises(UserError, match=expected):
            build_model(ModelSpec(name, {"backbone": "test_steps_swin", **SMALL, **args}))
    with pytest.raises(UserError, match="did you mean mask_rcnn"):
        build_model(ModelSpec("mask_rcn"))
    assert cascade_mask_rcnn.GIOU_WEIGHT == 10
