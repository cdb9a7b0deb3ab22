"""Every encoding a decoder can be given, by name."""

import dataclasses
import difflib

from carope_jax.layers._additive import LearnedConfig, NopeConfig, SinusoidalConfig
from carope_jax.layers._carope import CaropeConfig
from carope_jax.layers._encoding import EncodingConfig
from carope_jax.layers._rope import RopeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodingChoice:
    """Which encoding, and the options of each: a field's name is its encoding's name."""

    position: str = "rope"
    """The positional encoding: rope, carope, learned, sinusoidal or nope."""
    rope: RopeConfig = RopeConfig()
    carope: CaropeConfig = CaropeConfig()
    learned: LearnedConfig = LearnedConfig()
    sinusoidal: SinusoidalConfig = SinusoidalConfig()
    nope: NopeConfig = NopeConfig()

    @property
    def encoding(self) -> EncodingConfig:
        """The chosen encoding's options.

        Raises:
          ValueError: there is no encoding of that name; the nearest is named.
        """
        if self.position not in ENCODINGS:
            near = difflib.get_close_matches(self.position, ENCODINGS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"position must be one of {ENCODINGS}, got {self.position!r}{hint}")
        return getattr(self, self.position)


ENCODINGS = tuple(f.name for f in dataclasses.fields(EncodingChoice) if f.name != "position")
"""The names of the encodings."""
