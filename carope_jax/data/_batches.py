"""What the pipelines of training batches share: the order, the processes' parts, the iterator.

Axes: B rows of a batch in this process, L tokens a row.
"""

import abc
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags
from jaxtyping import Int32

Batch = dict[str, Int32[np.ndarray, "B L"]]


def shuffled(source: Any, seed: int, *part: int) -> grain.MapDataset[Any]:
    """The elements of a random-access source in an order of its own each epoch, without end.

    Args:
        source: what Grain reads by number.
        seed: of the orders.
        part: numbers that tell sources of one seed apart, which would else share their orders.
    """
    # Grain adds the epoch to the seed: unhashed, seed 1 would give the orders of seed 0 again, one
    # epoch earlier.
    hashed = int(np.random.SeedSequence(seed, spawn_key=part).generate_state(1, np.uint32)[0])
    return grain.MapDataset.source(source).shuffle(hashed).repeat()


def rows_of_process(batch_size: int, process_index: int, process_count: int) -> Sequence[int]:
    """Which rows of each batch are one process's, B of them, unless it is told: every n-th.

    Raises:
        ValueError: there is no such process, or they don't divide a batch.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index={process_index} must be in [0, process_count={process_count})"
        )
    if batch_size % process_count:
        raise ValueError(
            f"batch_size={batch_size} can't be divided among process_count={process_count}"
        )
    return range(process_index, batch_size, process_count)


class RowsOfBatches(grain.transforms.DatasetSelectionMap):
    """Of the rows of all batches in a row, without end, those with some numbers in each batch."""

    def __init__(self, batch_size: int, rows: Sequence[int]) -> None:
        self._batch_size = batch_size
        self._rows = tuple(rows)

    def __len__(self) -> int:
        # As many whole batches as a length can count.
        return sys.maxsize // self._batch_size * len(self._rows)

    def __getitem__(self, index: int) -> tuple[int, int]:
        batch, at = divmod(index, len(self._rows))
        return 0, batch * self._batch_size + self._rows[at]


def in_workers(
    dataset: grain.IterDataset[Batch], workers: int, prefetch: int
) -> grain.IterDataset[Batch]:
    """The data set read by processes, each `prefetch` batches ahead."""
    # Workers are handed Grain's flags, and absl refuses to read unparsed ones.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    return dataset.mp_prefetch(grain.MultiprocessingOptions(workers, prefetch))


class BatchIterator(grain.DatasetIterator[Batch]):
    """An iterator of Grain's, opened when it is first needed, whose states know the data.

    Grain's own states say how far it came, not in what. After an error it goes on from the
    last batch that was handed out, so that trying again skips none.

    Args:
        identity: what a state is worth nothing without: JSON-able values by the name of what they
            are, equal in the iterator that saved a state and in that which is given it.
        workers: processes that the batches come from; 0: none.
        advice: what to say after the refusal of a state, by the name that differed.
    """

    is_shared = False
    """Whether a state is every process's, of however many there are."""

    def __init__(
        self, identity: dict[str, Any], workers: int, advice: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self._identity = identity
        self._workers = workers
        self._advice = advice or {}
        self._running: grain.DatasetIterator[Batch] | None = None

    @abc.abstractmethod
    def _open(self) -> grain.DatasetIterator[Batch]:
        """Grain's iterator, at the present position."""

    @abc.abstractmethod
    def _advance(self, running: grain.DatasetIterator[Batch]) -> None:
        """Notes the position after a batch."""

    @abc.abstractmethod
    def _position(self) -> dict[str, Any]:
        """The position's part of the state."""

    @abc.abstractmethod
    def _go_to(self, state: dict[str, Any]) -> None:
        """Takes the position from a state."""

    def __next__(self) -> Batch:
        running = self._start()
        try:
            batch = next(running)
        except Exception:
            # Grain forgets what it was reading when an error came.
            self._stop()
            raise
        self._advance(running)
        if self._workers:
            # Workers hand over shared memory, which must be gone before the interpreter ends.
            batch = {name: np.array(rows_BL) for name, rows_BL in batch.items()}
        return batch

    def get_state(self) -> dict[str, Any]:
        return {**self._position(), **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        for field, here in self._identity.items():
            if state.get(field) != here:
                raise ValueError(
                    f"state of the training batches was saved with {field}={state.get(field)!r}, "
                    f"but here {field}={here!r}{self._advice.get(field, '')}"
                )
        self._stop()
        self._go_to(state)

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
            self._running = self._open()
        return self._running

    def _stop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None
