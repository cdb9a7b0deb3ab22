"""Files of documents: Parquet, JSON lines and plain text, the latter two also compressed."""

import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet
from etils import epath

from carope_jax.data._source import Row, Source, SourceError, listed

_PARQUET, _JSON_LINES, _TEXT = ".parquet", ".jsonl", ".txt"
_COMPRESSIONS = {"": None, ".gz": "gzip", ".zst": "zstd"}
_FORMATS = {
    _PARQUET: (_PARQUET, None),
    **{
        kind + ending: (kind, compression)
        for kind in (_JSON_LINES, _TEXT)
        for ending, compression in _COMPRESSIONS.items()
    },
}

SUFFIXES = tuple(_FORMATS)
"""Endings of the names of files that can be read."""

_CHUNK = 1 << 20
# Rows decoded at once: enough to be quick, few enough that rows of 1 MB fit.
_BATCH_ROWS = 64


class FileSource(Source):
    """A file, local or in a bucket.

    * `.parquet`: a document a row. Only the text column is read, a page at a time. Checksums of
      pages are checked where the file has them.
    * `.jsonl`: a document a line; blank lines are none.
    * `.txt`: one document.

    The last two may end in `.gz` or `.zst`.

    Raises:
        ValueError: the name has another ending.
    """

    # UnicodeError: names of columns are decoded as a schema is read.
    _file_errors = (OSError, pa.ArrowException, UnicodeError)

    def __init__(self, path: epath.PathLike) -> None:
        self._path = epath.Path(path)
        self.name = str(self._path)
        ending = _ending(self._path.name)
        if ending is None:
            raise ValueError(
                f"source {self.name!r} is of a kind that can't be read: its name must end in one of"
                f" {', '.join(SUFFIXES)}"
            )
        self._format = _FORMATS[ending]

    @property
    def size(self) -> int:
        return self._path.stat().length

    def _identity(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    def _read(self, text_column: str) -> Iterator[Row | SourceError]:
        kind, compression = self._format
        with self._path.open("rb") as file:
            if kind == _PARQUET:
                yield from self._read_parquet(file, text_column)
                return
            with _decompressed(file, compression) as stream:
                if kind == _JSON_LINES:
                    yield from self._read_lines(stream, text_column)
                elif text := stream.read():
                    yield self.check(1, text)

    def _read_parquet(self, file: BinaryIO, text_column: str) -> Iterator[Row | SourceError]:
        parquet = pyarrow.parquet.ParquetFile(
            file,
            buffer_size=_CHUNK,  # else a whole column of a row group is read at once
            pre_buffer=False,
            page_checksum_verification=True,
        )
        self._check_column(parquet.schema_arrow, text_column)
        number = 0
        for batch in self._batches(parquet, text_column):
            column = batch.column(text_column)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            # As bytes: a text that is not UTF-8 is then an error of its row alone.
            for value in column.cast(pa.large_binary()):
                number += 1
                if not value.is_valid:
                    yield SourceError(self.name, number, f"has no {text_column!r}: it is null")
                else:
                    yield self.check(number, value.as_py())
        if number != parquet.metadata.num_rows:
            raise SourceError(
                self.name,
                None,
                f"has {number} rows, but its footer says {parquet.metadata.num_rows}",
            )

    def _batches(
        self, parquet: pyarrow.parquet.ParquetFile, text_column: str
    ) -> Iterator[pa.RecordBatch]:
        # One group at a time: a batch over two would take the good rows of the first along with
        # what is wrong in the second.
        for group in range(parquet.num_row_groups):
            yield from parquet.iter_batches(
                _BATCH_ROWS, row_groups=[group], columns=[text_column], use_threads=False
            )

    def _check_column(self, schema: pa.Schema, text_column: str) -> None:
        found = schema.get_all_field_indices(text_column)
        if len(found) != 1:
            count = "no" if not found else str(len(found))
            raise SourceError(
                self.name,
                None,
                f"has {count} column {text_column!r}; its columns are {listed(schema.names)}",
            )
        kind = schema.field(found[0]).type
        text_kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not any(is_kind(text_kind) for is_kind in _TEXT_KINDS):
            raise SourceError(
                self.name, None, f"has a column {text_column!r} of {kind}, which is not text"
            )

    def _read_lines(self, stream: io.BufferedIOBase, key: str) -> Iterator[Row | SourceError]:
        for number, line in enumerate(stream, start=1):
            if not line.isspace():
                yield self._row_of_line(number, line, key)

    def _row_of_line(self, number: int, line: bytes, key: str) -> Row | SourceError:
        try:
            record: Any = json.loads(line.rstrip().decode("utf-8"))
        except UnicodeDecodeError as error:
            reason = f"is not valid Unicode: {error}"
        except (ValueError, RecursionError) as error:
            reason = f"is not JSON: {error}"
        else:
            if not isinstance(record, dict):
                reason = f"is not a JSON object, but {_JSON_NAMES[type(record)]}"
            elif key not in record:
                reason = f"has no key {key!r}; its keys are {listed(record)}"
            elif not isinstance(record[key], str):
                reason = f"has under {key!r} no string, but {_JSON_NAMES[type(record[key])]}"
            else:
                return self.check(number, record[key])
        return SourceError(self.name, number, reason)


_TEXT_KINDS = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
)
_JSON_NAMES = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def can_read(name: str) -> bool:
    """Whether a file of that name is of a kind that `FileSource` reads."""
    return _ending(name) is not None


def _ending(name: str) -> str | None:
    return next((ending for ending in SUFFIXES if name.lower().endswith(ending)), None)


@contextlib.contextmanager
def _decompressed(file: BinaryIO, compression: str | None) -> Iterator[io.BufferedIOBase]:
    if compression is None:
        yield cast(io.BufferedIOBase, file)
        return
    # Unlike the standard library it knows both, and says of both when a file is cut short.
    with pa.CompressedInputStream(file, compression) as stream:
        yield io.BufferedReader(stream, _CHUNK)
