"""For your own images, in one folder per class and of any size: `stepsnet compare images/small --data folder:PATH`.

The settings are a starting point for a few hundred to a few thousand images, and not the best for either model: choose
the learning rate for both (docs/your-model.md). Models of timm (`--model`) and larger images need more time.
"""

from __future__ import annotations

from ..settings.config import Augment, ClassificationRecipe
from .digits import one_width, three_steps
from .table_rows import by_name

__all__ = ["RECIPES"]
_TOKENS = {"patch_size": 8}  # 64 tokens per image

RECIPES = by_name(
    ClassificationRecipe(
        name="images/small",
        title="images of your own: 24 blocks in three steps, against 24 of one width at the same compute",
        data="folder:data/images",
        model=three_steps(24, **_TOKENS),
        baseline=one_width(24, **_TOKENS),
        img_size=64,
        augment=Augment(scale=(0.35, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5),
        label_smoothing=0.1,
        epochs=30,
        batch_size=32,
        lr=1e-3,
        warmup_epochs=3,
        stream_epochs=10,
    )
)
