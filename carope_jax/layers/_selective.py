"""Selective RoPE as a layer."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.nn
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, UInt32

from carope_jax.layers._encoding import (
    AttentionInput,
    HeadDims,
    Parameter,
    Rotated,
    Weights,
)
from carope_jax.layers._module import RotaryEncoding
from carope_jax.layers._rope import RotaryConfig
from carope_jax.positions import (
    Activation,
    accumulate,
    project,
    selective_increments,
    selective_temperature,
)

# B batch, T time, D model, H query heads, K key/value heads, G = H/K, N head dim, P rotary pairs,
# W taps of the convolution, R rank.

Gate = Literal["none", "head", "pair"]
"""A sigmoid of the input that multiplies the angles: none, one a head, or one a pair."""


class SelectiveState(NamedTuple):
    """What the tokens before left.

    Attributes:
      window: the last W-1 projected tokens, float32.
      carry: the turns so far, in units of 2^-32 turn.
    """

    window: Float[Array, "B W K P"]
    carry: UInt32[Array, "B K P"]


@dataclasses.dataclass(frozen=True)
class SelectiveRopeConfig(RotaryConfig):
    """Selective RoPE (arXiv 2511.17388): angles that are a running sum of a short convolution over
    projected queries, of either sign. What the paper leaves open is an option."""

    accumulates: ClassVar[bool] = True
    shards_time: ClassVar[bool] = False

    source: Literal["query", "hidden"] = "query"
    """What is projected: the queries (the paper's text), or the attention's input (its code)."""
    width: int = 4
    """Taps of the causal convolution, the token's own among them."""
    rank: int | None = None
    """The projection's rank for source=hidden (16 in the paper's code); full by default."""
    normalized: bool = True
    """Whether what is projected is divided by its L2 norm, a head's features at a time (of the
    query, or of the input cut into as many parts): the paper's cure for unstable training."""
    activation: Activation = "none"
    """What follows the convolution."""
    gate: Gate = "none"
    """A phase gate: a sigmoid of the input that multiplies the angles."""
    bias: bool = False
    """Whether exp(b) is added to the convolution's output: with a projection of 0 it is RoPE."""
    base: float = 500_000.0
    """The temperatures are base^(-2i/d), as RoPE's frequencies are."""
    train_temperature: bool = False
    """Whether the temperatures are trained."""

    def validate(self, dims: HeadDims) -> None:
        """Raises a ValueError for options that contradict each other or the head dim."""
        self.check_rotary(dims.head_dim, dims.head_dim, self.base)
        for name, allowed in (
            ("source", ("query", "hidden")),
            ("gate", get_args(Gate)),
            ("activation", get_args(Activation)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.width < 1:
            raise ValueError(f"width must be at least 1, got {self.width}")
        if self.rank is not None and (self.source != "hidden" or self.rank < 1):
            raise ValueError(
                f"rank must be at least 1 and is for source='hidden', got {self.rank} "
                f"for source={self.source!r}"
            )
        looks = self.source == "hidden" or self.gate != "none"
        if self.normalized and looks and dims.model_dim % dims.heads:
            raise ValueError(
                f"{dims.heads} heads do not divide the input's {dims.model_dim} features, "
                "which are normalized a head's at a time"
            )
        if dims.heads % dims.kv_heads:
            raise ValueError(f"{dims.kv_heads} key/value heads do not divide {dims.heads} heads")

    def attention_parameters(self, dims: HeadDims) -> dict[str, Parameter]:
        """The projection, the convolution, and the gate, bias and temperature where asked for."""
        kv_heads, pairs = dims.kv_heads, dims.head_dim // 2
        outputs = ("kv_heads", "pairs")
        if self.source == "query":
            inputs = dims.heads // kv_heads * dims.head_dim
            shape: tuple[int, ...] = (kv_heads, inputs, pairs)
            parameters = {
                "kernel": Parameter(shape, _fan_in(inputs), ("kv_heads", "head_dim", "pairs"))
            }
        else:
            inputs = dims.model_dim if self.rank is None else self.rank
            axis = "embed" if self.rank is None else None
            shape = (inputs, kv_heads, pairs)
            parameters = {"kernel": Parameter(shape, _fan_in(inputs), (axis, *outputs))}
            if self.rank is not None:
                down = (dims.model_dim, self.rank)
                parameters["down_kernel"] = Parameter(
                    down, _fan_in(dims.model_dim), ("embed", None)
                )
        taps = (self.width, kv_heads, pairs)
        parameters["conv_kernel"] = Parameter(taps, _fan_in(self.width), (None, *outputs))
        if self.gate != "none":
            gates = (kv_heads, pairs if self.gate == "pair" else 1)
            axes = ("kv_heads", "pairs" if self.gate == "pair" else None)
            init = _fan_in(dims.model_dim)
            kernel = Parameter((dims.model_dim, *gates), init, ("embed", *axes))
            parameters["gate_kernel"] = kernel
            parameters["gate_bias"] = Parameter(gates, jax.nn.initializers.zeros, axes)
        if self.bias:
            shape = (kv_heads, pairs)
            parameters["bias"] = Parameter(shape, jax.nn.initializers.zeros, outputs)
        if self.train_temperature:
            temperature = selective_temperature(pairs, self.base)

            def init_temperature(key: Array, shape: tuple, dtype: Any = jnp.float32) -> Array:
                return temperature.astype(dtype)

            parameters["temperature"] = Parameter((pairs,), init_temperature, ("pairs",))
        return parameters

    def initial_state(self, dims: HeadDims, batch: int) -> SelectiveState:
        """No tokens and no turn."""
        size = (dims.kv_heads, dims.head_dim // 2)
        return SelectiveState(
            jnp.zeros((batch, self.width - 1, *size), jnp.float32),
            jnp.zeros((batch, *size), jnp.uint32),
        )

    def rotate(self, weights: Weights, dims: HeadDims, given: AttentionInput) -> Rotated:
        """Turned by the angles that the tokens have accumulated."""
        if given.axis_name is not None:
            raise ValueError(
                "Selective RoPE's convolution is not offered over a sharded time axis, "
                f"got axis_name {given.axis_name!r}"
            )
        pairs, segmentation = dims.head_dim // 2, given.segmentation
        scaling = self.scaled(given.q.shape[1], pairs, self.base)
        state = given.state
        if state is None:
            state = self.initial_state(dims, given.q.shape[0])
        temperature = weights.get("temperature", selective_temperature(pairs, self.base))
        increments, window = selective_increments(
            self._projected(weights, dims, given),
            weights["conv_kernel"],
            temperature,
            gate=self._gates(weights, dims, given.hidden),
            bias=weights.get("bias"),
            activation=self.activation,
            starts=segmentation.starts,
            valid=segmentation.valid,
            window=state.window,
        )
        if scaling is not None:
            increments = increments * scaling.factor
        phases, carry = accumulate(increments, segmentation.starts, segmentation.valid, state.carry)
        return self.turned(given, phases, scaling, SelectiveState(window, carry))

    def _projected(self, weights: Weights, dims: HeadDims, given: AttentionInput) -> Array:
        """[B, T, K, P] in float32."""
        if self.source == "query":
            x = self._normalized(given.q).reshape(*given.q.shape[:2], dims.kv_heads, -1)
            kernel = weights["kernel"].astype(jnp.float32)
            # The highest precision because a phase sums these.
            return jnp.einsum("BTKX,KXP->BTKP", x, kernel, precision=lax.Precision.HIGHEST)
        x = self._normalized_input(dims, given.hidden)
        if self.rank is not None:
            x = project(x, weights["down_kernel"])
        return project(x, weights["kernel"])

    def _gates(self, weights: Weights, dims: HeadDims, hidden: Array | None) -> Array | None:
        if self.gate == "none":
            return None
        x = self._normalized_input(dims, hidden)
        logits = project(x, weights["gate_kernel"])
        return jax.nn.sigmoid(logits + weights["gate_bias"])

    def _normalized_input(self, dims: HeadDims, x: Array | None) -> Array:
        if x is None:
            raise ValueError("Selective RoPE needs x for source='hidden' or a gate")
        if not self.normalized:
            return x.astype(jnp.float32)
        return self._normalized(x.reshape(*x.shape[:2], dims.heads, -1)).reshape(x.shape)

    def _normalized(self, x: Array) -> Array:
        x = x.astype(jnp.float32)
        if not self.normalized:
            return x
        return x * lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-6)


class SelectiveRope(RotaryEncoding):
    """Selective RoPE (arXiv 2511.17388).

    Args:
      model_dim: features of x.
      heads: query heads.
      kv_heads: key/value heads, which the phases belong to; divides `heads`.
      head_dim: features of a head.
      rngs: for the initialisation.
      options: the fields of `SelectiveRopeConfig`.

    Raises:
      ValueError: an odd head_dim, heads that don't divide, an unknown option.
    """

    def __init__(
        self,
        model_dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        dims = HeadDims(model_dim, heads, kv_heads, head_dim)
        super().__init__(SelectiveRopeConfig(**options), dims, rngs)


def _fan_in(inputs: int) -> Callable[..., Array]:
    """Uniform with a unit sum of squares over the inputs on average."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        bound = (3 / inputs) ** 0.5
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init
