"""Compiling for machines that aren't here: their names, their chips, the batch that fits."""

import dataclasses
import importlib.util
import json

import jax
import pytest
from experiments import ROOT, small_experiment

from carope_jax import command
from carope_jax.training import (
    compile_for,
    make_plan,
    parse_target,
    peak_flops,
    resolve_without_data,
)
from carope_jax.training._chips import CHIPS, chip_of_kind
from carope_jax.training._compiled import cost_model_seconds, figures
from carope_jax.training._fit import BatchChoice, TooLarge, candidates, find_fit, memory_asked


@pytest.mark.parametrize(
    ("text", "chips"), [("v5e:16x16", 256), ("v5p:4x4x4", 64), ("v6e:2x4", 8), ("h200:8", 8)]
)
def test_targets(text, chips):
    target = parse_target(text)
    assert target.chips == chips
    assert str(target) == text
    assert target.is_tpu == text.startswith("v")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v9:2x2", r"v5e, v5p, v6e, h100, h200.*'v9:2x2'"),
        ("v4:2x2x1", r"'v4:2x2x1'"),
        ("v5e", r"CHIP:TOPOLOGY.*'v5e'"),
        ("v5e:0x4", r"'v5e:0x4'"),
        ("v5e:4x4x4", r"2 axes"),
        ("v5p:16x16", r"3 axes"),
        ("v5e:32x32", r"256 chips.*1024"),
        ("h200:16", r"8 chips.*16"),
    ],
)
def test_no_such_target(text, message):
    with pytest.raises(ValueError, match=message):
        parse_target(text)


def test_one_table_serves_mfu_and_targets():
    kinds = [kind for chip in CHIPS for kind in chip.kinds]
    assert len(set(kinds)) == len(kinds)
    assert chip_of_kind("TPU v5 lite") is parse_target("v5e:4x4").chip
    # A bfloat16 operation a byte at which a chip is as fast as its memory: some hundreds for all.
    assert all(100 < chip.peak_flops / chip.hbm_bandwidth < 600 for chip in CHIPS)
    assert peak_flops(jax.devices()[0]) is None


def test_candidates_begin_at_what_is_wanted():
    assert candidates(BatchChoice(64, 2), 8) == [(64, 2), (64, 4), (64, 8)]
    # 32 parts of 4 rows a device: the most parts there are.
    assert candidates(BatchChoice(1024, 32), 256) == [(1024, 4)]
    assert candidates(BatchChoice(96, 5), 8) == [(96, 6), (96, 12)]
    # No multiple of 8: the nearest, and at the least a row a device.
    assert candidates(BatchChoice(30, 1), 8)[0] == (32, 1)
    assert candidates(BatchChoice(2, 1), 8) == [(8, 1)]


@pytest.mark.parametrize("least", [1, 2, 4, 16, 64, 128])
def test_the_fewest_parts_that_fit_are_found_in_few_compilations(least):
    compiled = []

    def compile_batch(choice):
        compiled.append(choice)
        if choice.micro_batches < least:
            raise TooLarge("too large", 100 // choice.micro_batches)
        return f"program {choice.micro_batches}"

    fitted = find_fit(BatchChoice(512, 1), 8, compile_batch)
    assert len(compiled) <= 4
    assert compiled[0] == (512, 1)
    if least > 64:
        assert fitted.choice is None
        assert fitted.failures[BatchChoice(512, 64)] == 1
    else:
        assert fitted.choice == (512, least)
        assert fitted.compiled == f"program {least}"
        assert all(choice.micro_batches < least for choice in fitted.failures)


def test_the_memory_that_was_asked_for():
    message = "the total memory required for HLO temporaries (48.04G) exceeds available HBM"
    assert memory_asked(message) == int(48.04 * 2**30)
    assert memory_asked("Used 3.5M of 2.0M hbm.") == int(3.5 * 2**20)
    assert memory_asked("out of luck") is None


def test_the_cost_model_is_shown_only_where_it_makes_sense():
    assert cost_model_seconds({"optimal_seconds": 0.5}, loops=False) == 0.5
    assert cost_model_seconds({"optimal_seconds": -11.98}, loops=False) is None
    assert cost_model_seconds({"optimal_seconds": 0.5}, loops=True) is None
    assert cost_model_seconds({}, loops=False) is None


def test_figures_of_a_compiled_update():
    """Eight simulated devices' program, looked at as if it were a slice's."""
    plan, target = make_plan(small_experiment().resolved(64)), parse_target("v5e:2x4")
    found = figures(plan, target, 2.0)
    # The gradients of all parameters are summed over the replicas in float32.
    assert found["collectives"]["all-reduce"]["bytes"] >= 4 * plan.model.parameters
    assert 2 in found["loop_turns"]
    tokens = plan.experiment.tokens_per_update
    seconds = found["step_seconds_at_best"]
    assert found["tokens_per_second_at_best"] == pytest.approx(tokens / seconds)
    hours = 1e10 / (tokens / seconds) / 3600
    assert found["cost_per_10B_tokens_at_best"] == pytest.approx(hours * 8 * 2.0)
    assert "cost_per_10B_tokens_at_best" not in figures(plan, target, None)


def test_vocabulary_without_data(tmp_path):
    def resolved(tokenizer, vocab_size=None):
        experiment = small_experiment(vocab_size=vocab_size)
        data = dataclasses.replace(
            experiment.data, tokenizer=tokenizer, corpus=str(tmp_path / "none")
        )
        return resolve_without_data(dataclasses.replace(experiment, data=data))

    assert resolved("gpt2").model.vocab_size == 50304
    assert resolved("train:2048").model.vocab_size == 2048
    assert resolved("somewhere/", 1000).model.vocab_size == 1000
    with pytest.raises(ValueError, match=r"'somewhere/'.*--model\.vocab-size"):
        resolved("somewhere/")


SMOKE = ["--config", ROOT / "configs/smoke.py"]
needs_tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: make test-slow"
)
needs_gpu = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="needs jax[cuda13]: make test-gpu-compile",
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compile-for", "v9:2x2"], "got 'v9:2x2'"),
        (["--compile-for", "v5e:2x4", "--price-per-chip-hour", -1], "price_per_chip_hour"),
    ],
)
def test_bad_input_is_one_line(run_command, arguments, message):
    ran = run_command("train.py", [*SMOKE, *arguments])
    assert ran.code == command.BAD_INPUT
    assert message in ran.err
    assert len(ran.err.strip().splitlines()) == 1


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_what_to_install_is_said(run_command):
    ran = run_command("train.py", [*SMOKE, "--compile-for", "v5e:4x4"])
    assert ran.code == command.BAD_INPUT
    assert "carope-jax[tpu]" in ran.err
    assert len(ran.err.strip().splitlines()) == 1


