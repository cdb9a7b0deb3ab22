"""Corpora, tokenizers, and training batches; independent of the rest of the package.

Needs the extra `train`; the corpus `"kjv"` needs `quickstart`.
"""

from carope_jax.data._config import DataConfig, Rows
from carope_jax.data._corpora import (
    KJV_VALIDATION,
    Document,
    fingerprint,
    load_corpus,
    split_documents,
)
from carope_jax.data._dataset import (
    Dataset,
    PreparedMixture,
    TextDataset,
    join_documents,
    load_dataset,
    load_documents,
)
from carope_jax.data._packed import PackingReport, packed_batches, packing_report
from carope_jax.data._pipeline import StreamWindows, mixture_batches, train_batches
from carope_jax.data._prepared import PreparedDataset, PreparedSplit
from carope_jax.data._streams import ArrayDocuments, TokenDocuments, TokenStream
from carope_jax.data._tokenizer import Tokenizer, load_tokenizer, make_tokenizer

__all__ = [
    "KJV_VALIDATION",
    "ArrayDocuments",
    "DataConfig",
    "Dataset",
    "Document",
    "PackingReport",
    "PreparedDataset",
    "PreparedMixture",
    "PreparedSplit",
    "Rows",
    "StreamWindows",
    "TextDataset",
    "TokenDocuments",
    "TokenStream",
    "Tokenizer",
    "fingerprint",
    "join_documents",
    "load_corpus",
    "load_dataset",
    "load_documents",
    "load_tokenizer",
    "make_tokenizer",
    "mixture_batches",
    "packed_batches",
    "packing_report",
    "split_documents",
    "train_batches",
]
