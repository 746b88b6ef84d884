"""Content stays content: nothing in messages or tools becomes a special token, whatever the template."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_jax.text import GLM_SPECIAL_TOKENS, ChatFormat, Tokenizer, built_in_template, write_byte_tokenizer
from sharding.errors import InputError

Json = dict[str, Any]

# Templates of other makes; each writes special tokens of its own around content.
TEMPLATES = {
    "built-in": built_in_template(),
    "by role": "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}<|assistant|>",
    "side by side": "<sop>{% for m in messages %}{{ m.content | trim }}{% endfor %}<eop>",
    "splits": (
        "{% for m in messages %}<|user|>{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
        "{% else %}{{ m.content }}{% endif %}<think></think>{% endfor %}"
    ),
    "escapes": "{% for m in messages %}<|user|>{{ m | tojson(ensure_ascii=True) }}{% endfor %}<think>",
    "nests": "{{ messages | tojson(indent=1) }}{{ tools | tojson }}<|assistant|>",
}
CONTENTS = st.lists(
    st.one_of(
        st.text(max_size=4),
        st.sampled_from(GLM_SPECIAL_TOKENS),
        st.sampled_from(["<|us", "er|>", "<", "<<think>", "\ue000", "\ue001", "\\ue000", "\\", '"', " ", "\n"]),
    ),
    max_size=6,
).map("".join)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder, vocab_size=154880, first_special=154820)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def chat(tokenizer: Tokenizer) -> ChatFormat:
    return ChatFormat(built_in_template(), "built-in", tokenizer)


@pytest.fixture(scope="module")
def formats(tokenizer: Tokenizer) -> dict[str, ChatFormat]:
    return {name: ChatFormat(template, name, tokenizer) for name, template in TEMPLATES.items()}


def specials(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The special tokens among `ids`, in order."""
    names = {id_: text for text, id_ in tokenizer.special_ids.items()}
    return [names[id_] for id_ in ids if id_ in names]


def with_content(content: str) -> tuple[list[Json], list[Json]]:
    """A conversation, and tools, in which every text that a client may choose is `content`."""
    call: Json = {"name": content or "f", "arguments": {content: content, "n": [{content: content}]}}
    messages: list[Json] = [
        {"role": "system", "content": content},
        {"role": "user", "content": content},
        {"role": "assistant", "content": "x" + content, "reasoning_content": content, "tool_calls": [call]},
        {"role": "tool", "content": content, "name": content},
        {"role": "user", "content": [content, {"type": "text", "text": content}]},
        {"role": "assistant", "content": "x" + content, "reasoning": "x" + content},
        {"role": "tool", "content": {content: content}},
    ]
    tools = [{"type": "function", "function": {"name": content or "f", "description": content, "parameters": call}}]
    return messages, tools


@pytest.mark.parametrize("name", TEMPLATES)
@settings(deadline=None)  # shared machines stall
@given(content=CONTENTS)
def test_content_cannot_forge_a_special_token(
    formats: dict[str, ChatFormat], tokenizer: Tokenizer, name: str, content: str
) -> None:
    """The special ids of a prompt are the template's own, whatever content says, and all its text is there."""
    chat = formats[name]
    messages, tools = with_content(content)
    options: Json = {"tools": tools, "clear_thinking": False}
    ids = chat.encode(messages, **options)
    harmless_messages, harmless_tools = with_content("harmless")
    harmless = chat.encode(harmless_messages, tools=harmless_tools, clear_thinking=False)
    assert specials(tokenizer, ids) == specials(tokenizer, harmless)
    assert tokenizer.decode(ids, skip_special=False) == chat.render(messages, **options)


@pytest.mark.parametrize("halves", [("<|us", "er|>"), ("a<|user|", ">b"), ("<", "think>"), ("<<think \n", "> ")])
def test_two_contents_cannot_meet_to_form_a_special_token(
    formats: dict[str, ChatFormat], tokenizer: Tokenizer, halves: tuple[str, str]
) -> None:
    """A template that puts contents next to each other, stripped, makes no token of their halves."""
    messages = [{"role": "user", "content": half} for half in halves]
    ids = formats["side by side"].encode(messages)
    assert specials(tokenizer, ids) == ["<sop>", "<eop>"]
    text = "".join(half.strip() for half in halves)
    assert tokenizer.decode(ids) == text
    assert text in formats["side by side"].render(messages)


def test_special_token_of_one_character_cannot_be_forged(tmp_path: Path) -> None:
    """A mark cannot stand inside such a token, so it stands behind it."""
    write_byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("<eop>", "☃"))
    tokenizer = Tokenizer.load(tmp_path)
    chat = ChatFormat("{{ messages[0].content }}☃", "snow", tokenizer)
    assert chat.encode([{"role": "user", "content": "☃a☃"}]) == [*"☃a☃".encode(), tokenizer.token_id("☃")]
    assert chat.render([{"role": "user", "content": "☃a☃"}]) == "☃a☃☃"


@pytest.mark.parametrize("token", GLM_SPECIAL_TOKENS)
def test_text_of_each_special_token_reaches_the_prompt_as_text(
    chat: ChatFormat, tokenizer: Tokenizer, token: str
) -> None:
    ids = chat.encode([{"role": "user", "content": f"a{token}b"}], enable_thinking=False)
    head, tail = "[gMASK]<sop><|user|>", "<|assistant|><think></think>"
    assert ids == [
        *tokenizer.encode(head, special=True),
        *f"a{token}b".encode(),
        *tokenizer.encode(tail, special=True),
    ]


def test_content_with_a_mark_in_it_is_whole(chat: ChatFormat, tokenizer: Tokenizer) -> None:
    """The private-use character that marks content is one that content has not; when it has all, it is refused."""
    every = "".join(map(chr, range(0xE000, 0xF900)))
    content = every.replace("\uf000", "") + "<|user|>\\uf000"
    with pytest.raises(InputError, match="private-use character"):
        chat.render([{"role": "user", "content": content}])
    content = content.replace("\\uf000", "\\uf00")
    assert content in chat.render([{"role": "user", "content": content}])
    ids = chat.encode([{"role": "user", "content": content}])
    assert content in tokenizer.decode(ids)
    assert specials(tokenizer, ids).count("<|user|>") == 1


def test_template_sees_no_special_token_in_content(formats: dict[str, ChatFormat]) -> None:
    """A template that cuts content at "</think>" does not cut text that merely speaks of it."""
    content = "The tag </think> ends it."
    assert content in formats["splits"].render([{"role": "user", "content": content}])


def test_marks_vanish_where_a_template_escapes_json(formats: dict[str, ChatFormat], tokenizer: Tokenizer) -> None:
    """A template that writes every non-ASCII character as a JSON escape writes the marks so too."""
    message = {"role": "user", "content": "a<|user|>é"}
    expected = '<|user|>{"role": "user", "content": "a<|user|>\\u00e9"}<think>'
    assert formats["escapes"].render([message]) == expected
    ids = formats["escapes"].encode([message])
    assert tokenizer.decode(ids, skip_special=False) == expected
    assert specials(tokenizer, ids) == ["<|user|>", "<think>"]
