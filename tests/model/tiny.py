"""Tiny models with random weights, and cases made of them, for properties that need no reference."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import glm52_jax as glm
from glm52_jax.cache.cache_format import CacheFormat
from glm52_jax.config import ModelConfig
from glm52_jax.model.decoder_layer import ExecutionPolicy
from glm52_jax.params.init import build_tree
from glm52_jax.params.spec import Param
from tests.model.cases import Case, Run

TINY = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    index_n_heads=16,
    index_head_dim=20,
    index_topk=8,
    indexer_types=("full", "full", "shared", "full"),
    mlp_layer_types=("dense", "sparse", "sparse", "sparse"),
    rope_theta=8e6,
    max_position_embeddings=1 << 20,
    routed_scaling_factor=2.5,
    num_nextn_predict_layers=1,
    index_share_for_mtp_iteration=True,
    dtype="float32",
)
ABSORBED, EXPANDED = (
    ExecutionPolicy("absorbed", "indices", "reference"),
    ExecutionPolicy("expanded", "mask", "reference"),
)


def tiny(**changes: Any) -> ModelConfig:
    """Full, full, shared and full layers of which the first is dense, and a draft layer."""
    return dataclasses.replace(TINY, **changes)


@cache
def random_params(config: ModelConfig = TINY, seed: int = 0, dtype: str = "float32") -> dict[str, Any]:
    """Weights large enough for clear choices."""
    generator = np.random.default_rng(seed)

    def make(param: Param) -> jax.Array | None:
        if param.optional:
            return None
        values = generator.standard_normal(param.stacked_shape(config))
        if param.init == "ones":
            values = 1 + 0.2 * values
        elif param.init == "zeros":
            values = 0.3 * values
        elif param.path != "embed":
            values = values / np.sqrt(param.fan_in)
        return jnp.asarray(values, jnp.float32 if param.float32 else jnp.dtype(dtype))

    return build_tree(config, make)


def random_tokens(*shape: int, seed: int = 0, vocab: int = TINY.vocab_size - 1) -> np.ndarray:
    """Tokens of the tiny vocabulary but its last one, which is left for padding."""
    return np.random.default_rng(seed).integers(0, vocab, shape).astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class TinyCase(Case):
    """A case whose golden values are those of this model over whole texts in one form."""

    made_config: ModelConfig
    made_params: Any
    made_golden: Any

    @property
    def config(self) -> ModelConfig:
        return self.made_config

    @property
    def golden(self) -> dict[str, np.ndarray]:
        return self.made_golden

    def params(self, dtype: Any = jnp.float32, fp8: str = "keep") -> dict[str, Any]:
        return self.made_params


def tiny_case(
    config: ModelConfig,
    lengths: tuple[int, ...],
    *,
    seed: int = 0,
    form: ExecutionPolicy = EXPANDED,
    params: Any = None,
    tokens: Any = None,
    cache_format: CacheFormat | None = None,
) -> TinyCase:
    """Rows of these lengths, padded on the left."""
    params = random_params(config) if params is None else params
    length = max(lengths)
    tokens = random_tokens(len(lengths), length, seed=seed) if tokens is None else tokens
    mask = np.stack([np.arange(length) >= length - n for n in lengths])
    run = Run.of(glm.trace(params, config, tokens, mask, policy=form, cache_format=cache_format))
    golden = {name: getattr(run, name) for name in ("logits", "hidden", "topk", "experts", "mtp_logits")}
    golden = {name: array for name, array in golden.items() if array is not None}
    greedy = np.zeros((len(lengths), 1), np.int32)
    golden |= {"input_ids": tokens, "attention_mask": mask.astype(np.int32), "greedy": greedy}
    return TinyCase("tiny", Path(), config, params, golden)
