"""Small networks in every design, for the tests of stepsnet/residual."""

import timm
import torch
from torch.nn import functional as F

from stepsnet.residual import DESIGNS

IMAGES = dict(img_size=8, patch_size=4, num_classes=5, class_token=False, global_pool="avg")
WIDTH = 32
PLAIN = dict(widths=(WIDTH,), num_heads=(2,), **IMAGES)
STEPS = dict(widths=(16, 24, WIDTH), depths=(2, 1, 2), num_heads=(2, 2, 2), **IMAGES)
OPTIONS = {"laurel": {"rank": 4}, "attention_residuals_block": {"groups": 3}}
JOINED = [name for name in DESIGNS if name != "plain"]


def deit(name, seed=0, **arguments):
    """A Steps-DeiT of one width, or of steps with STEPS."""
    torch.manual_seed(seed)
    options = {"residual_options": OPTIONS[name]} if name in OPTIONS else {}
    return timm.create_model("steps_deit_tiny_patch16_224", **PLAIN | options | arguments, residual=name)


def vit(name="vit_tiny_patch16_224", **changes):
    """A model of timm's, 32 wide, for images of 32x32."""
    torch.manual_seed(0)
    small = dict(img_size=32, patch_size=8, num_classes=5, embed_dim=WIDTH, depth=3, num_heads=2)
    return timm.create_model(name, **{**small, **changes}).eval()


def stirred(module, scale=0.3, seed=1):
    """With every weight drawn anew, so that no gain is 0 or 1."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)
    return module


def train(model, images, labels, updates):
    """The losses of so many updates by one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(updates):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
