"""Chat formats: the built-in template word for word, where templates come from, and content that stays content."""

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm52_jax.text import (
    ChatFormat,
    Tokenizer,
    built_in_template,
    normalise_messages,
    write_byte_tokenizer,
)
from sharding.errors import InputError
from tests import needs

Json = dict[str, Any]

HI: list[Json] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Wetter für eine Stadt <heute>",
            "strict": True,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "later", "defer_loading": True}},
    {"name": "now", "defer_loading": False, "parameters": {}},
]
TOOLS_BLOCK = (
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    '{"name": "get_weather", "description": "Wetter für eine Stadt <heute>", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}\n'
    '{"name": "now", "parameters": {}}\n'
    "</tools>\n\n"
    "For each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)
ROUND_TRIP: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Oslo and Bergen?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Ask twice.",
        "tool_calls": [
            {"function": {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 2}'}},
            {"function": {"name": "get_weather", "arguments": {"city": "Bergen", "tags": ["a", "ü"], "x": None}}},
            {"function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "content": '{"celsius": 12}'},
    {"role": "tool", "content": [{"type": "text", "text": "9 "}, {"type": "text", "text": "degrees"}]},
    {"role": "tool", "content": {"hour": 7}},
]
MULTI_TURN: list[Json] = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": " first ", "reasoning": "R1"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "reasoning_content": "R2", "tool_calls": [{"name": "now", "arguments": {}}]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "<think>R3</think>\n\nseven"},
]

GOLDEN: dict[str, tuple[list[Json], Json, str]] = {
    "plain": (HI, {}, "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Hi<|assistant|><think>"),
    "thinking off": (HI, {"enable_thinking": False}, "[gMASK]<sop><|user|>Hi<|assistant|><think></think>"),
    "effort high": (
        HI,
        {"reasoning_effort": "high"},
        "[gMASK]<sop><|system|>Reasoning Effort: High<|user|>Hi<|assistant|><think>",
    ),
    "effort max": (
        HI,
        {"reasoning_effort": "max", "add_generation_prompt": False},
        "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Hi",
    ),
    "effort without thinking": (
        HI,
        {"enable_thinking": False, "reasoning_effort": "high"},
        "[gMASK]<sop><|user|>Hi<|assistant|><think></think>",
    ),
    "tools": (
        [{"role": "system", "content": "Be brief."}, *HI],
        {"tools": TOOLS},
        "[gMASK]<sop><|system|>Reasoning Effort: Max"
        + TOOLS_BLOCK
        + "<|system|>Be brief.<|user|>Hi<|assistant|><think>",
    ),
    "tool round trip": (
        ROUND_TRIP,
        {"tools": TOOLS, "enable_thinking": False},
        "[gMASK]<sop>" + TOOLS_BLOCK + "<|system|>Be brief.<|user|>Weather in Oslo and Bergen?"
        "<|assistant|><think>Ask twice.</think>"
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Bergen</arg_value>"
        '<arg_key>tags</arg_key><arg_value>["a", "ü"]</arg_value>'
        "<arg_key>x</arg_key><arg_value>null</arg_value></tool_call>"
        "<tool_call>now</tool_call>"
        '<|observation|><tool_response>{"celsius": 12}</tool_response>'
        "<tool_response>9 degrees</tool_response>"
        '<tool_response>{"hour": 7}</tool_response>'
        "<|assistant|><think></think>",
    ),
    "reasoning cleared": (
        MULTI_TURN,
        {},
        "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>One?<|assistant|><think></think>first"
        "<|user|>Two?<|assistant|><think>R2</think><tool_call>now</tool_call>"
        "<|observation|><tool_response>7</tool_response><|assistant|><think>R3</think>seven<|assistant|><think>",
    ),
    "reasoning kept": (
        MULTI_TURN,
        {"clear_thinking": False},
        "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>One?<|assistant|><think>R1</think>first"
        "<|user|>Two?<|assistant|><think>R2</think><tool_call>now</tool_call>"
        "<|observation|><tool_response>7</tool_response><|assistant|><think>R3</think>seven<|assistant|><think>",
    ),
}

TEMPLATES = {
    "built-in": built_in_template(),
    "by role": "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}<|assistant|>",
    "as json": "{{ messages | tojson(indent=1) }}{{ tools | tojson }}<|assistant|>",
}


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


@pytest.mark.parametrize("case", GOLDEN)
def test_built_in_template_is_glm_5_2s(chat: ChatFormat, case: str) -> None:
    """The prompt of each kind of conversation, written out."""
    messages, options, expected = GOLDEN[case]
    assert chat.render(messages, **options) == expected


@pytest.mark.parametrize("case", GOLDEN)
def test_ids_are_those_of_the_prompt_where_content_holds_no_token(
    chat: ChatFormat, tokenizer: Tokenizer, case: str
) -> None:
    messages, options, expected = GOLDEN[case]
    ids = chat.encode(messages, **options)
    assert ids == tokenizer.encode(expected, special=True)
    assert tokenizer.decode(ids, skip_special=False) == expected


def test_published_ids_of_a_prompt(tmp_path: Path) -> None:
    """The known encoding of "Hi" with thinking off, in a vocabulary that has GLM-5.2's id for that word."""
    write_byte_tokenizer(tmp_path, first_special=154820)
    path = tmp_path / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["model"]["vocab"]["Hi"] = 13041
    spec["model"]["merges"] = [["H", "i"]]
    path.write_text(json.dumps(spec))
    chat = ChatFormat.load(tmp_path, Tokenizer.load(tmp_path))
    assert chat.encode(HI, enable_thinking=False) == [154822, 154824, 154827, 13041, 154828, 154841, 154842]


def test_arguments_in_either_form_give_one_prompt(chat: ChatFormat) -> None:
    """Dict and JSON text render alike, empty arguments are none, wrong ones name the message."""

    def prompt(arguments: Any) -> str:
        return chat.render([*HI, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}])

    assert prompt({"a": 1.0, "b": "x"}) == prompt('{"a": 1.0, "b": "x"}')
    assert prompt("") == prompt({}) == prompt("{}")
    for wrong in ("{", "[]"):
        with pytest.raises(InputError, match=r"messages\[1\]"):
            prompt(wrong)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "rest",
    [{}, {"reasoning_content": "why"}, {"tool_calls": [{"name": "f", "arguments": {}}]}],
    ids=["alone", "reasoning", "tool calls"],
)
def test_absent_content_never_prints_none(formats: dict[str, ChatFormat], name: str, rest: Json) -> None:
    """Four ways to say nothing give one prompt in every template."""
    forms: list[Json] = [{}, {"content": None}, {"content": ""}, {"content": []}]
    prompts = {formats[name].render([*HI, {"role": "assistant", **form, **rest}]) for form in forms}
    assert len(prompts) == 1
    assert "None" not in prompts.pop()


