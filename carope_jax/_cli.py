"""What every command line rests on, below all packages: bad input, exit codes, whole files."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import dacite
from etils import epath
from rich.console import Console

from carope_jax._interrupt import Interrupted

BAD_INPUT, STOPPED = 2, 75


class InputError(Exception):
    """Something the user gave is wrong; the message is all there is to say."""


class Ending(NamedTuple):
    """How a command ends on an exception.

    Attributes:
        code: the exit code.
        message: what is said, with `{error}` where the exception's own message goes.
    """

    code: int
    message: str = "error: {error}"


_ENDINGS = {
    InputError: Ending(BAD_INPUT),
    Interrupted: Ending(
        STOPPED, "stopped by {error}: everything is saved, run the same command to go on"
    ),
}


@contextlib.contextmanager
def input_errors() -> Iterator[None]:
    """Marks what is raised about the user's input as such. Not for code that computes."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError, dacite.DaciteError) as error:
        raise InputError(str(error)) from error


def run(
    command: Callable[[Sequence[str]], None],
    arguments: Sequence[str] | None = None,
    endings: Mapping[type[Exception], Ending] | None = None,
) -> NoReturn:
    """Runs a command to its exit code: 0 done, 2 bad input (one message, no traceback), 75 stopped
    by a signal.

    Args:
        command: takes the arguments.
        arguments: the process's own by default.
        endings: exceptions besides these two that end the command without a traceback.
    """
    endings = {**_ENDINGS, **(endings or {})}
    try:
        command(sys.argv[1:] if arguments is None else arguments)
    except tuple(endings) as error:
        ending = next(ending for kind, ending in endings.items() if isinstance(error, kind))
        console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        console.print(ending.message.format(error=error))
        sys.exit(ending.code)
    sys.exit(0)


def write_whole(path: Path | epath.Path, text: str) -> None:
    """Writes a file under another name first: a crash leaves what was there before."""
    path = epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text)
    fresh.replace(path)


def write_json(path: Path | None, value: Any) -> None:
    """Writes JSON (the output of `--json FILE`), whole or not at all."""
    if path is None:
        return
    write_whole(path, json.dumps(value, indent=2) + "\n")
