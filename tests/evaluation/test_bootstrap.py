import numpy as np
import pytest

from carope_jax.evaluation import _bootstrap, bootstrap_difference, bootstrap_mean


def test_matches_a_slow_loop():
    rng = np.random.default_rng(5)
    sums, counts = rng.gamma(2.0, size=23), rng.integers(1, 9, size=23)
    draws = np.random.default_rng(7)
    means = []
    for _ in range(400):
        drawn = [int(i) for i in draws.integers(0, 23, size=23)]
        means.append(sum(sums[i] for i in drawn) / sum(int(counts[i]) for i in drawn))
    expected = np.percentile(means, [2.5, 97.5])
    np.testing.assert_allclose(bootstrap_mean(sums, counts, 7, 400), expected, rtol=1e-12)


def test_columns_are_what_each_would_be_alone():
    rng = np.random.default_rng(1)
    sums, counts = rng.normal(size=(11, 3)), rng.integers(1, 5, size=(11, 3))
    together = bootstrap_mean(sums, counts, 2, 100)
    assert together.shape == (2, 3)
    for column in range(3):
        alone = bootstrap_mean(sums[:, column], counts[:, column], 2, 100)
        np.testing.assert_allclose(together[:, column], alone, rtol=1e-12)


def test_covers_the_truth_about_as_often_as_it_says():
    # Documents differ in length, and length and nll are related: the ratio of sums, not the mean of
    # ratios, is what must be covered. E[tokens * nll] / E[tokens], worked out for this mixture.
    rng = np.random.default_rng(0)
    trials, units = 400, 60
    truth = (0.5 * 10 * 2.0 + 0.5 * 40 * 3.0) / (0.5 * 10 + 0.5 * 40)
    hits = 0
    for trial in range(trials):
        long = rng.random(units) < 0.5
        counts = np.where(long, 40, 10)
        level = np.where(long, 3.0, 2.0) + rng.normal(scale=0.5, size=units)
        low, high = bootstrap_mean(counts * level, counts, trial, 300)
        hits += low < truth < high
    assert 0.90 < hits / trials < 0.985


def test_pairing_cancels_what_documents_share():
    rng = np.random.default_rng(3)
    counts = np.full(40, 10)
    hard = rng.normal(3.0, 1.0, size=40)
    shorter = counts * hard
    longer = counts * (hard - 0.05 + rng.normal(scale=0.01, size=40))
    low, high = bootstrap_difference(longer, shorter, counts, 0)
    assert low < (longer - shorter).sum() / counts.sum() < high
    assert high < -0.04
    assert np.ptp(bootstrap_mean(longer, counts, 0)) > 20 * (high - low)


def test_repeats_at_a_seed_and_moves_with_it():
    rng = np.random.default_rng(4)
    sums, counts = rng.normal(size=30), np.ones(30, int)
    assert np.array_equal(bootstrap_mean(sums, counts, 6), bootstrap_mean(sums, counts, 6))
    assert not np.array_equal(bootstrap_mean(sums, counts, 6), bootstrap_mean(sums, counts, 8))


def test_blocks_give_all_samples(monkeypatch):
    rng = np.random.default_rng(4)
    sums, counts = rng.normal(size=30), np.ones(30, int)
    monkeypatch.setattr(_bootstrap, "_CELLS_AT_ONCE", 100)
    drawn = []
    draw = _bootstrap._draw_weights

    def watched(rng, samples, units):
        weights = draw(rng, samples, units)
        assert (weights.sum(axis=1) == units).all()
        drawn.append(samples)
        return weights

    monkeypatch.setattr(_bootstrap, "_draw_weights", watched)
    low, high = bootstrap_mean(sums, counts, 6, 1000)
    assert max(drawn) == 3
    assert sum(drawn) == 1000
    error = sums.std() / np.sqrt(30)
    np.testing.assert_allclose(
        [low, high], sums.mean() + np.array([-1.96, 1.96]) * error, atol=0.08
    )


def test_one_unit_has_no_interval():
    assert np.isnan(bootstrap_mean(np.array([3.0]), np.array([2]), 0)).all()
    assert bootstrap_mean(np.ones((1, 4)), np.ones((1, 4)), 0).shape == (2, 4)


@pytest.mark.parametrize(
    ("sums", "counts", "samples", "message"),
    [
        (np.ones(3), np.ones(2), 10, r"sums\[3\] and counts\[2\]"),
        (np.ones(0), np.ones(0), 10, "sums is empty"),
        (np.ones(3), np.array([1, 0, 2]), 10, "the smallest is 0"),
        (np.ones(3), np.ones(3), 0, "samples=0"),
    ],
)
def test_bad_input_is_refused(sums, counts, samples, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_mean(sums, counts, 0, samples)


def test_a_difference_needs_one_shape():
    with pytest.raises(ValueError, match=r"sums\[3\] and reference\[1\]"):
        bootstrap_difference(np.ones(3), np.ones(1), np.ones(3), 0)
