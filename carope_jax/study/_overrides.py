"""Fields of an experiment by dotted path: read, set, compared."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from carope_jax.training import RESUMABLE, Experiment, from_json, to_json

Overrides = Mapping[str, Any]
"""Values by dotted path, such as `{"model.carope.init": "paper"}`."""


def with_overrides(experiment: Experiment, overrides: Overrides, where: str) -> Experiment:
    """The experiment with these fields set, all of them at once.

    Args:
      experiment: what is changed.
      overrides: values by dotted path.
      where: whose overrides they are, for messages.

    Raises:
      ValueError: an unknown path (the nearest is named), or a value that the field refuses.
    """
    known = dict(_leaves(experiment))
    for path in overrides:
        if path not in known:
            near = difflib.get_close_matches(path, known, n=1, cutoff=0.0)
            raise ValueError(f"{where}: unknown field {path!r}; did you mean {near[0]!r}?")
    try:
        changed = _replaced(experiment, overrides)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error
    # The dataclasses check ranges; this checks types.
    from_json(to_json(changed), where)
    return changed


def _replaced(part: Any, overrides: Overrides) -> Any:
    """One replacement a dataclass: fields that only fit each other never meet the old ones."""
    values: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for path, value in overrides.items():
        name, _, rest = path.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            values[name] = value
    for name, deeper in inner.items():
        values[name] = _replaced(getattr(part, name), deeper)
    return dataclasses.replace(part, **values)


def _leaves(part: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def identity(experiment: Experiment) -> dict[str, Any]:
    """What decides an experiment's numbers: every field that is not its default, by dotted path.

    Fields that change no update (`RESUMABLE`) are left out. A field that is added later, at its
    default, changes no identity.
    """
    defaults = dict(_leaves(Experiment()))
    return {
        path: list(value) if isinstance(value, tuple) else value
        for path, value in _leaves(experiment)
        if value != defaults[path]
        and path not in RESUMABLE
        and path.partition(".")[0] not in RESUMABLE
    }


def first_difference(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """The first field in which two identities differ, with both values; None: they don't."""
    for path in sorted({*wanted, *found}):
        here, there = wanted.get(path, "the default"), found.get(path, "the default")
        if here != there:
            return f"{path} is {here} in the study and {there} in the result"
    return None
