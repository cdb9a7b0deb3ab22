"""`same_targets`: the same tokens predicted at every length, so only the context differs.

Axes: U bootstrap units (documents).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from jaxtyping import Float64, Int64

from carope_jax.evaluation._bootstrap import bootstrap_difference
from carope_jax.evaluation._job import Job, interval, mean, out_of_reach
from carope_jax.evaluation._results import Difference, Evaluation
from carope_jax.evaluation._score import ScoredRow, totals_by_unit
from carope_jax.evaluation._windows import anchored_windows, choose_anchors

RISE_TOLERANCE_NATS = 0.01
"""nll(L) "does not rise" while the upper bound of its difference stays under this."""


def same_targets(job: Job) -> Evaluation:
    """Scores x[e-S:e) at anchors e from every length's window x[e-L:e)."""
    config, lengths, reference = job.config, job.config.lengths, job.model.train_length
    if reference not in lengths:
        raise ValueError(
            f"same_targets compares with the training length {reference}, "
            f"which is not among lengths={lengths}"
        )
    # min(train_length, L1) is L1, the training length being one of the ascending lengths.
    scored = lengths[0] // 2
    job.need_document(lengths[-1])
    anchors = choose_anchors(job.documents, lengths[-1], scored, config.max_anchors, config.seed)
    counts_U = np.zeros(0, np.int64)
    sums: dict[int, Float64[np.ndarray, " U"]] = {}
    hashes: dict[int, str] = {}
    for length in lengths:
        if not job.model.reaches(length):
            continue
        windows = anchored_windows(job.documents, anchors, job.eot_id, length, scored)
        digest = hashlib.sha256()
        rows = _watched(job.score(windows), digest.update)
        sums[length], counts_U = totals_by_unit(rows, len(job.documents))
        hashes[length] = digest.hexdigest()
    if len(set(hashes.values())) != 1:
        raise RuntimeError(f"the scored targets differ between lengths: {hashes}")

    documents = int(np.count_nonzero(counts_U))
    return job.evaluation(
        "document",
        f"windows of the evaluation length ending at common anchors, last {scored} tokens scored",
        [
            job.result(length, scored, sums[length], counts_U, documents)
            if length in sums
            else out_of_reach(length, stride=scored)
            for length in lengths
        ],
        differences=tuple(
            _difference(job, length, sums[length], sums[reference], counts_U)
            for length in sums
            if length != reference
        ),
        targets_hash=hashes[reference],
        unit_sums=sum((job.unit_sums(at, sums[at], counts_U) for at in sums), ()),
    )


def _difference(
    job: Job,
    length: int,
    sums_U: Float64[np.ndarray, " U"],
    reference_U: Float64[np.ndarray, " U"],
    counts_U: Int64[np.ndarray, " U"],
) -> Difference:
    used = counts_U > 0
    bounds = bootstrap_difference(
        sums_U[used],
        reference_U[used],
        counts_U[used],
        job.config.seed,
        job.config.bootstrap_samples,
    )
    ci95 = interval(bounds)
    return Difference(
        length=length,
        reference=job.model.train_length,
        nll=mean(sums_U - reference_U, counts_U),
        ci95=ci95,
        does_not_rise=None if ci95[1] is None else ci95[1] < RISE_TOLERANCE_NATS,
    )


def _watched(rows: Iterable[ScoredRow], update: Callable[[bytes], None]) -> Iterator[ScoredRow]:
    """Passes the rows on, and every scored (document, offset, token id) to `update`."""
    for window, nll_T in rows:
        places = np.flatnonzero(window.mask)
        documents = np.full(len(places), window.unit, np.int64)
        identity = np.stack([documents, window.offset + places, window.targets[places]], axis=1)
        update(identity.astype("<i8").tobytes())
        yield window, nll_T
