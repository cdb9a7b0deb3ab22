"""Text that grows token by token."""

from collections.abc import Callable, Sequence

# What a decoder writes for bytes that are not yet a whole character.
_UNFINISHED = "\ufffd"


class TextStream:
    """The text of tokens that arrive one by one, given out once it can't change.

    Args:
      decode: token ids to text.
      prompt: the tokens before, whose text is not given out: a token's text can depend on them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        # The tokens of the last text given out, which the next token's can depend on, and those
        # since: decoding them all again would cost more with every token.
        self._tokens = list(prompt)
        self._known, self._given = len(prompt), decode(prompt) if prompt else ""

    def push(self, token: int) -> str:
        """The text that a token adds; empty while a character is unfinished."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        return "" if text.endswith(_UNFINISHED) else self._give(text)

    def finish(self) -> str:
        """What is left, unfinished characters included."""
        return self._give(self._decode(self._tokens)) if self._tokens else ""

    def _give(self, text: str) -> str:
        new = text[len(self._given) :]
        self._tokens = self._tokens[self._known :]
        self._known = len(self._tokens)
        self._given = self._decode(self._tokens) if self._tokens else ""
        return new
