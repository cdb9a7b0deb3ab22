"""Encodings as Linen modules: they hold the weights, and call what the encoding is."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from carope_jax.layers import _calls
from carope_jax.layers._additive import LearnedConfig, SinusoidalConfig
from carope_jax.layers._bias import AlibiConfig, FoxConfig
from carope_jax.layers._carope import CaropeConfig
from carope_jax.layers._darope import DaRopeConfig, HoPeConfig
from carope_jax.layers._encoding import HeadDims, Parameter
from carope_jax.layers._rope import NoPEConfig, RopeConfig
from carope_jax.layers._selective import SelectiveRopeConfig

# B batch, T time, D model, H query heads, K key/value heads, N head dim.


class _Encoding(nn.Module):
    """A Linen module around an encoding's options, which its subclass has as the field `config`."""

    def initial_carry(self, dims: HeadDims, batch: int) -> Any:
        """The carry before each row's first token, for a model of these sizes."""
        return _calls.initial_carry(self.config, dims, batch)

    def _weights(self, parameters: dict[str, Parameter]) -> dict[str, Array]:
        """The weights, made where they are not yet there."""
        return {name: self._weight(name, parameter) for name, parameter in parameters.items()}

    def _weight(self, name: str, parameter: Parameter) -> Array:
        shape, dtype = parameter.shape, jnp.float32
        if parameter.trained:
            return self.param(name, parameter.init, shape, dtype)
        return self.variable(
            "constants", name, lambda: parameter.init(self.make_rng("params"), shape, dtype)
        ).value


class _Rotary(_Encoding):
    """As `carope_jax.layers.RotaryEncoding`."""

    @nn.compact
    def __call__(
        self,
        q: Float[Array, "B T H N"],
        k: Float[Array, "B T K N"],
        x: Float[Array, "B T D"] | None = None,
        *,
        positions: Int[Array, "#B T"] | None = None,
        starts: Bool[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        carry: Any = None,
        axis_name: str | None = None,
    ) -> tuple[Any, ...]:
        """As `carope_jax.layers.RotaryEncoding.__call__`."""
        config = self.config
        dims = HeadDims(0 if x is None else x.shape[-1], q.shape[2], k.shape[2], q.shape[3])
        config.validate(dims)
        parameters = config.attention_parameters(dims)
        if x is None and any(0 in parameter.shape for parameter in parameters.values()):
            raise ValueError(f"{type(self).__name__} needs x, whose width its weights have")
        return _calls.turn(
            config,
            self._weights(parameters),
            dims,
            q,
            k,
            x,
            positions=positions,
            starts=starts,
            valid=valid,
            carry=carry,
            axis_name=axis_name,
        )


class _Additive(_Encoding):
    """As `carope_jax.layers.AdditiveEncoding`."""

    @nn.compact
    def __call__(
        self,
        embedding: Float[Array, "B T D"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        starts: Bool[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        carry: Any = None,
    ) -> Any:
        """As `carope_jax.layers.AdditiveEncoding.__call__`."""
        config, dims = self.config, HeadDims(model_dim=embedding.shape[-1])
        config.validate(dims)
        return _calls.add(
            config,
            self._weights(config.embedding_parameters(dims)),
            dims,
            embedding,
            positions=positions,
            starts=starts,
            valid=valid,
            carry=carry,
        )


class _Bias(_Encoding):
    """As `carope_jax.layers.BiasEncoding`."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        starts: Bool[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        carry: Any = None,
    ) -> Any:
        """As `carope_jax.layers.BiasEncoding.__call__`."""
        config, dims = self.config, HeadDims(model_dim=x.shape[-1], heads=self.heads)
        config.validate(dims)
        return _calls.locate(
            config,
            self._weights(config.attention_parameters(dims)),
            dims,
            x,
            positions=positions,
            starts=starts,
            valid=valid,
            carry=carry,
        )


class Rope(_Rotary):
    """Rotary position embedding (arXiv 2104.09864)."""

    config: RopeConfig = RopeConfig()


class NoPE(_Rotary):
    """No positional encoding (arXiv 2305.19466): queries and keys as they come."""

    config: NoPEConfig = NoPEConfig()


class Carope(_Rotary):
    """Context-aware rotary position embedding (arXiv 2507.23083)."""

    config: CaropeConfig = CaropeConfig()


class SelectiveRope(_Rotary):
    """Selective RoPE (arXiv 2511.17388)."""

    config: SelectiveRopeConfig = SelectiveRopeConfig()


class HoPe(_Rotary):
    """HoPE (arXiv 2410.21216); the config's `length` is needed."""

    config: HoPeConfig


class DaRope(_Rotary):
    """DaRoPE (arXiv 2609.34556); the config's `length` is needed."""

    config: DaRopeConfig


class Alibi(_Bias):
    """Attention with linear biases (arXiv 2108.12409).

    Attributes:
      heads: query heads.
    """

    heads: int
    config: AlibiConfig = AlibiConfig()


class Fox(_Bias):
    """The forgetting transformer's forget gate (arXiv 2503.02130).

    Attributes:
      heads: query heads.
    """

    heads: int
    config: FoxConfig = FoxConfig()


class Sinusoidal(_Additive):
    """Sinusoidal encoding (arXiv 1706.03762, section 3.5)."""

    config: SinusoidalConfig = SinusoidalConfig()


class Learned(_Additive):
    """A learned table of positions (GPT-2); the config's `length` is needed."""

    config: LearnedConfig
