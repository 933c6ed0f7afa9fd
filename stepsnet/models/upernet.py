"""UPerNet: semantic segmentation from the four feature maps of any Steps or timm backbone.

The decoder and the auxiliary head are those of transformers, with the same weight names; the backbone, the dropout
and the initialization differ. The defaults are Swin's settings for ADE20K.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import UperNetConfig
from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

from .backbone import check_color, create_backbone

__all__ = ["UPerNet", "create"]


class UPerNet(nn.Module):
    """A backbone with four maps, UPerNet's decoder (Xiao et al., 2018), and an auxiliary FCN head for training.

    Args:
        backbone: name of a timm or StepsNet model.
        num_classes: number of pixel classes.
        backbone_args: arguments of :func:`create_backbone`, such as ``drop_path_rate`` or ``frozen_stages``.
        channels: width of the decoder.
        pool_scales: side lengths of the maps of the pyramid pooling.
        auxiliary_channels: width of the auxiliary head's only convolution.
        auxiliary_stage: the stage, 1 to 4, whose map the auxiliary head takes.
        dropout: probability of dropping a channel before the classifier of either head.

    Shape: (B, 3, H, W) -> logits (B, num_classes, H, W); in training, a pair of these and those of the auxiliary head.

    Raises:
        ValueError: an unknown backbone, arguments that it does not accept, or numbers out of range.
    """

    def __init__(
        self,
        backbone: str,
        num_classes: int = 150,
        backbone_args: Mapping[str, Any] | None = None,
        channels: int = 512,
        pool_scales: Sequence[int] = (1, 2, 3, 6),
        auxiliary_channels: int = 256,
        auxiliary_stage: int = 3,
        dropout: float = 0.1,
    ):
        super().__init__()
        for name, value in {"num_classes": num_classes, "channels": channels}.items():
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected at least 1")
        if auxiliary_stage not in (1, 2, 3, 4):
            raise ValueError(f"auxiliary_stage: got {auxiliary_stage}, expected 1 to 4")
        self.num_classes, self.backbone_name = num_classes, backbone
        check_color(backbone_args or {})
        self.backbone = create_backbone(backbone, **(backbone_args or {}))
        config: Any = UperNetConfig(
            hidden_size=channels,
            pool_scales=tuple(pool_scales),
            num_labels=num_classes,
            auxiliary_in_channels=self.backbone.channels[auxiliary_stage - 1],
            auxiliary_channels=auxiliary_channels,
        )
        self.decode_head = UperNetHead(config, self.backbone.channels)
        self.auxiliary_head = UperNetFCNHead(config, self.backbone.channels, in_index=auxiliary_stage - 1)
        for head, width in ((self.decode_head, channels), (self.auxiliary_head, auxiliary_channels)):
            head.classifier = _Classifier(width, num_classes, dropout)
            head.apply(_init_weights)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        maps = self.backbone(images)  # 4 × (B, C_i, H / s_i, W / s_i)
        logits = self._resize(self.decode_head(maps), images)  # (B, num_classes, H, W)
        if not self.training:
            return logits
        return logits, self._resize(self.auxiliary_head(maps), images)

    @property
    def trunk(self) -> nn.Module:
        """The module that holds the residual blocks, for :func:`stepsnet.models.blocks.blocks_of`."""
        return self.backbone.features

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}

    @staticmethod
    def _resize(logits: Tensor, images: Tensor) -> Tensor:
        return F.interpolate(logits, size=images.shape[-2:], mode="bilinear", align_corners=False)


class _Classifier(nn.Conv2d):
    """The 1×1 convolution of transformers' heads, with dropout of channels before it."""

    def __init__(self, channels: int, num_classes: int, dropout: float):
        super().__init__(channels, num_classes, kernel_size=1)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout2d(x, self.dropout, self.training))


def _init_weights(module: nn.Module) -> None:
    """Kaiming initialization, and small weights in the classifiers, as in mmsegmentation's heads."""
    if isinstance(module, _Classifier):
        nn.init.normal_(module.weight, std=0.01)
        assert module.bias is not None
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def create(**args: Any) -> UPerNet:
    """A new :class:`UPerNet` from its arguments."""
    return UPerNet(**args)
