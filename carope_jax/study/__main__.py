"""Many runs from one file, and one report.

    python -m carope_jax.study run configs/studies/extrapolation.py --workdir runs/study
    python -m carope_jax.study report runs/study
    python -m carope_jax.study cost configs/gpt2_small.py configs/gpt2_tiny.py --mfu 0.4

Finished runs are skipped, a run that was stopped goes on from its checkpoint. Exit codes: 0 done, 2
bad input, 3 a run's loss was not finite (the others are done), 75 stopped by a signal.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console

from carope_jax import command
from carope_jax.study._config import load_study
from carope_jax.study._cost import cost_lines
from carope_jax.study._report import write_report
from carope_jax.study._results import Results
from carope_jax.study._run import run_study
from carope_jax.study._work import TrainingWorker


@dataclasses.dataclass(frozen=True)
class RunArguments:
    """What to run, and where."""

    study: tyro.conf.Positional[Path]
    """Python file that builds a `study`."""
    workdir: Path
    """Where results and unfinished runs are kept; made if missing."""
    only: str | None = None
    """Only arms whose names match this shell pattern (several with commas between)."""
    keep: bool = False
    """Keep the finished runs' folders, with their checkpoints."""
    results: Path | None = None
    """A folder of results to start from: what is there is not run again."""


def run(argv: Sequence[str]) -> None:
    """Trains and evaluates every arm and seed that is not finished."""
    with command.input_errors():
        arguments = tyro.cli(
            RunArguments, prog="python -m carope_jax.study run", description=__doc__, args=argv
        )
        study = load_study(arguments.study)
    console = Console(soft_wrap=True)
    # Where it ran is nobody's business but the user's: the command is what makes it again.
    again = f"python -m carope_jax.study run {arguments.study}"
    try:
        counts = run_study(
            study,
            arguments.workdir,
            TrainingWorker(),
            console=console,
            command=again + (f" --only {arguments.only}" if arguments.only else ""),
            only=arguments.only,
            keep=arguments.keep,
            seeded=arguments.results,
        )
    except (ValueError, OSError) as error:
        raise command.InputError(str(error)) from error
    for line in counts.waiting:
        console.print(f"not run: {line}", markup=False, highlight=False)
    if counts.failed:
        raise FloatingPointError(
            "these runs failed, the others are done:\n  " + "\n  ".join(counts.failed)
        )
    console.print(f"{counts.done} runs are done: {arguments.workdir / 'results'}", highlight=False)


@dataclasses.dataclass(frozen=True)
class ReportArguments:
    """Of which results, and where to."""

    folder: tyro.conf.Positional[Path]
    """A study's workdir, or a folder of results."""
    study: Path | None = None
    """Python file that builds the `study`; configs/studies/NAME.py by default."""
    output: Path | None = None
    """Folder to write into; `report` in the folder of the results by default."""


def report(argv: Sequence[str]) -> None:
    """Rebuilds every table and picture from the results that are there."""
    with command.input_errors():
        arguments = tyro.cli(ReportArguments, prog="python -m carope_jax.study report", args=argv)
        inner = arguments.folder / "results"
        results = Results(inner if inner.is_dir() else arguments.folder)
        if not len(results):
            raise FileNotFoundError(f"no results in {arguments.folder}")
        name = next(iter(results))[1]["study"]
        study = load_study(arguments.study or Path("configs") / "studies" / f"{name}.py")
        written = write_report(study, results, arguments.output or arguments.folder / "report")
    console = Console(soft_wrap=True)
    console.print(written.markdown, markup=False, highlight=False)
    for path in written.files:
        console.print(f"written: {path}", highlight=False)


@dataclasses.dataclass(frozen=True)
class CostArguments:
    """Of which experiments, and under which assumption."""

    config: tyro.conf.Positional[tuple[Path, ...]]
    """Files that build an `experiment`."""
    mfu: float = 0.4
    """Share of a chip's peak that training is assumed to reach. Assumed, not measured."""
    chips: tuple[str, ...] = ("TPU v5e", "TPU v6e", "NVIDIA H100 80GB HBM3")
    """Chips by JAX's `device_kind`."""


def cost(argv: Sequence[str]) -> None:
    """Prints what full-size runs are expected to take, in hours of one chip."""
    with command.input_errors():
        arguments = tyro.cli(CostArguments, prog="python -m carope_jax.study cost", args=argv)
        if not arguments.config:
            raise ValueError("give at least one config file")
        lines = [
            line
            for path in arguments.config
            for line in cost_lines(command.load_config(path), arguments.mfu, arguments.chips)
        ]
    console = Console(soft_wrap=True)
    for line in lines:
        console.print(line, highlight=False, markup=False)


_COMMANDS = {"run": run, "report": report, "cost": cost}


def main(argv: Sequence[str]) -> None:
    """Calls the command that the first argument names."""
    if argv and argv[0] in _COMMANDS:
        _COMMANDS[argv[0]](argv[1:])
        return
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: python -m carope_jax.study {{{','.join(_COMMANDS)}}} ...\n\n{__doc__}")
        return
    raise command.InputError(
        f"say which of {', '.join(_COMMANDS)}, got {' '.join(argv[:1]) or 'nothing'}"
    )


if __name__ == "__main__":
    command.run(main)
