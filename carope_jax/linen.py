"""The encodings as Linen modules: the same weights and numbers as `carope_jax`'s NNX ones.

    q, k = carope_jax.linen.Carope(CaropeConfig(init="rope"))(q, k, x)      # in a compact method

The options are a config's; sizes are taken from what a module is called with. Frozen weights are in
the collection `constants`, so that no optimizer sees them.
"""

from carope_jax.layers._linen import (
    Alibi,
    Carope,
    DaRope,
    Fox,
    HoPe,
    Learned,
    NoPE,
    Rope,
    SelectiveRope,
    Sinusoidal,
)

__all__ = [
    "Alibi",
    "Carope",
    "DaRope",
    "Fox",
    "HoPe",
    "Learned",
    "NoPE",
    "Rope",
    "SelectiveRope",
    "Sinusoidal",
]
