"""Causal attention over packed, padded or plain rows."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from carope_jax.layers import Segmentation
from carope_jax.models._config import ModelConfig
from carope_jax.models._dense import Dense
from carope_jax.models._sharding import Sharding

# B batch, T time, D model, H query heads, K key/value heads, N head dim.


class SelfAttention(nnx.Module):
    """Multi-head (or grouped-query) causal self-attention around a positional encoding."""

    def __init__(self, config: ModelConfig, *, sharding: Sharding, rngs: nnx.Rngs) -> None:
        dims = config.dims
        query_dim, kv_dim = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
        self.query = Dense(config, dims.model_dim, query_dim, ("embed", "heads"), rngs=rngs)
        self.key = Dense(config, dims.model_dim, kv_dim, ("embed", "kv_heads"), rngs=rngs)
        self.value = Dense(config, dims.model_dim, kv_dim, ("embed", "kv_heads"), rngs=rngs)
        self.out = Dense(
            config, query_dim, dims.model_dim, ("heads", "embed"), residual=True, rngs=rngs
        )
        # A key of its own, drawn whatever it does with it: the other weights start alike.
        self.encoding = config.encoding.in_attention(dims, nnx.Rngs(params=rngs.params()))
        self.head_dim, self.implementation = dims.head_dim, config.attention
        self.sharding = sharding

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        embedding_BTD: Float[Array, "B T D"],
        segmentation: Segmentation,
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """The attention's output, and the encoding's measurements.

        Args:
          x_BTD: the block's normalised input.
          embedding_BTD: the token embeddings, for encodings that look at them.
          segmentation: which tokens belong together.
        """
        batch, time, _ = x_BTD.shape
        heads = (batch, time, -1, self.head_dim)
        q_BTHN = self._constrain(self.query(x_BTD).reshape(heads), "heads")
        k_BTKN = self._constrain(self.key(x_BTD).reshape(heads), "kv_heads")
        v_BTKN = self._constrain(self.value(x_BTD).reshape(heads), "kv_heads")
        q_BTHN, k_BTKN, measurements = self.encoding.rotate(
            q_BTHN, k_BTKN, hidden=x_BTD, embedding=embedding_BTD, segmentation=segmentation
        )
        out_BTHN = jax.nn.dot_product_attention(
            q_BTHN,
            k_BTKN,
            v_BTKN,
            bias=self.encoding.score_bias(segmentation),
            mask=_same_segment(segmentation),
            is_causal=True,
            implementation=self.implementation,
        )
        return self.out(out_BTHN.reshape(batch, time, -1)), measurements

    def _constrain(self, x: Array, heads: str) -> Array:
        return self.sharding.constrain(x, "batch", "time", heads, "head_dim")


def _same_segment(segmentation: Segmentation) -> Array | None:
    """Which keys a query may see but for causality. Padding sees padding, so no row is empty."""
    ids_BT = segmentation.segment_ids
    return None if ids_BT is None else jnp.equal(ids_BT[:, None, :, None], ids_BT[:, None, None])
