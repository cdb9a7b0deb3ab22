"""A positional encoding over a sequence that may be sharded over devices."""

import jax
from jax.sharding import PartitionSpec

from carope_jax.layers import AttentionEncoding, AttentionInput, Rotated, Weights
from carope_jax.models._sharding import Sharding


def encode(encoding: AttentionEncoding, given: AttentionInput, sharding: Sharding) -> Rotated:
    """What becomes of queries and keys; over a sharded time axis each device turns its tokens.

    Args:
      encoding: the layer's.
      given: of the whole sequence.
      sharding: where it lives. An encoding that can't be given a shard (`shards_time`) gets the
        sequence whole, and the compiler gathers it.
    """
    axis, config, dims = sharding.time_axis, encoding.config, encoding.dims
    if axis is None or not config.shards_time:
        return encoding(given)

    def of_shard(weights: Weights, given: AttentionInput) -> tuple:
        rotated = config.rotate(weights, dims, given._replace(axis_name=axis))
        return (rotated.q, rotated.k, rotated.coordinate), rotated.measurements

    over_time = PartitionSpec(None, axis)
    (q, k, coordinate), measurements = jax.shard_map(
        of_shard,
        mesh=sharding.mesh,
        in_specs=(PartitionSpec(), over_time),
        out_specs=(over_time, PartitionSpec()),
        axis_names={axis},
    )(encoding.weights, given)
    return Rotated(q, k, coordinate, measurements=measurements)
