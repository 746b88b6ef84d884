"""Messages as clients send them, normalised; and what is refused, by the index of the message."""

import json
from typing import Any

import pytest

from glm52_jax.text import normalise_messages, normalise_tools
from sharding.errors import InputError

Json = dict[str, Any]


def one(**message: Any) -> Json:
    """The normalised form of a single message."""
    (result,) = normalise_messages([message])
    return result


def call(arguments: Any, name: str = "f") -> list[Json]:
    return [{"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}]


@pytest.mark.parametrize("arguments", [{"a": 1, "b": "ü"}, '{"a": 1, "b": "ü"}', ' {"a":1,"b":"\\u00fc"} '])
def test_arguments_as_object_and_as_json_text_are_equal(arguments: Any) -> None:
    """OpenAI clients send arguments as JSON text, the template iterates an object."""
    function = {"name": "f", "arguments": {"a": 1, "b": "ü"}}
    assert one(role="assistant", tool_calls=call(arguments)) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


@pytest.mark.parametrize("arguments", ["", "  ", "{}", {}, None])
def test_empty_arguments_mean_no_arguments(arguments: Any) -> None:
    """An empty text means {}."""
    message = one(role="assistant", tool_calls=call(arguments))
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"a": ', "not JSON"),
        ("[1]", "of type list, expected a JSON object"),
        ([1], "of type list, expected a JSON object"),
        ('"a"', "of type str, expected a JSON object"),
        (7, "of type int, expected a JSON object"),
        ({1: 2}, "key 1 of type int"),
        ({"a": {1}}, "value of type set"),
        ("[" * 100_000, "not JSON"),
        (json.loads('{"a":' * 150 + "1" + "}" * 150), "nested more than 100 deep"),
    ],
    ids=["cut", "list text", "list", "string", "number", "key", "value", "deep text", "deep"],
)
def test_wrong_arguments_name_the_message(arguments: Any, words: str) -> None:
    """Invalid JSON and a JSON list are refused, with the index of the message and the function's name."""
    messages: list[Json] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": call(arguments, "look")},
    ]
    with pytest.raises(InputError, match=rf"messages\[1\]\.tool_calls\[0\] \(look\): found .*{words}"):
        normalise_messages(messages)


def test_tool_call_without_the_function_wrapper_is_taken() -> None:
    calls = [{"name": "f", "arguments": "{}"}]
    assert one(role="assistant", tool_calls=calls)["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {}}}
    ]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_absent_content_in_any_form_is_the_same(role: str) -> None:
    """None, missing, '' and [] are equal."""
    forms: list[Json] = [{}, {"content": None}, {"content": ""}, {"content": []}]
    assert all(one(role=role, **form) == {"role": role, "content": ""} for form in forms)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_joined_in_order(role: str) -> None:
    """Lists of text parts, of one or more, become one text for every role."""
    parts = [{"type": "text", "text": "one "}, "two ", {"text": "three"}]
    assert one(role=role, content=parts)["content"] == "one two three"
    assert one(role=role, content=parts[:1])["content"] == "one "


def test_object_as_tool_result_becomes_json() -> None:
    """An object that a tool returned is shown as JSON, with characters as they are."""
    content = {"city": "Zürich", "celsius": [12.5, None, True]}
    assert one(role="tool", content=content)["content"] == '{"city": "Zürich", "celsius": [12.5, null, true]}'


