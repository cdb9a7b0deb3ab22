"""The decoder: a pre-norm GPT-2 that knows three hooks of a positional encoding."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from carope_jax.layers import EmbeddingEncoding, Segmentation
from carope_jax.models._attention import SelfAttention
from carope_jax.models._cache import Cache, empty_cache
from carope_jax.models._config import ModelConfig
from carope_jax.models._dense import Dense, make_norm
from carope_jax.models._head import Head, HeadOptions, each_nll, summed_nll
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
        dense = functools.partial(Dense, config, sharding=sharding, rngs=rngs)
        self.up = dense(width, hidden, ("embed", "mlp"))
        gated = config.activation == "swiglu"
        self.gate = dense(width, hidden, ("embed", "mlp")) if gated else None
        self.down = dense(hidden, width, ("mlp", "embed"), residual=True)
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
    ) -> tuple[Float[Array, "B T D"], Mapping[str, Array]]:
        """The residual stream after this block, and the encoding's measurements."""
        normed_BTD = self.attention_norm(x_BTD).astype(self.dtype)
        attended_BTD, measurements = self.attention(normed_BTD, embedding_BTD, segmentation)
        return self._add(x_BTD, attended_BTD), measurements

    def decode(
        self,
        x_BTD: Float[Array, "B T D"],
        embedding_BTD: Float[Array, "B T D"],
        segmentation: Segmentation,
        cache: Cache,
        layer: Int[Array, ""],
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """The same for tokens that come after those of the cache, and the cache with them."""
        normed_BTD = self.attention_norm(x_BTD).astype(self.dtype)
        attended_BTD, cache = self.attention.decode(
            normed_BTD, embedding_BTD, segmentation, cache, layer
        )
        return self._add(x_BTD, attended_BTD), cache

    def _add(self, x_BTD: Array, attended_BTD: Array) -> Array:
        x_BTD = self.sharding.constrain(x_BTD + attended_BTD, "batch", "time", "width")
        x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD).astype(self.dtype))
        return self.sharding.constrain(x_BTD, "batch", "time", "width")


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
        self.encoding = EmbeddingEncoding(config.encoding, config.dims, rngs=encoding_rngs)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, sharding=self.sharding, rngs=rngs)

        self.blocks = stack(rngs)
        self.final_norm = make_norm(config, rngs=rngs)
        self.output = (
            None
            if config.tie_embeddings
            else Dense(
                config,
                config.model_dim,
                config.vocab_size,
                ("embed", "vocab"),
                sharding=self.sharding,
                rngs=rngs,
            )
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
        return self.from_embedding(self._embed(tokens), segment_ids)

    def from_embedding(
        self, embedding: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None = None
    ) -> DecoderOutput:
        """The same from token embeddings, for gradients with respect to them."""
        x_BTD, measurements = self._activations(embedding, segment_ids)
        return DecoderOutput(self._logits(x_BTD), dict(measurements))

    def summed_nll(
        self,
        tokens: Int[Array, "B T"],
        targets: Int[Array, "B T"],
        counted: Bool[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, ""], Mapping[str, Float[Array, " L"]]]:
        """Summed loss of the targets that count (float32 nats), and the encodings' measurements.

        The logits are made a few at a time (`ModelConfig.loss_chunk`), and no array has all of
        them. Differentiable once, in reverse mode.
        """
        x_BTD, measurements = self._activations(self._embed(tokens), segment_ids)
        x_BTD = x_BTD.astype(jnp.dtype(self.config.dtype))
        total = summed_nll(self._head_options(), x_BTD, self._head(), targets, counted)
        return total, measurements

    def nll(
        self,
        tokens: Int[Array, "B T"],
        targets: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T"]:
        """Each target's loss in float32 nats, the logits made a few at a time; for evaluation."""
        x_BTD, _ = self._activations(self._embed(tokens), segment_ids)
        x_BTD = x_BTD.astype(jnp.dtype(self.config.dtype))
        return each_nll(self._head_options(), x_BTD, self._head(), targets)

    def _activations(
        self, embedding: Array, segment_ids: Array | None
    ) -> tuple[Array, Mapping[str, Array]]:
        """What the output projection is given, and the measurements."""
        segmentation = Segmentation.of(embedding.shape[1], segment_ids)
        x_BTD = self.encoding(embedding, segmentation)
        x_BTD = self.sharding.constrain(x_BTD, "batch", "time", "width")
        graph, stacked = nnx.split(self.blocks)

        def apply_block(x_BTD: Array, state: nnx.State) -> tuple[Array, Mapping[str, Array]]:
            return nnx.merge(graph, state)(x_BTD, embedding, segmentation)

        x_BTD, measurements = jax.lax.scan(
            _rematerialized(apply_block, self.config.remat),
            x_BTD,
            stacked,
            unroll=self.config.scan_unroll,
        )
        return self.final_norm(x_BTD), measurements

    def empty_cache(self, batch: int, slots: int) -> Cache:
        """A cache before the first token, of `slots` tokens a row, padding counted.

        Raises:
          ValueError: no rows or slots, or more slots than the encoding has positions.
        """
        return empty_cache(self.config, batch, slots)

    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache,
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        last_only: bool = False,
    ) -> tuple[Float[Array, "B T V"], Cache]:
        """Float32 next-token logits of tokens that come after those of the cache.

        Prefill and decoding are this one call, with many tokens or one; in any chunks the logits
        are those of the whole, up to the last bits of its matrix products.

        Args:
          tokens: token ids below the vocabulary's size.
          cache: `empty_cache` at first, then the one returned.
          segment_ids: 0 at padding, which is skipped wherever it is: rows of different lengths are
            padded on either side; other ids as in `__call__`. None: all tokens count.
          last_only: whether only each row's last token's logits are wanted: [B, 1, V].

        Returns:
          (logits, cache). Past the cache's slots they are NaN, where that is known at run time
          only.

        Raises:
          ValueError: the cache is another encoding's or batch's, or the tokens do not fit it.
        """
        cache.check(self.config, *tokens.shape)
        embedding_BTD = self._embed(tokens)
        segmentation, cache = cache.read(tokens.shape[1], segment_ids)
        x_BTD = self.encoding(embedding_BTD, segmentation)
        x_BTD = self.sharding.constrain(x_BTD, "batch", "time", "width")
        graph, stacked = nnx.split(self.blocks)

        def apply_block(
            carried: tuple[Array, Cache], of_layer: tuple[Array, nnx.State]
        ) -> tuple[tuple[Array, Cache], None]:
            (x_BTD, cache), (layer, state) = carried, of_layer
            block = nnx.merge(graph, state)
            return block.decode(x_BTD, embedding_BTD, segmentation, cache, layer), None

        layers = jnp.arange(self.config.num_layers)
        (x_BTD, cache), _ = jax.lax.scan(apply_block, (x_BTD, cache), (layers, stacked))
        if last_only:
            x_BTD = _last(x_BTD, segmentation.valid)
        logits_BTV = self._logits(self.final_norm(x_BTD))
        return jnp.where(cache.filled > cache.slots, jnp.nan, logits_BTV), cache

    def _embed(self, tokens_BT: Array) -> Array:
        # Gathered whole over its shards of the width first: the batch is split over those devices.
        table_VD = self.sharding.constrain(self._table(), "vocab", "width")
        return jnp.take(table_VD, tokens_BT, axis=0)

    def _table(self) -> Array:
        return self.token_embedding.embedding[...].astype(jnp.dtype(self.config.dtype))

    def _head(self) -> Head:
        if self.output is None:
            return Head(self.token_embedding.embedding[...])
        linear = self.output.linear
        return Head(linear.kernel[...].T, None if linear.bias is None else linear.bias[...])

    def _head_options(self) -> HeadOptions:
        return HeadOptions(self.sharding, self.config.loss_chunk)

    def _logits(self, x_BTD: Array) -> Array:
        x_BTD = x_BTD.astype(jnp.dtype(self.config.dtype))
        if self.output is not None:
            logits_BTV = self.output(x_BTD).astype(jnp.float32)
        else:
            # As in `Dense`: flattened, unless its shards would not lie together.
            rows = x_BTD.shape[:2] if self.sharding.time_axis is not None else (-1,)
            logits = jax.lax.dot_general(
                x_BTD.reshape(*rows, x_BTD.shape[-1]),
                self._table(),
                (((len(rows),), (1,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            logits_BTV = logits.reshape(*x_BTD.shape[:2], -1)
        return self.sharding.constrain(logits_BTV, "batch", "time", "vocab")


def _last(x_BTD: Array, valid_BT: Array | None) -> Array:
    """Each row's last token that counts, [B, 1, D]."""
    if valid_BT is None:
        return x_BTD[:, -1:]
    index_BT = jnp.where(valid_BT, jnp.arange(valid_BT.shape[1]), 0)
    return jnp.take_along_axis(x_BTD, index_BT.max(axis=1)[:, None, None], axis=1)


def _rematerialized(function: Callable[..., Any], remat: str) -> Callable[..., Any]:
    match remat:
        case "full":
            return jax.checkpoint(function)
        case "dots":
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            return jax.checkpoint(function, policy=policy)
    return jax.checkpoint(function, policy=_is_computed, prevent_cse=False)


def _is_computed(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Whether the backward pass keeps a value, rather than what it is a reshape or widening of.

    A scan stacks every value kept, layer by layer, and would stack one array a time for each shape
    that a matrix product took it in.
    """
    if primitive.name == "convert_element_type":
        return params["new_dtype"].itemsize <= inputs[0].dtype.itemsize
    return primitive.name != "reshape"
