"""Generated tales: a corpus that needs no download, for smoke runs and tests.

Locally the sentences follow a small grammar. Over hundreds of tokens a tale keeps to its own
invented names: who the people are, where each of them lives, and what was hidden where at the start
and is found there at the end; the same refrain closes each of its paragraphs.
"""

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

_T = TypeVar("_T")

_SEED = 20250723
_TALES = 40
_PARAGRAPHS = (8, 16)
_SENTENCES = (4, 8)

_ONSETS = ("br", "st", "th", *"bdfghklmnprstvw")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "oo")
_CODAS = ("", "", "l", "n", "r", "s", "th", "m")
_TRADES = ("baker", "miller", "weaver", "smith", "shepherd", "fisher", "mason", "sailor", "scribe")
_THINGS = ("lamp", "ring", "letter", "key", "cup", "coin", "map", "bell", "knife", "book", "drum")
_HIDING = (
    "under the bridge",
    "in the well",
    "behind the mill",
    "inside the old oak",
    "at the ford",
    "below the tower",
    "near the shrine",
    "beyond the orchard",
)
_ADJECTIVES = ("old", "quiet", "golden", "broken", "heavy", "small", "bright", "cold", "strange")
_VERBS = ("carried", "watched", "mended", "sold", "praised", "painted", "borrowed", "lifted")
_TIMES = (
    "In the morning",
    "At noon",
    "Before dusk",
    "After the rain",
    "On the third day",
    "That winter",
)
_MOODS = ("gladly", "slowly", "in silence", "with great care", "for the last time", "and laughed")


def synthetic_documents() -> Iterator[tuple[str, str]]:
    """The tales as (name, text): always the same ones, of a few thousand characters each."""
    for number in range(_TALES):
        yield f"tale-{number:02d}", _tale(random.Random(_SEED + number))


def _tale(rng: random.Random) -> str:
    people = [_invented_name(rng) for _ in range(4)]
    homes = {person: _invented_name(rng) for person in people}
    trades = {person: _pick(rng, _TRADES) for person in people}
    hidden = {person: (_pick(rng, _THINGS), _pick(rng, _HIDING)) for person in people}
    hero = people[0]
    refrain = f"So sing the children of {homes[hero]}."

    opening = " ".join(f"{person} was a {trades[person]} of {homes[person]}." for person in people)
    hiding = " ".join(
        f"{person} hid a {hidden[person][0]} {hidden[person][1]}." for person in people
    )
    paragraphs = [f"{opening} {hiding} {refrain}"]
    for _ in range(_between(rng, *_PARAGRAPHS)):
        sentences = [
            _sentence(rng, _pick(rng, people), homes, trades)
            for _ in range(_between(rng, *_SENTENCES))
        ]
        paragraphs.append(" ".join([*sentences, refrain]))
    finding = " ".join(
        f"{person} found the {hidden[person][0]} {hidden[person][1]}." for person in people
    )
    paragraphs.append(f"{finding} {refrain}")
    return "\n".join(paragraphs)


def _sentence(
    rng: random.Random, person: str, homes: dict[str, str], trades: dict[str, str]
) -> str:
    other = _pick(rng, [name for name in homes if name != person])
    thing = f"{_pick(rng, _ADJECTIVES)} {_pick(rng, _THINGS)}"
    verb, time, mood = _pick(rng, _VERBS), _pick(rng, _TIMES), _pick(rng, _MOODS)
    return _pick(
        rng,
        (
            f"{time} {person} {verb} the {thing} {mood}.",
            f"{person}, the {trades[person]}, {verb} the {thing} for {other}.",
            f"{time} {person} walked from {homes[person]} to {homes[other]} {mood}.",
            f'"Who {verb} the {thing}?" asked {person}. "It was {other}, the {trades[other]}."',
        ),
    )


def _invented_name(rng: random.Random) -> str:
    syllables = (
        _pick(rng, _ONSETS) + _pick(rng, _VOWELS) + _pick(rng, _CODAS)
        for _ in range(_between(rng, 2, 3))
    )
    return "".join(syllables).capitalize()


def _pick(rng: random.Random, choices: Sequence[_T]) -> _T:
    # Only random() itself is promised to repeat over Python versions, choice() is not.
    return choices[int(rng.random() * len(choices))]


def _between(rng: random.Random, low: int, high: int) -> int:
    return low + int(rng.random() * (high - low + 1))
