"""Jinja chat templates, compiled as Hugging Face's transformers does, so that one file renders alike in both.

A template comes with a checkpoint and is not trusted: it runs in jinja's immutable sandbox. It must not know about
tokens or the form of messages.
"""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class TemplateRefusal(jinja2.TemplateError):
    """A template called `raise_exception`: it is whole, and does not take these messages."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote, for training masks; for a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (jinja reads this name from the class)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def compile_template(text: str) -> Callable[..., str]:
    """The function (variables as keywords) -> rendered text; raises `jinja2.TemplateSyntaxError`."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    globals_: dict[str, Any] = environment.globals
    globals_.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment.from_string(text).render


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML's characters, which a model should see as they are.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # local time, as in transformers
