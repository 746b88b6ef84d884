"""The published `config.json`: read into the values of `ModelConfig`'s fields, and written back from them.

Here are the names, aliases, defaults and old forms that releases and tools use. Of two fields that say the same thing
otherwise, the one that spells it out is taken and a note names both; where both or neither do, they are refused.
What the values mean together is `config`'s business, which is also the only caller: everything else asks for a
`ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glm52_jax.config.generation_config import read_eos, read_pad, read_sampling
from glm52_jax.config.layer_types import DENSE, FULL, SHARED, SPARSE
from glm52_jax.config.quantization_config import read_quantization, write_quantization
from glm52_jax.io.json_fields import Fields, shown

MODEL_TYPE = "glm_moe_dsa"
DTYPE_FIELDS = ("dtype", "torch_dtype")  # new and old name, in order of precedence

EXPERTS_FIELDS = ("n_routed_experts", "num_experts", "num_local_experts")
_SPARSE_ATTENTION = ("deepseek_sparse_attention", "indexed_attention")  # in `layer_types`; transformers' name
_MOST_LAYERS = 10_000  # a larger number is a mistake, and would be spelled out layer by layer
# Fields of `ModelConfig` that `config.json` has in another form, elsewhere, or only sometimes.
_OTHER_FORM = frozenset(
    {
        "eos_token_ids",
        "indexer_types",
        "latent_norm_eps",
        "mlp_layer_types",
        "notes",
        "pad_token_id",
        "quantization",
        "rope_theta",
        "temperature",
        "top_k",
        "top_p",
    }
)


def read_config(raw: Mapping[str, Any], generation: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The fields of `ModelConfig` from the content of `config.json` and of `generation_config.json`.

    Raises:
        InputError: a field is missing, of the wrong kind, unknown in value, or contradicts another form of itself.
    """
    fields, sampling = Fields(raw, source), Fields(generation, "generation_config.json")
    _refuse_other_models(fields)
    layers = fields.integer("num_hidden_layers", maximum=_MOST_LAYERS)
    heads = fields.integer("num_attention_heads")
    fields.only("num_key_value_heads", heads)
    nope, rope = fields.integer("qk_nope_head_dim"), _rope_head_dim(fields)
    fields.only("qk_head_dim", nope + rope)
    eps = fields.number("rms_norm_eps", 1e-5)
    nextn = fields.integer("num_nextn_predict_layers", 0, minimum=0)
    if nextn > 1:  # before a list is made that long
        raise fields.error("num_nextn_predict_layers", f"is {nextn}, expected 0 or 1")
    vocab = fields.integer("vocab_size")
    values = {
        "vocab_size": vocab,
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
        "mlp_layer_types": _mlp_layer_types(fields, layers, nextn),
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
        "eos_token_ids": read_eos(vocab, fields, sampling),
        "pad_token_id": read_pad(vocab, fields),
        "dtype": _dtype(fields),
        "quantization": read_quantization(fields),
        "initializer_range": fields.number("initializer_range", 0.02),
        **read_sampling(sampling),
    }
    _note_unused(fields, values)
    return values | {"notes": (*fields.notes, *sampling.notes)}


