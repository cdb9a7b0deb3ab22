"""Which part of a mixture each window comes from: fixed by arithmetic, in exact proportions."""

import math
import sys
from collections.abc import Sequence
from fractions import Fraction

import grain
import numpy as np

_LONGEST_CYCLE = 1_000_000


def whole_shares(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the ratios of the weights, read as decimals: 0.7, 0.3 is 7, 3.

    Raises:
        ValueError: a weight is not a finite number above 0, or the numbers sum to over a million.
    """
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"weights={list(weights)} must be above 0 and finite, not {weight}")
    # The shortest decimal that stands for the float: 0.7, and not 0.699999999999999955591.
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(one.denominator for one in exact))
    whole = [int(one * scale) for one in exact]
    shares = [one // math.gcd(*whole) for one in whole]
    if sum(shares) > _LONGEST_CYCLE:
        raise ValueError(
            f"weights={list(weights)} are as {' to '.join(map(str, shares))}: give weights whose "
            f"whole-number ratios sum to at most {_LONGEST_CYCLE}, 1 and 2 for a third"
        )
    return shares


class Interleaving(grain.transforms.DatasetSelectionMap):
    """Elements of endless parts in turn: of each `sum(shares)` in a row, `shares[i]` of part `i`.

    Those of a part are spread evenly, and taken in its order, none left out.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        parts = np.repeat(np.arange(len(shares)), shares)
        ranks = np.concatenate([np.arange(share) for share in shares])
        # Each element stands at the middle of its share of the cycle; equal times go by part.
        times = (2 * ranks + 1) / np.asarray(shares)[parts]
        order = np.lexsort((parts, times))
        self._shares = list(shares)
        self._parts = parts[order]
        self._ranks = ranks[order]

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[int, int]:
        cycle, at = divmod(index, len(self._parts))
        part = int(self._parts[at])
        return part, cycle * self._shares[part] + int(self._ranks[at])
