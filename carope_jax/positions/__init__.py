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
from carope_jax.positions._darope import darope_coordinate, darope_phases, fast_pairs
from carope_jax.positions._projection import project
from carope_jax.positions._rope import rope_frequencies, rope_phases
from carope_jax.positions._rotate import Layout, layout_permutation, rotate
from carope_jax.positions._scaling import (
    Scaling,
    dynamic_ntk_scaling,
    linear_scaling,
    llama3_scaling,
    ntk_scaling,
    yarn_scaling,
)
from carope_jax.positions._scaling_config import (
    ScalingConfig,
    ScalingRule,
    scaling_from_transformers,
)
from carope_jax.positions._scan import check_flags
from carope_jax.positions._score_bias import (
    accumulate_forget,
    alibi_coordinates,
    alibi_slopes,
    fox_decay_bias,
    fox_log_forget,
    score_bias,
)
from carope_jax.positions._segments import segment_starts, segment_valid, token_positions
from carope_jax.positions._selective import (
    Activation,
    selective_increments,
    selective_temperature,
)
from carope_jax.positions._turns import accumulate, to_radians, to_turns

__all__ = [
    "Activation",
    "Exponent",
    "Layout",
    "Scaling",
    "ScalingConfig",
    "ScalingRule",
    "accumulate",
    "accumulate_forget",
    "alibi_coordinates",
    "alibi_slopes",
    "carope_increments",
    "carope_log_frequency",
    "carope_rotate",
    "check_flags",
    "darope_coordinate",
    "darope_phases",
    "dynamic_ntk_scaling",
    "equivalent_base",
    "fast_pairs",
    "fox_decay_bias",
    "fox_log_forget",
    "layout_permutation",
    "learned",
    "linear_scaling",
    "llama3_scaling",
    "ntk_scaling",
    "project",
    "rope_bias",
    "rope_frequencies",
    "rope_phases",
    "rotate",
    "scaling_from_transformers",
    "score_bias",
    "segment_starts",
    "segment_valid",
    "selective_increments",
    "selective_temperature",
    "sinusoidal",
    "to_radians",
    "to_turns",
    "token_positions",
    "yarn_scaling",
]
