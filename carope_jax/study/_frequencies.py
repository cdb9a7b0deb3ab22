"""What CARoPE's f learned: by layer, head and kind of token, over training windows."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float64, Int32

from carope_jax.data import Tokenizer
from carope_jax.layers import CaropeConfig, Segmentation
from carope_jax.models import Decoder
from carope_jax.positions import carope_increments, equivalent_base, rope_bias
from carope_jax.training import LoadedRun

# B batch, T time, V vocabulary, L layers, K key/value heads, P rotary pairs, C kinds of token.

TOKEN_KINDS = ("word start", "inside a word", "no letter")
"""What tokens are told apart by."""


def log_frequencies(decoder: Decoder, tokens: Int32[Array, "B T"]) -> list[Array]:
    """Each layer's float32 log f [B, T, K] ([B, T, K, P] for `exponent="free"`).

    Args:
      decoder: one of CARoPE, or another model made of its blocks.
      tokens: ids.
    """
    embedding = decoder.token_embedding(tokens)
    segmentation = Segmentation.of(tokens.shape[1], None)
    x = decoder.encoding(embedding, segmentation)
    graph, stacked = nnx.split(decoder.blocks)
    found = []
    for layer in range(decoder.config.num_layers):
        block = nnx.merge(graph, jax.tree.map(lambda leaf, at=layer: leaf[at], stacked))
        encoding = block.attention.encoding
        if not isinstance(encoding.config, CaropeConfig):
            raise ValueError(f"{decoder.config.position} has no frequencies that depend on tokens")
        hidden = block.attention_norm(x).astype(block.dtype)
        source = hidden if encoding.config.source == "hidden" else embedding
        found.append(encoding.config.log_frequency(encoding.weights, source))
        x, _ = block(x, embedding, segmentation)
    return found


class FrequencySums:
    """Sums over tokens, from which means and spreads are made.

    Args:
      tokenizer: tells the kinds of tokens apart.
      run: the trained model.
    """

    def __init__(self, run: LoadedRun) -> None:
        config = run.experiment.model.carope
        pairs = run.experiment.model.dims.head_dim // 2
        self._kinds_V = token_kinds(run.tokenizer)
        self._sums: dict[str, np.ndarray] = {}
        model, state = run.model, run.state

        @jax.jit
        def measure(params: Any, constants: Any, tokens: Array) -> tuple[Array, Array]:
            log_f = jnp.stack(log_frequencies(model.merge(params, constants), tokens))
            increments = jnp.stack(
                [
                    carope_increments(
                        layer,
                        pairs,
                        exponent=config.exponent,
                        first_exponent=config.first_exponent,
                    )
                    for layer in log_f
                ]
            )
            return log_f, increments.mean((1, 2))

        self._measure = lambda tokens: measure(state.params, state.constants, tokens)

    def add(self, tokens: Int32[np.ndarray, "B T"]) -> None:
        """One more batch."""
        log_f, increments_LKP = map(np.asarray, self._measure(tokens))
        log_f = log_f.astype(np.float64)
        if log_f.ndim == 5:
            # Pair 0 turns by 1 whatever its f.
            log_f = log_f[..., 1:].mean(-1)
        log_LKN = np.moveaxis(log_f, -1, 1).reshape(log_f.shape[0], log_f.shape[-1], -1)
        f_LKN = np.exp(log_LKN)
        kinds_N = self._kinds_V[tokens.ravel()]
        of_kind_CN = np.stack([kinds_N == kind for kind in range(len(TOKEN_KINDS))])
        for name, value in {
            "windows": np.asarray(1.0),
            "increments": increments_LKP.astype(np.float64),
            "tokens": np.asarray(float(f_LKN.shape[-1])),
            "f": f_LKN.sum(-1),
            "f2": (f_LKN**2).sum(-1),
            "log": log_LKN.sum(-1),
            "log2": (log_LKN**2).sum(-1),
            "of_kind": of_kind_CN.sum(-1).astype(np.float64),
            "f_of_kind": np.einsum("lkn,cn->clk", f_LKN, of_kind_CN.astype(np.float64)),
        }.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    @property
    def mean_increments(self) -> Float64[np.ndarray, "L K P"]:
        """Each head's mean increments, radians a token."""
        return self._sums["increments"] / self._sums["windows"]

    def to_json(self) -> dict[str, Any]:
        """Mean and spread of f and log f by layer and head, and the mean by kind of token."""
        sums = self._sums
        tokens = sums["tokens"]
        mean, log_mean = sums["f"] / tokens, sums["log"] / tokens
        by_kind = sums["f_of_kind"] / np.maximum(sums["of_kind"], 1)[:, None, None]
        return {
            "tokens": int(tokens),
            "mean": rounded(mean),
            "std": rounded(np.sqrt(np.maximum(sums["f2"] / tokens - mean**2, 0))),
            "log_mean": rounded(log_mean),
            "log_std": rounded(np.sqrt(np.maximum(sums["log2"] / tokens - log_mean**2, 0))),
            "mean_by_kind": dict(zip(TOKEN_KINDS, rounded(by_kind), strict=True)),
        }


