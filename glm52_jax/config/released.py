"""The configs of the released models as their `config.json` has them, and a tiny one; data only."""

from __future__ import annotations

from typing import Any

# GLM-5 (2026-02), the base of the family; the others say what they have different.
_GLM5: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
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
_GLM52: dict[str, Any] = _GLM5 | {
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
_TINY: dict[str, Any] = _GLM52 | {
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

RELEASED: dict[str, dict[str, Any]] = {
    "glm-5.2": _GLM52,
    "glm-5.2-fp8": _GLM52 | {"quantization_config": _FP8},
    "glm-5.1": _GLM5,
    "glm-5": _GLM5,
    "glm-5.2-tiny": _TINY,
}
GENERATION: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}
"""What `generation_config.json` of all of them adds."""
