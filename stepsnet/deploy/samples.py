"""Real inputs to check an exported model with: two photographs that come with scikit-learn, or a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from .. import steps
from ..errors import import_extra

__all__ = ["photographs", "words"]


def photographs(count: int, shape: Sequence[int], mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Different parts of two photographs as inputs, (count, C, H, W), normalized by ``mean`` and ``std``."""
    channels, height, width = shape
    datasets = import_extra("sklearn.datasets")
    found = []
    for number in range(count):
        photo = Image.fromarray(datasets.load_sample_image(("china.jpg", "flower.jpg")[number % 2]))
        left, top = 40 * (number // 2 % 5), 30 * (number // 10 % 5)
        part = photo.crop((left, top, left + 400, top + 300)).resize((width, height), Image.Resampling.BICUBIC)
        pixels = F.to_dtype(F.pil_to_tensor(part.convert("L" if channels == 1 else "RGB")), torch.float32, scale=True)
        found.append(pixels if channels in (1, 3) else pixels.mean(0, keepdim=True).expand(channels, -1, -1))
    mean, std = ([*values] if len(values) in (1, channels) else [values[0]] * channels for values in (mean, std))
    return F.normalize(torch.stack(found), list(mean), list(std))


def words(count: int, tokens: int, encode: Callable[[str], list[int]]) -> Tensor:
    """Different parts of a text as token ids, (count, tokens)."""
    ids = encode(f"{steps.__doc__}\n{steps.StepsNet.__doc__}")
    ids = ids * (1 + (tokens + count) // len(ids))
    return torch.tensor([ids[start : start + tokens] for start in range(count)])
