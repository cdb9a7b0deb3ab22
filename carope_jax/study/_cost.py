"""What a full-size run is expected to take."""

from collections.abc import Sequence

from carope_jax.training import Experiment, flops_per_token, peak_flops_of


def chip_hours(experiment: Experiment, mfu: float, chip: str) -> float:
    """Hours of one chip: training FLOPs over the peak times the share of it that is reached.

    Args:
      experiment: with its vocabulary's size.
      mfu: the share, in (0, 1]: an assumption.
      chip: by JAX's `device_kind`.

    Raises:
      ValueError: no vocabulary's size, a share out of range, or an unknown chip.
    """
    if not 0 < mfu <= 1:
        raise ValueError(f"mfu must be in (0, 1], got {mfu}")
    if experiment.model.vocab_size is None:
        raise ValueError(f"{experiment.name}: the cost needs model.vocab_size")
    per_token = flops_per_token(experiment.model, experiment.data.length)
    total = per_token * experiment.tokens_per_update * experiment.training.steps
    return total / (mfu * peak_flops_of(chip)) / 3600


def cost_lines(experiment: Experiment, mfu: float, chips: Sequence[str]) -> list[str]:
    """A line an experiment and chip; errors as `chip_hours`."""
    tokens = experiment.tokens_per_update * experiment.training.steps
    assumed = f"at an assumed MFU of {mfu:g}"
    return [
        f"{experiment.name}: {tokens / 1e9:.2f}G tokens, about "
        f"{chip_hours(experiment, mfu, chip):.1f} hours of one {chip} ({assumed})"
        for chip in chips
    ]
