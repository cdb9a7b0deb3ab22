"""Training on prepared datasets and packed rows: exact on resuming, and refused where it is not."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiments import small_experiment
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console

from carope_jax.data import DataConfig, PreparedDataset, load_corpus, train_batches
from carope_jax.data.prepare import main as prepare
from carope_jax.evaluation import EvaluationConfig
from carope_jax.training import (
    CheckpointConfig,
    CheckpointMismatch,
    Checkpoints,
    MeshConfig,
    TrainingConfig,
    abstract_model,
    batch_loss,
    evaluate_runs,
    initial_state,
    make_mesh,
    make_optimizer,
    read_inputs,
    read_metrics,
    train,
)
from carope_jax.training._evaluate import beginnings

QUIET = Console(quiet=True)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Each run compiles the programs of the one before."""
    cache = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("cache")),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {name: getattr(jax.config, name) for name in cache}
    for name, value in cache.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Two datasets of one tokenizer, and one of another."""
    folder = tmp_path_factory.mktemp("prepared")
    documents = [document.text for document in load_corpus("synthetic")]
    for name, texts in (("a", documents[:30]), ("b", documents[30:])):
        lines = "\n".join(json.dumps({"text": text}) for text in texts)
        (folder / f"{name}.jsonl").write_text(lines)
    tokenizer = "train:400"
    for name, vocabulary in (("a", tokenizer), ("b", None), ("other", "train:401")):
        source = folder / f"{'a' if name == 'other' else name}.jsonl"
        spec = vocabulary or str(folder / "a" / "tokenizer.model")
        output = ["--output", str(folder / name), "--tokenizer", spec, "--val-docs", "3"]
        prepare(["--input", str(source), "--workers", "1", *output])
    return folder


def experiment_of(prepared, **data):
    data = {"corpus": str(prepared / "a"), "tokenizer": None} | data
    small = small_experiment(vocab_size=400, num_layers=1)
    return dataclasses.replace(
        small,
        data=dataclasses.replace(small.data, **data),
        training=TrainingConfig(steps=4, log_every=1, eval_every=4, eval_tokens=200),
        checkpoint=CheckpointConfig(every=2),
    )


def rows_of(folder):
    clock = {"tokens_per_second", "mfu"}
    rows = [{k: v for k, v in row.items() if k not in clock} for row in read_metrics(folder)]
    # A run that stops is validated where it stops.
    return [{k: v for k, v in row.items() if "valid" not in k or row["step"] == 4} for row in rows]


def test_packed_rows_of_a_prepared_dataset_are_gone_on_with(prepared, tmp_path):
    experiment = experiment_of(prepared, rows="packed")
    train(read_inputs(experiment, tmp_path / "whole"), console=QUIET)
    assert train(read_inputs(experiment, tmp_path / "parts"), console=QUIET, stop_at=2) == 2
    assert train(read_inputs(experiment, tmp_path / "parts"), console=QUIET) == 4
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    parts, whole = (
        Checkpoints(tmp_path / name / "checkpoints", CheckpointConfig())._manifest(4)["leaves"]
        for name in ("parts", "whole")
    )
    assert parts == whole
    config = EvaluationConfig(protocol="paper", lengths=(16, 32), bootstrap_samples=10)
    (held_out,) = evaluate_runs([tmp_path / "whole"], config)
    (named,) = evaluate_runs([tmp_path / "whole"], config, corpus=str(prepared / "a"))
    assert held_out.results == named.results
    assert held_out.results[0].documents == 3
    with pytest.raises(ValueError, match="is of the tokenizer"):
        evaluate_runs([tmp_path / "whole"], config, corpus=str(prepared / "other"))


def test_a_run_on_something_else_is_refused_with_the_fields_that_differ(prepared, tmp_path):
    experiment = experiment_of(prepared)
    train(read_inputs(experiment, tmp_path), console=QUIET, stop_at=1)

    def with_data(**changes):
        data = dataclasses.replace(experiment.data, **changes)
        return dataclasses.replace(experiment, data=data)

    for changes, message in (
        ({"batch_size": 16}, "data.batch_size: 16 here, 8 in"),
        ({"length": 8}, "data.length: 8 here, 16 in"),
        ({"rows": "packed"}, "data.rows: 'packed' here, 'stream' in"),
        ({"shuffle_seed": 1}, "data.shuffle_seed: 1 here, 0 in"),
        ({"corpus": str(prepared / "b")}, "data.corpus: .*b' here"),
    ):
        with pytest.raises(ValueError, match=message):
            read_inputs(with_data(**changes), tmp_path)
    with pytest.raises(ValueError, match=r"is of the tokenizer [0-9a-f]*, not of the run's"):
        read_inputs(with_data(corpus=str(prepared / "other")), tmp_path)


def test_another_dataset_in_the_same_folder_is_refused(prepared, tmp_path):
    folder = tmp_path / "data"
    spec = ["--tokenizer", str(prepared / "a" / "tokenizer.model"), "--workers", "1"]
    prepare(["--input", str(prepared / "a.jsonl"), "--output", str(folder), *spec])
    experiment = experiment_of(prepared, corpus=str(folder))
    train(read_inputs(experiment, tmp_path / "run"), console=QUIET, stop_at=1)
    folder.rename(tmp_path / "moved")
    prepare(["--input", str(prepared / "b.jsonl"), "--output", str(folder), *spec])
    with pytest.raises(CheckpointMismatch, match=r"with stream='[0-9a-f]+', but here stream="):
        train(read_inputs(experiment, tmp_path / "run"), console=QUIET)
    config = EvaluationConfig(protocol="paper", lengths=(16,), bootstrap_samples=10)
    with pytest.raises(CheckpointMismatch, match="the run's data differs"):
        evaluate_runs([tmp_path / "run"], config)


def test_windows_are_gone_on_with_by_another_number_of_processes(prepared, tmp_path):
    split = PreparedDataset.open(prepared / "a").split("train")
    config = DataConfig(length=16, batch_size=8)
    state = {"x": jnp.ones(2)}
    one = train_batches(split, config)
    for _ in range(3):
        next(one)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(3, state, data=one, info={})
        expected = next(one)["inputs"]
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        for process in range(4):
            part = train_batches(split, config, process_index=process, process_count=4)
            checkpoints.restore(wanted, data=part)
            np.testing.assert_array_equal(next(part)["inputs"], expected[process::4])
            part.close()
    one.close()


def test_a_mixture_is_trained_on_by_weight(prepared, tmp_path):
    mixture = ((str(prepared / "a"), 3.0), (str(prepared / "b"), 1.0))
    experiment = experiment_of(prepared, corpus="kjv", mixture=mixture)
    inputs = read_inputs(experiment, tmp_path)
    assert len(inputs.dataset.validation) == 6
    batches = inputs.dataset.batches(experiment.data)
    rows = [tuple(row) for _ in range(6) for row in next(batches)["inputs"]]
    batches.close()
    split = PreparedDataset.open(prepared / "b").split("train")
    windows = train_batches(split, experiment.data)
    count = (len(split) - 1) // 16
    of_b = {tuple(row) for _ in range(-(-count // 8)) for row in next(windows)["inputs"]}
    windows.close()
    assert sum(row in of_b for row in rows) == len(rows) // 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"validation_fraction": 0.1}, "decided when it was prepared"),
        ({"tokenizer": "MODEL"}, "is of the tokenizer [0-9a-f]*, not of tokenizer"),
        ({"length": 100_000}, "is too short: a window of length=100000"),
        ({"corpus": "kjv", "mixture": (("A", 1.0), ("OTHER", 1.0))}, "not of that of '.*a'"),
        ({"corpus": "kjv", "mixture": (("A", 1.0), ("A/none", 1.0))}, "is no prepared dataset"),
        ({"corpus": "kjv", "mixture": (("A", 1.0), ("B", 0.0))}, "must be above 0"),
    ],
)
def test_bad_data_is_named(prepared, tmp_path, data, message):
    names = {
        "MODEL": str(prepared / "other" / "tokenizer.model"),
        "A": str(prepared / "a"),
        "B": str(prepared / "b"),
        "OTHER": str(prepared / "other"),
        "A/none": str(prepared / "a" / "none"),
    }
    if "mixture" in data:
        data = data | {"mixture": tuple((names[n], weight) for n, weight in data["mixture"])}
    if "tokenizer" in data:
        data = data | {"tokenizer": names[data["tokenizer"]]}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_inputs(experiment_of(prepared, **data), tmp_path)


def test_fields_that_contradict_each_other():
    for fields, message in (
        ({"mixture": (("a", 1.0),), "corpus": "b"}, "both say what to train on"),
        ({"mixture": (("a", 1.0),), "rows": "packed"}, "packs one dataset"),
        ({"rows": "padded"}, "rows='padded' must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            DataConfig(**fields)


def test_nothing_held_out(prepared, tmp_path):
    spec = ["--tokenizer", str(prepared / "a" / "tokenizer.model"), "--workers", "1"]
    arguments = ["--input", str(prepared / "a.jsonl"), "--output", str(tmp_path / "data")]
    prepare([*arguments, *spec, "--val-docs", "0"])
    experiment = experiment_of(prepared, corpus=str(tmp_path / "data"))
    with pytest.raises(ValueError, match="eval_every 4 needs held-out documents"):
        read_inputs(experiment, tmp_path / "run")


def test_a_batch_of_padding_alone_has_no_loss_and_no_nan():
    experiment = small_experiment()
    model = abstract_model(experiment.model, make_mesh(MeshConfig(), jax.devices()[:1]))
    optimizer = make_optimizer(experiment.optimizer, 3)
    state = initial_state(experiment.model, model, optimizer, 0)
    padding = dict.fromkeys(("inputs", "targets", "segment_ids"), jnp.zeros((2, 8), jnp.int32))

    def loss(params):
        return batch_loss(model, params, state.constants, padding)

    compute = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (total, (count, _)), gradient = compute(state.params)
    assert (float(total), int(count)) == (0.0, 0)
    assert all(not np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(gradient))


def test_beginnings_of_many_short_documents():
    documents = [np.full(n, n, np.int32) for n in range(1, 200)]
    few = beginnings(documents, 500, 33)
    assert 500 <= sum(map(len, few)) < 533
    assert max(map(len, few)) <= 33
    # Always the same, in the documents' order.
    assert [d[0] for d in few] == sorted(d[0] for d in few)
    assert all(
        np.array_equal(x, y) for x, y in zip(few, beginnings(documents, 500, 33), strict=True)
    )
    long = [np.arange(1000, dtype=np.int32)] * 4
    assert [len(d) for d in beginnings(long, 2048, 257)] == [512] * 4
