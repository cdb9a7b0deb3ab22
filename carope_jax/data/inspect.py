"""What a prepared dataset holds, before money is spent on it.

    python -m carope_jax.data.inspect data/fwe
    python -m carope_jax.data.inspect data/fwe --length 512 --plot lengths.png --json fwe.json

Counts, lengths, duplicates, documents of train that validation has too, and windows of train as
text, with the borders of documents marked. Looking for duplicates reads every token once;
`--no-duplicates` reads the lengths and the samples alone.

Exit codes: 0 done, 2 bad input.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from carope_jax import _cli
from carope_jax.data._inspection import inspect_dataset
from carope_jax.data._inspection_report import check_plot, plot_lengths, print_inspection
from carope_jax.data._prepared import PreparedDataset


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Which dataset, and what to look at."""

    dataset: tyro.conf.Positional[str]
    """The folder that `prepare` wrote, local or gs://."""
    samples: int = 10
    """Windows of train to show as text."""
    length: int = 512
    """Tokens of a training window."""
    seed: int = 0
    """Of the choice of windows."""
    duplicates: bool = True
    """Read every token and look for documents with equal ones."""
    verify: bool = False
    """First compare every shard with its checksum."""
    plot: Path | None = None
    """Draw the lengths of the documents there (PNG)."""
    json: Path | None = None
    """Write all figures and the samples there."""

    def __post_init__(self) -> None:
        """Raises a ValueError that names the field and the value."""
        for name, least in (("samples", 0), ("length", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


def main(argv: Sequence[str]) -> None:
    """Reads the arguments, looks, prints, writes what was asked for."""
    with _cli.input_errors():
        arguments = tyro.cli(
            Arguments, prog="python -m carope_jax.data.inspect", description=__doc__, args=argv
        )
        if arguments.plot is not None:
            check_plot(arguments.plot)
        dataset = PreparedDataset.open(arguments.dataset)
        console = Console(soft_wrap=True, highlight=False, markup=False)
        if arguments.verify:
            with Console(stderr=True).status("comparing every shard with its checksum"):
                dataset.verify()
            console.print("verified: every shard holds the tokens that were written")
        with _progress(dataset) as advance:
            found = inspect_dataset(
                dataset,
                length=arguments.length,
                samples=arguments.samples,
                seed=arguments.seed,
                duplicates=arguments.duplicates,
                advance=advance,
            )
        print_inspection(found, console)
        if arguments.plot is not None:
            lengths = {name: dataset.split(name).lengths for name in dataset.index.splits}
            plot_lengths(lengths, arguments.length, arguments.plot)
            console.print(f"lengths: {arguments.plot}")
        _cli.write_json(arguments.json, found.to_json())


@contextlib.contextmanager
def _progress(dataset: PreparedDataset) -> Iterator[Callable[[int], None]]:
    """A bar of the tokens read, gone at the end."""
    tokens = sum(dataset.index.totals(split)["tokens"] for split in dataset.index.splits)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    console = Console(stderr=True)
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # in a log it would leave an empty line
    ) as progress:
        task = progress.add_task("reading tokens", total=tokens)
        yield lambda read: progress.advance(task, read)


if __name__ == "__main__":
    _cli.run(main)
