"""What `inspect` shows: tables and samples for a terminal, and a picture of the lengths."""

import os
from pathlib import Path

import numpy as np
from jaxtyping import Int32
from rich.console import Console
from rich.table import Table
from rich.text import Text

from carope_jax.data._inspection import count_lengths, log_edges
from carope_jax.data._inspection_results import Inspection, Repeated, Sample, SplitInspection

BORDER = "<|end|>"
_BAR = 18
_LINE = 88
# Of a document's text in a sample: what is kept of its two ends, near which the borders are.
_HEAD, _TAIL = 300, 200
# And of the documents of a window that has many.
_HEADS, _TAILS = 3, 2
# Okabe and Ito's blue and vermilion.
_COLOURS = {"train": "#0072B2", "validation": "#D55E00"}


def print_inspection(found: Inspection, console: Console) -> None:
    """Prints everything; whatever a document holds, no control character reaches the terminal."""
    _print_facts(found, console)
    console.print(_splits(found))
    console.print(_histogram(found))
    if found.packing is not None:
        packing = found.packing
        console.print(
            f"train packed into rows of {found.length:,}: {100 * packing.padding:.2f}% padding, "
            f"{packing.segments:,.1f} pieces a row, {100 * packing.cut:.2f}% of the documents cut"
        )
    for name, split in found.splits.items():
        if split.duplicates is not None:
            console.print(
                f"{visible(name)}: {_of(split.duplicates.copies, split.duplicates.share)} documents"
                " have the tokens of an earlier one"
            )
            _print_repeated(split.duplicates.most, console)
    if found.leak is not None:
        leak = found.leak
        style = "bold red" if leak.validation else ""
        console.print(
            f"leakage: {_of(leak.validation, leak.validation_share)} documents of validation also "
            f"stand in train, as {leak.train:,} documents there",
            style=style,
        )
        _print_repeated(leak.most, console)
    if found.reading is not None:
        reading = found.reading
        console.print(
            f"read {reading.tokens:,} tokens in {reading.seconds:.1f} s: "
            f"{reading.tokens_per_second:,.0f} tokens/s"
        )
    for sample in found.samples:
        _print_sample(sample, console)


def visible(text: str) -> str:
    r"""A text in which only printable characters and line breaks are themselves.

    Others, so the escapes that move a cursor, ring a bell or reverse the reading direction, are
    written as Python does: `\x1b`.
    """
    return "".join(
        char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text
    )


def check_plot(path: Path) -> None:
    """Raises FileNotFoundError or ValueError where no picture could be saved."""
    from matplotlib.backend_bases import FigureCanvasBase

    if not path.parent.is_dir():
        raise FileNotFoundError(f"plot {str(path)!r}: there is no folder {str(path.parent)!r}")
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise ValueError(f"plot {str(path)!r} must end in one of {sorted(kinds)}, .png say")


