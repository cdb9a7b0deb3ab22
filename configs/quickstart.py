"""A 1M-parameter GPT-2 on the King James Bible: what `make quickstart` trains for each encoding.

Training length 128, head_dim 64; eight whole books are held out. About a minute on 2 CPU cores.
"""

from carope_jax.data import DataConfig
from carope_jax.models import ModelConfig
from carope_jax.training import CheckpointConfig, Experiment, OptimizerConfig, TrainingConfig

experiment = Experiment(
    name="quickstart",
    model=ModelConfig(position="carope", num_layers=4, model_dim=128, num_heads=2, scan_unroll=4),
    data=DataConfig(corpus="kjv", tokenizer="train:2048", length=128, batch_size=8),
    optimizer=OptimizerConfig(learning_rate=3e-3, final_learning_rate=3e-4, warmup_steps=10),
    training=TrainingConfig(steps=160, log_every=20, eval_every=0),
    checkpoint=CheckpointConfig(every=80, keep=2),
)
