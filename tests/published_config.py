"""A config as published, in small, for the tests of its reader."""

import copy
from typing import Any

from glm52_jax.config import ModelConfig
from sharding.errors import InputError

F, S = "full", "shared"
PLAN = [F, F, F, S, S, S, F]

PUBLISHED: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [314, 315, 319],
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "head_dim": 24,
    "hidden_act": "silu",
    "hidden_size": 64,
    "index_head_dim": 32,
    "index_n_heads": 16,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk": 8,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_rope_interleave": True,
    "indexer_types": PLAN,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] + ["sparse"] * 6,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 7,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 314,
    "pretraining_tp": 1,
    "q_lora_rank": 48,
    "qk_head_dim": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.12.0",
    "use_cache": True,
    "v_head_dim": 32,
    "vocab_size": 320,
}
ABSENT = object()


def raw(**changes: Any) -> dict[str, Any]:
    """The published config with fields changed, or removed where the value is ABSENT."""
    return {name: value for name, value in (copy.deepcopy(PUBLISHED) | changes).items() if value is not ABSENT}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(raw(**changes))


def no_plan(**changes: Any) -> dict[str, Any]:
    """Changes that leave only `changes` to say which layers are full."""
    names = ("indexer_types", "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")
    return dict.fromkeys(names, ABSENT) | changes


def refusal(changes: dict[str, Any]) -> str | None:
    """The sentence with which the published config with `changes` is refused; None when it is read."""
    try:
        read(**changes)
    except InputError as error:
        return str(error)
    return None


def refused(changes: dict[str, Any], *fragments: str) -> None:
    """Reading the published config with `changes` is refused in one sentence that holds the fragments."""
    sentence = refusal(changes)
    assert sentence is not None
    assert sentence.startswith("config.json: ")
    assert "\n" not in sentence
    for fragment in fragments:
        assert fragment in sentence
