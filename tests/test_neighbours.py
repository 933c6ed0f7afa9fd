"""Other libraries that build on timm take the Steps models unchanged."""

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
from transformers import TimmBackbone, TimmBackboneConfig, UperNetConfig, UperNetForSemanticSegmentation

import stepsnet  # noqa: F401 - registers the models

# name, what timm needs besides, and the side of the pictures
HIERARCHICAL = {
    "test_steps_swin": ({"img_size": 64, "window_size": 2}, 64),
    "test_steps_resnet": ({"zero_init_last": False}, 64),  # else there is no gradient behind the last norms
}


def features(name, arguments, **others):
    torch.manual_seed(0)
    return timm.create_model(name, features_only=True, **arguments, **others).eval()


@pytest.mark.parametrize("name", HIERARCHICAL)
@pytest.mark.parametrize("decoder", ["Unet", "FPN", "UPerNet"])
def test_segmentation_models_pytorch_takes_them_as_encoders(name, decoder):
    arguments, side = HIERARCHICAL[name]
    torch.manual_seed(0)
    model = getattr(smp, decoder)(f"tu-{name}", encoder_weights=None, classes=3, **arguments)
    images = torch.randn(2, 3, side, side)
    logits = model(images)
    assert logits.shape == (2, 3, side, side)
    logits.mean().backward()
    of_blocks = [p for n, p in model.encoder.named_parameters() if ".networks." in n]
    assert of_blocks and all(p.grad is not None and p.grad.abs().sum() > 0 for p in of_blocks)


@pytest.mark.parametrize("name", HIERARCHICAL)
def test_the_maps_of_an_encoder_are_timms(name):
    arguments, side = HIERARCHICAL[name]
    encoder = smp.encoders.get_encoder(f"tu-{name}", weights=None, **arguments).eval()
    direct = features(name, arguments)
    direct.load_state_dict(encoder.model.state_dict())
    images = torch.randn(1, 3, side, side)
    ours = [x.permute(0, 3, 1, 2) if direct.output_fmt == "NHWC" else x for x in direct(images)]
    theirs = [x for x in encoder(images) if x.shape[1] > 3]
    assert [x.shape[1] for x in theirs][-len(ours) :] == [x.shape[1] for x in ours]
    for a, b in zip(theirs[-len(ours) :], ours):
        assert torch.equal(a, b)


NAMES = {**HIERARCHICAL, "test_steps_deit": ({"img_size": 64, "patch_size": 16}, 64)}


def backbone_of(name):
    arguments, side = NAMES[name]
    torch.manual_seed(0)
    config = TimmBackboneConfig(backbone=name, out_indices=[-2, -1])
    return TimmBackbone(config, **arguments).eval(), arguments, side


@pytest.mark.parametrize("name", NAMES)
def test_transformers_takes_them_as_backbones(name):
    backbone, arguments, side = backbone_of(name)
    images = torch.randn(1, 3, side, side)
    maps = backbone(images).feature_maps
    direct = features(name, arguments, out_indices=[-2, -1])
    direct.load_state_dict(backbone._backbone.state_dict())
    for ours, theirs in zip(direct(images), maps, strict=True):
        assert torch.equal(ours, theirs)
    backbone.train()(images).feature_maps[-1].square().mean().backward()
    of_blocks = [p for n, p in backbone.named_parameters() if ".networks." in n]
    assert of_blocks and all(p.grad is not None for p in of_blocks)


def test_transformers_own_upernet_stands_on_a_resnet_in_steps():
    config = UperNetConfig(
        backbone_config=TimmBackboneConfig(backbone="steps_resnet18", out_indices=[1, 2, 3, 4]),
        num_labels=3,
        hidden_size=8,
        auxiliary_in_channels=256,
        auxiliary_channels=8,
    )
    model = UperNetForSemanticSegmentation(config)
    found = model(torch.randn(2, 3, 64, 64), labels=torch.zeros(2, 64, 64, dtype=torch.long))
    assert found.logits.shape == (2, 3, 64, 64)
    found.loss.backward()
