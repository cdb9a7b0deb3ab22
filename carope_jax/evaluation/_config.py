"""What is asked of an evaluation, and of which model."""

import difflib
from dataclasses import dataclass
from typing import Literal, get_args

from carope_jax.evaluation._score import NllFunction

ProtocolName = Literal["paper", "same_targets", "per_position", "sliding"]
PROTOCOLS: tuple[str, ...] = get_args(ProtocolName)
"""The names of the protocols."""


@dataclass(frozen=True)
class EvaluationConfig:
    """One evaluation: a protocol at one or more lengths.

    Raises:
        ValueError: a field is out of range, or fields contradict each other.
    """

    lengths: tuple[int, ...]
    """Evaluation lengths in tokens, ascending, each at least 2."""

    protocol: ProtocolName = "paper"
    """paper: windows over the EOT-joined stream. same_targets: identical targets at every length.
    per_position: nll by position. sliding: every token with at least length - stride of context."""

    batch_size: int = 8
    """Windows a forward pass; no number depends on it."""

    stride: int | None = None
    """Tokens between two windows of `sliding`; a quarter of the length if not given."""

    max_anchors: int | None = 4096
    """`same_targets` draws this many anchors, uniformly and without replacement; None keeps all."""

    bootstrap_samples: int = 2000
    """Resamples behind every 95% interval."""

    seed: int = 0
    """Draws the anchors and the resamples."""

    per_unit: bool = False
    """Also give the sums behind the means, by bootstrap unit: runs can then be compared paired."""

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            near = difflib.get_close_matches(str(self.protocol), PROTOCOLS, n=1, cutoff=0.0)
            raise ValueError(
                f"protocol={self.protocol!r} is unknown; the nearest is {near[0]!r} "
                f"(of {', '.join(PROTOCOLS)})"
            )
        if not self.lengths:
            raise ValueError("lengths=() is empty: give at least one evaluation length")
        if any(length < 2 for length in self.lengths):
            raise ValueError(f"lengths={self.lengths} must each be at least 2 tokens")
        if list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"lengths={self.lengths} must ascend without duplicates")
        for name, least in (("batch_size", 1), ("bootstrap_samples", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.max_anchors is not None and self.max_anchors < 1:
            raise ValueError(f"max_anchors={self.max_anchors} must be at least 1, or None")
        if self.stride is not None:
            if self.protocol != "sliding":
                raise ValueError(
                    f"stride={self.stride} has no meaning under protocol={self.protocol!r}: "
                    "it belongs to 'sliding'"
                )
            if not 1 <= self.stride <= self.lengths[0]:
                raise ValueError(
                    f"stride={self.stride} must be between 1 and the shortest length "
                    f"{self.lengths[0]}"
                )


@dataclass(frozen=True)
class EvaluatedModel:
    """The model under evaluation, as far as a protocol needs to know it.

    Raises:
        ValueError: `train_length` or `max_length` is out of range.
    """

    nll: NllFunction
    """(inputs int32[B, T], targets int32[B, T]) -> nll float32[B, T] in nats; causal."""

    position: str
    """Name of the position encoding."""

    train_length: int
    """Context length of training, in tokens."""

    params: int
    """Number of parameters."""

    max_length: int | None = None
    """Longest input the model can read (a learned table's size); None if there is no limit."""

    def __post_init__(self) -> None:
        if self.train_length < 1:
            raise ValueError(f"train_length={self.train_length} must be at least 1")
        if self.max_length is not None and self.max_length < self.train_length:
            raise ValueError(
                f"max_length={self.max_length} is below train_length={self.train_length}"
            )

    def reaches(self, length: int) -> bool:
        """Whether the model can read `length` tokens."""
        return self.max_length is None or length <= self.max_length
