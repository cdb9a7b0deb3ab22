"""What preparing a dataset does to one source, and to the sources of one shard.

Axis: D documents.
"""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from etils import epath
from jaxtyping import Int64, UInt64

from carope_jax.data._index import TRAIN, VALIDATION
from carope_jax.data._shards import SUFFIX, ShardInfo, ShardWriter
from carope_jax.data._source import Row, Source, SourceError
from carope_jax.data._tokenizer import Tokenizer, load_tokenizer

# Encoded together: enough to be quick, few enough that memory stays flat.
_BATCH_CHARACTERS = 1 << 20
_LISTED = 1000


class Calls(NamedTuple):
    """What a task calls every second or so.

    Attributes:
        check: raises where the task should end.
        report: of what was done since: (bytes of text, tokens).
    """

    check: Callable[[], None]
    report: Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Scan:
    """A source read through before anything is written."""

    fingerprint: str
    """The source's; "" if it can't be read."""
    hashes: UInt64[np.ndarray, " D"]
    """Of the text of each document."""
    sizes: Int64[np.ndarray, " D"]
    """Bytes of the text of each document."""
    errors: tuple[SourceError, ...] = ()
    """What is wrong with it, the first thousand of its bad rows."""
    bad_rows: int = 0
    """How many rows are left out."""
    is_broken: bool = False
    """Whether it can't be read, or not to its end: then none of its documents count."""

    @property
    def identity(self) -> tuple[int, int]:
        """Equal where the documents are: their number, and the sum of their hashes."""
        return len(self.hashes), int(self.hashes.sum(dtype=np.uint64))


def text_hash(encoded: bytes) -> int:
    """64 bits that decide, alone, to which split a text goes."""
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "big")


def scan_source(task: tuple[Source, str], calls: Calls) -> Scan:
    """Reads a source, given with its text column, to its end."""
    source, text_column = task
    hashes: list[int] = []
    sizes: list[int] = []
    errors: list[SourceError] = []
    bad_rows, is_broken, unreported = 0, False, 0
    try:
        fingerprint = source.fingerprint()
        rows = source.rows(text_column)
    except SourceError as error:
        fingerprint, rows = "", iter([error])
    for row in rows:
        if isinstance(row, SourceError):
            is_broken |= row.row is None
            bad_rows += row.row is not None
            if len(errors) < _LISTED or row.row is None:
                errors.append(row)
            continue
        encoded = row.text.encode()
        hashes.append(text_hash(encoded))
        sizes.append(len(encoded))
        unreported += len(encoded)
        if unreported >= _BATCH_CHARACTERS:
            calls.check()
            calls.report(unreported, 0)
            unreported = 0
    calls.report(unreported, 0)
    if is_broken:
        hashes, sizes = [], []
    return Scan(
        fingerprint,
        np.asarray(hashes, np.uint64),
        np.asarray(sizes, np.int64),
        tuple(errors),
        bad_rows,
        is_broken,
    )


@dataclasses.dataclass(frozen=True)
class SampleTask:
    """Texts to train a tokenizer on: those whose hash lies in a range."""

    source: Source
    text_column: str
    above: int
    """Hashes above this one, -1 for all,"""
    up_to: int
    """and up to this one."""


def sample_texts(task: SampleTask, calls: Calls) -> list[str]:
    """The texts, in their order."""
    texts = []
    for row in task.source.rows(task.text_column):
        calls.check()
        if isinstance(row, Row) and task.above < text_hash(row.text.encode()) <= task.up_to:
            texts.append(row.text)
    return texts


@dataclasses.dataclass(frozen=True)
class ShardTask:
    """The shards, one of each split, of a few sources in a row."""

    folder: epath.Path
    """Of the dataset; holds the tokenizer."""
    stem: str
    """Name of the shards after their split: `00003-of-00012`."""
    sources: tuple[Source, ...]
    """Those that can be read."""
    identities: tuple[tuple[int, int], ...]
    """`Scan.identity` of each: what must be found again."""
    fingerprints: tuple[str, ...]
    """`Scan.fingerprint` of each."""
    size: int
    """Bytes of the text of all."""
    tokenizer_hash: str
    """Of the tokenizer in the folder."""
    text_column: str
    held_out_up_to: int
    """A text goes to validation if its hash is up to this one; -1: none does."""
    stop_on_error: bool
    """Whether a document that can't be written ends it, or is left out."""


class Written(NamedTuple):
    """Whole shards by split, none for a split without documents, and what was left out of them."""

    shards: dict[str, ShardInfo]
    errors: tuple[SourceError, ...]


def write_shards(task: ShardTask, calls: Calls) -> Written:
    """Encodes the documents of a task's sources and writes them.

    Raises:
        SourceError: a source holds other documents than it did, or (with `stop_on_error`) one that
            has no token.
        OSError: a shard can't be written.
    """
    tokenizer = _tokenizer(task.folder, task.tokenizer_hash)
    names = tuple(source.name for source in task.sources)
    errors: list[SourceError] = []
    with contextlib.ExitStack() as stack:
        writers: dict[str, ShardWriter] = {}

        def writer(split: str) -> ShardWriter:
            if split not in writers:
                path = task.folder / f"{split}-{task.stem}{SUFFIX}"
                opened = ShardWriter(path, tokenizer.vocab_size, sources=names)
                writers[split] = stack.enter_context(opened)
            return writers[split]

        for source, identity in zip(task.sources, task.identities, strict=True):
            documents = hashes = 0
            for batch in _batches(source, task.text_column):
                calls.check()
                ids = tokenizer.encode_batch([row.text for row in batch])
                size = tokens = 0
                for row, ids_T in zip(batch, ids, strict=True):
                    encoded = row.text.encode()
                    text = text_hash(encoded)
                    documents, hashes = documents + 1, hashes + text
                    size, tokens = size + len(encoded), tokens + len(ids_T)
                    if len(ids_T):
                        split = VALIDATION if text <= task.held_out_up_to else TRAIN
                        writer(split).add(ids_T)
                        continue
                    error = SourceError(source.name, row.number, "has no token")
                    if task.stop_on_error:
                        raise error
                    errors.append(error)
                calls.report(size, tokens)
            if (documents, hashes % 2**64) != identity:
                raise SourceError(source.name, None, "has changed since it was first read")
        return Written({split: w.finish() for split, w in sorted(writers.items())}, tuple(errors))


def _batches(source: Source, text_column: str) -> Iterator[list[Row]]:
    batch: list[Row] = []
    characters = 0
    for row in source.rows(text_column):
        if isinstance(row, SourceError):
            continue  # known from the scan; one that is new shows in what was counted
        batch.append(row)
        characters += len(row.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: epath.Path, tokenizer_hash: str) -> Tokenizer:
    del tokenizer_hash  # tells tokenizers apart that stood in a folder one after the other
    return load_tokenizer(folder)
