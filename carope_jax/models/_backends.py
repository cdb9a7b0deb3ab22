"""Attention by name: which implementation computes it, and the call."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from carope_jax.layers import Rotated
from carope_jax.models._blockwise import blockwise_attention
from carope_jax.models._config import Attention, ModelConfig
from carope_jax.models._sharding import Sharding
from carope_jax.positions import score_bias

# B batch, T time, H query heads, K key/value heads, N head dim.

_LONG = 4096


def choose_attention(config: ModelConfig, sharding: Sharding, length: int) -> Attention:
    """The implementation that is meant by the config's `attention`.

    `auto` is `blockwise` where the sequence is sharded or longer than 4,096 tokens, where a matrix
    of all scores would fill the memory; else `xla`.

    Args:
      config: of the model.
      sharding: where it lives.
      length: tokens of a sequence.

    Raises:
      ValueError: the one asked for can't do it.
    """
    if config.attention == "auto":
        return "blockwise" if sharding.time_axis is not None or length > _LONG else "xla"
    if config.attention == "cudnn" and sharding.time_axis is not None:
        raise ValueError(
            "attention 'cudnn' takes whole sequences and the mesh shards them over context "
            f"{sharding.ways('time')}: choose blockwise or auto"
        )
    return config.attention


def attend(
    name: Attention,
    rotated: Rotated,
    v: Float[Array, "B T K N"],
    segment_ids: Int[Array, "B T"] | None,
    sharding: Sharding,
) -> Float[Array, "B T H N"]:
    """Causal attention within segments, by one implementation.

    Args:
      name: what `choose_attention` returned.
      rotated: queries, keys and the coordinate that biases their scores, of the encoding.
      v: values.
      segment_ids: padding (0) sees padding, so no row is empty. None: each row is one segment.
      sharding: where they live.
    """
    coordinate_BTH = rotated.coordinate
    if name == "blockwise":
        return blockwise_attention(
            rotated.q,
            rotated.k,
            v,
            segment_ids=segment_ids,
            coordinate=coordinate_BTH,
            sharding=sharding,
        )
    mask_BHTS = None
    if segment_ids is not None:
        mask_BHTS = jnp.equal(segment_ids[:, None, :, None], segment_ids[:, None, None])
    return jax.nn.dot_product_attention(
        rotated.q,
        rotated.k,
        v,
        bias=None if coordinate_BTH is None else score_bias(coordinate_BTH, coordinate_BTH),
        mask=mask_BHTS,
        is_causal=True,
        implementation="cudnn" if name == "cudnn" else "xla",
    )
