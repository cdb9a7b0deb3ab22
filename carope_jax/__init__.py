"""CARoPE and its rivals for JAX and Flax.

What an importer needs is here: the encodings as NNX modules (as Linen modules in
`carope_jax.linen`) and as pure functions. Training, data and evaluation have packages of their own,
which this one does not import.
"""

from carope_jax import layers, linen, positions
from carope_jax.layers import (
    Alibi,
    AlibiConfig,
    Carope,
    CaropeConfig,
    DaRope,
    DaRopeConfig,
    Fox,
    FoxConfig,
    HeadDims,
    HoPe,
    HoPeConfig,
    Learned,
    LearnedConfig,
    NoPE,
    NoPEConfig,
    Rope,
    RopeConfig,
    SelectiveRope,
    SelectiveRopeConfig,
    Sinusoidal,
    SinusoidalConfig,
)
from carope_jax.positions import (
    ScalingConfig,
    accumulate,
    carope_increments,
    carope_log_frequency,
    carope_rotate,
    layout_permutation,
    rope_phases,
    rotate,
    scaling_from_transformers,
    score_bias,
)

__version__ = "0.1.0"

__all__ = [
    "Alibi",
    "AlibiConfig",
    "Carope",
    "CaropeConfig",
    "DaRope",
    "DaRopeConfig",
    "Fox",
    "FoxConfig",
    "HeadDims",
    "HoPe",
    "HoPeConfig",
    "Learned",
    "LearnedConfig",
    "NoPE",
    "NoPEConfig",
    "Rope",
    "RopeConfig",
    "ScalingConfig",
    "SelectiveRope",
    "SelectiveRopeConfig",
    "Sinusoidal",
    "SinusoidalConfig",
    "accumulate",
    "carope_increments",
    "carope_log_frequency",
    "carope_rotate",
    "layers",
    "layout_permutation",
    "linen",
    "positions",
    "rope_phases",
    "rotate",
    "scaling_from_transformers",
    "score_bias",
]
