"""Prompts in, tokens out: one compilation of the prefill a bucket, one of the decode step."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from carope_jax.generation._sampling import SamplingConfig, sample
from carope_jax.models import Cache, Decoder

# B batch (prompts at once), T time (a bucket's tokens), V vocabulary.

_SMALLEST_BUCKET = 16


class Completion(NamedTuple):
    """What followed one prompt.

    Attributes:
      prompt: the prompt's place among those given.
      tokens: the new tokens, without the end of text.
      ended: whether the text ended by itself (else `max_tokens` did).
    """

    prompt: int
    tokens: list[int]
    ended: bool

    @classmethod
    def of(cls, prompt: int, drawn: list[int], eot_id: int) -> "Completion":
        """The completion of a prompt by all the tokens drawn for it."""
        ended = drawn[-1] == eot_id
        return cls(prompt, drawn[:-1] if ended else drawn, ended)


class Generator:
    """Draws tokens from a decoder that keeps a cache.

    Prompts are padded on the left to a bucket (a power of two), so a new length seldom compiles
    anything; the decode step is compiled once, whatever the prompts.

    Args:
      model: the decoder.
      vocab_size: the tokenizer's tokens: the rows of the model's table past it are padding, and
        never drawn.
      eot_id: the token that ends a text (and begins one: what an empty prompt is).
      sampling: how tokens are drawn.
      batch_size: prompts at once.

    Raises:
      ValueError: a batch below 1, or a vocabulary that is not the model's.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        vocab_size: int,
        eot_id: int,
        sampling: SamplingConfig,
        batch_size: int = 1,
    ) -> None:
        rows = model.config.vocab_size
        if rows is None or not 0 <= eot_id < vocab_size <= rows:
            raise ValueError(
                f"a vocabulary of {vocab_size} tokens ending texts with {eot_id} is not the "
                f"model's of {rows}"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.eot_id, self.sampling, self.batch_size = eot_id, sampling, batch_size
        self._graph, self._arrays = nnx.split(model)
        self._model, self._longest = model, model.config.longest
        draw = functools.partial(_draw, vocab_size=vocab_size, sampling=sampling)
        self._prefill = jax.jit(functools.partial(_prefill, self._graph, draw))
        # The cache is written in place.
        self._step = jax.jit(functools.partial(_step, self._graph, draw), donate_argnums=1)

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raises a ValueError where there are no prompts, or one and its new tokens need more
        positions than there are."""
        if not prompts:
            raise ValueError("there are no prompts")
        for number, prompt in enumerate(prompts):
            length = max(len(prompt), 1)
            if self._longest is not None and length + self.sampling.max_tokens > self._longest:
                raise ValueError(
                    f"prompt {number} has {length} tokens: with max_tokens "
                    f"{self.sampling.max_tokens} that is past the {self._longest} positions that "
                    f"{self._model.config.position} has"
                )

    def stream(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[tuple[int, int]]]:
        """Yields the new tokens of each step as (prompt's place, token), a batch after another.

        A text's last token is the end of text where it ends by itself.

        Raises:
          ValueError: as `check` does.
        """
        self.check(prompts)
        filled = [list(prompt) or [self.eot_id] for prompt in prompts]
        slots = self._slots(filled)
        for first in range(0, len(filled), self.batch_size):
            yield from self._stream_batch(filled[first : first + self.batch_size], first, slots)

    def complete(
        self, prompts: Sequence[Sequence[int]], progress: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """What follows each prompt.

        Args:
          prompts: token ids.
          progress: told how many tokens each step has drawn.

        Raises:
          ValueError: as `check` does.
        """
        tokens: list[list[int]] = [[] for _ in prompts]
        for step in self.stream(prompts):
            for prompt, token in step:
                tokens[prompt].append(token)
            if progress is not None:
                progress(len(step))
        return [Completion.of(prompt, drawn, self.eot_id) for prompt, drawn in enumerate(tokens)]

    def _slots(self, prompts: list[list[int]]) -> int:
        """Room for the longest prompt's bucket and what follows: one size, one compilation."""
        return max(map(self._bucket, prompts)) + self.sampling.max_tokens

    def _bucket(self, prompt: list[int]) -> int:
        bucket = max(_SMALLEST_BUCKET, 1 << (len(prompt) - 1).bit_length())
        if self._longest is not None:
            # What the new tokens leave of the positions there are.
            bucket = min(bucket, self._longest - self.sampling.max_tokens)
        return bucket

    def _stream_batch(
        self, prompts: list[list[int]], first: int, slots: int
    ) -> Iterator[list[tuple[int, int]]]:
        bucket = max(map(self._bucket, prompts))
        tokens_BT = np.full((self.batch_size, bucket), self.eot_id, np.int32)
        ids_BT = np.zeros((self.batch_size, bucket), np.int32)
        # A batch cut short is filled up with rows of one token, which nobody reads.
        ids_BT[:, -1] = 1
        for row, prompt in enumerate(prompts):
            tokens_BT[row, bucket - len(prompt) :] = prompt
            ids_BT[row, bucket - len(prompt) :] = 1
        places_B = np.arange(first, first + self.batch_size, dtype=np.int32)
        seed = jax.random.key(self.sampling.seed)
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(seed, places_B)
        cache = self._model.empty_cache(self.batch_size, slots)
        new_B, cache = self._prefill(self._arrays, cache, tokens_BT, ids_BT, keys_B)
        running = set(range(len(prompts)))
        for step in range(self.sampling.max_tokens):
            drawn_B = np.asarray(new_B)
            yield [(first + row, int(drawn_B[row])) for row in sorted(running)]
            running -= {row for row in running if drawn_B[row] == self.eot_id}
            if not running or step + 1 == self.sampling.max_tokens:
                return
            new_B, cache = self._step(self._arrays, cache, new_B, keys_B, step + 1)


_Draw = Callable[[Array, Array, Any], Array]


def _draw(
    logits_BV: Array, keys_B: Array, step: Any, *, vocab_size: int, sampling: SamplingConfig
) -> Array:
    real_V = jnp.arange(logits_BV.shape[-1]) < vocab_size
    keys_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, step)
    logits_BV = jnp.where(real_V, logits_BV, -jnp.inf)
    return sample(logits_BV, keys_B, sampling.temperature, sampling.top_p)


def _prefill(
    graph: nnx.GraphDef[Decoder],
    draw: _Draw,
    arrays: Any,
    cache: Cache,
    tokens_BT: Int[Array, "B T"],
    ids_BT: Int[Array, "B T"],
    keys_B: Array,
) -> tuple[Array, Cache]:
    model = nnx.merge(graph, arrays)
    logits_B1V, cache = model.decode(tokens_BT, cache, ids_BT, last_only=True)
    return draw(logits_B1V[:, 0], keys_B, 0), cache


def _step(
    graph: nnx.GraphDef[Decoder],
    draw: _Draw,
    arrays: Any,
    cache: Cache,
    tokens_B: Int[Array, " B"],
    keys_B: Array,
    step: Int[Array, ""],
) -> tuple[Array, Cache]:
    logits_B1V, cache = nnx.merge(graph, arrays).decode(tokens_B[:, None], cache)
    return draw(logits_B1V[:, 0], keys_B, step), cache
