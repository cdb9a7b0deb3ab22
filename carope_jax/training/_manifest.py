"""What is written beside a checkpoint's arrays, and how it is compared with what a run expects."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax

_LINES_SHOWN = 5


class CheckpointMismatch(ValueError):  # noqa: N818 - named for what happened
    """A sound checkpoint that is not the one this run expects."""


class CheckpointCorrupt(ValueError):  # noqa: N818 - named for what happened
    """A checkpoint whose files are damaged, incomplete or out of reach."""


def check_same(expected: Mapping[str, Any], found: Mapping[str, Any], what: str) -> None:
    """Compares facts about a run with those of a checkpoint.

    Args:
        expected: The facts of this run.
        found: The facts saved with the checkpoint.
        what: What is compared, for the message: "tokenizer", say.

    Raises:
        CheckpointMismatch: They differ; the message names every differing key with both values.
    """
    absent = object()
    lines = []
    for key in sorted({*expected, *found}):
        here, there = expected.get(key, absent), found.get(key, absent)
        if here != there:
            here_text = "absent" if here is absent else repr(here)
            there_text = "absent" if there is absent else repr(there)
            lines.append(f"{key}: {here_text} here, {there_text} in the checkpoint")
    if lines:
        raise CheckpointMismatch("\n  ".join([f"{what} differs from the checkpoint's:", *lines]))


def seal(body: dict[str, Any]) -> dict[str, Any]:
    """Wraps a JSON dictionary with its checksum."""
    return {"sha256": _digest(body), "body": body}


def unseal(sealed: Any) -> dict[str, Any]:
    """What `seal` wrapped; ValueError if it is not what was wrapped."""
    match sealed:
        case {"sha256": digest, "body": dict(body)} if digest == _digest(body):
            return body
    raise ValueError("damaged since it was saved, or not written by carope_jax")


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def plain_json(info: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that shares nothing with the original, which JSON gives back unchanged."""
    try:
        copy = json.loads(json.dumps(dict(info), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"info must be JSON ({error}), got {info}") from error
    if copy != info:
        raise ValueError(f"info must come back from JSON unchanged (no tuples), got {info}")
    return copy


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves by a readable path, in the order of `jax.tree.leaves`.

    Orbax is given this flat dictionary rather than the tree, so that it needs to know nothing of
    tuples, named tuples and empty nodes.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if not named or "" in named or len(named) != len(leaves):
        raise ValueError(
            f"state must be a tree whose leaves have paths of their own, got {list(named)}"
        )
    return named


def shape_and_dtype(leaf: Any) -> tuple[list[int], str]:
    return list(leaf.shape), str(leaf.dtype)


def check_leaves(wanted: dict[str, Any], saved: dict[str, Any], where: str) -> None:
    """Compares arrays by path with the manifest's (shape, type, fingerprint) by path."""
    lines = [f"{path}: missing from the checkpoint" for path in wanted if path not in saved]
    lines += [f"{path}: in the checkpoint only" for path in saved if path not in wanted]
    for path in (path for path in wanted if path in saved):
        here, there = shape_and_dtype(wanted[path]), saved[path][:2]
        for what, ours, theirs in zip(("shape", "dtype"), here, there, strict=True):
            if ours != theirs:
                lines.append(f"{path}: {what} {ours} here, {theirs} in the checkpoint")
    if lines:
        raise CheckpointMismatch(f"{where} is of another model or optimizer:\n  {first_few(lines)}")


def first_few(lines: list[str]) -> str:
    more = len(lines) - _LINES_SHOWN
    return "\n  ".join(lines[:_LINES_SHOWN] + ([f"and {more} more"] if more > 0 else []))
