"""AdamW with GPT-2's recipe; every rule about a parameter goes by its name."""

import dataclasses
from typing import Any

import jax
import optax

_DECAYED = ("kernel", "embedding", "table")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) with warm-up and cosine decay; GPT-2's values."""

    learning_rate: float = 6e-4
    """At the end of the warm-up."""
    final_learning_rate: float = 6e-5
    """At the last step."""
    warmup_steps: int = 750
    """Steps over which the rate rises linearly."""
    beta1: float = 0.9
    """Decay of the gradient's mean."""
    beta2: float = 0.95
    """Decay of the gradient's mean square."""
    epsilon: float = 1e-8
    """Added to the root of the mean square."""
    weight_decay: float = 0.1
    """Of matrices and tables, not of biases and norm scales; multiplied by the learning rate."""
    clip_norm: float = 1.0
    """The gradient is scaled down to this global norm where it is above it."""
    encoding_factor: float = 1.0
    """Learning-rate factor of the kernels inside the encodings (CARoPE's W); 0 leaves them at their
    initial value."""

    def __post_init__(self) -> None:
        """Raises a ValueError that names the field and the value."""
        for name in ("learning_rate", "epsilon", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("final_learning_rate", "warmup_steps", "weight_decay", "encoding_factor"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of each update, counted from 0: the first one is not zero."""
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=steps,
        end_value=config.final_learning_rate,
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clip, Adam, decoupled weight decay by name, the encodings' factor, schedule."""
    factor = config.encoding_factor

    def scale(updates: Any, params: Any) -> Any:
        del params
        return jax.tree_util.tree_map_with_path(
            lambda path, u: u * factor if in_encoding_group(path) else u, updates
        )

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
        optax.add_decayed_weights(
            config.weight_decay,
            mask=lambda params: jax.tree_util.tree_map_with_path(
                lambda p, _: is_decayed(p), params
            ),
        ),
        optax.stateless(scale),
        optax.scale_by_learning_rate(make_schedule(config, steps)),
    )


def is_decayed(path: tuple[Any, ...]) -> bool:
    """Whether weight decay applies to the parameter at this path: by its name, as stacked layers
    make every array's rank one more."""
    return path[-1].key.endswith(_DECAYED)


def in_encoding_group(path: tuple[Any, ...]) -> bool:
    """Whether the parameter at this path is a kernel of an attention layer's encoding."""
    keys = [entry.key for entry in path]
    return keys[-1].endswith("kernel") and "encoding" in keys
