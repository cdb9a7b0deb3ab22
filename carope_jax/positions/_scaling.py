"""Rules that extend a rotary encoding past its training length, as factors a pair.

Each is a function of numbers known before compilation. Factors are computed in float64 and rounded
once to float32. With d = 2P rotary features, pair i = 0 ... P-1 turns by theta_i = base^(-i/P).
"""

import math
from numbers import Integral, Real
from typing import NamedTuple, TypeGuard

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# P rotary pairs.

BETA_FAST, BETA_SLOW = 32.0, 1.0
"""YaRN's own (arXiv 2309.00071, section 3.4: its beta and alpha for Llama)."""


class Scaling(NamedTuple):
    """What a scaling rule does to a rotary encoding.

    Attributes:
      factor: theta'_i / theta_i of each rotary pair, shape [P], positive and without unit. It
        multiplies RoPE's frequencies and CARoPE's increments alike.
      attention_factor: q and k are both multiplied by it (YaRN's temperature; 1 for the others).
    """

    factor: Float[Array, " P"]
    attention_factor: float = 1.0


def linear_scaling(factor: float, pairs: int) -> Scaling:
    """Position interpolation (arXiv 2306.15595, section 2.3): every frequency divided by `factor`.

    Args:
      factor: how many times the training length is to be reached, at least 1.
      pairs: how many rotary pairs there are (P).

    Raises:
      ValueError: `factor` is below 1 or not finite, or `pairs` below 1.
    """
    check_factor(factor)
    check_count("pairs", pairs)
    return _scaling(np.full(pairs, 1 / float(factor)))


def ntk_scaling(factor: float, pairs: int) -> Scaling:
    """NTK-aware: RoPE of base' = base * factor^(d/(d-2)) (arXiv 2309.00071, section 3.1).

    So theta'_i / theta_i = factor^(-i/(P-1)) whatever the base: the fastest pair keeps its
    frequency, the slowest one's is divided by `factor`.

    Args:
      factor: how many times the training length is to be reached, at least 1.
      pairs: P, at least 2.

    Raises:
      ValueError: `factor` is below 1 or not finite, or `pairs` below 2: one pair's frequency is 1
        for every base.
    """
    check_factor(factor)
    return _scaling(_change_of_base(float(factor), pairs))


def dynamic_ntk_scaling(factor: float, pairs: int, original_length: int, length: int) -> Scaling:
    """Dynamic NTK (arXiv 2309.00071, section 3.3), for sequences of one declared length.

    base' = base * (factor * L/original_length - (factor - 1))^(d/(d-2)), with L the greater of
    `length` and `original_length`, as the Transformers library has it. Up to the original length
    nothing changes; beyond it, even a `factor` of 1 stretches (to what `length` needs).

    Args:
      factor: how steeply the base grows with the length, at least 1.
      pairs: P, at least 2.
      original_length: tokens of the training length.
      length: tokens of the longest sequence that the frequencies are for.

    Raises:
      ValueError: `factor` is below 1 or not finite, `pairs` below 2, or a length below 1.
    """
    check_factor(factor)
    check_count("original_length", original_length)
    check_count("length", length)
    # 1 + factor (L/L0 - 1): the formula above, but exactly 1 at the original length.
    beyond = max(length, original_length) / original_length - 1
    return _scaling(_change_of_base(1 + float(factor) * beyond, pairs))


