"""Which rows of a batch each process reads, and how they come to the devices.

Axes: B rows of a batch, T tokens a row.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Sharding

from carope_jax.data import DataConfig, Dataset
from carope_jax.training._step import Batch


@dataclasses.dataclass(frozen=True)
class BatchPart:
    """The rows that one process's devices hold a part of.

    Attributes:
        rows: their numbers in the batch, ascending; not always in a row, as a mesh follows the
            wiring of the chips.
        index: which of the parts this is; processes that share rows (an axis that is not the
            batch's lies across them) have the same.
        count: equal parts that make up the batch; None where the processes' rows overlap in part.
    """

    rows: tuple[int, ...]
    index: int
    count: int | None


def batch_part(sharding: Sharding, shape: tuple[int, ...], process: int) -> BatchPart:
    """The part of a batch with this sharding that a process reads."""
    held: dict[int, set[int]] = {}
    device: Any  # jax.Device, whose attributes are not typed
    for device, index in sharding.devices_indices_map(shape).items():
        assert index is not None
        held.setdefault(device.process_index, set()).update(_numbers(index[0], shape[0]))
    parts = sorted({tuple(sorted(rows)) for rows in held.values()})
    is_partition = sum(map(len, parts)) == shape[0] and len({*map(len, parts)}) == 1
    rows = tuple(sorted(held[process]))
    return BatchPart(rows, parts.index(rows), len(parts) if is_partition else None)


def open_batches(
    dataset: Dataset, config: DataConfig, layout: Mapping[str, jax.ShapeDtypeStruct]
) -> "tuple[grain.DatasetIterator[dict[str, np.ndarray]], BatchPart]":
    """This process's rows of the training batches.

    Args:
      dataset: what is trained on.
      config: how.
      layout: shapes and shardings of a batch's arrays.

    Raises:
      ValueError: the data makes no batch, or the mesh cuts packed rows in a way that no loader
        can serve.
    """
    whole = next(iter(layout.values()))
    part = batch_part(whole.sharding, whole.shape, jax.process_index())
    if part.count is None and config.rows == "packed":
        raise ValueError(
            "on this mesh the processes' rows of a batch overlap in part, and packed rows are "
            "another in each: choose data x fsdp a multiple of the number of processes"
        )
    batches = dataset.batches(
        config, process_index=part.index, process_count=part.count or 1, rows=part.rows
    )
    return batches, part


def place(
    arrays: Mapping[str, np.ndarray], part: BatchPart, layout: Mapping[str, jax.ShapeDtypeStruct]
) -> Batch:
    """A batch on the devices, from the rows of it that this process has read."""
    at = {row: number for number, row in enumerate(part.rows)}

    def put(array: np.ndarray, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            here = [at[row] for row in _numbers(index[0], leaf.shape[0])]
            return array[here][:, index[1]]

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, of_device)

    return {name: put(arrays[name], leaf) for name, leaf in layout.items()}


def _numbers(part: slice, size: int) -> range:
    return range(*part.indices(size))
