"""Studies: many runs from one file, one report.

python -m carope_jax.study run configs/studies/extrapolation.py --workdir runs/study
"""

from carope_jax.study._config import (
    PER_LENGTH,
    Arm,
    Explanation,
    Measurement,
    Need,
    Question,
    Study,
    Variant,
    load_study,
)
from carope_jax.study._decisions import EQUIVALENT_NATS, Decision, decide
from carope_jax.study._frequencies import (
    TOKEN_KINDS,
    frozen_like,
    log_frequencies,
    mean_bases,
    solve_logits,
)
from carope_jax.study._report import Report, write_report
from carope_jax.study._results import Results, RunKey
from carope_jax.study._run import RunCounts, Step, run_study, steps
from carope_jax.study._statistics import Difference, holm, paired_difference
from carope_jax.study._work import TrainingWorker, Worker

__all__ = [
    "EQUIVALENT_NATS",
    "PER_LENGTH",
    "TOKEN_KINDS",
    "Arm",
    "Decision",
    "Difference",
    "Explanation",
    "Measurement",
    "Need",
    "Question",
    "Report",
    "Results",
    "RunCounts",
    "RunKey",
    "Step",
    "Study",
    "TrainingWorker",
    "Variant",
    "Worker",
    "decide",
    "frozen_like",
    "holm",
    "load_study",
    "log_frequencies",
    "mean_bases",
    "paired_difference",
    "run_study",
    "solve_logits",
    "steps",
    "write_report",
]
