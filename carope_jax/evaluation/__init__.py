"""Perplexity at and beyond the training length: protocols, intervals, the table and the picture.

Everything here runs on the host, in numpy, over one injected function (`NllFunction`).
"""

from carope_jax.evaluation._bootstrap import bootstrap_difference, bootstrap_mean
from carope_jax.evaluation._config import (
    PROTOCOLS,
    EvaluatedModel,
    EvaluationConfig,
    ProtocolName,
)
from carope_jax.evaluation._plot import plot_by_position
from carope_jax.evaluation._protocols import evaluate
from carope_jax.evaluation._report import comparison_markdown, comparison_table
from carope_jax.evaluation._results import (
    Difference,
    Evaluation,
    LengthResult,
    PositionBin,
    UnitSums,
)
from carope_jax.evaluation._same_targets import RISE_TOLERANCE_NATS
from carope_jax.evaluation._score import Check, NllFunction, Progress, score
from carope_jax.evaluation._windows import Documents, Window, WindowSet

__all__ = [
    "PROTOCOLS",
    "RISE_TOLERANCE_NATS",
    "Check",
    "Difference",
    "Documents",
    "EvaluatedModel",
    "Evaluation",
    "EvaluationConfig",
    "LengthResult",
    "NllFunction",
    "PositionBin",
    "Progress",
    "ProtocolName",
    "UnitSums",
    "Window",
    "WindowSet",
    "bootstrap_difference",
    "bootstrap_mean",
    "comparison_markdown",
    "comparison_table",
    "evaluate",
    "plot_by_position",
    "score",
]
