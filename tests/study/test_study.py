"""Studies with a worker that trains nothing: order, resuming, refusals, choice of the rate."""

import dataclasses
import json
import re

import numpy as np
import pytest
from rich.console import Console

from carope_jax import command
from carope_jax.study import (
    PER_LENGTH,
    Arm,
    Need,
    Results,
    RunKey,
    Study,
    Variant,
    frozen_like,
    load_study,
    mean_bases,
    run_study,
    solve_logits,
    steps,
)
from carope_jax.study.__main__ import main
from carope_jax.study._overrides import with_overrides
from carope_jax.training import Experiment, Interrupted, from_json, to_json

RATES = (1e-3, 2e-3, 4e-3)
RESULT = {
    "arm": "a",
    "seed": 0,
    "rate": 0.1,
    "status": "done",
    "experiment": {},
    "evaluations": {"t": {}},
}
ROPE, NOPE = {"model.position": "rope"}, {"model.position": "nope"}


def study(*arms, **options):
    return Study(name="test", base=Experiment(), arms=arms, rates=RATES, **options)


class FakeWorker:
    """Its loss is lowest at `best`; `broken` runs are not finite; it is stopped at `stop`."""

    def __init__(self, best=2e-3, broken=(), stop=None):
        self.best, self.broken, self.stop = best, broken, stop
        self.trained, self.evaluated, self.experiments = [], [], {}

    def resolve(self, experiment):
        return dataclasses.replace(experiment, name="resolved")

    def train(self, experiment, folder, say):
        if folder.name == self.stop:
            raise Interrupted("SIGTERM")
        folder.mkdir(parents=True)
        self.trained.append(folder.name)
        self.experiments[folder.name] = experiment
        if folder.name in self.broken:
            raise FloatingPointError("loss nan at step 3")
        rate = experiment.optimizer.learning_rate
        return {
            "training": {"tokens_per_second": 1, "seconds": 1.0},
            "validation": {"nll": abs(np.log(rate / self.best)), "tokens": 1},
            "data": "text",
        }

    def evaluate(self, folder, arm, measurement, say):
        assert folder.is_dir()
        self.evaluated.append(folder.name)
        return {"trained": {"paper": {}}}


def run(of, workdir, worker, **options):
    console = Console(quiet=True)
    return run_study(of, workdir, worker, console=console, command="test", **options)


def test_a_sweep_then_its_best_rate_for_the_other_seeds(tmp_path):
    worker = FakeWorker(best=4e-3)
    counts = run(study(Arm("a", ROPE, seeds=(0, 5))), tmp_path, worker)
    assert worker.trained == [
        *("a.seed0.rate0.001", "a.seed0.rate0.002", "a.seed0.rate0.004"),
        "a.seed5.rate0.004",
    ]
    assert worker.evaluated == ["a.seed0.rate0.004", "a.seed5.rate0.004"]
    assert (counts.done, counts.failed, counts.waiting) == (4, (), ())
    experiment = worker.experiments["a.seed5.rate0.004"]
    assert (experiment.training.seed, experiment.data.shuffle_seed) == (5, 5)
    assert experiment.optimizer.final_learning_rate == pytest.approx(4e-4)
    assert not list((tmp_path / "runs").iterdir())


def test_what_is_finished_is_not_done_again(tmp_path):
    of = study(Arm("a", ROPE, seeds=(0,)), Arm("b", NOPE, seeds=(0,)))
    with pytest.raises(Interrupted):
        run(of, tmp_path, FakeWorker(stop="b.seed0.rate0.002"))
    worker = FakeWorker()
    run(of, tmp_path, worker)
    assert worker.trained == ["b.seed0.rate0.002", "b.seed0.rate0.004"]
    assert worker.evaluated == ["b.seed0.rate0.002"]
    again = FakeWorker()
    run(of, tmp_path, again)
    assert again.trained == again.evaluated == []


def test_committed_results_are_a_start(tmp_path):
    of = study(Arm("a", ROPE, seeds=(0,)))
    run(of, tmp_path / "one", FakeWorker())
    worker = FakeWorker()
    counts = run(of, tmp_path / "two", worker, seeded=tmp_path / "one" / "results")
    assert (worker.trained, counts.done) == ([], 3)


def test_a_result_whose_checkpoint_is_gone_is_trained_again(tmp_path):
    of = study(Arm("a", ROPE, seeds=(0,)))
    run(of, tmp_path, FakeWorker())
    path = tmp_path / "results" / "a.seed0.rate0.002.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"evaluations": {}}))
    worker = FakeWorker()
    run(of, tmp_path, worker)
    assert worker.trained == worker.evaluated == ["a.seed0.rate0.002"]