def plot_lengths(
    lengths: dict[str, Int32[np.ndarray, " D"]], length: int, path: str | os.PathLike[str]
) -> None:
    """Draws how documents, and tokens, spread over document lengths.

    Args:
        lengths: tokens of each document, by split; a split may be empty.
        length: tokens of a training window, marked.
        path: where to save, in the format of its suffix.

    Raises:
        ValueError: there is no document.
    """
    # matplotlib is slow to import and only pictures need it. A bare Figure draws with Agg, needs no
    # display, and leaves an importer's pyplot alone.
    from matplotlib.figure import Figure

    whole = np.concatenate(list(lengths.values()))
    if not len(whole):
        raise ValueError("lengths has no document: there is nothing to draw")
    edges = log_edges(int(whole.min()), int(whole.max()), per_octave=4)
    figure = Figure(figsize=(8.0, 5.6), dpi=200, layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for name, lengths_D in lengths.items():
        for axes, counts in zip(panels, count_lengths(lengths_D, edges), strict=True):
            share = 100 * counts / max(1, counts.sum())
            colour = _COLOURS.get(name, "#555555")
            axes.stairs(share, edges, color=colour, linewidth=1.8, label=name)
            axes.stairs(share, edges, color=colour, alpha=0.15, fill=True)
    for axes, of in zip(panels, ("documents", "tokens"), strict=True):
        axes.set_xscale("log", base=2)
        axes.axvline(length, color="#555555", linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_ylabel(f"% of the {of}", fontsize=11)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].annotate(
        f"window of {length:,}",
        (length, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
        color="#555555",
        fontsize=10,
    )
    panels[0].legend(frameon=False, fontsize=11)
    octaves = [2**octave for octave in range(32) if edges[0] <= 2**octave <= edges[-1]]
    panels[1].set_xticks(octaves, [f"{tokens:,}" for tokens in octaves], rotation=45)
    panels[1].minorticks_off()
    panels[1].set_xlabel("tokens of a document", fontsize=11)
    figure.savefig(path)


def _print_facts(found: Inspection, console: Console) -> None:
    for name, value in (
        ("dataset", f"{found.dataset} (version {found.version})"),
        ("tokenizer", f"{found.tokenizer}, {found.vocab_size:,} tokens, {found.tokenizer_hash}"),
        ("text column", found.text_column),
        ("source fingerprint", found.source_fingerprint),
        ("skipped", f"{found.skipped:,} rows and files that could not be read"),
        ("validation", found.validation),
    ):
        console.print(f"{name:20}{_one_line(value)}")


def _splits(found: Inspection) -> Table:
    table = Table(title=f"Splits, for windows of {found.length:,} tokens", title_justify="left")
    table.add_column("")
    for name in found.splits:
        table.add_column(visible(name), justify="right")
    splits = list(found.splits.values())
    for field in ("documents", "tokens", "bytes", "shards", "windows"):
        table.add_row(field, *(f"{getattr(split, field):,}" for split in splits))
    for field in ("shortest", "median", "mean", "p90", "longest"):
        label = {"p90": "90% have at most"}.get(field, field)
        table.add_row(f"tokens a document: {label}", *(_length(split, field) for split in splits))
    for number, at_least in enumerate(share.at_least for share in _longest_list(splits)):
        cells = [
            f"{100 * split.long[number].documents:.2f}% ({100 * split.long[number].tokens:.2f}%)"
            if split.long
            else "-"
            for split in splits
        ]
        table.add_row(f"documents (tokens) of {at_least:,} or more", *cells)
    return table


def _longest_list(splits: list[SplitInspection]) -> tuple:
    return max((split.long for split in splits), key=len, default=())


def _length(split: SplitInspection, field: str) -> str:
    if split.lengths is None:
        return "-"
    value = getattr(split.lengths, field)
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _histogram(found: Inspection) -> Table:
    table = Table(title="Documents by length", title_justify="left", box=None, pad_edge=False)
    table.add_column("tokens", justify="right", no_wrap=True)
    shares: dict[str, dict[int, tuple[int, float]]] = {}
    for name, split in found.splits.items():
        if split.histogram is not None:
            table.add_column(visible(name), width=_BAR, no_wrap=True)
            table.add_column("", justify="right", no_wrap=True)
            shares[name] = {
                edge: (documents, documents / split.documents)
                for edge, documents in zip(
                    split.histogram.edges[:-1], split.histogram.documents, strict=True
                )
            }
    edges = sorted({edge for bins in shares.values() for edge in bins})
    most = max((share for bins in shares.values() for _, share in bins.values()), default=1.0)
    for edge in edges:
        cells: list[str | Text] = []
        for bins in shares.values():
            documents, share = bins.get(edge, (0, 0.0))
            # Nothing that is there is shown as nothing.
            bar = "█" * round(_BAR * share / most) or ("▏" if documents else "")
            cells += [Text(bar, style="blue"), f"{documents:,}"]
        table.add_row(f"{edge:,} - {2 * edge - 1:,}", *cells)
    return table


def _of(count: int, share: float) -> str:
    return f"{count:,} ({100 * share:.2f}%)"


def _print_repeated(most: tuple[Repeated, ...], console: Console) -> None:
    for one in most:
        beginning = _one_line(one.beginning)
        shown = beginning[:_LINE] + ("…" if len(beginning) > _LINE else "")
        console.print(Text(f"  {one.documents:,} x, first is {one.first:,}: {shown}"))


def _print_sample(sample: Sample, console: Console) -> None:
    console.print(
        f"\nwindow {sample.window:,}: {sample.tokens:,} tokens, "
        f"{len(sample.texts) - 1:,} document ends",
        style="bold",
    )
    texts = list(enumerate(sample.texts))
    left_out = len(texts) - _HEADS - _TAILS
    if left_out > 1:
        texts = texts[:_HEADS] + texts[-_TAILS:]
    for place, (number, text) in enumerate(texts):
        if number:
            console.print(BORDER, style="bold magenta")
        if left_out > 1 and place == _HEADS:
            console.print(f"… {left_out:,} documents …", style="dim")
            console.print(BORDER, style="bold magenta")
        for line in visible(_shortened(text)).split("\n"):
            # The bar tells text that spells a border from a border.
            for part in Text(line).wrap(console, console.width - 2):
                console.print(Text.assemble(("│ ", "dim"), part))


def _one_line(text: str) -> str:
    return visible(text).replace("\n", "\\n")


def _shortened(text: str) -> str:
    left_out = len(text) - _HEAD - _TAIL
    if left_out < _LINE:
        return text
    return f"{text[:_HEAD]} […{left_out:,} characters…] {text[-_TAIL:]}"
