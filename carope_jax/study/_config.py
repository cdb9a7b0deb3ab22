"""What a study is: one Python file builds a `Study` and calls it `study`."""

import dataclasses
import difflib
import fnmatch
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from carope_jax.evaluation import PROTOCOLS, ProtocolName
from carope_jax.study._overrides import Overrides, with_overrides
from carope_jax.training import Experiment

Group = Literal["core", "others"]
PER_LENGTH = "per length"
"""As an override's value of a variant: evaluation length / training length."""


@dataclasses.dataclass(frozen=True)
class Need:
    """What an arm takes from another arm's finished run of the same seed."""

    arm: str
    """The other arm's name."""
    overrides: Callable[[Mapping[str, Any]], Overrides]
    """Overrides from that run's result (its JSON); what it raises as a ValueError is the arm's."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A trained arm evaluated once more under other options, with no training."""

    name: str
    """Appended to the arm's name in tables, after a +."""
    overrides: Overrides
    """Fields of `model` by dotted path; `PER_LENGTH` stands for length / training length. With
    `model.carope.control` mean, the trained model's mean increments are put in."""
    protocols: tuple[ProtocolName, ...] = ("same_targets",)
    """Which of the study's protocols it is evaluated under."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train, over several seeds."""

    name: str
    """Unique; a file's name too."""
    overrides: Overrides
    """Fields of the base experiment by dotted path."""
    group: Group = "core"
    """Core arms run first."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each seeds the initialisation and the order of the data. The first one's runs are the
    sweep."""
    rate_of: str | None = None
    """Another arm whose best learning rate is taken; None: the arm sweeps its own."""
    need: Need | None = None
    """What it takes from another arm's result."""
    variants: tuple[Variant, ...] = ()
    """Further evaluations of the trained model."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """How a trained arm is evaluated."""

    multiples: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Evaluation lengths in training lengths, ascending from 1."""
    protocols: tuple[ProtocolName, ...] = ("paper", "same_targets", "per_position")
    """Evaluation protocols."""
    max_anchors: int = 1024
    """Anchors of `same_targets`."""
    batch_size: int = 8
    """Windows a forward pass. (Under the shuffled control each takes the f of the one before.)"""
    frequency_batches: int = 8
    """Training batches over which f is averaged."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What could explain a subject's gain, and the arms (or variants) that stand for it."""

    name: str
    """One word for tables."""
    rivals: tuple[str, ...]
    """Arms, or `arm+variant`."""


@dataclasses.dataclass(frozen=True)
class Question:
    """An arm whose gain over the baseline is to be explained."""

    subject: str
    """The arm."""
    baseline: str
    """The arm that it is to be ahead of."""
    explanations: tuple[Explanation, ...]
    """The rival explanations."""


