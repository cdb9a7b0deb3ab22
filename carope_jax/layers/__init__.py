"""Positional encodings as thin Flax modules: parameters, and a call into `positions`."""

from carope_jax.layers._additive import (
    Learned,
    LearnedConfig,
    NopeConfig,
    Sinusoidal,
    SinusoidalConfig,
)
from carope_jax.layers._carope import Carope, CaropeConfig, EmbeddingCarope
from carope_jax.layers._encoding import (
    Encoding,
    EncodingConfig,
    FrozenParam,
    HeadDims,
    Rotated,
    Segmentation,
)
from carope_jax.layers._registry import ENCODINGS, EncodingChoice
from carope_jax.layers._rope import Rope, RopeConfig

__all__ = [
    "ENCODINGS",
    "Carope",
    "CaropeConfig",
    "EmbeddingCarope",
    "Encoding",
    "EncodingChoice",
    "EncodingConfig",
    "FrozenParam",
    "HeadDims",
    "Learned",
    "LearnedConfig",
    "NopeConfig",
    "Rope",
    "RopeConfig",
    "Rotated",
    "Segmentation",
    "Sinusoidal",
    "SinusoidalConfig",
]
