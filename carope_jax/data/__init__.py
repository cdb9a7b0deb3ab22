"""Corpora, tokenizers, and training batches; independent of the rest of the package.

Needs the extra `train`; the corpus `"kjv"` needs `quickstart`.
"""

from carope_jax.data._corpora import (
    KJV_VALIDATION,
    Document,
    fingerprint,
    load_corpus,
    split_documents,
)
from carope_jax.data._dataset import DataConfig, TextDataset, join_documents, load_dataset
from carope_jax.data._pipeline import StreamWindows, mixture_batches, train_batches
from carope_jax.data._prepared import PreparedDataset, PreparedSplit
from carope_jax.data._streams import TokenStream
from carope_jax.data._tokenizer import Tokenizer, load_tokenizer, make_tokenizer

__all__ = [
    "KJV_VALIDATION",
    "DataConfig",
    "Document",
    "PreparedDataset",
    "PreparedSplit",
    "StreamWindows",
    "TextDataset",
    "TokenStream",
    "Tokenizer",
    "fingerprint",
    "join_documents",
    "load_corpus",
    "load_dataset",
    "load_tokenizer",
    "make_tokenizer",
    "mixture_batches",
    "split_documents",
    "train_batches",
]
