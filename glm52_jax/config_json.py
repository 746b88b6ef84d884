"""The published `config.json`: read into the values of `ModelConfig`'s fields, and written back from them.

Here are the names, aliases, defaults and old forms that releases and tools use. What the values mean together is
`config`'s business, which is also the only caller: everything else asks for a `ModelConfig`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm52_jax.errors import InputError
from glm52_jax.files import dead_link

if TYPE_CHECKING:
    from glm52_jax.config import ModelConfig

FULL, SHARED = "full", "shared"
DENSE, SPARSE = "dense", "sparse"
MODEL_TYPE = "glm_moe_dsa"
DTYPE_FIELDS = ("dtype", "torch_dtype")  # new and old name, in order of precedence

# Names that quantisation lists use for modules whose tensors are called otherwise. The published list of GLM-5.2-FP8
# says `indexers_proj`; the tensor it means is `indexer.weights_proj`.
QUANTIZATION_ALIASES = {"self_attn.indexers_proj": "self_attn.indexer.weights_proj"}

_LARGEST = 2**31 - 1  # of a size or id: what an int32 holds
_MOST_LAYERS = 10_000  # a larger number is a mistake, and would be spelled out layer by layer
# Fields of `ModelConfig` that `config.json` has in another form, elsewhere, or only sometimes.
_OTHER_FORM = frozenset(
    {
        "eos_token_ids",
        "indexer_types",
        "latent_norm_eps",
        "mlp_layer_types",
        "pad_token_id",
        "quantization",
        "rope_theta",
        "temperature",
        "top_p",
    }
)


_FORMATS: dict[str, dict[str, str]] = {"fp8": {"fmt": "e4m3"}, "blockwise_int8": {}}
_CODES = {"fp8": "F8_E4M3", "blockwise_int8": "I8"}


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """Block quantisation of the published weights (`quantization_config`).

    Attributes:
        block: rows and columns of the block that shares one scale (`weight_block_size`).
        high_precision: names or patterns of modules that are *not* stored in codes (`modules_to_not_convert`, also
            accepted as `ignored_layers`), with known aliases already replaced. An entry matches a module whose name
            equals it, starts with it at a dot, or, when it begins with `re:` or holds `*`, whose name it matches.
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
        """Whether the list names `module` (a tensor's name without `.weight`), directly or through a parent."""
        return module in self._exact or any(p in self._exact for p in _parents(module)) or self._matches(module)

    @cached_property
    def _exact(self) -> frozenset[str]:
        return frozenset(p for p in self.high_precision if not _is_pattern(p))

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(_compile(p) for p in self.high_precision if _is_pattern(p))

    def _matches(self, module: str) -> bool:
        return any(p.fullmatch(module) for p in self._patterns)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; one sentence naming the file when it is not there or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_duplicates)
    except FileNotFoundError:
        raise InputError(f"{path}: {dead_link(path) or 'no such file'}; a checkpoint folder needs it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {dead_link(path) or f'cannot be read ({error})'}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's pairs as a dictionary; of two values under one name, none is the right one to take."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in value if names.count(name) > 1)
        raise ValueError(f"{shown(twice)} is in one object twice")
    return value


