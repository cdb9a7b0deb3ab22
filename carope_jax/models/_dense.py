"""Dense layers and norms as the decoder wants them: named axes, GPT-2's initialisation."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from carope_jax.models._config import ModelConfig
from carope_jax.models._sharding import Sharding


class Dense(nnx.Module):
    """y = x W + b over flattened tokens.

    The CPU multiplies [tokens, features] several times faster in the backward pass than
    [batch, time, features]; other platforms see no difference. A sequence sharded over devices
    is left as it is: flattened, its shards would not lie together.

    Args:
      config: the model's: initialisation, bias and compute type.
      inputs: features in.
      outputs: features out.
      axes: the kernel's logical axes.
      sharding: where activations live.
      residual: whether the output joins the residual stream: a smaller start, as in GPT-2.
      rngs: for the initialisation.
    """

    def __init__(
        self,
        config: ModelConfig,
        inputs: int,
        outputs: int,
        axes: tuple[str, str],
        *,
        sharding: Sharding,
        residual: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        std = config.init_std / (2 * config.num_layers) ** 0.5 if residual else config.init_std
        self.linear = nnx.Linear(
            inputs,
            outputs,
            use_bias=config.use_bias,
            kernel_init=nnx.with_metadata(nnx.initializers.normal(std), axes=axes),
            bias_init=nnx.with_metadata(nnx.initializers.zeros, axes=axes[1:]),
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.float32,
            rngs=rngs,
        )
        self.flattens = sharding.time_axis is None

    def __call__(self, x: Float[Array, "B T I"]) -> Float[Array, "B T O"]:
        """The layer's output in the compute type."""
        if not self.flattens:
            return self.linear(x)
        return self.linear(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


def make_norm(config: ModelConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    """The configured norm over the model's width, in float32."""
    scale_init = nnx.with_metadata(nnx.initializers.ones, axes=("width",))
    if config.norm == "rmsnorm":
        return nnx.RMSNorm(
            config.model_dim,
            epsilon=config.norm_epsilon,
            dtype=jnp.float32,
            scale_init=scale_init,
            rngs=rngs,
        )
    return nnx.LayerNorm(
        config.model_dim,
        epsilon=config.norm_epsilon,
        dtype=jnp.float32,
        use_bias=config.use_bias,
        scale_init=scale_init,
        bias_init=nnx.with_metadata(nnx.initializers.zeros, axes=("width",)),
        use_fast_variance=False,
        rngs=rngs,
    )
