"""Trains a language model: `python train.py --config configs/quickstart.py --workdir runs/a`.

Run it again with the same `--workdir` and it goes on from the newest checkpoint; without `--config`
it takes the experiment saved there. Any field of the experiment is a flag, for instance
`--model.position carope --model.carope.init paper --optimizer.learning-rate 1e-3`.

Exit codes: 0 done, 2 bad input, 3 the loss is not finite, 74 a checkpoint can't be written, 75
stopped by a signal with all saved.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console

from carope_jax import command
from carope_jax.training import (
    DistributedConfig,
    Experiment,
    compile_for,
    is_first,
    make_plan,
    parse_target,
    print_facts,
    read_inputs,
    resolve,
    resolve_without_data,
    start_processes,
)
from carope_jax.training import train as run_training


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What to train, and where."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    config: Path | None = None
    """Python file that builds an `experiment`; not needed to go on with a run."""
    workdir: Path | None = None
    """The run's folder: made if missing, gone on with if there is a run in it."""
    dry_run: bool = False
    """Print every derived number (memory by compilation) and train nothing."""
    compile_for: str | None = None
    """Compile the update for a machine that isn't here (v5e:16x16, v5p:4x4x4, v6e:16x16, h200:8),
    print what it takes there, and train nothing. Needs no data; [tpu] or [gpu] installed."""
    price_per_chip_hour: float | None = None
    """What a chip costs an hour, for the cost of 10B tokens; with --compile-for."""
    stop_at: int | None = None
    """Stop and save after this many updates, as if interrupted; the schedule stays as it is."""
    distributed: DistributedConfig = DistributedConfig()
    """How the processes of a run on several hosts find one another."""
    profile_steps: str | None = None
    """FIRST:LAST: trace these updates into the run's `profile` folder, for TensorBoard or xprof."""
    json: Path | None = None
    """Write the derived numbers of --dry-run or --compile-for there."""


def main(argv: Sequence[str]) -> None:
    """Reads the arguments, checks all inputs, trains."""
    base = command.base_experiment(argv)
    with command.input_errors():
        arguments = tyro.cli(
            Arguments, description=__doc__, args=argv, default=Arguments(experiment=base)
        )
        profile = None
        if arguments.profile_steps is not None:
            profile = command.parse_range(arguments.profile_steps)
        if arguments.stop_at is not None and arguments.stop_at < 1:
            raise ValueError(f"stop_at must be at least 1, got {arguments.stop_at}")
        if (arguments.price_per_chip_hour or 0) < 0:
            raise ValueError(
                f"price_per_chip_hour must not be negative, got {arguments.price_per_chip_hour}"
            )
    if arguments.compile_for is not None:
        # The machine's own devices take no part, and a TPU would be locked.
        jax.config.update("jax_platforms", "cpu")
        with command.input_errors():
            facts = compile_for(
                resolve_without_data(arguments.experiment),
                parse_target(arguments.compile_for),
                price_per_chip_hour=arguments.price_per_chip_hour,
            )
        print_facts(facts, Console(soft_wrap=True))
        command.write_json(arguments.json, facts)
        return
    with command.input_errors():
        start_processes(arguments.distributed)
    console = Console(soft_wrap=True, quiet=not is_first())
    if arguments.dry_run:
        with command.input_errors():
            facts = make_plan(resolve(arguments.experiment)).facts()
        print_facts(facts, console)
        if is_first():
            command.write_json(arguments.json, facts)
        return
    with command.input_errors():
        if arguments.workdir is None:
            raise ValueError("give --workdir DIR, where the run is kept")
        inputs = read_inputs(arguments.experiment, arguments.workdir)
    run_training(inputs, console=console, stop_at=arguments.stop_at, profile_steps=profile)
    console.print(f"done: {arguments.workdir}", highlight=False)


if __name__ == "__main__":
    command.run(main)
