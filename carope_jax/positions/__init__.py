"""Positional encodings as pure functions of arrays: no Flax, no parameters, no state."""

from carope_jax.positions._additive import learned, sinusoidal
from carope_jax.positions._carope import (
    Exponent,
    carope_increments,
    carope_log_frequency,
    carope_rotate,
    equivalent_base,
    rope_bias,
)
from carope_jax.positions._rope import rope_frequencies, rope_phases
from carope_jax.positions._rotate import Layout, rotate
from carope_jax.positions._scaling import Scaling, linear_scaling
from carope_jax.positions._segments import segment_positions, segment_starts, segment_valid
from carope_jax.positions._turns import accumulate, to_radians, to_turns

__all__ = [
    "Exponent",
    "Layout",
    "Scaling",
    "accumulate",
    "carope_increments",
    "carope_log_frequency",
    "carope_rotate",
    "equivalent_base",
    "learned",
    "linear_scaling",
    "rope_bias",
    "rope_frequencies",
    "rope_phases",
    "rotate",
    "segment_positions",
    "segment_starts",
    "segment_valid",
    "sinusoidal",
    "to_radians",
    "to_turns",
]
