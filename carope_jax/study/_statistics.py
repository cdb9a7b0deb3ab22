"""Paired differences between runs: intervals and p-values over documents, Holm's correction."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

# U documents, R resamples.

_SAMPLES = 10_000
_BLOCK = 1_000


class Difference(NamedTuple):
    """One run's nll minus another's over the same targets, in nats a token.

    Attributes:
      mean: the difference.
      low: lower bound of its 95% bootstrap interval over documents.
      high: upper bound.
      p: two-sided bootstrap p-value of no difference; never under 1 / resamples.
    """

    mean: float
    low: float
    high: float
    p: float


def paired_difference(
    sums_U: Float64[np.ndarray, " U"],
    reference_U: Float64[np.ndarray, " U"],
    counts_U: Float64[np.ndarray, " U"],
    seed: int = 0,
) -> Difference:
    """Of sum(sums - reference) / sum(counts), documents drawn with replacement.

    Raises:
      ValueError: shapes differ, fewer than two documents, or a count that is not positive.
    """
    shapes = {np.shape(x) for x in (sums_U, reference_U, counts_U)}
    if len(shapes) > 1 or len(sums_U) < 2:
        raise ValueError(f"one number for each of at least two documents is needed, got {shapes}")
    counts_U = np.asarray(counts_U, np.float64)
    if not (counts_U > 0).all():
        raise ValueError(f"counts must be positive, the smallest is {counts_U.min()}")
    change_U = np.asarray(sums_U, np.float64) - np.asarray(reference_U, np.float64)
    rng = np.random.default_rng(seed)
    drawn = np.concatenate(
        [
            change_U[picked].sum(1) / counts_U[picked].sum(1)
            for picked in (
                rng.integers(0, len(change_U), (_BLOCK, len(change_U)))
                for _ in range(_SAMPLES // _BLOCK)
            )
        ]
    )
    low, high = np.percentile(drawn, (2.5, 97.5)).tolist()
    share = min((drawn <= 0).mean(), (drawn >= 0).mean())
    p = min(1.0, max(2 * float(share), 1 / _SAMPLES))
    return Difference(float(change_U.sum() / counts_U.sum()), low, high, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given (Holm 1979)."""
    order = np.argsort(p_values, kind="stable")
    adjusted = np.empty(len(order))
    worst = 0.0
    for rank, at in enumerate(order.tolist()):
        worst = max(worst, min(1.0, (len(order) - rank) * p_values[at]))
        adjusted[at] = worst
    return adjusted.tolist()


def difference_of(
    result: Mapping[str, Any], reference: Mapping[str, Any], length: int
) -> Difference | None:
    """Of two evaluations under `same_targets` at a length; None where either can't read so far.

    Raises:
      ValueError: they are over different targets.
    """
    if result["targets_hash"] != reference["targets_hash"]:
        raise ValueError("evaluations over different targets can't be compared")
    if length not in result["ends"] or length not in reference["ends"]:
        return None
    here, there = result["ends"].index(length), reference["ends"].index(length)
    return paired_difference(
        np.asarray(result["sums"][here]),
        np.asarray(reference["sums"][there]),
        np.asarray(result["counts"][here]),
    )
