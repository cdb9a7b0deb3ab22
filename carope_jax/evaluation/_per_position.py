"""`per_position`: how well each position of a long text predicts its next token.

Axes: U bootstrap units (documents), C bins of positions.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from carope_jax.evaluation._bootstrap import bootstrap_mean
from carope_jax.evaluation._job import Job, interval, mean, out_of_reach
from carope_jax.evaluation._results import Evaluation, LengthResult, PositionBin, UnitSums
from carope_jax.evaluation._windows import chunk_windows

_CURVE_WIDTH = 16
"""Positions a bin of the curve up to twice the training length; doubling with each octave after."""


@dataclass(frozen=True, eq=False)
class _Profile:
    """Sums of nll by document and bin; bins lie between neighbouring `edges`."""

    edges: list[int]
    units: Int64[np.ndarray, " U"]
    sums: Float64[np.ndarray, "U C"]
    chunks: Int64[np.ndarray, " U"]

    def merged(self, edges: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Sums and counts between fewer edges."""
        at = [self.edges.index(edge) for edge in edges[:-1]]
        sums_UC = np.add.reduceat(self.sums[:, : self.edges.index(edges[-1])], at, axis=1)
        return sums_UC, self.chunks[:, None] * np.diff(edges)


def per_position(job: Job) -> Evaluation:
    """One pass over disjoint chunks of the longest length; the shorter ones are its beginnings.

    A causal model's nll at a position doesn't depend on what follows, so each length's result is
    the mean over the chunk's first positions. (A scaling rule that looks at the declared length
    sees the longest.) All chunks of a document are one bootstrap unit.
    """
    lengths, train_length = job.config.lengths, job.model.train_length
    chunk = lengths[-1]
    job.need_document(chunk)
    unit = "document"
    window = f"disjoint chunks of {chunk} tokens of single documents"
    reached = [length for length in lengths if job.model.reaches(length)]
    if not reached:
        results = [out_of_reach(length, stride=chunk) for length in lengths]
        return job.evaluation(unit, window, results)

    # The last input of a whole chunk has its target outside.
    positions = min(reached[-1], chunk - 1)
    doubling = [0]
    while doubling[-1] < positions:
        doubling.append(min(positions, max(train_length, 2 * doubling[-1])))
    curve = [
        edge
        for start, end in itertools.pairwise(doubling)
        for edge in range(start, end, _CURVE_WIDTH * max(1, start // train_length))
    ]
    curve.append(positions)
    ends = {length: min(length, positions) for length in reached}
    profile = _profile(job, reached[-1], sorted({*curve, *ends.values()}))

    def result(length: int) -> LengthResult:
        if length not in ends:
            return out_of_reach(length, stride=chunk)
        sums_UC, counts_UC = profile.merged([0, ends[length]])
        return job.result(length, chunk, sums_UC[:, 0], counts_UC[:, 0], len(sums_UC))

    return job.evaluation(
        unit,
        window,
        (result(length) for length in lengths),
        bins=_bins(job, profile, doubling),
        curve=_bins(job, profile, curve),
        unit_sums=_unit_sums(job, profile, curve),
    )


def _profile(job: Job, reach: int, edges: list[int]) -> _Profile:
    chunk = job.config.lengths[-1]
    units = [index for index, document in enumerate(job.documents) if len(document) >= chunk]
    place = {index: row for row, index in enumerate(units)}
    sums_UC = np.zeros((len(units), len(edges) - 1), np.float64)
    chunks_U = np.zeros(len(units), np.int64)
    windows = chunk_windows(job.documents, job.eot_id, chunk, reach)
    for window, nll_T in job.score(windows):
        row = place[window.unit]
        sums_UC[row] += np.add.reduceat(nll_T[: edges[-1]], edges[:-1])
        chunks_U[row] += 1
    return _Profile(edges, np.asarray(units, np.int64), sums_UC, chunks_U)


def _unit_sums(job: Job, profile: _Profile, edges: list[int]) -> tuple[UnitSums, ...]:
    sums_UC, counts_UC = profile.merged(edges)
    return tuple(
        entry
        for column, (start, end) in enumerate(itertools.pairwise(edges))
        for entry in job.unit_sums(
            end, sums_UC[:, column], counts_UC[:, column], start=start, units_U=profile.units
        )
    )


def _bins(job: Job, profile: _Profile, edges: list[int]) -> tuple[PositionBin, ...]:
    sums_UC, counts_UC = profile.merged(edges)
    bounds_2C = bootstrap_mean(sums_UC, counts_UC, job.config.seed, job.config.bootstrap_samples)
    return tuple(
        PositionBin(
            start=edges[column],
            end=edges[column + 1],
            nll=mean(sums_UC[:, column], counts_UC[:, column]),
            tokens=int(counts_UC[:, column].sum()),
            ci95=interval(bounds_2C[:, column]),
        )
        for column in range(len(edges) - 1)
    )
