"""The built-in templates, word for word, and the chats they refuse."""

import pytest

from ernie_jax.data.chat import KINDS, STOP_TOKENS, Slot, chat_template_of, checked_messages

BEGIN, END = "<|begin_of_sentence|>", "<|end_of_sentence|>"
CHAT = [("system", "be brief"), ("user", "hi"), ("assistant", "hello"), ("user", "more")]


def rendered(kind, messages, *, add_generation_prompt=True, **options):
    checked = checked_messages([{"role": role, "content": content} for role, content in messages])
    parts = chat_template_of(None, kind).parts(checked, add_generation_prompt=add_generation_prompt, **options)
    return "".join(f"[{part.kind}]" if isinstance(part, Slot) else part.text for part in parts)


def test_text():
    assert rendered("text", CHAT) == f"{BEGIN}be brief\nUser: hi\nAssistant: hello{END}User: more\nAssistant: "
    assert rendered("text", CHAT[1:2], add_generation_prompt=False) == f"{BEGIN}User: hi\n"


@pytest.mark.parametrize(
    ("kind", "thinking", "suffix"),
    [
        ("vl", True, "<think>"),
        ("vl", False, "<think>\n\n</think>\n\n"),
        ("vl", None, "<think>\n\n</think>\n\n"),
        ("vl-thinking", True, "\n<think>\n"),
        ("vl-thinking", None, "\n<think>\n"),
        ("vl-thinking", False, "\n<think>\n\n</think>\n\n"),
    ],
)
def test_vision_language(kind, thinking, suffix):
    expected = f"{BEGIN}be brief\nUser: hi\nAssistant: hello{END}User: more\nAssistant: {suffix}"
    assert rendered(kind, CHAT, enable_thinking=thinking) == expected


def test_vision_language_thinking_of_an_earlier_turn():
    chat = [("user", "hi"), ("assistant", "<think>\nhm\n</think>\n\nhello"), ("user", "more")]
    assert f"\nAssistant: <think>\nhm\n</think>\nhello{END}User: more" in rendered("vl", chat)
    assert f"\nAssistant: \n<think>\nhm\n</think>\n\nhello{END}User: more" in rendered("vl-thinking", chat)


def test_items_stand_in_their_order():
    items = [{"type": "text", "text": "see "}, {"type": "video", "video": 0}, {"type": "image", "image": 0}]
    assert rendered("vl", [("user", items)]).startswith(f"{BEGIN}User: see Video 1:[video]Picture 1:[image]\nAssistant: ")


def test_thinking():
    system = (
        "<|im_start|>system\n<system_setting>\nbe brief\n</system_setting>\n\n<global_setting>\nthink_mode=True\n</global_setting>"
    )
    answer = "<response>\nhello\n</response>\n<|im_end|>\n\n"
    user = "<|im_start|>user\n{}<|im_end|>\n\n"
    hi, more = user.format("hi"), user.format("more")
    start = "<|im_start|>assistant\n"
    assert rendered("thinking", CHAT) == f"{system}<|im_end|>\n\n{hi}{start}{answer}{more}{start}"
    bare = "<|im_start|>system\n<global_setting>\nthink_mode=True\n</global_setting><|im_end|>\n\n"
    assert rendered("thinking", CHAT[1:2]) == f"{bare}{hi}{start}"
    tools = [{"name": "add", "parameters": {}}]
    listed = '\n\n<tool_list>\n[{"type": "function", "function": {"name": "add", "parameters": {}}}]\n</tool_list><|im_end|>\n\n'
    call = '<think>\nhm\n</think>\n<tool_call>\n{"name": "add"}\n</tool_call>'
    chat = [("user", "hi"), ("assistant", call), ("tool", "3")]
    assert rendered("thinking", chat, tools=tools) == (
        f"{bare.removesuffix('<|im_end|>' + chr(10) * 2)}{listed}{hi}{start}{call}<|im_end|>\n\n"
        f"<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n\n{start}"
    )
    thought = rendered("thinking", [("user", "hi"), ("assistant", "<think>hm</think>hello")], add_generation_prompt=False)
    assert thought.endswith(f"{start}<think>\nhm\n</think>\n{answer}")


@pytest.mark.parametrize(
    ("kind", "messages", "options", "message"),
    [
        ("vl", [("user", "a"), ("user", "b")], {}, "message 1 is the user's and follows another"),
        ("text", [("assistant", "a")], {}, "message 0 is the assistant's and has no user's message before it"),
        ("text", [("user", "a"), ("assistant", "b")], {}, "message 1 is the assistant's; a generation prompt needs"),
        ("text", [("system", "a")], {}, "message 0 is the system's; a generation prompt needs"),
        ("vl", [("user", "a"), ("tool", "b")], {}, "message 1 is a tool's"),
        ("text", [("user", [{"type": "image", "image": 0}])], {}, "message 0 holds an image"),
        ("text", [("user", "a")], {"enable_thinking": True}, "cannot think"),
        ("thinking", [("user", "a")], {"enable_thinking": False}, "always thinks"),
        ("vl", [("user", "a")], {"tools": [{"name": "f"}]}, "tools are given"),
        ("vl", [("user", "a"), ("assistant", "<think>b"), ("user", "c")], {}, "message 1 opens <think> and never"),
    ],
)
def test_refused_chats(kind, messages, options, message):
    with pytest.raises(ValueError, match=message):
        rendered(kind, messages, **options)


def test_thinking_in_an_answer_that_must_not_think():
    chat = [("user", "a"), ("assistant", "<think>b</think>c")]
    with pytest.raises(ValueError, match="message 1 holds <think>, but enable_thinking is False"):
        rendered("vl", chat, add_generation_prompt=False, enable_thinking=False)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("hi", "messages is a str"),
        (["hi"], "message 0 is a str"),
        ([{"role": "user", "content": "a"}, {"role": "bot", "content": "a"}], "message 1 has the role 'bot'"),
        ([{"role": "user"}], "message 0 has the keys"),
        ([{"role": "user", "content": "a", "name": "b"}], "message 0 has the keys"),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": "a"}], "message 1 is the system's"),
        ([{"role": "user", "content": []}], "message 0 has an empty list"),
        ([{"role": "user", "content": None}], "message 0 has content of type NoneType"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "message 0, item 0 has the type 'audio'"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "message 0, item 0 has no 'text'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 0, item 0 has no 'image'"),
        ([{"role": "system", "content": [{"type": "image", "image": 0}]}], "message 0 is the system's and holds"),
    ],
)
def test_wrong_messages_are_named(messages, message):
    with pytest.raises(ValueError, match=message):
        checked_messages(messages)


def test_kinds():
    assert set(STOP_TOKENS) == set(KINDS)
    for kind in KINDS:
        assert chat_template_of(None, kind).end_of_turn == STOP_TOKENS[kind][0]
    with pytest.raises(ValueError, match="did you mean 'vl-thinking'"):
        chat_template_of(None, "vl-thinkng")
