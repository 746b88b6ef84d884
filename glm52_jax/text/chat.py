"""Conversations to prompts, with the checkpoint's own chat template or the built-in one of GLM-5.2.

Whatever the template, text from messages and tools stays text: only special tokens that the template itself writes
become special ids. It must not know about models, requests or generated answers.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from glm52_jax.io.files import is_there
from glm52_jax.io.json_file import read_json_object, read_text
from glm52_jax.text.messages import normalise_messages, normalise_tools
from glm52_jax.text.special import free_mark, strings_in, unescape_mark
from glm52_jax.text.template import TemplateRefusal, compile_template
from glm52_jax.text.tokenizer import CONFIG_FILE, Tokenizer
from sharding.errors import InputError

TEMPLATE_FILE = "chat_template.jinja"
BUILT_IN = "built-in"
REASONING_EFFORTS = ("high", "max")
_BUILT_IN_FILE = "glm52_chat.jinja"

# What the built-in template writes; a tokenizer without one of these would get it as ordinary text.
_BUILT_IN_TOKENS = (
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)

_PROBE = "Is the template whole?"
_PROBE_CALL = {"type": "function", "function": {"name": "look", "arguments": {"where": "here", "times": 2}}}
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
_PROBE_DIALOGUE: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": "", "reasoning_content": "A tool will do.", "tool_calls": [_PROBE_CALL]},
    {"role": "tool", "content": "Nothing."},
    {"role": "assistant", "content": "Nothing there.", "reasoning_content": "It says nothing."},
    {"role": "user", "content": "Thanks."},
]

_log = logging.getLogger(__name__)


class ChatFormat:
    """A compiled chat template with the tokenizer whose special tokens it writes.

    Build one with `ChatFormat.load`. The template is compiled and tried on sample conversations here, so a broken one
    fails when a server starts and not at its first request.

    Args:
        template: Jinja source.
        source: where it came from, for errors and logs.
        tokenizer: the checkpoint's tokenizer.
        variables: further names that the template may read, such as `eos_token`.

    Attributes:
        source: as given; "chat_template.jinja", "tokenizer_config.json" or "built-in" after `load`.
        template: as given, unaltered.

    Raises:
        InputError: the template does not compile, fails on a sample, or loses the user's text.
    """

    def __init__(
        self, template: str, source: str, tokenizer: Tokenizer, variables: Mapping[str, str] | None = None
    ) -> None:
        self.template, self.source = template, source
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        try:
            self._render_template = compile_template(template)
        except jinja2.TemplateError as error:
            line = f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise InputError(
                f"{source}: found a chat template that does not compile ({error.message}{line}), expected valid Jinja"
            ) from error
        self._try_samples()

    @classmethod
    def load(cls, folder: Path | str, tokenizer: Tokenizer) -> "ChatFormat":
        """Take the template from a checkpoint's folder.

        `chat_template.jinja` comes first, then `chat_template` in `tokenizer_config.json` (a text, or a list of
        `{"name", "template"}` with one named "default"), then GLM-5.2's built in here.

        Raises:
            InputError: a file is broken, its template is, or the built-in one finds a special token missing.
        """
        path, config_path = Path(folder) / TEMPLATE_FILE, Path(folder) / CONFIG_FILE
        config = read_json_object(config_path) if is_there(config_path) else {}
        inline = _inline_template(config.get("chat_template"), config_path)
        variables = _special_token_variables(config)
        if is_there(path):
            template = read_text(path)
            if inline is not None:
                # Worth a warning only when it matters which of the two was meant.
                level = logging.INFO if inline == template else logging.WARNING
                _log.log(level, "%s: takes precedence over the chat template in %s", path, config_path.name)
            return cls(template, TEMPLATE_FILE, tokenizer, variables)
        if inline is not None:
            return cls(inline, CONFIG_FILE, tokenizer, variables)
        _log.info("%s: brings no chat template, so the built-in one of GLM-5.2 is used", folder)
        for token in _BUILT_IN_TOKENS:
            if token not in tokenizer.special.ids:
                raise InputError(
                    f"{folder}: found no special token {token!r} in the tokenizer and no chat template, "
                    "expected either GLM's special tokens, for the built-in template, or a template"
                )
        return cls(built_in_template(), BUILT_IN, tokenizer, variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = True,
        reasoning_effort: str | None = None,
        clear_thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt as text, to be read by people; to get its ids use `encode`, which knows content from template.

        Args:
            messages: the conversation; `normalise_messages` says what is accepted.
            tools: definitions of functions, as `{"type": "function", "function": {"name", ...}}` or the inner object.
            enable_thinking: False closes the think block at once (and drops GLM-5.2's effort line).
            reasoning_effort: "high" or "max"; None leaves it to the template, for GLM-5.2 max.
            clear_thinking: False keeps the reasoning of turns before the last user message; None leaves it to the
                template, for GLM-5.2 cleared.
            add_generation_prompt: end with the beginning of the assistant's turn.

        Raises:
            InputError: wrong messages, tools or options, or messages that the template refuses.
        """
        options = _options(enable_thinking, reasoning_effort, clear_thinking, add_generation_prompt)
        text, mark = self._marked(messages, tools, options)
        return text.replace(mark, "")

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = True,
        reasoning_effort: str | None = None,
        clear_thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The prompt as token ids; arguments and errors are those of `render`.

        The text of a special token inside messages or tools is encoded as ordinary characters.
        """
        options = _options(enable_thinking, reasoning_effort, clear_thinking, add_generation_prompt)
        return self._tokenizer.encode_marked(*self._marked(messages, tools, options))

    def _marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> tuple[str, str]:
        """The rendered prompt with a mark in each special token that content brought in, and the mark."""
        turns, definitions = normalise_messages(messages), normalise_tools(tools)
        special = self._tokenizer.special
        mark = free_mark([self.template, *special.ids, *strings_in(turns), *strings_in(definitions)])
        # A role is one of four words, and templates compare it.
        marked = [
            {key: value if key == "role" else special.mark_all(value, mark) for key, value in turn.items()}
            for turn in turns
        ]
        try:
            text = self._render(marked, special.mark_all(definitions, mark), options)
        except TemplateRefusal as error:
            message = str(error.message).replace(mark, "")
            raise InputError(f"messages: the chat template ({self.source}) refuses them: {message}") from error
        except Exception as error:
            message = str(error).replace(mark, "")
            raise InputError(
                f"messages: the chat template ({self.source}) fails on them ({type(error).__name__}: {message})"
            ) from error
        return unescape_mark(text, mark), mark

    def _render(self, messages: list[dict[str, Any]], tools: Any, options: Mapping[str, Any]) -> str:
        # transformers always passes tools and documents, so templates may rely on them being defined.
        return self._render_template(messages=messages, tools=tools, documents=None, **self._variables, **options)

    def _try_samples(self) -> None:
        """Render what requests will: a single question, then tools, history and every option."""
        question = [{"role": "user", "content": _PROBE}]
        for thinking in (True, False):
            if _PROBE not in self._try(question, None, _options(thinking, None, None), refusable=False):
                raise InputError(
                    f"{self.source}: found a chat template that leaves out the user's text, expected it in the prompt"
                )
            self._try(_PROBE_DIALOGUE, [_PROBE_TOOL], _options(thinking, None, True), refusable=True)
            self._try(_PROBE_DIALOGUE[:4], [_PROBE_TOOL], _options(thinking, "high", False), refusable=True)
            self._try(_PROBE_DIALOGUE[:5], None, _options(thinking, "max", False, False), refusable=True)

    def _try(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
        *,
        refusable: bool,
    ) -> str:
        try:
            return self._render(messages, tools, options)
        except Exception as error:  # a template can fail in any way that an expression can
            if refusable and isinstance(error, TemplateRefusal):
                return ""  # not every template takes tools or a system message
            raise InputError(
                f"{self.source}: found a chat template that fails on a sample conversation "
                f"({type(error).__name__}: {error}), expected it to render"
            ) from error


def built_in_template() -> str:
    """The Jinja source of the built-in template, GLM-5.2's format."""
    return resources.files("glm52_jax.text").joinpath(_BUILT_IN_FILE).read_text(encoding="utf-8")


