"""The report of made-up results, and the cost of full-size runs."""

import json

import numpy as np
import pytest

from carope_jax import command
from carope_jax.study import (
    Arm,
    Explanation,
    Question,
    Results,
    RunKey,
    Study,
    Variant,
    write_report,
)
from carope_jax.study.__main__ import main
from carope_jax.study._cost import chip_hours
from carope_jax.study._tables import (
    check_comparable,
    difference_rows,
    final_results,
    missing_runs,
    same_targets_of,
    sweep_rows,
)
from carope_jax.training import Experiment, flops_per_token

LENGTHS = (128, 256, 512, 1024, 2048)
COUNTS = [64, 128, 64, 192]
STUDY = Study(
    name="made up",
    base=Experiment(),
    rates=(1e-3, 2e-3),
    arms=(
        Arm("rope", {"model.position": "rope"}, seeds=(0, 1)),
        Arm(
            "carope",
            {"model.position": "carope"},
            seeds=(0, 1),
            variants=(Variant("shuffled", {"model.carope.control": "shuffled"}),),
        ),
        Arm("gate", {"model.value_gate": True}, seeds=(0, 1), rate_of="rope"),
    ),
    questions=(
        Question(
            "carope",
            "rope",
            (Explanation("noise", ("carope+shuffled",)), Explanation("parameters", ("gate",))),
        ),
    ),
)


def same_targets(nll):
    rng = np.random.default_rng(0)
    hard = rng.normal(5, 1, len(COUNTS))
    return {
        "results": [[length, nll, sum(COUNTS)] for length in LENGTHS],
        "targets_hash": "t",
        "units": list(range(len(COUNTS))),
        "starts": [0] * len(LENGTHS),
        "ends": list(LENGTHS),
        "counts": [COUNTS] * len(LENGTHS),
        "sums": [((hard + nll) * COUNTS).tolist()] * len(LENGTHS),
    }


def per_position(nll):
    edges = [0, 64, 128, 1024, 2047]
    widths = np.diff(edges)
    return {
        "results": [[length, nll, 1] for length in LENGTHS],
        "units": [0, 2],
        "starts": edges[:-1],
        "ends": edges[1:],
        "counts": [[int(w), int(2 * w)] for w in widths],
        "sums": [[nll * w, 2.1 * nll * w] for w in widths],
    }


def put(results, arm, seed, rate, nll, variants=(), evaluated=True):
    evaluations = {}
    if evaluated:
        evaluations["trained"] = {
            "paper": {"results": [[length, nll, 9] for length in LENGTHS]},
            "same_targets": same_targets(nll),
            "per_position": per_position(nll),
        }
        for name, variant_nll in variants:
            evaluations[name] = {"same_targets": same_targets(variant_nll)}
    key = RunKey(arm, seed, rate)
    results.put(
        key,
        {
            **key._asdict(),
            "study": "made up",
            "status": "done",
            "experiment": {},
            "data": "d",
            "validation": {"nll": nll, "tokens": 1},
            "training": {
                "parameters": 10,
                "tokens_per_second": 100,
                "seconds": 2.0,
                "flops_per_token": 60.0,
            },
            "frequencies": None,
            "evaluations": evaluations,
        },
    )


def filled(folder, shuffled=0.5, gate=0.5):
    results = Results(folder)
    for arm, nll, variants in (
        ("rope", 1.0, ()),
        ("carope", 0.0, [("shuffled", shuffled)]),
        ("gate", gate, ()),
    ):
        if arm != "gate":
            put(results, arm, 0, 1e-3, nll + 1, evaluated=False)
        for seed in (0, 1):
            put(results, arm, seed, 2e-3, nll, variants)
    return results


