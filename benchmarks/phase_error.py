"""How well a long sum of rotation increments keeps its phase, by way of summing.

    python benchmarks/phase_error.py --json phase_error.json

The largest error of any token and rotary pair, in radians: the difference from the exact sum of the
same float32 increments, wrapped to [0, pi], so that the sum is judged and nothing else. `random` is
an f drawn for each token, `constant` one f for all: base 10,000's.

    turns          this library: integers of 2^-32 turn (`accumulate`), read as float32 radians
    float32 scan   a float32 sum in parallel, as `jnp.cumsum` orders it
    float32 serial a float32 sum token by token, as decoding does
    bfloat16       a bfloat16 sum token by token, of increments rounded to bfloat16
    m * theta      the float32 product of position and increment, RoPE's usual way (constant only)

Exit codes: 0 done, 2 bad input.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from _report import Row, make_table, report

from carope_jax import command
from carope_jax.positions import accumulate, carope_increments

# T time, P rotary pairs.

_BASE = 10_000.0
_INCREMENTS = ("random", "constant")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What is summed."""

    lengths: tuple[int, ...] = (2**10, 2**14, 2**17, 2**20)
    """Tokens summed, at most 2^20 each."""
    head_dim: int = 64
    """Twice the number of rotary pairs."""
    seed: int = 0
    """Of the random frequencies."""
    json: Path | None = None
    """Write the rows there: a list of {name, value, unit}."""

    def __post_init__(self) -> None:
        """Raises a ValueError that names the field and the value."""
        if not self.lengths or not all(1 <= length <= 2**20 for length in self.lengths):
            raise ValueError(f"lengths must be in [1, {2**20}], at least one, got {self.lengths}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even and at least 2, got {self.head_dim}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")


def exact_phase(increments_T: np.ndarray) -> np.ndarray:
    """Running sums of float32 increments in [0, 1], as float64 radians modulo 2 pi.

    Summed in integers of 2^-72 rad, in two parts, and rounded once: off by under 2e-10 rad at 2^20
    tokens, where a float64 running sum could be off by 6e-5.
    """
    scaled_T = increments_T.astype(np.float64) * 2.0**30
    high_T = np.floor(scaled_T)
    low_T = np.cumsum(((scaled_T - high_T) * 2.0**42).astype(np.int64))
    high_T = np.cumsum(high_T.astype(np.int64)) + (low_T >> 42)
    radians_T = high_T * 2.0**-30 + (low_T & (2**42 - 1)) * 2.0**-72
    return np.remainder(radians_T, 2 * math.pi)


@jax.jit
def _turns(increments_T: jax.Array) -> jax.Array:
    return accumulate(increments_T[None, :, None, None])[0][0, :, 0, 0]


# NumPy's running sums are serial: each is the one before, plus one increment, rounded.
SUMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "turns": lambda x_T: np.asarray(_turns(x_T)),
    "float32 scan": lambda x_T: np.asarray(jnp.cumsum(x_T)),
    "float32 serial": lambda x_T: np.cumsum(x_T, dtype=np.float32),
    "bfloat16": lambda x_T: np.add.accumulate(x_T.astype(jnp.bfloat16)),
    "m * theta": lambda x_T: np.arange(1, len(x_T) + 1, dtype=np.float32) * x_T[0],
}
"""Phases [T] of float32 increments [T], by the name of the way of summing."""


def largest_error(phases_T: np.ndarray, exact_T: np.ndarray) -> float:
    """The largest difference of two phases, in [0, pi] radians."""
    apart_T = np.remainder(phases_T.astype(np.float64) - exact_T, 2 * math.pi)
    return float(np.minimum(apart_T, 2 * math.pi - apart_T).max())


def measure(arguments: Arguments) -> list[Row]:
    """The largest error over tokens and pairs, for each kind of increment, sum and length."""
    random = np.random.default_rng(arguments.seed)
    rows = []
    for kind in _INCREMENTS:
        names = [name for name in SUMS if kind == "constant" or name != "m * theta"]
        for length in arguments.lengths:
            if kind == "constant":
                log_f_T = np.full(length, -2 * math.log(_BASE) / arguments.head_dim)
            else:
                log_f_T = np.log(1 - random.random(length))
            increments_TP = np.asarray(
                carope_increments(
                    jnp.asarray(log_f_T, jnp.float32)[None, :, None], arguments.head_dim // 2
                )
            )[0, :, 0]
            worst = dict.fromkeys(names, 0.0)
            for increments_T in np.ascontiguousarray(increments_TP.T):
                exact_T = exact_phase(increments_T)
                for name in names:
                    error = largest_error(SUMS[name](increments_T), exact_T)
                    worst[name] = max(worst[name], error)
            rows += [Row(f"{kind}/{name}/{length}", error, "rad") for name, error in worst.items()]
    return rows


def main(argv: Sequence[str]) -> None:
    """Reads the arguments, sums, reports."""
    with command.input_errors():
        arguments = tyro.cli(Arguments, description=__doc__, args=argv)
    rows = measure(arguments)
    error = {row.name: f"{row.value:.1e}" for row in rows}
    tables = [
        make_table(
            f"Largest phase error in radians, {kind} f",
            ("tokens", *SUMS),
            [
                (f"{length:,}", *(error.get(f"{kind}/{name}/{length}", "") for name in SUMS))
                for length in arguments.lengths
            ],
        )
        for kind in _INCREMENTS
    ]
    report(rows, tables, arguments.json)


if __name__ == "__main__":
    command.run(main)