def test_tool_result_needs_no_id_and_keeps_one() -> None:
    """Tool_call_id may be missing."""
    assert one(role="tool", content="x") == {"role": "tool", "content": "x"}
    assert one(role="tool", content="x", tool_call_id="c1", name=None)["tool_call_id"] == "c1"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_taken_under_both_names(field: str) -> None:
    """Servers return either name, and clients send it back."""
    expected = {"role": "assistant", "content": "a", "reasoning_content": " why "}
    assert one(role="assistant", content="a", **{field: " why "}) == expected
    assert (
        one(role="assistant", content="a", **{"reasoning": None, "reasoning_content": "", field: " why "}) == expected
    )
    assert "reasoning_content" not in one(role="assistant", content="a", **{field: None})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("<think>why</think>a", ("why", "a")),
        ("\n<think>\nwhy\n</think>\n\na</think>b", ("\nwhy\n", "\n\na</think>b")),
        ("<think></think>a", (None, "a")),
        ("<think>unclosed", (None, "<think>unclosed")),
        ("Write <think>x</think>.", (None, "Write <think>x</think>.")),
        ("a</think>b", (None, "a</think>b")),
    ],
)
def test_think_block_that_begins_the_content_is_reasoning(content: str, expected: tuple[str | None, str]) -> None:
    """Raw answers come back as history; a block further on is text that somebody wrote."""
    message = one(role="assistant", content=content)
    assert (message.get("reasoning_content"), message["content"]) == expected


def test_reasoning_field_wins_over_a_think_block() -> None:
    """A block that repeats the field is dropped, another one stays in the text."""
    message = {"role": "assistant", "reasoning": "why"}
    assert one(**message, content="<think> why\n</think>a")["content"] == "a"
    assert one(**message, content="<think>other</think>a")["content"] == "<think>other</think>a"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("hello", "found str, expected an object"),
        ({"content": "x"}, "found role None, expected one of system, user, assistant, tool"),
        ({"role": "developer"}, "found role 'developer'"),
        ({"role": "user", "content": 7}, "content: found int, expected text or a list"),
        ({"role": "user", "content": {"text": "x"}}, "content: found dict"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, r"content\[0\]: .*'image_url'"),
        ({"role": "user", "content": ["x", {"type": "text"}]}, r"content\[1\]: "),
        ({"role": "tool", "content": [{"celsius": 12}]}, r"content\[0\]: "),
        ({"role": "tool", "content": {"a": object()}}, "value of type object"),
        ({"role": "user", "content": "a\ud83d"}, "half of a surrogate pair at character 1"),
        ({"role": "assistant", "tool_calls": "f()"}, "tool_calls: found str, expected a list"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"tool_calls\[0\]: found no function name"),
        ({"role": "assistant", "tool_calls": ["f"]}, r"tool_calls\[0\]: found no function name"),
        ({"role": "assistant", "reasoning": 7}, "reasoning: found int"),
        ({"role": "user", "tool_calls": call({})}, "found tool_calls in a message of role user"),
        ({"role": "system", "reasoning_content": "x"}, "found reasoning_content in a message of role system"),
    ],
)
def test_wrong_message_is_named_by_its_index(message: Any, words: str) -> None:
    """One sentence with the index, what was found and what was expected."""
    with pytest.raises(InputError, match=rf"messages\[1\].*{words}"):
        normalise_messages([{"role": "user", "content": "x"}, message])


@pytest.mark.parametrize("messages", [None, "hello", {"role": "user"}, []])
def test_messages_must_be_a_list_of_some(messages: Any) -> None:
    with pytest.raises(InputError, match="messages: found"):
        normalise_messages(messages)


def test_messages_of_the_caller_are_not_changed() -> None:
    messages = [{"role": "assistant", "content": "<think>a</think>b", "tool_calls": call('{"a": [1]}')}]
    before = json.dumps(messages)
    result = normalise_messages(messages)
    result[0]["tool_calls"][0]["function"]["arguments"]["a"].append(2)
    assert json.dumps(messages) == before


def test_no_tools_is_none() -> None:
    assert normalise_tools(None) is None
    assert normalise_tools([]) is None


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ({"name": "f"}, "tools: found dict"),
        ([{"name": "f"}, "g"], r"tools\[1\]: found no function with a name"),
        ([{"type": "function", "function": {"description": "x"}}], r"tools\[0\]: found no function with a name"),
        ([{"type": "function", "function": "f"}], r"tools\[0\]: found no function with a name"),
        ([{"name": "f", "parameters": {"default": {1}}}], r"tools\[0\]: found a value of type set"),
    ],
)
def test_wrong_tool_is_named_by_its_index(tools: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        normalise_tools(tools)