def shown(value: Any) -> str:
    """A value as an error quotes it: on one line and not longer than one."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


class _Fields:
    """Typed access to a raw config; every refusal names the source and the field."""

    def __init__(self, raw: Mapping[str, Any], source: str):
        self.raw, self.source = raw, source

    def error(self, field: str, problem: str) -> InputError:
        return InputError(f"{self.source}: {field} {problem}")

    def has(self, field: str) -> bool:
        return self.raw.get(field) is not None

    def integer(self, field: str, default: int | None = None, *, minimum: int = 1, maximum: int = _LARGEST) -> int:
        value: Any = self.raw.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.error(field, "is missing")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(field, f"is {shown(value)}, expected an integer of at least {minimum}")
        if value > maximum:
            raise self.error(field, f"is {shown(value)}, expected at most {maximum}")
        return value

    def number(self, field: str, default: float | None = None, *, zero: bool = False) -> float:
        value = self.raw.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.error(field, "is missing")
        expected = "a number of at least 0" if zero else "a positive number"
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self.error(field, f"is {shown(value)}, expected {expected}")
        try:
            number = float(value)
        except OverflowError:
            raise self.error(field, f"is {shown(value)}, more than a float holds") from None
        if number == 0 and not zero:
            raise self.error(field, f"is {shown(value)}, expected {expected}")
        return number

    def boolean(self, field: str, default: bool) -> bool:
        value = self.raw.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, f"is {shown(value)}, expected true or false")
        return value

    def inner(self, field: str) -> _Fields | None:
        """An object within this one."""
        value = self.raw.get(field)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(field, f"is {shown(value)}, expected an object")
        return _Fields(value, f"{self.source}: {field}")

    def only(self, field: str, *accepted: Any) -> None:
        """Refuses a value that names another model than this one; an absent field means the accepted one."""
        value = self.raw.get(field)
        if value is not None and value not in accepted:
            choice = " or ".join(repr(a) for a in accepted)
            raise self.error(field, f"is {shown(value)}, but this model needs {choice}")


def read_config(raw: Mapping[str, Any], generation: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The fields of `ModelConfig` from the content of `config.json` and of `generation_config.json`.

    Raises:
        InputError: a field is missing, of the wrong kind, unknown in value, or contradicts another form of itself.
    """
    fields, sampling = _Fields(raw, source), _Fields(generation, "generation_config.json")
    _refuse_other_models(fields)
    layers = fields.integer("num_hidden_layers", maximum=_MOST_LAYERS)
    heads = fields.integer("num_attention_heads")
    fields.only("num_key_value_heads", heads)
    nope, rope = fields.integer("qk_nope_head_dim"), _rope_head_dim(fields)
    fields.only("qk_head_dim", nope + rope)
    eps = fields.number("rms_norm_eps", 1e-5)
    nextn = fields.integer("num_nextn_predict_layers", 0, minimum=0)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "q_lora_rank": fields.integer("q_lora_rank"),
        "kv_lora_rank": fields.integer("kv_lora_rank"),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": fields.integer("v_head_dim"),
        "n_routed_experts": _routed_experts(fields),
        "n_shared_experts": fields.integer("n_shared_experts", 1),
        "num_experts_per_tok": fields.integer("num_experts_per_tok"),
        "index_n_heads": fields.integer("index_n_heads"),
        "index_head_dim": fields.integer("index_head_dim"),
        "index_topk": fields.integer("index_topk"),
        "indexer_types": _indexer_types(fields, layers, nextn),
        "mlp_layer_types": _mlp_layer_types(fields, layers),
        "rope_theta": _rope_theta(fields),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "n_group": fields.integer("n_group", 1),
        "topk_group": fields.integer("topk_group", 1),
        "norm_topk_prob": fields.boolean("norm_topk_prob", True),
        "routed_scaling_factor": fields.number("routed_scaling_factor", 1.0),
        "rope_interleave": fields.boolean("rope_interleave", True),
        "indexer_rope_interleave": fields.boolean("indexer_rope_interleave", True),
        "rms_norm_eps": eps,
        "latent_norm_eps": fields.number("latent_norm_eps", eps),
        "attention_bias": fields.boolean("attention_bias", False),
        "num_nextn_predict_layers": nextn,
        "index_share_for_mtp_iteration": fields.boolean("index_share_for_mtp_iteration", False),
        "eos_token_ids": _eos(fields, sampling),
        "pad_token_id": fields.integer("pad_token_id", minimum=0) if fields.has("pad_token_id") else None,
        "dtype": _dtype(fields),
        "quantization": _quantization(fields),
        "initializer_range": fields.number("initializer_range", 0.02),
        "temperature": sampling.number("temperature", 1.0, zero=True),  # 0 is how greedy choice is often written
        "top_p": sampling.number("top_p", 1.0),
    }


def write_config(config: ModelConfig) -> dict[str, Any]:
    """The content of `config.json`, which `read_config` reads back to the same values.

    A field that says the same in another way is written too where other programs read only that one: a schedule or a
    pattern beside `indexer_types`, `first_k_dense_replace` beside `mlp_layer_types`.
    """
    raw: dict[str, Any] = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": MODEL_TYPE}
    raw |= {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in _OTHER_FORM}
    raw |= {
        "attention_dropout": 0.0,
        "eos_token_id": list(config.eos_token_ids) or None,
        "hidden_act": "silu",
        "indexer_types": list(config.indexer_types),
        "mlp_layer_types": list(config.mlp_layer_types),
        "moe_router_dtype": "float32",
        "num_key_value_heads": config.num_attention_heads,
        "qk_head_dim": config.qk_head_dim,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "use_cache": True,
    }
    raw |= _schedule(config.indexer_types)
    dense = config.mlp_layer_types.count(DENSE)
    if DENSE not in config.mlp_layer_types[dense:]:
        raw |= {"first_k_dense_replace": dense, "moe_layer_freq": 1}
    if config.latent_norm_eps != config.rms_norm_eps:
        raw["latent_norm_eps"] = config.latent_norm_eps
    if config.pad_token_id is not None:
        raw["pad_token_id"] = config.pad_token_id
    if config.quantization is not None:
        raw["quantization_config"] = {
            "quant_method": config.quantization.method,
            **_FORMATS[config.quantization.method],
            "activation_scheme": "dynamic",
            "weight_block_size": list(config.quantization.block),
            "modules_to_not_convert": list(config.quantization.high_precision),
        }
    return dict(sorted(raw.items()))


