"""A learning rate chosen from a grid, which grows by factors of 2 while the best rate is at an edge of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["best_rate"]


def best_rate(score: Callable[[float], float], rates: Sequence[float], most: int) -> tuple[float, dict[float, float]]:
    """The rate with the highest score, and the scores of all rates tried: at most ``most``, or the grid if larger."""
    scores: dict[float, float] = {}
    wanted = set(rates)
    while wanted:
        scores |= {rate: score(rate) for rate in sorted(wanted)}
        best = max(scores, key=scores.__getitem__)
        low, high = min(scores), max(scores)
        wanted = {best / 2} if best == low else {best * 2} if best == high else set()
        if len(scores) >= most:
            break
    return best, {rate: scores[rate] for rate in sorted(scores)}
