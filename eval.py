"""Perplexity of trained runs, at and beyond their training length.

    python eval.py --workdir runs/a --protocol paper --lengths 128 256 --json out.json
    python eval.py --workdir runs/a runs/b --protocol same_targets --lengths 128 256 512 1024

Needs only the run's folder (and the corpus it names, or another by `--corpus`). Several runs are
compared on the same targets, one column each. `ci95` is a bootstrap interval of nll in nats.

Exit codes: 0 done, 2 bad input, 75 stopped by a signal.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from carope_jax import command
from carope_jax.evaluation import (
    EvaluationConfig,
    comparison_markdown,
    comparison_table,
    plot_by_position,
)
from carope_jax.training import (
    DistributedConfig,
    MeshConfig,
    evaluate_runs,
    interrupt_flag,
    is_first,
    start_processes,
)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Which runs, and how to evaluate them."""

    workdir: tuple[Path, ...]
    """One run's folder, or several to compare."""
    evaluation: Annotated[EvaluationConfig, tyro.conf.arg(name="")]
    corpus: str | None = None
    """Evaluate on all documents of this corpus (a path, 'kjv') instead of the held-out ones."""
    tokens: int | None = None
    """Evaluate on about so many tokens, evenly from the documents' beginnings; all by default."""
    step: int | None = None
    """Which checkpoint; the newest by default."""
    mesh: MeshConfig = MeshConfig()
    """How the devices are laid out."""
    distributed: DistributedConfig = DistributedConfig()
    """How the processes find one another where there are several hosts."""
    json: Path | None = None
    """Write the results there: an object for one run, a list for several."""
    markdown: Path | None = None
    """Write the table there as Markdown."""
    plot: Path | None = None
    """Draw loss by position there (PNG); with `--protocol per_position`."""


def main(argv: Sequence[str]) -> None:
    """Reads the arguments, evaluates, prints the table, writes what was asked for."""
    with command.input_errors():
        arguments = tyro.cli(Arguments, description=__doc__, args=argv)
        if arguments.plot is not None and arguments.evaluation.protocol != "per_position":
            raise ValueError("--plot draws loss by position: add --protocol per_position")
        if not arguments.workdir:
            raise ValueError("--workdir needs at least one run's folder")
        names = [folder.name for folder in arguments.workdir]
        if len(set(names)) < len(names):
            raise ValueError(f"runs are told apart by their folders' names, got {names}")
    with command.input_errors():
        start_processes(arguments.distributed)
    console = Console(soft_wrap=True, quiet=not is_first())
    with interrupt_flag() as flag, command.input_errors():
        evaluations = evaluate_runs(
            arguments.workdir,
            arguments.evaluation,
            corpus=arguments.corpus,
            tokens=arguments.tokens,
            step=arguments.step,
            mesh=arguments.mesh,
            check=flag.check,
            console=console,
        )
    if not is_first():
        return
    results = {name: [found] for name, found in zip(names, evaluations, strict=True)}
    rows = [evaluation.to_json() for evaluation in evaluations]
    with command.input_errors():
        console.print(comparison_table(results))
        command.write_json(arguments.json, rows[0] if len(rows) == 1 else rows)
        if arguments.markdown is not None:
            arguments.markdown.write_text(comparison_markdown(results))
        if arguments.plot is not None:
            plot_by_position(results, arguments.plot)
            console.print(f"loss by position: {arguments.plot}", highlight=False)


if __name__ == "__main__":
    command.run(main)
