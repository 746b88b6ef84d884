"""`ModelConfig`: the shape and rules of one GLM-5 class model, and the only reader of `config.json`.

It validates, fills in what a config leaves out, and refuses contradictions. It knows nothing of arrays or devices.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from glm52_jax.errors import InputError

FULL, SHARED = "full", "shared"
DENSE, SPARSE = "dense", "sparse"
MODEL_TYPE = "glm_moe_dsa"

# Names that quantisation lists use for modules whose tensors are called otherwise. The published list of GLM-5.2-FP8
# says `indexers_proj`; the tensor it means is `indexer.weights_proj`.
QUANTIZATION_ALIASES = {"self_attn.indexers_proj": "self_attn.indexer.weights_proj"}


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """FP8 block quantisation of the published weights (`quantization_config`).

    Attributes:
        block: rows and columns of the block that shares one scale (`weight_block_size`).
        high_precision: names or patterns of modules that are *not* stored in FP8 (`modules_to_not_convert`, also
            accepted as `ignored_layers`), with known aliases already replaced. An entry matches a module whose name
            equals it, starts with it at a dot, or, when it begins with `re:` or holds `*`, whose name it matches.
    """

    block: tuple[int, int]
    high_precision: tuple[str, ...] = ()

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


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One GLM-5 class model. Field names are those of the published `config.json` unless said otherwise.

    Attributes:
        vocab_size: rows of the embedding and of the output head.
        hidden_size: width of the residual stream.
        intermediate_size: width of a dense MLP.
        moe_intermediate_size: width of one expert; a shared expert is `n_shared_experts` times as wide.
        num_hidden_layers: decoder layers, the multi-token-prediction (MTP) layer not counted.
        num_attention_heads: query heads; keys and values come from one latent shared by all of them.
        q_lora_rank, kv_lora_rank: ranks of the query and key/value latents.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: widths of a head: unrotated, rotated, value.
        n_routed_experts, n_shared_experts, num_experts_per_tok: routed experts, shared experts, experts a token takes.
        n_group, topk_group: expert groups, and how many of them a token may use.
        norm_topk_prob, routed_scaling_factor: whether the chosen gates are made to sum to one, and their factor.
        index_n_heads, index_head_dim, index_topk: indexer heads, their width, and positions a query attends to.
        indexer_types: one of "full" (own indexer) and "shared" (the last full layer's selection) a layer.
        mlp_layer_types: one of "dense" and "sparse" a layer.
        rope_theta: base of the rotary frequencies, of attention and indexer alike.
        rope_interleave, indexer_rope_interleave: rotate adjacent pairs (true) or the two halves (false).
        max_position_embeddings: longest sequence.
        rms_norm_eps: epsilon of every RMSNorm but the two of the latents.
        latent_norm_eps: epsilon of `q_a_layernorm` and `kv_a_layernorm`. Not a published field: `transformers` builds
            them with 1e-6, the trainer and the reference servers with `rms_norm_eps`, which is the default here.
        attention_bias: whether the projections from and to the hidden state have a bias.
        num_nextn_predict_layers: MTP layers in the checkpoint (0 or 1).
        index_share_for_mtp_iteration: later draft steps reuse the MTP layer's selection of the first one.
        eos_token_ids: every id that ends a text (config.json and generation_config.json joined).
        pad_token_id: id used for padding, when the config has one.
        dtype: stored type of the plain weights: "bfloat16", "float16" or "float32".
        quantization: FP8 block quantisation, or None.
        initializer_range: standard deviation for random weights.
        temperature, top_p: defaults of `generation_config.json`; 1.0 where it has none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    rope_theta: float
    max_position_embeddings: int
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    rope_interleave: bool = True
    indexer_rope_interleave: bool = True
    rms_norm_eps: float = 1e-5
    latent_norm_eps: float = 1e-5
    attention_bias: bool = False
    num_nextn_predict_layers: int = 0
    index_share_for_mtp_iteration: bool = False
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str = "bfloat16"
    quantization: QuantizationConfig | None = None
    initializer_range: float = 0.02
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Values cached a token and layer: the normalised latent and the rotated rope key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared experts, which run as one MLP."""
        return self.moe_intermediate_size * self.n_shared_experts

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers with an indexer of their own, the MTP layer not counted."""
        return tuple(i for i, kind in enumerate(self.indexer_types) if kind == FULL)

    @property
    def has_mtp(self) -> bool:
        return self.num_nextn_predict_layers > 0

    def without_mtp(self) -> ModelConfig:
        """The same model without its draft layer."""
        return dataclasses.replace(self, num_nextn_predict_layers=0)

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], *, generation: Mapping[str, Any] | None = None, source: str = "config.json"
    ) -> ModelConfig:
        """Reads a config as published.

        Args:
            raw: the content of `config.json` of GLM-5, 5.1 or 5.2, with or without `quantization_config`.
            generation: the content of `generation_config.json`, whose end-of-text ids are joined with `raw`'s.
            source: what to call `raw` in an error.

        Raises:
            InputError: a field is missing, of the wrong kind, unknown in value, or contradicts another one.
        """
        return _read(_Fields(raw, source), generation or {})

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Reads `config.json` and, when present, `generation_config.json` of a checkpoint folder."""
        folder = Path(folder)
        generation = folder / "generation_config.json"
        raw = read_json(folder / "config.json")
        return cls.from_dict(
            raw, generation=read_json(generation) if generation.exists() else None, source=str(folder / "config.json")
        )


