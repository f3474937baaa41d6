"""Chats: messages of text, images and videos to the ids a model reads, by a checkpoint's template or a built-in one."""

from ernie_jax.data.chat.builtin import BuiltinTemplate
from ernie_jax.data.chat.encoding import EncodedChat, encode_chat
from ernie_jax.data.chat.jinja import JinjaTemplate
from ernie_jax.data.chat.media_tokens import MEDIA_TOKENS, MediaTokens
from ernie_jax.data.chat.messages import Message, checked_messages
from ernie_jax.data.chat.parts import Part, Slot, Text
from ernie_jax.data.chat.templates import KINDS, STOP_TOKENS, ChatTemplate, chat_template_of

__all__ = [
    "KINDS",
    "MEDIA_TOKENS",
    "STOP_TOKENS",
    "BuiltinTemplate",
    "ChatTemplate",
    "EncodedChat",
    "JinjaTemplate",
    "MediaTokens",
    "Message",
    "Part",
    "Slot",
    "Text",
    "chat_template_of",
    "checked_messages",
    "encode_chat",
]
