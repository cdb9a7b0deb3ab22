"""A run before it trains: everything derived from the experiment, compiled and measured."""

import dataclasses
from typing import Any, NamedTuple

import jax
import optax
from rich.console import Console
from rich.table import Table

from carope_jax.models import Sharding, choose_attention
from carope_jax.training._config import Experiment
from carope_jax.training._flops import flops_per_token
from carope_jax.training._mesh import make_mesh
from carope_jax.training._optimizer import make_optimizer, make_schedule
from carope_jax.training._state import (
    Model,
    TrainState,
    abstract_model,
    abstract_state,
    batch_shapes,
)
from carope_jax.training._step import compile_step, make_train_step


class Layout(NamedTuple):
    """Where an experiment's arrays will live; nothing compiled."""

    model: Model
    optimizer: optax.GradientTransformation
    state: TrainState
    """Shapes and shardings."""
    batch: dict[str, jax.ShapeDtypeStruct]
    """The same."""
    attention: str
    """The implementation that the model's choice means here."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """An experiment made ready on a mesh: its layout, and the compiled update."""

    experiment: Experiment
    layout: Layout
    step: jax.stages.Compiled
    """(state, batch) -> (state, metrics); a drifting shape raises."""

    @property
    def model(self) -> Model:
        """The decoder without its arrays."""
        return self.layout.model

    @property
    def memory(self) -> int | None:
        """Bytes a device needs for the update; None where the compiler doesn't say."""
        return memory_per_device(self.step)

    def facts(self, *, training_tokens: int | None = None) -> dict[str, Any]:
        """Every derived number, by name: what a dry run prints and `--json` writes.

        Args:
          training_tokens: tokens of the training stream, for the number of epochs.
        """
        experiment = self.experiment
        tokens = experiment.tokens_per_update * experiment.training.steps
        mesh = self.model.sharding.mesh
        facts: dict[str, Any] = {
            "experiment": experiment.name,
            "position": experiment.model.position,
            "parameters": self.model.parameters,
            "training_length": experiment.data.length,
            "tokens_per_update": experiment.tokens_per_update,
            "micro_batches": experiment.training.micro_batches,
            "steps": experiment.training.steps,
            "tokens": tokens,
            "flops_per_token": flops_per_token(experiment.model, experiment.data.length),
            "devices": 1 if mesh is None else mesh.size,
            "mesh": {} if mesh is None else dict(mesh.shape),
            "attention": self.layout.attention,
            "device_kind": (jax.devices() if mesh is None else mesh.devices.flat)[0].device_kind,
            "memory_per_device": self.memory,
        }
        if training_tokens is not None:
            facts["epochs"] = tokens / training_tokens
        return facts


def ways_of_batch(experiment: Experiment, devices: list[jax.Device] | None = None) -> int:
    """Over how many devices an experiment's batch is split.

    Raises:
      ValueError: the mesh does not cover the devices.
    """
    return Sharding(make_mesh(experiment.mesh, devices)).ways("batch")


def lay_out(experiment: Experiment, devices: list[jax.Device] | None = None) -> Layout:
    """Places a resolved experiment's arrays on its mesh; compiles nothing.

    Args:
      experiment: resolved.
      devices: those of the mesh; None: all there are.

    Raises:
      ValueError: the mesh does not cover the devices, a size does not divide over it, or the
        attention asked for can't do it.
    """
    model = abstract_model(experiment.model, make_mesh(experiment.mesh, devices))
    optimizer = make_optimizer(experiment.optimizer, experiment.training.steps)
    state = abstract_state(model, optimizer)
    micro_batches = experiment.training.micro_batches
    data = experiment.data
    batch = batch_shapes(model, data.batch_size, data.length, data.rows)
    ways = model.sharding.ways("batch") * micro_batches
    if data.batch_size % ways:
        raise ValueError(
            f"batch_size {data.batch_size} does not divide into {micro_batches} "
            f"micro_batches over {model.sharding.ways('batch')} devices"
        )
    attention = choose_attention(experiment.model, model.sharding, data.length)
    return Layout(model, optimizer, state, batch, attention)


def make_plan(experiment: Experiment, devices: list[jax.Device] | None = None) -> Plan:
    """Lays out and compiles a resolved experiment; computes nothing.

    Args:
      experiment: resolved.
      devices: those of the mesh; None: all there are.

    Raises:
      ValueError: as `lay_out` does.
    """
    layout = lay_out(experiment, devices)
    step = make_train_step(
        layout.model,
        layout.optimizer,
        make_schedule(experiment.optimizer, experiment.training.steps),
        experiment.training.micro_batches,
    )
    compiled = compile_step(step, layout.model, layout.state, layout.batch)
    return Plan(experiment, layout, compiled)


def memory_per_device(compiled: jax.stages.Compiled) -> int | None:
    """Bytes a device needs for the program's arguments, outputs and temporaries, as the compiler
    says; None where it doesn't."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


def print_facts(facts: dict[str, Any], console: Console) -> None:
    """The facts as a table, large numbers also in round figures."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), _readable(name, value))
    console.print(table)


def _readable(name: str, value: Any) -> str:
    if name == "collectives":
        return _collectives(value)
    if isinstance(value, dict):
        return " x ".join(f"{axis} {size}" for axis, size in value.items())
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in ("memory_per_device", "hbm", "hbm_needed"):
        return f"{value / 2**30:.2f} GiB ({'data sheet' if name == 'hbm' else 'by compilation'})"
    if "seconds" in name:
        return f"{value:.4g} s"
    if name == "epochs" or name.startswith("cost_"):
        return f"{value:,.2f}"
    if isinstance(value, int | float) and value >= 1e6:
        unit, size = next((u, s) for u, s in (("T", 1e12), ("G", 1e9), ("M", 1e6)) if value >= s)
        return f"{value:,.0f} ({value / size:.1f}{unit})"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _collectives(value: dict[str, Any]) -> str:
    parts = (f"{kind} {c['count']} of {c['bytes'] / 2**20:,.1f} MiB" for kind, c in value.items())
    return ", ".join(parts) or "none"
