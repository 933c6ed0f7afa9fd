"""A recipe for a pair that is in no table: any timm classifier, and its StepsNet of like compute.

`stepsnet compare --model convnext_atto --data folder:PATH`. The settings are a beginning for some thousands of images
and not the best of any model: choose the learning rate for both (docs/your-model.md).
"""

from __future__ import annotations

from ..config import Augment, ClassificationRecipe, ModelSpec

__all__ = ["stepify_pair"]


def stepify_pair(name: str, data: str) -> ClassificationRecipe:
    """The StepsNet of three steps that :func:`stepsnet.stepify` makes of a model, with the model as its baseline."""
    name = name.removeprefix("timm:")
    return ClassificationRecipe(
        name=f"stepify/{name}",
        title=f"{name} in three steps, against {name} itself at like compute",
        data=data,
        model=ModelSpec("stepify", {"model": name, "steps": 3}),
        baseline=ModelSpec(name),
        epochs=50,
        batch_size=64,
        lr=1e-3,
        warmup_epochs=5,
        label_smoothing=0.1,
        augment=Augment(scale=(0.35, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5),
        stream_epochs=10,
    )
