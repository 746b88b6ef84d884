"""Chat messages as clients send them, brought to the one form that chat templates can be trusted with.

Clients differ in how they say "no content", in whether arguments are an object or JSON text, and in the name of the
reasoning field; templates answer such differences with the word None, lost text or an exception. It must not know
about templates or tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sharding.errors import InputError

ROLES = ("system", "user", "assistant", "tool")
MAX_DEPTH = 100  # of nested values, far below where Python's recursion would end
REASONING_FIELDS = ("reasoning_content", "reasoning")
_THINK_BLOCK = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
_ASSISTANT_FIELDS = ("tool_calls", *REASONING_FIELDS)


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of a conversation in the form that templates read.

    Each result has `role` and `content`, a text that is "" where there is none. An assistant's may have
    `reasoning_content` (text, never empty) and `tool_calls` (never empty), each
    `{"type": "function", "function": {"name": text, "arguments": dict}}` and `id` where one came. Other fields are
    kept, except those that are None.

    Args:
        messages: objects with `role` (system, user, assistant, tool) and optionally:
            `content`: text; a list of texts and `{"type": "text", "text": ...}`, joined in order; None or absent; for
            role tool also an object, which becomes JSON.
            `reasoning_content` or `reasoning` (assistant): as content. Without either, a `<think>...</think>` that
            the content starts with is taken for it.
            `tool_calls` (assistant): `function.arguments` is an object or its JSON text, "" meaning {}.

    Raises:
        InputError: names the index of the message.
    """
    if not isinstance(messages, list | tuple):
        raise InputError(f"messages: found {type(messages).__name__}, expected a list of messages")
    if not messages:
        raise InputError("messages: found an empty list, expected at least one message")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def normalise_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """A copy of a request's tool definitions; None when there are none; `InputError` naming a wrong one's index."""
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise InputError(f"tools: found {type(tools).__name__}, expected a list of tool definitions")
    copies = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        copy = _json_copy(tool, where)
        function = copy.get("function", copy) if isinstance(copy, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InputError(f'{where}: found no function with a name, expected {{"function": {{"name": ...}}}}')
        copies.append(copy)
    return copies or None


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"{where}: found {type(message).__name__}, expected an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise InputError(f"{where}: found role {role!r}, expected one of {', '.join(ROLES)}")
    content = _content(message.get("content"), role, where)
    result: dict[str, Any] = {"role": role, "content": content}
    for key, value in message.items():
        if key not in result and key not in _ASSISTANT_FIELDS and value is not None:
            result[_json_copy(key, where)] = _json_copy(value, f"{where}.{key}")
    if role == "assistant":
        _take_reasoning(message, result, where)
        if calls := _tool_calls(message.get("tool_calls"), where):
            result["tool_calls"] = calls
    else:
        for key in _ASSISTANT_FIELDS:
            if message.get(key):
                raise InputError(f"{where}: found {key} in a message of role {role}, expected it of an assistant only")
    return result


def _content(content: Any, role: str, where: str) -> str:
    if role == "tool" and isinstance(content, Mapping):
        return json.dumps(_json_copy(content, f"{where}.content"), ensure_ascii=False)
    return _text(content, f"{where}.content")


def _text(content: Any, where: str) -> str:
    """The text of a string, of nothing, or of a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _valid(content, where)
    if not isinstance(content, list | tuple):
        raise InputError(f"{where}: found {type(content).__name__}, expected text or a list of text parts")
    return "".join(_part(part, f"{where}[{n}]") for n, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return _valid(part, where)
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise InputError(f'{where}: found a part of type {kind!r}, expected {{"type": "text", "text": ...}}')
    return _valid(text, where)


def _take_reasoning(message: Mapping[str, Any], result: dict[str, Any], where: str) -> None:
    """Set `reasoning_content` from either field, or from a think block that begins the content."""
    reasoning = next(
        (text for field in REASONING_FIELDS if (text := _text(message.get(field), f"{where}.{field}"))), ""
    )
    block = _THINK_BLOCK.fullmatch(result["content"])
    # Some clients send the reasoning in both places; only then is a block beside a reasoning field taken out.
    if block and (not reasoning or block[1].strip() == reasoning.strip()):
        reasoning = reasoning or block[1]
        result["content"] = block[2]
    if reasoning:
        result["reasoning_content"] = reasoning


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list | tuple):
        raise InputError(f"{where}.tool_calls: found {type(calls).__name__}, expected a list of tool calls")
    return [_tool_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise InputError(f'{where}: found no function name, expected {{"function": {{"name": ..., "arguments": ...}}}}')
    arguments = _arguments(function.get("arguments"), f"{where} ({name})")
    result = {"type": "function", "function": {"name": _valid(name, where), "arguments": arguments}}
    call_id = call.get("id")
    return result if call_id is None else {"id": _json_copy(call_id, where), **result}


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: found arguments that are not JSON ({error}), expected a JSON object") from error
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise InputError(f"{where}: found arguments of type {type(arguments).__name__}, expected a JSON object")
    return _json_object(arguments, where)


def _json_object(value: Mapping[Any, Any], where: str, depth: int = 0) -> dict[str, Any]:
    for key in value:
        if type(key) is not str:
            raise InputError(f"{where}: found the key {key!r} of type {type(key).__name__}, expected text")
    return {_valid(key, where): _json_copy(item, where, depth + 1) for key, item in value.items()}


def _json_copy(value: Any, where: str, depth: int = 0) -> Any:
    """A deep copy made of JSON's own types, so that a template meets no object with methods of its own."""
    if depth > MAX_DEPTH:
        raise InputError(f"{where}: found values nested more than {MAX_DEPTH} deep, expected fewer levels")
    if value is None or type(value) in (bool, int, float):
        return value
    if type(value) is str:
        return _valid(value, where)
    if isinstance(value, Mapping):
        return _json_object(value, where, depth)
    if isinstance(value, list | tuple):
        return [_json_copy(item, where, depth + 1) for item in value]
    raise InputError(f"{where}: found a value of type {type(value).__name__}, expected JSON values only")


def _valid(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON's \ud83d escapes can bring in half of a surrogate pair, which no tokenizer takes.
        raise InputError(
            f"{where}: found half of a surrogate pair at character {error.start}, expected valid Unicode"
        ) from None
    return text
