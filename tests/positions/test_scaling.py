import dataclasses
import math
import types

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import modeling_rope_utils

from carope_jax.positions import rope_frequencies
from carope_jax.positions._scaling import (
    dynamic_ntk_scaling,
    linear_scaling,
    llama3_scaling,
    ntk_scaling,
    yarn_scaling,
)
from carope_jax.positions._scaling_config import ScalingConfig, scaling_from_transformers

HALF_A_UNIT = 2.0**-24  # of a float32's last place, relative
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
DEEPSEEK = {"mscale": 1.3, "mscale_all_dim": 0.707}
MAPPINGS = {
    "linear": {"rope_type": "linear"},
    "dynamic": {"rope_type": "dynamic"},
    "yarn": {"rope_type": "yarn"},
    "yarn, older name": {"type": "yarn", "attention_factor": None},
    "yarn, betas": {"rope_type": "yarn", "beta_fast": 20, "beta_slow": 2.5},
    "yarn, attention factor": {"rope_type": "yarn", "attention_factor": 1.25},
    "yarn, DeepSeek": {"rope_type": "yarn", **DEEPSEEK},
    "yarn, not truncated": {"rope_type": "yarn", "truncate": False},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "llama3, wide": {"rope_type": "llama3", "low_freq_factor": 0.5, "high_freq_factor": 40},
}


class Tensor(np.ndarray):
    def to(self, device=None, dtype=None):
        return self.astype(dtype)


def numpy_as_torch(dtype):
    """What transformers' rules use of torch, its float being `dtype`."""
    return types.SimpleNamespace(
        Tensor=Tensor,
        int64=np.int64,
        float=dtype,
        float32=dtype,
        arange=lambda *ends, dtype=None: np.arange(*ends, dtype=dtype).view(Tensor),
        clamp=np.clip,
        where=np.where,
    )


def transformers_rule(monkeypatch, dtype, mapping, head_dim, base, original_length, length):
    """transformers' own inverse frequencies and attention factor, computed in `dtype`."""
    monkeypatch.setattr(modeling_rope_utils, "torch", numpy_as_torch(dtype), raising=False)
    config = transformers.LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=original_length,
        rope_parameters={**mapping, "rope_theta": base},
    )
    kind = mapping.get("rope_type", mapping.get("type"))
    frequencies, attention = modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
    assert frequencies.dtype == dtype
    return np.asarray(frequencies), attention


