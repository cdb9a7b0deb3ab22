import dataclasses

import jax.numpy as jnp
import pytest

from carope_jax.generation import Generator, SamplingConfig
from tests.models.decoder_reference import TINY, VOCAB, quick_jit, stirred

EOT = 2
CAROPE = dataclasses.replace(TINY, position="carope")
NOPE = dataclasses.replace(TINY, position="nope")
PROMPTS = [[1, 5, 3], [], [4] * 20, [7], [9, 8, 7, 6, 5]]


def generator(config=CAROPE, batch_size=2, vocab_size=VOCAB, **sampling):
    return Generator(
        stirred(config),
        vocab_size=vocab_size,
        eot_id=EOT,
        sampling=SamplingConfig(**({"max_tokens": 6} | sampling)),
        batch_size=batch_size,
    )


@quick_jit
def next_logits(model, tokens):
    return model(tokens).logits


def test_the_likeliest_tokens_are_those_of_the_whole_sequence():
    """By the decoder without a cache, padded to one length behind (which nothing sees)."""
    model = stirred(CAROPE)
    for prompt, completion in zip(PROMPTS, generator(temperature=0).complete(PROMPTS), strict=True):
        tokens = prompt or [EOT]
        expected = []
        while len(expected) < 6 and EOT not in expected:
            row = jnp.asarray([(tokens + expected + [0] * 40)[:32]])
            logits = next_logits(model, row)[0, len(tokens + expected) - 1, :VOCAB]
            expected.append(int(logits.argmax()))
        ended = expected[-1] == EOT
        assert completion.tokens == (expected[:-1] if ended else expected)
        assert completion.ended == ended


def test_one_compilation_a_bucket_and_one_for_decoding():
    drawn = generator(NOPE, max_tokens=5)
    # Buckets of 16 and 32 in three batches of two, the last cut short.
    drawn.complete(PROMPTS)
    assert drawn._prefill._cache_size() == 2
    assert drawn._step._cache_size() == 1


def test_a_prompts_text_is_its_own():
    """Whatever it is batched with, and however it is given out."""
    prompts = [[1, 5, 3], [], [7]]
    alone = generator(NOPE, batch_size=1, seed=3).complete(prompts)
    together = generator(NOPE, batch_size=3, seed=3)
    assert [c.tokens for c in alone] == [c.tokens for c in together.complete(prompts)]
    streamed = [[] for _ in prompts]
    for step in together.stream(prompts):
        for prompt, token in step:
            streamed[prompt].append(token)
    assert [[t for t in row if t != EOT] for row in streamed] == [c.tokens for c in alone]
    assert generator(NOPE, batch_size=3, seed=4).complete(prompts) != alone


def test_rows_past_the_vocabulary_are_never_drawn():
    drawn = generator(NOPE, vocab_size=4, max_tokens=30, temperature=5.0).complete([[1], [3]])
    found = {token for completion in drawn for token in completion.tokens}
    assert found <= {0, 1, 3}
    assert len(found) > 1
    # One in four draws ends a text.
    assert all(completion.ended and len(completion.tokens) < 30 for completion in drawn)


def test_what_does_not_fit_is_named():
    learned = dataclasses.replace(TINY, position="learned")
    with pytest.raises(ValueError, match=r"prompt 1 has 3 tokens: with .* the 8 posit"):
        generator(learned).complete([[1], [1, 2, 3]])
    assert len(generator(learned, temperature=0).complete([[1, 3]])[0].tokens) <= 6
    with pytest.raises(ValueError, match="there are no prompts"):
        generator().complete([])
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        generator(batch_size=0)
    with pytest.raises(ValueError, match=r"a vocabulary of 99 tokens .* model's of 13"):
        generator(vocab_size=99)