def test_keep_leaves_the_folders(tmp_path):
    run(study(Arm("a", ROPE, seeds=(0,))), tmp_path, FakeWorker(), keep=True)
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_a_run_that_is_not_finite_is_named_and_the_others_go_on(tmp_path):
    of = study(Arm("a", ROPE, seeds=(0,)), Arm("b", NOPE, seeds=(0,)))
    worker = FakeWorker(broken=("a.seed0.rate0.002",))
    counts = run(of, tmp_path, worker)
    assert counts.failed == ("a.seed0.rate0.002: loss nan at step 3",)
    # Of the two that are left, one is as far from the best as the other: the first has it.
    assert worker.evaluated == ["a.seed0.rate0.001", "b.seed0.rate0.002"]
    again = FakeWorker()
    assert run(of, tmp_path, again).failed == counts.failed
    assert again.trained == []


def test_an_arm_of_which_all_failed_has_no_best_rate(tmp_path):
    broken = [f"a.seed0.rate{rate:g}" for rate in RATES]
    of = study(Arm("a", ROPE), Arm("b", NOPE, group="others", seeds=(0,), rate_of="a"))
    worker = FakeWorker(broken=broken)
    counts = run(of, tmp_path, worker)
    assert len(counts.failed) == 3
    assert worker.evaluated == []
    assert [line.split()[0] for line in counts.waiting] == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"overrides": {"model.position": "alibi"}}, "arm 'a' .*: model.position is alibi"),
        ({"variants": (Variant("v", {"model.position": "nope"}),)}, "arm 'a' .*: variants is"),
    ],
)
def test_a_changed_study_is_refused(tmp_path, change, message):
    arm = Arm("a", NOPE, seeds=(0,))
    run(study(arm), tmp_path, FakeWorker())
    worker = FakeWorker()
    with pytest.raises(ValueError, match=message):
        run(study(dataclasses.replace(arm, **change)), tmp_path, worker)
    assert worker.trained == []


def test_fields_that_change_no_update_may_change(tmp_path):
    of = study(Arm("a", ROPE, seeds=(0,)))
    run(of, tmp_path, FakeWorker())
    training = dataclasses.replace(of.base.training, log_every=3)
    worker = FakeWorker()
    changed = dataclasses.replace(of, base=dataclasses.replace(of.base, training=training))
    run(changed, tmp_path, worker)
    assert worker.trained == []


def test_core_arms_come_first_and_all_first_seeds_before_second_ones():
    of = study(
        Arm("late", NOPE, group="others", seeds=(0,)), Arm("a", ROPE), Arm("b", NOPE, seeds=(0, 1))
    )
    order = [(step.arm.name, step.seed) for step in steps(of, of.arms)]
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("late", 0)]


def test_an_arm_takes_overrides_from_the_needed_one(tmp_path):
    need = Need("a", lambda result: {"model.rope.base": 100.0 + result["seed"]})
    of = study(Arm("b", ROPE, seeds=(0, 1), need=need), Arm("a", NOPE, seeds=(0, 1)))
    counts = run(of, tmp_path, FakeWorker())
    assert len(counts.waiting) == 1  # the needed arm comes later in this study
    assert "b needs a of seed" in counts.waiting[0]
    worker = FakeWorker()
    counts = run(of, tmp_path, worker, only="b")
    assert counts.waiting == ()
    bases = {name: e.model.rope.base for name, e in worker.experiments.items()}
    assert bases["b.seed0.rate0.001"] == 100
    assert bases["b.seed1.rate0.002"] == 101


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ([Arm("a", ROPE), Arm("a", NOPE)], "two arms are called 'a'"),
        (
            [Arm("a", {"model.carope.intit": "rope"})],
            "arm 'a': unknown field 'model.carope.intit'; did you mean 'model.carope.init'?",
        ),
        ([Arm("a", {"model.carope.init": "rop", "model.position": "carope"})], "arm 'a': init"),
        ([Arm("a", {"training.steps": "ten"})], "arm 'a'"),
        ([Arm("a", ROPE, rate_of="b")], "arm 'a': there is no arm 'b'; did you mean 'a'?"),
        (
            [Arm("a", ROPE, rate_of="b"), Arm("b", ROPE, need=Need("a", dict))],
            "arm 'a' needs itself, by way of 'b'",
        ),
        (
            [Arm("a", ROPE), Arm("b", ROPE, rate_of="a", seeds=(9,))],
            r"arm 'b' has seeds \(9,\), and 'a', which it needs, \(0, 1, 2\)",
        ),
        ([Arm("a", ROPE, seeds=(1, 1))], "arm 'a': seeds must be distinct"),
        ([Arm("a/b", ROPE)], "name is letters"),
        (
            [Arm("a", ROPE, variants=(Variant("v", {"data.length": 3}),))],
            "arm 'a', variant 'v': only fields of model",
        ),
        (
            [Arm("a", ROPE, variants=(Variant("v", {"model.rope.scaling.rule": "linar"}),))],
            "arm 'a', variant 'v': rule must be",
        ),
    ],
)
def test_impossible_studies_are_refused(arms, message):
    with pytest.raises((ValueError, TypeError), match=message):
        study(*arms)


