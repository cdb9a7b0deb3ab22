"""Long texts in parts: encoding a text takes a hundred times the memory of its ids."""

import re
from collections.abc import Iterator

_LONGEST_PART = 1 << 18
_BETWEEN_WORDS = re.compile(r"(?<=\S) (?=\S)")


def parts_of(text: str, keeps_space: bool | None) -> Iterator[str]:
    """The text in parts of about 262,144 characters, each to be encoded on its own.

    Args:
        text: the whole.
        keeps_space: whether the space at which it is cut stays with the second part, or is dropped,
            since encoding puts one there; None: it can't be cut.
    """
    start = 0
    while len(text) - start > _LONGEST_PART and keeps_space is not None:
        end = start + _LONGEST_PART
        # Words are short: a space is found near the part's end, or not at all.
        spaces = [
            space.start()
            for space in _BETWEEN_WORDS.finditer(text, max(start + 1, end - 1000), end)
        ]
        if spaces:
            yield text[start : spaces[-1]]
            start = spaces[-1] if keeps_space else spaces[-1] + 1
        elif keeps_space:
            yield text[start:end]
            start = end
        else:
            break  # a cut elsewhere would show as a space
    yield text[start:]


def grouped(parts: list[str]) -> Iterator[list[str]]:
    """Parts in a row, together of about two million characters: work for several cores."""
    group: list[str] = []
    characters = 0
    for part in parts:
        group.append(part)
        characters += len(part)
        if characters >= 8 * _LONGEST_PART:
            yield group
            group, characters = [], 0
    if group:
        yield group