def write_generation(config: ModelConfig) -> dict[str, Any]:
    """The content of `generation_config.json`: how a text ends, and the defaults for sampling."""
    raw: dict[str, Any] = {"eos_token_id": list(config.eos_token_ids) or None}
    if config.pad_token_id is not None:
        raw["pad_token_id"] = config.pad_token_id
    # `transformers` samples only where the file says so, and refuses a temperature of 0 then.
    return raw | {"do_sample": config.temperature > 0, "temperature": config.temperature, "top_p": config.top_p}


def _refuse_other_models(fields: _Fields) -> None:
    fields.only("model_type", MODEL_TYPE)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("hidden_act", "silu")
    fields.only("moe_layer_freq", 1)
    fields.only("mlp_bias", False)
    fields.only("tie_word_embeddings", False)


def _rope_head_dim(fields: _Fields) -> int:
    if not fields.has("qk_rope_head_dim") and fields.has("head_dim"):
        raise fields.error(
            "qk_rope_head_dim", "is missing (head_dim is no substitute: it is 64, 192 or absent by release)"
        )
    return fields.integer("qk_rope_head_dim")


def _routed_experts(fields: _Fields) -> int:
    """`n_routed_experts`, which some writers call `num_experts` or repeat under that name."""
    if not fields.has("n_routed_experts"):
        return fields.integer("num_experts" if fields.has("num_experts") else "n_routed_experts")
    experts = fields.integer("n_routed_experts")
    if fields.has("num_experts") and fields.integer("num_experts") != experts:
        raise fields.error("num_experts", f"is {fields.raw['num_experts']} but n_routed_experts is {experts}")
    return experts


def _indexer_types(fields: _Fields, layers: int, nextn: int) -> tuple[str, ...]:
    """`indexer_types`, else `index_topk_pattern`, else `index_topk_freq` and `index_skip_topk_offset`."""
    types = _without_mtp(_type_list(fields, "indexer_types", {}), layers, nextn)
    pattern = _without_mtp(_type_list(fields, "index_topk_pattern", {"F": FULL, "S": SHARED}), layers, nextn)
    scheduled = None
    if fields.has("index_topk_freq"):
        # The default offset is transformers'; published GLM-5.2 has 4 and 3.
        freq, offset = fields.integer("index_topk_freq"), fields.integer("index_skip_topk_offset", 2, minimum=0)
        scheduled = _scheduled(layers, freq, offset)
    if types is None:
        return next((plan for plan in (pattern, scheduled) if plan is not None), (FULL,) * layers)
    if pattern is not None and types != pattern:
        where = _first_difference(types, pattern)
        raise fields.error("index_topk_pattern", f"contradicts indexer_types at layer {where}")
    # A default offset is no statement that could contradict the list.
    if scheduled is not None and fields.has("index_skip_topk_offset") and types != scheduled:
        where = _first_difference(types, scheduled)
        rule = "index_topk_freq {index_topk_freq} with index_skip_topk_offset {index_skip_topk_offset}"
        raise fields.error("indexer_types", f"contradicts {rule.format(**fields.raw)} at layer {where}")
    return types


def _scheduled(layers: int, freq: int, offset: int) -> tuple[str, ...]:
    """Layer i is full when max(i - offset + 1, 0) is a multiple of freq (z.ai's rule, counted from 0)."""
    return tuple(FULL if max(i - offset + 1, 0) % freq == 0 else SHARED for i in range(layers))


def _without_mtp(types: tuple[str, ...] | None, layers: int, nextn: int) -> tuple[str, ...] | None:
    """Some writers list the MTP layer too, which always has an indexer of its own."""
    if types is not None and len(types) == layers + nextn and types[layers:] == (FULL,) * nextn:
        return types[:layers]
    return types


