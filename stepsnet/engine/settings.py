"""What the training loop can be told; a recipe is these settings and a model and a task."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Hyper-parameters by timm's names. Times are in epochs, rates are per update."""

    epochs: int = 300
    batch_size: int = 1024
    opt: str = "adamw"  # any of timm's optimizers
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.05  # none on norms, biases and what the model exempts
    warmup_epochs: float = 20.0  # linear, from warmup_lr
    warmup_lr: float = 5e-7
    min_lr: float = 5e-6  # the cosine's end
    clip_grad: float | None = 5.0  # largest norm of all gradients together
    seed: int = 0
    device: str = "auto"  # "cpu", "cuda", …; auto takes an accelerator if there is one
    keep_checkpoints: int = 2
    probe_epochs: int = 0  # look inside the network every so many epochs; 0 is never
