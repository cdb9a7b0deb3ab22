"""A model small enough to be checked by hand, and corpora for it."""

import numpy as np
from hypothesis import strategies as st

from carope_jax.evaluation import EvaluatedModel

EOT = 9


def token_nll(context: list[int], target: int) -> float:
    """Depends on every context token, on their number and on the target; sums of it are exact."""
    return ((3 * sum(context) + 7 * len(context) + 5 * target) % 101) / 16


def toy_nll(inputs_BT: np.ndarray, targets_BT: np.ndarray) -> np.ndarray:
    assert inputs_BT.dtype == targets_BT.dtype == np.int32
    contexts_T = 1 + np.arange(inputs_BT.shape[1])
    mixed_BT = 3 * np.cumsum(inputs_BT, axis=1) + 7 * contexts_T + 5 * targets_BT
    return ((mixed_BT % 101) / 16).astype(np.float32)


def rough_nll(inputs_BT: np.ndarray, targets_BT: np.ndarray) -> np.ndarray:
    """As `toy_nll`, with all float32 bits in use, so that the order of a sum shows."""
    return np.sin(1 + toy_nll(inputs_BT, targets_BT)).astype(np.float32)


def toy_model(train_length: int = 8, **options) -> EvaluatedModel:
    options = {"nll": toy_nll, "position": "toy", "params": 1234, **options}
    return EvaluatedModel(train_length=train_length, **options)


def corpus(sizes: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, EOT, size=size).astype(np.int32) for size in sizes]


document_sizes = st.lists(st.integers(1, 60), min_size=1, max_size=6)
