"""What an evaluation found, and its JSON."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

Interval = tuple[float | None, float | None]
"""95% bounds; (None, None) where one unit alone, or none, leaves the spread unknown."""

_NO_INTERVAL: Interval = (None, None)


def _perplexity(nll: float | None) -> float | None:
    if nll is None:
        return None
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class LengthResult:
    """The mean nll at one evaluation length.

    Attributes:
        length: in tokens.
        nll: sum of nll over sum of tokens, in nats; None where the model cannot read that far.
        tokens: scored targets, exactly.
        documents: documents with a scored target.
        stride: tokens between the starts (`same_targets`: ends) of neighbouring windows.
        ci95: 95% bootstrap interval of `nll`.
    """

    length: int
    nll: float | None
    tokens: int
    documents: int
    stride: int
    ci95: Interval = _NO_INTERVAL

    @property
    def ppl(self) -> float | None:
        """exp(nll), infinite where that overflows."""
        return _perplexity(self.nll)


@dataclass(frozen=True)
class Difference:
    """nll at `length` minus nll at `reference` (the training length), on the same targets.

    Attributes:
        length: in tokens.
        reference: in tokens.
        nll: the difference, in nats.
        ci95: its paired 95% interval over documents.
        does_not_rise: whether the interval's upper bound is under the tolerance; None if unknown.
    """

    length: int
    reference: int
    nll: float
    ci95: Interval
    does_not_rise: bool | None


@dataclass(frozen=True)
class PositionBin:
    """The mean nll predicted from query positions [start, end).

    Attributes:
        start: first position of the bin; position 0 reads the first token of the chunk.
        end: one past the last.
        nll: in nats.
        tokens: scored targets.
        ci95: 95% bootstrap interval over documents.
    """

    start: int
    end: int
    nll: float
    tokens: int
    ci95: Interval


@dataclass(frozen=True)
class UnitSums:
    """The sums behind one mean: a row a bootstrap unit that scored a target.

    Attributes:
        start: first query position of a bin (`per_position`); 0 elsewhere.
        end: one past its last; the evaluation length elsewhere.
        units: index of the document (of the window under `paper`).
        sums: nats.
        counts: scored targets.
    """

    start: int
    end: int
    units: tuple[int, ...]
    sums: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Evaluation:
    """One model under one protocol.

    Attributes:
        protocol: its name.
        train_length: the model's training length, in tokens.
        params: the model's number of parameters.
        position: name of its position encoding.
        seed: of the anchors and resamples.
        bootstrap_unit: what the intervals resample: "window" or "document".
        window: how windows lie, in words.
        results: one entry a length, ascending.
        differences: to the training length (`same_targets`).
        targets_hash: SHA-256 of every scored (document, offset, token id) (`same_targets`).
        bins: nll by position, doubling from the training length (`per_position`).
        curve: the same, a few positions a bin (`per_position`).
        unit_sums: the sums behind each length's mean, or behind each bin of the curve
            (`per_position`), where they were asked for.
    """

    protocol: str
    train_length: int
    params: int
    position: str
    seed: int
    bootstrap_unit: str
    window: str
    results: tuple[LengthResult, ...]
    differences: tuple[Difference, ...] = ()
    targets_hash: str | None = None
    bins: tuple[PositionBin, ...] = ()
    curve: tuple[PositionBin, ...] = ()
    unit_sums: tuple[UnitSums, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Dicts, lists, strings and finite numbers, without the keys a protocol doesn't fill."""
        data: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                value = [_entry_to_json(entry) for entry in value]
            if value not in (None, []):
                data[field.name] = value
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Evaluation":
        """The inverse of `to_json`.

        Raises:
            ValueError: a key is missing.
        """
        kinds = {
            "results": LengthResult,
            "differences": Difference,
            "bins": PositionBin,
            "curve": PositionBin,
            "unit_sums": UnitSums,
        }
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.name in data:
                value = data[field.name]
                kind = kinds.get(field.name)
                values[field.name] = (
                    value if kind is None else tuple(_entry_from_json(kind, e) for e in value)
                )
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"not the JSON of an evaluation: {error}") from error


def _entry_to_json(entry: LengthResult | Difference | PositionBin | UnitSums) -> dict[str, Any]:
    data = {field.name: getattr(entry, field.name) for field in fields(entry)}
    if isinstance(entry, UnitSums):
        return data | {name: list(data[name]) for name in ("units", "sums", "counts")}
    data["ci95"] = list(entry.ci95)
    if not isinstance(entry, Difference):
        ppl = _perplexity(entry.nll)
        data["ppl"] = ppl if ppl is None or math.isfinite(ppl) else None
    return data


def _entry_from_json(kind: type, data: Mapping[str, Any]) -> Any:
    names = {field.name for field in fields(kind)}
    values = {name: data[name] for name in names & data.keys()}
    lists = ("units", "sums", "counts") if kind is UnitSums else ("ci95",)
    try:
        return kind(**{**values, **{name: tuple(data[name]) for name in lists}})
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the JSON of a {kind.__name__}: {error}") from error
