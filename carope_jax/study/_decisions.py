"""What explains a gain, by the rules of `docs/study.md`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from carope_jax.study._config import Question
from carope_jax.study._statistics import Difference

EQUIVALENT_NATS = 0.01
"""A difference whose interval lies within this of zero is none."""

Differences = Mapping[str, Sequence[Difference] | None]
"""Subject minus each other arm, one a seed, by the arm's name; None: not finished."""


class Decision(NamedTuple):
    """What one question's answer at one length is.

    Attributes:
      outcome: "no gain", "context", the names of the explanations joined by " and ", "undecided",
        or "not run yet".
      why: the rule's words with what it rests on.
    """

    outcome: str
    why: str


def is_ahead(differences: Sequence[Difference]) -> bool:
    """Whether the subject's loss is lower in every seed, each interval excluding 0."""
    return all(d.high < 0 for d in differences)


def is_equivalent(differences: Sequence[Difference]) -> bool:
    """Whether each seed's interval lies within the tolerance of zero."""
    return all(d.low > -EQUIVALENT_NATS and d.high < EQUIVALENT_NATS for d in differences)


def decide(question: Question, differences: Differences) -> Decision:
    """Applies the rules to one length.

    Args:
      question: subject, baseline and rivals.
      differences: subject minus each of them.
    """
    rivals = [name for e in question.explanations for name in e.rivals]
    missing = [n for n in (question.baseline, *rivals) if not differences.get(n)]
    if missing:
        return Decision("not run yet", f"missing: {', '.join(missing)}")
    found = {name: list(differences[name] or ()) for name in (question.baseline, *rivals)}
    if not is_ahead(found[question.baseline]):
        return Decision(
            "no gain",
            f"{question.subject} is not ahead of {question.baseline} in every seed",
        )
    explained = {
        e.name: [name for name in e.rivals if is_equivalent(found[name])]
        for e in question.explanations
    }
    named = [name for name, arms in explained.items() if arms]
    if named:
        arms = ", ".join(arm for arms in explained.values() for arm in arms)
        return Decision(" and ".join(named), f"equivalent to {question.subject}: {arms}")
    if all(is_ahead(found[name]) for name in rivals):
        return Decision("context", f"{question.subject} is ahead of every rival")
    behind = ", ".join(name for name in rivals if not is_ahead(found[name]))
    return Decision("undecided", f"neither ahead of nor equivalent to, in every seed: {behind}")
