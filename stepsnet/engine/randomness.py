"""Randomness as a function: what is drawn depends on the position in the run, never on what was drawn before.

A run resumed anywhere therefore continues bit for bit, with no random state in its checkpoints, and with any number of
processes that load its data.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch

__all__ = ["data_order", "keep_random_states", "order_of_pass", "sample_of_run", "seed_sample", "seed_step"]

_ORDER, _STEP, _SAMPLE = 0, 1, 2  # one stream of random numbers per purpose


def data_order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The order of the training samples: a permutation of range(samples), a function of (seed, epoch)."""
    return np.random.default_rng([seed, _ORDER, epoch]).permutation(samples)


def sample_of_run(seed: int, number: int, samples: int) -> tuple[int, int]:
    """The ``number``-th sample of a run that goes over ``samples`` pass after pass, each in its own order.

    Returns:
        The pass, counted from 0, and the index of the sample.
    """
    number_of_pass, position = divmod(number, samples)
    return number_of_pass, int(order_of_pass(seed, number_of_pass, samples)[position])


@lru_cache(maxsize=4)
def order_of_pass(seed: int, number_of_pass: int, samples: int) -> np.ndarray:
    """The same as :func:`data_order`; the last few orders are cached."""
    return data_order(seed, number_of_pass, samples)


def seed_step(seed: int, step: int, rank: int = 0, part: int = 0) -> None:
    """Seed what an update draws (dropout, stochastic depth, Mixup): a function of (seed, step, rank).

    ``part`` counts the micro-batches that a rank accumulates.
    """
    _seed((seed, _STEP, step, rank, part), torch.manual_seed)


def seed_sample(seed: int, epoch: int, index: int, copy: int = 0) -> None:
    """Seed a sample's augmentation: a function of (seed, epoch, sample), and of which copy of it this is.

    Samples are augmented on the CPU, so the accelerators' generators are left alone: ``torch.manual_seed`` formats a
    stack trace for each kind of accelerator, which takes longer than augmenting a small image.
    """
    _seed((seed, _SAMPLE, epoch, index, copy), torch.default_generator.manual_seed)


@contextmanager
def keep_random_states(device: torch.device) -> Iterator[None]:
    """Leave the random states of Python, NumPy and torch as they are, whatever the block draws."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _seed(key: tuple[int, ...], seed_torch: Callable[[int], object]) -> None:
    torch_state, numpy_state = np.random.SeedSequence(key).generate_state(2, np.uint64)
    seed_torch(int(torch_state))
    np.random.seed(int(numpy_state) % 2**32)
    random.seed(int(numpy_state))
