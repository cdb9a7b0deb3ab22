"""Every encoding a decoder can be given, by name."""

import dataclasses
import difflib

from carope_jax.layers._additive import LearnedConfig, SinusoidalConfig
from carope_jax.layers._bias import AlibiConfig, FoxConfig
from carope_jax.layers._carope import CaropeConfig
from carope_jax.layers._darope import DaRopeConfig, HoPeConfig
from carope_jax.layers._encoding import EncodingConfig
from carope_jax.layers._rope import NoPEConfig, RopeConfig
from carope_jax.layers._selective import SelectiveRopeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodingChoice:
    """Which encoding, and the options of each: a field's name is its encoding's name."""

    position: str = "rope"
    """The positional encoding: the name of one of the groups of options below."""
    rope: RopeConfig = RopeConfig()
    carope: CaropeConfig = CaropeConfig()
    selective_rope: SelectiveRopeConfig = SelectiveRopeConfig()
    darope: DaRopeConfig = DaRopeConfig()
    hope: HoPeConfig = HoPeConfig()
    fox: FoxConfig = FoxConfig()
    alibi: AlibiConfig = AlibiConfig()
    learned: LearnedConfig = LearnedConfig()
    sinusoidal: SinusoidalConfig = SinusoidalConfig()
    nope: NoPEConfig = NoPEConfig()

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