def facts_of(run_command, tmp_path, *arguments):
    out = tmp_path / "facts.json"
    gpt2_small = ["--config", ROOT / "configs/gpt2_small.py", "--json", out]
    ran = run_command("train.py", [*gpt2_small, *arguments])
    assert ran.code == 0, ran.err
    return json.loads(out.read_text())


def check_facts(facts, chips, hbm_gib):
    state = 3 * 4 * facts["parameters"]
    assert facts["devices"] == chips
    assert state < facts["hbm_needed"] < hbm_gib * 2**30
    assert facts["collectives"]["all-reduce"]["count"] > 12
    assert 12 in facts["loop_turns"]
    assert None not in facts["loop_turns"]
    assert 0 < facts["tokens_per_second_at_best"] < 1e9
    assert facts["cost_per_10B_tokens_at_best"] > 0


@needs_tpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "chips", "hbm_gib"),
    [("v5e:4x4", 16, 15.75), ("v5e:16x16", 256, 15.75), ("v5p:2x2x4", 16, 96), ("v6e:4x4", 16, 32)],
)
def test_gpt2_small_for_tpus(run_command, tmp_path, target, chips, hbm_gib):
    arguments = ["--compile-for", target, "--price-per-chip-hour", 1.2]
    facts = facts_of(run_command, tmp_path, *arguments)
    check_facts(facts, chips, hbm_gib)
    rows = 1024 // chips
    assert facts["micro_batches"] == min(32, rows)
    assert facts["fits"] == (rows >= 32)
    assert ("change" in facts) != facts["fits"]


@needs_tpu
@pytest.mark.slow
def test_the_nearest_fitting_batch(run_command, tmp_path):
    # 4 rows a chip, so three candidates: two compilations at most.
    arguments = ["--compile-for", "v5e:16x16", "--training.micro-batches", 1]
    facts = facts_of(run_command, tmp_path, *arguments, "--data.length", 2048)
    assert not facts["fits"]
    assert facts["micro_batches"] > 1
    assert facts["hbm_needed"] < 15.75 * 2**30
    assert f"--training.micro-batches {facts['micro_batches']}" in facts["change"]
    assert "needs" in facts["change"]


@needs_tpu
@pytest.mark.slow
def test_nothing_fits(run_command, tmp_path):
    arguments = ["--compile-for", "v5e:2x2", "--model.model-dim", 6144, "--model.num-heads", 48]
    facts = facts_of(
        run_command, tmp_path, *arguments, "--data.batch-size", 4, "--training.micro-batches", 1
    )
    assert "hbm_needed" not in facts
    assert "--mesh.fsdp" in facts["change"]


@needs_tpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compile-for", "v5e:3x7"], "no topology v5e:3x7"),
        (["--compile-for", "v5e:2x4", "--mesh.data", 3], "does not cover 8 devices"),
    ],
)
def test_tpus_that_do_not_suit(run_command, arguments, message):
    ran = run_command("train.py", [*SMOKE, *arguments])
    assert ran.code == command.BAD_INPUT
    assert message in ran.err


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize(("target", "hbm_gib"), [("h100:8", 80), ("h200:8", 141)])
def test_gpt2_small_for_gpus(run_command, tmp_path, target, hbm_gib):
    arguments = ["--compile-for", target, "--price-per-chip-hour", 4]
    check_facts(facts_of(run_command, tmp_path, *arguments), 8, hbm_gib)


@needs_gpu
@pytest.mark.slow
def test_a_gpu_s_memory_is_compared():
    target = parse_target("h200:8")
    chip = dataclasses.replace(target.chip, hbm_bytes=2**18)
    facts = compile_for(small_experiment().resolved(64), dataclasses.replace(target, chip=chip))
    assert not facts["fits"]
    assert "hbm_needed" not in facts
