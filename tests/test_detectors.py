"""Mask R-CNN is torchvision's, and so is a cascade of one stage; what holds for both detectors."""

import pytest
import timm
import torch
from small_detectors import CLASSES, SMALL, build, images_of, targets_of
from timm.models.resnet import BasicBlock
from timm.models.swin_transformer import SwinTransformerBlock
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import fastrcnn_loss

from stepsnet.analysis.complexity import detector_macs
from stepsnet.engine.distributed import sync_batch_norms
from stepsnet.errors import UserError
from stepsnet.models import cascade_mask_rcnn, mask_rcnn
from stepsnet.models.backbone import create_backbone
from stepsnet.models.blocks import blocks_of
from stepsnet.models.build import build_model
from stepsnet.models.cascade_mask_rcnn import CascadeRoIHeads
from stepsnet.settings.config import ModelSpec

SIZES = ((64, 80), (50, 61))


@pytest.mark.parametrize("name", ["mask_rcnn", "cascade_mask_rcnn"])
def test_a_flat_first_image_does_not_decide_where_later_ones_are_pooled(name):
    model, images = build(name).eval(), images_of(*SIZES)
    expected = build(name).eval()(images)
    model([torch.rand(3, 20, 96)])
    for got, wanted in zip(model(images), expected):
        assert len(wanted["boxes"]) and all(torch.equal(got[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", ["mask_rcnn", "upernet"])
def test_gray_backbones_are_refused(name):
    with pytest.raises(UserError, match=r"backbone_args.in_chans: got 1, expected 3: images are read in color"):
        build_model(
            ModelSpec(name, {"backbone": "test_steps_swin", "backbone_args": {"in_chans": 1}, "num_classes": 3})
        )


def torchvisions(pyramid, kind=MaskRCNN):
    """torchvision's own class, given the same settings."""
    torch.manual_seed(3)
    theirs = kind(
        pyramid,
        num_classes=1 + CLASSES,
        min_size=64,
        max_size=96,
        rpn_anchor_generator=AnchorGenerator(tuple((side,) for side in SMALL["anchors"]), ((0.5, 1.0, 2.0),) * 5),
        rpn_post_nms_top_n_train=1000,
        box_head=TwoMLPHead(16 * 49, 24),
        box_predictor=None,
        box_batch_size_per_image=32,
        _skip_resize=True,
        **({"mask_head": MaskRCNNHeads(16, (16,) * 4, 1)} if kind is MaskRCNN else {}),
    )
    theirs.roi_heads.box_predictor = mask_rcnn.FastRCNNPredictor(24, 1 + CLASSES)
    if kind is MaskRCNN:
        theirs.roi_heads.mask_predictor = MaskRCNNPredictor(16, 16, 1 + CLASSES)
    return theirs


def finds_masks(detector):
    return getattr(detector.roi_heads, "stages", [detector.roi_heads])[0].has_mask()


def assert_same_losses_and_detections(ours, theirs):
    with_masks = finds_masks(ours)
    targets, keys = targets_of(*SIZES), ["boxes", "labels", "scores", *(["masks"] if with_masks else [])]
    if not with_masks:
        targets = [{key: value for key, value in target.items() if key != "masks"} for target in targets]
    losses = []
    for model in (ours, theirs):
        model.train()
        torch.manual_seed(5)  # of the boxes that are sampled
        losses.append(model(images_of(*SIZES), targets))
    names = {name.removesuffix("_1"): value for name, value in losses[0].items()}
    assert names.keys() == losses[1].keys() and len(names) == 4 + with_masks
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
        assert len(mine["boxes"]) > 10 and mine.keys() == set(keys)
        assert not with_masks or mine["masks"].shape == (len(mine["boxes"]), 1, *image.shape[1:])
        assert all(torch.equal(mine[key], other[key]) for key in keys)


def test_heads_share_their_statistics_on_many_gpus_only(monkeypatch):
    def norms(device):
        model = build("cascade_mask_rcnn")
        sync_batch_norms(model.roi_heads, device=device)
        return [type(module) for module in model.modules() if isinstance(module, _BatchNorm)]

    assert norms("cuda") == norms("cpu") == [nn.BatchNorm2d] * 12  # alone
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("stepsnet.engine.distributed.pick_device", torch.device)
    assert norms("cpu") == [nn.BatchNorm2d] * 12 and norms("cuda") == [nn.SyncBatchNorm] * 12


@pytest.mark.parametrize(("name", "kind"), [("mask_rcnn", MaskRCNN), ("faster_rcnn", FasterRCNN)])
def test_a_detector_is_torchvisions(name, kind):
    ours = build(name)
    theirs = torchvisions(mask_rcnn.FeaturePyramid(create_backbone("test_steps_swin"), 16), kind)
    theirs.load_state_dict(ours.state_dict())
    assert_same_losses_and_detections(ours, theirs)


@pytest.mark.parametrize("name", ["mask_rcnn", "faster_rcnn"])
def test_a_cascade_of_one_stage_is_torchvisions(name, monkeypatch):
    def smooth_l1_losses(stage, logits, deltas, boxes, labels, targets):
        return fastrcnn_loss(logits, deltas, labels, targets)

    monkeypatch.setattr(cascade_mask_rcnn, "giou_losses", smooth_l1_losses)
    ours, theirs = build(name), build(name)
    ours.roi_heads = CascadeRoIHeads([ours.roi_heads], [1.0])
    assert_same_losses_and_detections(ours, theirs)


@pytest.mark.parametrize("name", ["mask_rcnn", "cascade_mask_rcnn"])
def test_without_masks_a_detector_lacks_its_mask_heads_alone(name):
    without = {"mask_rcnn": "faster_rcnn", "cascade_mask_rcnn": "cascade_rcnn"}[name]
    whole, part = build(name), build(without)
    missing = whole.state_dict().keys() - part.state_dict().keys()
    assert missing and all("mask_" in key for key in missing) and finds_masks(whole) and not finds_masks(part)
    assert part.state_dict().keys() <= whole.state_dict().keys()
    macs, without_masks = (detector_macs(model, (3, 64, 96)) for model in (whole, part))
    assert without_masks == {**macs, "masks": 0} and macs["masks"] > 0


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


@pytest.mark.parametrize("name", ["mask_rcnn", "cascade_mask_rcnn", "faster_rcnn", "cascade_rcnn"])
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
    images, _ = model.transform(images_of((3000, 1), (1, 900)))  # torchvision's own resizes to no pixel
    assert images.image_sizes == [(96, 1), (1, 96)]
    assert all(found["masks"].shape[-2:] == (3000, 1) for found in model(images_of((3000, 1))))
    model.train()
    images, _ = model.transform(images_of((61, 96)))
    assert images.image_sizes == [(61, 96)] and images.tensors.shape == (1, 3, 64, 96)


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