@pytest.mark.parametrize(
    ("nlls", "wanted"),
    [
        ({}, "context"),
        ({"shuffled": 0.001}, "noise"),
        ({"gate": 0.0}, "parameters"),
        ({"gate": -0.5}, "undecided"),
    ],
)
def test_a_report_decides(tmp_path, nlls, wanted):
    written = write_report(STUDY, filled(tmp_path / "results", **nlls), tmp_path / "report")
    data = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [d["outcome"] for d in data["decisions"]["carope"].values()] == [wanted] * 4
    assert f"| carope | 256 | {wanted} |" in written.markdown
    assert data["missing"] == data["failed"] == []
    assert (tmp_path / "report" / "loss_by_position.png").stat().st_size > 10_000


def test_a_report_of_what_is_there_says_what_is_missing(tmp_path):
    results = Results(tmp_path / "results")
    put(results, "rope", 0, 1e-3, 1.0)
    put(results, "rope", 0, 2e-3, 2.0, evaluated=False)
    write_report(STUDY, results, tmp_path / "report")
    data = json.loads((tmp_path / "report" / "report.json").read_text())
    assert data["missing"] == [
        "rope: 1 of 2 seeds, 2 of 2 rates swept",
        "carope: 0 of 2 seeds, 0 of 2 rates swept",
        "gate: 0 of 2 seeds",
    ]
    assert data["decisions"]["carope"]["256"]["outcome"] == "not run yet"
    assert list(data["perplexity"]["paper"]) == ["rope"]


def test_a_decision_waits_for_every_seed(tmp_path):
    results = filled(tmp_path)
    (tmp_path / "gate.seed1.rate0.002.json").unlink()
    results = Results(tmp_path)
    write_report(STUDY, results, tmp_path / "report")
    data = json.loads((tmp_path / "report" / "report.json").read_text())
    assert data["decisions"]["carope"]["256"] == {"outcome": "not run yet", "why": "missing: gate"}
    assert missing_runs(STUDY, results) == ["gate: 1 of 2 seeds"]


def test_differences_are_over_the_same_documents(tmp_path):
    results = filled(tmp_path)
    rows = difference_rows(STUDY, same_targets_of(STUDY, final_results(STUDY, results)), "rope")
    found = {(r["arm"], r["length"]): r for r in rows}
    row = found["carope", 2048]
    assert (row["mean"], row["low"], row["high"]) == pytest.approx((-1, -1, -1))
    assert row["seeds"] == 2
    assert row["p_holm"] == pytest.approx(len(rows) * 1e-4)


def test_a_best_rate_at_the_edge_is_named(tmp_path):
    row = sweep_rows(STUDY, filled(tmp_path))[0]
    assert (row["best"], row["at_the_edge"]) == (2e-3, True)


def test_results_of_other_data_are_refused(tmp_path):
    results = filled(tmp_path)
    key, result = next(iter(results))
    results.put(key, result | {"data": "other"})
    with pytest.raises(ValueError, match="results of different data"):
        check_comparable(results)


def test_nothing_to_report_is_one_message(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        command.run(main, ["report", str(tmp_path)])
    assert ended.value.code == 2
    assert "no results in" in capsys.readouterr().err


def test_the_cost_is_flops_over_speed(request, capsys):
    path = request.config.rootpath / "configs" / "gpt2_small.py"
    experiment = command.load_config(path)
    per_token = flops_per_token(experiment.model, 512)
    wanted = per_token * 524_288 * 19_000 / (0.5 * 197e12) / 3600
    assert chip_hours(experiment, 0.5, "TPU v5e") == pytest.approx(wanted)
    with pytest.raises(SystemExit) as ended:
        command.run(main, ["cost", str(path)])
    assert ended.value.code == 0
    assert "gpt2_small (124M): 9.96G tokens" in capsys.readouterr().out
    for message, mfu, chip in (("mfu must be", 0.0, "TPU v5e"), ("chip must be", 0.4, "abacus")):
        with pytest.raises(ValueError, match=message):
            chip_hours(experiment, mfu, chip)
    with pytest.raises(ValueError, match="the cost needs model"):
        chip_hours(Experiment(), 0.4, "TPU v5e")