def _options(
    enable_thinking: bool,
    reasoning_effort: str | None,
    clear_thinking: bool | None,
    add_generation_prompt: bool = True,
) -> dict[str, Any]:
    """The options as template variables, checked: templates take any unknown effort for the highest."""
    flags = {"enable_thinking": enable_thinking, "add_generation_prompt": add_generation_prompt}
    if clear_thinking is not None:
        flags["clear_thinking"] = clear_thinking
    for name, value in flags.items():
        # To a template the text "false" is true.
        if not isinstance(value, bool):
            raise InputError(f"{name}: found {value!r}, expected true or false")
    if reasoning_effort is None:
        return flags
    if reasoning_effort not in REASONING_EFFORTS:
        accepted = " or ".join(json.dumps(effort) for effort in REASONING_EFFORTS)
        raise InputError(
            f"reasoning_effort: found {reasoning_effort!r}, expected {accepted} or nothing "
            "(to turn thinking off, set enable_thinking to false)"
        )
    return {**flags, "reasoning_effort": reasoning_effort}


def _inline_template(value: Any, path: Path) -> str | None:
    """The template in a tokenizer_config.json's `chat_template`: a text, or the one named "default" of a list."""
    if value is None or isinstance(value, str):
        return value or None
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
            named[entry["name"]] = entry["template"]
    if "default" not in named:
        found = f"a list with templates named {sorted(named)}" if isinstance(value, list) else type(value).__name__
        raise InputError(
            f'{path}: found {found} in chat_template, expected a text or a list with a template named "default"'
        )
    return named["default"]


def _special_token_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of `bos_token`, `eos_token` and their like, which transformers gives to templates."""
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}
