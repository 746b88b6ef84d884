"""`ModelConfig`: the shape and rules of one GLM-5 class model, whichever file or code they come from.

It refuses contradictions; `config_json` knows the published files' fields. Neither knows arrays or devices.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm52_jax.config.config_json import read_config, write_config
from glm52_jax.config.generation_config import write_generation
from glm52_jax.config.layer_types import DENSE, FULL, SHARED, SPARSE
from glm52_jax.config.quantization_config import QuantizationConfig
from glm52_jax.config.released import GENERATION, RELEASED
from glm52_jax.io.files import is_there, refuse_dead_links
from glm52_jax.io.json_fields import read_json
from glm52_jax.io.unfinished import refuse_unfinished
from sharding.errors import InputError

_SUFFIXES = (".json", ".jinja", ".model")
"""Of files that say what a checkpoint is: config, generation config, tokenizer, template, index."""


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
        temperature, top_p, top_k: defaults of `generation_config.json`; 1.0 and, for all tokens, 0 where it has none.
            Where it says that the most likely token is taken, temperature is 0.
        notes: sentences a user should read: fields that differ from each other, or that are not applied. No part of
            what the model is, so not compared.
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
    top_k: int = 0
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

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
        values = read_config(raw, generation or {}, source)
        try:
            return cls(**values)
        except InputError as error:
            raise InputError(f"{source}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The content of `config.json`; with `generation_dict`, `from_dict` reads it back to an equal config."""
        return write_config(self._values())

    def generation_dict(self) -> dict[str, Any]:
        """The content of `generation_config.json`."""
        return write_generation(self._values())

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Reads `config.json` and, when present, `generation_config.json` of a checkpoint folder.

        Raises:
            InputError: as `from_dict`; the folder is that of a conversion or an export which is not finished; or a link
                in it leads nowhere, where the name is that of a config, a tokenizer or a template.
        """
        folder = Path(folder)
        refuse_unfinished(folder)
        refuse_dead_links(folder, _SUFFIXES)
        generation = folder / "generation_config.json"
        raw = read_json(folder / "config.json")
        return cls.from_dict(
            raw, generation=read_json(generation) if is_there(generation) else None, source=str(folder / "config.json")
        )


def load_config(path: str | Path) -> ModelConfig:
    """The config of a checkpoint folder, or a built-in one: see `BUILT_IN`.

    A folder wins over a built-in name when both exist.

    Raises:
        InputError: neither of the two, a dead link, or a config that cannot be read or contradicts itself.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a config is asked for by {path!r}, expected a path or one of {', '.join(BUILT_IN)}")
    folder = Path(path)
    if is_there(folder) and folder.is_dir():
        return ModelConfig.from_folder(folder)
    if folder.is_file():
        return ModelConfig.from_dict(read_json(folder), source=str(folder))
    if str(path) in BUILT_IN:
        return BUILT_IN[str(path)]
    raise InputError(f"{path}: neither a checkpoint folder nor one of the built-in names {', '.join(BUILT_IN)}")


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
    if config.top_p > 1:
        raise InputError(f"top_p is {config.top_p}, expected a probability")


BUILT_IN: dict[str, ModelConfig] = {
    name: ModelConfig.from_dict(raw, generation=GENERATION, source=f"built-in config {name}")
    for name, raw in RELEASED.items()
}
"""Configs by name: the released models, and a tiny one of GLM-5.2's shape."""
