"""Positional encodings as thin Flax modules: weights, and a call into `positions`.

Here are the NNX modules, and the options of each as a dataclass; `carope_jax.linen` has the Linen
ones, of the same weights and numbers.
"""

from carope_jax.layers._additive import Learned, LearnedConfig, Sinusoidal, SinusoidalConfig
from carope_jax.layers._bias import Alibi, AlibiConfig, Fox, FoxConfig
from carope_jax.layers._carope import Carope, CaropeConfig
from carope_jax.layers._darope import DaRope, DaRopeConfig, HoPe, HoPeConfig
from carope_jax.layers._encoding import (
    AttentionInput,
    EncodingConfig,
    HeadDims,
    Parameter,
    Rotated,
    Segmentation,
    Weights,
)
from carope_jax.layers._module import (
    AdditiveEncoding,
    AttentionEncoding,
    BiasEncoding,
    EmbeddingEncoding,
    Encoding,
    FrozenParam,
    RotaryEncoding,
)
from carope_jax.layers._registry import ENCODINGS, EncodingChoice
from carope_jax.layers._rope import NoPE, NoPEConfig, Rope, RopeConfig, RotaryConfig
from carope_jax.layers._selective import SelectiveRope, SelectiveRopeConfig, SelectiveState

__all__ = [
    "ENCODINGS",
    "AdditiveEncoding",
    "Alibi",
    "AlibiConfig",
    "AttentionEncoding",
    "AttentionInput",
    "BiasEncoding",
    "Carope",
    "CaropeConfig",
    "DaRope",
    "DaRopeConfig",
    "EmbeddingEncoding",
    "Encoding",
    "EncodingChoice",
    "EncodingConfig",
    "Fox",
    "FoxConfig",
    "FrozenParam",
    "HeadDims",
    "HoPe",
    "HoPeConfig",
    "Learned",
    "LearnedConfig",
    "NoPE",
    "NoPEConfig",
    "Parameter",
    "Rope",
    "RopeConfig",
    "RotaryConfig",
    "RotaryEncoding",
    "Rotated",
    "Segmentation",
    "SelectiveRope",
    "SelectiveRopeConfig",
    "SelectiveState",
    "Sinusoidal",
    "SinusoidalConfig",
    "Weights",
]
