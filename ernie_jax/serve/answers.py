"""A model's answers to questions whose answers are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ernie_jax.data.multimodal.records import Record
from ernie_jax.data.tokenizer import Tokenizer
from ernie_jax.models import TextModel
from ernie_jax.serve.chat import chat


@dataclass(frozen=True)
class Answer:
    """One question answered.

    Attributes:
      record: the conversation, its last message the answer that was expected.
      expected, given: the two answers, without spaces around.
    """

    record: Record
    expected: str
    given: str

    @property
    def right(self) -> bool:
        """Whether they are the same text."""
        return self.expected == self.given

    @property
    def question(self) -> str:
        """The words of the last question."""
        return " ".join(_texts(self.record.messages[-2]))


def answer_questions(
    model: TextModel,
    tokenizer: Tokenizer,
    records: Sequence[Record],
    *,
    batch_size: int = 32,
    max_new_tokens: int = 32,
    **settings: Any,
) -> Iterator[Answer]:
    """Each question's answer, greedy, in order; a question is everything before a conversation's last message.

    Args:
      model, tokenizer: who answers.
      records: conversations that end with the expected answer.
      batch_size: questions answered at once.
      max_new_tokens: most tokens of an answer.
      settings: further arguments of `chat`: template and processors, see `chat_settings`.

    Raises:
      ValueError: a record that is no question with an answer, before anything is answered; as `chat`.
    """
    for record in records:
        roles = [message["role"] for message in record.messages]
        if roles[-2:] != ["user", "assistant"]:
            raise ValueError(f"{record.where}: expected a conversation that ends with a question and its answer, got roles {roles}")
    for start in range(0, len(records), batch_size):
        some = records[start : start + batch_size]
        # Padded to a whole batch with the first question, so that all batches share one program.
        asked = [*some, *[some[0]] * (min(batch_size, len(records)) - len(some))]
        given = chat(model, tokenizer, [_question(r) for r in asked], max_new_tokens=max_new_tokens, **settings)
        for record, answer in zip(some, given, strict=False):
            yield Answer(record, "".join(_texts(record.messages[-1])).strip(), answer.strip())


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [item["text"] for item in content if item["type"] == "text"]


def _question(record: Record) -> list[Mapping[str, Any]]:
    """The messages before the answer, images and videos where they were found."""
    media = iter(record.media)
    messages: list[Mapping[str, Any]] = []
    for message in record.messages[:-1]:
        content = message["content"]
        if not isinstance(content, str):
            content = [item if item["type"] == "text" else item | {item["type"]: next(media).source} for item in content]
        messages.append({**message, "content": content})
    return messages
