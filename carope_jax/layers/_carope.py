"""CARoPE as a layer."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.nn
import jax.numpy as jnp
import numpy as np
from flax import nnx
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
    Exponent,
    carope_log_frequency,
    carope_rotate,
    rope_bias,
)

# B batch, T time, D model, H query heads, K key/value heads, N head dim, P rotary pairs.

Init = Literal["rope", "paper"]
"""Where training starts: "rope" (W = 0 and a bias: RoPE exactly), "paper" (W ~ N(0, 0.02))."""
Control = Literal["none", "frozen", "constant", "shuffled", "mean"]
"""What stands in for a learned, context-dependent frequency, to test the claim."""
Source = Literal["hidden", "embedding"]
"""What the frequencies depend on."""


@dataclasses.dataclass(frozen=True)
class CaropeConfig(RotaryConfig):
    """CARoPE (arXiv 2507.23083, section 2): what the paper leaves open is chosen here, never in
    silence."""

    accumulates: ClassVar[bool] = True

    source: Source = "hidden"
    """What the frequencies depend on in a decoder: the block's normalised input, or the token
    embeddings. Every layer has a projection of its own either way."""
    init: Init = "rope"
    """Start as RoPE exactly (W = 0 and a bias), or as the paper prints it (no bias, random W); the
    paper's text says both."""
    exponent: Exponent = "power"
    """f^i (the paper), f for every pair (an ablation), or an f of its own for each pair."""
    first_exponent: int = 0
    """0: pair 0 turns 1 rad a token, as RoPE's does; 1: it turns f."""
    inclusive: bool = True
    """Whether a token's own increment is in its phase (the paper)."""
    control: Control = "none"
    """A stand-in for the learned frequency: frozen (random W, never trained: an accumulated random
    rotation, arXiv 2606.24975), constant (W = 0, only the bias of init=rope is trained: a learned
    base a head, without context), shuffled (f of the batch's previous sequence, so that nothing of
    the future leaks), or mean (each head's mean increments in place of the context's, from the
    weight `mean_increments` [K, P], which starts at the increments of W = 0)."""
    base: float = 10_000.0
    """The RoPE base at which init=rope starts, and the scaling rule's reference."""
    kernel_std: float = 0.02
    """Standard deviation of W where it is random."""

    def validate(self, dims: HeadDims) -> None:
        """Raises a ValueError for options that contradict each other or the head dim."""
        self.check_rotary(dims.head_dim, dims.head_dim, self.base)
        for name, allowed in (
            ("source", get_args(Source)),
            ("init", get_args(Init)),
            ("exponent", get_args(Exponent)),
            ("first_exponent", (0, 1)),
            ("control", get_args(Control)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.init == "rope":
            if self.exponent == "shared" or self.first_exponent == 1:
                raise ValueError(
                    f"init='rope' can't be reached with exponent={self.exponent!r}, "
                    f"first_exponent={self.first_exponent}: use init='paper'"
                )
            if not self.base > 1:
                raise ValueError(f"init='rope' needs a base above 1, got {self.base}")

        elif self.control == "constant":
            raise ValueError(
                f"control='constant' trains the bias alone, and init={self.init!r} has none: "
                "use init='rope'"
            )

    def attention_parameters(self, dims: HeadDims) -> dict[str, Parameter]:
        """W [D, K], or [D, K, P] for an f a pair; the bias where training starts as RoPE."""
        pairs = dims.head_dim // 2
        outputs = (dims.kv_heads, pairs) if self.exponent == "free" else (dims.kv_heads,)
        axes = ("embed", "kv_heads", "pairs")[: 1 + len(outputs)]
        trained = self.control != "frozen"
        still = self.init == "rope" and trained
        trains_kernel = self.control not in ("frozen", "constant")
        kernel_init = (
            jax.nn.initializers.zeros if still else jax.nn.initializers.normal(self.kernel_std)
        )
        shape = (dims.model_dim, *outputs)
        parameters = {"kernel": Parameter(shape, kernel_init, axes, trains_kernel)}
        if self.init == "rope":
            start = _rope_start(self.base, dims.head_dim, self.exponent)
            parameters["bias"] = Parameter(outputs, _constant(start), axes[1:], trained)
        if self.control == "mean":
            means = _constant(self._still_increments(dims))
            parameters["mean_increments"] = Parameter(
                (dims.kv_heads, pairs), means, ("kv_heads", "pairs"), False
            )
        return parameters

    def initial_state(self, dims: HeadDims, batch: int) -> UInt32[Array, "B K P"]:
        """The carry before a sequence's first token: no turn at all."""
        return jnp.zeros((batch, dims.kv_heads, dims.head_dim // 2), jnp.uint32)

    def log_frequency(self, weights: Weights, x: Float[Array, "B T D"]) -> Float[Array, "B T K *P"]:
        """Float32 log f of each token, the control applied.

        Raises:
          ValueError: `control="shuffled"` for a batch of one.
        """
        if self.control == "mean":
            log_increments_KP = jnp.log(weights["mean_increments"].astype(jnp.float32))
            return jnp.broadcast_to(log_increments_KP, (*x.shape[:2], *log_increments_KP.shape))
        log_f = carope_log_frequency(x, weights["kernel"], weights.get("bias"))
        if self.control == "shuffled":
            if x.shape[0] < 2:
                raise ValueError("control='shuffled' needs a batch of at least 2 sequences, got 1")
            log_f = jnp.roll(log_f, 1, axis=0)
        return log_f

    def rotate(self, weights: Weights, dims: HeadDims, given: AttentionInput) -> Rotated:
        """Turned by the phases that the source has accumulated; f's mean and spread measured."""
        x = given.hidden if self.source == "hidden" else given.embedding
        if x is None:
            raise ValueError("CARoPE needs x, what its frequencies depend on")
        log_f = self.log_frequency(weights, x)
        mean = self.control == "mean"
        segmentation = given.segmentation
        q, k, carry = carope_rotate(
            given.q,
            given.k,
            log_f,
            # The means are of increments, pair by pair, whatever they are the means of.
            exponent="free" if mean else self.exponent,
            first_exponent=1 if mean else self.first_exponent,
            inclusive=self.inclusive,
            layout=self.layout,
            scaling=self.scaled(given.q.shape[1], dims.head_dim // 2, self.base),
            starts=segmentation.starts,
            valid=segmentation.valid,
            carry=given.state,
            axis_name=given.axis_name,
        )
        spread = _frequency_spread(
            jax.lax.stop_gradient(log_f), segmentation.valid, given.axis_name
        )
        return Rotated(q, k, state=carry, measurements=spread)

    def _still_increments(self, dims: HeadDims) -> np.ndarray:
        """The increments [K, P] of W = 0, in float64."""
        pairs = dims.head_dim // 2
        bias = _rope_start(self.base, dims.head_dim, self.exponent) if self.init == "rope" else 0.0
        f = 1 / (1 + np.logaddexp(0, bias))
        if self.exponent == "power":
            increments_P = f ** np.arange(self.first_exponent, self.first_exponent + pairs)
        else:
            increments_P = np.broadcast_to(f, pairs).copy()
            if self.exponent == "free" and self.first_exponent == 0:
                increments_P[0] = 1.0
        return np.broadcast_to(increments_P, (dims.kv_heads, pairs))


class Carope(RotaryEncoding):
    """Context-aware rotary position embedding (arXiv 2507.23083, section 2).

    Replaces a rotary call:

        rope = Carope(model_dim, kv_heads, head_dim, init="rope", rngs=rngs)
        q, k = rope(q, k, x)
        q, k, carry = rope(q, k, x, carry=rope.initial_carry(batch))   # decoding

    Args:
      model_dim: features of x, which the frequencies are projected from.
      kv_heads: key/value heads: a cached key has one rotation, so its query group shares it. (With
        fewer of them than heads this departs from the paper's one frequency a query head.)
      head_dim: features of a head.
      rngs: for the random W.
      options: the fields of `CaropeConfig`.

    Raises:
      ValueError: an odd head_dim, an unknown option, or `init="rope"` where RoPE is not reachable
        (`exponent="shared"`, `first_exponent=1`).
    """

    def __init__(
        self, model_dim: int, kv_heads: int, head_dim: int, *, rngs: nnx.Rngs, **options: Any
    ) -> None:
        dims = HeadDims(model_dim=model_dim, kv_heads=kv_heads, head_dim=head_dim)
        self.config: CaropeConfig
        super().__init__(CaropeConfig(**options), dims, rngs)

    def log_frequency(self, x: Float[Array, "B T D"]) -> Float[Array, "B T K *P"]:
        """Float32 log f of each token, as the layer uses it (the control applied)."""
        return self.config.log_frequency(self.weights, x)


def _constant(values: Float[np.ndarray, "..."]) -> Callable[..., Array]:
    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jnp.broadcast_to(jnp.asarray(values, dtype), shape)

    return init


def _rope_start(base: float, head_dim: int, exponent: Exponent) -> Float[np.ndarray, "..."]:
    """The bias at which CARoPE is RoPE: of theta_1, or pair by pair."""
    if exponent != "free":
        return np.asarray(rope_bias(base ** (-2 / head_dim)))
    frequencies_P = base ** (-np.arange(0, head_dim, 2) / head_dim)
    # Pair 0 turns by 1 whatever its logit, and no logit gives 1.
    return np.concatenate([[0.0], rope_bias(frequencies_P[1:])])


def _frequency_spread(
    log_f: Array, valid_BT: Array | None, axis_name: str | None
) -> dict[str, Array]:
    """Mean of f, and its standard deviation over tokens, averaged over heads (radians a token)."""

    def total(x: Array) -> Array:
        return x if axis_name is None else jax.lax.psum(x, axis_name)

    f = jnp.exp(log_f)
    weight = jnp.ones(f.shape[:2]) if valid_BT is None else valid_BT.astype(jnp.float32)
    # All padding has no mean: 0, not a division by it.
    weight = weight / jnp.maximum(total(weight.sum()), 1)
    weight = weight.reshape(*f.shape[:2], *([1] * (f.ndim - 2)))
    mean = total((weight * f).sum((0, 1)))
    variance = total((weight * (f - mean) ** 2).sum((0, 1)))
    return {"f_mean": mean.mean(), "f_std": jnp.sqrt(variance).mean()}
