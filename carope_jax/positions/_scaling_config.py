"""Which scaling rule, as a configuration or as a Hugging Face model's configuration states it."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Literal, get_args

from carope_jax.positions._scaling import (
    Scaling,
    check_count,
    check_factor,
    check_llama3,
    check_yarn,
    dynamic_ntk_scaling,
    linear_scaling,
    llama3_scaling,
    ntk_scaling,
    yarn_scaling,
)

ScalingRule = Literal["none", "linear", "ntk", "dynamic", "yarn", "llama3"]
"""The rules: none, position interpolation, NTK-aware, dynamic NTK, YaRN, Llama 3.1's."""

_REQUIRED: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor", "original_length", "length"),
    "yarn": ("factor", "original_length"),
    "llama3": ("factor", "original_length", "low_frequency_factor", "high_frequency_factor"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": (
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


@dataclasses.dataclass(frozen=True)
class ScalingConfig:
    """A rule that extends a rotary encoding past its training length, and what the rule needs.

    Raises:
      ValueError: an unknown rule, a field that the rule does not use or one missing that it needs,
        a number out of range.
    """

    rule: ScalingRule = "none"
    """none; linear: position interpolation; ntk: NTK-aware; dynamic: dynamic NTK; yarn; llama3."""
    factor: float = 1.0
    """How many times the training length is to be reached (every rule but none)."""
    original_length: int | None = None
    """Tokens of the training length (dynamic, yarn, llama3)."""
    length: int | None = None
    """Tokens of the longest sequence that the frequencies are for; a longer one is refused
    (dynamic)."""
    beta_fast: float | None = None
    """Pairs that turn so often over the training length keep their frequency; 32 by default
    (yarn)."""
    beta_slow: float | None = None
    """Pairs that turn no more often have it divided by the factor; 1 by default (yarn)."""
    attention_factor: float | None = None
    """What q and k are multiplied by; 0.1 ln(factor) + 1 by default (yarn)."""
    mscale: float | None = None
    """DeepSeek's, with mscale_all_dim: the attention factor is (0.1 mscale ln(factor) + 1) /
    (0.1 mscale_all_dim ln(factor) + 1) (yarn)."""
    mscale_all_dim: float | None = None
    """See mscale (yarn)."""
    truncate: bool | None = None
    """The betas' pairs are rounded outwards to whole ones; true by default (yarn)."""
    low_frequency_factor: float | None = None
    """Pairs that turn at most so often over the training length have their frequency divided by
    the factor (llama3)."""
    high_frequency_factor: float | None = None
    """Pairs that turn at least so often keep it (llama3)."""

    def __post_init__(self) -> None:
        rules = get_args(ScalingRule)
        if self.rule not in rules:
            near = difflib.get_close_matches(str(self.rule), rules, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"rule must be one of {rules}, got {self.rule!r}{hint}")
        check_factor(self.factor)
        required, optional = _REQUIRED[self.rule], _OPTIONAL.get(self.rule, ())
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default and field.name not in required + optional:
                consumed = ", ".join(required + optional) or "nothing"
                raise ValueError(
                    f"{field.name} {value!r} has no meaning under the rule {self.rule!r}, "
                    f"which uses {consumed}"
                )
            if value is None and field.name in required:
                raise ValueError(f"{field.name} is needed by the rule {self.rule!r}, got None")
        for name in ("original_length", "length"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.rule == "yarn":
            check_yarn(**self._given(optional))
        elif self.rule == "llama3":
            check_llama3(**self._given(("low_frequency_factor", "high_frequency_factor")))

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence that the factors are for (dynamic); None: of any."""
        return self.length

    def scaling(self, pairs: int, base: float) -> Scaling | None:
        """The rule's factors.

        Args:
          pairs: how many rotary pairs there are (P).
          base: of the frequencies that are scaled; yarn and llama3 depend on it.

        Returns:
          None under the rule none.

        Raises:
          ValueError: `pairs` or `base` is out of the rule's range.
        """
        given = self._given(_REQUIRED[self.rule] + _OPTIONAL.get(self.rule, ()))
        match self.rule:
            case "none":
                return None
            case "linear":
                return linear_scaling(pairs=pairs, **given)
            case "ntk":
                return ntk_scaling(pairs=pairs, **given)
            case "dynamic":
                return dynamic_ntk_scaling(pairs=pairs, **given)
            case "yarn":
                return yarn_scaling(pairs=pairs, base=base, **given)
            case "llama3":
                return llama3_scaling(pairs=pairs, base=base, **given)

    def _given(self, names: tuple[str, ...]) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


_FIELDS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_length",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
} | {name: name for name in _OPTIONAL["yarn"]}
_ELSEWHERE = {
    "rope_theta": "the encoding's base",
    "partial_rotary_factor": "the encoding's rotary_dim (this share of head_dim)",
}


def scaling_from_transformers(
    parameters: Mapping[str, object] | None,
    *,
    original_length: int | None = None,
    length: int | None = None,
) -> ScalingConfig:
    """The rule that a Hugging Face model's `rope_parameters` (older: `rope_scaling`) state.

    What is not the scaling's is refused rather than ignored, so take it out where it is used:

        parameters = dict(config.rope_parameters)
        rope = Rope(
            config.head_dim,
            base=parameters.pop("rope_theta"),
            scaling=scaling_from_transformers(
                parameters, original_length=config.max_position_embeddings
            ),
        )

    Args:
      parameters: the mapping; None, as where a model has no `rope_scaling`, is the rule none. A
        value of None is a key that is not there.
      original_length: the model's `max_position_embeddings`: the training length where the rule
        needs one and the mapping has no `original_max_position_embeddings` (the dynamic rule's
        never does).
      length: tokens of the longest sequence to come, for the dynamic rule only.

    Raises:
      ValueError: a rule that is not offered (longrope and others), a key that the rule does not
        read or one missing that it needs, a number out of range.
    """
    if parameters is None:
        return ScalingConfig(length=length)
    if not isinstance(parameters, Mapping):
        raise ValueError(f"parameters must be a mapping or None, got {parameters!r}")
    rule = _rule(parameters)
    used = set(_REQUIRED[rule] + _OPTIONAL.get(rule, ()))
    if rule == "dynamic":
        # Transformers reads this rule's training length from the model's configuration alone.
        used.remove("original_length")
    fields: dict[str, Any] = {}
    for key, value in parameters.items():
        if key in _ELSEWHERE and value is not None:
            raise ValueError(
                f"{key} {value!r} is not the scaling's: take it out and give it to "
                f"{_ELSEWHERE[key]}"
            )
        if key == "truncate" and value is None:
            raise ValueError("truncate must be true or false, got None")
        if key in ("rope_type", "type") or value is None:
            continue
        if _FIELDS.get(key) not in used:
            read = ", ".join(key for key, field in _FIELDS.items() if field in used) or "nothing"
            raise ValueError(
                f"{key} {value!r} is not read by the rule {rule!r}, which reads {read}"
            )
        fields[_FIELDS[key]] = value
    if "factor" in used and "factor" not in fields:
        raise ValueError(f"factor is needed by the rule {rule!r}: {dict(parameters)!r} has none")
    if original_length is not None and "original_length" in _REQUIRED[rule]:
        fields.setdefault("original_length", original_length)
    return ScalingConfig(rule, length=length, **fields)


def _rule(parameters: Mapping[str, object]) -> ScalingRule:
    """The rule of a Hugging Face mapping, by our name."""
    stated = [parameters[key] for key in ("rope_type", "type") if parameters.get(key) is not None]
    if not stated:
        raise ValueError(f"parameters have neither a rope_type nor a type: {dict(parameters)!r}")
    if stated[0] != stated[-1]:
        raise ValueError(f"rope_type {stated[0]!r} and type {stated[1]!r} differ")
    match stated[0]:
        case "default":
            return "none"
        case "linear" | "dynamic" | "yarn" | "llama3" as rule:
            return rule
    raise ValueError(
        f"rope_type {stated[0]!r} is not offered: default, linear, dynamic, yarn and llama3 are"
    )
