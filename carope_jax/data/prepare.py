r"""Prepares a dataset: text of any size into shards of token ids, once.

    python -m carope_jax.data.prepare --input 'shards/*.parquet' --text-column text \
        --tokenizer gpt2 --output data/fwe --workers 8
    python -m carope_jax.data.prepare --input kjv --tokenizer train:2048 --output data/kjv

Then `train.py --data.corpus data/fwe`, and `python -m carope_jax.data.inspect data/fwe` to see what
is in it. It may be stopped at any point and run again: finished shards are kept.

Exit codes: 0 done, 2 bad input, 75 stopped by a signal.
"""

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from carope_jax._cli import input_errors, run, write_json
from carope_jax._interrupt import InterruptFlag
from carope_jax.data._preparation import SKIPPED_FILE, Observer, Prepared, prepare
from carope_jax.data._preparation_config import PreparationConfig
from carope_jax.data._preparing import Calls

_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What to prepare, and where."""

    preparation: Annotated[PreparationConfig, tyro.conf.arg(name="")]
    json: Path | None = None
    """Write what was counted there."""


class _Bar:
    """A line that says how far it is, and how fast."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID | None = None
        self._began = time.monotonic()
        self._size = self._tokens = 0

    def stage(self, name: str, size: int | None) -> None:
        if self._task is not None:
            self.progress.remove_task(self._task)
        self._task = self.progress.add_task(name, total=size, rate="")
        self._began, self._size, self._tokens = time.monotonic(), 0, 0

    def report(self, size: int, tokens: int) -> None:
        assert self._task is not None
        self._size += size
        self._tokens += tokens
        seconds = max(time.monotonic() - self._began, 1e-3)
        rate = f"{self._size / 1e6:,.0f} MB, {self._size / seconds / 1e6:,.1f} MB/s"
        if self._tokens:
            rate += f", {self._tokens / seconds:,.0f} tokens/s"
        self.progress.update(self._task, completed=self._size, rate=rate)


def main(argv: Sequence[str]) -> None:
    """Reads the arguments, prepares, says what was counted."""
    with input_errors():
        arguments = tyro.cli(Arguments, description=__doc__, args=argv)
    if arguments.preparation.workers == 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one is one: else it uses every core
    console = Console(soft_wrap=True, highlight=False, markup=False)
    bar = _Bar(console)
    began = time.monotonic()
    with InterruptFlag() as flag, input_errors(), bar.progress:
        observer = Observer(Calls(flag.check, bar.report), bar.stage, console.print)
        prepared = prepare(arguments.preparation, observer)
    seconds = time.monotonic() - began
    _print(prepared, arguments.preparation, seconds, console)
    with input_errors():
        write_json(arguments.json, _facts(prepared, arguments.preparation, seconds))


def _facts(prepared: Prepared, config: PreparationConfig, seconds: float) -> dict[str, object]:
    index = prepared.index
    return {
        "output": config.output,
        "splits": {split: index.totals(split) for split in index.splits},
        "vocab_size": index.vocab_size,
        "tokenizer_hash": index.tokenizer_hash,
        "source_fingerprint": index.source_fingerprint,
        "skipped": index.skipped,
        "tokens_written": prepared.written,
        "seconds": seconds,
        "tokens_per_second": prepared.written / seconds,
    }


def _print(prepared: Prepared, config: PreparationConfig, seconds: float, console: Console) -> None:
    for split in prepared.index.splits:
        totals = prepared.index.totals(split)
        console.print(
            f"{split}: {totals['documents']:,} documents, {totals['tokens']:,} tokens, "
            f"{totals['bytes'] / 1e6:,.1f} MB"
        )
    if prepared.skipped:
        console.print(f"skipped: {prepared.index.skipped:,}, listed in {SKIPPED_FILE}")
        for error in prepared.skipped[:_SHOWN]:
            console.print(f"  {error}")
    if prepared.written:
        rate = prepared.written / seconds
        console.print(f"{seconds:,.1f} s, {rate:,.0f} tokens/s with {config.workers} worker(s)")
        console.print(f"done: {config.output}")
    else:
        console.print(f"nothing to do: {config.output} is prepared already")


if __name__ == "__main__":
    run(main)
