"""What training batches are cut from, in memory or on disk: a token stream, or documents.

Axes: T tokens, D documents.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from carope_jax.data._tokenizer import Ids


@runtime_checkable
class TokenStream(Protocol):
    """Documents in a row, each followed by EOT, of which any part can be read."""

    @property
    def fingerprint(self) -> str:
        """Equal where the tokens are: a SHA-256 (hex)."""
        ...

    def __len__(self) -> int:
        """Tokens, EOTs counted."""
        ...

    def slice(self, start: int, stop: int) -> Int32[np.ndarray, " T"]:
        """Tokens `start` to `stop`, `0 <= start <= stop <= len`."""
        ...


class ArrayStream:
    """A stream in memory.

    Raises:
        ValueError: it is not one-dimensional int32.
    """

    def __init__(self, stream_T: Int32[np.ndarray, " T"]) -> None:
        if stream_T.ndim != 1 or stream_T.dtype != np.int32:
            raise ValueError(f"stream must be int32 [T], got {stream_T.dtype} {stream_T.shape}")
        self._stream_T = stream_T

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the tokens."""
        return hashlib.sha256(self._stream_T.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._stream_T)

    def slice(self, start: int, stop: int) -> Int32[np.ndarray, " T"]:
        """Tokens `start` to `stop`: a view."""
        return self._stream_T[start:stop]


def as_stream(stream: Int32[np.ndarray, " T"] | TokenStream) -> TokenStream:
    """A stream as it is, an array as a stream."""
    return ArrayStream(stream) if isinstance(stream, np.ndarray) else stream


@runtime_checkable
class TokenDocuments(Protocol):
    """Documents by number, without EOT."""

    @property
    def documents(self) -> int:
        """How many there are, D."""
        ...

    @property
    def lengths(self) -> Int32[np.ndarray, " D"]:
        """Tokens of each, at least one."""
        ...

    @property
    def eot_id(self) -> int:
        """The id that ends each."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal where the documents and the EOT are: a SHA-256 (hex)."""
        ...

    def document(self, number: int) -> Ids:
        """Token ids of a document, int32 [T], at least one."""
        ...


class ArrayDocuments:
    """Documents in memory.

    Attributes:
        documents: how many there are, D.
        lengths: tokens of each, int32 [D].
        eot_id: the id that ends each.

    Raises:
        ValueError: a document is empty, or not one-dimensional int32.
    """

    def __init__(self, documents: Sequence[Ids], eot_id: int) -> None:
        for number, tokens_T in enumerate(documents):
            if tokens_T.ndim != 1 or tokens_T.dtype != np.int32:
                raise ValueError(
                    f"documents[{number}] must be int32 [T], got {tokens_T.dtype} {tokens_T.shape}"
                )
            if not len(tokens_T):
                raise ValueError(f"documents[{number}] has no tokens")
        self._documents = list(documents)
        self.documents = len(documents)
        self.lengths: Int32[np.ndarray, " D"] = np.asarray([len(d) for d in documents], np.int32)
        self.eot_id = eot_id

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the EOT, the lengths and the tokens."""
        found = hashlib.sha256(np.asarray([self.eot_id, *self.lengths], np.int64).tobytes())
        for tokens_T in self._documents:
            found.update(tokens_T.tobytes())
        return found.hexdigest()

    def document(self, number: int) -> Ids:
        """Token ids of a document.

        Raises:
            IndexError: there is no such document.
        """
        if not 0 <= number < self.documents:
            raise IndexError(f"number={number} is outside the {self.documents} documents")
        return self._documents[number]
