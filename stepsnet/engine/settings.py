"""What the training loop can be told; a recipe is these settings and a model and a task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FREE", "TrainingSettings"]


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Hyper-parameters by timm's names. Times are in epochs, rates are per update."""

    epochs: int = 300
    batch_size: int = 1024  # effective: samples an update, over all ranks and accumulated parts
    accumulation_steps: int = 1  # parts that a rank works through one after the other, for less memory
    opt: str = "adamw"  # any of timm's optimizers
    lr: float = 1e-3
    lr_base_size: int | None = None  # lr is meant for so many samples an update, and scaled to batch_size
    lr_base_scale: Literal["linear", "sqrt"] = "linear"
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.9  # of optimizers that have it instead of betas
    eps: float = 1e-8
    weight_decay: float = 0.05  # none on norms, biases and what the model exempts
    layer_decay: float | None = None  # the rate of each block, as a share of the next one's
    sched: Literal["cosine", "poly", "multistep"] = "cosine"
    poly_power: float = 1.0
    milestones: tuple[float, ...] = ()  # of multistep: after so many epochs the rate is multiplied by decay_rate
    decay_rate: float = 0.1
    warmup_epochs: float = 20.0  # linear, from warmup_lr
    warmup_lr: float = 5e-7
    min_lr: float = 5e-6  # the schedule's end; not of multistep
    clip_grad: float | None = 5.0  # largest norm of all gradients together
    amp_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the forward pass, by autocast
    ema_decay: float | None = None  # of an average of the weights, which is then what is evaluated
    # blocks that the backward pass recomputes: a share of them, from the first on, or those of a list of steps
    grad_checkpointing: float | tuple[int, ...] = 0.0
    compile: bool = False  # one block at a time
    parallel: Literal["ddp", "fsdp"] = "ddp"  # under torchrun
    seed: int = 0
    device: str = "auto"  # "cpu", "cuda", …; auto takes an accelerator if there is one
    workers: int = 0  # processes a rank that load data
    keep_checkpoints: int = 2  # the newest; the best by the task's measure is kept besides
    checkpoint_interval: int = 0  # updates between checkpoints within an epoch; 0 is at its end only
    log_interval: int = 50  # updates between lines in metrics.jsonl
    tracker: Literal["trackio", "wandb"] | None = None  # besides metrics.jsonl, and TensorBoard where it is installed
    probe_epochs: int = 0  # look inside the network every so many epochs; 0 is never
    signal_interval: int = 0  # updates between looks at what the residual stream carries; 0 is never


# Settings that may change when a run is resumed, on another machine say: they change a result by its rounding, if
# at all, and by what each rank and part draws for its own dropout.
FREE = {
    "device",
    "workers",
    "keep_checkpoints",
    "checkpoint_interval",
    "accumulation_steps",
    "parallel",
    "tracker",
    "signal_interval",
    "cache",
}
