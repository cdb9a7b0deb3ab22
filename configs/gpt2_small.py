r"""The paper's small model (124M) on FineWeb-Edu, with its settings.

The text's "10 heads" does not divide 768: 12 are used. The data is prepared once:

    python -m carope_jax.data.prepare --input 'fineweb-edu/*.parquet' --tokenizer gpt2 \
        --output data/fineweb-edu
"""

from carope_jax.data import DataConfig
from carope_jax.models import ModelConfig
from carope_jax.training import CheckpointConfig, Experiment, OptimizerConfig, TrainingConfig

experiment = Experiment(
    name="gpt2_small (124M)",
    model=ModelConfig(
        position="carope",
        num_layers=12,
        model_dim=768,
        num_heads=12,
        vocab_size=50304,
        dtype="bfloat16",
    ),
    # 1,024 windows of 512 are the paper's 524,288 tokens an update.
    data=DataConfig(corpus="data/fineweb-edu", tokenizer="gpt2", length=512, batch_size=1024),
    optimizer=OptimizerConfig(),
    training=TrainingConfig(
        steps=19_000, micro_batches=32, log_every=10, eval_every=1000, eval_tokens=2**20
    ),
    checkpoint=CheckpointConfig(every=1000, keep=3, keep_period=5000),
)
