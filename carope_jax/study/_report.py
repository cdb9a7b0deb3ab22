"""A study's report: Markdown, JSON and a picture, from whatever is finished."""

import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from carope_jax._cli import write_whole
from carope_jax.evaluation import Evaluation, PositionBin, bootstrap_mean, plot_by_position
from carope_jax.study import _tables as tables
from carope_jax.study._config import Study
from carope_jax.study._results import Results

_NONE = "-"


@dataclasses.dataclass(frozen=True)
class Report:
    """What `write_report` wrote.

    Attributes:
      markdown: the tables.
      files: where they are.
    """

    markdown: str
    files: tuple[Path, ...]


def write_report(study: Study, results: Results, folder: Path) -> Report:
    """Writes `report.md`, `report.json`, and `loss_by_position.png` if anything has a curve.

    Raises:
      ValueError: there is no result, or results are of different data.
    """
    if not len(results):
        raise ValueError(f"no results in {results.folder}")
    tables.check_comparable(results)
    finals = tables.final_results(study, results)
    evaluations = tables.same_targets_of(study, finals)
    references = dict.fromkeys(n for q in study.questions for n in (q.baseline, q.subject))
    data: dict[str, Any] = {
        "study": study.name,
        "missing": tables.missing_runs(study, results),
        "failed": tables.failed_runs(results),
        "sweeps": tables.sweep_rows(study, results),
        "perplexity": {
            protocol: tables.perplexities(study, finals, protocol)
            for protocol in study.measurement.protocols
        },
        "differences": {
            reference: tables.difference_rows(study, evaluations, reference)
            for reference in references
            if reference in evaluations
        },
        "decisions": {
            subject: {length: decision._asdict() for length, decision in by_length.items()}
            for subject, by_length in tables.decisions(study, evaluations).items()
        },
        "frequencies": tables.frequency_rows(finals),
        "cost": tables.cost_rows(finals),
    }
    folder.mkdir(parents=True, exist_ok=True)
    markdown = _markdown(study, results, data)
    files = [folder / "report.md", folder / "report.json"]
    curves = tables.position_curves(study, finals)
    if curves:
        picture = folder / "loss_by_position.png"
        plot_by_position(
            {name: [_evaluation(study, c) for c in found] for name, found in curves.items()},
            picture,
        )
        files.append(picture)
        markdown += "\n![Loss by position](loss_by_position.png)\n"
    write_whole(files[0], markdown)
    write_whole(files[1], json.dumps(data, indent=1) + "\n")
    return Report(markdown, tuple(files))


def _markdown(study: Study, results: Results, data: dict[str, Any]) -> str:
    parts = [f"# {study.name}: {len(results)} runs"]
    for name, title in (("missing", "Not finished"), ("failed", "Failed")):
        if data[name]:
            parts.append(f"## {title}\n\n" + "\n".join(f"* {line}" for line in data[name]))
    parts.append("## Decisions\n\n" + _decisions(data["decisions"]))
    lengths = [_length(study, length) for length in study.lengths]
    for protocol, rows in data["perplexity"].items():
        cells = ([name, *map(_spread, row)] for name, row in rows.items())
        parts.append(f"## Perplexity, {protocol}\n\n" + _table(["arm", *lengths], cells))
    for reference, rows in data["differences"].items():
        parts.append(
            f"## Nats a token more than {reference}, same targets\n\n"
            "The mean over seeds, the interval that holds every seed's 95% interval (documents), "
            "and Holm's p over the table.\n\n" + _differences(study, lengths, rows)
        )
    parts.append(
        "## Sweeps: validation at training length\n\n"
        + _table(
            ["arm", *(f"{rate:g}" for rate in study.rates), "best"],
            (
                [r["arm"], *(_number(r["losses"][rate], 4) for rate in study.rates), _best(r)]
                for r in data["sweeps"]
            ),
        )
    )
    parts.append("## What f learned\n\n" + _frequencies(data["frequencies"]))
    parts.append(
        "## Cost\n\n"
        + _table(
            ["arm", "parameters", "tokens/s", "seconds", "FLOPs a token"],
            (
                [
                    r["arm"],
                    f"{r['parameters']:,}",
                    f"{r['tokens_per_second']:,.0f}",
                    f"{r['seconds']:.0f}",
                    f"{r['flops_per_token']:,.0f}",
                ]
                for r in data["cost"]
            ),
        )
    )
    return "\n\n".join(parts) + "\n"


def _decisions(answers: dict[str, dict[int, dict[str, str]]]) -> str:
    return _table(
        ["what explains the gain of", "at", "decision", "because"],
        (
            [subject, f"{length:,}", decision["outcome"], decision["why"]]
            for subject, by_length in answers.items()
            for length, decision in by_length.items()
        ),
    )


def _differences(study: Study, lengths: Sequence[str], rows: list[dict[str, Any]]) -> str:
    by_arm: dict[str, dict[int, str]] = {}
    for r in rows:
        text = f"{r['mean']:+.3f} [{r['low']:+.3f}, {r['high']:+.3f}] p {r['p_holm']:.2g}"
        by_arm.setdefault(r["arm"], {})[r["length"]] = text + ("" if r["one_sign"] else " (signs)")
    seeds = {r["arm"]: r["seeds"] for r in rows}
    return _table(
        ["arm", "seeds", *lengths],
        (
            [arm, str(seeds[arm]), *(cells.get(length, _NONE) for length in study.lengths)]
            for arm, cells in by_arm.items()
        ),
    )


def _frequencies(rows: list[dict[str, Any]]) -> str:
    kinds = list(rows[0]["by_kind"]) if rows else []
    return _table(
        ["arm", "layer", "mean f", "spread of f", "spread of log f", *kinds],
        (
            [
                r["arm"],
                str(r["layer"]),
                *(f"{r[field]:.3f}" for field in ("mean", "std", "log_std")),
                *(f"{r['by_kind'][kind]:.3f}" for kind in kinds),
            ]
            for r in rows
        ),
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(header), ["---"] * len(header), *map(list, rows)]
    if len(lines) == 2:
        return "Nothing yet."
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _length(study: Study, length: int) -> str:
    return f"{length:,} ({length // study.base.data.length}x)"


def _spread(values: Sequence[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return _NONE
    if len(numbers) == 1:
        return f"{numbers[0]:,.2f}"
    return f"{statistics.fmean(numbers):,.2f} ± {statistics.stdev(numbers):,.2f}"


def _number(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _best(row: dict[str, Any]) -> str:
    if row["best"] is None:
        return _NONE
    return f"{row['best']:g}" + (" (the sweep's edge)" if row["at_the_edge"] else "")


def _evaluation(study: Study, found: dict[str, Any]) -> Evaluation:
    """A run's curve as the picture wants it, the intervals made from the documents' sums."""
    sums_UC, counts_UC = (np.asarray(found[name], np.float64).T for name in ("sums", "counts"))
    low_C, high_C = bootstrap_mean(sums_UC, counts_UC, seed=0)
    curve = tuple(
        PositionBin(
            start=found["starts"][c],
            end=found["ends"][c],
            nll=float(sums_UC[:, c].sum() / counts_UC[:, c].sum()),
            tokens=int(counts_UC[:, c].sum()),
            ci95=(float(low_C[c]), float(high_C[c])),
        )
        for c in range(sums_UC.shape[1])
    )
    return Evaluation(
        protocol="per_position",
        train_length=study.base.data.length,
        params=0,
        position="",
        seed=0,
        bootstrap_unit="document",
        window="",
        results=(),
        curve=curve,
    )
