"""Training batches from token streams, with Grain: shuffled, sharded, resumable to the window.

Axes: B windows of a batch in this process, L tokens a window, T tokens of the stream.
"""

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32

from carope_jax.data._batches import (
    Batch,
    BatchIterator,
    RowsOfBatches,
    in_workers,
    rows_of_process,
    shuffled,
)
from carope_jax.data._config import DataConfig
from carope_jax.data._interleaving import Interleaving, whole_shares
from carope_jax.data._prepared import PreparedSplit
from carope_jax.data._streams import TokenStream, as_stream

Window = dict[str, Int32[np.ndarray, " L"]]


class StreamWindows:
    """Windows of a token stream by number: a Grain random-access source.

    Window `w` has the inputs `stream[w L : (w+1) L]` and, as targets, the tokens that follow each,
    `stream[w L + 1 : (w+1) L + 1]`. Windows don't overlap; the tail shorter than one is dropped.

    Args:
        stream: token ids, documents joined by EOT: an int32 array, or what is read as it is needed.
        length: L, tokens a window.

    Raises:
        ValueError: the stream is an array but not one-dimensional int32, or holds no window.
    """

    def __init__(self, stream: Int32[np.ndarray, " T"] | TokenStream, length: int) -> None:
        if length < 1:
            raise ValueError(f"length={length} must be at least 1")
        self.stream = as_stream(stream)
        if len(self.stream) < length + 1:
            raise ValueError(
                f"stream of {len(self.stream)} tokens is too short: a window of length={length} "
                f"and the target of its last token need {length + 1}"
            )
        self._length = length

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self._length

    def __getitem__(self, index: int) -> Window:
        if not 0 <= index < len(self):
            raise IndexError(f"index={index} is outside the {len(self)} windows")
        start, stop = index * self._length, (index + 1) * self._length
        tokens = self.stream.slice(start, stop + 1)
        return {"inputs": tokens[:-1], "targets": tokens[1:]}

    def __repr__(self) -> str:
        return f"StreamWindows(tokens={len(self.stream)}, length={self._length})"


def train_batches(
    stream: Int32[np.ndarray, " T"] | TokenStream,
    config: DataConfig,
    *,
    process_index: int = 0,
    process_count: int = 1,
    rows: Sequence[int] | None = None,
) -> grain.DatasetIterator[Batch]:
    """An endless iterator of training batches.

    The windows of the whole stream are shuffled anew each epoch, each appearing once in it; a batch
    may end one epoch and begin the next. Batch `b` of all processes together is batch `b`
    of a single one: process `p` of `n` has its rows `p, p + n, p + 2n, …`.

    The state is the number of the next batch and what the numbering rests on, a small dict that
    JSON can hold. So it is good for any number of workers, and the iterator may be given as it is
    to `grain.checkpoint.CheckpointSave` and `CheckpointRestore`. Close it when done.

    Args:
        stream: token ids, documents joined by EOT, the same in each process: an int32 array, or a
            `PreparedSplit`, which is read as it is needed.
        config: length, batch size, seed, workers.
        process_index: which part of each batch to give.
        process_count: parts a batch is cut into.
        rows: in place of both, the numbers of the rows of each batch to give, in their order.

    Returns:
        Iterator of `{"inputs": int32 [B, L], "targets": int32 [B, L]}`, with
        `B = batch_size / process_count`. `set_state` raises ValueError on a state of other data.

    Raises:
        ValueError: the stream is shorter than a window, or the processes don't divide a batch.
    """
    windows = StreamWindows(stream, config.length)
    identity = {
        "stream": windows.stream.fingerprint,
        "length": config.length,
        "batch_size": config.batch_size,
        "shuffle_seed": config.shuffle_seed,
    }
    windows_in_order = shuffled(windows, config.shuffle_seed)
    return _batches(
        windows_in_order,
        identity,
        config,
        rows_of_process(config.batch_size, process_index, process_count) if rows is None else rows,
    )


def mixture_batches(
    splits: Sequence[tuple[PreparedSplit, float]],
    config: DataConfig,
    *,
    process_index: int = 0,
    process_count: int = 1,
    rows: Sequence[int] | None = None,
) -> grain.DatasetIterator[Batch]:
    """An endless iterator of training batches whose windows come from several splits by weight.

    Each split is shuffled and repeated on its own, as in `train_batches`, so the epochs of a small
    one pass sooner. Which split a window comes from is fixed, not drawn: with weights 7 and 3, of
    any ten windows from a multiple of ten on exactly seven and three, evenly spread. A
    window takes its tokens from one split. Processes, workers and states are those of
    `train_batches`.

    Args:
        splits: splits and their weights, shares of the windows. Only ratios count.
        config: length, batch size, seed, workers.
        process_index: which part of each batch to give.
        process_count: parts a batch is cut into.
        rows: in place of both, the numbers of the rows of each batch to give, in their order.

    Raises:
        ValueError: no split is given, a split is shorter than a window or of another tokenizer than
            the first, a weight is not above 0, the ratios have no small whole numbers, or the
            processes don't divide a batch.
    """
    if not splits:
        raise ValueError("splits=() names nothing to mix")
    for split, _ in splits:
        if split.tokenizer_hash != splits[0][0].tokenizer_hash:
            raise ValueError(
                f"splits has {split} of the tokenizer {split.tokenizer_hash}, but the first is of "
                f"{splits[0][0].tokenizer_hash}"
            )
    shares = whole_shares([weight for _, weight in splits])
    parts = [
        # Else a split given twice, or two of one size, would be read in one order.
        shuffled(StreamWindows(split, config.length), config.shuffle_seed, part)
        for part, (split, _) in enumerate(splits)
    ]
    windows_in_order = grain.MapDataset.select_from_datasets(parts, Interleaving(shares))
    identity = {
        "stream": [split.fingerprint for split, _ in splits],
        "shares": shares,
        "length": config.length,
        "batch_size": config.batch_size,
        "shuffle_seed": config.shuffle_seed,
    }
    return _batches(
        windows_in_order,
        identity,
        config,
        rows_of_process(config.batch_size, process_index, process_count) if rows is None else rows,
    )


def _batches(
    windows_in_order: grain.MapDataset[Window],
    identity: dict[str, Any],
    config: DataConfig,
    rows: Sequence[int],
) -> grain.DatasetIterator[Batch]:
    here = grain.MapDataset.select_from_datasets(
        [windows_in_order], RowsOfBatches(config.batch_size, rows)
    )
    batches = here.batch(len(rows), drop_remainder=True)
    return _NumberedBatches(batches, identity, config.workers, config.prefetch)


class _NumberedBatches(BatchIterator):
    """The batches of a random-access data set from any number on: that number is the position.

    Grain's own states of it would depend on the number of workers.
    """

    is_shared = True

    def __init__(
        self,
        batches: grain.MapDataset[Batch],
        identity: dict[str, Any],
        workers: int,
        prefetch: int,
    ) -> None:
        super().__init__(identity, workers)
        self._batches = batches
        self._prefetch = prefetch
        self._next_batch = 0

    def _open(self) -> grain.DatasetIterator[Batch]:
        read_options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=self._prefetch)
        dataset = self._batches[self._next_batch :].to_iter_dataset(read_options)
        if self._workers:
            dataset = in_workers(dataset, self._workers, self._prefetch)
        return iter(dataset)

    def _advance(self, running: grain.DatasetIterator[Batch]) -> None:
        self._next_batch += 1

    def _position(self) -> dict[str, Any]:
        return {"next_batch": self._next_batch}

    def _go_to(self, state: dict[str, Any]) -> None:
        self._next_batch = state["next_batch"]
