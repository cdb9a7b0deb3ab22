"""Seconds on a CPU, no download: for trying things and for the tests. Learns little."""

from carope_jax.data import DataConfig
from carope_jax.models import ModelConfig
from carope_jax.training import CheckpointConfig, Experiment, OptimizerConfig, TrainingConfig

experiment = Experiment(
    name="smoke",
    model=ModelConfig(position="carope", num_layers=2, model_dim=64, num_heads=2),
    data=DataConfig(corpus="synthetic", tokenizer="train:512", length=64, batch_size=8),
    optimizer=OptimizerConfig(learning_rate=3e-3, final_learning_rate=3e-4, warmup_steps=5),
    training=TrainingConfig(steps=20, log_every=2, eval_every=10, eval_tokens=2048),
    checkpoint=CheckpointConfig(every=5, keep=10),
)
