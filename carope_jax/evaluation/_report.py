"""Perplexity by evaluation length and encoding: one set of cells, two renderers."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from carope_jax.evaluation._results import Evaluation, LengthResult

Runs = Mapping[str, Sequence[Evaluation]]
"""Evaluations by encoding; several of one encoding are runs of it (say, training seeds)."""

_NO_NUMBER = "-"


@dataclass(frozen=True)
class _Cells:
    title: str
    header: list[str]
    rows: list[list[str]]
    caption: list[str]


def comparison_table(results: Runs) -> Table:
    """Perplexities, a row an evaluation length, a column an encoding.

    A `-` is a length the encoding cannot reach. Several runs of an encoding are given as mean ±
    standard deviation of their perplexities.

    Args:
        results: one protocol's evaluations, by the name an encoding's column should have.

    Raises:
        ValueError: nothing to show, or the evaluations can't share a table: another protocol,
            training length or window, or other targets.
    """
    cells = _cells(results)
    table = Table(
        title=cells.title, caption="\n".join(cells.caption), caption_justify="left", box=box.SIMPLE
    )
    for column, name in enumerate(cells.header):
        table.add_column(name, justify="left" if column == 0 else "right")
    for row in cells.rows:
        table.add_row(*row)
    return table


def comparison_markdown(results: Runs) -> str:
    """The same table in Markdown, the caption below it.

    Args:
        results: as for `comparison_table`.

    Raises:
        ValueError: as for `comparison_table`.
    """
    cells = _cells(results)
    lines = [f"**{cells.title}**", ""]
    lines.append(_markdown_row(cells.header))
    lines.append(_markdown_row(["---", *["---:"] * (len(cells.header) - 1)]))
    lines.extend(_markdown_row(row) for row in cells.rows)
    # Two trailing spaces would be the other way to break a line, but editors strip them.
    lines.extend(["", "\\\n".join(cells.caption)])
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cells(results: Runs) -> _Cells:
    for name, runs in results.items():
        if not runs:
            raise ValueError(
                f"results[{name!r}] is empty: an encoding needs at least one evaluation"
            )
    everything = [run for runs in results.values() for run in runs]
    if not everything:
        raise ValueError("results is empty: there is nothing to compare")
    for attribute in ("protocol", "train_length", "window", "targets_hash"):
        values = list(dict.fromkeys(getattr(run, attribute) for run in everything))
        if len(values) > 1:
            raise ValueError(f"evaluations of different {attribute} can't share a table: {values}")
    lengths = sorted({result.length for run in everything for result in run.results})
    first = everything[0]
    by_length = {length: _at_length(results, length) for length in lengths}
    return _Cells(
        title=f"Perplexity by evaluation length ({first.protocol})",
        header=["length", *results],
        rows=[
            [f"{length:,} ({length / first.train_length:g}x)", *map(_cell, by_length[length])]
            for length in lengths
        ],
        caption=_caption(results, by_length),
    )


def _at_length(results: Runs, length: int) -> list[list[LengthResult]]:
    """Each encoding's results at one length, over the same targets."""
    found: list[list[LengthResult]] = []
    for name, runs in results.items():
        at = [result for run in runs for result in run.results if result.length == length]
        if len(at) < len(runs):
            raise ValueError(
                f"results[{name!r}] lacks length {length} in {len(runs) - len(at)} of "
                f"{len(runs)} evaluations"
            )
        found.append(at)
    sizes = {(r.tokens, r.documents) for at in found for r in at if r.nll is not None}
    if len(sizes) > 1:
        raise ValueError(
            f"evaluations at length {length} are over different targets: (tokens, documents) are "
            f"{sorted(sizes)}"
        )
    return found


def _cell(at: list[LengthResult]) -> str:
    values = [result.ppl for result in at if result.ppl is not None]
    if len(values) < len(at):
        return _NO_NUMBER
    if len(values) == 1:
        return f"{values[0]:,.2f}"
    return f"{statistics.fmean(values):,.2f} ± {statistics.stdev(values):,.2f}"


def _caption(results: Runs, by_length: Mapping[int, list[list[LengthResult]]]) -> list[str]:
    first = next(iter(results.values()))[0]
    scored = [r for found in by_length.values() for at in found for r in at if r.nll is not None]
    by_encoding = {name: _span([run.params for run in runs]) for name, runs in results.items()}
    params = ", ".join(f"{name} {count}" for name, count in by_encoding.items())
    if len(set(by_encoding.values())) == 1:
        params = f"{next(iter(by_encoding.values()))} each"
    lines = [
        f"Trained at {first.train_length:,} tokens. Evaluated over {first.window}.",
        f"Documents: {_span([r.documents for r in scored])}. "
        f"Tokens scored at a length: {_span([r.tokens for r in scored])}.",
        f"Parameters: {params}.",
    ]
    counts = [len(runs) for runs in results.values()]
    if max(counts) > 1:
        lines.append(f"Mean ± standard deviation over runs ({_span(counts)} an encoding).")
    return lines


def _span(values: Sequence[int]) -> str:
    if not values:
        return _NO_NUMBER
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
