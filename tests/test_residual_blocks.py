"""Designs around the blocks of any declared family: what is declared once, for stepify, serves here too."""

import copy
import io
import pickle

import pytest
import timm
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import stepsnet
from stepsnet.errors import UserError
from stepsnet.residual import DESIGNS, connect

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
JOINING = [name for name, design in DESIGNS.items() if design is not None and design.joins]
SMALL = dict(img_size=32, patch_size=8, num_classes=5, embed_dim=32, depth=3, num_heads=2)


def vit(name="vit_tiny_patch16_224", **changes):
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, **changes}).eval()


@pytest.mark.parametrize("name", JOINING)
def test_a_connected_model_is_saved_whole(name):
    model = vit()
    model.blocks = connect(model.blocks, name)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for again in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        torch.testing.assert_close(again(IMAGES), model(IMAGES), rtol=0, atol=0)
        assert again.blocks[0].block is not model.blocks[0].block
        assert again.blocks.wiring is again.blocks.blocks[0].wiring


@pytest.mark.parametrize("family", ["eva02_tiny_patch14_224", "beit_base_patch16_224"])
def test_the_declared_branches_of_other_families_are_joined(family):
    """DenseFormer begins as the plain network; the others take the norms, which stepify's adapters declare alone."""
    plain = vit(family)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.15)
    outputs = {}
    for name in ("dense_former", "layer_norm_scaling", "peri_ln", "rezero"):
        model = copy.deepcopy(plain)
        model.blocks = connect(model.blocks, name)  # these models loop over their blocks
        with torch.no_grad():
            outputs[name] = model(IMAGES)
        norms = [type(block.norm1) is nn.Identity for block in model.blocks.blocks]
        assert all(norms) if name == "rezero" else not any(norms)
    expected = plain(IMAGES)
    torch.testing.assert_close(outputs.pop("dense_former"), expected, rtol=1e-4, atol=1e-5)
    for name, found in outputs.items():
        assert found.isfinite().all() and not torch.allclose(found, expected), name


@pytest.mark.parametrize("name", ["dense_former", "value_residual", "mhc", "layer_norm_scaling"])
def test_gpt2_generates_in_a_design(name):
    """Its model gives masks and the cache to its layers by position."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=67, n_embd=32, n_layer=3, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2)
    model = GPT2LMHeadModel(config).eval()
    ids = torch.randint(3, 67, (1, 6))
    plain = model(ids).logits
    model.transformer.h = connect(model.transformer.h, name)
    if name == "dense_former":  # begins as the plain network
        torch.testing.assert_close(model(ids).logits, plain, rtol=1e-4, atol=1e-5)
    found = [model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=use, pad_token_id=0) for use in (1, 0)]
    assert torch.equal(*found) and found[0].shape == (1, 11)


class Scaled(nn.Module):
    """A block whose branches are an activation alone, and a parameter in front of a layer."""

    def __init__(self, width):
        super().__init__()
        self.act, self.gain, self.fc = nn.PReLU(width), nn.Parameter(torch.full((width,), 0.5)), nn.Linear(width, width)

    def forward(self, x):
        x = x + self.act(x)
        return x + self.fc(self.gain * x)


def test_branches_without_a_norm_are_joined():
    stepsnet.register_block(Scaled, lambda block, width, heads: Scaled(width), branches=["act", "gain fc"])
    blocks, x = [Scaled(7) for _ in range(2)], torch.randn(2, 7, 7)
    expected = nn.Sequential(*blocks)(x)
    torch.testing.assert_close(connect(blocks, "dense_former", width=7)(x), expected)


def test_a_refusal_changes_nothing():
    model = vit(depth=3)
    model.blocks[2].attn.qkv = nn.Sequential(model.blocks[2].attn.qkv)  # no linear layer to take apart
    before = model(IMAGES)
    for name in ("deep_cross_attention", "mudd"):
        with pytest.raises(UserError, match=f"{name}: attn.qkv of Block: got Sequential, expected Linear"):
            connect(model.blocks, name)
    with pytest.raises(UserError, match="width: got 100, but the blocks' norms have 32 channels"):
        connect(model.blocks, "mhc", width=100)
    assert all(type(block) is timm.models.vision_transformer.Block for block in model.blocks)
    torch.testing.assert_close(model(IMAGES), before, rtol=0, atol=0)
