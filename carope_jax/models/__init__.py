"""The decoder, its configuration, its loss, and where its arrays live."""

from carope_jax.models._backends import choose_attention
from carope_jax.models._blockwise import blockwise_attention
from carope_jax.models._cache import Cache, LayerMemory
from carope_jax.models._config import ModelConfig
from carope_jax.models._decoder import Decoder, DecoderOutput
from carope_jax.models._loss import count_parameters, token_nll
from carope_jax.models._sharding import MESH_AXES, AxisRules, Sharding, logical_axes

__all__ = [
    "MESH_AXES",
    "AxisRules",
    "Cache",
    "Decoder",
    "DecoderOutput",
    "LayerMemory",
    "ModelConfig",
    "Sharding",
    "blockwise_attention",
    "choose_attention",
    "count_parameters",
    "logical_axes",
    "token_nll",
]
