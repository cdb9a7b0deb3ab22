"""Text from a trained decoder: prompts in, tokens out, one compiled step a token."""

from carope_jax.generation._generate import Completion, Generator
from carope_jax.generation._sampling import SamplingConfig, sample
from carope_jax.generation._text import TextStream

__all__ = ["Completion", "Generator", "SamplingConfig", "TextStream", "sample"]
