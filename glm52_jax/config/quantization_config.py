"""`quantization_config` of `config.json`: the codes and blocks of published weights, and what is excepted from them.

Exceptions are written in several ways, by the tools that make such checkpoints and those that read them. A module is
excepted when an entry means it in any of these ways:

* a name, of the module or of one that it is in, from the beginning or from any dot on (`transformers`: from the start
  up to a dot, or the end of the name; vLLM: the whole name);
* the end of the module's name, within a word too (`transformers`);
* `re:` and a regular expression that matches from the beginning of the name (`compressed-tensors`);
* a regular expression without `re:`, such as `.*o_proj$`, that matches from the beginning or from a dot on, up to a dot
  or the end (`transformers`);
* a name with `*` for any text, from the beginning or from a dot on, up to a dot or the end.

`model.` may be left out, and `.weight` may follow. This module must not know the parameter table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from glm52_jax.io.json_fields import Fields, shown
from sharding.errors import InputError

# Names that quantisation lists use for modules whose tensors are called otherwise. The published list of GLM-5.2-FP8
# says `indexers_proj`; the tensor it means is `indexer.weights_proj`.
QUANTIZATION_ALIASES = {"self_attn.indexers_proj": "self_attn.indexer.weights_proj"}
EXCEPTIONS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude")
"""Fields that list exceptions, by the tools: `transformers`, vLLM, `compressed-tensors`, ModelOpt, Quark."""

_FORMATS: dict[str, dict[str, str]] = {"fp8": {"fmt": "e4m3"}, "blockwise_int8": {}}
_CODES = {"fp8": "F8_E4M3", "blockwise_int8": "I8"}
_GLOB = re.compile(r"(?!\.\*)[\w.\-*]+")
_NAME = re.compile(r"[\w.\-]+")
_EXPRESSION = "re:"


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """Block quantisation of the published weights (`quantization_config`).

    Attributes:
        block: rows and columns of the block that shares one scale (`weight_block_size`).
        high_precision: names or patterns of modules that are *not* stored in codes (`modules_to_not_convert`, also
            accepted under the other names of `EXCEPTIONS`), with known aliases already replaced. The module's
            docstring says what an entry means.
        method: `quant_method`: "fp8" for float8_e4m3fn codes, "blockwise_int8" for int8 codes, the name that published
            int8 checkpoints of this class and the servers that read them have.

    Raises:
        InputError: an entry that begins with `re:` is not a regular expression.
    """

    block: tuple[int, int]
    high_precision: tuple[str, ...] = ()
    method: str = "fp8"

    def __post_init__(self) -> None:
        _ = self._patterns  # so that a bad one is refused here, not at its first use

    @property
    def codes(self) -> str:
        """Type of the codes, by its safetensors name."""
        return _CODES[self.method]

    def keeps_high_precision(self, module: str) -> bool:
        """Whether an entry means `module` (a tensor's name without `.weight`), directly or through a parent."""
        if module not in self._known:
            self._known[module] = self._means(module)
        return self._known[module]

    def meaningless(self, modules: Iterable[str]) -> list[str]:
        """The entries that mean none of `modules`."""
        modules = list(modules)
        alone = {entry: dataclasses.replace(self, high_precision=(entry,)) for entry in self.high_precision}
        return [entry for entry, config in alone.items() if not any(map(config._means, modules))]

    def _means(self, module: str) -> bool:
        within = f".{module}."
        return (
            any(f"{parent}." in self._rooted for parent in _parents(module))
            or any(name in within for name in self._loose)
            or module.endswith(self._ends)
            or any(pattern.means(module) for pattern in self._patterns)
        )

    @cached_property
    def _known(self) -> dict[str, bool]:
        return {}

    @cached_property
    def _rooted(self) -> frozenset[str]:
        """Names from `model.` on, of which a published list has hundreds, and a dot."""
        return frozenset(f"{entry.removesuffix('.weight')}." for entry in self.high_precision if _is_rooted(entry))

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        """The other names, which may stand for the end of one."""
        names = (entry for entry in self.high_precision if _is_name(entry) and not _is_rooted(entry))
        return tuple(name.removesuffix(".weight") for name in names)

    @cached_property
    def _loose(self) -> tuple[str, ...]:
        return tuple(f".{name}." for name in self._ends)

    @cached_property
    def _patterns(self) -> tuple[_Pattern, ...]:
        return tuple(_Pattern.of(entry) for entry in self.high_precision if entry and not _is_name(entry))


@dataclasses.dataclass(frozen=True)
class _Pattern:
    """An entry that is no plain name.

    Attributes:
        expression: what it means; None where that is nothing.
        from_start: it matches from the beginning of a name only, with `model.` or without.
    """

    entry: str
    expression: re.Pattern[str] | None
    from_start: bool = False

    @classmethod
    def of(cls, entry: str) -> _Pattern:
        if entry.startswith(_EXPRESSION):
            try:
                return cls(entry, _compiled(entry.removeprefix(_EXPRESSION)), from_start=True)
            except (re.error, RecursionError, OverflowError) as error:
                raise InputError(f"holds {shown(entry)}, which is no regular expression ({error})") from None
        glob = ".*".join(re.escape(part) for part in entry.split("*"))
        # "model.layers.1.*" is both, and as an expression would mean layer 11 too.
        readings = [glob] if _GLOB.fullmatch(entry) else [entry, glob]
        for reading in readings:
            with contextlib.suppress(re.error, RecursionError, OverflowError):
                # Up to a boundary, so that "mlp.gate" is not the beginning of "mlp.gate_proj".
                return cls(entry, _compiled(rf"(?:^|(?<=\.))(?:{reading})(?:(?<=\.)|(?=\.|$))"))
        return cls(entry, None)

    def means(self, module: str) -> bool:
        if self.expression is None:
            return False
        if not self.from_start:
            return self.expression.search(module) is not None
        return any(self.expression.match(name) for name in (module, module.removeprefix("model.")))


def read_quantization(fields: Fields) -> QuantizationConfig | None:
    """`quantization_config` of a config.

    Raises:
        InputError: codes, blocks or activations of another kind than the model's, or a list that is none.
    """
    inner = fields.inner("quantization_config")
    if inner is None:
        return None
    if not inner.has("quant_method"):
        raise inner.error("quant_method", "is missing")
    inner.only("quant_method", *_FORMATS)
    method = inner.raw["quant_method"]
    if "fmt" in _FORMATS[method]:
        inner.only("fmt", "e4m3", "float8_e4m3fn")
    inner.only("activation_scheme", "dynamic")
    block = inner.raw.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(b) is int and b > 0 for b in block):
        raise inner.error("weight_block_size", f"is {shown(block)}, expected two block sizes such as [128, 128]")
    named: dict[str, list[str]] = {}
    for field in EXCEPTIONS:
        value = inner.raw.get(field)
        if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            raise inner.error(field, f"is {shown(value)}, expected a list of names")
        if value:
            named[field] = value
    _note_other_lists(inner, named)
    entries = list(dict.fromkeys(_without_aliases(entry) for entries in named.values() for entry in entries))
    try:
        return QuantizationConfig((block[0], block[1]), tuple(entries), method)
    except InputError as error:
        # The sentence quotes the entry.
        field = next(field for field, listed in named.items() if any(shown(entry) in str(error) for entry in listed))
        raise inner.error(field, str(error)) from None


