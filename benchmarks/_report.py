"""What every benchmark reports: rows for a machine, a table for a reader."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from carope_jax import command


class Row(NamedTuple):
    """One figure.

    Attributes:
      name: what it is of, from the general to the special, the parts joined by "/".
      value: the figure.
      unit: of the value, "1" for a ratio.
    """

    name: str
    value: float
    unit: str


def make_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[Any]]) -> Table:
    """A table whose first column says what a line is of; the others are right-justified figures."""
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for line in lines:
        table.add_row(*map(str, line))
    return table


def report(rows: Sequence[Row], tables: Sequence[Table], json: Path | None) -> None:
    """Prints the tables, and writes the rows where `--json` says.

    Raises:
      InputError: the file can't be written.
    """
    console = Console(soft_wrap=True, highlight=False)
    for table in tables:
        console.print(table)
    with command.input_errors():
        command.write_json(json, [row._asdict() for row in rows])
