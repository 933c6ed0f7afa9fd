"""Randomness as a function: what is random depends on where in the run it is, never on what ran before.

A run resumed anywhere therefore continues bit for bit, with nothing random in its checkpoints.
"""

from __future__ import annotations

import random

import numpy as np
import torch

__all__ = ["data_order", "seed_step"]

_ORDER, _STEP = 0, 1  # one stream of numbers a purpose


def data_order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The order of the training samples: a permutation of range(samples), a function of (seed, epoch)."""
    return np.random.default_rng([seed, _ORDER, epoch]).permutation(samples)


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seed what an update draws (dropout, stochastic depth): a function of (seed, step, rank)."""
    state = np.random.SeedSequence([seed, _STEP, step, rank]).generate_state(1, np.uint64)[0]
    torch.manual_seed(int(state))
    np.random.seed(int(state) % 2**32)
    random.seed(int(state))
