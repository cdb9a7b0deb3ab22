"""Training rows packed from whole documents and pieces of them, with Grain: no target crosses one.

Axes: B rows of a batch in this process, L tokens a row, D documents, S tokens of a piece.
"""

from typing import Any, NamedTuple

import grain
import numpy as np
from grain import experimental
from jaxtyping import Int32

from carope_jax.data._batches import (
    Batch,
    BatchIterator,
    in_workers,
    rows_of_process,
    shuffled,
)
from carope_jax.data._config import DataConfig
from carope_jax.data._streams import TokenDocuments
from carope_jax.data._tokenizer import Ids

# Rows open at a time, and their tokens: the more, the less padding; all of them are packed before
# the first is given, and again on a restart.
_MOST_BINS, _FEWEST_BINS = 256, 8
_OPEN_TOKENS = 1 << 22
_SAMPLED_PIECES = 50_000

_PAIRS = "pairs"


class DocumentPieces:
    """Documents cut to rows, by number: a Grain random-access source.

    A document of n tokens and its EOT make n pairs of an input and its target, the token after it.
    Piece k of it has the pairs `k L` to `(k + 1) L`: each token but the first, and the EOT, is
    a target once. Later pieces begin in mid-document, without what was before them.

    Args:
        documents: token ids without EOT.
        length: L, the longest piece.

    Raises:
        ValueError: there is no document, or one is empty.
    """

    def __init__(self, documents: TokenDocuments, length: int) -> None:
        if length < 1:
            raise ValueError(f"length={length} must be at least 1")
        if not documents.documents:
            raise ValueError("documents is empty: there is nothing to pack")
        lengths_D = np.asarray(documents.lengths, np.int64)
        if lengths_D.min() < 1:
            raise ValueError(f"documents has an empty one, number {int(lengths_D.argmin())}")
        self._documents = documents
        self._length = length
        self._ends_D = np.cumsum(-(-lengths_D // length))

    def __len__(self) -> int:
        return int(self._ends_D[-1])

    def __getitem__(self, index: int) -> dict[str, Int32[np.ndarray, "S 2"]]:
        if not 0 <= index < len(self):
            raise IndexError(f"index={index} is outside the {len(self)} pieces")
        number = int(np.searchsorted(self._ends_D, index, side="right"))
        first = int(self._ends_D[number - 1]) if number else 0
        start = (index - first) * self._length
        tokens = self._documents.document(number)
        targets = np.append(tokens[start + 1 : start + 1 + self._length], self._documents.eot_id)
        inputs = tokens[start : start + self._length]
        return {_PAIRS: np.stack([inputs, targets[: len(inputs)]], axis=1).astype(np.int32)}

    def __repr__(self) -> str:
        return f"DocumentPieces(pieces={len(self)}, length={self._length})"


def packed_batches(
    documents: TokenDocuments,
    config: DataConfig,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[Batch]:
    """An endless iterator of training batches of packed rows.

    The pieces of all documents (`DocumentPieces`) are shuffled anew each epoch; process `p` of `n`
    packs pieces `p, p + n, …` of that order, each into the fullest row with room for it (Grain's
    best fit). The end of one epoch shares rows with the beginning of the next.

    The state is this process's own, a dict that JSON can hold: what Grain says of the packing, and
    what that rests on, the number of processes and of workers among it.

    Args:
        documents: the same in each process: a `PreparedSplit`, or `ArrayDocuments`.
        config: length, batch size, seed, workers.
        process_index: which process this is.
        process_count: how many there are.

    Returns:
        Iterator of `{"inputs", "targets", "segment_ids"}`, int32 [B, L]: segments are counted from
        1, and 0 is padding, where inputs and targets are 0. `set_state` raises ValueError on a
        state of other data or processes.

    Raises:
        ValueError: there is no document, the processes don't divide a batch, or there are fewer
            pieces than processes and workers.
    """
    rows = len(rows_of_process(config.batch_size, process_index, process_count))
    pieces = DocumentPieces(documents, config.length)
    if len(pieces) < process_count * max(config.workers, 1):
        raise ValueError(
            f"{len(pieces)} pieces of documents are too few for {process_count} process(es) with "
            f"{config.workers} worker(s) each"
        )
    identity = {
        "documents": documents.fingerprint,
        "length": config.length,
        "batch_size": config.batch_size,
        "shuffle_seed": config.shuffle_seed,
        "process_count": process_count,
        "process_index": process_index,
        "workers": config.workers,
        "bins": _bins(config.length),
    }
    here = shuffled(pieces, config.shuffle_seed)[process_index::process_count]
    batches = _packed_rows(here, config).batch(rows, drop_remainder=True)
    return _PackedBatches(batches, identity, config)


class PackingReport(NamedTuple):
    """What packing does to documents, seen in a sample of rows.

    Attributes:
        padding: share of the rows' places that is padding.
        cut: share of the documents that are longer than a row.
        segments: pieces a row, on average.
    """

    padding: float
    cut: float
    segments: float


def packing_report(lengths: Int32[np.ndarray, " D"], config: DataConfig) -> PackingReport:
    """How well documents of these lengths are packed, without their tokens: those of an epoch, or
    50,000 pieces of it.

    Args:
        lengths: tokens of each document, EOT not counted.
        config: length and seed.

    Raises:
        ValueError: there is no document, or one is empty.
    """
    pieces = DocumentPieces(_Lengths(lengths), config.length)
    sampled = shuffled(pieces, config.shuffle_seed)[: min(len(pieces), _SAMPLED_PIECES)]
    sample = [row["segment_ids"] for row in _packed_rows(sampled, config)]
    return PackingReport(
        padding=float(np.mean([row_L == 0 for row_L in sample])),
        cut=float(np.mean(lengths > config.length)),
        segments=float(np.mean([row_L.max() for row_L in sample])),
    )


class _Lengths:
    """Documents of which nothing is known but their lengths."""

    fingerprint = ""
    eot_id = 0

    def __init__(self, lengths: Int32[np.ndarray, " D"]) -> None:
        self.lengths = lengths
        self.documents = len(lengths)

    def document(self, number: int) -> Ids:
        return np.zeros(self.lengths[number], np.int32)


def _packed_rows(pieces: grain.MapDataset[Any], config: DataConfig) -> grain.IterDataset[Any]:
    read_options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_MOST_BINS)
    return experimental.BestFitPackIterDataset(
        pieces.to_iter_dataset(read_options),
        length_struct={_PAIRS: config.length},
        num_packing_bins=_bins(config.length),
        # The fullest rows are the first of their group: shuffled, batches are alike.
        shuffle_bins=True,
        seed=config.shuffle_seed,
    ).map(_named)


def _bins(length: int) -> int:
    return max(_FEWEST_BINS, min(_MOST_BINS, _OPEN_TOKENS // length))


def _named(row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    inputs_L, targets_L = row[_PAIRS].T
    segment_ids_L = row[f"{_PAIRS}_segment_ids"]
    return {"inputs": inputs_L, "targets": targets_L, "segment_ids": segment_ids_L}


class _PackedBatches(BatchIterator):
    """Packed batches; the position is Grain's own."""

    def __init__(
        self, batches: grain.IterDataset[Batch], identity: dict[str, Any], config: DataConfig
    ) -> None:
        advice = "; windows of the joined stream can be gone on with by any number of processes"
        super().__init__(identity, config.workers, {"process_count": advice})
        self._batches = batches
        self._prefetch = config.prefetch
        self._grain: dict[str, Any] | None = None

    def _open(self) -> grain.DatasetIterator[Batch]:
        if self._workers:
            dataset = in_workers(self._batches, self._workers, self._prefetch)
        else:
            dataset = experimental.ThreadPrefetchIterDataset(
                self._batches, prefetch_buffer_size=self._prefetch
            )
        running = iter(dataset)
        if self._grain is None:
            self._grain = running.get_state()
        else:
            running.set_state(self._grain)
        return running

    def _advance(self, running: grain.DatasetIterator[Batch]) -> None:
        self._grain = running.get_state()

    def _position(self) -> dict[str, Any]:
        if self._grain is None:
            self._start()
        return {"grain": self._grain}

    def _go_to(self, state: dict[str, Any]) -> None:
        self._grain = state["grain"]
