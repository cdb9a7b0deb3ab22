"""Causal attention over packed, padded or plain rows."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from carope_jax.layers import AttentionEncoding, AttentionInput, Segmentation
from carope_jax.models._backends import attend, choose_attention
from carope_jax.models._cache import Cache
from carope_jax.models._config import ModelConfig
from carope_jax.models._dense import Dense
from carope_jax.models._encode import encode
from carope_jax.models._sharding import Sharding
from carope_jax.positions import project, score_bias

# B batch, T time, D model, H query heads, K key/value heads, N head dim.


class SelfAttention(nnx.Module):
    """Multi-head (or grouped-query) causal self-attention around a positional encoding."""

    def __init__(self, config: ModelConfig, *, sharding: Sharding, rngs: nnx.Rngs) -> None:
        dims = config.dims
        query_dim, kv_dim = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
        dense = functools.partial(Dense, config, sharding=sharding, rngs=rngs)
        self.query = dense(dims.model_dim, query_dim, ("embed", "heads"))
        self.key = dense(dims.model_dim, kv_dim, ("embed", "kv_heads"))
        self.value = dense(dims.model_dim, kv_dim, ("embed", "kv_heads"))
        self.out = dense(query_dim, dims.model_dim, ("heads", "embed"), residual=True)
        # Zeros need no key, so that the other weights start as they do without it.
        self.value_gate_kernel = (
            nnx.Param(jnp.zeros((dims.model_dim, dims.kv_heads)), axes=("embed", "kv_heads"))
            if config.value_gate
            else None
        )
        # A key of its own, drawn whatever it does with it: the other weights start alike.
        own_rngs = nnx.Rngs(params=rngs.params())
        self.encoding = AttentionEncoding(config.encoding, dims, rngs=own_rngs)
        self.head_dim, self.config = dims.head_dim, config
        self.sharding = sharding

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        embedding_BTD: Float[Array, "B T D"],
        segmentation: Segmentation,
    ) -> tuple[Float[Array, "B T D"], Mapping[str, Array]]:
        """The attention's output, and the encoding's measurements.

        Args:
          x_BTD: the block's normalised input.
          embedding_BTD: the token embeddings, for encodings that look at them.
          segmentation: which tokens belong together.
        """
        q_BTHN, k_BTKN, v_BTKN = self._project(x_BTD)
        given = AttentionInput(q_BTHN, k_BTKN, x_BTD, embedding_BTD, segmentation)
        rotated = encode(self.encoding, given, self.sharding)
        out_BTHN = attend(
            choose_attention(self.config, self.sharding, x_BTD.shape[1]),
            rotated,
            v_BTKN,
            segmentation.segment_ids,
            self.sharding,
        )
        return self._merge_heads(out_BTHN), rotated.measurements

    def decode(
        self,
        x_BTD: Float[Array, "B T D"],
        embedding_BTD: Float[Array, "B T D"],
        segmentation: Segmentation,
        cache: Cache,
        layer: Int[Array, ""],
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """The attention's output for tokens that come after those of the cache.

        Args:
          x_BTD: the block's normalised input.
          embedding_BTD: the token embeddings, for encodings that look at them.
          segmentation: where the tokens are, as `Cache.read` says.
          cache: the cache that `Cache.read` returned, the earlier layers' keys already in it.
          layer: which layer of the cache is this one's.
        """
        q_BTHN, k_BTKN, v_BTKN = self._project(x_BTD)
        state = cache.layers.of_layer(layer).state
        given = AttentionInput(q_BTHN, k_BTKN, x_BTD, embedding_BTD, segmentation, state)
        rotated = self.encoding(given)
        slot = cache.filled - x_BTD.shape[1]
        cache = cache._replace(layers=cache.layers.write(layer, slot, rotated, v_BTKN))
        memory = cache.layers.of_layer(layer)
        bias_BHTS = None
        if rotated.coordinate is not None and memory.coordinates is not None:
            bias_BHTS = score_bias(rotated.coordinate, memory.coordinates)
        out_BTHN = jax.nn.dot_product_attention(
            rotated.q,
            memory.keys,
            memory.values,
            bias=bias_BHTS,
            mask=cache.mask(x_BTD.shape[1]),
            implementation="cudnn" if self.config.attention == "cudnn" else "xla",
        )
        return self._merge_heads(out_BTHN), cache

    def _project(self, x_BTD: Array) -> tuple[Array, Array, Array]:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        v_BTKN = self.value(x_BTD).reshape(heads)
        if self.value_gate_kernel is not None:
            gate_BTK = 2 * jax.nn.sigmoid(project(x_BTD, self.value_gate_kernel[...]))
            v_BTKN *= gate_BTK[..., None].astype(v_BTKN.dtype)
        return (
            self._constrain(self.query(x_BTD).reshape(heads), "heads"),
            self._constrain(self.key(x_BTD).reshape(heads), "kv_heads"),
            self._constrain(v_BTKN, "kv_heads"),
        )

    def _merge_heads(self, out_BTHN: Array) -> Array:
        return self.out(out_BTHN.reshape(*out_BTHN.shape[:2], -1))

    def _constrain(self, x: Array, heads: str) -> Array:
        return self.sharding.constrain(x, "batch", "time", heads, "head_dim")
