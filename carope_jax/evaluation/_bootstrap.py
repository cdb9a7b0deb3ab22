"""Percentile bootstrap of a ratio of sums.

Axes: U units (documents, or windows), C columns (lengths, or bins), R resamples.
"""

import numpy as np
from jaxtyping import Float64, Num

_CELLS_AT_ONCE = 4_000_000
"""Resamples are drawn in blocks of about this many weights (32 MB), whatever the corpus."""


def bootstrap_mean(
    sums: Num[np.ndarray, "U ..."],
    counts: Num[np.ndarray, "U ..."],
    seed: int,
    samples: int = 2000,
) -> Float64[np.ndarray, "2 ..."]:
    """95% interval of sum(sums) / sum(counts), units drawn with replacement.

    Columns share their resamples, so they are paired. The same seed gives the same interval.

    Args:
        sums: a unit's total (nats).
        counts: its number of tokens, positive.
        seed: of the resamples.
        samples: how many resamples.

    Returns:
        The 2.5th and 97.5th percentile; NaN for a single unit, which says nothing of the spread.

    Raises:
        ValueError: shapes differ, there is no unit, a count isn't positive, or no sample is asked.
    """
    sums, counts = np.asarray(sums, np.float64), np.asarray(counts)
    if sums.shape != counts.shape or sums.ndim not in (1, 2):
        raise ValueError(f"sums{list(sums.shape)} and counts{list(counts.shape)} must be one shape")
    if len(sums) == 0:
        raise ValueError("sums is empty: the bootstrap needs at least one unit")
    if not (counts > 0).all():
        raise ValueError(f"counts must be positive, the smallest is {counts.min()}")
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1")
    units = len(sums)
    if units == 1:
        return np.full((2, *sums.shape[1:]), np.nan)
    totals = np.concatenate([sums.reshape(units, -1), counts.reshape(units, -1)], axis=1)
    rng = np.random.default_rng(seed)
    block = max(1, _CELLS_AT_ONCE // units)
    resampled = [
        _draw_weights(rng, min(block, samples - first), units) @ totals
        for first in range(0, samples, block)
    ]
    sums_RC, counts_RC = np.split(np.concatenate(resampled), 2, axis=1)
    bounds = np.percentile(sums_RC / counts_RC, (2.5, 97.5), axis=0)
    return bounds.reshape(2, *sums.shape[1:])


def bootstrap_difference(
    sums: Num[np.ndarray, "U ..."],
    reference: Num[np.ndarray, "U ..."],
    counts: Num[np.ndarray, "U ..."],
    seed: int,
    samples: int = 2000,
) -> Float64[np.ndarray, "2 ..."]:
    """95% interval of sum(sums - reference) / sum(counts): the same units resampled in both.

    Both sums are over the same `counts` tokens, so what makes a document hard cancels.
    """
    sums, reference = np.asarray(sums, np.float64), np.asarray(reference, np.float64)
    if sums.shape != reference.shape:
        raise ValueError(
            f"sums{list(sums.shape)} and reference{list(reference.shape)} must be one shape"
        )
    return bootstrap_mean(sums - reference, counts, seed, samples)


def _draw_weights(rng: np.random.Generator, samples: int, units: int) -> Float64[np.ndarray, "R U"]:
    """How often each unit was drawn, resample by resample."""
    drawn_RU = rng.integers(0, units, size=(samples, units))
    drawn_RU += units * np.arange(samples)[:, None]
    weights = np.bincount(drawn_RU.ravel(), minlength=samples * units)
    return weights.reshape(samples, units).astype(np.float64)
