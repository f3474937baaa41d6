"""Which chat template a checkpoint has: its own jinja, or the built-in one of its kind."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from etils import epath

from ernie_jax.data.chat.builtin import END, IM_END, BuiltinTemplate
from ernie_jax.data.chat.jinja import JinjaTemplate
from ernie_jax.data.chat.messages import Message
from ernie_jax.data.chat.parts import Part
from ernie_jax.data.special_tokens import near_names, token_text

KINDS = ("text", "vl", "thinking", "vl-thinking")
# Tokens that end an answer: the template's, and </s>, with which Baidu's own fine-tuning ends the last turn.
STOP_TOKENS: Mapping[str, tuple[str, ...]] = {kind: (IM_END if kind == "thinking" else END, "</s>") for kind in KINDS}


class ChatTemplate(Protocol):
    """Turns messages into parts.

    Attributes:
      kind: `text`, `vl`, `thinking` or `vl-thinking`.
      end_of_turn: the special token after an assistant's answer, None where the checkpoint's template decides.
    """

    kind: str
    end_of_turn: str | None

    def parts(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        enable_thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        special_tokens: Collection[str] = (),
    ) -> list[Part]:
        """The chat in parts; `special_tokens` names the tokenizer's. ValueError for a chat that the template does not have."""


def chat_template_of(folder: epath.PathLike | None, kind: str) -> ChatTemplate:
    """The chat template of a checkpoint's folder, or the built-in one of this kind.

    Args:
      folder: where `chat_template.jinja` is looked for, then `chat_template` in `chat_template.json`, then in
        `tokenizer_config.json`; None for the built-in template.
      kind: `text` (0.3B, 21B-A3B, 300B-A47B), `vl`, `thinking` (21B-A3B-Thinking) or `vl-thinking`.

    Raises:
      ValueError: another kind, or a template that is not jinja.
    """
    if kind not in KINDS:
        raise ValueError(f"no chat template of kind {kind!r}; expected one of {', '.join(KINDS)}{near_names(kind, KINDS)}")
    if folder is None:
        return BuiltinTemplate(kind)
    found = _source(epath.Path(folder))
    return BuiltinTemplate(kind) if found is None else JinjaTemplate(found[0], kind, source=found[1], names=_names(folder))


def _source(folder: epath.Path) -> tuple[str, str] | None:
    """A folder's jinja and the file it came from."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return _decoded(file), str(file)
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = _read(folder / name).get("chat_template")
        if isinstance(template, list):  # several, by name
            named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
            template = named[-1].get("template") if named else None
            if template is None:
                raise ValueError(f"{folder / name}: several chat templates and none is named 'default'")
        if template is not None and not isinstance(template, str):
            raise ValueError(f"{folder / name}: chat_template is a {type(template).__name__}, expected a string")
        if template:
            return template, str(folder / name)
    return None


def _names(folder: epath.PathLike) -> dict[str, str]:
    """Names of special tokens that a template may ask for, such as `cls_token`."""
    files = [_read(epath.Path(folder) / f"{name}.json") for name in ("special_tokens_map", "tokenizer_config")]
    found = {key: token_text(token) for contents in files for key, token in contents.items() if key.endswith("_token")}
    return {key: token for key, token in found.items() if token is not None}


def _read(file: epath.Path) -> dict[str, Any]:
    try:
        contents = json.loads(_decoded(file)) if file.exists() else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{file} holds a {type(contents).__name__}, expected a JSON object")
    return contents


def _decoded(file: epath.Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from error
