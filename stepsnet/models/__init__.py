"""The model families; importing this registers them with timm."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from . import mixer, steps_deit, steps_resnet, steps_swin, swin_plus  # noqa: F401 - mixer registers itself

__all__ = ["baseline_of", "load_baseline", "model_names"]

FAMILIES = (steps_resnet, steps_deit, steps_swin, swin_plus)


def model_names() -> list[str]:
    """The Steps models and the baselines that timm lacks, family by family, without the small ones for tests."""
    return [name for family in FAMILIES for name in family.ARCHITECTURES if not name.startswith("test_")]


def baseline_of(name: str) -> str:
    """The timm name of the residual baseline that the paper compares a Steps model with.

    Raises:
        ValueError: ``name`` is not a Steps model.
    """
    for family in FAMILIES:
        if name in family.BASELINES:
            return family.BASELINES[name]
    known = ", ".join(name for family in FAMILIES for name in family.BASELINES)
    raise ValueError(f"model: got {name!r}, expected a Steps model with a baseline: {known}")


def load_baseline(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load a timm baseline's weights into its 1-step Steps model; every key has to match.

    For example: ``load_baseline(timm.create_model("steps_deit_small_patch16_224", widths=(384,), depths=(12,)),
    timm.create_model("deit_small_patch16_224", pretrained=True).state_dict())``. The keys are renamed by the
    family's ``from_baseline``, which puts ``networks.0.`` before a block's index.

    Raises:
        ValueError: the model is not one of stepsnet's.
        RuntimeError: keys or shapes do not match; ``load_state_dict`` names them.
    """
    for family in FAMILIES:
        if type(model).__module__ == family.__name__:
            model.load_state_dict(family.from_baseline(state_dict))
            return
    raise ValueError(f"model: got a {type(model).__name__}, expected a Steps model of stepsnet")
