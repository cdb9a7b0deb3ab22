"""What a source of documents is: rows of text, and errors that name their place."""

import abc
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator

_LISTED = 200


@dataclasses.dataclass(frozen=True)
class Row:
    """One document."""

    number: int
    """Its row, line or record in the source, the first being 1."""
    text: str
    """Its text: valid Unicode, not only whitespace."""


class SourceError(ValueError):
    """What is wrong with a row of a source, or with the source.

    Attributes:
        file: the source's name.
        row: the row that is left out, the first being 1; None where the source ends here.
        reason: what is wrong.
    """

    def __init__(self, file: str, row: int | None, reason: str) -> None:
        super().__init__(file, row, reason)  # pickling an exception calls it with these again
        self.file = file
        self.row = row
        self.reason = reason

    def __str__(self) -> str:
        place = self.file if self.row is None else f"{self.file}, row {self.row}"
        return f"{place}: {self.reason}"


class Source(abc.ABC):
    """A file, or what is read like one: its documents come in a fixed order. Can be pickled.

    Attributes:
        name: how errors and indices name it.
    """

    name: str

    # What `_read` may raise where the source can't be read to its end.
    _file_errors: tuple[type[Exception], ...] = (OSError,)

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Bytes stored, compressed where the source is: a measure of the work it is."""

    @abc.abstractmethod
    def _identity(self) -> Iterator[bytes]:
        """What the fingerprint is of; may raise one of `_file_errors`."""

    @abc.abstractmethod
    def _read(self, text_column: str) -> Iterator[Row | SourceError]:
        """Rows and what is wrong with rows; raises SourceError or one of `_file_errors` to end."""

    def fingerprint(self) -> str:
        """SHA-256 (hex), another one where the rows are others.

        Raises:
            SourceError: the source can't be read.
        """
        digest = hashlib.sha256()
        try:
            for part in self._identity():
                digest.update(part)
        except self._file_errors as error:
            raise SourceError(self.name, None, f"can't be read: {_message(error)}") from None
        return digest.hexdigest()

    def rows(self, text_column: str) -> Iterator[Row | SourceError]:
        """Reads the source from its start, a part at a time.

        Nothing is raised. A bad row gives a SourceError that names it, and reading goes on. A
        source that can't be read, or not to its end, gives a SourceError without a row, its last.
        A compressed file whose checksum, which stands at its end, is wrong, may have given wrong
        rows before that one: what must be right is taken once a source ended without it.

        Args:
            text_column: the column, key or feature that holds the text; nothing to a plain text.
        """
        last = None
        try:
            for row in self._read(text_column):
                yield row
                last = row.number if isinstance(row, Row) else row.row
        except SourceError as error:
            yield error
        except self._file_errors as error:
            progress = "" if last is None else f"after row {last}: "
            yield SourceError(self.name, None, f"{progress}can't be read: {_message(error)}")
        else:
            if last is None:
                yield SourceError(self.name, None, "is empty: it has no rows")

    def check(self, number: int, text: str | bytes) -> Row | SourceError:
        """A row of a text, or why it is not one."""
        try:
            if isinstance(text, bytes):
                text = text.decode("utf-8")
            else:
                text.encode("utf-8")  # JSON can spell half of a surrogate pair
        except UnicodeError as error:
            return SourceError(self.name, number, f"is not valid Unicode: {error}")
        if not text or text.isspace():
            return SourceError(self.name, number, "is empty, or only whitespace")
        return Row(number, text)


def listed(names: Iterable[str]) -> str:
    """Names for a message: quoted, since one may hold what can't be printed, and not too many."""
    text = ", ".join(map(repr, names)) or "none"
    return text if len(text) <= _LISTED else text[:_LISTED] + "…"


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # the rest would repeat the file's name
    return " ".join(str(error).split()) or type(error).__name__
