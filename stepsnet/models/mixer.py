"""MLP-Mixer at any size; timm's entry points fix its patch size, width and depth."""

from __future__ import annotations

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.mlp_mixer import MlpMixer, checkpoint_filter_fn

from .assembly import model_cfg

__all__ = ["mixer_ti16_224"]

default_cfgs = generate_default_cfgs({"mixer_ti16_224": model_cfg("stem.proj", "head")})


@register_model
def mixer_ti16_224(pretrained: bool = False, **kwargs) -> MlpMixer:
    """A Mixer as large as DeiT-T; for another size, give ``patch_size``, ``embed_dim`` and ``num_blocks``."""
    features = {"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"}  # as in timm's Mixers
    architecture = {"patch_size": 16, "embed_dim": 192, "num_blocks": 12, **kwargs}
    return build_model_with_cfg(
        MlpMixer,
        "mixer_ti16_224",
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=features,
        **architecture,
    )
