"""The account of a model: parameters, stored bytes, cache rows and FLOPs, as arithmetic on its config and table.

No size is written here twice: everything follows from `ModelConfig` and the parameter table. It knows no arrays, no
devices, no files and no terminal.

`model_breakdown(config, name).as_json()` is what `glm52 inspect --json` prints. Its keys are stable:

    key                             content
    ------------------------------  --------------------------------------------------------------------------------
    name                            the name or path that was asked for
    published_tensors               tensors of the published files, scales counted
    elements                        values in them, scales counted
    elements_by_dtype               the same by type: "BF16", "F8_E4M3", "I8", "F32", ...
    tensor_bytes                    their bytes; a file's header comes on top
    tensor_bytes_by_part            the same by part of the model
    parameters.total_without_mtp    weights of the model without its draft (MTP) layer; scales are no parameters
    parameters.total                with it
    parameters.active               weights a token is multiplied with, without MTP: the head counts, the embedding,
                                    a lookup, does not, of the routed experts `num_experts_per_tok` do
    parameters.by_part              total by part; the MTP layer's attention, experts, ... are in those parts
    parameters.active_by_part       active by part
    layers.total, dense, sparse     decoder layers, and how many have a dense MLP and how many experts
    layers.full, shared             layers with an indexer, and layers that use the selection of the last such layer
    layers.full_layers              numbers of the full layers
    layers.mtp                      MTP layers, in none of the counts above
    cache_bytes_per_token.latent    all decoder layers: {bf16, fp8_groups, fp8_tensor}, see `latent_row_bytes`
    cache_bytes_per_token.index_keys  full layers only: {bf16, fp8}, see `index_key_bytes`
    cache_bytes_per_token.mtp       {latent, index_keys} of the MTP layer alone, zeros without one
    flops_per_token                 by context: "32768", "131072", "1048576", whatever the model's own limit, one that
                                    was asked for, and the limit of a model that has none of these. One token decoded
                                    without MTP; the context includes it
      total                         linear + attention + index
      linear                        two for each active weight
      attention                     absorbed attention to the selected positions, min(index_topk, context) of them
      index                         index scores of every position, on full layers
      all_full                      total of the same model with an indexer on every layer
      ratio                         all_full / total

The command adds `notes`, sentences on the config: fields that differ from each other or are not applied; and
`files`, what a folder's safetensors hold (null without any): `tensors` and `bytes`, scales counted,
`ignored` (name of a tensor that is not used: reason), `notes` (sentences; ignored tensors are summed up there too).
With `--ops` it adds `operators`, described in `glm52_jax.inspect.operators`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from glm52_jax.config import DENSE, FULL, SPARSE, ModelConfig
from glm52_jax.params.spec import Param, Stack, Tensor, parameters, published_tensors, stack_layers

CONTEXTS = (32 * 1024, 128 * 1024, 1024 * 1024)
EMBEDDING = "embed"  # path of the one matrix that is looked up, not multiplied with

_FLOAT32_BYTES, _BF16_BYTES = 4, 2
_CACHE_GROUP = 128  # values of a latent that share a scale in the fp8_groups format
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclasses.dataclass(frozen=True)
class Published:
    """The published files: tensors, values, bytes; scales counted in all of them."""

    tensors: int
    elements: int
    bytes: int
    elements_by_dtype: dict[str, int]
    bytes_by_part: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Numbers of weights; `active` is without MTP and without the embedding."""

    total_without_mtp: int
    total: int
    active: int
    by_part: dict[str, int]
    active_by_part: dict[str, int]


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """Decoder layers by kind; the MTP layer is counted in `mtp` only."""

    total: int
    dense: int
    sparse: int
    full: int
    shared: int
    full_layers: tuple[int, ...]
    mtp: int


@dataclasses.dataclass(frozen=True)
class CacheRows:
    """Bytes of cache a token takes, by format of the latent rows and of the index keys."""

    latent: dict[str, int]
    index_keys: dict[str, int]


@dataclasses.dataclass(frozen=True)
class CacheBytes(CacheRows):
    """The cache of a model a token: decoder layers, and apart from them the MTP layer."""

    mtp: CacheRows


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of one decoded token; a multiplication and its addition are two."""

    total: int
    linear: int
    attention: int
    index: int
    all_full: int
    ratio: float


@dataclasses.dataclass(frozen=True)
class ModelBreakdown:
    """Everything `inspect` says of a model; `flops` is by context."""

    name: str
    published: Published
    parameters: Parameters
    layers: LayerPlan
    cache: CacheBytes
    flops: dict[int, Flops]

    def as_json(self) -> dict[str, Any]:
        """The account under the stable keys of this module's docstring."""
        return {
            "name": self.name,
            "published_tensors": self.published.tensors,
            "elements": self.published.elements,
            "elements_by_dtype": self.published.elements_by_dtype,
            "tensor_bytes": self.published.bytes,
            "tensor_bytes_by_part": self.published.bytes_by_part,
            "parameters": dataclasses.asdict(self.parameters),
            "layers": dataclasses.asdict(self.layers) | {"full_layers": list(self.layers.full_layers)},
            "cache_bytes_per_token": dataclasses.asdict(self.cache),
            "flops_per_token": {str(context): dataclasses.asdict(flops) for context, flops in self.flops.items()},
        }


