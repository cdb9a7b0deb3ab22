"""The numbers of a report, from results: nothing is formatted here."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from carope_jax.study._config import Arm, Study
from carope_jax.study._decisions import Decision, decide
from carope_jax.study._results import Result, Results, RunKey, is_done
from carope_jax.study._statistics import Difference, difference_of, holm
from carope_jax.study._work import TRAINED


def final_results(study: Study, results: Results) -> dict[str, dict[int, Result]]:
    """Each arm's evaluated results at its best rate, by seed; arms without any have none."""
    return {
        arm.name: {
            seed: found
            for seed in arm.seeds
            if (found := results.final(study, arm, seed)) is not None
        }
        for arm in study.arms
    }


def missing_runs(study: Study, results: Results) -> list[str]:
    """What is not finished, a line an arm."""
    lines = []
    for arm in study.arms:
        finished = [s for s in arm.seeds if results.final(study, arm, s) is not None]
        if len(finished) == len(arm.seeds):
            continue
        swept = ""
        if arm.rate_of is None:
            keys = [RunKey(arm.name, arm.seeds[0], rate) for rate in study.rates]
            swept = f", {sum(results.get(k) is not None for k in keys)} of {len(keys)} rates swept"
        lines.append(f"{arm.name}: {len(finished)} of {len(arm.seeds)} seeds{swept}")
    return lines


def failed_runs(results: Results) -> list[str]:
    """Runs whose loss was not finite, with what was said."""
    return [f"{key.name}: {r['error']}" for key, r in results if not is_done(r)]


def sweep_rows(study: Study, results: Results) -> list[dict[str, Any]]:
    """Validation at training length by rate, the best rate, and whether it is at the edge."""
    rows = []
    for arm in study.arms:
        if arm.rate_of is not None:
            continue
        losses: dict[float, float | None] = {}
        for rate in study.rates:
            result = results.get(RunKey(arm.name, arm.seeds[0], rate))
            done = result is not None and is_done(result)
            losses[rate] = result["validation"]["nll"] if done and result is not None else None
        best = results.best_rate(study, arm)
        edge = (
            best is not None
            and len(study.rates) > 1
            and best in study.rates[:: len(study.rates) - 1]
        )
        rows.append({"arm": arm.name, "losses": losses, "best": best, "at_the_edge": edge})
    return rows


def perplexities(
    study: Study, finals: dict[str, dict[int, Result]], protocol: str
) -> dict[str, list[list[float | None]]]:
    """exp(nll) by arm (and `arm+variant`), then length, then seed; None: out of reach."""
    rows: dict[str, list[list[float | None]]] = {}
    for arm in study.arms:
        for variant in (TRAINED, *(v.name for v in arm.variants)):
            found = [
                [_perplexity(nll) for _, nll, _ in r["evaluations"][variant][protocol]["results"]]
                for r in finals[arm.name].values()
                if protocol in r["evaluations"].get(variant, {})
            ]
            if found:
                rows[labelled(arm, variant)] = [list(at) for at in zip(*found, strict=True)]
    return rows


def _perplexity(nll: float | None) -> float | None:
    return None if nll is None else float(np.exp(nll))


def labelled(arm: Arm, variant: str) -> str:
    """An arm's name in tables, with its variant."""
    return arm.name if variant == TRAINED else f"{arm.name}+{variant}"


def same_targets_of(
    study: Study, finals: dict[str, dict[int, Result]]
) -> dict[str, dict[int, Any]]:
    """Evaluations under `same_targets`, by arm or `arm+variant`, then seed."""
    return {
        labelled(arm, variant): found
        for arm in study.arms
        for variant in (TRAINED, *(v.name for v in arm.variants))
        if (
            found := {
                seed: r["evaluations"][variant]["same_targets"]
                for seed, r in finals[arm.name].items()
                if "same_targets" in r["evaluations"].get(variant, {})
            }
        )
    }


