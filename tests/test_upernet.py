"""UPerNet against transformers' on the same weights, and the parts that differ."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from segmentation_images import TINY
from torch import nn
from transformers import ResNetConfig, UperNetConfig, UperNetForSemanticSegmentation

from stepsnet.analysis.complexity import count_macs
from stepsnet.analysis.memory import activation_bytes
from stepsnet.analysis.speed import Measured, measure_speed
from stepsnet.errors import UserError
from stepsnet.models.blocks import blocks_of, widths_of
from stepsnet.models.build import build_model
from stepsnet.models.upernet import UPerNet
from stepsnet.settings.config import ModelSpec
from stepsnet.tasks.segmentation.task import Segmentation


def make(**changes):
    torch.manual_seed(0)
    return UPerNet(**{**TINY, **changes})


class Maps(nn.Module):
    """Our backbone as transformers' UPerNet calls one."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward_with_filtered_kwargs(self, pixel_values, **_):
        return SimpleNamespace(feature_maps=self.backbone(pixel_values), hidden_states=None, attentions=None)


def transformers_upernet(ours):
    """transformers' whole model around a copy of our backbone, with our heads' weights, loaded strictly."""
    channels = ours.backbone.channels
    like = ResNetConfig(
        hidden_sizes=channels,
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=[f"stage{n}" for n in range(1, 5)],
    )
    config = UperNetConfig(
        backbone_config=like,
        num_labels=TINY["num_classes"],
        hidden_size=TINY["channels"],
        auxiliary_in_channels=channels[2],
        auxiliary_channels=TINY["auxiliary_channels"],
    )
    theirs = UperNetForSemanticSegmentation(config)
    theirs.backbone = Maps(copy.deepcopy(ours.backbone))
    for head in ("decode_head", "auxiliary_head"):
        getattr(theirs, head).load_state_dict(getattr(ours, head).state_dict())
    return theirs


@pytest.mark.parametrize("size", [(32, 32), (41, 52)])
def test_logits_loss_and_gradients_are_transformers(size):
    ours = make(dropout=0.0, backbone_args={**TINY["backbone_args"], "drop_path_rate": 0.0})
    theirs = transformers_upernet(ours)
    images, labels = torch.randn(2, 3, *size), torch.randint(0, 3, (2, *size))
    labels[:, :5] = 255
    loss, _ = Segmentation.loss(None, ours.train(), (images, labels))
    expected = theirs.train()(images, labels=labels).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    gradients = {name.replace("backbone.backbone", "backbone"): p.grad for name, p in theirs.named_parameters()}
    assert gradients.keys() == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5), name
    with torch.no_grad():
        logits = ours.eval()(images)
        assert logits.shape == (2, 3, *size)
        assert torch.allclose(logits, theirs.eval()(images).logits, atol=1e-5)


def test_dropout_leaves_out_whole_channels_in_front_of_the_classifiers():
    model = make(dropout=0.5).train()
    for head in (model.decode_head, model.auxiliary_head):
        x = torch.ones(1, TINY["channels"], 4, 4)
        head.classifier.weight.data.copy_(2 ** torch.arange(8.0).expand(3, 8)[..., None, None])
        found = head.classifier(x)
        assert (found == found[:, :, :1, :1]).all() and not torch.equal(found, head.eval().classifier(x))
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.eval()(images), model(images))


def test_the_auxiliary_head_is_of_training_only_and_stands_on_its_stage():
    model = make(auxiliary_stage=2)
    assert model.auxiliary_head.convs[0].conv.in_channels == 16
    with pytest.raises(ValueError, match="auxiliary_stage: got 5, expected 1 to 4"):
        make(auxiliary_stage=5)
    without = copy.deepcopy(model)
    del without.auxiliary_head
    assert count_macs(model, (3, 32, 32)) == count_macs(without, (3, 32, 32))
    assert len(model.train()(torch.randn(2, 3, 32, 32))) == 2


def test_what_the_engine_asks_of_a_model():
    model = build_model(ModelSpec("upernet", TINY))
    exempt = model.no_weight_decay()
    assert exempt and all(name.endswith("relative_position_bias_table") for name in exempt)
    assert exempt <= {name for name, _ in model.named_parameters()}
    assert widths_of(model) == [8, 16, 16, 24, 24, 32] and len(blocks_of(model)) == 6
    stds = {head: getattr(model, head).classifier.weight.std().item() for head in ("decode_head", "auxiliary_head")}
    assert all(0.005 < std < 0.02 for std in stds.values())


@functools.cache
def whole(backbone):
    with torch.device("meta"):
        return build_model(ModelSpec("upernet", {"backbone": backbone, "num_classes": 4, "channels": 16}))


@pytest.mark.parametrize("backbone", ["test_steps_swin", "steps_resnet18", "steps_deit_tiny_patch16_224", "resnet18"])
def test_any_family_is_a_backbone(backbone):
    model = whole(backbone).train()
    logits, auxiliary = model(torch.randn(2, 3, 70, 65, device="meta"))
    assert logits.shape == auxiliary.shape == (2, 4, 70, 65)


def test_a_mistake_is_a_line():
    for args, expected in (
        ({**TINY, "backbone": "steps_swim"}, "backbone: got 'steps_swim'"),
        ({**TINY, "num_classes": 0}, "num_classes: got 0, expected at least 1"),
        ({**TINY, "backbone_args": {"frozen_stages": 9}}, "frozen_stages: got 9"),
    ):
        with pytest.raises(UserError, match=expected):
            build_model(ModelSpec("upernet", args))


def test_speed_and_memory_are_measured_in_training_too():
    model = make()
    found = measure_speed([Measured("tiny", model, (3, 32, 32))], 2, 1, torch.device("cpu"))["tiny"]
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in found.values()) and "training" in found
    bytes_of_both = activation_bytes(make().train(), (3, 32, 32), 2)
    assert bytes_of_both > 0 and activation_bytes(make().train(), (3, 32, 32), 4) > bytes_of_both