@pytest.mark.parametrize(
    "content",
    ["value-1", [{"type": "text", "text": "value-1"}], ["value", "-1"], {"key": "value-1"}],
    ids=["text", "one part", "two parts", "object"],
)
def test_tool_results_reach_the_prompt(formats: dict[str, ChatFormat], content: Any) -> None:
    """In whatever form a tool result comes, its text is in the prompt; an empty one leaves its place."""
    for chat in formats.values():
        assert "value-1" in chat.render([*HI, {"role": "tool", "content": content}])
    assert (
        formats["built-in"].render([*HI, {"role": "tool", "content": ""}]).count("<tool_response></tool_response>") == 1
    )


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "xhigh", "foo", "High", "", 3])
def test_unknown_effort_is_refused_not_taken_for_the_highest(chat: ChatFormat, effort: Any) -> None:
    """The template would map each of these to Max."""
    with pytest.raises(InputError, match=r'reasoning_effort: found .*, expected "high" or "max" or nothing'):
        chat.render(HI, reasoning_effort=effort)


def test_only_enable_thinking_closes_the_think_block(chat: ChatFormat) -> None:
    """The switch is enable_thinking, a boolean; other names and the text "false" are errors."""
    assert chat.render(HI, enable_thinking=False).endswith("<think></think>")
    assert chat.render(HI, enable_thinking=True) == chat.render(HI) == chat.render(HI, reasoning_effort="max")
    with pytest.raises(TypeError):
        chat.render(HI, thinking=False)  # type: ignore[call-arg]
    wrong: Any = "false"
    for option in ("enable_thinking", "clear_thinking", "add_generation_prompt"):
        with pytest.raises(InputError, match=f"{option}: found 'false', expected true or false"):
            chat.render(HI, **{option: wrong})


