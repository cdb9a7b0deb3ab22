"""The nearest batch that fits a chip's memory, in few compilations."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple


class TooLarge(Exception):  # noqa: N818 - named for what happened
    """A program needs more memory than the chip has.

    Attributes:
      needed: bytes, where the compiler says.
    """

    def __init__(self, message: str, needed: int | None) -> None:
        super().__init__(message)
        self.needed = needed


class BatchChoice(NamedTuple):
    """A batch and the parts it is computed in."""

    batch_size: int
    micro_batches: int


class Fitted(NamedTuple):
    """What a search found.

    Attributes:
      choice: the batch that fits; None: none does.
      compiled: what `compile_batch` made of it.
      failures: the choices that don't fit, with the bytes they need where the compiler says.
    """

    choice: BatchChoice | None
    compiled: Any
    failures: dict[BatchChoice, int | None]


def candidates(wanted: BatchChoice, ways: int) -> list[BatchChoice]:
    """What to try, from the wanted batch on: the same or the nearest batch that divides over the
    devices, in ever more parts, down to a row a device. Fewer rows than that need no less memory.

    Args:
      wanted: what the experiment asks for.
      ways: devices that a batch is split over.
    """
    batch_size = ways * max(1, round(wanted.batch_size / ways))
    rows = batch_size // ways
    parts = [n for n in range(1, rows + 1) if rows % n == 0]
    first = next((n for n in parts if n >= wanted.micro_batches), rows)
    return [BatchChoice(batch_size, n) for n in parts if n >= first]


def find_fit(wanted: BatchChoice, ways: int, compile_batch: Callable[[BatchChoice], Any]) -> Fitted:
    """The first candidate that fits, found by halving: more parts never need more memory.

    Args:
      wanted: what the experiment asks for; tried first if it divides.
      ways: devices that a batch is split over.
      compile_batch: compiles it, or raises `TooLarge`.
    """
    tried = candidates(wanted, ways)
    failures: dict[BatchChoice, int | None] = {}
    found: tuple[BatchChoice, Any] | None = None
    low, high, middle = 0, len(tried) - 1, 0
    while low <= high:
        try:
            found = tried[middle], compile_batch(tried[middle])
            high = middle - 1
        except TooLarge as error:
            failures[tried[middle]] = error.needed
            low = middle + 1
        middle = (low + high) // 2
    choice, compiled = found or (None, None)
    return Fitted(choice, compiled, failures)


def memory_asked(message: str) -> int | None:
    """Bytes that a program asked for, from XLA's message about running out of them."""
    found = re.search(
        r"\((\d+(?:\.\d+)?)([KMGT]?)\) exceeds|Used (\d+(?:\.\d+)?)([KMGT]?) of", message
    )
    if found is None:
        return None
    number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    return int(float(number) * 2 ** {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[unit])
