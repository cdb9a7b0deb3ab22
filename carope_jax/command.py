"""What the command lines share: experiments from files and flags, clear errors, exit codes.

Exit codes: 0 done, 2 bad input (one message, no traceback), 3 the loss is not finite, 74 a
checkpoint can't be written, 75 stopped
by a signal with everything saved (run the same command again).
"""

import argparse
import re
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from carope_jax import _cli
from carope_jax._cli import BAD_INPUT, STOPPED, InputError, input_errors, write_json
from carope_jax.training import (
    CheckpointCorrupt,
    CheckpointMismatch,
    Experiment,
    FailedElsewhere,
    FolderInUse,
    RunFolder,
    SaveFailed,
    unknown_field,
)

__all__ = [
    "BAD_INPUT",
    "NOT_FINITE",
    "NOT_SAVED",
    "STOPPED",
    "InputError",
    "base_experiment",
    "input_errors",
    "load_config",
    "parse_range",
    "run",
    "write_json",
]

NOT_FINITE, NOT_SAVED = 3, 74

_ENDINGS = {
    CheckpointMismatch: _cli.Ending(BAD_INPUT),
    FailedElsewhere: _cli.Ending(BAD_INPUT),
    FolderInUse: _cli.Ending(BAD_INPUT),
    SaveFailed: _cli.Ending(NOT_SAVED),
    CheckpointCorrupt: _cli.Ending(BAD_INPUT),
    FloatingPointError: _cli.Ending(NOT_FINITE),
}


def run(
    command: Callable[[Sequence[str]], None], arguments: Sequence[str] | None = None
) -> NoReturn:
    """Runs a command to its exit code."""
    _cli.run(command, arguments, _ENDINGS)


def base_experiment(arguments: Sequence[str]) -> Experiment:
    """The experiment that flags override: of `--config`, else of the run in `--workdir`.

    Raises:
      InputError: neither is given or there, or the file does not build an experiment.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--workdir", type=Path)
    try:
        known, _ = parser.parse_known_args(list(arguments))
    except SystemExit:
        raise InputError("--config and --workdir each take a path") from None
    with input_errors():
        if known.config is not None:
            return load_config(known.config)
        if known.workdir is None:
            if {"-h", "--help"} & set(arguments):
                return Experiment()
            raise ValueError(
                "give --config FILE to begin a run, or --workdir DIR to go on with one"
            )
        return RunFolder(known.workdir).experiment()


def load_config(path: Path) -> Experiment:
    """The `experiment` that a Python file builds.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it does not build an experiment; an unknown field is named with the nearest one.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no config file {path}")
    try:
        experiment = runpy.run_path(str(path)).get("experiment")
    except TypeError as error:
        raise ValueError(f"{path}: {_with_nearest(str(error))}") from error
    except (ValueError, SyntaxError, NameError, ImportError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(experiment, Experiment):
        raise ValueError(f"{path} must define `experiment = Experiment(...)`")
    return experiment


def _with_nearest(message: str) -> str:
    """A TypeError's message about a keyword, with the nearest field there is."""
    found = re.search(r"unexpected keyword argument '(\w+)'", message)
    return unknown_field(found[1]) if found else message


def parse_range(text: str) -> tuple[int, int]:
    """`A:B` as two positive ascending numbers.

    Raises:
      ValueError: it is not that.
    """
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"expected FIRST:LAST, two ascending numbers from 1, got {text!r}")
    return int(found[1]), int(found[2])