def _first_difference(a: Sequence[str], b: Sequence[str]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _type_list(fields: _Fields, field: str, letters: Mapping[str, str]) -> tuple[str, ...] | None:
    value = fields.raw.get(field)
    if value is None:
        return None
    if isinstance(value, str) and letters:
        value = list(value)
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise fields.error(field, f"is {shown(value)}, expected a list of layer kinds")
    return tuple(letters.get(v, v) for v in value)


def _schedule(types: tuple[str, ...]) -> dict[str, Any]:
    """The plan as frequency and offset, or as a pattern where no such pair gives it; nothing where all are full."""
    if SHARED not in types:
        return {}
    offset = types.index(SHARED)
    after = next((i for i in range(offset, len(types)) if types[i] == FULL), len(types))
    freq = after - offset + 1
    if types == _scheduled(len(types), freq, offset):
        return {"index_topk_freq": freq, "index_skip_topk_offset": offset}
    return {"index_topk_pattern": "".join("F" if kind == FULL else "S" for kind in types)}


def _mlp_layer_types(fields: _Fields, layers: int) -> tuple[str, ...]:
    types = _type_list(fields, "mlp_layer_types", {})
    if not fields.has("first_k_dense_replace"):
        if types is None:
            raise fields.error("first_k_dense_replace", "is missing, and there is no mlp_layer_types")
        return types
    dense = fields.integer("first_k_dense_replace", minimum=0)
    if dense > layers:
        raise fields.error("first_k_dense_replace", f"is {dense} but num_hidden_layers is {layers}")
    derived = (DENSE,) * dense + (SPARSE,) * (layers - dense)
    if types is not None and types != derived:
        where = _first_difference(types, derived)
        raise fields.error("mlp_layer_types", f"contradicts first_k_dense_replace {dense} at layer {where}")
    return derived


def _rope_theta(fields: _Fields) -> float:
    """`rope_parameters.rope_theta` (new) or `rope_theta` (old); no default, since each release has another base."""
    found: dict[str, float] = {}
    for field in ("rope_parameters", "rope_scaling"):
        if inner := fields.inner(field):
            inner.only("rope_type", "default")
            inner.only("type", "default")
            inner.only("partial_rotary_factor", 1)
            if inner.has("rope_theta"):
                found[f"{field}.rope_theta"] = inner.number("rope_theta")
    if fields.has("rope_theta"):
        found["rope_theta"] = fields.number("rope_theta")
    if not found:
        raise fields.error("rope_theta", "is missing, at the top level and in rope_parameters")
    (first, theta), *others = found.items()
    for name, other in others:
        if other != theta:
            raise fields.error(name, f"is {other:.15g} but {first} is {theta:.15g}")
    return theta


def _eos(*sources: _Fields) -> tuple[int, ...]:
    """Every end-of-text id: a number or a list, in `config.json` or `generation_config.json`, joined in that order."""
    ids: dict[int, None] = {}
    for fields in sources:
        found = fields.raw.get("eos_token_id")
        for eos in found if isinstance(found, list) else [] if found is None else [found]:
            if isinstance(eos, bool) or not isinstance(eos, int) or not 0 <= eos <= _LARGEST:
                raise fields.error("eos_token_id", f"holds {shown(eos)}, expected token ids")
            ids[eos] = None
    return tuple(ids)


def _dtype(fields: _Fields) -> str:
    name = next((fields.raw[f] for f in DTYPE_FIELDS if fields.raw.get(f)), "bfloat16")
    name = name.removeprefix("torch.") if isinstance(name, str) else name
    if name not in ("bfloat16", "float16", "float32"):
        raise fields.error("dtype", f"is {shown(name)}, expected bfloat16, float16 or float32")
    return name


def _quantization(fields: _Fields) -> QuantizationConfig | None:
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
    named: list[str] = []
    for field in ("modules_to_not_convert", "ignored_layers"):
        value = inner.raw.get(field)
        if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            raise inner.error(field, f"is {shown(value)}, expected a list of names")
        named += value or ()
    for alias, name in QUANTIZATION_ALIASES.items():
        named = [entry.replace(alias, name) for entry in named]
    try:
        return QuantizationConfig((block[0], block[1]), tuple(dict.fromkeys(named)), method)
    except InputError as error:
        raise inner.error("modules_to_not_convert", str(error)) from None


def _is_pattern(entry: str) -> bool:
    return entry.startswith("re:") or "*" in entry


def _compile(entry: str) -> re.Pattern[str]:
    if entry.startswith("re:"):
        try:
            return re.compile(entry[3:])
        except (re.error, RecursionError, OverflowError) as error:
            raise InputError(f"holds {shown(entry)}, which is no regular expression ({error})") from None
    return re.compile(".*".join(re.escape(part) for part in entry.split("*")))


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]