def load_config(path: str | Path) -> ModelConfig:
    """The config of a checkpoint folder, or a built-in one: see `BUILT_IN`.

    A folder wins over a built-in name when both exist.
    """
    folder = Path(path)
    if folder.is_dir():
        return ModelConfig.from_folder(folder)
    if folder.is_file():
        return ModelConfig.from_dict(read_json(folder), source=str(folder))
    if str(path) in BUILT_IN:
        return BUILT_IN[str(path)]
    raise InputError(f"{path}: neither a checkpoint folder nor one of the built-in names {', '.join(BUILT_IN)}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; one sentence naming the file when it is not there or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; a checkpoint folder needs it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


class _Fields:
    """Typed access to a raw config; every refusal names the source and the field."""

    def __init__(self, raw: Mapping[str, Any], source: str):
        self.raw, self.source = raw, source

    def error(self, field: str, problem: str) -> InputError:
        return InputError(f"{self.source}: {field} {problem}")

    def has(self, field: str) -> bool:
        return self.raw.get(field) is not None

    def integer(self, field: str, default: int | None = None, *, minimum: int = 1) -> int:
        value: Any = self.raw.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.error(field, "is missing")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(field, f"is {value!r}, expected an integer of at least {minimum}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self.raw.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.error(field, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(field, f"is {value!r}, expected a positive number")
        return float(value)

    def boolean(self, field: str, default: bool) -> bool:
        value = self.raw.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, f"is {value!r}, expected true or false")
        return value

    def only(self, field: str, *accepted: Any) -> None:
        """Refuses a value that names another model than this one; an absent field means the accepted one."""
        value = self.raw.get(field)
        if value is not None and value not in accepted:
            choice = " or ".join(repr(a) for a in accepted)
            raise self.error(field, f"is {value!r}, but this model needs {choice}")


def _read(fields: _Fields, generation: Mapping[str, Any]) -> ModelConfig:
    fields.only("model_type", MODEL_TYPE)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("hidden_act", "silu")
    fields.only("moe_layer_freq", 1)
    fields.only("mlp_bias", False)
    fields.only("tie_word_embeddings", False)
    if not fields.has("qk_rope_head_dim"):
        hint = " (head_dim is no substitute: it is 64, 192 or absent by release)" if fields.has("head_dim") else ""
        raise fields.error("qk_rope_head_dim", f"is missing{hint}")
    layers = fields.integer("num_hidden_layers")
    heads = fields.integer("num_attention_heads")
    fields.only("num_key_value_heads", heads)
    eps = fields.number("rms_norm_eps", 1e-5)
    nextn = fields.integer("num_nextn_predict_layers", 0, minimum=0)
    experts = "n_routed_experts" if fields.has("n_routed_experts") else "num_experts"
    if fields.has("num_experts") and fields.raw["num_experts"] != fields.raw[experts]:
        raise fields.error("num_experts", f"is {fields.raw['num_experts']!r} but n_routed_experts is another number")
    values: dict[str, Any] = dict(  # noqa: C408 - keyword form reads like the fields it fills
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        q_lora_rank=fields.integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
        n_routed_experts=fields.integer(experts),
        n_shared_experts=fields.integer("n_shared_experts", 1),
        num_experts_per_tok=fields.integer("num_experts_per_tok"),
        index_n_heads=fields.integer("index_n_heads"),
        index_head_dim=fields.integer("index_head_dim"),
        index_topk=fields.integer("index_topk"),
        indexer_types=_indexer_types(fields, layers, nextn),
        mlp_layer_types=_mlp_layer_types(fields, layers),
        rope_theta=_rope_theta(fields),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        n_group=fields.integer("n_group", 1),
        topk_group=fields.integer("topk_group", 1),
        norm_topk_prob=fields.boolean("norm_topk_prob", True),
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        rope_interleave=fields.boolean("rope_interleave", True),
        indexer_rope_interleave=fields.boolean("indexer_rope_interleave", True),
        rms_norm_eps=eps,
        latent_norm_eps=fields.number("latent_norm_eps", eps),
        attention_bias=fields.boolean("attention_bias", False),
        num_nextn_predict_layers=nextn,
        index_share_for_mtp_iteration=fields.boolean("index_share_for_mtp_iteration", False),
        eos_token_ids=_eos(fields, generation),
        pad_token_id=fields.integer("pad_token_id", minimum=0) if fields.has("pad_token_id") else None,
        dtype=_dtype(fields),
        quantization=_quantization(fields),
        initializer_range=fields.number("initializer_range", 0.02),
        temperature=_Fields(generation, "generation_config.json").number("temperature", 1.0),
        top_p=_Fields(generation, "generation_config.json").number("top_p", 1.0),
    )
    try:
        return ModelConfig(**values)
    except InputError as error:
        raise InputError(f"{fields.source}: {error}") from None


def _check(config: ModelConfig) -> None:
    """Contradictions between fields, whoever built the config."""
    layers = config.num_hidden_layers
    for field, kinds in (("indexer_types", {FULL, SHARED}), ("mlp_layer_types", {DENSE, SPARSE})):
        values = getattr(config, field)
        if len(values) != layers:
            raise InputError(f"{field} has {len(values)} entries but num_hidden_layers is {layers}")
        for layer, kind in enumerate(values):
            if kind not in kinds:
                raise InputError(f"{field}[{layer}] is {kind!r}, expected one of {', '.join(sorted(kinds))}")
    if config.indexer_types[0] != FULL:
        raise InputError("indexer_types[0] is 'shared', but no earlier layer has a selection that it could share")
    if config.qk_rope_head_dim % 2:
        raise InputError(f"qk_rope_head_dim is {config.qk_rope_head_dim}, expected an even number")
    if config.index_head_dim < config.qk_rope_head_dim:
        raise InputError(
            f"index_head_dim is {config.index_head_dim}, less than the {config.qk_rope_head_dim} dimensions "
            "(qk_rope_head_dim) that the indexer rotates"
        )
    if config.num_nextn_predict_layers > 1:
        raise InputError(f"num_nextn_predict_layers is {config.num_nextn_predict_layers}, expected 0 or 1")
    if config.n_routed_experts % config.n_group:
        raise InputError(
            f"n_group is {config.n_group}, which does not divide n_routed_experts {config.n_routed_experts}"
        )
    if config.topk_group > config.n_group:
        raise InputError(f"topk_group is {config.topk_group}, more than the {config.n_group} groups of n_group")
    usable = config.topk_group * (config.n_routed_experts // config.n_group)
    if config.num_experts_per_tok > usable:
        raise InputError(f"num_experts_per_tok is {config.num_experts_per_tok}, but a token may use {usable} experts")
    if config.n_group > 1 and config.n_routed_experts // config.n_group < 2:
        raise InputError("n_group leaves one expert a group, but a group is ranked by its best two")


def _indexer_types(fields: _Fields, layers: int, nextn: int) -> tuple[str, ...]:
    """`indexer_types`, else `index_topk_pattern`, else `index_topk_freq` and `index_skip_topk_offset`."""
    types = _type_list(fields, "indexer_types", {})
    pattern = _type_list(fields, "index_topk_pattern", {"F": FULL, "S": SHARED})
    freq, offset = fields.raw.get("index_topk_freq"), fields.raw.get("index_skip_topk_offset")
    scheduled = None
    if freq is not None:
        # Layer i is full when max(i - offset + 1, 0) is a multiple of freq; published GLM-5.2 has 4 and 3. The default
        # offset is transformers'.
        freq = fields.integer("index_topk_freq")
        start = fields.integer("index_skip_topk_offset", 2, minimum=0)
        scheduled = tuple(FULL if max(i - start + 1, 0) % freq == 0 else SHARED for i in range(layers))
    if types is not None and len(types) == layers + nextn and types[layers:] == (FULL,) * nextn:
        types = types[:layers]  # some writers list the MTP layer too
    if types is not None and pattern is not None and types != pattern[: len(types)]:
        raise fields.error("index_topk_pattern", "contradicts indexer_types")
    if types is not None and offset is not None and scheduled is not None and types != scheduled:
        first = next((i for i, (a, b) in enumerate(zip(types, scheduled, strict=False)) if a != b), layers)
        raise fields.error(
            "indexer_types", f"contradicts index_topk_freq {freq} with index_skip_topk_offset {offset} at layer {first}"
        )
    return types or pattern or scheduled or (FULL,) * layers


def _type_list(fields: _Fields, field: str, letters: Mapping[str, str]) -> tuple[str, ...] | None:
    value = fields.raw.get(field)
    if value is None:
        return None
    if isinstance(value, str) and letters:
        value = list(value)
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise fields.error(field, f"is {value!r}, expected a list of layer kinds")
    return tuple(letters.get(v, v) for v in value)


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
        raise fields.error("mlp_layer_types", f"contradicts first_k_dense_replace {dense}")
    return derived


def _rope_theta(fields: _Fields) -> float:
    """`rope_parameters.rope_theta` (new) or `rope_theta` (old); no default, since each release has another base."""
    nested = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    if not isinstance(nested, Mapping):
        raise fields.error("rope_parameters", f"is {nested!r}, expected an object")
    inner = _Fields(nested, f"{fields.source}: rope_parameters")
    inner.only("rope_type", "default")
    inner.only("type", "default")
    inner.only("partial_rotary_factor", 1, 1.0)
    theta = [f.number("rope_theta") for f in (inner, fields) if f.has("rope_theta")]
    if not theta:
        raise fields.error("rope_theta", "is missing, at the top level and in rope_parameters")
    if len(set(theta)) > 1:
        raise fields.error("rope_theta", f"is {theta[1]:g} but rope_parameters.rope_theta is {theta[0]:g}")
    return theta[0]


def _eos(fields: _Fields, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Every end-of-text id: a number or a list, here or in `generation_config.json`, joined in that order."""
    ids: dict[int, None] = {}
    for source, value in ((fields.source, fields.raw), ("generation_config.json", generation)):
        found = value.get("eos_token_id")
        for eos in found if isinstance(found, list) else [] if found is None else [found]:
            if isinstance(eos, bool) or not isinstance(eos, int) or eos < 0:
                raise InputError(f"{source}: eos_token_id holds {eos!r}, expected token ids")
            ids[eos] = None
    return tuple(ids)


def _dtype(fields: _Fields) -> str:
    name = fields.raw.get("dtype") or fields.raw.get("torch_dtype") or "bfloat16"
    name = str(name).removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32"):
        raise fields.error("dtype", f"is {name!r}, expected bfloat16, float16 or float32")
    return name


def _quantization(fields: _Fields) -> QuantizationConfig | None:
    raw = fields.raw.get("quantization_config")
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise fields.error("quantization_config", f"is {raw!r}, expected an object")
    inner = _Fields(raw, f"{fields.source}: quantization_config")
    if not inner.has("quant_method"):
        raise inner.error("quant_method", "is missing")
    inner.only("quant_method", "fp8")
    inner.only("fmt", "e4m3", "float8_e4m3fn")
    inner.only("activation_scheme", "dynamic")
    block = raw.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
        raise inner.error("weight_block_size", f"is {block!r}, expected two block sizes such as [128, 128]")
    named = [*(raw.get("modules_to_not_convert") or ()), *(raw.get("ignored_layers") or ())]
    if not all(isinstance(name, str) for name in named):
        raise inner.error("modules_to_not_convert", "holds an entry that is not a name")
    for alias, name in QUANTIZATION_ALIASES.items():
        named = [entry.replace(alias, name) for entry in named]
    return QuantizationConfig((block[0], block[1]), tuple(dict.fromkeys(named)))


def _is_pattern(entry: str) -> bool:
    return entry.startswith("re:") or "*" in entry


def _compile(entry: str) -> re.Pattern[str]:
    if entry.startswith("re:"):
        try:
            return re.compile(entry[3:])
        except re.error as error:
            raise InputError(f"quantization_config: modules_to_not_convert holds {entry!r}: {error}") from None
    return re.compile(".*".join(re.escape(part) for part in entry.split("*")))


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _glm5(**changes: Any) -> ModelConfig:
    """GLM-5 (2026-02), the base of the released family; `changes` say what a later release has different."""
    base = {
        "model_type": MODEL_TYPE,
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 78,
        "first_k_dense_replace": 3,
        "num_attention_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"},
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 1,
        "eos_token_id": [154820, 154827, 154829],
        "pad_token_id": 154820,
        "dtype": "bfloat16",
    }
    return ModelConfig.from_dict(
        base | changes, generation={"temperature": 1.0, "top_p": 0.95}, source="built-in config"
    )


_GLM52 = {
    "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"},
    "max_position_embeddings": 1_048_576,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_share_for_mtp_iteration": True,
}
# The published list of modules that stay in BF16 is what the parameter table's own policy gives, so it is not repeated.
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# The released layer plan in small: dense, full and shared layers and an MTP layer, for demos and tests. The vocabulary
# is that of the byte-level tokenizer with GLM's special tokens (`text.byte_tokenizer`).
_TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 32,
    "max_position_embeddings": 4096,
    "eos_token_id": [256, 263, 265],
    "pad_token_id": 256,
}

BUILT_IN: dict[str, ModelConfig] = {
    "glm-5.2": _glm5(**_GLM52),
    "glm-5.2-fp8": _glm5(**_GLM52, quantization_config=_FP8),
    "glm-5.1": _glm5(),
    "glm-5": _glm5(),
    "glm-5.2-tiny": _glm5(**(_GLM52 | _TINY)),
}
"""Configs by name: the released models, and a tiny one of GLM-5.2's shape."""
