"""What an encoding costs in memory: the temporaries of a decoder's gradient, by compilation.

    python benchmarks/memory.py --json memory.json

Compiles the gradient of the loss (blocks scanned, nothing rematerialised) for each encoding and
asks the compiler how much temporary memory it needs; nothing is allocated or run. `carope` is the
library's; `plain` is the same mathematics by `carope_increments`, `accumulate` and `rotate`,
differentiated step by step. `whole` has the vocabulary asked for; the [batch, length, vocabulary]
logits weigh the same in every encoding and flatter the ratios, so `blocks` has 128 words in place
of it.

Exit codes: 0 done, 2 bad input.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import tyro
from _report import Row, make_table, report
from flax import nnx
from jaxtyping import Array

from carope_jax import command
from carope_jax.layers import AttentionInput, CaropeConfig, HeadDims, Rotated, Weights
from carope_jax.models import Decoder, ModelConfig, token_nll
from carope_jax.positions import accumulate, carope_increments

# B batch, T time, D model, H query heads, K key/value heads, N head dim, P rotary pairs.

Encoding = Literal["rope", "carope", "plain", "nope"]
_FEW_WORDS = 128


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The decoder to compile, GPT-2 small's sizes by default."""

    encodings: tuple[Encoding, ...] = get_args(Encoding)
    """Which encodings; rope, which the ratios are to, among them."""
    num_layers: int = 12
    """Blocks."""
    model_dim: int = 768
    """Width of the residual stream."""
    num_heads: int = 12
    """Heads."""
    vocab_size: int = 50_304
    """Words of the whole model."""
    batch_size: int = 8
    """Sequences."""
    length: int = 512
    """Tokens of a sequence."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of the dense layers and attention."""
    json: Path | None = None
    """Write the rows there: a list of {name, value, unit}."""

    def __post_init__(self) -> None:
        """Raises a ValueError that names the field and the value."""
        if "rope" not in self.encodings:
            raise ValueError(f"encodings must have rope among them, got {self.encodings}")
        for name in ("vocab_size", "batch_size", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        self.model("rope", self.vocab_size)

    def model(self, encoding: Encoding, vocab_size: int) -> ModelConfig:
        """The decoder with this encoding and vocabulary."""
        return ModelConfig(
            position="carope" if encoding == "plain" else encoding,
            carope=PlainCarope() if encoding == "plain" else CaropeConfig(),
            num_layers=self.num_layers,
            model_dim=self.model_dim,
            num_heads=self.num_heads,
            vocab_size=vocab_size,
            max_length=self.length,
            dtype=self.dtype,
        )


class PlainCarope(CaropeConfig):
    """CARoPE by its pieces, with the derivatives that JAX makes of them."""

    def rotate(self, weights: Weights, dims: HeadDims, given: AttentionInput) -> Rotated:
        """Turned by the phases that the block's normalised input has accumulated."""
        assert given.hidden is not None
        log_f_BTK = self.log_frequency(weights, given.hidden)
        increments_BTKP = carope_increments(log_f_BTK, dims.head_dim // 2)
        phases_BTKP, carry_BKP = accumulate(
            increments_BTKP,
            given.segmentation.starts,
            given.segmentation.valid,
            given.state,
            given.axis_name,
        )
        return self.turned(given, phases_BTKP, None, carry_BKP)


def temporary_memory(config: ModelConfig, batch_size: int, length: int) -> int:
    """Bytes of the temporaries of the loss's gradient, as the compiler says.

    Raises:
      InputError: this platform's compiler does not say.
    """
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graph, *states = nnx.split(decoder, nnx.Param, ...)
    params, constants = states

    def loss(params: Any, constants: Any, inputs_BT: Array, targets_BT: Array) -> Array:
        logits_BTV = nnx.merge(graph, params, constants)(inputs_BT).logits
        return token_nll(logits_BTV, targets_BT).mean()

    tokens_BT = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
    lowered = jax.jit(jax.grad(loss)).lower(params, constants, tokens_BT, tokens_BT)
    analysis = lowered.compile().memory_analysis()
    if analysis is None:
        raise command.InputError(f"the compiler for {jax.default_backend()} tells no memory")
    return analysis.temp_size_in_bytes


def measure(arguments: Arguments) -> list[Row]:
    """Bytes and the ratio to rope's, for the whole model and for its blocks alone."""
    rows = []
    for part, vocab_size in (("whole", arguments.vocab_size), ("blocks", _FEW_WORDS)):
        memory = {
            encoding: temporary_memory(
                arguments.model(encoding, vocab_size), arguments.batch_size, arguments.length
            )
            for encoding in arguments.encodings
        }
        for encoding, size in memory.items():
            rows.append(Row(f"{part}/{encoding}/temporary", size, "B"))
            rows.append(Row(f"{part}/{encoding}/ratio to rope", size / memory["rope"], "1"))
    return rows


def main(argv: Sequence[str]) -> None:
    """Reads the arguments, compiles, reports."""
    with command.input_errors():
        arguments = tyro.cli(Arguments, description=__doc__, args=argv)
    rows = measure(arguments)
    value = {row.name: row.value for row in rows}
    table = make_table(
        f"Temporary memory of the gradient, {jax.default_backend()}, by compilation",
        ("encoding", "whole MiB", "ratio to rope", "blocks MiB", "ratio to rope"),
        [
            (
                encoding,
                *(
                    cell
                    for part in ("whole", "blocks")
                    for cell in (
                        f"{value[f'{part}/{encoding}/temporary'] / 2**20:,.1f}",
                        f"{value[f'{part}/{encoding}/ratio to rope']:.4f}",
                    )
                ),
            )
            for encoding in arguments.encodings
        ],
    )
    report(rows, [table], arguments.json)


if __name__ == "__main__":
    command.run(main)
