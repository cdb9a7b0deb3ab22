"""Training batches from a token stream, with Grain: shuffled, sharded, resumable to the window.

Axes: B windows of a batch in this process, L tokens a window, T tokens of the stream.
"""

import hashlib
from typing import Any

import grain
import numpy as np
from absl import flags
from jaxtyping import Int32

from carope_jax.data._dataset import DataConfig

Window = dict[str, Int32[np.ndarray, " L"]]
Batch = dict[str, Int32[np.ndarray, "B L"]]


class StreamWindows:
    """Windows of a token stream by number: a Grain random-access source.

    Window `w` has the inputs `stream[w L : (w+1) L]` and, as targets, the tokens that follow each,
    `stream[w L + 1 : (w+1) L + 1]`. Windows don't overlap; the tail shorter than one is dropped.

    Args:
        stream_T: token ids, documents joined by EOT.
        length: L, tokens a window.

    Raises:
        ValueError: the stream is not one-dimensional int32, or holds no window.
    """

    def __init__(self, stream_T: Int32[np.ndarray, " T"], length: int) -> None:
        if stream_T.ndim != 1 or stream_T.dtype != np.int32:
            raise ValueError(f"stream must be int32 [T], got {stream_T.dtype} {stream_T.shape}")
        if length < 1:
            raise ValueError(f"length={length} must be at least 1")
        if len(stream_T) < length + 1:
            raise ValueError(
                f"stream of {len(stream_T)} tokens is too short: a window of length={length} and "
                f"the target of its last token need {length + 1}"
            )
        self._stream_T = stream_T
        self._length = length

    def __len__(self) -> int:
        return (len(self._stream_T) - 1) // self._length

    def __getitem__(self, index: int) -> Window:
        if not 0 <= index < len(self):
            raise IndexError(f"index={index} is outside the {len(self)} windows")
        start, stop = index * self._length, (index + 1) * self._length
        return {
            "inputs": self._stream_T[start:stop],
            "targets": self._stream_T[start + 1 : stop + 1],
        }

    def __repr__(self) -> str:
        return f"StreamWindows(tokens={len(self._stream_T)}, length={self._length})"


def train_batches(
    stream_T: Int32[np.ndarray, " T"],
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
        stream_T: token ids, documents joined by EOT; the same in each process.
        config: length, batch size, seed, workers.
        process_index: which part of each batch to give.
        process_count: parts a batch is cut into.

    Returns:
        Iterator of `{"inputs": int32 [B, L], "targets": int32 [B, L]}`, with
        `B = batch_size / process_count`. `set_state` raises ValueError on a state of other data.

    Raises:
        ValueError: the stream is shorter than a window, or the processes don't divide a batch.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index={process_index} must be in [0, process_count={process_count})"
        )
    if config.batch_size % process_count:
        raise ValueError(
            f"batch_size={config.batch_size} can't be divided among process_count={process_count}"
        )
    windows = StreamWindows(stream_T, config.length)
    # Grain adds the epoch to the seed: unhashed, seed 1 would give the orders of seed 0 again, one
    # epoch earlier.
    seed = int(np.random.SeedSequence(config.shuffle_seed).generate_state(1, np.uint32)[0])
    batches = (
        grain.MapDataset.source(windows)
        .shuffle(seed)
        .repeat()[process_index::process_count]
        # Else Grain divides the endless length as a float, past what fits at one window a batch.
        .batch(config.batch_size // process_count, drop_remainder=True)
    )
    identity = {
        "stream": hashlib.sha256(stream_T.tobytes()).hexdigest(),
        "length": config.length,
        "batch_size": config.batch_size,
        "shuffle_seed": config.shuffle_seed,
    }
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
