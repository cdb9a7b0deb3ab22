"""The decoder: a pre-norm GPT-2 that knows three hooks of a positional encoding."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from carope_jax.layers import Encoding, Segmentation
from carope_jax.models._attention import SelfAttention
from carope_jax.models._config import ModelConfig
from carope_jax.models._dense import Dense, make_norm
from carope_jax.models._sharding import Sharding

# B batch, T time, D model, F feed-forward, V vocabulary.


class DecoderOutput(NamedTuple):
    """Next-token logits, and what the encodings measured, one number a layer."""

    logits: Float[Array, "B T V"]
    measurements: dict[str, Float[Array, " L"]]


class FeedForward(nnx.Module):
    """Two dense layers around GELU, or three in SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, *, sharding: Sharding, rngs: nnx.Rngs) -> None:
        width, hidden = config.model_dim, config.feed_forward_dim
        self.up = Dense(config, width, hidden, ("embed", "mlp"), rngs=rngs)
        gated = config.activation == "swiglu"
        self.gate = Dense(config, width, hidden, ("embed", "mlp"), rngs=rngs) if gated else None
        self.down = Dense(config, hidden, width, ("mlp", "embed"), residual=True, rngs=rngs)
        self.sharding = sharding

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The feed-forward layer's output."""
        up_BTF = self.up(x_BTD)
        if self.gate is None:
            hidden_BTF = jax.nn.gelu(up_BTF, approximate=True)
        else:
            hidden_BTF = jax.nn.silu(self.gate(x_BTD)) * up_BTF
        return self.down(self.sharding.constrain(hidden_BTF, "batch", "time", "mlp"))


class Block(nnx.Module):
    """Attention and a feed-forward layer, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, *, sharding: Sharding, rngs: nnx.Rngs) -> None:
        self.attention_norm = make_norm(config, rngs=rngs)
        self.attention = SelfAttention(config, sharding=sharding, rngs=rngs)
        self.mlp_norm = make_norm(config, rngs=rngs)
        self.mlp = FeedForward(config, sharding=sharding, rngs=rngs)
        self.dtype, self.sharding = jnp.dtype(config.dtype), sharding

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        embedding_BTD: Float[Array, "B T D"],
        segmentation: Segmentation,
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """The residual stream after this block, and the encoding's measurements."""
        normed_BTD = self.attention_norm(x_BTD).astype(self.dtype)
        attended_BTD, measurements = self.attention(normed_BTD, embedding_BTD, segmentation)
        x_BTD = self.sharding.constrain(x_BTD + attended_BTD, "batch", "time", "width")
        x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD).astype(self.dtype))
        return self.sharding.constrain(x_BTD, "batch", "time", "width"), measurements


class Decoder(nnx.Module):
    """A causal language model.

    The blocks' parameters are stacked on a leading layer axis and the forward pass is a scan over
    it, so compile time does not grow with depth.

    Args:
      config: sizes and choices, with `vocab_size` and `max_length` resolved.
      sharding: where parameters and activations live; by default, left alone.
      rngs: the stream `params` initialises the weights.

    Raises:
      ValueError: `config.vocab_size` or `max_length` is still None.
    """

    def __init__(
        self, config: ModelConfig, *, sharding: Sharding | None = None, rngs: nnx.Rngs
    ) -> None:
        if config.vocab_size is None or config.max_length is None:
            raise ValueError("vocab_size and max_length must be resolved (ModelConfig.resolved)")
        self.config, self.sharding = config, Sharding() if sharding is None else sharding
        table_init = nnx.initializers.normal(config.init_std)
        self.token_embedding = nnx.Embed(
            config.vocab_size,
            config.model_dim,
            embedding_init=nnx.with_metadata(table_init, axes=("vocab", "embed")),
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.float32,
            rngs=rngs,
        )
        # A key of their own, drawn whatever they do with it: the other weights start alike.
        encoding_rngs = nnx.Rngs(params=rngs.params())
        self.encoding: Encoding = config.encoding.in_embedding(config.dims, encoding_rngs)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, sharding=self.sharding, rngs=rngs)

        self.blocks = stack(rngs)
        self.final_norm = make_norm(config, rngs=rngs)
        self.output = (
            None
            if config.tie_embeddings
            else Dense(config, config.model_dim, config.vocab_size, ("embed", "vocab"), rngs=rngs)
        )

    def __call__(
        self, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None
    ) -> DecoderOutput:
        """Float32 next-token logits.

        Args:
          tokens: token ids below the vocabulary's size.
          segment_ids: which document each token of a packed row is of; 0 is padding. None: each
            row is one document.
        """
        # Gathered whole over its shards of the width first: the batch is split over those devices.
        table_VD = self.sharding.constrain(self._table(), "vocab", "width")
        return self.from_embedding(jnp.take(table_VD, tokens, axis=0), segment_ids)

    def from_embedding(
        self, embedding: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None = None
    ) -> DecoderOutput:
        """The same from token embeddings, for gradients with respect to them."""
        segmentation = Segmentation.of(embedding.shape[1], segment_ids)
        x_BTD = self.encoding.add_to_embedding(embedding, segmentation)
        x_BTD = self.sharding.constrain(x_BTD, "batch", "time", "width")
        graph, stacked = nnx.split(self.blocks)

        def apply_block(x_BTD: Array, state: nnx.State) -> tuple[Array, dict[str, Array]]:
            return nnx.merge(graph, state)(x_BTD, embedding, segmentation)

        x_BTD, measurements = jax.lax.scan(
            _rematerialized(apply_block, self.config.remat),
            x_BTD,
            stacked,
            unroll=self.config.scan_unroll,
        )
        return DecoderOutput(self._logits(self.final_norm(x_BTD)), measurements)

    def _table(self) -> Array:
        return self.token_embedding.embedding[...].astype(jnp.dtype(self.config.dtype))

    def _logits(self, x_BTD: Array) -> Array:
        x_BTD = x_BTD.astype(jnp.dtype(self.config.dtype))
        if self.output is not None:
            logits_BTV = self.output(x_BTD).astype(jnp.float32)
        else:
            flat = jax.lax.dot_general(
                x_BTD.reshape(-1, x_BTD.shape[-1]),
                self._table(),
                (((1,), (1,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            logits_BTV = flat.reshape(*x_BTD.shape[:2], -1)
        return self.sharding.constrain(logits_BTV, "batch", "time", "vocab")


def _rematerialized(function: Callable[..., Any], remat: str) -> Callable[..., Any]:
    match remat:
        case "full":
            return jax.checkpoint(function)
        case "dots":
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            return jax.checkpoint(function, policy=policy)
    return function
