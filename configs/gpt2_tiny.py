"""The paper's tiny model (44M) on FineWeb-Edu: `gpt2_small` with 6 layers, 8 heads, width 512."""

import dataclasses
import runpy
from pathlib import Path

from carope_jax.training import Experiment

_small: Experiment = runpy.run_path(str(Path(__file__).with_name("gpt2_small.py")))["experiment"]

experiment = dataclasses.replace(
    _small,
    name="gpt2_tiny (44M)",
    model=dataclasses.replace(_small.model, num_layers=6, model_dim=512, num_heads=8),
)
