"""Two runs side by side: whether they computed the same, and where they first did not."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from carope_jax.training._checkpoint import CheckpointConfig, Checkpoints
from carope_jax.training._records import FINGERPRINT, WALL_CLOCK, read_metrics
from carope_jax.training._run import RunFolder, flat_fields, is_resumable

_BATCH = "batch" + FINGERPRINT


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing that the runs have in two ways; None: it is in one of them only."""

    what: str
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What two runs have in common, and in what they differ. Values are compared exactly."""

    inputs: tuple[Difference, ...]
    """Of the configuration (fields that decide what an update computes), tokenizer and data."""
    first_step: int | None
    """The first step whose rows or checkpoints differ."""
    differences: tuple[Difference, ...]
    """Of that step: the batch first, as what differs there explains the rest."""
    aside: tuple[Difference, ...]
    """Fields that differ but change no update, such as the mesh, which changes rounding."""
    rows: int
    """Steps with a row in both."""
    checkpoints: tuple[int, ...]
    """Checkpoints in both, whose arrays were compared by fingerprint."""
    last_steps: tuple[int, int]
    """The last row's step of each."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs in all that was compared."""
        return not self.inputs and self.first_step is None

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"equal": self.equal, **dataclasses.asdict(self)}


def compare_runs(a: str | epath.Path, b: str | epath.Path) -> Comparison:
    """Compares two runs' experiments, tokenizers, data, rows and checkpoints.

    Rows are compared at the steps that both have, in the entries that both have, but for those of
    the clock. Checkpoints that both still have are compared array by array, by their fingerprints.

    Raises:
      FileNotFoundError: there is no run in a folder.
      ValueError: a file of a run is damaged, or the two have no step in common.
    """
    folders = (RunFolder(a), RunFolder(b))
    ours, theirs = (flat_fields(folder.experiment()) for folder in folders)
    fields = _differing(ours, theirs)
    inputs = [d for d in fields if not is_resumable(d.what)]
    hashes = [folder.tokenizer().hash for folder in folders]
    stores = [Checkpoints(folder.checkpoints, CheckpointConfig()) for folder in folders]
    inputs += _differing({"tokenizer": hashes[0]}, {"tokenizer": hashes[1]})
    data = [store.info(steps[-1]).get("data") for store in stores if (steps := store.steps())]
    if len(data) == 2:
        inputs += _differing({"data": data[0]}, {"data": data[1]})

    rows_a, rows_b = (_by_step(folder.path) for folder in folders)
    shared = sorted(rows_a.keys() & rows_b.keys())
    saved = sorted({*stores[0].steps()} & {*stores[1].steps()})
    if not shared and not saved:
        raise ValueError(f"the runs in {a} and {b} have no step in common")
    first, differences = None, list[Difference]()
    for step in sorted({*shared, *saved}):
        if step in rows_a and step in rows_b:
            differences = _rows(rows_a[step], rows_b[step])
        if step in saved:
            differences += _differing(*(store.fingerprints(step) for store in stores))
        if differences:
            first = step
            break
    return Comparison(
        inputs=tuple(inputs),
        first_step=first,
        differences=tuple(differences),
        aside=tuple(d for d in fields if is_resumable(d.what)),
        rows=len(shared),
        checkpoints=tuple(saved),
        last_steps=(max(rows_a, default=0), max(rows_b, default=0)),
    )


def _rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    shared = [name for name in a if name in b and name not in WALL_CLOCK]
    shared.sort(key=lambda name: name != _BATCH)
    return [Difference(name, a[name], b[name]) for name in shared if a[name] != b[name]]


def _by_step(folder: epath.Path) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in read_metrics(folder)}


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    names: Iterable[str] = {**a, **b}
    return [Difference(n, a.get(n), b.get(n)) for n in names if a.get(n) != b.get(n)]
