"""A checkpoint's own jinja chat template, rendered so that no message can forge what the template writes.

The template runs on the message texts with private characters in them, which stand in none of the texts: at the edges of
every text, and inside every spelling of a special token. The rendered text is cut at these characters, and a special token
never spans a cut, so only the template's own words become special tokens. A placeholder is therefore one that the template
wrote. Spaces around a text stay outside its edges, and a token that the vocabulary lacks stays whole, so that templates
which trim texts or split them at `</think>` work.
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox

from ernie_jax.data.chat.messages import Media, Message
from ernie_jax.data.chat.parts import ASSISTANT_MARKERS, Part, Slot, Text
from ernie_jax.data.special_tokens import pattern_of

# Baidu's own templates write the second names, which are no tokens.
_PLACEHOLDERS = ("<|IMAGE_PLACEHOLDER|>", "<|image@placeholder|>", "<|VIDEO_PLACEHOLDER|>", "<|video@placeholder|>")
_MARKERS = ("<|IMAGE_START|>", "<|IMAGE_END|>", "<|VIDEO_START|>", "<|VIDEO_END|>")
_PRIVATE = range(0xF0000, 0xFFFFE)
_ENDLESS = "ends an assistant's answer without a special token; a model trained on it would never stop"


class JinjaTemplate:
    """A jinja chat template in `transformers`' dialect, in an immutable sandbox.

    Attributes:
      kind: the kind of built-in template it stands for.
      end_of_turn: None; the first special token that the template writes after an answer.
    """

    def __init__(self, template: str, kind: str, *, source: str = "the template", names: Mapping[str, str] | None = None) -> None:
        """Compiles a template.

        Args:
          template: the jinja.
          kind: see `chat_template_of`.
          source: named in errors.
          names: variables such as `cls_token`, as in `tokenizer_config.json`.

        Raises:
          ValueError: it does not compile.
        """
        self.kind = kind
        self.end_of_turn: str | None = None
        self._text, self._source, self._names = template, source, dict(names or {})
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(template)
        except jinja2.TemplateError as error:
            raise ValueError(f"{source} is not a jinja chat template: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuilt, (self._text, self.kind, self._source, self._names))

    def parts(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        enable_thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        special_tokens: Collection[str] = (),
    ) -> list[Part]:
        """The chat in parts.

        An assistant's text is trained, with what the template writes between it and the next special token, and that token.
        Spaces at its begin, and thinking that the template takes out, are not.

        Args:
          messages: of `checked_messages`.
          add_generation_prompt: end with the words after which the assistant's answer begins.
          enable_thinking: given to the template unless None.
          tools: descriptions of functions, given to the template.
          special_tokens: the tokenizer's; in a message they are plain text.

        Raises:
          ValueError: the template refuses the chat, places images or videos otherwise than the messages do, or ends an
            answer without a special token.
        """
        marks = _Marks(messages, tools, self._text, special_tokens)
        variables: dict[str, Any] = {**self._names, "messages": [marks.message(message) for message in messages]}
        variables |= {"tools": marks.value(tools), "documents": None, "add_generation_prompt": add_generation_prompt}
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        try:
            rendered = self._template.render(variables)
        except (jinja2.TemplateError, TypeError, AttributeError, LookupError, ArithmeticError, ValueError, RecursionError) as error:
            raise ValueError(f"{self._source} does not take this chat: {error}") from error
        wanted = [item.kind for message in messages for item in message.items if isinstance(item, Media)]
        try:
            parts = list(marks.parts(rendered, pattern_of(set(special_tokens) - ASSISTANT_MARKERS)))
        except ValueError as error:
            raise ValueError(f"{self._source} {error}") from error
        placed = [part.kind for part in parts if isinstance(part, Slot)]
        if placed != wanted:
            raise ValueError(f"{self._source} has places for {placed or 'no media'}, but the messages hold {wanted or 'none'}")
        return parts


class _Marks:
    """The private characters of one rendering.

    They are a cut, a cut within an answer, the begin and the end of an answer, and the content of an image or video.
    """

    def __init__(self, messages: Sequence[Message], tools: Any, template: str, special_tokens: Collection[str]) -> None:
        said = {character for message in messages for character in message.text}
        said |= set(template) | set(json.dumps(tools, ensure_ascii=False, default=str))
        free = (chr(code) for code in _PRIVATE if chr(code) not in said)
        found = list(itertools.islice(free, 5))
        if len(found) < 5:
            raise ValueError(f"the messages hold nearly all characters from U+{_PRIVATE[0]:X} on, of which a few must be left free")
        self._cut, self._inner, self._begin, self._end, self._media = found
        protected = {*special_tokens, *_PLACEHOLDERS, *_MARKERS}
        self._of_user = _starts(protected)
        self._of_assistant = _starts(protected - ASSISTANT_MARKERS)

    def message(self, message: Message) -> dict[str, Any]:
        """A message as a template reads it, with marks in its texts."""
        mark = self._answer if message.role == "assistant" else self._plain
        if not message.is_list:
            return {"role": message.role, "content": mark(message.text)}
        if message.role == "assistant":
            return {"role": message.role, "content": [{"type": "text", "text": mark(message.text)}]}
        items: list[dict[str, str]] = []
        for item in message.items:
            if isinstance(item, Media):
                items.append({"type": item.kind, item.kind: self._media})
            else:
                items.append({"type": "text", "text": mark(item)})
        return {"role": message.role, "content": items}

    def value(self, value: Any) -> Any:
        """A JSON value with marks in all its strings."""
        if isinstance(value, str):
            return self._plain(value)
        if isinstance(value, Mapping):
            return {self.value(key): self.value(item) for key, item in value.items()}
        return [self.value(item) for item in value] if isinstance(value, list | tuple) else value

    def _plain(self, text: str) -> str:
        return _edged(_broken(text, self._of_user, self._cut), self._cut, self._cut) if text else text

    def _answer(self, text: str) -> str:
        # Templates split answers at the tags of thinking: what follows one must still begin with a mark.
        broken = _broken(text, self._of_assistant, self._inner)
        return _edged(re.sub(r"</?think>\s*+(?!</think>)", rf"\g<0>{self._begin}", broken), self._begin, self._end)

    def parts(self, rendered: str, special: re.Pattern[str] | None) -> Iterator[Part]:
        """The rendered text, cut at the marks and at the places of images and videos."""
        content = "|".join(map(re.escape, (*_PLACEHOLDERS, self._media)))
        slots = "|".join(rf"<\|{kind}_START\|>(?:{content})<\|{kind}_END\|>" for kind in ("IMAGE", "VIDEO"))
        marks = (self._cut, self._inner, self._begin, self._end)
        # In an answer; after its text, before the token that ends it.
        trained, ending = False, False
        for piece in re.split(f"({slots}|[{''.join(marks)}])", rendered):
            is_slot = re.fullmatch(slots, piece) is not None
            if (ending and piece in marks) or (trained and (is_slot or piece == self._cut)):
                raise ValueError(_ENDLESS)
            if piece in marks:
                trained = trained or piece == self._begin
                ending = piece == self._end
            elif is_slot:
                yield Slot("image" if piece.startswith("<|IMAGE") else "video")
            elif self._media in piece or any(name in piece for name in _PLACEHOLDERS):
                raise ValueError("writes a placeholder outside the markers of an image or a video")
            elif ending and special is not None and (match := special.search(piece)):
                yield from _own(piece[: match.end()], trained=True)
                yield from _own(piece[match.end() :])
                trained = ending = False
            else:
                yield from _own(piece, trained=trained)
        if trained:
            raise ValueError(_ENDLESS)


def _own(text: str, *, trained: bool = False) -> list[Part]:
    return [Text(text, special=True, trained=trained)] if text else []


def _broken(text: str, starts: re.Pattern[str], mark: str) -> str:
    """The text with a mark after the first character of every special token that it spells."""
    return starts.sub(lambda match: match[0] + mark, text)


def _starts(names: Collection[str]) -> re.Pattern[str]:
    """A pattern of the first character of each name, also where names overlap."""
    found = pattern_of(names)
    assert found is not None
    return re.compile(f"(?=(?:{found.pattern})).", re.DOTALL)


def _edged(text: str, begin: str, end: str) -> str:
    """The text with marks at its edges, inside the spaces around it."""
    inner = text.strip()
    if not inner:
        return text + begin + end
    before, _, after = text.partition(inner)
    return before + begin + inner + end + after


def _rebuilt(template: str, kind: str, source: str, names: Mapping[str, str]) -> JinjaTemplate:
    return JinjaTemplate(template, kind, source=source, names=names)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as `transformers` gives it to templates: no escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
