"""SIGTERM and SIGINT as a flag that is read where stopping is safe."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupted(Exception):  # noqa: N818 - named for what happened
    """Someone asked the process to stop; what is new has been saved."""


class InterruptFlag:
    """Set by SIGTERM or SIGINT while entered.

    The handler does nothing else: raising from it inside a compilation was seen to crash. A second
    SIGINT is Python's own again, for those who can't wait.
    """

    def __init__(self) -> None:
        self._name: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._set)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self._name = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._previous[signal.SIGINT])

    def check(self) -> None:
        """Raises Interrupted where the flag is set."""
        if self._name is not None:
            raise Interrupted(self._name)
