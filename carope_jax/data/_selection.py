"""Which documents are held out, and which train a tokenizer: by hashes of their texts alone.

So neither depends on the files, their order, or the number of processes. Axis: D documents.
"""

import numpy as np
from jaxtyping import Int64, UInt64

from carope_jax.data._preparation_config import PreparationConfig

# More text than this makes no better pieces, and is held in memory.
_TOKENIZER_BYTES = 64 << 20


def held_out_up_to(hashes: UInt64[np.ndarray, " D"], config: PreparationConfig) -> int:
    """The largest hash of a text that goes to validation; -1: none does.

    Args:
        hashes: of the texts, ascending, each once: equal texts stay together.
        config: how many are held out.

    Raises:
        ValueError: there are not enough distinct texts.
    """
    if config.val_docs == 0:
        if not len(hashes):
            raise ValueError("the input has no document")
        return -1
    if len(hashes) < 2:
        raise ValueError(
            f"{config.validation} holds out whole documents, and the input has {len(hashes)} "
            "distinct one(s): with val_docs=0 none is held out"
        )
    if config.val_docs is None:
        count = min(max(round(config.fraction * len(hashes)), 1), len(hashes) - 1)
    elif config.val_docs < len(hashes):
        count = config.val_docs
    else:
        raise ValueError(
            f"val_docs={config.val_docs} leaves none of {len(hashes)} distinct documents to train"
        )
    return int(hashes[count - 1])


def sample_up_to(
    hashes: UInt64[np.ndarray, " D"], sizes: Int64[np.ndarray, " D"], held_out: int
) -> tuple[int, int]:
    """Which texts a tokenizer is trained on, of those that are not held out: any, by their hash.

    Args:
        hashes: of all texts.
        sizes: their bytes.
        held_out: of `held_out_up_to`.

    Returns:
        The largest hash of such a text, and how many bytes they are.
    """
    trained = hashes > np.uint64(held_out) if held_out >= 0 else np.ones(len(hashes), bool)
    hashes, sizes = hashes[trained], sizes[trained]
    order = np.argsort(hashes, kind="stable")
    total = np.cumsum(sizes[order])
    last = min(int(np.searchsorted(total, _TOKENIZER_BYTES)), len(total) - 1)
    return int(hashes[order[last]]), int(total[last])