def measure_frequencies(run: LoadedRun, batches: Iterable[np.ndarray]) -> FrequencySums | None:
    """Over these windows [B, T]; None for a model whose phases are not CARoPE's."""
    if run.experiment.model.position != "carope":
        return None
    sums = FrequencySums(run)
    for tokens in batches:
        sums.add(tokens)
    return sums


def token_kinds(tokenizer: Tokenizer) -> Int32[np.ndarray, " V"]:
    """Each id's place in `TOKEN_KINDS`, by what it adds to a text."""
    before = tokenizer.encode("a").tolist()
    start = len(tokenizer.decode(before))

    def kind(token: int) -> int:
        text = tokenizer.decode([*before, token])[start:]
        if not any(character.isalpha() for character in text):
            return 2
        return 0 if text[:1].isspace() else 1

    return np.asarray([kind(token) for token in range(tokenizer.vocab_size)], np.int32)


def rounded(values: np.ndarray, digits: int = 5) -> Any:
    """Nested lists of so many significant digits."""
    flat = [float(f"{value:.{digits}g}") for value in np.ravel(values).tolist()]
    return np.asarray(flat).reshape(np.shape(values)).tolist()


def frozen_like(result: Any) -> dict[str, Any]:
    """Overrides for `control="frozen"` whose f has the mean and spread that a trained CARoPE has.

    W's standard deviation and the bias (by way of `base`) are solved for, taking the logits of a
    layer-normalised input as normal: mean of f and standard deviation of log f, both averaged over
    layers and heads, are those of the trained model. What the frozen model reaches is in its own
    result: its norms' scales are trained too.

    Raises:
      ValueError: the result has no frequencies.
    """
    frequencies = _frequencies_of(result)
    mean, spread = (float(np.mean(frequencies[name])) for name in ("mean", "log_std"))
    fields = result["experiment"]
    dim = fields["model.model_dim"]
    head_dim = fields.get("model.head_dim") or dim // fields["model.num_heads"]
    bias, std = solve_logits(mean, spread)
    return {
        "model.carope.init": "rope",
        "model.carope.base": float(f"{equivalent_base(head_dim, bias):.6g}"),
        "model.carope.kernel_std": float(f"{std / dim**0.5:.4g}"),
    }


def mean_bases(result: Any) -> dict[str, Any]:
    """Overrides for `rope` with, for each head, the base of a trained CARoPE's mean f.

    The mean is over tokens and layers: an encoding's options are the same in every layer.

    Raises:
      ValueError: the result has no frequencies.
    """
    mean_K = np.mean(_frequencies_of(result)["mean"], axis=0)
    fields = result["experiment"]
    head_dim = fields.get("model.head_dim") or (
        fields["model.model_dim"] // fields["model.num_heads"]
    )
    bases = tuple(float(f"{mean ** (-head_dim / 2):.6g}") for mean in mean_K.tolist())
    return {"model.rope.head_bases": bases}


def solve_logits(mean: float, spread: float) -> tuple[float, float]:
    """Mean and standard deviation of normal logits at which f has this mean and log f this spread.

    Raises:
      ValueError: the mean is not in (0, 1), or the spread is negative or not reachable.
    """
    if not 0 < mean < 1 or not spread >= 0:
        raise ValueError(f"f can't have the mean {mean} and log f the spread {spread}")
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    weights = weights / weights.sum()

    def log_f(bias: float, std: float) -> np.ndarray:
        return -np.log1p(np.logaddexp(0, bias + std * nodes))

    def bias_at(std: float) -> float:
        low, high = -200.0, 1e6
        for _ in range(200):
            middle = (low + high) / 2
            # f falls as the logit rises.
            if weights @ np.exp(log_f(middle, std)) > mean:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def spread_at(std: float) -> float:
        values = log_f(bias_at(std), std)
        return float(np.sqrt(weights @ (values - weights @ values) ** 2))

    low, high = 0.0, 1.0
    while spread_at(high) < spread:
        high *= 2
        if high > 1e3:
            raise ValueError(f"log f can't have the spread {spread} at a mean f of {mean}")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if spread_at(middle) < spread else (low, middle)
    std = (low + high) / 2
    return (bias_at(std), std) if std > 0 else (float(rope_bias(mean)), 0.0)


def _frequencies_of(result: Any) -> Any:
    if not result.get("frequencies"):
        raise ValueError(f"the result of {result['arm']} has no frequencies of CARoPE")
    return result["frequencies"]
