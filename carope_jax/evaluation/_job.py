"""What every protocol is given, and the sums they all take.

Axes: U bootstrap units.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from carope_jax.evaluation._bootstrap import bootstrap_mean
from carope_jax.evaluation._config import EvaluatedModel, EvaluationConfig
from carope_jax.evaluation._results import Evaluation, Interval, LengthResult, UnitSums
from carope_jax.evaluation._score import Check, Progress, ScoredRow, score
from carope_jax.evaluation._windows import Documents, WindowSet


@dataclass(frozen=True)
class Job:
    """One protocol's work: the arguments of `evaluate`, checked."""

    config: EvaluationConfig
    model: EvaluatedModel
    documents: Documents
    eot_id: int
    check: Check | None
    progress: Progress | None

    def score(self, window_set: WindowSet) -> Iterator[ScoredRow]:
        """`score` with this job's model and options."""
        return score(
            self.model.nll,
            window_set,
            self.config.batch_size,
            label=f"protocol {self.config.protocol}, {self.model.position}",
            check=self.check,
            progress=self.progress,
        )

    def result(
        self,
        length: int,
        stride: int,
        sums_U: Float64[np.ndarray, " U"],
        counts_U: Int64[np.ndarray, " U"],
        documents: int,
    ) -> LengthResult:
        """The mean over all units that scored a target, with its interval."""
        used = counts_U > 0
        bounds = bootstrap_mean(
            sums_U[used], counts_U[used], self.config.seed, self.config.bootstrap_samples
        )
        return LengthResult(
            length=length,
            nll=mean(sums_U, counts_U),
            tokens=int(counts_U.sum()),
            documents=documents,
            stride=stride,
            ci95=interval(bounds),
        )

    def unit_sums(
        self,
        end: int,
        sums_U: Float64[np.ndarray, " U"],
        counts_U: Int64[np.ndarray, " U"],
        *,
        start: int = 0,
        units_U: Int64[np.ndarray, " U"] | None = None,
    ) -> tuple[UnitSums, ...]:
        """One entry, or none where the sums are not asked for."""
        if not self.config.per_unit:
            return ()
        used = np.flatnonzero(counts_U > 0)
        units = used if units_U is None else units_U[used]
        return (
            UnitSums(
                start=start,
                end=end,
                units=tuple(units.tolist()),
                sums=tuple(sums_U[used].tolist()),
                counts=tuple(counts_U[used].tolist()),
            ),
        )

    def need_document(self, least: int) -> None:
        """Raises ValueError if no document has `least` tokens."""
        longest = max(len(document) for document in self.documents)
        if longest < least:
            raise ValueError(
                f"{self.config.protocol} with lengths={self.config.lengths} needs a document of "
                f"at least {least} tokens; the longest of {len(self.documents)} has {longest}"
            )

    def evaluation(
        self, unit: str, window: str, results: Iterable[LengthResult], **extra: Any
    ) -> Evaluation:
        """The results, under the names of what was evaluated."""
        return Evaluation(
            protocol=self.config.protocol,
            train_length=self.model.train_length,
            params=self.model.params,
            position=self.model.position,
            seed=self.config.seed,
            bootstrap_unit=unit,
            window=window,
            results=tuple(results),
            **extra,
        )


def mean(sums: np.ndarray, counts: np.ndarray) -> float:
    """Sum over sum, in nats a token."""
    return float(sums.sum() / counts.sum())


def interval(bounds: np.ndarray) -> Interval:
    """Two bounds, None in place of NaN."""
    low, high = bounds.tolist()
    return (None, None) if np.isnan(bounds).any() else (low, high)


def out_of_reach(length: int, stride: int) -> LengthResult:
    """A length the model cannot read: no number stands in for it."""
    return LengthResult(length=length, nll=None, tokens=0, documents=0, stride=stride)
