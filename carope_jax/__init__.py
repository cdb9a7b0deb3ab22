"""CARoPE and its rivals for JAX and Flax.

What an importer needs is here; training, data and evaluation have packages of their own, which
this one does not import.
"""

from carope_jax import layers, positions
from carope_jax.layers import Carope, Learned, Rope, Sinusoidal
from carope_jax.positions import (
    accumulate,
    carope_increments,
    carope_log_frequency,
    carope_rotate,
    rope_phases,
    rotate,
)

__version__ = "0.1.0"

__all__ = [
    "Carope",
    "Learned",
    "Rope",
    "Sinusoidal",
    "accumulate",
    "carope_increments",
    "carope_log_frequency",
    "carope_rotate",
    "layers",
    "positions",
    "rope_phases",
    "rotate",
]
