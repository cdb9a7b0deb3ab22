"""A study of the smallest kind, really trained and evaluated."""

import dataclasses
import runpy

import numpy as np
import pytest
from rich.console import Console

from carope_jax.evaluation import EvaluationConfig
from carope_jax.study import (
    PER_LENGTH,
    Arm,
    Measurement,
    Need,
    Results,
    RunKey,
    Study,
    TrainingWorker,
    Variant,
    frozen_like,
    log_frequencies,
    run_study,
)
from carope_jax.training import evaluate_runs, load_run

VARIANTS = (
    Variant("shuffled", {"model.carope.control": "shuffled"}),
    Variant("mean", {"model.carope.control": "mean"}),
    Variant(
        "linear",
        {"model.carope.scaling.rule": "linear", "model.carope.scaling.factor": PER_LENGTH},
    ),
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory, request):
    base = runpy.run_path(str(request.config.rootpath / "configs" / "smoke.py"))["experiment"]
    data = dataclasses.replace(base.data, length=32, batch_size=8)
    training = dataclasses.replace(base.training, steps=8, log_every=4, eval_every=0)
    base = dataclasses.replace(base, data=data, training=training)
    study = Study(
        name="small",
        base=base,
        rates=(1e-2,),
        measurement=Measurement(multiples=(1, 2), max_anchors=20, frequency_batches=2),
        arms=(
            # A W large enough for f to depend on the token after 8 steps.
            Arm(
                "paper",
                {"model.carope.init": "paper", "model.carope.kernel_std": 0.1},
                seeds=(0,),
                variants=VARIANTS,
            ),
            Arm(
                "frozen",
                {"model.carope.control": "frozen"},
                seeds=(0,),
                need=Need("paper", frozen_like),
            ),
        ),
    )
    workdir = tmp_path_factory.mktemp("study")
    counts = run_study(
        study, workdir, TrainingWorker(), console=Console(quiet=True), command="c", keep=True
    )
    assert (counts.done, counts.failed, counts.waiting) == (2, (), ())
    results = Results(workdir / "results")
    return workdir, {k.arm: results.get(k) for k, _ in results}


def folder(workdir, arm):
    return workdir / "runs" / RunKey(arm, 0, 1e-2).name


def test_the_numbers_are_those_of_eval(ran):
    workdir, results = ran
    found = results["paper"]["evaluations"]["trained"]
    for protocol in ("paper", "same_targets", "per_position"):
        config = EvaluationConfig(
            lengths=(32, 64),
            protocol=protocol,
            max_anchors=20,
            bootstrap_samples=1,
            per_unit=True,
        )
        (wanted,) = evaluate_runs([folder(workdir, "paper")], config)
        nlls = [nll for _, nll, _ in found[protocol]["results"]]
        assert nlls == pytest.approx([r.nll for r in wanted.results], rel=1e-6)
        assert found[protocol].get("targets_hash") == wanted.targets_hash
        if protocol != "paper":
            for sums, entry in zip(found[protocol]["sums"], wanted.unit_sums, strict=True):
                assert sums == pytest.approx(entry.sums, abs=6e-4)
    validation = results["paper"]["validation"]["nll"]
    assert validation == pytest.approx(found["paper"]["results"][0][1], rel=1e-6)


def test_variants_are_other_models_of_the_same_weights(ran):
    evaluations = ran[1]["paper"]["evaluations"]
    at = {name: e["same_targets"]["results"] for name, e in evaluations.items()}
    # Interpolation by 1 is none.
    assert at["linear"][0] == at["trained"][0]
    means = {name: entry[1][1] for name, entry in at.items()}
    assert len(set(means.values())) == 4
    assert max(means.values()) - min(means.values()) < 1
    hashes = {e["same_targets"]["targets_hash"] for e in evaluations.values()}
    assert len(hashes) == 1


def test_frequencies_are_those_of_the_model(ran):
    workdir, results = ran
    run = load_run(folder(workdir, "paper"))
    decoder = run.model.merge(run.state.params, run.state.constants)
    tokens = np.random.default_rng(0).integers(0, 500, (8, 32))
    output = decoder(tokens)
    f = np.exp(np.stack(log_frequencies(decoder, tokens)))
    np.testing.assert_allclose(f.mean((1, 2, 3)), output.measurements["f_mean"], rtol=1e-5)
    np.testing.assert_allclose(f.std((1, 2)).mean(-1), output.measurements["f_std"], rtol=1e-4)
    assert np.shape(results["paper"]["frequencies"]["mean"]) == (2, 2)


def test_the_frozen_arm_has_the_trained_ones_mean_and_spread(ran):
    trained, frozen = (ran[1][arm]["frequencies"] for arm in ("paper", "frozen"))
    assert np.mean(frozen["mean"]) == pytest.approx(np.mean(trained["mean"]), rel=0.1)
    assert np.mean(frozen["log_std"]) == pytest.approx(np.mean(trained["log_std"]), rel=0.5)
