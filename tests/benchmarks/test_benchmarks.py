"""The benchmarks at tiny sizes: rows that say what they should, and the bound on phases."""

import functools
import importlib
import json
import math
import re
import sys
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from carope_jax import command
from carope_jax.layers import AttentionInput, CaropeConfig, HeadDims, Segmentation

FOLDER = Path(__file__).parents[2] / "benchmarks"
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
TINY_DECODER = "--num-layers 1 --model-dim 16 --num-heads 2 --vocab-size 256 --batch-size 2"


@pytest.fixture
def benchmark_of(monkeypatch):
    """A benchmark's module, as `python benchmarks/NAME.py` imports it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    # Their names are too plain to be left to other tests.
    for name in ("memory", "phase_error", "data", "_report"):
        sys.modules.pop(name, None)


def rows_of(path):
    rows = json.loads(path.read_text())
    for row in rows:
        assert row.keys() == {"name", "value", "unit"}
        assert math.isfinite(row["value"])
    values = {row["name"]: row["value"] for row in rows}
    assert len(values) == len(rows)
    return values


def test_memory_reports_bytes_and_ratios(benchmark_of, tmp_path, monkeypatch, capsys):
    memory, file = benchmark_of("memory"), tmp_path / "rows.json"

    def size(config, batch_size, length):
        plain = isinstance(config.carope, memory.PlainCarope)
        words = {"rope": 100, "carope": 104, "nope": 90}[config.position] + 16 * plain
        return words * batch_size * length + config.vocab_size

    monkeypatch.setattr(memory, "temporary_memory", size)
    memory.main(f"{TINY_DECODER} --length 32 --json {file}".split())
    value = rows_of(file)
    assert len(value) == 2 * 4 * 2
    assert value["whole/rope/temporary"] == 100 * 64 + 256
    assert value["blocks/plain/temporary"] == 120 * 64 + 128
    assert value["whole/carope/ratio to rope"] == (104 * 64 + 256) / (100 * 64 + 256)
    assert value["blocks/rope/ratio to rope"] == 1
    assert "plain" in capsys.readouterr().out


def test_memory_is_what_the_compiler_says(benchmark_of, monkeypatch):
    memory = benchmark_of("memory")
    # Buffers are assigned before the code is optimized, which is what takes the time.
    monkeypatch.setattr(memory.jax, "jit", quick_jit)
    layers, batch, heads, length = 2, 2, 2, 32
    arguments = memory.Arguments(num_layers=layers, model_dim=8, num_heads=heads, length=length)
    found = memory.temporary_memory(arguments.model("nope", 128), batch, length)
    # At the least every layer's float32 attention weights.
    kept = layers * batch * heads * length**2 * 4
    assert kept < found < 20 * kept


def test_the_plain_composition_is_carope(benchmark_of):
    dims = HeadDims(model_dim=6, heads=4, kv_heads=2, head_dim=8)
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    weights, x = {"kernel": normal(6, 2), "bias": normal(2)}, normal(2, 5, 6)
    q, k = normal(2, 5, 4, 8), normal(2, 5, 2, 8)
    segmentation = Segmentation.of(5, jnp.asarray([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]]))
    ours, plain = (
        quick_jit(
            lambda q, k, x, encoding=encoding: encoding.rotate(
                weights, dims, AttentionInput(q, k, x, None, segmentation)
            )
        )(q, k, x)
        for encoding in (CaropeConfig(), benchmark_of("memory").PlainCarope())
    )
    np.testing.assert_array_equal(plain.state, ours.state)
    np.testing.assert_allclose(plain.q, ours.q, atol=1e-6)
    np.testing.assert_allclose(plain.k, ours.k, atol=1e-6)


def test_turns_keep_their_phase_and_other_sums_do_not(benchmark_of, tmp_path, capsys):
    file, lengths = tmp_path / "rows.json", (64, 16_384)
    arguments = f"--lengths 64 16384 --head-dim 8 --json {file}"
    benchmark_of("phase_error").main(arguments.split())
    value = rows_of(file)
    assert len(value) == len(lengths) * (4 + 5)
    # Float32 radians in [-pi, pi] and their factor 2 pi / 2^32 are each rounded once.
    read_out = 2 * 2**-23
    for kind in ("random", "constant"):
        for length in lengths:
            bound = length * 2**-33 * 2 * math.pi + read_out
            assert 0 < value[f"{kind}/turns/{length}"] < bound
        for name in ("float32 scan", "float32 serial", "bfloat16"):
            assert value[f"{kind}/{name}/16384"] > 10 * value[f"{kind}/turns/16384"]
    assert "16,384" in capsys.readouterr().out


def test_the_exact_phase_is_that_of_fractions(benchmark_of):
    rng = np.random.default_rng(0)
    # Binary orders from 2^-40 to 1, where a float32 sum, and at length a float64 one, loses bits.
    increments = np.exp2(-rng.uniform(0, 40, 3000)).astype(np.float32)
    increments[:2] = 1
    phases = benchmark_of("phase_error").exact_phase(increments)
    total = sum(Fraction(float(x)) for x in increments)
    turn = Fraction("6.283185307179586476925286766559")
    assert phases[-1] == pytest.approx(float(total % turn), abs=1e-12)


def test_the_largest_error_is_wrapped(benchmark_of):
    largest_error = benchmark_of("phase_error").largest_error
    # Phases 0.1 apart across the seam at a whole turn, and 0.2 the other way.
    phases, exact = np.array([0.05, -0.1], np.float32), np.array([2 * math.pi - 0.05, 0.1])
    assert largest_error(phases, exact) == pytest.approx(0.2, abs=1e-6)
    assert largest_error(np.float32([math.pi]), np.zeros(1)) == pytest.approx(math.pi)


def test_data_reports_what_comes_and_what_is_wanted(benchmark_of, tmp_path, monkeypatch, capsys):
    data, file = benchmark_of("data"), tmp_path / "rows.json"
    monkeypatch.setattr(data, "step_rate", lambda experiment, seconds: 1000.0)
    monkeypatch.setattr(
        data, "pipeline_rate", lambda batches, seconds: 10 * next(batches)["inputs"].size
    )
    arguments = "--tokens 1000 --tokenizer train:320 --length 32 --batch-size 4 --workers 0"
    data.main(f"{arguments} --mfu 0.5 --json {file}".split())
    value = rows_of(file)
    assert value["stream/workers 0"] == value["packed/workers 0"] == 10 * 4 * 32
    assert value["stream/workers 0/ratio to quickstart"] == 1.28
    # GPT-2 small: 6 FLOPs for each of 124M weights (a little more: CARoPE's own, and attention).
    assert value["demand/H200"] == pytest.approx(0.5 * 989e12 / (6 * 124e6), rel=0.1)
    assert value["demand/v5e-256"] / value["demand/H200"] == pytest.approx(256 * 197 / 989)
    wanted = value["demand/H200"] / value["stream/workers 0"]
    assert value["stream/workers 0/processes for H200"] == pytest.approx(wanted)
    assert "quickstart" in capsys.readouterr().out


def test_padding_is_no_token_that_comes(benchmark_of, monkeypatch):
    data = benchmark_of("data")
    ticks = iter(range(100))
    monkeypatch.setattr(data.time, "perf_counter", lambda: next(ticks))
    batch = {"inputs": np.ones((2, 3)), "segment_ids": np.asarray([[1, 1, 2], [1, 0, 0]])}
    batches = iter([batch] * 20)
    # The clock is read once to begin, once a round, and once at the end: 4 batches in 6 seconds.
    assert data.pipeline_rate(batches, 5) == 4 * 4 / 6
    del batch["segment_ids"]
    ticks = iter(range(100))
    assert data.pipeline_rate(iter([batch] * 20), 5) == 4 * 6 / 6


@pytest.mark.parametrize(
    ("benchmark", "arguments", "message"),
    [
        ("memory", "--num-heads 7", "num_heads 7 does not divide model_dim 768"),
        ("memory", "--encodings carope", "encodings must have rope"),
        ("memory", "--length 0", "length must be at least 1, got 0"),
        ("data", "--workers 2", "workers must have 0 among them"),
        ("data", "--mfu 1.5", r"mfu must be in \(0, 1\], got 1.5"),
        ("data", "--tokenizer train:320 --tokens 9 --length 999999", "tokens is too short"),
        ("phase_error", "--lengths 0", "lengths must be in"),
        ("phase_error", "--head-dim 3", "head_dim must be even.* 3"),
        ("phase_error", "--json /dev/null/rows.json --lengths 4 --head-dim 2", "/dev/null"),
    ],
)
def test_bad_input_is_exit_code_2(benchmark_of, capsys, benchmark, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        command.run(benchmark_of(benchmark).main, arguments.split())
    assert stopped.value.code == command.BAD_INPUT
    err = " ".join(line.strip("│ ") for line in capsys.readouterr().err.splitlines())
    assert "Traceback" not in err
    assert re.search(message, err), err
