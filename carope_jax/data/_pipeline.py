"""Training batches from token streams, with Grain: shuffled, sharded, resumable to the window.

Axes: B windows of a batch in this process, L tokens a window, T tokens of the stream.
"""

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from absl import flags
from jaxtyping import Int32

from carope_jax.data._dataset import DataConfig
from carope_jax.data._interleaving import Interleaving, whole_shares
from carope_jax.data._prepared import PreparedSplit
from carope_jax.data._streams import TokenStream, as_stream

Window = dict[str, Int32[np.ndarray, " L"]]
Batch = dict[str, Int32[np.ndarray, "B L"]]


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
    rows = _shuffled(windows, config.shuffle_seed)
    return _batches(rows, identity, config, process_index, process_count)


def mixture_batches(
    splits: Sequence[tuple[PreparedSplit, float]],
    config: DataConfig,
    *,
    process_index: int = 0,
    process_count: int = 1,
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
        _shuffled(StreamWindows(split, config.length), config.shuffle_seed, part)
        for part, (split, _) in enumerate(splits)
    ]
    rows = grain.MapDataset.select_from_datasets(parts, Interleaving(shares))
    identity = {
        "stream": [split.fingerprint for split, _ in splits],
        "shares": shares,
        "length": config.length,
        "batch_size": config.batch_size,
        "shuffle_seed": config.shuffle_seed,
    }
    return _batches(rows, identity, config, process_index, process_count)


def _shuffled(windows: StreamWindows, seed: int, *part: int) -> grain.MapDataset[Window]:
    # Grain adds the epoch to the seed: unhashed, seed 1 would give the orders of seed 0 again, one
    # epoch earlier.
    hashed = int(np.random.SeedSequence(seed, spawn_key=part).generate_state(1, np.uint32)[0])
    return grain.MapDataset.source(windows).shuffle(hashed).repeat()


def _batches(
    rows: grain.MapDataset[Window],
    identity: dict[str, Any],
    config: DataConfig,
    process_index: int,
    process_count: int,
) -> grain.DatasetIterator[Batch]:
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index={process_index} must be in [0, process_count={process_count})"
        )
    if config.batch_size % process_count:
        raise ValueError(
            f"batch_size={config.batch_size} can't be divided among process_count={process_count}"
        )
    # Else Grain divides the endless length as a float, past what fits at one window a batch.
    batches = rows[process_index::process_count].batch(
        config.batch_size // process_count, drop_remainder=True
    )
    return _BatchIterator(batches, identity, config.workers, config.prefetch)


class _BatchIterator(grain.DatasetIterator[Batch]):
    """Grain's own iterator over the batches from any number on, made when it is first needed.

    The states of Grain's iterators depend on the number of workers and know nothing of the data. Of
    a random-access data set the number of the next batch says it all.
    """

    def __init__(
        self,
        batches: grain.MapDataset[Batch],
        identity: dict[str, Any],
        workers: int,
        prefetch: int,
    ) -> None:
        super().__init__()
        self._batches = batches
        self._identity = identity
        self._workers = workers
        self._prefetch = prefetch
        self._next_batch = 0
        self._running: grain.DatasetIterator[Batch] | None = None

    def __next__(self) -> Batch:
        batch = next(self._start())
        self._next_batch += 1
        if self._workers:
            # Workers hand over shared memory, which must be gone before the interpreter ends.
            batch = {name: np.array(rows_BL) for name, rows_BL in batch.items()}
        return batch

    def get_state(self) -> dict[str, Any]:
        return {"next_batch": self._next_batch, **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        for field, here in self._identity.items():
            if state.get(field) != here:
                raise ValueError(
                    f"state of the training batches was saved with {field}={state.get(field)!r}, "
                    f"but here {field}={here!r}"
                )
        self._stop()
        self._next_batch = state["next_batch"]

    def start_prefetch(self) -> None:
        self._start().start_prefetch()

    def close(self) -> None:
        # Also called on a half-made object, by the base's __del__.
        if getattr(self, "_running", None) is not None:
            self._stop()
        super().close()

    def _start(self) -> grain.DatasetIterator[Batch]:
        if self._closed:
            raise ValueError("the iterator of training batches is closed")
        if self._running is None:
            read_options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=self._prefetch)
            dataset = self._batches[self._next_batch :].to_iter_dataset(read_options)
            if self._workers:
                # Workers are handed Grain's flags, and absl refuses to read unparsed ones.
                if not flags.FLAGS.is_parsed():
                    flags.FLAGS.mark_as_parsed()
                dataset = dataset.mp_prefetch(
                    grain.MultiprocessingOptions(self._workers, self._prefetch)
                )
            self._running = iter(dataset)
        return self._running

    def _stop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None
