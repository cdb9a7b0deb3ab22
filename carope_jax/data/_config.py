"""Which text, which tokens, which batches."""

import dataclasses
from typing import Literal, get_args

from carope_jax.data._corpora import KJV_VALIDATION
from carope_jax.data._tokenizer import check_tokenizer_spec

Rows = Literal["stream", "packed"]
"""What a training row is."""

_DEFAULT_FRACTION = 0.1


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which text, which tokens, which batches.

    Raises:
        ValueError: a field is out of range, or two of them contradict each other.
    """

    corpus: str = "kjv"
    """'kjv', 'synthetic', or a path, local or gs://: a dataset made by `carope_jax.data.prepare`, a
    .txt, a .jsonl (key 'text'), or a folder of such files, read into memory."""
    mixture: tuple[tuple[str, float], ...] = ()
    """In place of `corpus`: prepared datasets and the share of the windows each gives, such as
    `data/a 0.7 data/b 0.3`."""
    rows: Rows = "stream"
    """What a training row is: a window of the EOT-joined documents (the paper), or whole documents
    packed by best fit, which attend to themselves alone."""
    validation_documents: tuple[str, ...] = ()
    """Names of the documents held out for validation. With neither these nor the fraction given,
    'kjv' holds out eight books (13% of it), any other corpus a tenth of its documents."""
    validation_fraction: float | None = None
    """Fraction of the documents held out, chosen by a hash of their text. Not beside names."""
    tokenizer: str | None = None
    """None: a prepared dataset's own, 'train:2048' for text. 'train:N' (SentencePiece of N tokens
    trained on the training documents), 'gpt2', or the path of a SentencePiece .model, of a Hugging
    Face tokenizer.json, or (with a '/') of a folder with vocab.bpe and encoder.json."""
    length: int = 128
    """Tokens a training window."""
    batch_size: int = 32
    """Windows an update, all processes together."""
    shuffle_seed: int = 0
    """Seed of the order of the windows."""
    workers: int = 0
    """Processes that prepare batches ahead; 0: a thread of this process does."""
    prefetch: int = 4
    """Batches prepared ahead, by each worker or by the thread."""

    def __post_init__(self) -> None:
        if self.mixture and self.corpus != DataConfig.corpus:
            raise ValueError(
                f"mixture={self.mixture!r} and corpus={self.corpus!r} both say what to train on: "
                "give one"
            )
        if self.mixture and self.rows == "packed":
            raise ValueError("rows='packed' packs one dataset, not a mixture")
        if self.rows not in get_args(Rows):
            raise ValueError(f"rows={self.rows!r} must be one of {get_args(Rows)}")
        if not self.corpus:
            raise ValueError("corpus '' must be 'kjv', 'synthetic' or a path")
        if self.validation_documents and self.validation_fraction is not None:
            raise ValueError(
                f"validation_documents={self.validation_documents!r} and validation_fraction="
                f"{self.validation_fraction!r} both say what to hold out: give one"
            )
        if self.validation_fraction is not None and not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(f"validation_fraction={self.validation_fraction!r} must be in (0, 1)")
        if self.tokenizer is not None:
            check_tokenizer_spec(self.tokenizer)
        minima = {"length": 1, "batch_size": 1, "shuffle_seed": 0, "workers": 0, "prefetch": 1}
        for field, least in minima.items():
            if getattr(self, field) < least:
                raise ValueError(f"{field}={getattr(self, field)} must be at least {least}")

    @property
    def holds_out(self) -> bool:
        """Whether it says what to hold out, as a prepared dataset does itself."""
        return bool(self.validation_documents) or self.validation_fraction is not None

    @property
    def validation(self) -> tuple[str, ...] | float:
        """What to hold out, the defaults filled in: names, or a fraction of the documents."""
        if self.validation_documents:
            return self.validation_documents
        if self.validation_fraction is not None:
            return self.validation_fraction
        return KJV_VALIDATION if self.corpus == "kjv" else _DEFAULT_FRACTION