@dataclasses.dataclass(frozen=True)
class Study:
    """Arms over one base experiment, trained and evaluated alike.

    Raises:
      ValueError: two arms of one name, an unknown arm, field or protocol, needs in a circle, or an
        arm that its overrides make impossible; the arm is named.
    """

    name: str
    """What reports call it."""
    base: Experiment
    """What all arms share."""
    arms: tuple[Arm, ...]
    """In the order in which they run within a group."""
    rates: tuple[float, ...]
    """Learning rates of a sweep, ascending."""
    final_rate: float = 0.1
    """The last step's learning rate as a share of the arm's."""
    measurement: Measurement = Measurement()
    """Lengths and protocols."""
    questions: tuple[Question, ...] = ()
    """What the report decides."""

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two arms are called {name!r}")
            if not name or not all(c.isalnum() or c in "_-" for c in name):
                raise ValueError(f"an arm's name is letters, digits, _ and -, got {name!r}")
        if not self.rates or list(self.rates) != sorted(set(self.rates)) or self.rates[0] <= 0:
            raise ValueError(f"rates must be positive and ascend, got {self.rates}")
        multiples = self.measurement.multiples
        if not multiples or multiples[0] != 1 or list(multiples) != sorted(set(multiples)):
            raise ValueError(f"multiples must ascend from 1, got {multiples}")
        for arm in self.arms:
            self._check(arm)
        for arm in self.arms:
            self._check_needs(arm)
        for question in self.questions:
            rivals = (r for e in question.explanations for r in e.rivals)
            for name in (question.subject, question.baseline, *rivals):
                self._find(name.partition("+")[0], f"question about {question.subject}")

    def _check(self, arm: Arm) -> None:
        where = f"arm {arm.name!r}"
        if arm.group not in get_args(Group):
            raise ValueError(f"{where}: group must be one of {get_args(Group)}, got {arm.group!r}")
        if not arm.seeds or len(set(arm.seeds)) < len(arm.seeds):
            raise ValueError(f"{where}: seeds must be distinct, at least one, got {arm.seeds}")
        experiment = with_overrides(self.base, arm.overrides, where)
        labels = [variant.name for variant in arm.variants]
        for variant in arm.variants:
            label = f"{where}, variant {variant.name!r}"
            if labels.count(variant.name) > 1:
                raise ValueError(f"{where}: two variants are called {variant.name!r}")
            if any(not path.startswith("model.") for path in variant.overrides):
                raise ValueError(f"{label}: only fields of model can change after training")
            with_overrides(experiment, at_length(variant.overrides, 2.0), label)
            _check_protocols(variant.protocols, label)
        _check_protocols(self.measurement.protocols, "measurement")

    def _check_needs(self, arm: Arm) -> None:
        seen, waiting = set(), [arm.name]
        while waiting:
            current = self.arm(waiting.pop())
            for other in (current.rate_of, None if current.need is None else current.need.arm):
                if other is None:
                    continue
                needed = self._find(other, f"arm {current.name!r}")
                if other == arm.name:
                    raise ValueError(f"arm {arm.name!r} needs itself, by way of {current.name!r}")
                if not set(current.seeds) <= set(needed.seeds):
                    raise ValueError(
                        f"arm {current.name!r} has seeds {current.seeds}, and {other!r}, which it "
                        f"needs, {needed.seeds}"
                    )
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)

    def arm(self, name: str) -> Arm:
        """The arm of this name."""
        return self._find(name, "study")

    def _find(self, name: str, where: str) -> Arm:
        for arm in self.arms:
            if arm.name == name:
                return arm
        near = difflib.get_close_matches(name, [a.name for a in self.arms], n=1, cutoff=0.0)
        raise ValueError(f"{where}: there is no arm {name!r}; did you mean {near[0]!r}?")

    def matching(self, pattern: str | None) -> tuple[Arm, ...]:
        """The arms whose names match a shell pattern, or one of several with commas between.

        Raises:
          ValueError: none does.
        """
        patterns = ["*"] if pattern is None else pattern.split(",")
        found = tuple(a for a in self.arms if any(fnmatch.fnmatch(a.name, p) for p in patterns))
        if not found:
            known = ", ".join(arm.name for arm in self.arms)
            raise ValueError(f"--only {pattern} matches no arm of {known}")
        return found

    @property
    def lengths(self) -> tuple[int, ...]:
        """Evaluation lengths in tokens."""
        return tuple(self.base.data.length * m for m in self.measurement.multiples)

    def rates_of(self, arm: Arm) -> tuple[float, ...] | None:
        """The learning rates of its sweep; None: it takes another arm's best."""
        return self.rates if arm.rate_of is None else None

    def experiment(self, arm: Arm, seed: int, rate: float, needed: Overrides) -> Experiment:
        """What one run trains, not yet resolved.

        Raises:
          ValueError: the overrides are not possible; the arm is named.
        """
        overrides = {
            **arm.overrides,
            **needed,
            "name": f"{self.name}: {arm.name}",
            "training.seed": seed,
            "data.shuffle_seed": seed,
            "optimizer.learning_rate": rate,
            "optimizer.final_learning_rate": rate * self.final_rate,
        }
        return with_overrides(self.base, overrides, f"arm {arm.name!r}")


def at_length(overrides: Overrides, multiple: float) -> dict[str, Any]:
    """A variant's overrides at an evaluation length of so many training lengths."""
    return {p: multiple if value == PER_LENGTH else value for p, value in overrides.items()}


def _check_protocols(protocols: tuple[str, ...], where: str) -> None:
    for protocol in protocols:
        if protocol not in PROTOCOLS:
            raise ValueError(f"{where}: protocol must be one of {PROTOCOLS}, got {protocol!r}")


def load_study(path: Path) -> Study:
    """The `study` that a Python file builds.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it does not build a study.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no study file {path}")
    try:
        study = runpy.run_path(str(path)).get("study")
    except (ValueError, TypeError, SyntaxError, NameError, ImportError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(study, Study):
        raise ValueError(f"{path} must define `study = Study(...)`")
    return study
