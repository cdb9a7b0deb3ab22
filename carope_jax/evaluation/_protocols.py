"""The protocols over whole corpora (`paper`, `sliding`), and the one way into all four."""

from collections.abc import Callable

import numpy as np

from carope_jax.evaluation._config import EvaluatedModel, EvaluationConfig
from carope_jax.evaluation._job import Job, out_of_reach
from carope_jax.evaluation._per_position import per_position
from carope_jax.evaluation._results import Evaluation, LengthResult, UnitSums
from carope_jax.evaluation._same_targets import same_targets
from carope_jax.evaluation._score import Check, Progress, totals_by_unit
from carope_jax.evaluation._windows import (
    Documents,
    sliding_windows,
    stream_size,
    stream_windows,
)


def evaluate(
    config: EvaluationConfig,
    model: EvaluatedModel,
    documents: Documents,
    eot_id: int,
    *,
    check: Check | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Runs one protocol on one model.

    A length beyond the model's `max_length` has null numbers; the targets of the other lengths are
    those of a model without a limit, so models stay comparable.

    Args:
        config: protocol, lengths, seed.
        model: the model under evaluation.
        documents: token ids, one array [tokens] a document, without EOT.
        eot_id: the end-of-text token, which `paper` sets after each document.
        check: called before each batch; what it raises stops the evaluation.
        progress: called after each batch: (length, windows done, windows in all).

    Returns:
        The numbers: the same at the same seed, whatever the batch size.

    Raises:
        ValueError: the documents are unfit, or too short for the lengths asked.
        FloatingPointError: the model's nll is not finite.
    """
    if len(documents) == 0:
        raise ValueError("documents is empty: there is nothing to evaluate")
    for index, document in enumerate(documents):
        if document.ndim != 1 or not np.issubdtype(document.dtype, np.integer):
            raise ValueError(
                f"documents[{index}] must be a 1-D array of token ids, "
                f"not {document.dtype}{list(document.shape)}"
            )
        if len(document) == 0:
            raise ValueError(f"documents[{index}] is empty")
    return _RUN[config.protocol](Job(config, model, documents, eot_id, check, progress))


def _paper(job: Job) -> Evaluation:
    unit_sums: list[UnitSums] = []
    sizes = [len(document) + 1 for document in job.documents]
    starts = np.cumsum([0, *sizes[:-1]])
    size = stream_size(job.documents)

    def result(length: int) -> LengthResult:
        if not job.model.reaches(length):
            return out_of_reach(length, stride=length)
        if size <= length:
            raise ValueError(
                f"paper at length {length} needs a stream of at least {length + 1} tokens; "
                f"the documents (with EOT) give {size}"
            )
        windows = stream_windows(job.documents, job.eot_id, length)
        sums_U, counts_U = totals_by_unit(job.score(windows), windows.total)
        unit_sums.extend(job.unit_sums(length, sums_U, counts_U))
        documents = int(np.searchsorted(starts, windows.total * length, side="right"))
        return job.result(length, length, sums_U, counts_U, documents)

    # Neighbouring windows may share a document, so an interval over windows is a little narrow:
    # hence the result names its unit.
    return job.evaluation(
        "window",
        "non-overlapping windows of the evaluation length in the EOT-joined stream",
        [result(length) for length in job.config.lengths],
        unit_sums=tuple(unit_sums),
    )


def _sliding(job: Job) -> Evaluation:
    job.need_document(2)
    given = job.config.stride
    unit_sums: list[UnitSums] = []

    def result(length: int) -> LengthResult:
        stride = given or max(1, length // 4)
        if not job.model.reaches(length):
            return out_of_reach(length, stride=stride)
        windows = sliding_windows(job.documents, job.eot_id, length, stride)
        sums_U, counts_U = totals_by_unit(job.score(windows), len(job.documents))
        unit_sums.extend(job.unit_sums(length, sums_U, counts_U))
        return job.result(length, stride, sums_U, counts_U, int(np.count_nonzero(counts_U)))

    stride = f"{given} tokens" if given else "a quarter of that"
    return job.evaluation(
        "document",
        f"windows of the evaluation length in single documents, stride {stride}",
        [result(length) for length in job.config.lengths],
        unit_sums=tuple(unit_sums),
    )


_RUN: dict[str, Callable[[Job], Evaluation]] = {
    "paper": _paper,
    "same_targets": same_targets,
    "per_position": per_position,
    "sliding": _sliding,
}
