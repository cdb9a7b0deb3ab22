"""An experiment: everything that decides what a run computes."""

import dataclasses

from carope_jax.data import DataConfig
from carope_jax.models import ModelConfig
from carope_jax.training._checkpoint import CheckpointConfig
from carope_jax.training._mesh import MeshConfig
from carope_jax.training._optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """How long to train, and what to say meanwhile."""

    steps: int = 1000
    """Updates in all; the learning rate's schedule ends there."""
    micro_batches: int = 1
    """Parts a batch is computed in, their gradients summed: memory against speed, same numbers."""
    seed: int = 0
    """Seed of the parameters' initialisation."""
    log_every: int = 10
    """Steps between two rows of metrics.jsonl; there is one at each checkpoint besides."""
    eval_every: int = 100
    """Steps between two validations at 1x and 2x the training length; 0: none."""
    eval_tokens: int = 32768
    """Validation tokens of such a validation at each length, taken evenly from the held-out
    documents' beginnings."""
    tensorboard: bool = True
    """Whether to write TensorBoard event files beside metrics.jsonl."""

    def __post_init__(self) -> None:
        """Raises a ValueError that names the field and the value."""
        for name, least in (
            ("steps", 1),
            ("micro_batches", 1),
            ("seed", 0),
            ("log_every", 1),
            ("eval_every", 0),
            ("eval_tokens", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """All of a run's choices. A config file builds one and calls it `experiment`."""

    name: str = "experiment"
    """What the run is called in logs and reports."""
    model: ModelConfig = ModelConfig()
    """The decoder and its positional encoding."""
    data: DataConfig = DataConfig()
    """The text, the tokenizer, the batches."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    training: TrainingConfig = TrainingConfig()
    """Steps, seed, logging."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save and what to keep."""
    mesh: MeshConfig = MeshConfig()
    """How the devices are laid out."""

    def __post_init__(self) -> None:
        """Raises a ValueError where two parts don't fit each other."""
        if self.data.batch_size % self.training.micro_batches:
            raise ValueError(
                f"micro_batches {self.training.micro_batches} does not divide "
                f"batch_size {self.data.batch_size}"
            )
        table = None if self.model.max_length is None else self.model.longest
        if table is not None and self.data.length > table:
            raise ValueError(
                f"length {self.data.length} is past the {self.model.position} table's "
                f"max_length {table}"
            )
        if self.optimizer.warmup_steps >= self.training.steps:
            raise ValueError(
                f"warmup_steps {self.optimizer.warmup_steps} must be below "
                f"steps {self.training.steps}"
            )

    @property
    def tokens_per_update(self) -> int:
        """Targets that one update averages over."""
        return self.data.batch_size * self.data.length

    def resolved(self, tokenizer_size: int) -> "Experiment":
        """The same with nothing left to derive from the tokenizer or the training length."""
        model = self.model.resolved(vocab_size=tokenizer_size, length=self.data.length)
        if model.vocab_size is not None and model.vocab_size < tokenizer_size:
            raise ValueError(
                f"vocab_size {model.vocab_size} is below the tokenizer's {tokenizer_size}"
            )
        return dataclasses.replace(self, model=model)


RESUMABLE = frozenset(
    {
        "name",
        "training.log_every",
        "training.eval_every",
        "training.eval_tokens",
        "training.tensorboard",
        "checkpoint",
        "data.workers",
        "data.prefetch",
        "mesh",
    }
)
"""What may differ when a run goes on: nothing of it changes what an update computes."""
