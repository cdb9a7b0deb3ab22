"""The decoder's sizes and choices."""

import dataclasses
from typing import Literal, get_args

from carope_jax.layers import EncodingChoice, HeadDims

Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "swiglu"]
Attention = Literal["auto", "xla", "blockwise", "cudnn"]
Dtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "dots", "full"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(EncodingChoice):
    """A pre-norm GPT-2 decoder with a positional encoding of choice."""

    num_layers: int = 12
    """Blocks."""
    model_dim: int = 768
    """Width of the residual stream."""
    num_heads: int = 12
    """Query heads; divides model_dim unless head_dim is given."""
    num_kv_heads: int | None = None
    """Key/value heads (grouped-query attention); divides num_heads; as many by default."""
    head_dim: int | None = None
    """Features of a head; model_dim / num_heads by default."""
    mlp_dim: int | None = None
    """Width of the feed-forward layer; 4 model_dim by default."""
    vocab_size: int | None = None
    """Rows of the embedding; by default the tokenizer's size rounded up to a multiple of 128."""
    max_length: int | None = None
    """Rows of a learned position table; the training length by default."""
    norm: Norm = "layernorm"
    """LayerNorm (GPT-2) or RMSNorm, in float32."""
    norm_epsilon: float = 1e-5
    """Added to the variance."""
    activation: Activation = "gelu"
    """GELU (GPT-2) or SwiGLU (with a third matrix)."""
    use_bias: bool = True
    """Biases in the dense layers and LayerNorm (GPT-2)."""
    tie_embeddings: bool = True
    """Whether the output projection is the embedding's transpose."""
    init_std: float = 0.02
    """Standard deviation of the weights at initialisation (residual outputs: / sqrt(2 layers))."""
    dtype: Dtype = "float32"
    """Compute type of the dense layers and attention; parameters, norms, phases, softmax and loss
    are float32."""
    attention: Attention = "auto"
    """Implementation of the attention: one that can't run here is an error; `auto` is `blockwise`
    (tile by tile) for sharded or long sequences, else `xla`."""
    remat: Remat = "none"
    """What the backward pass recomputes: nothing, all but the matrix products, or whole blocks."""
    value_gate: bool = False
    """A control: values are multiplied by 2 sigmoid(x W), W [model_dim, kv_heads] starting at 0. As
    many parameters as CARoPE's W, given to something other than the phase."""
    loss_chunk: int | None = None
    """Tokens a device makes logits of at a time in the loss; by default as many as fill 256 MiB."""
    scan_unroll: int = 1
    """How many blocks a step of the scan over layers holds: compile time against speed."""

    def __post_init__(self) -> None:
        """Raises a ValueError that names the field and the value."""
        for name in ("num_layers", "model_dim", "num_heads", "scan_unroll"):
            _positive(name, getattr(self, name))
        for name in (
            "num_kv_heads",
            "head_dim",
            "mlp_dim",
            "vocab_size",
            "max_length",
            "loss_chunk",
        ):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for name, allowed in (
            ("norm", Norm),
            ("activation", Activation),
            ("attention", Attention),
            ("dtype", Dtype),
            ("remat", Remat),
        ):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(
                    f"{name} must be one of {get_args(allowed)}, got {getattr(self, name)!r}"
                )
        if self.head_dim is None and self.model_dim % self.num_heads:
            raise ValueError(
                f"num_heads {self.num_heads} does not divide model_dim {self.model_dim}"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads {self.kv_heads} does not divide num_heads {self.num_heads}"
            )
        self.encoding.validate(self.dims)

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def dims(self) -> HeadDims:
        """What an encoding needs to know."""
        return HeadDims(
            model_dim=self.model_dim,
            heads=self.num_heads,
            kv_heads=self.kv_heads,
            head_dim=self.model_dim // self.num_heads if self.head_dim is None else self.head_dim,
            max_length=0 if self.max_length is None else self.max_length,
        )

    @property
    def feed_forward_dim(self) -> int:
        """Width of the feed-forward layer."""
        return 4 * self.model_dim if self.mlp_dim is None else self.mlp_dim

    def resolved(self, *, vocab_size: int, length: int) -> "ModelConfig":
        """The same with nothing left to derive: what is None comes from the tokenizer and data."""
        return dataclasses.replace(
            self,
            vocab_size=-(-vocab_size // 128) * 128 if self.vocab_size is None else self.vocab_size,
            max_length=length if self.max_length is None else self.max_length,
        )

    @property
    def longest(self) -> int | None:
        """The most tokens a sequence may have; None: any number."""
        return self.encoding.longest(self.dims)


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
