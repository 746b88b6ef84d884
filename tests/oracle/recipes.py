"""What the cases of the parity tests are made of: the config of each, its rows, and how it is stored."""

from __future__ import annotations

import dataclasses
from typing import Any

BLOCK = 128

# Widths are small and all different, so that no two can be swapped by luck: the rotated part of a head, its other part,
# a value, an index head. With fewer than eight index heads ReLU makes scores that tie at zero.
BASE: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "vocab_size": 80,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"},
    "rope_interleave": True,
    "tie_word_embeddings": False,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "index_n_heads": 8,
    "index_head_dim": 14,
    "index_topk": 8,
    "indexer_rope_interleave": True,
    "eos_token_id": [77, 78, 79],
    "pad_token_id": 77,
}
SCHEDULE = {"index_topk_freq": 4, "index_skip_topk_offset": 3, "index_topk_pattern": None}
DRAFT = {"num_nextn_predict_layers": 1, "index_share_for_mtp_iteration": True}


def types(letters: str) -> list[str]:
    return [{"f": "full", "s": "shared"}[letter] for letter in letters]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a case is made of.

    Attributes:
        config: fields of `config.json` on top of `BASE`; None removes one.
        lengths: real tokens of each row; the longest is the length of the case.
        latent_norm_eps: of the two latent norms; `rms_norm_eps` when None.
        latent_gain: factor of the latents before their norms. A small one makes their epsilon count.
        fp8: store the projections in FP8 blocks.
        shards: number of safetensors files.
        greedy: tokens to continue by.
    """

    config: dict[str, Any]
    lengths: tuple[int, ...]
    latent_norm_eps: float | None = None
    latent_gain: float = 1.0
    fp8: bool = False
    shards: int = 1
    greedy: int = 8


RECIPES: dict[str, Recipe] = {
    # The released plan: three dense layers with indexers of their own, then S S S F S, and the draft layer.
    "released_plan": Recipe(SCHEDULE | DRAFT | {"indexer_types": types("fffsssfs")}, (30, 30)),
    # GLM-5.1: no field of the schedule, every layer full; a stray head_dim; the other latent epsilon.
    "all_full": Recipe(
        {"num_hidden_layers": 4, "first_k_dense_replace": 1, "head_dim": 192, "rope_parameters": {"rope_theta": 1e6}},
        (33,),
        latent_norm_eps=1e-6,
        latent_gain=0.02,
    ),
    "grouped_bias": Recipe(
        SCHEDULE
        | {
            "num_hidden_layers": 5,
            "first_k_dense_replace": 2,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
        },
        (20, 20),
    ),
    "left_padded": Recipe(
        SCHEDULE | DRAFT | {"num_hidden_layers": 5, "first_k_dense_replace": 3, "routed_scaling_factor": 1.0},
        (27, 16, 5),
    ),
    # Widths around and above the block of 128, none a multiple of it. The draft layer selects anew for every draft.
    "fp8": Recipe(
        SCHEDULE
        | DRAFT
        | {
            "vocab_size": 64,
            "eos_token_id": [61, 62, 63],
            "pad_token_id": 61,
            "hidden_size": 136,
            "intermediate_size": 144,
            "moe_intermediate_size": 8,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 2,
            "q_lora_rank": 40,
            "qk_nope_head_dim": 24,
            "v_head_dim": 34,
            "index_head_dim": 20,
            "index_share_for_mtp_iteration": False,
        },
        (24,),
        fp8=True,
    ),
    "irregular_plan": Recipe(
        DRAFT | {"num_hidden_layers": 7, "first_k_dense_replace": 1, "indexer_types": types("fsffssf")}, (28,), shards=2
    ),
}

_HIGH_PRECISION = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_a_layernorm",
    "self_attn.kv_a_layernorm",
    "mlp.gate",
    "mlp.gate.e_score_correction_bias",
    "self_attn.indexers_proj",  # the published list calls `indexer.weights_proj` so
    "self_attn.indexer.k_norm",
    "enorm",
    "hnorm",
    "eh_proj",
    "shared_head.norm",
)


def published_config(recipe: Recipe) -> dict[str, Any]:
    """`config.json` of a case."""
    config = {k: v for k, v in (BASE | recipe.config).items() if v is not None or k == "index_topk_pattern"}
    if recipe.fp8:
        layers = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
        kept = [f"model.layers.{layer}.{name}" for layer in range(layers) for name in _HIGH_PRECISION]
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": [*kept, "model.norm", "lm_head", "model.embed_tokens"],
        }
    return config
