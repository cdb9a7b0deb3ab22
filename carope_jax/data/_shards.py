"""Shards: ArrayRecord files of whole documents, one record a document, their lengths beside them.

A record is the document's token ids, little-endian, two bytes each where the vocabulary allows it,
four otherwise. The EOT that ends a document is not stored. Axis: T tokens.
"""

import array
import contextlib
import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
from array_record.python import array_record_module
from etils import epath
from jaxtyping import Int32

SUFFIX = ".array_record"
_LENGTHS_SUFFIX = ".lengths.npy"
_PARTIAL_SUFFIX = ".partial"

# One record a group: a document is read without its neighbours.
_WRITER_OPTIONS = "group_size:1"
# Reading ahead and threads only cost where documents are picked at random.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_READER_BUFFER = 32 * 1024


@dataclasses.dataclass(frozen=True)
class ShardInfo:
    """What a whole shard holds.

    Raises:
        ValueError: a name is not that of a shard, or a count is negative.
    """

    name: str
    """Name of the file in its folder, `train-00000-of-00012.array_record`."""
    sources: tuple[str, ...]
    """The source files its documents come from, in the order of the documents."""
    documents: int
    """Documents, each at least one token long."""
    tokens: int
    """Tokens of the documents together, EOTs not counted."""
    bytes: int
    """Size of the file."""
    tokens_sha256: str
    """SHA-256 (hex) over the token ids as stored, uncompressed, one document after the other."""
    lengths_sha256: str
    """SHA-256 (hex) over the lengths of the documents, little-endian int32."""

    def __post_init__(self) -> None:
        if not self.name.endswith(SUFFIX) or "/" in self.name:
            raise ValueError(f"name={self.name!r} of a shard must be a file name in {SUFFIX!r}")
        for field in ("documents", "tokens", "bytes"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 0")


def token_dtype(vocab_size: int) -> np.dtype:
    """The type in which the ids of a vocabulary are stored: little-endian uint16 or uint32."""
    if not 1 <= vocab_size <= 2**31:
        raise ValueError(f"vocab_size={vocab_size} must be in [1, 2**31]")
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class ShardWriter:
    """Writes one shard: `add` each document, then `finish`.

    The same documents give the same bytes. Both files are written under other names (`.partial`)
    and renamed by `finish`, the shard last: what has the shard's name is whole. In a bucket, where
    an object appears once it is whole, they are written to a local temporary folder and copied.
    Leaving the `with` block without `finish`, by an exception too, removes what was written.

    Args:
        path: the shard, its name ending in `.array_record`, in a folder that exists.
        vocab_size: ids are in `[0, vocab_size)`.
        sources: the source files, noted in the `ShardInfo`.

    Raises:
        ValueError: the name has another ending, or no type can hold the ids.
    """

    def __init__(
        self, path: epath.PathLike, vocab_size: int, *, sources: Sequence[str] = ()
    ) -> None:
        self._path = epath.Path(path)
        if not self._path.name.endswith(SUFFIX):
            raise ValueError(f"path {str(path)!r} of a shard must end in {SUFFIX!r}")
        self._dtype = token_dtype(vocab_size)
        self._vocab_size = vocab_size
        self._sources = tuple(sources)
        self._lengths = array.array("i")
        self._tokens_hash = hashlib.sha256()
        self._cleanup = contextlib.ExitStack()
        self._writer: array_record_module.ArrayRecordWriter | None = None

    def __enter__(self) -> Self:
        self._is_remote = "://" in os.fspath(self._path)
        if self._is_remote:
            folder = epath.Path(self._cleanup.enter_context(tempfile.TemporaryDirectory()))
        else:
            folder = self._path.parent
        self._partial = folder / (self._path.name + _PARTIAL_SUFFIX)
        self._partial_lengths = folder / (lengths_path(self._path).name + _PARTIAL_SUFFIX)
        for partial in (self._partial, self._partial_lengths):
            self._cleanup.callback(partial.unlink, missing_ok=True)
        try:
            self._writer = array_record_module.ArrayRecordWriter(
                os.fspath(self._partial), _WRITER_OPTIONS
            )
        except RuntimeError as error:
            self._cleanup.close()
            raise self._write_error(error) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            # A writer that has failed says so again; its files go anyway.
            with contextlib.suppress(RuntimeError):
                self._close()
        finally:
            self._cleanup.close()

    def add(self, ids_T: np.ndarray) -> None:
        """Appends a document.

        Args:
            ids_T: its token ids, any integer type, without EOT.

        Raises:
            ValueError: the document has no token, or an id is outside the vocabulary, or it is not
                a one-dimensional array of integers, or the shard is not open.
            OSError: it can't be written: the disk is full, say.
        """
        if self._writer is None:
            raise ValueError(f"shard {str(self._path)!r} is not open for writing")
        place = f"shard {str(self._path)!r}, document {len(self._lengths)}"
        if ids_T.ndim != 1 or not np.issubdtype(ids_T.dtype, np.integer):
            raise ValueError(
                f"{place}: ids must be a row of integers, got {ids_T.dtype} {ids_T.shape}"
            )
        if not ids_T.size:
            raise ValueError(f"{place}: ids is empty; a document has at least one token")
        least, most = int(ids_T.min()), int(ids_T.max())
        if least < 0 or most >= self._vocab_size:
            bad = least if least < 0 else most
            raise ValueError(f"{place}: id {bad} is outside the vocabulary [0, {self._vocab_size})")
        record = ids_T.astype(self._dtype).tobytes()
        try:
            self._writer.write(record)
        except RuntimeError as error:
            raise self._write_error(error) from None
        self._lengths.append(ids_T.size)
        self._tokens_hash.update(record)

    def finish(self) -> ShardInfo:
        """Closes the shard and gives both files their names.

        Raises:
            ValueError: the shard is not open.
            OSError: the rest can't be written.
        """
        if self._writer is None:
            raise ValueError(f"shard {str(self._path)!r} is not open for writing")
        lengths = np.asarray(self._lengths, "<i4")
        try:
            self._close()
            with self._partial_lengths.open("wb") as file:
                np.save(file, lengths)
        except (RuntimeError, OSError) as error:
            raise self._write_error(error) from None
        info = ShardInfo(
            name=self._path.name,
            sources=self._sources,
            documents=len(lengths),
            tokens=int(lengths.sum(dtype=np.int64)),
            bytes=self._partial.stat().length,
            tokens_sha256=self._tokens_hash.hexdigest(),
            lengths_sha256=lengths_hash(lengths),
        )
        self._publish(self._partial_lengths, lengths_path(self._path))
        self._publish(self._partial, self._path)
        return info

    def _close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _publish(self, partial: epath.Path, path: epath.Path) -> None:
        if self._is_remote:
            partial.copy(path, overwrite=True)
        else:
            partial.replace(path)

    def _write_error(self, error: Exception) -> OSError:
        return OSError(f"shard {str(self._path)!r} can't be written: {error}")


class ShardReader:
    """Documents of a shard by number. May be shared by threads, not by processes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no whole shard, or does not hold as many documents as there are lengths.
    """

    def __init__(self, path: epath.Path, vocab_size: int, lengths: Int32[np.ndarray, " D"]) -> None:
        if not path.exists():
            raise FileNotFoundError(f"shard {str(path)!r} does not exist")
        try:
            self._reader = array_record_module.ArrayRecordReader(
                os.fspath(path), _READER_OPTIONS, file_reader_buffer_size=_READER_BUFFER
            )
            # A file cut short opens all the same, without records; closing it says what is wrong.
            if not self._reader.ok():
                self._reader.close()
        except RuntimeError as error:
            reason = str(error) or "its end is missing"
            raise ValueError(f"shard {str(path)!r} is corrupt: {reason}") from None
        if self._reader.num_records() != len(lengths):
            raise ValueError(
                f"shard {str(path)!r} holds {self._reader.num_records()} documents, but its "
                f"lengths are those of {len(lengths)}"
            )
        self._path = path
        self._dtype = token_dtype(vocab_size)
        self._vocab_size = vocab_size
        self._lengths = lengths

    def read(self, record: int) -> np.ndarray:
        """Token ids of a document, as stored.

        Raises:
            ValueError: the record is corrupt, has another length than was noted, or an id outside
                the vocabulary.
        """
        place = f"shard {str(self._path)!r}, record {record}"
        try:
            (stored,) = self._reader.read([record])
        except RuntimeError as error:
            raise ValueError(f"{place} is corrupt: {error}") from None
        length = int(self._lengths[record])
        if len(stored) != length * self._dtype.itemsize:
            raise ValueError(
                f"{place} has {len(stored)} bytes, but its noted length of {length} tokens of "
                f"{self._dtype.itemsize} bytes makes {length * self._dtype.itemsize}"
            )
        ids_T = np.frombuffer(stored, self._dtype)
        most = int(ids_T.max())
        if most >= self._vocab_size:
            raise ValueError(
                f"{place} has the id {most}, outside the vocabulary [0, {self._vocab_size})"
            )
        return ids_T


def lengths_path(shard: epath.Path) -> epath.Path:
    """Where the lengths of a shard's documents are: beside it."""
    return shard.parent / (shard.name.removesuffix(SUFFIX) + _LENGTHS_SUFFIX)


def lengths_hash(lengths: np.ndarray) -> str:
    """SHA-256 (hex) over lengths as little-endian int32."""
    return hashlib.sha256(lengths.astype("<i4").tobytes()).hexdigest()


def read_lengths(folder: epath.Path, info: ShardInfo) -> Int32[np.ndarray, " D"]:
    """Lengths of a shard's documents, in tokens, in their order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not the one that was written with the shard.
    """
    path = lengths_path(folder / info.name)
    if not path.exists():
        raise FileNotFoundError(f"lengths {str(path)!r} of shard {info.name!r} do not exist")
    try:
        with path.open("rb") as file:
            lengths = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"lengths {str(path)!r} are not an .npy file: {error}") from None
    if (
        lengths.dtype != np.int32
        or lengths.ndim != 1
        or lengths_hash(lengths) != (info.lengths_sha256)
    ):
        raise ValueError(
            f"lengths {str(path)!r} are not those noted for shard {info.name!r}: "
            f"{lengths.dtype} {lengths.shape} with another hash than {info.lengths_sha256}"
        )
    return lengths