def write_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `config.json` from the fields of `ModelConfig`; `read_config` reads it back to the same values.

    A field that says the same in another way is written too where other programs read only that one: a schedule or a
    pattern beside `indexer_types`, `first_k_dense_replace` beside `mlp_layer_types`.
    """
    raw: dict[str, Any] = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": MODEL_TYPE}
    raw |= {name: value for name, value in values.items() if name not in _OTHER_FORM}
    raw |= {
        "attention_dropout": 0.0,
        "eos_token_id": list(values["eos_token_ids"]) or None,
        "hidden_act": "silu",
        "indexer_types": list(values["indexer_types"]),
        "mlp_layer_types": list(values["mlp_layer_types"]),
        "moe_router_dtype": "float32",
        "num_key_value_heads": values["num_attention_heads"],
        "qk_head_dim": values["qk_nope_head_dim"] + values["qk_rope_head_dim"],
        "rope_parameters": {"rope_theta": values["rope_theta"], "rope_type": "default"},
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "use_cache": True,
    }
    raw |= _schedule(values["indexer_types"])
    dense = values["mlp_layer_types"].count(DENSE)
    if DENSE not in values["mlp_layer_types"][dense:]:
        raw |= {"first_k_dense_replace": dense, "moe_layer_freq": 1}
    if values["latent_norm_eps"] != values["rms_norm_eps"]:
        raw["latent_norm_eps"] = values["latent_norm_eps"]
    if values["pad_token_id"] is not None:
        raw["pad_token_id"] = values["pad_token_id"]
    if values["quantization"] is not None:
        raw["quantization_config"] = write_quantization(values["quantization"])
    return dict(sorted(raw.items()))


def _refuse_other_models(fields: Fields) -> None:
    fields.only("model_type", MODEL_TYPE)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("hidden_act", "silu")
    fields.only("moe_layer_freq", 1)
    fields.only("mlp_bias", False)
    fields.only("tie_word_embeddings", False)


def _rope_head_dim(fields: Fields) -> int:
    if not fields.has("qk_rope_head_dim") and fields.has("head_dim"):
        raise fields.error(
            "qk_rope_head_dim", "is missing (head_dim is no substitute: it is 64, 192 or absent by release)"
        )
    return fields.integer("qk_rope_head_dim")


def _routed_experts(fields: Fields) -> int:
    """`n_routed_experts`, which some writers call otherwise or repeat under another name."""
    found = {name: fields.integer(name) for name in EXPERTS_FIELDS if fields.has(name)}
    if not found:
        return fields.integer(EXPERTS_FIELDS[0])
    (first, experts), *others = found.items()
    for name, other in others:
        if other != experts:
            raise fields.error(name, f"is {other} but {first} is {experts}")
    return experts


def _indexer_types(fields: Fields, layers: int, nextn: int) -> tuple[str, ...]:
    """`indexer_types`, else `index_topk_pattern`, else `index_topk_freq` and `index_skip_topk_offset`."""
    types = _without_mtp(_type_list(fields, "indexer_types", {}), layers, (FULL,) * nextn)
    pattern = _without_mtp(_type_list(fields, "index_topk_pattern", {"F": FULL, "S": SHARED}), layers, (FULL,) * nextn)
    if types is not None and pattern is not None and types != pattern:
        # Programs differ in which they take, and both spell it out.
        where = _first_difference(types, pattern)
        raise fields.error("index_topk_pattern", f"contradicts indexer_types at layer {where}")
    listed = "index_topk_pattern" if types is None else "indexer_types"
    types = pattern if types is None else types
    freq = fields.integer("index_topk_freq") if fields.has("index_topk_freq") else None
    offset = fields.integer("index_skip_topk_offset", 2, minimum=0)  # the default is transformers'
    stated = fields.has("index_skip_topk_offset")
    if types is None:
        if freq is None and stated:
            fields.note(f"index_skip_topk_offset is {offset} without index_topk_freq, so every layer has an indexer")
        return (FULL,) * layers if freq is None else _scheduled(layers, freq, offset)
    if freq is None or len(types) != layers:  # the length is refused with the other contradictions
        return types
    # A default offset is no statement that could contradict the list.
    offsets = [offset] if stated else range(layers + 1)
    if not any(types == _scheduled(layers, freq, one) for one in offsets):
        where = _first_difference(types, _scheduled(layers, freq, offset))
        rule = f"index_topk_freq {freq}" + (f" with index_skip_topk_offset {offset}" if stated else "")
        fields.note(f"{listed} and {rule} differ, first at layer {where}; {listed} is taken")
    return types


def _scheduled(layers: int, freq: int, offset: int) -> tuple[str, ...]:
    """Layer i is full when max(i - offset + 1, 0) is a multiple of freq (z.ai's rule, counted from 0)."""
    return tuple(FULL if max(i - offset + 1, 0) % freq == 0 else SHARED for i in range(layers))


def _without_mtp(types: tuple[str, ...] | None, layers: int, mtp: tuple[str, ...]) -> tuple[str, ...] | None:
    """Some writers list the MTP layer too, which is always of one kind."""
    return types[:layers] if types is not None and types[layers:] == mtp else types


def _first_difference(a: Sequence[str], b: Sequence[str]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _type_list(fields: Fields, field: str, letters: Mapping[str, str]) -> tuple[str, ...] | None:
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


def _mlp_layer_types(fields: Fields, layers: int, nextn: int) -> tuple[str, ...]:
    types = _without_mtp(_type_list(fields, "mlp_layer_types", {}), layers, (SPARSE,) * nextn)
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


def _rope_theta(fields: Fields) -> float:
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


def _dtype(fields: Fields) -> str:
    found: dict[str, str] = {}
    for field in DTYPE_FIELDS:
        name = fields.raw.get(field)
        if not name:
            continue
        name = name.removeprefix("torch.") if isinstance(name, str) else name
        if name not in ("bfloat16", "float16", "float32"):
            raise fields.error("dtype", f"is {shown(name)}, expected bfloat16, float16 or float32")
        found[field] = name
    if len(set(found.values())) > 1:
        (first, taken), (second, other) = found.items()
        fields.note(f"{first} is {taken} and {second} is {other}; {first}, the newer name, is taken")
    return next(iter(found.values()), "bfloat16")


def _note_unused(fields: Fields, values: Mapping[str, Any]) -> None:
    """Fields that nothing is made of, where they say something else than what is computed."""
    nope, rope = values["qk_nope_head_dim"], values["qk_rope_head_dim"]
    head = fields.raw.get("head_dim")
    if head is not None and head not in (nope, rope, nope + rope):
        fields.note(f"head_dim is {shown(head)}, which is not used: a head has {nope} + {rope} dimensions")
    router = fields.raw.get("moe_router_dtype")
    if router not in (None, "float32", "torch.float32"):
        fields.note(f"moe_router_dtype is {shown(router)}, but the router is always computed in float32")
    kinds = fields.raw.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(kind in _SPARSE_ATTENTION for kind in kinds)):
        fields.note(f"layer_types is {shown(kinds)}, which is not used: every layer has sparse attention")
