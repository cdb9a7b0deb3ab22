"""What a run leaves to read: metrics.jsonl, TensorBoard events, a line or a bar on the console."""

import json
import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
from etils import epath
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

from carope_jax._cli import write_whole

Row = dict[str, int | float | list[float] | None]
"""One row of metrics.jsonl: `step` (updates done) and numbers by name; lists have one a layer."""

VALIDATION = "validation_nll_"
"""A row's entry of a validation is this and the length: nats a token, null out of reach."""

FINGERPRINT = "_fingerprint"
"""A row's entry of what was computed from or with, as one exact number, ends so."""

WALL_CLOCK = frozenset({"tokens_per_second", "mfu"})
"""A row's entries that differ between two runs of the same."""


class Records:
    """Writes rows to metrics.jsonl and TensorBoard. Rows after `step` are dropped first.

    A run that goes on from a checkpoint repeats the steps after it, and their rows with them.
    """

    def __init__(self, folder: epath.Path, *, step: int, tensorboard: bool) -> None:
        self._folder = folder
        self._file = (folder / "metrics.jsonl").open("a")
        self._rewrite([row for row in read_metrics(folder) if row["step"] <= step])
        self._writer = (
            SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1) if tensorboard else None
        )

    def pop_unvalidated(self, step: int) -> Row | None:
        """Takes back the last row if it is this step's and its validation was cut short."""
        rows = read_metrics(self._folder)
        last = rows[-1] if rows else None
        if last is None or last["step"] != step or any(map(is_validation, last)):
            return None
        self._rewrite(rows[:-1])
        return last

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        path = self._folder / "metrics.jsonl"
        write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
        self._file.close()
        self._file = path.open("a")

    def write(self, row: Row) -> None:
        """Appends one row, on disk when this returns."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._writer is None:
            return
        for name, value in row.items():
            for tag, number in _scalars(name, value):
                self._writer.add_scalar(tag, number, row["step"])

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class NoRecords(Records):
    """Of a process that leaves writing to another."""

    def __init__(self) -> None:
        pass

    def pop_unvalidated(self, step: int) -> Row | None:
        """Nothing: process 0 knows."""
        return None

    def write(self, row: Row) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def read_metrics(folder: epath.Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl; a last line that a crash cut short is left out."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def is_validation(name: str) -> bool:
    """Whether a row's entry is a validation's."""
    return name.startswith(VALIDATION)


def to_row(step: int, metrics: Mapping[str, Any]) -> Row:
    """Arrays as plain numbers, and lists of one number a layer."""
    return {"step": step, **{name: np.asarray(m).tolist() for name, m in metrics.items()}}


def _scalars(name: str, value: Any) -> list[tuple[str, float]]:
    # A fingerprint is equal or not: a curve of it says nothing.
    if name == "step" or name.endswith(FINGERPRINT) or value is None:
        return []
    if isinstance(value, list):
        return [(f"{name}/layer_{layer}", number) for layer, number in enumerate(value)]
    return [(name, value)]


class ProgressLine:
    """Steps done, loss, tokens a second and time left: a bar on a terminal, else a line a row."""

    def __init__(self, console: Console, *, steps: int, done: int) -> None:
        self._console, self._steps = console, steps
        self._first, self._began = done, time.monotonic()
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=done)

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

    def update(self, step: int) -> None:
        """Moves the bar."""
        self._bar.update(self._task, completed=step)

    def row(self, row: Mapping[str, Any]) -> None:
        """Shows a logged row."""
        step, loss, rate = row["step"], row["loss"], row["tokens_per_second"]
        text = f"loss {loss:.4f}  {rate:,.0f} tok/s"
        for name, value in row.items():
            if is_validation(name) and value is not None:
                text += f"  val@{name.removeprefix(VALIDATION)} {value:.4f}"
        self._bar.update(self._task, description=text)
        if not self._console.is_terminal:
            done = step - self._first
            left = (time.monotonic() - self._began) / max(done, 1) * (self._steps - step)
            self._console.print(
                f"step {step}/{self._steps}  {text}  {_duration(left)} left", highlight=False
            )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
