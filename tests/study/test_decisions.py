"""Holm by hand, paired intervals, and every way a decision can go."""

import numpy as np
import pytest

from carope_jax.study import Explanation, Question
from carope_jax.study._decisions import decide
from carope_jax.study._statistics import Difference, difference_of, holm, paired_difference

QUESTION = Question(
    "carope",
    "rope",
    (Explanation("base", ("matched",)), Explanation("noise", ("frozen", "carope+shuffled"))),
)


def seeds(*intervals):
    return [Difference((low + high) / 2, low, high, 0.01) for low, high in intervals]


AHEAD = seeds((-0.3, -0.1), (-0.2, -0.05))
SAME = seeds((-0.005, 0.004), (-0.009, 0.009))
OPEN = seeds((-0.3, -0.1), (-0.2, 0.05))
BEHIND = seeds((0.1, 0.2), (0.1, 0.3))


def outcome(baseline=AHEAD, matched=AHEAD, frozen=AHEAD, shuffled=AHEAD):
    return decide(
        QUESTION,
        {"rope": baseline, "matched": matched, "frozen": frozen, "carope+shuffled": shuffled},
    )


@pytest.mark.parametrize(
    ("differences", "wanted"),
    [
        ({}, "context"),
        ({"matched": SAME}, "base"),
        ({"frozen": SAME}, "noise"),
        ({"shuffled": SAME}, "noise"),
        ({"matched": SAME, "frozen": SAME}, "base and noise"),
        ({"matched": OPEN}, "undecided"),
        ({"matched": BEHIND}, "undecided"),
        ({"matched": SAME[:1] + OPEN[1:]}, "undecided"),
        ({"baseline": SAME}, "no gain"),
        ({"baseline": OPEN}, "no gain"),
        ({"baseline": BEHIND, "matched": SAME}, "no gain"),
        ({"frozen": None}, "not run yet"),
        ({"baseline": []}, "not run yet"),
    ],
)
def test_every_decision(differences, wanted):
    assert outcome(**differences).outcome == wanted


def test_a_decision_names_what_it_rests_on():
    assert "matched" in outcome(matched=SAME).why
    assert outcome(frozen=None).why == "missing: frozen"
    assert outcome(matched=OPEN).why.endswith(": matched")


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.04: times 4, 3, 2, 1, never falling.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_a_constant_difference_has_no_spread():
    counts = np.array([10.0, 20.0, 5.0])
    found = paired_difference(3 * counts - 0.25 * counts, 3 * counts, counts)
    assert found[:3] == pytest.approx((-0.25, -0.25, -0.25))
    assert found.p == pytest.approx(1e-4)
    assert paired_difference(counts, counts, counts).p == 1


def test_the_interval_is_that_of_the_mean_over_documents():
    rng = np.random.default_rng(1)
    change, counts = rng.normal(0.1, 1.0, 400), np.full(400, 1.0)
    found = paired_difference(change + 5, np.full(400, 5.0), counts)
    error = change.std() / 20
    assert found.mean == pytest.approx(change.mean())
    assert found.low == pytest.approx(change.mean() - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(change.mean() + 1.96 * error, abs=0.1 * error)


def test_what_is_not_paired_is_refused():
    with pytest.raises(ValueError, match="at least two documents"):
        paired_difference(np.ones(1), np.ones(1), np.ones(1))
    with pytest.raises(ValueError, match="counts must be positive"):
        paired_difference(np.ones(2), np.ones(2), np.zeros(2))
    one = {"targets_hash": "a", "ends": [128], "sums": [[1.0, 2.0]], "counts": [[1, 1]]}
    assert difference_of(one, one, 256) is None
    assert difference_of(one, one, 128).mean == 0
    with pytest.raises(ValueError, match="different targets"):
        difference_of(one, one | {"targets_hash": "b"}, 128)