def test_ids_in_a_prompt_come_from_the_tokenizer(tmp_path: Path) -> None:
    """With other ids for the special tokens the prompt has those."""
    ids = write_byte_tokenizer(tmp_path, first_special=777)
    chat = ChatFormat.load(tmp_path, Tokenizer.load(tmp_path))
    names = ["[gMASK]", "<sop>", "<|user|>", "H", "i", "<|assistant|>", "<think>", "</think>"]
    assert chat.encode(HI, enable_thinking=False) == [ids.get(name) or ord(name) for name in names]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_earlier_reasoning_is_kept_or_cleared_as_asked(chat: ChatFormat, field: str) -> None:
    """Three turns with tools; false keeps earlier think blocks, true and nothing remove those before the user."""
    turn: list[Json] = [
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]},
        {"role": "tool", "content": "r"},
    ]
    messages = [
        message | ({field: f"why-{n}"} if message["role"] == "assistant" else {})
        for n in range(3)
        for message in ({"role": "user", "content": "q"}, *turn)
    ]
    blocks = [f"<think>why-{n}</think>" for n in range(3)]

    def kept(**options: Any) -> list[bool]:
        return [block in chat.render(messages, **options) for block in blocks]

    assert kept(clear_thinking=False) == [True, True, True]
    assert kept(clear_thinking=True) == kept() == [False, False, True]


def test_effort_changes_the_prompt_only_where_its_word_is(chat: ChatFormat) -> None:
    """The effort line stands at the head as published; the ids differ in its word and nowhere else."""
    high, top = (chat.render(MULTI_TURN, reasoning_effort=effort) for effort in ("high", "max"))
    assert high.replace("Effort: High", "Effort: Max") == top


def test_built_in_template_renders_as_in_transformers(chat: ChatFormat) -> None:
    """The same Jinja settings as transformers: every conversation under every option."""
    reference: Any = needs.package("transformers.utils.chat_template_utils")
    for messages, tools in itertools.product((HI, ROUND_TRIP, MULTI_TURN), (None, TOOLS)):
        for thinking, effort, clear, prompt in itertools.product(
            (True, False), (None, "high", "max"), (None, True, False), (True, False)
        ):
            options: Json = {"enable_thinking": thinking, "reasoning_effort": effort, "clear_thinking": clear}
            options = {key: value for key, value in options.items() if value is not None}
            (expected,), _ = reference.render_jinja_template(
                [normalise_messages(messages)],
                tools=tools,
                chat_template=built_in_template(),
                add_generation_prompt=prompt,
                **options,
            )
            assert chat.render(messages, tools=tools, add_generation_prompt=prompt, **options) == expected


@pytest.mark.parametrize(
    "template",
    [
        "  {% for m in messages %}\n  {% if loop.first %}\n{{ m.content }}\n  {% endif %}\n  {% break %}\n{% endfor %}",
        "{% for m in messages %}{% if m.role != 'user' %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{{ messages | tojson(indent=2, sort_keys=True) }}{{ tools is defined }}{{ documents is none }}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}\n{{ strftime_now('%%') }}",
    ],
)
def test_jinja_features_of_other_templates_render_as_in_transformers(tokenizer: Tokenizer, template: str) -> None:
    """White space, loop controls, tojson's options and the functions that templates expect."""
    reference: Any = needs.package("transformers.utils.chat_template_utils")
    (expected,), _ = reference.render_jinja_template([HI], chat_template=template)
    chat = ChatFormat(template, "other", tokenizer)
    assert chat.render(HI, add_generation_prompt=False) == expected


def write_folder(folder: Path, jinja: str | None = None, inline: object = None) -> Tokenizer:
    write_byte_tokenizer(folder)
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    if inline is not None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": inline}))
    return Tokenizer.load(folder)


FILE = "file {{ messages[0].content }}"
INLINE = "inline {{ messages[0].content }}{{ eos_token }}"
NAMED = [{"name": "tool_use", "template": "wrong"}, {"name": "default", "template": INLINE}]


