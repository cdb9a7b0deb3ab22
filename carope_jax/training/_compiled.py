"""An experiment compiled for a machine that isn't here, and what that says of it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from carope_jax.training._config import Experiment
from carope_jax.training._fit import BatchChoice, Fitted, TooLarge, find_fit, memory_asked
from carope_jax.training._flops import flops_per_token
from carope_jax.training._hlo import traffic
from carope_jax.training._plan import Plan, make_plan, ways_of_batch
from carope_jax.training._topology import Target, target_devices

_TOKENS = 10 * 10**9


def compile_for(
    experiment: Experiment, target: Target, *, price_per_chip_hour: float | None = None
) -> dict[str, Any]:
    """Compiles a resolved experiment's update for a machine and says what it will take.

    Where the batch doesn't divide over the machine or doesn't fit its memory, the nearest that does
    is compiled in its place, and what to change is among the facts.

    Args:
      experiment: resolved.
      target: the machine.
      price_per_chip_hour: of any currency, for `cost_per_10B_tokens`.

    Returns:
      The facts by name, as `Plan.facts` and more. Of a chip: `hbm_needed`, `hbm`, `flops`,
      `hbm_bytes`, `collectives`; `fits` says whether the experiment as given does. Without
      `hbm_needed`, no batch fits.

    Raises:
      ValueError: the compiler isn't installed, or the mesh or the model does not suit the machine.
    """
    devices = target_devices(target)
    wanted = BatchChoice(experiment.data.batch_size, experiment.training.micro_batches)
    fitted = find_fit(
        wanted,
        ways_of_batch(experiment, devices),
        lambda choice: _compile(with_batch(experiment, choice), devices, target),
    )
    facts: dict[str, Any] = {"target": str(target), "fits": fitted.choice == wanted}
    if fitted.choice is not None:
        facts |= fitted.compiled.facts()
        facts |= figures(fitted.compiled, target, price_per_chip_hour)
    facts["hbm"] = target.chip.hbm_bytes
    if not facts["fits"]:
        facts["change"] = _advice(experiment, fitted, wanted)
    return facts


def resolve_without_data(experiment: Experiment) -> Experiment:
    """The experiment with nothing left to derive, for machines that hold no data.

    Raises:
      ValueError: the vocabulary's size is in neither the model's config nor the tokenizer's name.
    """
    tokenizer = experiment.data.tokenizer or ""
    sizes = {"gpt2": 50257}
    if tokenizer.startswith("train:") and tokenizer[6:].isdigit():
        sizes[tokenizer] = int(tokenizer[6:])
    size = experiment.model.vocab_size or sizes.get(tokenizer)
    if size is None:
        raise ValueError(
            f"tokenizer {experiment.data.tokenizer!r} does not tell the vocabulary's size without "
            "its data: give --model.vocab-size"
        )
    return experiment.resolved(size)


def with_batch(experiment: Experiment, choice: BatchChoice) -> Experiment:
    """The experiment with another batch."""
    return dataclasses.replace(
        experiment,
        data=dataclasses.replace(experiment.data, batch_size=choice.batch_size),
        training=dataclasses.replace(experiment.training, micro_batches=choice.micro_batches),
    )


def _compile(experiment: Experiment, devices: list[Any], target: Target) -> Plan:
    try:
        plan = make_plan(experiment, devices)
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if "RESOURCE_EXHAUSTED" not in message:
            raise
        raise TooLarge(message, memory_asked(message)) from error
    needed = plan.memory
    if needed is not None and needed > target.chip.hbm_bytes:
        raise TooLarge(f"{needed} bytes", needed)
    return plan


def figures(plan: Plan, target: Target, price_per_chip_hour: float | None) -> dict[str, Any]:
    """What the compiled program says of one update on one chip.

    `step_seconds_at_best` is the roofline: the longest of the model's FLOPs at the chip's peak, the
    bytes at its memory's bandwidth and the collectives' bytes (twice for an all-reduce) at its
    interconnect's. Nothing goes faster; much goes slower.
    """
    experiment, chip = plan.experiment, target.chip
    moved = traffic(plan.step.as_text() or "")
    cost: Mapping[str, float] = plan.step.cost_analysis() or {}
    tokens = experiment.tokens_per_update
    flops = flops_per_token(experiment.model, experiment.data.length) * tokens / target.chips
    wire = sum(c.bytes * (2 if k == "all-reduce" else 1) for k, c in moved.collectives.items())
    seconds = {
        "compute": flops / chip.peak_flops,
        "memory": moved.hbm_bytes / chip.hbm_bandwidth,
        "interconnect": wire / chip.interconnect,
    }
    bound = max(seconds, key=lambda name: seconds[name])
    facts: dict[str, Any] = {
        "attention": plan.layout.attention,
        "hbm_needed": plan.memory,
        "flops": flops,
        "flops_loops_once": cost.get("flops"),
        "hbm_bytes": moved.hbm_bytes,
        "hbm_bytes_loops_once": cost.get("bytes accessed"),
        "loop_turns": list(moved.loops),
        "collectives": {k: dataclasses.asdict(c) for k, c in moved.collectives.items()},
        "cost_model_seconds": cost_model_seconds(cost, loops=bool(moved.loops)),
        "step_seconds_at_best": seconds[bound],
        "bound_by": bound,
        "tokens_per_second_at_best": tokens / seconds[bound],
    }
    if price_per_chip_hour is not None:
        hours = _TOKENS / facts["tokens_per_second_at_best"] / 3600
        facts["cost_per_10B_tokens_at_best"] = hours * target.chips * price_per_chip_hour
    return facts


def cost_model_seconds(cost: Mapping[str, float], *, loops: bool) -> float | None:
    """The compiler's own estimate of a run, where it makes sense: it counts a loop's body once, and
    was seen negative."""
    seconds = cost.get("optimal_seconds", 0.0)
    return seconds if seconds > 0 and not loops else None


def _advice(experiment: Experiment, fitted: Fitted, wanted: BatchChoice) -> str:
    said = []
    for choice, needed in fitted.failures.items():
        size = "more than a chip has" if needed is None else f"{needed / 2**30:.2f} GiB"
        said.append(
            f"batch_size {choice.batch_size} in {choice.micro_batches} micro_batches needs {size}"
        )
    if wanted not in fitted.failures and fitted.choice != wanted:
        said.append(
            f"batch_size {wanted.batch_size} in {wanted.micro_batches} micro_batches does not "
            "divide over the devices"
        )
    if fitted.choice is not None:
        flags = f"--training.micro-batches {fitted.choice.micro_batches}"
        if fitted.choice.batch_size != wanted.batch_size:
            flags = f"--data.batch-size {fitted.choice.batch_size} " + flags
        return f"{'; '.join(said)}: give {flags}, as compiled here"
    ways = ["--mesh.fsdp or --mesh.tensor above 1", "more chips", "a shorter --data.length"]
    if experiment.model.remat != "full":
        ways.insert(0, "--model.remat full")
    return f"{'; '.join(said)}, and no fewer rows a device are possible: try {', '.join(ways)}"
