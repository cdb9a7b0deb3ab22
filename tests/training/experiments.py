"""Small experiments and batches for the training tests."""

from pathlib import Path
from typing import Any

import numpy as np

from carope_jax.data import DataConfig
from carope_jax.models import ModelConfig
from carope_jax.training import CheckpointConfig, Experiment, OptimizerConfig, TrainingConfig

ROOT = Path(__file__).parents[2]


def small_experiment(**model: Any) -> Experiment:
    """Two narrow layers, grouped-query heads, three updates."""
    sizes = {"num_layers": 2, "model_dim": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 64}
    return Experiment(
        model=ModelConfig(**(sizes | {"position": "carope", "max_length": 16} | model)),
        data=DataConfig(corpus="synthetic", tokenizer="train:512", length=16, batch_size=8),
        optimizer=OptimizerConfig(warmup_steps=1),
        training=TrainingConfig(steps=3),
        checkpoint=CheckpointConfig(every=1),
    )


def ragged_batch(rows: int = 8, length: int = 16, vocab: int = 64) -> dict[str, np.ndarray]:
    """Tokens, and a mask that leaves each row another number of targets (some none)."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab, (rows, length + 1)).astype(np.int32)
    counted = np.arange(length)[None] < rng.integers(0, length + 1, rows)[:, None]
    counted[0] = False
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": counted}