def write_quantization(config: QuantizationConfig) -> dict[str, Any]:
    """The content of `quantization_config`."""
    return {
        "quant_method": config.method,
        **_FORMATS[config.method],
        "activation_scheme": "dynamic",
        "weight_block_size": list(config.block),
        "modules_to_not_convert": list(config.high_precision),
    }


def _note_other_lists(fields: Fields, named: dict[str, list[str]]) -> None:
    """Programs read one of the lists; what only another one excepts is excepted here too."""
    (first, entries), *others = named.items() or [("", [])]
    for field, other in others:
        if set(other) != set(entries):
            fields.note(f"{first} and {field} differ, and what either excepts from quantisation is taken as excepted")


def _without_aliases(entry: str) -> str:
    for alias, name in QUANTIZATION_ALIASES.items():
        entry = entry.replace(alias, name)
    return entry


def _is_name(entry: str) -> bool:
    return not entry.startswith(_EXPRESSION) and _NAME.fullmatch(entry) is not None


def _is_rooted(entry: str) -> bool:
    return _is_name(entry) and entry.startswith("model.")


def _parents(module: str) -> Iterator[str]:
    """The module and what it is in."""
    words = module.split(".")
    for last in range(1, len(words) + 1):
        yield ".".join(words[:last])


def _compiled(expression: str) -> re.Pattern[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of expressions that a later Python will read otherwise
        return re.compile(expression)
