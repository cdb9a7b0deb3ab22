"""A run's result: one small JSON file, written whole."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from carope_jax._cli import write_whole
from carope_jax.study._config import Arm, Study
from carope_jax.study._overrides import first_difference

Result = dict[str, Any]
"""What `docs/study.md` lists under "A result"."""

_KEYS = ("arm", "seed", "rate", "status", "experiment", "evaluations")
_EVALUATED = "evaluated_as"


class RunKey(NamedTuple):
    """Which run of a study."""

    arm: str
    seed: int
    rate: float

    @property
    def name(self) -> str:
        """A file's name."""
        return f"{self.arm}.seed{self.seed}.rate{self.rate:g}"


class Results:
    """The results in a folder, by run.

    Args:
      folder: made when the first result is written.

    Raises:
      ValueError: a file there is not a result, or two of one run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._by_key: dict[RunKey, Result] = {}
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            result = _read(path)
            key = RunKey(result["arm"], result["seed"], result["rate"])
            if key.name != path.stem:
                raise ValueError(f"{path} is the result of {key.name}")
            self._by_key[key] = result

    def __iter__(self) -> Iterator[tuple[RunKey, Result]]:
        return iter(self._by_key.items())

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: RunKey) -> Result | None:
        """A run's result, or None."""
        return self._by_key.get(key)

    def put(self, key: RunKey, result: Result) -> None:
        """Writes a result, whole or not at all."""
        write_whole(self.folder / f"{key.name}.json", to_text(result))
        self._by_key[key] = result

    def add_from(self, other: "Results") -> int:
        """Takes over the other's results of runs that are not here, or further there; how many."""
        count = 0
        for key, result in other:
            mine = self.get(key)
            if mine is None or (is_evaluated(result) and not is_evaluated(mine)):
                self.put(key, result)
                count += 1
        return count

    def of(self, arm: str, seed: int | None = None) -> dict[RunKey, Result]:
        """An arm's results (of one seed), by run."""
        return {k: r for k, r in self if k.arm == arm and seed in (None, k.seed)}

    def best_rate(self, study: Study, arm: Arm) -> float | None:
        """The rate with the lowest validation loss at training length; None: not known yet, or no
        run of the sweep ended well."""
        if arm.rate_of is not None:
            return self.best_rate(study, study.arm(arm.rate_of))
        found = [self.get(RunKey(arm.name, arm.seeds[0], rate)) for rate in study.rates]
        if any(result is None for result in found):
            return None
        losses = [
            (result["validation"]["nll"], result["rate"])
            for result in found
            if result is not None and is_done(result)
        ]
        return min(losses)[1] if losses else None

    def final(self, study: Study, arm: Arm, seed: int) -> Result | None:
        """A seed's evaluated result at the arm's best rate, or None."""
        rate = self.best_rate(study, arm)
        result = None if rate is None else self.get(RunKey(arm.name, seed, rate))
        return result if result is not None and is_evaluated(result) else None


def is_done(result: Mapping[str, Any]) -> bool:
    """Whether the run was trained to its end."""
    return result["status"] == "done"


def is_evaluated(result: Mapping[str, Any]) -> bool:
    """Whether it was evaluated under the protocols too."""
    return bool(result["evaluations"])


def check_unchanged(
    result: Mapping[str, Any], experiment: Mapping[str, Any], evaluated_as: Mapping[str, Any]
) -> None:
    """Raises a ValueError that names the arm and the field where a result is of another study."""
    differs = first_difference(experiment, result["experiment"])
    if differs is None and is_evaluated(result):
        differs = first_difference(evaluated_as, result[_EVALUATED])
    if differs is not None:
        raise ValueError(
            f"the study has changed since arm {result['arm']!r} (seed {result['seed']}) was run: "
            f"{differs}; use another --workdir, or change it back"
        )


def to_text(result: Mapping[str, Any]) -> str:
    """JSON with a line a key, and a line an entry below `evaluations`: small, and diffable."""

    def lines(value: Any, depth: int, indent: str) -> str:
        if depth == 0 or not isinstance(value, dict) or not value:
            return json.dumps(value, separators=(",", ":"))
        inner = indent + " "
        body = ",\n".join(
            f"{inner}{json.dumps(key)}: {lines(entry, depth - 1, inner)}"
            for key, entry in value.items()
        )
        return f"{{\n{body}\n{indent}}}"

    return lines(dict(result), 3, "") + "\n"


def _read(path: Path) -> Result:
    try:
        result = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    missing = [k for k in _KEYS if not isinstance(result, dict) or k not in result]
    if missing:
        raise ValueError(f"{path} is not a run's result: it has no {missing[0]!r}")
    return result