def differences_at(
    evaluations: dict[str, dict[int, Any]], subject: str, other: str, length: int
) -> list[Difference]:
    """Subject minus other, one a seed that both have; none where one can't read so far."""
    ours, theirs = evaluations.get(subject, {}), evaluations.get(other, {})
    found = (difference_of(ours[s], theirs[s], length) for s in ours if s in theirs)
    return [d for d in found if d is not None]


def difference_rows(
    study: Study, evaluations: dict[str, dict[int, Any]], reference: str
) -> list[dict[str, Any]]:
    """Each arm minus the reference at each length: mean over seeds, the interval that holds every
    seed's, the number of seeds, whether all have one sign, and Holm's p over all rows of it.

    A row's p-value is its seeds' largest: a statement must hold in every one of them.
    """
    rows: list[dict[str, Any]] = []
    for name in evaluations:
        for length in study.lengths:
            found = differences_at(evaluations, name, reference, length)
            if name == reference or not found:
                continue
            rows.append(
                {
                    "arm": name,
                    "length": length,
                    "mean": statistics.fmean(d.mean for d in found),
                    "low": min(d.low for d in found),
                    "high": max(d.high for d in found),
                    "seeds": len(found),
                    "one_sign": len({np.sign(d.mean) for d in found}) == 1,
                    "p": max(d.p for d in found),
                }
            )
    for row, adjusted in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = adjusted
    return rows


def decisions(
    study: Study, evaluations: dict[str, dict[int, Any]]
) -> dict[str, dict[int, Decision]]:
    """The answer to each question at each length beyond the training length.

    An arm that lacks a seed of the subject's is not finished.
    """
    answers: dict[str, dict[int, Decision]] = {}
    for question in study.questions:
        seeds = study.arm(question.subject).seeds
        names = [question.baseline, *(r for e in question.explanations for r in e.rivals)]
        answers[question.subject] = {}
        for length in study.lengths[1:]:
            found = {n: differences_at(evaluations, question.subject, n, length) for n in names}
            whole = {n: d if len(d) == len(seeds) else None for n, d in found.items()}
            answers[question.subject][length] = decide(question, whole)
    return answers


def cost_rows(finals: dict[str, dict[int, Result]]) -> list[dict[str, Any]]:
    """Parameters, speed and time of each arm, medians over its evaluated seeds."""
    return [
        {
            "arm": name,
            "parameters": next(iter(found.values()))["training"]["parameters"],
            **{
                field: statistics.median(r["training"][field] for r in found.values())
                for field in ("tokens_per_second", "seconds", "flops_per_token")
            },
        }
        for name, found in finals.items()
        if found
    ]


def frequency_rows(finals: dict[str, dict[int, Result]]) -> list[dict[str, Any]]:
    """What f learned, a row an arm and layer, of the first evaluated seed; means over heads."""
    rows = []
    for name, found in finals.items():
        frequencies = next(iter(found.values())).get("frequencies") if found else None
        if not frequencies:
            continue
        for layer, _ in enumerate(frequencies["mean"]):
            row = {
                field: statistics.fmean(frequencies[field][layer])
                for field in ("mean", "std", "log_std")
            }
            kinds = {
                kind: statistics.fmean(values[layer])
                for kind, values in frequencies["mean_by_kind"].items()
            }
            rows.append({"arm": name, "layer": layer, **row, "by_kind": kinds})
    return rows


def check_comparable(results: Results) -> None:
    """Raises a ValueError where results are of different studies or data."""
    for field in ("study", "data"):
        values = {r[field]: key.name for key, r in results if is_done(r) and field in r}
        if len(values) > 1:
            raise ValueError(
                f"results of different {field} can't share a table: {', '.join(values.values())}"
            )


def position_curves(study: Study, finals: dict[str, dict[int, Result]]) -> dict[str, Sequence[Any]]:
    """Evaluations of `per_position` by core arm, one a seed: more lines than that can't be read."""
    curves: dict[str, Sequence[Any]] = {}
    for arm in study.arms:
        trained = [r["evaluations"][TRAINED] for r in finals[arm.name].values()]
        found = [e["per_position"] for e in trained if e.get("per_position", {}).get("ends")]
        if arm.group == "core" and found:
            curves[arm.name] = found
    return curves
