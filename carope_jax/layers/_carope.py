"""CARoPE as a layer."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from carope_jax.layers._encoding import (
    Encoding,
    EncodingConfig,
    FrozenParam,
    HeadDims,
    Rotated,
    Segmentation,
)
from carope_jax.layers._rope import check_rotary_options
from carope_jax.positions import (
    Exponent,
    Layout,
    Scaling,
    carope_increments,
    carope_log_frequency,
    carope_rotate,
    linear_scaling,
    rope_bias,
)

# B batch, T time, D model, H query heads, K key/value heads, N head dim, P rotary pairs.

Init = Literal["rope", "paper"]
"""Where training starts: "rope" (W = 0 and a bias: RoPE exactly), "paper" (W ~ N(0, 0.02))."""
Control = Literal["none", "frozen", "shuffled", "mean"]
"""What stands in for a learned, context-dependent frequency, to test the claim."""
Source = Literal["hidden", "embedding"]
"""What the frequencies depend on."""


class Carope(Encoding):
    """Context-aware rotary position embedding (arXiv 2507.23083, section 2).

    Replaces a rotary call:

        rope = Carope(model_dim, kv_heads, head_dim, init="rope", rngs=rngs)
        q, k = rope(q, k, x)
        q, k, carry = rope(q, k, x, carry=rope.initial_carry(batch))   # decoding

    Args:
      model_dim: features of x, which the frequencies are projected from.
      kv_heads: key/value heads: a cached key has one rotation, so its query group shares it.
      head_dim: features of a head.
      init: "rope": W = 0 and a bias at which CARoPE is RoPE of `base`. "paper": no bias, W ~ N(0,
        `kernel_std`). The paper's text says both.
      exponent: "power" (paper): f^i. "shared": f for every pair. "free": an f a pair.
      first_exponent: 0 (pair 0 turns 1 rad a token, as RoPE's) or 1.
      inclusive: whether a token's own increment is in its phase (paper).
      control: "none"; "frozen": W random and never trained, an accumulated random rotation (arXiv
        2606.24975); "shuffled": f of the batch's previous sequence, so that nothing of the future
        leaks; "mean": each head's mean increments in place of the context's, from the variable
        `mean_increments` [K, P], which starts at the increments of W = 0.
      base: RoPE base at which `init="rope"` starts.
      kernel_std: of W, where it is random.
      layout: which features of a head are a pair.
      interpolation: increments are divided by it; at least 1.
      rngs: for the random W.

    Raises:
      ValueError: an odd head_dim, an unknown option, or `init="rope"` where RoPE is not reachable
        (`exponent="shared"`, `first_exponent=1`).
    """

    def __init__(
        self,
        model_dim: int,
        kv_heads: int,
        head_dim: int,
        *,
        init: Init = "rope",
        exponent: Exponent = "power",
        first_exponent: int = 0,
        inclusive: bool = True,
        control: Control = "none",
        base: float = 10_000.0,
        kernel_std: float = 0.02,
        layout: Layout = "half",
        interpolation: float = 1.0,
        rngs: nnx.Rngs,
    ) -> None:
        check_rotary_options(head_dim, head_dim, base, layout, interpolation)
        _check_options(init, exponent, first_exponent, control, base)
        self.pairs, self.exponent, self.first_exponent = head_dim // 2, exponent, first_exponent
        self.inclusive, self.control, self.layout = inclusive, control, layout
        self.interpolation, self.kv_heads = interpolation, kv_heads

        outputs = (kv_heads, self.pairs) if exponent == "free" else (kv_heads,)
        axes = ("embed", "kv_heads", "pairs")[: 1 + len(outputs)]
        variable = FrozenParam if control == "frozen" else nnx.Param
        if init == "rope" and control != "frozen":
            kernel = jnp.zeros((model_dim, *outputs))
        else:
            kernel = kernel_std * jax.random.normal(rngs.params(), (model_dim, *outputs))
        self.kernel = variable(kernel, axes=axes)
        start = jnp.broadcast_to(_rope_start(base, head_dim, exponent), outputs)
        self.bias = variable(start, axes=axes[1:]) if init == "rope" else None
        if control == "mean":
            still = carope_log_frequency(
                jnp.zeros((1, 1, model_dim)), jnp.zeros_like(kernel), self._bias()
            )
            means = carope_increments(
                still, self.pairs, exponent=exponent, first_exponent=first_exponent
            )
            self.mean_increments = FrozenParam(means[0, 0], axes=("kv_heads", "pairs"))

    def __call__(
        self,
        q: Float[Array, "B T H N"],
        k: Float[Array, "B T K N"],
        x: Float[Array, "B T D"],
        *,
        starts: Bool[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        carry: UInt32[Array, "B K P"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        axis_name: str | None = None,
    ) -> tuple[Array, ...]:
        """Queries and keys turned by the phases that x has accumulated.

        Args:
          q: queries; each group of H/K shares its key/value head's phase.
          k: keys.
          x: what the frequencies depend on: the attention's input (or the token embeddings).
          starts: true at each segment's first token, for packed rows.
          valid: false at padding.
          carry: the turns accumulated so far (`initial_carry` at first); the new ones are returned.
          positions: refused: an accumulated phase has no meaning for position ids.
          axis_name: the `shard_map` axis over which time is sharded, if it is.

        Returns:
          (q', k'), or (q', k', carry) where a carry was given.

        Raises:
          ValueError: `positions` given, shapes that disagree, or `control="shuffled"` for a batch
            of one.
        """
        if positions is not None:
            raise ValueError(
                "positions have no meaning for accumulated phases: "
                "use starts, valid and carry to say where a sequence begins and goes on"
            )
        turned = self._turn(q, k, self.log_frequency(x), starts, valid, carry, axis_name)
        return turned[:2] if carry is None else turned

    def log_frequency(self, x: Float[Array, "B T D"]) -> Float[Array, "B T K *P"]:
        """Float32 log f of each token, as the layer uses it (the control applied)."""
        if self.control == "mean":
            log_increments_KP = jnp.log(self.mean_increments[...])
            return jnp.broadcast_to(log_increments_KP, (*x.shape[:2], *log_increments_KP.shape))
        log_f = carope_log_frequency(x, self.kernel[...], self._bias())
        if self.control == "shuffled":
            if x.shape[0] < 2:
                raise ValueError("control='shuffled' needs a batch of at least 2 sequences, got 1")
            log_f = jnp.roll(log_f, 1, axis=0)
        return log_f

    def initial_carry(self, batch: int) -> UInt32[Array, "B K P"]:
        """The carry before a sequence's first token: no turn at all."""
        return jnp.zeros((batch, self.kv_heads, self.pairs), jnp.uint32)

    def rotate(
        self,
        q: Float[Array, "B T H N"],
        k: Float[Array, "B T K N"],
        *,
        hidden: Float[Array, "B T D"],
        embedding: Float[Array, "B T D"],
        segmentation: Segmentation,
    ) -> Rotated:
        """The decoder's hook, with the frequencies from the block's normalised input."""
        return self._measured(q, k, hidden, segmentation)

    def _measured(self, q: Array, k: Array, x: Array, segmentation: Segmentation) -> Rotated:
        log_f = self.log_frequency(x)
        q, k, _ = self._turn(q, k, log_f, segmentation.starts, segmentation.valid, None, None)
        return Rotated(q, k, _frequency_spread(jax.lax.stop_gradient(log_f), segmentation.valid))

    def _turn(
        self,
        q: Array,
        k: Array,
        log_f: Array,
        starts: Array | None,
        valid: Array | None,
        carry: Array | None,
        axis_name: str | None,
    ) -> tuple[Array, Array, Array]:
        scaling: Scaling | None = None
        if self.interpolation != 1:
            scaling = linear_scaling(self.interpolation, self.pairs)
        mean = self.control == "mean"
        return carope_rotate(
            q,
            k,
            log_f,
            # The means are of increments, pair by pair, whatever they are the means of.
            exponent="free" if mean else self.exponent,
            first_exponent=1 if mean else self.first_exponent,
            inclusive=self.inclusive,
            layout=self.layout,
            scaling=scaling,
            starts=starts,
            valid=valid,
            carry=carry,
            axis_name=axis_name,
        )

    def _bias(self) -> Array | None:
        return None if self.bias is None else self.bias[...]


class EmbeddingCarope(Carope):
    """CARoPE in a decoder that gives it the token embeddings instead of the hidden state."""

    def rotate(
        self,
        q: Float[Array, "B T H N"],
        k: Float[Array, "B T K N"],
        *,
        hidden: Float[Array, "B T D"],
        embedding: Float[Array, "B T D"],
        segmentation: Segmentation,
    ) -> Rotated:
        """The decoder's hook, with the frequencies from the token embeddings."""
        return self._measured(q, k, embedding, segmentation)


@dataclasses.dataclass(frozen=True)
class CaropeConfig(EncodingConfig):
    """CARoPE's options: what the paper leaves open is chosen here, never in silence."""

    source: Source = "hidden"
    """What the frequencies depend on: the block's normalised input, or the token embeddings. Every
    layer has a projection of its own either way."""
    init: Init = "rope"
    """Start as RoPE exactly (W = 0 and a bias), or as the paper prints it (no bias, random W)."""
    exponent: Exponent = "power"
    """f^i (the paper), f for every pair (an ablation), or an f of its own for each pair."""
    first_exponent: int = 0
    """0: pair 0 turns 1 rad a token, as RoPE's does; 1: it turns f."""
    inclusive: bool = True
    """Whether a token's own increment is in its phase (the paper)."""
    control: Control = "none"
    """A stand-in for the learned frequency: frozen (random W), shuffled (another sequence's f), or
    mean (each head's mean increments)."""
    base: float = 10_000.0
    """The RoPE base at which init=rope starts."""
    kernel_std: float = 0.02
    """Standard deviation of W where it is random."""
    layout: Layout = "half"
    """Which features of a head are a pair: (i, i + P) or (2i, 2i + 1)."""
    interpolation: float = 1.0
    """Every increment is divided by it; at least 1."""

    def in_attention(self, dims: HeadDims, rngs: nnx.Rngs) -> Carope:
        """A `Carope` of these options."""
        layer = Carope if self.source == "hidden" else EmbeddingCarope
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del options["source"]
        return layer(dims.model_dim, dims.kv_heads, dims.head_dim, **options, rngs=rngs)

    def validate(self, dims: HeadDims) -> None:
        """Raises a ValueError for options that contradict each other or the head dim."""
        check_rotary_options(
            dims.head_dim, dims.head_dim, self.base, self.layout, self.interpolation
        )
        _check_options(self.init, self.exponent, self.first_exponent, self.control, self.base)
        if self.source not in get_args(Source):
            raise ValueError(f"source must be one of {get_args(Source)}, got {self.source!r}")


def _check_options(
    init: str, exponent: str, first_exponent: int, control: str, base: float
) -> None:
    for name, value, allowed in (
        ("init", init, get_args(Init)),
        ("exponent", exponent, get_args(Exponent)),
        ("first_exponent", first_exponent, (0, 1)),
        ("control", control, get_args(Control)),
    ):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
    if init == "rope":
        if exponent == "shared" or first_exponent == 1:
            raise ValueError(
                f"init='rope' can't be reached with exponent={exponent!r}, "
                f"first_exponent={first_exponent}: use init='paper'"
            )
        if not base > 1:
            raise ValueError(f"init='rope' needs a base above 1, got {base}")


def _rope_start(base: float, head_dim: int, exponent: Exponent) -> Float[np.ndarray, "..."]:
    """The bias at which CARoPE is RoPE: of theta_1, or pair by pair."""
    if exponent != "free":
        return np.asarray(rope_bias(base ** (-2 / head_dim)), np.float32)
    frequencies_P = base ** (-np.arange(0, head_dim, 2) / head_dim)
    # Pair 0 turns by 1 whatever its logit, and no logit gives 1.
    return np.concatenate([[0.0], rope_bias(frequencies_P[1:])]).astype(np.float32)


def _frequency_spread(log_f: Array, valid_BT: Array | None) -> dict[str, Array]:
    """Mean of f, and its standard deviation over tokens, averaged over heads (radians a token)."""
    f = jnp.exp(log_f)
    weight = jnp.ones(f.shape[:2]) if valid_BT is None else valid_BT.astype(jnp.float32)
    weight = (weight / weight.sum()).reshape(*f.shape[:2], *([1] * (f.ndim - 2)))
    mean = (weight * f).sum((0, 1))
    variance = (weight * (f - mean) ** 2).sum((0, 1))
    return {"f_mean": mean.mean(), "f_std": jnp.sqrt(variance).mean()}