def test_a_variant_at_each_length():
    variant = Variant(
        "pi", {"model.rope.scaling.rule": "linear", "model.rope.scaling.factor": PER_LENGTH}
    )
    assert study(Arm("a", ROPE, variants=(variant,))).arms[0].variants == (variant,)


def test_a_file_that_is_no_result_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"x.json is not a run's result: it has no 'arm'"):
        Results(tmp_path)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x.json is not JSON"):
        Results(tmp_path)
    (tmp_path / "x.json").write_text(json.dumps(RESULT))
    with pytest.raises(ValueError, match=r"x.json is the result of a.seed0.rate0.1"):
        Results(tmp_path)


def test_results_read_back(tmp_path):
    key = RunKey("a", 0, 0.1)
    Results(tmp_path).put(key, RESULT)
    assert Results(tmp_path).get(key) == RESULT


@pytest.mark.parametrize(("mean", "spread"), [(0.59, 0.2), (0.75, 0.02), (0.2, 0.6), (0.9, 0.3)])
def test_logits_with_a_mean_and_a_spread(mean, spread):
    bias, std = solve_logits(mean, spread)
    logits = bias + std * np.random.default_rng(0).normal(size=400_000)
    log_f = -np.log1p(np.logaddexp(0, logits))
    assert np.exp(log_f).mean() == pytest.approx(mean, rel=5e-3)
    assert log_f.std() == pytest.approx(spread, rel=5e-3)


def test_no_spread_is_a_bias_alone():
    bias, std = solve_logits(0.75, 0.0)
    assert std == pytest.approx(0, abs=1e-6)
    assert 1 / (1 + np.logaddexp(0, bias)) == pytest.approx(0.75)


def trained_carope(mean, log_std):
    fields = {"model.model_dim": 128, "model.num_heads": 2}
    frequencies = {"mean": mean, "log_std": log_std}
    return {"arm": "a", "experiment": fields, "frequencies": frequencies}


def test_overrides_from_a_trained_carope():
    result = trained_carope([[0.5, 0.7], [0.7, 0.9]], [[0.1, 0.3], [0.1, 0.3]])
    bias, std = solve_logits(0.7, 0.2)
    found = frozen_like(result)
    assert found["model.carope.kernel_std"] == pytest.approx(std / 128**0.5, rel=1e-3)
    assert found["model.carope.base"] == pytest.approx((1 + np.logaddexp(0, bias)) ** 32, rel=1e-4)
    bases = mean_bases(result)["model.rope.head_bases"]
    assert np.power(bases, -2 / 64) == pytest.approx([0.6, 0.8], rel=1e-5)
    experiment = with_overrides(
        Experiment(), {"model.position": "rope", "model.num_heads": 2} | mean_bases(result), "a"
    )
    assert from_json(json.loads(json.dumps(to_json(experiment))), "a") == experiment
    with pytest.raises(ValueError, match="a has no frequencies"):
        frozen_like(result | {"frequencies": None})


def test_the_study_of_the_project_is_possible(request):
    path = request.config.rootpath / "configs" / "studies" / "extrapolation.py"
    found = load_study(path)
    core = [arm for arm in found.arms if arm.group == "core"]
    assert len(core) == 10
    assert all(arm.seeds == (0, 1, 2) and arm.rate_of is None for arm in core)
    assert found.lengths == (128, 256, 512, 1024, 2048)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say which of run, report, cost"),
        (["rum"], "say which of run, report, cost"),
        (["run", "nowhere.py", "--workdir", "w"], "no study file nowhere.py"),
    ],
)
def test_bad_command_lines_are_one_message(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command.run(main, arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert "Traceback" not in error


def test_a_pattern_that_matches_nothing_names_the_arms(tmp_path):
    with pytest.raises(ValueError, match="--only x matches no arm of a"):
        run(study(Arm("a", ROPE)), tmp_path, FakeWorker(), only="x")
