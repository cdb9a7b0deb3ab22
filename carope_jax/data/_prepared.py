"""Prepared datasets: any document, and any part of the token stream, read where it lies on disk.

Axes: D documents, T tokens.
"""

import collections
import hashlib
import threading
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from etils import epath
from jaxtyping import Int32

from carope_jax.data._index import DatasetIndex, check_shard, read_index
from carope_jax.data._shards import ShardReader, read_lengths
from carope_jax.data._tokenizer import Ids, Tokenizer, load_tokenizer

# Each keeps a file open, and a process may often open no more than 1,024.
_MAX_READERS = 512


class PreparedSplit:
    """The documents of one split of a prepared dataset, and the stream they make: a `TokenStream`.

    Only lengths are held in memory, 16 bytes a document; tokens are read as they are asked for.
    May be shared by threads. Pickled (for the workers of Grain) as the path and the index, and read
    anew.

    Attributes:
        name: of the split, `"train"` or `"validation"`.
        documents: how many there are, D.
        tokens: how many they have, EOTs not counted.
        lengths: tokens of each document, int32 [D].
        eot_id: the id after each document of the stream.
        fingerprint: SHA-256 (hex), equal where the documents are, in equal shards.

    Raises:
        FileNotFoundError: the lengths of a shard are missing.
        ValueError: there is no such split, or lengths are not those that were written.
    """

    def __init__(self, folder: epath.PathLike, index: DatasetIndex, name: str) -> None:
        if name not in index.splits:
            raise ValueError(
                f"split {name!r} is none of prepared dataset {str(folder)!r}, which has "
                f"{list(index.splits)}"
            )
        self._folder = epath.Path(folder)
        self._index = index
        self._shards = index.splits[name]
        self.name = name
        self.eot_id = index.eot_id
        self.tokenizer_hash = index.tokenizer_hash
        self.fingerprint = index.fingerprint(name)
        self._shard_lengths = [read_lengths(self._folder, shard) for shard in self._shards]
        for shard, lengths_D in zip(self._shards, self._shard_lengths, strict=True):
            counted = (len(lengths_D), int(lengths_D.sum(dtype=np.int64)))
            if counted != (shard.documents, shard.tokens) or np.any(lengths_D < 1):
                raise ValueError(
                    f"shard {shard.name!r} is noted with {shard.documents} documents and "
                    f"{shard.tokens} tokens, but its lengths are {counted[0]} and make {counted[1]}"
                )
        self.lengths: Int32[np.ndarray, " D"] = np.concatenate(
            [np.empty(0, np.int32), *self._shard_lengths]
        )
        self.documents = len(self.lengths)
        self.tokens = int(self.lengths.sum(dtype=np.int64))
        # Where each document and its EOT end in the stream, and each shard in the documents.
        self._ends_D = np.cumsum(self.lengths.astype(np.int64) + 1)
        self._shard_ends = np.cumsum([shard.documents for shard in self._shards], dtype=np.int64)
        self._readers: collections.OrderedDict[int, ShardReader] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Tokens of the stream: those of the documents and one EOT after each."""
        return self.tokens + self.documents

    def document(self, number: int) -> Ids:
        """Token ids of a document, int32, without EOT.

        Raises:
            IndexError: there is no such document.
            FileNotFoundError: its shard is missing.
            ValueError: its record is corrupt, has another length than was noted, or an id outside
                the vocabulary.
        """
        if not 0 <= number < self.documents:
            raise IndexError(f"number={number} is outside the {self.documents} documents")
        return self._read(number).astype(np.int32)

    def slice(self, start: int, stop: int) -> Int32[np.ndarray, " T"]:
        """Tokens `start` to `stop` of the stream, reading only the documents they are of.

        Raises:
            ValueError: not `0 <= start <= stop <= len`, or a record is bad as in `document`.
            FileNotFoundError: a shard is missing.
        """
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"slice [{start}, {stop}) is not inside the stream [0, {len(self)})")
        part_T = np.full(stop - start, self.eot_id, np.int32)
        at = start
        number = int(np.searchsorted(self._ends_D, start, side="right"))
        while at < stop:
            after_eot = int(self._ends_D[number])
            length = int(self.lengths[number])
            begin = after_eot - 1 - length
            end = min(stop, after_eot - 1)
            if at < end:
                part_T[at - start : end - start] = self._read(number)[at - begin : end - begin]
            at = after_eot
            number += 1
        return part_T

    def _read(self, number: int) -> np.ndarray:
        shard = int(np.searchsorted(self._shard_ends, number, side="right"))
        first = int(self._shard_ends[shard]) - self._shards[shard].documents
        return self._reader(shard).read(number - first)

    def _reader(self, shard: int) -> ShardReader:
        with self._lock:
            reader = self._readers.get(shard)
            if reader is None:
                reader = ShardReader(
                    self._folder / self._shards[shard].name,
                    self._index.vocab_size,
                    self._shard_lengths[shard],
                )
                self._readers[shard] = reader
                # Dropped, not closed: another thread may be reading.
                if len(self._readers) > _MAX_READERS:
                    self._readers.popitem(last=False)
            self._readers.move_to_end(shard)
            return reader

    def __reduce__(self) -> tuple[Any, ...]:
        return PreparedSplit, (self._folder, self._index, self.name)

    def __repr__(self) -> str:
        return (
            f"PreparedSplit({str(self._folder)!r}, {self.name!r}, documents={self.documents}, "
            f"tokens={self.tokens})"
        )


class SplitDocuments(Sequence[Ids]):
    """The documents of splits, one split after the other, read as they are asked for."""

    def __init__(self, splits: Sequence[PreparedSplit]) -> None:
        self._splits = list(splits)
        self._ends = np.cumsum([split.documents for split in splits], dtype=np.int64)

    def __len__(self) -> int:
        return sum(split.documents for split in self._splits)

    @overload
    def __getitem__(self, index: int) -> Ids: ...
    @overload
    def __getitem__(self, index: slice) -> list[Ids]: ...
    def __getitem__(self, index: int | slice) -> Ids | list[Ids]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"index={index} is outside the {len(self)} documents")
        number = index % len(self)
        part = int(np.searchsorted(self._ends, number, side="right"))
        split = self._splits[part]
        return split.document(number - int(self._ends[part]) + split.documents)


class PreparedDataset:
    """A folder, local or in a bucket, that `python -m carope_jax.data.prepare` wrote.

    Attributes:
        index: what its `dataset.json` says.
        tokenizer: what made the ids.
    """

    def __init__(self, folder: epath.Path, index: DatasetIndex, tokenizer: Tokenizer) -> None:
        self.folder = folder
        self.index = index
        self.tokenizer = tokenizer

    @classmethod
    def open(cls, folder: epath.PathLike) -> "PreparedDataset":
        """Reads the index and the tokenizer, and checks that every shard is there, of its size.

        Raises:
            FileNotFoundError: the folder has no `dataset.json`, or a shard, its lengths or the
                tokenizer are missing.
            ValueError: the index can't be read, a shard has another size, or the tokenizer is
                another.
        """
        folder = epath.Path(folder)
        index = read_index(folder)
        for shards in index.splits.values():
            for shard in shards:
                check_shard(folder, shard)
        tokenizer = load_tokenizer(folder)
        for field, found in (
            ("tokenizer_hash", tokenizer.hash),
            ("vocab_size", tokenizer.vocab_size),
            ("eot_id", tokenizer.eot_id),
        ):
            if getattr(index, field) != found:
                raise ValueError(
                    f"prepared dataset {str(folder)!r} has {field}={getattr(index, field)!r}, but "
                    f"its tokenizer {found!r}"
                )
        return cls(folder, index, tokenizer)

    def split(self, name: str) -> PreparedSplit:
        """The documents of a split, their lengths read."""
        return PreparedSplit(self.folder, self.index, name)

    def verify(self) -> None:
        """Reads every document of every split and compares with the checksums: minutes, or hours.

        Raises:
            FileNotFoundError: a shard is missing.
            ValueError: a record is bad as in `PreparedSplit.document`, or the tokens are others.
        """
        for shards in self.index.splits.values():
            for shard in shards:
                path = self.folder / shard.name
                reader = ShardReader(path, self.index.vocab_size, read_lengths(self.folder, shard))
                found = hashlib.sha256()
                for record in range(shard.documents):
                    found.update(reader.read(record).tobytes())
                if found.hexdigest() != shard.tokens_sha256:
                    raise ValueError(
                        f"shard {str(path)!r} holds other tokens than were written: their SHA-256 "
                        f"is {found.hexdigest()}, not {shard.tokens_sha256}"
                    )