@pytest.mark.parametrize(
    ("jinja", "inline", "source", "prompt"),
    [
        (FILE, None, "chat_template.jinja", "file Hi"),
        (None, INLINE, "tokenizer_config.json", "inline Hi<|endoftext|>"),
        (None, NAMED, "tokenizer_config.json", "inline Hi<|endoftext|>"),
        (FILE, INLINE, "chat_template.jinja", "file Hi"),
        (None, None, "built-in", "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Hi<|assistant|><think>"),
    ],
    ids=["file", "inline", "named", "both", "none"],
)
def test_template_comes_from_file_then_config_then_built_in(
    tmp_path: Path, jinja: str | None, inline: object, source: str, prompt: str
) -> None:
    """The checkpoint's own template is taken wherever it stands, the file first."""
    chat = ChatFormat.load(tmp_path, write_folder(tmp_path, jinja, inline))
    assert (chat.source, chat.render(HI)) == (source, prompt)


@pytest.mark.parametrize(("inline", "level"), [(INLINE, logging.WARNING), (FILE, logging.INFO)])
def test_file_that_wins_over_the_config_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, inline: str, level: int
) -> None:
    """Which of two templates was taken is logged, as a warning when they differ."""
    with caplog.at_level(logging.INFO, logger="glm52_jax.text.chat"):
        ChatFormat.load(tmp_path, write_folder(tmp_path, FILE, inline))
    (record,) = caplog.records
    assert record.levelno == level
    assert "chat_template.jinja: takes precedence over the chat template in tokenizer_config.json" in record.message


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", "does not compile"),
        ("{{ messages | nonsense }}", "does not compile .*nonsense"),
        ("{{ messages[0].content.missing() }}", "fails on a sample conversation .UndefinedError"),
        ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", "fails on a sample conversation .TypeError"),
        ("{{ messages[0].content }}{% for t in tools or [] %}{{ t.a.b }}{% endfor %}", "fails on a sample"),
        ("{{ messages[0].content }}{{ messages.append(1) }}", "fails on a sample conversation .SecurityError"),
        ("{{ raise_exception('never') }}", "fails on a sample conversation .*never"),
        ("no content", "leaves out the user's text"),
        ("", "leaves out the user's text"),
    ],
)
def test_broken_template_fails_at_load(tmp_path: Path, template: str, words: str) -> None:
    """Not at the first request, or the first with tools."""
    tokenizer = write_folder(tmp_path, template)
    with pytest.raises(InputError, match=rf"^chat_template\.jinja: .*{words}"):
        ChatFormat.load(tmp_path, tokenizer)


@pytest.mark.parametrize("inline", [7, {"default": "x"}, [{"name": "other", "template": "x"}], ["x"]])
def test_config_without_a_usable_template_is_refused(tmp_path: Path, inline: object) -> None:
    """A chat_template of another form is an error, not a reason to take another template."""
    tokenizer = write_folder(tmp_path, None, inline)
    with pytest.raises(InputError, match=r'tokenizer_config\.json: found .* template named "default"'):
        ChatFormat.load(tmp_path, tokenizer)


def test_built_in_template_needs_its_tokens(tmp_path: Path) -> None:
    """A tokenizer of another model would get role tokens as ordinary text."""
    write_byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("<|observation|>", "<|tool|>"))
    with pytest.raises(InputError, match=r"found no special token '<\|observation\|>'"):
        ChatFormat.load(tmp_path, Tokenizer.load(tmp_path))


def test_refusal_by_the_template_is_an_input_error(tokenizer: Tokenizer) -> None:
    """A template may refuse messages; its words reach the client."""
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    chat = ChatFormat(template + "{{ messages[0].content }}", "strict", tokenizer)
    with pytest.raises(InputError, match=r"the chat template \(strict\) refuses them: no system role"):
        chat.render([{"role": "system", "content": "x"}])


def test_failure_of_the_template_on_a_request_is_an_input_error(tokenizer: Tokenizer) -> None:
    """What the samples did not reveal is reported with the template's name too."""
    chat = ChatFormat(
        "{{ messages[0].content }}{% if messages[6] %}{{ messages[6].content.x.y }}{% endif %}", "odd", tokenizer
    )
    with pytest.raises(InputError, match=r"the chat template \(odd\) fails on them \(UndefinedError"):
        chat.render(HI * 7)


def test_same_conversation_has_the_same_prompt_for_any_caller(chat: ChatFormat) -> None:
    """Rendering changes nothing that the caller handed in, and keeps no state."""
    render: Callable[..., str] = chat.render
    before = json.dumps([ROUND_TRIP, TOOLS])
    assert render(ROUND_TRIP, tools=TOOLS) == render(tuple(ROUND_TRIP), tools=tuple(TOOLS))
    assert json.dumps([ROUND_TRIP, TOOLS]) == before