def model_breakdown(config: ModelConfig, name: str, contexts: Sequence[int] = CONTEXTS) -> ModelBreakdown:
    """The account of `config`.

    Args:
        name: what to call the model.
        contexts: lengths in tokens to count FLOPs at.
    """
    return ModelBreakdown(
        name=name,
        published=published(config),
        parameters=parameter_counts(config),
        layers=layer_plan(config),
        cache=cache_bytes(config),
        flops={context: flops_per_token(config, context) for context in sorted(set(contexts))},
    )


def published(config: ModelConfig) -> Published:
    """What the published files of `config` hold."""
    tensors, elements, bytes_by_part = 0, Counter(), Counter()
    for part, tensor in published_tensors(config):
        tensors += 1
        elements[_dtype(config, tensor)] += tensor.elements
        bytes_by_part[part] += tensor.stored_bytes(config)
        if tensor.quantized and config.quantization:
            tensors += 1
            elements[_DTYPES["float32"]] += math.prod(tensor.scale_shape(config.quantization.block))
    return Published(tensors, elements.total(), bytes_by_part.total(), dict(elements), dict(bytes_by_part))


def parameter_counts(config: ModelConfig) -> Parameters:
    """Weights of the model, all of them and those that one token uses."""
    total, without_mtp, active = Counter(), 0, Counter()
    for param in parameters(config):
        if not param.optional:
            total[param.part] += param.elements * len(param.layers(config))
    plain = config.without_mtp()
    for param in parameters(plain):
        without_mtp += param.elements * len(param.layers(plain))
        active[param.part] += active_elements(plain, param) * len(param.layers(plain))
    return Parameters(without_mtp, total.total(), active.total(), dict(total), dict(+active))


def active_elements(config: ModelConfig, param: Param) -> int:
    """Weights of one layer of `param` that one token is multiplied with."""
    if param.path == EMBEDDING:
        return 0
    if param.experts is None:
        return param.elements
    return param.elements // param.experts * config.num_experts_per_tok


def layer_plan(config: ModelConfig) -> LayerPlan:
    """How many layers there are of each kind."""
    full = len(config.full_layers)
    return LayerPlan(
        total=config.num_hidden_layers,
        dense=config.mlp_layer_types.count(DENSE),
        sparse=config.mlp_layer_types.count(SPARSE),
        full=full,
        shared=config.num_hidden_layers - full,
        full_layers=config.full_layers,
        mtp=config.num_nextn_predict_layers,
    )


def latent_row_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of one token's row in one layer, by format.

    `bf16`; `fp8_groups`: FP8 latent with a float32 scale for each 128 values, rope key in BF16; `fp8_tensor`: all of
    it in FP8 with one scale a layer, which no token pays for.
    """
    scales = -(-config.kv_lora_rank // _CACHE_GROUP) * _FLOAT32_BYTES
    return {
        "bf16": config.latent_width * _BF16_BYTES,
        "fp8_groups": config.kv_lora_rank + scales + config.qk_rope_head_dim * _BF16_BYTES,
        "fp8_tensor": config.latent_width,
    }


def index_key_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of one token's index key in one full layer: `bf16`, or `fp8` with a float32 scale."""
    return {"bf16": config.index_head_dim * _BF16_BYTES, "fp8": config.index_head_dim + _FLOAT32_BYTES}


def cache_bytes(config: ModelConfig) -> CacheBytes:
    """Bytes of cache that one token takes."""

    def rows(layers: int, indexers: int) -> tuple[dict[str, int], dict[str, int]]:
        return (
            {name: size * layers for name, size in latent_row_bytes(config).items()},
            {name: size * indexers for name, size in index_key_bytes(config).items()},
        )

    plain = config.without_mtp()
    layers, indexers = (len(stack_layers(plain, stack)) for stack in (Stack.LAYER, Stack.INDEXER))
    mtp = config.num_nextn_predict_layers
    return CacheBytes(*rows(layers, indexers), mtp=CacheRows(*rows(mtp, mtp)))


def flops_per_token(config: ModelConfig, context: int) -> Flops:
    """FLOPs of decoding one token, MTP not counted, and of the same model with an indexer on every layer.

    Args:
        context: positions the token sees, itself among them.
    """
    linear, attention, index = _flops(config, context)
    total, every = linear + attention + index, sum(_flops(all_full(config), context))
    return Flops(total, linear, attention, index, all_full=every, ratio=every / total)


def _flops(config: ModelConfig, context: int) -> tuple[int, int, int]:
    return (
        weight_flops(parameter_counts(config).active),
        attention_flops(config, min(config.index_topk, context)) * config.num_hidden_layers,
        index_flops(config, context) * len(config.full_layers),
    )


def weight_flops(elements: int) -> int:
    """A multiplication and an addition for each weight; norms and biases, a ten-thousandth, are not told apart."""
    return 2 * elements


def attention_flops(config: ModelConfig, attended: int) -> int:
    """Absorbed attention of one layer to `attended` latent rows: scores over the whole row, values over the latent."""
    return 2 * config.num_attention_heads * attended * (config.latent_width + config.kv_lora_rank)


def index_flops(config: ModelConfig, visible: int) -> int:
    """Index scores of one layer for `visible` positions: a dot product a head, then the weighted sum over heads."""
    return 2 * config.index_n_heads * visible * (config.index_head_dim + 1)


def all_full(config: ModelConfig) -> ModelConfig:
    """The same model with an indexer of its own on every layer."""
    return dataclasses.replace(config, indexer_types=(FULL,) * config.num_hidden_layers)


def _dtype(config: ModelConfig, tensor: Tensor) -> str:
    if tensor.quantized and config.quantization:
        return config.quantization.codes
    return _DTYPES["float32" if tensor.float32 else config.dtype]