def yarn_scaling(
    factor: float,
    pairs: int,
    base: float,
    original_length: int,
    *,
    beta_fast: float = BETA_FAST,
    beta_slow: float = BETA_SLOW,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
) -> Scaling:
    """YaRN (arXiv 2309.00071): slow pairs are interpolated, fast ones kept, others in between.

    Pair i makes original_length * theta_i / 2 pi turns over the training length. With i(r) the
    (real) index of the pair that makes r of them, pairs up to i(beta_fast) keep their frequency,
    those from i(beta_slow) on have it divided by `factor` (section 3.2), and between the two the
    share of each is linear in i, as in the authors' code and the Transformers library.
    The attention factor is 0.1 ln(factor) + 1 (section 3.4).

    Args:
      factor: how many times the training length is to be reached, at least 1.
      pairs: P.
      base: of the frequencies that are scaled, above 1.
      original_length: tokens of the training length.
      beta_fast: turns over the training length, above `beta_slow`.
      beta_slow: turns over the training length, above 0.
      attention_factor: in place of the default.
      mscale: DeepSeek-V2's (arXiv 2405.04434, its released configuration), with `mscale_all_dim`:
        the attention factor is (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1).
        (DeepSeek's attention also multiplies the scores by the denominator's square: that is not
        the encoding's, and not done here.)
      mscale_all_dim: see `mscale`.
      truncate: i(beta_fast) is rounded down and i(beta_slow) up to whole pairs.

    Raises:
      ValueError: a number out of the range given, `mscale` without `mscale_all_dim` or the
        reverse, or both those and `attention_factor`.
    """
    check_factor(factor)
    check_count("pairs", pairs)
    check_above("base", base, 1.0)
    check_count("original_length", original_length)
    check_yarn(beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate)

    def index(turns: float) -> float:
        return pairs * math.log(original_length / (turns * 2 * math.pi)) / math.log(base)

    low, high = index(beta_fast), index(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    # The upper end is d - 1, not P - 1: that is what published checkpoints are run with. Where no
    # pair makes beta_slow turns, or every pair beta_fast, the bounds cross: without a width of its
    # own the ramp would run backwards.
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    width = high - low if high > low else 0.001
    interpolated_P = np.clip((np.arange(pairs) - low) / width, 0, 1)
    if attention_factor is None:
        log = 0.1 * math.log(factor)
        attention_factor = (1 if mscale is None else mscale) * log + 1
        attention_factor /= (0 if mscale_all_dim is None else mscale_all_dim) * log + 1
    factor_P = interpolated_P / float(factor) + (1 - interpolated_P)
    return _scaling(factor_P, float(attention_factor))


def llama3_scaling(
    factor: float,
    pairs: int,
    base: float,
    original_length: int,
    *,
    low_frequency_factor: float,
    high_frequency_factor: float,
) -> Scaling:
    """Llama 3.1's rule (`apply_scaling` of Meta's released model code).

    Pairs that turn at most `low_frequency_factor` times over the training length have their
    frequency divided by `factor`, those that turn at least `high_frequency_factor` times keep it,
    and between the two the share of each is linear in the number of turns.

    Args:
      factor: what slow frequencies are divided by, at least 1 (8 in Llama 3.1).
      pairs: P.
      base: of the frequencies that are scaled (5e5 in Llama 3.1).
      original_length: tokens of the training length (8192).
      low_frequency_factor: turns over the training length, above 0 (1).
      high_frequency_factor: turns over the training length, above `low_frequency_factor` (4).

    Raises:
      ValueError: a number out of the range given.
    """
    check_factor(factor)
    check_count("pairs", pairs)
    check_above("base", base, 0.0)
    check_count("original_length", original_length)
    check_llama3(low_frequency_factor, high_frequency_factor)
    turns_P = original_length / (2 * math.pi) * float(base) ** -(np.arange(pairs) / pairs)
    between = float(high_frequency_factor) - float(low_frequency_factor)
    kept_P = np.clip((turns_P - float(low_frequency_factor)) / between, 0, 1)
    return _scaling((1 - kept_P) / float(factor) + kept_P)


def _scaling(factor_P: Float[np.ndarray, " P"], attention_factor: float = 1.0) -> Scaling:
    return Scaling(jnp.asarray(factor_P, jnp.float32), attention_factor)


def _change_of_base(stretch: float, pairs: int) -> Float[np.ndarray, " P"]:
    """theta'_i / theta_i at base' = base * stretch^(d/(d-2)): the base itself cancels."""
    check_count("pairs", pairs)
    if pairs == 1:
        raise ValueError(
            "pairs must be at least 2 for an NTK rule, got 1: d/(d-2) has no value at d = 2"
        )
    return stretch ** -(np.arange(pairs) / (pairs - 1))


def check_factor(factor: object) -> None:
    """Raises a ValueError unless `factor` is a finite number of at least 1."""
    if not _is_number(factor) or not factor >= 1:
        raise ValueError(f"factor must be a finite number of at least 1, got {factor!r}")


def check_count(name: str, value: object) -> None:
    """Raises a ValueError unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def check_above(name: str, value: object, bound: float) -> None:
    """Raises a ValueError unless `value` is a finite number above `bound`."""
    if not _is_number(value) or not value > bound:
        raise ValueError(f"{name} must be a finite number above {bound:g}, got {value!r}")


def check_yarn(
    beta_fast: float = BETA_FAST,
    beta_slow: float = BETA_SLOW,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
) -> None:
    """Raises a ValueError for YaRN options out of range or at odds with each other."""
    check_above("beta_slow", beta_slow, 0.0)
    check_above("beta_fast", beta_fast, beta_slow)
    for name, value in (
        ("attention_factor", attention_factor),
        ("mscale", mscale),
        ("mscale_all_dim", mscale_all_dim),
    ):
        if value is not None:
            check_above(name, value, 0.0)
    if (mscale is None) != (mscale_all_dim is None):
        raise ValueError(
            "mscale and mscale_all_dim are given together or not at all, "
            f"got {mscale!r} and {mscale_all_dim!r}"
        )
    if attention_factor is not None and mscale is not None:
        raise ValueError(
            f"attention_factor {attention_factor!r} leaves mscale {mscale!r} and "
            f"mscale_all_dim {mscale_all_dim!r} nothing to do: give it or them"
        )
    if not isinstance(truncate, bool):
        raise ValueError(f"truncate must be true or false, got {truncate!r}")


def check_llama3(low_frequency_factor: float, high_frequency_factor: float) -> None:
    """Raises a ValueError unless 0 < low_frequency_factor < high_frequency_factor."""
    check_above("low_frequency_factor", low_frequency_factor, 0.0)
    check_above("high_frequency_factor", high_frequency_factor, low_frequency_factor)


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int past the largest float
        return False
