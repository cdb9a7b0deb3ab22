"""The picture of `per_position`: nll by position, a line a run, a colour an encoding."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from carope_jax.evaluation._report import Runs
from carope_jax.evaluation._results import Evaluation, PositionBin

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette without its yellow, which white paper swallows. The line style changes
# once all colours are taken.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", ":")
_GREY = "#555555"

_OCTAVES_OF_TRAINING = 3
"""The picture begins this many halvings before the training length: nothing is in doubt earlier."""


def plot_by_position(results: Runs, path: str | Path) -> None:
    """Draws nll by position with its 95% bands and saves it in the format of the path's suffix.

    A curve ends where its model cannot read further.

    Args:
        results: evaluations of `per_position`, by the name each encoding should have.
        path: where to save; its folder must exist.

    Raises:
        ValueError: nothing to show, an evaluation has no curve, or training lengths differ.
        FileNotFoundError: the folder doesn't exist.
    """
    # matplotlib is slow to import and only pictures need it. A bare Figure draws with Agg, needs no
    # display, and leaves an importer's pyplot alone.
    from matplotlib.figure import Figure

    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path={str(path)!r}: there is no folder {str(path.parent)!r}")
    train_length = _train_length(results)
    figure = Figure(figsize=(8.0, 4.2), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    longest = max(run.curve[-1].end for runs in results.values() for run in runs)
    looks = itertools.cycle(itertools.product(_STYLES, _COLOURS))
    left = min(train_length, longest) / 2**_OCTAVES_OF_TRAINING
    right = max(train_length, longest) * 1.02
    for (name, runs), (style, colour) in zip(results.items(), looks, strict=False):
        for number, run in enumerate(runs):
            _draw(axes, run, left, name if number == 0 else None, style, colour)
            if run.curve[-1].end < longest:
                axes.plot(*_end(run), "o", color=colour, markersize=6, zorder=3)
    _dress(axes, train_length, left, right)
    # Names in the order the lines have at the right edge, so that the eye can go straight across.
    handles, names = axes.get_legend_handles_labels()
    last = {name: runs[0].curve[-1] for name, runs in results.items()}
    order = sorted(range(len(names)), key=lambda i: _rank(last[names[i]]), reverse=True)
    figure.legend(
        [handles[i] for i in order],
        [_legend_name(names[i], last[names[i]].end, longest) for i in order],
        loc="outside right upper",
        frameon=False,
        fontsize=11,
    )
    figure.savefig(path)


def _train_length(results: Runs) -> int:
    runs = [(name, run) for name, runs in results.items() for run in runs]
    if not runs or not all(results.values()):
        raise ValueError("results needs an evaluation for each encoding: there is nothing to draw")
    for name, run in runs:
        if not run.curve:
            raise ValueError(
                f"results[{name!r}] has no curve: it is of protocol {run.protocol!r}, "
                "or the model reaches none of its lengths"
            )
    lengths = sorted({run.train_length for _, run in runs})
    if len(lengths) > 1:
        raise ValueError(f"evaluations of different train_length can't share a picture: {lengths}")
    return lengths[0]


def _draw(
    axes: "Axes", run: Evaluation, left: float, label: str | None, style: str, colour: str
) -> None:
    bins = [piece for piece in run.curve if piece.end > left]
    centres = np.array([(piece.start + piece.end) / 2 for piece in bins])
    axes.plot(
        centres,
        [piece.nll for piece in bins],
        style,
        color=colour,
        label=label,
        linewidth=1.8,
        solid_capstyle="butt",
    )
    bounds = np.array([piece.ci95 for piece in bins], np.float64)
    axes.fill_between(centres, bounds[:, 0], bounds[:, 1], color=colour, alpha=0.2, linewidth=0)


def _end(run: Evaluation) -> tuple[float, float]:
    """Where a run's line ends: centre and nll of its last bin."""
    last = run.curve[-1]
    return (last.start + last.end) / 2, last.nll


def _rank(last: PositionBin) -> tuple[int, float]:
    return last.end, last.nll


def _legend_name(name: str, end: int, longest: int) -> str:
    return name if end == longest else f"{name}\n(ends at {end:,})"


def _dress(axes: "Axes", train_length: int, left: float, right: float) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(left, right)
    ticks = {octave: train_length * 2.0**octave for octave in range(-_OCTAVES_OF_TRAINING, 64)}
    shown = {o: at for o, at in ticks.items() if at.is_integer() and at <= right}
    axes.set_xticks(list(shown.values()), [f"{at:,.0f}\n{_multiple(o)}" for o, at in shown.items()])
    axes.minorticks_off()
    axes.axvline(train_length, color=_GREY, linewidth=1.2, linestyle=(0, (4, 3)), zorder=0)
    axes.annotate(
        f"trained at {train_length:,}",
        (train_length, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
        color=_GREY,
        fontsize=10,
    )
    axes.set_xlabel("position (tokens, and in training lengths)", fontsize=11)
    axes.set_ylabel("nll (nats a token)", fontsize=11)
    axes.tick_params(labelsize=10)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _multiple(octave: int) -> str:
    return f"{2**octave}x" if octave >= 0 else f"1/{2**-octave}x"
