"""From windows to nats: constant-shape batches in, float64 rows out.

Axes: B batch, T time, U bootstrap units.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from jaxtyping import Float, Float64, Int32, Int64

from carope_jax.evaluation._windows import Window, WindowSet

NllFunction = Callable[
    [Int32[np.ndarray, "B T"], Int32[np.ndarray, "B T"]], Float[np.ndarray, "B T"]
]
"""(inputs, targets) -> negative log likelihood of each target, in nats."""

Check = Callable[[], None]
"""Called before each batch; it may raise to stop the evaluation."""

Progress = Callable[[int, int, int], None]
"""Called after each batch with the length, its windows done, and its windows in all."""

ScoredRow = tuple[Window, Float64[np.ndarray, " T"]]


def score(
    nll: NllFunction,
    window_set: WindowSet,
    batch_size: int,
    *,
    label: str = "evaluation",
    check: Check | None = None,
    progress: Progress | None = None,
) -> Iterator[ScoredRow]:
    """Yields each window with its nll, in order, 0 where the window's mask is off.

    Every call of `nll` has `batch_size` rows: a short last batch repeats its first row, and the
    repeats are dropped. Rows are never mixed, so where `nll` works row by row, the result is the
    same to the last bit at every batch size.

    Args:
        nll: the model, (inputs, targets) -> nats.
        window_set: windows of one length.
        batch_size: rows of a batch.
        label: what is being evaluated, for error messages.
        check: called before each batch; what it raises stops the evaluation.
        progress: called after each batch: (length, windows done, windows in all).

    Yields:
        The window and its float64 nll, in nats.

    Raises:
        ValueError: `batch_size` is not positive, or `nll` returned another shape than [B, T].
        FloatingPointError: a scored target's nll is not finite.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    done = 0
    while batch := list(itertools.islice(window_set.windows, batch_size)):
        if check is not None:
            check()
        filled = batch + batch[:1] * (batch_size - len(batch))
        inputs_BT = np.stack([window.inputs for window in filled])
        targets_BT = np.stack([window.targets for window in filled])
        nll_BT = np.asarray(nll(inputs_BT, targets_BT), np.float64)
        if nll_BT.shape != targets_BT.shape:
            raise ValueError(
                f"nll returned shape {nll_BT.shape} for inputs of shape {inputs_BT.shape}"
            )
        for row, (window, nll_T) in enumerate(zip(batch, nll_BT, strict=False)):
            scored_T = np.where(window.mask, nll_T, 0.0)
            if not np.isfinite(scored_T).all():
                at = int(np.flatnonzero(~np.isfinite(scored_T))[0])
                raise FloatingPointError(
                    f"{label}, length {window_set.length}: nll is {scored_T[at]} at position {at} "
                    f"of window {done + row}"
                )
            yield window, scored_T
        done += len(batch)
        if progress is not None:
            progress(window_set.length, done, window_set.total)


def totals_by_unit(
    rows: Iterable[ScoredRow], units: int
) -> tuple[Float64[np.ndarray, " U"], Int64[np.ndarray, " U"]]:
    """Sums of nll (nats) and exact numbers of scored targets, one a bootstrap unit."""
    sums_U = np.zeros(units, np.float64)
    counts_U = np.zeros(units, np.int64)
    for window, nll_T in rows:
        sums_U[window.unit] += nll_T.sum()
        counts_U[window.unit] += np.count_nonzero(window.mask)
    return sums_U, counts_U
