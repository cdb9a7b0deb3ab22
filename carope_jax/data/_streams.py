"""Token streams: what windows are cut from, in memory or on disk. Axis: T tokens."""

import hashlib
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32


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
