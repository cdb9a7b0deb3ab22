"""Whether two runs computed the same: the first step at which they differ, and in what.

    python -m carope_jax.training.compare runs/a runs/b

Every number is compared exactly, but for those of the clock. At one seed, on one kind of machine
and one mesh, two runs are equal to the last bit; on another mesh losses differ by rounding, and
batches do not.

Exit codes: 0 equal, 1 they differ, 2 bad input.
"""

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from carope_jax import command
from carope_jax.training._compare import Comparison, Difference, compare_runs

_DIFFER = 1
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Two runs."""

    run_a: Annotated[Path, tyro.conf.Positional]
    """One run's folder."""
    run_b: Annotated[Path, tyro.conf.Positional]
    """The other's."""
    json: Path | None = None
    """Write the comparison there."""


def main(argv: Sequence[str]) -> None:
    """Reads the arguments, compares, says what differs."""
    with command.input_errors():
        arguments = tyro.cli(
            Arguments, prog="python -m carope_jax.training.compare", description=__doc__, args=argv
        )
        found = compare_runs(arguments.run_a, arguments.run_b)
        command.write_json(arguments.json, found.to_json())
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for line in _lines(found):
        console.print(line)
    if not found.equal:
        sys.exit(_DIFFER)


def _lines(found: Comparison) -> Iterable[str]:
    yield from (f"differs: {_text(difference)}" for difference in found.inputs)
    yield from (f"aside: {_text(difference)}" for difference in found.aside)
    compared = f"{found.rows} rows and {len(found.checkpoints)} checkpoints in both"
    if found.last_steps[0] != found.last_steps[1]:
        compared += f" (rows to step {found.last_steps[0]} and {found.last_steps[1]})"
    if found.first_step is None:
        yield f"no step differs: {compared}"
        return
    yield f"first difference at step {found.first_step}, of {compared}:"
    yield from (f"  {_text(difference)}" for difference in found.differences[:_SHOWN])
    if len(found.differences) > _SHOWN:
        yield f"  and {len(found.differences) - _SHOWN} more"


def _text(difference: Difference) -> str:
    return f"{difference.what}: {_value(difference.a)} | {_value(difference.b)}"


def _value(value: Any) -> str:
    return "absent" if value is None else str(value)


if __name__ == "__main__":
    command.run(main)
