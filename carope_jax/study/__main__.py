"""Many runs from one file, and one report.

    python -m carope_jax.study run configs/studies/extrapolation.py --workdir runs/study

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


_COMMANDS = {"run": run}


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
