"""A line for the whole study: which run, what it says, how long the rest may take."""

import datetime
import statistics
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class StudyProgress:
    """Runs done of all, the current one's last line, and an estimate: a bar on a terminal, else a
    line when a run begins and ends.

    Args:
      console: where.
      name: the study's.
      total: runs in all.
      times: seconds of runs that were made before, for the estimate.
    """

    def __init__(self, console: Console, name: str, total: int, times: Sequence[float]) -> None:
        self._console, self._total, self._times = console, total, list(times)
        self._done, self._current, self._began = 0, "", datetime.datetime.now()
        self._bar = Progress(
            TextColumn("{task.completed}/{task.total} runs"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[left]}  {task.description}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=total, left="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def skip(self, runs: int) -> None:
        """So many runs need nothing."""
        self._done += runs
        self._bar.update(self._task, completed=self._done)

    def begin(self, name: str) -> None:
        """A run begins."""
        self._current, self._began = name, datetime.datetime.now()
        self._bar.update(self._task, description=name, left=self._left())
        if not self._console.is_terminal:
            self.note(f"{name} ... {self._left()}")

    def say(self, line: str) -> None:
        """What the current run says."""
        self._bar.update(self._task, description=f"{self._current}: {line}", left=self._left())

    def end(self, summary: str) -> None:
        """The current run has ended."""
        self._times.append((datetime.datetime.now() - self._began).total_seconds())
        self.note(f"{self._current}: {summary}")
        self.skip(1)

    def note(self, line: str) -> None:
        """A line that stays."""
        self._console.print(f"[{self._done}/{self._total}] {line}", markup=False, highlight=False)

    def _left(self) -> str:
        if not self._times:
            return "no estimate yet"
        # The median: a run that waited for a busy machine says little of the others.
        seconds = statistics.median(self._times) * (self._total - self._done)
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"about {hours}:{minutes:02} h left"