@pytest.mark.parametrize(("factor", "original_length"), [(1.5, 512), (4, 131_072), (40.0, 2048)])
@pytest.mark.parametrize(("head_dim", "base"), [(16, 1e4), (64, 1e4), (64, 5e5), (128, 5e5)])
@pytest.mark.parametrize("name", MAPPINGS)
def test_the_rules_are_those_of_transformers(
    monkeypatch, name, head_dim, base, factor, original_length
):
    mapping = {**MAPPINGS[name], "factor": factor}
    length = 3 * original_length + 1
    config = scaling_from_transformers(
        mapping,
        original_length=original_length,
        length=length if name == "dynamic" else None,
    )
    scaling = config.scaling(head_dim // 2, base)
    arguments = (mapping, head_dim, base, original_length, length)

    frequencies, attention = transformers_rule(monkeypatch, np.float64, *arguments)
    exact = frequencies * base ** (np.arange(0, head_dim, 2) / head_dim)
    np.testing.assert_allclose(scaling.factor, exact, rtol=HALF_A_UNIT + 1e-13)
    assert scaling.attention_factor == pytest.approx(attention, rel=1e-15)

    # In float32 its YaRN takes 1 - share of a share near 1: off by a unit, `factor` times as much
    # of the interpolated frequency.
    as_run, _ = transformers_rule(monkeypatch, np.float32, *arguments)
    rtol = 1e-6 + (factor * HALF_A_UNIT if config.rule == "yarn" else 0)
    ours = np.asarray(rope_frequencies(head_dim, base))[0] * np.asarray(scaling.factor)
    np.testing.assert_allclose(ours, as_run, rtol=rtol)


@pytest.mark.parametrize("factor", [1.5, 8.0])
@pytest.mark.parametrize("pairs", [2, 8, 64])
def test_the_ntk_rules_change_the_base(pairs, factor):
    dim, base = 2 * pairs, 1e4
    powers = np.arange(0, dim, 2) / dim
    longer = factor * 5000 / 2048 - (factor - 1)
    for scaling, stretch in (
        (ntk_scaling(factor, pairs), factor),
        (dynamic_ntk_scaling(factor, pairs, 2048, 5000), longer),
    ):
        expected = (base * stretch ** (dim / (dim - 2))) ** -powers / base**-powers
        np.testing.assert_allclose(scaling.factor, expected, rtol=HALF_A_UNIT + 1e-13)
        assert scaling.attention_factor == 1


RULES = ("linear", "ntk", "dynamic", "yarn", "llama3")
factors, lengths = st.floats(1, 1000), st.integers(1, 2**20)


@st.composite
def configs(draw, factors=factors):
    rule = draw(st.sampled_from(RULES))
    fields = {"factor": draw(factors)}
    if rule in ("dynamic", "yarn", "llama3"):
        fields["original_length"] = draw(lengths)
    if rule == "dynamic":
        fields["length"] = draw(lengths)
    low = draw(st.floats(0.01, 50))
    high = low + draw(st.floats(0.01, 50))
    if rule == "yarn":
        fields |= {"beta_slow": low, "beta_fast": high, "truncate": draw(st.booleans())}
    if rule == "llama3":
        fields |= {"low_frequency_factor": low, "high_frequency_factor": high}
    return ScalingConfig(rule, **fields)


shapes = {"pairs": st.integers(2, 64), "base": st.floats(1.1, 1e8)}


@given(config=configs(), **shapes)
@settings(max_examples=100, deadline=None)
def test_any_rule_slows_pairs_down_and_keeps_their_order(config, pairs, base):
    factor = np.float64(config.scaling(pairs, base).factor)
    assert factor.shape == (pairs,)
    assert np.all((factor > 0) & (factor <= 1))
    frequencies = np.float64(base) ** -(np.arange(pairs) / pairs) * factor
    assert np.all(np.diff(frequencies) <= 1e-6 * frequencies[:-1])
    # The slow pairs are those that a rule interpolates, never the fast ones in their place.
    assert np.all(np.diff(factor) <= 0)


@given(config=configs(factors=st.just(1)), **shapes)
@settings(max_examples=100, deadline=None)
def test_a_factor_of_one_changes_nothing(config, pairs, base):
    if config.rule == "dynamic":  # whose factor is how steeply it goes on past the original length
        config = dataclasses.replace(config, length=config.original_length)
    factor, attention_factor = config.scaling(pairs, base)
    np.testing.assert_array_equal(factor, np.ones(pairs, np.float32))
    assert attention_factor == 1


@given(
    factor=st.floats(1, 100),
    pairs=st.integers(4, 64),
    base=st.floats(1e3, 1e6),
    turns=st.tuples(st.floats(1, 4), st.floats(5, 40)),
    data=st.data(),
)
@settings(max_examples=50, deadline=None)
def test_fast_pairs_are_kept_and_slow_ones_divided(factor, pairs, base, turns, data):
    slow, fast = turns
    # The fastest pair turns more than `fast` times, the slowest less than `slow` (and a whole pair
    # to round to).
    slowest = 2 * math.pi * slow * base ** ((pairs - 2) / pairs)
    fastest = 2 * math.pi * fast
    original_length = data.draw(st.integers(math.ceil(fastest), max(int(slowest), 300)))
    yarn = yarn_scaling(factor, pairs, base, original_length, beta_fast=fast, beta_slow=slow)
    llama3 = llama3_scaling(
        factor,
        pairs,
        base,
        original_length,
        low_frequency_factor=slow,
        high_frequency_factor=fast,
    )
    for scaling in (yarn, llama3):
        kept, *_, divided = np.asarray(scaling.factor)
        assert kept == 1
        if original_length < slowest:
            assert divided == np.float32(1 / factor)


@pytest.mark.parametrize(
    ("original_length", "base", "kept"), [(1, 1e4, slice(1)), (2**20, 2, slice(None))]
)
def test_yarn_does_not_run_backwards_past_either_end(original_length, base, kept):
    factor = yarn_scaling(4, 8, base, original_length).factor
    expected = np.full(8, 0.25)
    expected[kept] = 1
    np.testing.assert_array_equal(factor, expected)


def test_the_config_hands_every_field_on():
    yarn = {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": False, **DEEPSEEK}
    llama3 = {"low_frequency_factor": 0.5, "high_frequency_factor": 3.0}
    for config, expected in (
        (ScalingConfig("linear", 3), linear_scaling(3, 16)),
        (ScalingConfig("ntk", 3), ntk_scaling(3, 16)),
        (
            ScalingConfig("dynamic", 3, original_length=64, length=99),
            dynamic_ntk_scaling(3, 16, 64, 99),
        ),
        (
            ScalingConfig("yarn", 3, original_length=900, **yarn),
            yarn_scaling(3, 16, 1e4, 900, **yarn),
        ),
        (
            ScalingConfig("yarn", 3, original_length=900, attention_factor=1.5),
            yarn_scaling(3, 16, 1e4, 900, attention_factor=1.5),
        ),
        (
            ScalingConfig("llama3", 3, original_length=900, **llama3),
            llama3_scaling(3, 16, 1e4, 900, **llama3),
        ),
    ):
        scaling = config.scaling(16, 1e4)
        np.testing.assert_array_equal(scaling.factor, expected.factor)
        assert scaling.attention_factor == expected.attention_factor
        assert config.longest == (99 if config.rule == "dynamic" else None)
    assert ScalingConfig().scaling(16, 1e4) is None


def test_what_a_mapping_states_goes_before_what_the_model_states():
    stated = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert scaling_from_transformers(stated, original_length=64).original_length == 32
    del stated["original_max_position_embeddings"]
    assert scaling_from_transformers(stated, original_length=64).original_length == 64
    linear = {"type": "linear", "rope_type": "linear", "factor": 2.0}
    assert scaling_from_transformers(linear, original_length=64) == ScalingConfig("linear", 2.0)
    for none in (None, {"rope_type": "default"}, {"type": "default", "factor": None}):
        assert scaling_from_transformers(none, original_length=64) == ScalingConfig()


def yarn(**fields):
    return lambda: ScalingConfig("yarn", 2.0, **{"original_length": 64, **fields})


def mapping(kind, **entries):
    return lambda: scaling_from_transformers({"rope_type": kind, "factor": 2.0, **entries})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ScalingConfig("yran"), "rule must be one of .*'yran'; did you mean 'yarn'"),
        (lambda: ScalingConfig(["yarn"]), r"rule must be one of .*\['yarn'\]"),
        (lambda: ScalingConfig("linear", 0.5), "factor must be .* at least 1, got 0.5"),
        (lambda: ScalingConfig("linear", math.inf), "factor must be a finite .* got inf"),
        (lambda: ScalingConfig("linear", 10**400), "factor must be a finite"),
        (lambda: ScalingConfig("linear", math.nan), "factor .* got nan"),
        (lambda: ScalingConfig("linear", "4"), "factor must be .* got '4'"),
        (lambda: ScalingConfig("linear", True), "factor must be .* got True"),
        (lambda: ScalingConfig(factor=2.0), "factor 2.0 has no meaning under .*'none'.*nothing"),
        (
            lambda: ScalingConfig("ntk", 2.0, original_length=64),
            "original_length 64 has no meaning under the rule 'ntk', which uses factor",
        ),
        (lambda: ScalingConfig("yarn", 2.0), "original_length is needed by the rule 'yarn'"),
        (
            lambda: ScalingConfig("dynamic", 2.0, original_length=64),
            "length is needed by the rule 'dynamic'",
        ),
        (
            lambda: ScalingConfig(
                "llama3", 2.0, original_length=64, low_frequency_factor=4, high_frequency_factor=4
            ),
            "high_frequency_factor must be a finite number above 4, got 4",
        ),
        (
            lambda: ScalingConfig("dynamic", 2.0, original_length=64, length=0),
            "length must be a whole number of at least 1, got 0",
        ),
        (yarn(original_length=64.0), "original_length must be a whole number .* got 64.0"),
        (yarn(length=64), "length 64 has no meaning under the rule 'yarn'"),
        (yarn(beta_fast=0.5), "beta_fast must be a finite number above 1, got 0.5"),
        (yarn(beta_slow=0), "beta_slow must be a finite number above 0, got 0"),
        (yarn(attention_factor=-1.0), "attention_factor must be .* above 0, got -1.0"),
        (yarn(mscale=1.0), "mscale and mscale_all_dim are given together .* 1.0 and None"),
        (yarn(attention_factor=1.0, **DEEPSEEK), "attention_factor 1.0 leaves mscale 1.3"),
        (yarn(truncate="no"), "truncate must be true or false, got 'no'"),
        (lambda: ntk_scaling(2.0, 1), "pairs must be at least 2 for an NTK rule, got 1"),
        (lambda: dynamic_ntk_scaling(2.0, 1, 64, 64), "pairs must be at least 2"),
        (lambda: linear_scaling(2.0, 0), "pairs must be a whole number of at least 1, got 0"),
        (lambda: yarn_scaling(2.0, 4, 1.0, 64), "base must be a finite number above 1, got 1.0"),
        (lambda: yarn()().scaling(4, math.nan), "base must be a finite number above 1, got nan"),
        (lambda: scaling_from_transformers("yarn"), "parameters must be a mapping .* 'yarn'"),
        (lambda: scaling_from_transformers({"factor": 2.0}), "neither a rope_type nor a type"),
        (mapping("longrope"), "rope_type 'longrope' is not offered"),
        (mapping("linear", type="yarn"), "rope_type 'linear' and type 'yarn' differ"),
        (mapping("default"), "factor 2.0 is not read by the rule 'none', which reads nothing"),
        (mapping("linear", factor=None), "factor is needed by the rule 'linear'"),
        (mapping("linear", factor="2"), "factor must be .* got '2'"),
        (mapping("linear", rope_theta=1e4), "rope_theta 10000.0 is not .* the encoding's base"),
        (mapping("linear", partial_rotary_factor=0.5), "partial_rotary_factor .* rotary_dim"),
        (mapping("yarn", finetuned=True), "finetuned True is not read by .*'yarn'.*truncate"),
        (mapping("yarn"), "original_length is needed by the rule 'yarn'"),
        (mapping("yarn", truncate=None), "truncate must be true or false, got None"),
        (
            mapping("dynamic", original_max_position_embeddings=64),
            "original_max_position_embeddings 64 is not read by the rule 'dynamic'.*reads factor$",
        ),
        (
            lambda: scaling_from_transformers({"type": "linear", "factor": 2.0}, length=64),
            "length 64 has no meaning under the rule 'linear'",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
