"""A tiny decoder to test, and the whole of its forward pass once more in dense float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from carope_jax.models import Decoder, ModelConfig, Sharding

VOCAB, LENGTH = 13, 8
TINY = ModelConfig(
    num_layers=2,
    model_dim=16,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=VOCAB,
    max_length=LENGTH,
)


# What these tests cost is compilation, so code that runs once is not worth optimizing.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def abstract(config: ModelConfig, sharding: Sharding | None = None) -> Decoder:
    """A decoder of shapes."""
    return nnx.eval_shape(lambda: Decoder(config, sharding=sharding, rngs=nnx.Rngs(0)))


@functools.cache
def stirred(config: ModelConfig, sharding: Sharding | None = None) -> Decoder:
    """A decoder of random weights: at init many are 0 or 1, which would hide faults.

    They are made without running (or compiling) any initialisation.
    """
    model = abstract(config, sharding)
    rng = np.random.default_rng(0)

    def weight(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        values = rng.normal(size=variable.shape)
        scale, offset = (0.2, 1) if path[-1] == "scale" else (0.3, 0)
        return variable.replace(jnp.asarray(offset + scale * values, jnp.float32))

    graph, variables = nnx.split(model)
    flat = [(path, weight(path, v)) for path, v in nnx.to_flat_state(variables)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


@quick_jit
def logits(model: Decoder, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    return model(tokens, segment_ids).logits


def by_name(model: Decoder) -> dict[str, np.ndarray]:
    """Every weight in float64 by its path."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): np.asarray(v[...], np.float64) for path, v in flat}


def reference_logits(config: ModelConfig, w: dict[str, np.ndarray], tokens: np.ndarray):
    """Logits [B, T, V] in float64, from the equations and nothing of the package."""
    x = w["token_embedding/embedding"][tokens]
    time, width = x.shape[1:]
    if config.position == "learned":
        x = x + w["encoding/table"][:time]
    if config.position == "sinusoidal":
        rates = 1e4 ** (-np.arange(0, width, 2) / width)
        angles = np.arange(time)[:, None] * rates
        waves = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(time, width)
        x = x + config.sinusoidal.amplitude * waves
    for layer in range(config.num_layers):
        block = {
            name.removeprefix("blocks/"): value[layer]
            for name, value in w.items()
            if name.startswith("blocks/")
        }
        x = x + _attention(config, block, _norm(config, block, "attention_norm", x))
        x = x + _feed_forward(config, block, _norm(config, block, "mlp_norm", x))
    x = _norm(config, w, "final_norm", x)
    if config.tie_embeddings:
        return x @ w["token_embedding/embedding"].T
    return _dense(w, "output", x)


def _norm(config, w, name, x):
    if config.norm == "rmsnorm":
        return (
            x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * w[f"{name}/scale"]
        )
    centred = x - x.mean(-1, keepdims=True)
    out = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.norm_epsilon)
    return out * w[f"{name}/scale"] + w.get(f"{name}/bias", 0)


def _dense(w, name, x):
    return x @ w[f"{name}/linear/kernel"] + w.get(f"{name}/linear/bias", 0)


def _feed_forward(config, w, x):
    up = _dense(w, "mlp/up", x)
    if config.activation == "gelu":
        hidden = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    else:
        gate = _dense(w, "mlp/gate", x)
        hidden = gate / (1 + np.exp(-gate)) * up
    return _dense(w, "mlp/down", hidden)


def _attention(config, w, x):
    batch, time, _ = x.shape
    heads, kv_heads, size = config.dims.heads, config.dims.kv_heads, config.dims.head_dim
    q = _dense(w, "attention/query", x).reshape(batch, time, heads, size)
    k = _dense(w, "attention/key", x).reshape(batch, time, kv_heads, size)
    v = _dense(w, "attention/value", x).reshape(batch, time, kv_heads, size)
    k, v = (np.repeat(a, heads // kv_heads, axis=2) for a in (k, v))
    own = {
        name.removeprefix("attention/encoding/"): value
        for name, value in w.items()
        if name.startswith("attention/encoding/")
    }
    if config.position in _PHASES:
        phases = _PHASES[config.position](own, x, q, size, kv_heads)
        phases = np.repeat(phases, heads // phases.shape[2], axis=2)
        q, k = _turned(q, phases), _turned(k, phases)
    scores = np.einsum("bthn,bshn->bhts", q, k) / np.sqrt(size)
    if config.position == "alibi":
        slopes = 2.0 ** (-8 / heads * np.arange(1, heads + 1))
        scores -= slopes[:, None, None] * (np.arange(time)[:, None] - np.arange(time))
    if config.position == "fox":
        forget = -np.log1p(np.exp(-(x @ own["kernel"] + own["bias"])))
        for i, j in np.ndindex(time, time):
            scores[..., i, j] += forget[:, j + 1 : i + 1].sum(1)
    scores = np.where(np.tril(np.ones((time, time), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bhts,bshn->bthn", weights, v)
    return _dense(w, "attention/out", out.reshape(batch, time, -1))


def _frequencies(size, base=1e4):
    return base ** (-np.arange(0, size, 2) / size)


def _rope(w, x, q, size, kv_heads):
    return np.arange(x.shape[1])[None, :, None, None] * _frequencies(size)


def _carope(w, x, q, size, kv_heads):
    f = 1 / (np.log1p(np.exp(x @ w["kernel"] + w["bias"])) + 1)
    return np.cumsum(f[..., None] ** np.arange(size // 2), axis=1)


def _slow(size):
    return _frequencies(size) < 2 * np.pi / LENGTH


def _hope(w, x, q, size, kv_heads):
    return np.where(_slow(size), 0, _rope(w, x, q, size, kv_heads))


def _darope(w, x, q, size, kv_heads):
    share = (np.arange(x.shape[1]) + 0.5) / LENGTH
    beta = np.log(share / (1 - share))[:, None]
    coordinate = LENGTH / (1 + np.exp(-(x @ w["kernel"] + w["prior"] * beta)))
    fast = _rope(w, x, q, size, kv_heads)
    return np.where(_slow(size), coordinate[..., None] * _frequencies(size), fast)


def _selective(w, x, q, size, kv_heads):
    q = q / np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6)
    queries = q.reshape(*q.shape[:2], kv_heads, -1)
    projected = np.einsum("btkx,kxp->btkp", queries, w["kernel"])
    omega = np.zeros_like(projected)
    for tap, weight in enumerate(w["conv_kernel"]):
        omega[:, tap:] += projected[:, : projected.shape[1] - tap] * weight
    return np.cumsum(omega * _frequencies(size, 5e5), axis=1)


_PHASES = {
    "rope": _rope,
    "carope": _carope,
    "hope": _hope,
    "darope": _darope,
    "selective_rope": _selective,
}


def _turned(x, phases):
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(phases), np.sin(phases)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
