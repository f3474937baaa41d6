"""Text of generated tokens as it becomes final: no half characters, whatever bytes the tokens are."""

from __future__ import annotations

import codecs

from ernie_jax.data.tokenizer import Tokenizer


class StreamDecoder:
    """Decodes one stream of ids; the pieces it gives, joined, equal `tokenizer.decode` of all ids.

    Text is given as soon as it is final. Bytes that begin a character are kept until the character is whole, or until a byte
    comes that cannot continue it: then they become U+FFFD, as in `decode`. Every id costs its own bytes only, so a long
    answer costs time in proportion to its length.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        """Starts a stream.

        Args:
          tokenizer: the tokenizer of the ids.
          skip_special: leave special tokens out, as `decode` does.

        Raises:
          ValueError: the tokenizer is neither byte-level nor SentencePiece with byte fallback.
        """
        tokenizer.require_bytes()
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = True

    def push(self, index: int) -> str:
        """The text that this id makes final, perhaps none."""
        return self._text(self._tokenizer.token_bytes(index, self._skip_special), final=False)

    def finish(self) -> str:
        """Ends the stream: a character that its bytes leave unfinished becomes one U+FFFD. The next `push` starts a new one."""
        text = self._text(b"", final=True)
        self._utf8.reset()
        self._at_start = True
        return text

    def _text(self, data: bytes, *, final: bool) -> str:
        text = self._utf8.decode(data, final)
        if text and self._at_start:
            self._at_start = False
            return text[1:] if self._tokenizer.strips_first_space and text[0] == " " else text
        return text
