"""Training: the update, the optimizer, checkpoints, and the loop that ties them together."""

from carope_jax._interrupt import Interrupted, InterruptFlag
from carope_jax._lock import FolderInUse
from carope_jax.training._checkpoint import CheckpointConfig, Checkpoints, Restored, SaveFailed
from carope_jax.training._compare import Comparison, Difference, compare_runs
from carope_jax.training._compiled import compile_for, resolve_without_data
from carope_jax.training._config import RESUMABLE, Experiment, TrainingConfig
from carope_jax.training._distributed import (
    DistributedConfig,
    FailedElsewhere,
    interrupt_flag,
    is_first,
    start_processes,
)
from carope_jax.training._evaluate import evaluate_runs, evaluated_model
from carope_jax.training._flops import flops_per_token, peak_flops, peak_flops_of
from carope_jax.training._inputs import Inputs, read_inputs, resolve
from carope_jax.training._loop import NonFiniteLoss, train
from carope_jax.training._manifest import CheckpointCorrupt, CheckpointMismatch, check_same
from carope_jax.training._mesh import MeshConfig, make_mesh
from carope_jax.training._optimizer import OptimizerConfig, make_optimizer, make_schedule
from carope_jax.training._plan import Plan, make_plan, memory_per_device, print_facts
from carope_jax.training._records import read_metrics
from carope_jax.training._run import (
    LoadedRun,
    RunFolder,
    from_json,
    load_run,
    to_json,
    unknown_field,
)
from carope_jax.training._state import (
    Model,
    TrainState,
    abstract_model,
    abstract_state,
    batch_shapes,
    initial_state,
)
from carope_jax.training._step import (
    batch_loss,
    compile_step,
    make_nll_function,
    make_train_step,
)
from carope_jax.training._topology import Target, parse_target, target_devices

__all__ = [
    "RESUMABLE",
    "CheckpointConfig",
    "CheckpointCorrupt",
    "CheckpointMismatch",
    "Checkpoints",
    "Comparison",
    "Difference",
    "DistributedConfig",
    "Experiment",
    "FailedElsewhere",
    "FolderInUse",
    "Inputs",
    "InterruptFlag",
    "Interrupted",
    "LoadedRun",
    "MeshConfig",
    "Model",
    "NonFiniteLoss",
    "OptimizerConfig",
    "Plan",
    "Restored",
    "RunFolder",
    "SaveFailed",
    "Target",
    "TrainState",
    "TrainingConfig",
    "abstract_model",
    "abstract_state",
    "batch_loss",
    "batch_shapes",
    "check_same",
    "compare_runs",
    "compile_for",
    "compile_step",
    "evaluate_runs",
    "evaluated_model",
    "flops_per_token",
    "from_json",
    "initial_state",
    "interrupt_flag",
    "is_first",
    "load_run",
    "make_mesh",
    "make_nll_function",
    "make_optimizer",
    "make_plan",
    "make_schedule",
    "make_train_step",
    "memory_per_device",
    "parse_target",
    "peak_flops",
    "peak_flops_of",
    "print_facts",
    "read_inputs",
    "read_metrics",
    "resolve",
    "resolve_without_data",
    "start_processes",
    "target_devices",
    "to_json",
    "train",
    "unknown_field",
]
