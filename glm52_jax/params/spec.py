"""The parameter table: every weight of the model described once.

A `Param` keeps two columns apart: what is *stored* (published name, `[out, in]` shape, dtype, whether FP8 blocks may
stand for it) and what is *computed with* (path in `Params`, shape of one layer, logical axes, initialiser).
Initialisation, loading, abstract trees, sharding, byte and FLOP counts are functions of this table. It knows nothing of
files or devices.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator
from functools import cache

from glm52_jax.config import DENSE, FULL, SPARSE, ModelConfig

SCALE_SUFFIX = "_scale_inv"


class Stack(enum.Enum):
    """Which layers a parameter exists in; one stacked array holds them all, in the order of the layers."""

    GLOBAL = "global"  # once in the model, not stacked
    LAYER = "layer"  # every layer and the MTP layer
    INDEXER = "indexer"  # full layers and the MTP layer
    DENSE = "dense"  # layers with a dense MLP
    MOE = "moe"  # layers with experts and the MTP layer
    MTP = "mtp"  # once, in the MTP layer, not stacked


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One published tensor: its name, its `[out, in]` shape, and how it may be stored."""

    name: str
    shape: tuple[int, ...]
    quantized: bool = False  # stored as codes with a scale a block
    float32: bool = False  # float32 in every release
    optional: bool = False  # absent in the released files

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def scale_name(self) -> str:
        return self.name + SCALE_SUFFIX

    def scale_shape(self, block: tuple[int, int]) -> tuple[int, int]:
        """Shape of the scales: one a block, the last block of a dimension may be cut."""
        rows, columns = self.shape
        return -(-rows // block[0]), -(-columns // block[1])

    def stored_bytes(self, config: ModelConfig) -> int:
        """Bytes of the tensor in the published file, its scales included."""
        if self.quantized and config.quantization:
            return self.elements + 4 * math.prod(self.scale_shape(config.quantization.block))
        return self.elements * (4 if self.float32 or config.dtype == "float32" else 2)


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter of the model.

    Attributes:
        path: attribute path in `Params`, for instance "attention.q_b".
        part: what it belongs to in an account of the model ("attention", "indexer", "routed experts", ...).
        stack: the layers it exists in.
        shape: computed shape of one layer.
        axes: logical name of each dimension of `shape` (see the rules in `sharding`), None for one never sharded.
        tensors: names of the published tensors it is made of, within a layer; `{expert}` runs over the experts.
        tensor_shape: `[out, in]` shape of each of them.
        view: shape that a published tensor is reshaped to before `rows` is taken; None where it is used as it is.
        rows: slice of the second dimension of `logical_shape` that this parameter takes.
        init: "normal", "ones" or "zeros".
        fp8: whether the published FP8 files store it in blocks.
        dequantize: computed with in plain form only, since a head is no whole number of scale blocks.
        float32: kept in float32 from file to use.
        optional: absent in the released files; used in place of the model's own where a file has it.
    """

    path: str
    part: str
    stack: Stack
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    tensors: tuple[str, ...]
    tensor_shape: tuple[int, ...]
    logical_shape: tuple[int, ...] | None = None
    rows: tuple[int, int] | None = None
    init: str = "normal"
    fp8: bool = False
    dequantize: bool = False
    float32: bool = False
    optional: bool = False

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), self.path

    @property
    def elements(self) -> int:
        """Values of one layer."""
        return math.prod(self.shape)

    @property
    def fan_in(self) -> int:
        return self.tensor_shape[-1]

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of what one published tensor gives to the parameter: all of it, or `rows` of its `logical_shape`."""
        shape = self.logical_shape or self.tensor_shape
        return (shape[0], self.rows[1] - self.rows[0], *shape[2:]) if self.rows else shape

    @property
    def row_dims(self) -> int:
        """How many dimensions of `logical_shape` the rows of the published tensor are split into."""
        dims, size = 0, 1
        for length in self.logical_shape or self.tensor_shape:
            if size == self.tensor_shape[0] and dims:
                break
            dims, size = dims + 1, size * length
        return dims

    @property
    def experts(self) -> int | None:
        """Number of experts the published tensors run over."""
        return self.shape[0] if any("{expert}" in t for t in self.tensors) else None

    def layers(self, config: ModelConfig) -> tuple[int, ...]:
        """Published layer numbers in stack order; the MTP layer is number `num_hidden_layers`."""
        return stack_layers(config, self.stack)

    def stacked_shape(self, config: ModelConfig) -> tuple[int, ...]:
        """Shape of the array in `Params`."""
        if self.stack in (Stack.GLOBAL, Stack.MTP):
            return self.shape
        return (len(self.layers(config)), *self.shape)

    def published(self, config: ModelConfig, layer: int) -> list[Tensor]:
        """The published tensors of one layer, expert by expert, each expert's in the order of `tensors`."""
        prefix = "" if self.stack is Stack.GLOBAL else f"model.layers.{layer}."
        experts = [None] if self.experts is None else range(self.experts)
        return [self._tensor(config, prefix + name.format(expert=e)) for e in experts for name in self.tensors]

    def _tensor(self, config: ModelConfig, name: str) -> Tensor:
        quantization = config.quantization
        quantized = (
            self.fp8
            and quantization is not None
            and not quantization.keeps_high_precision(name.removesuffix(".weight"))
        )
        return Tensor(name, self.tensor_shape, quantized=quantized, float32=self.float32, optional=self.optional)


def stack_layers(config: ModelConfig, stack: Stack) -> tuple[int, ...]:
    """Layer numbers of a stack in order, the MTP layer last under the number `num_hidden_layers`."""
    layers = range(config.num_hidden_layers)
    mtp = (config.num_hidden_layers,) * config.has_mtp
    match stack:
        case Stack.GLOBAL:
            return (0,)
        case Stack.LAYER:
            return (*layers, *mtp)
        case Stack.INDEXER:
            return (*(i for i in layers if config.indexer_types[i] == FULL), *mtp)
        case Stack.DENSE:
            return tuple(i for i in layers if config.mlp_layer_types[i] == DENSE)
        case Stack.MOE:
            return (*(i for i in layers if config.mlp_layer_types[i] == SPARSE), *mtp)
        case Stack.MTP:
            return mtp


@cache
def parameters(config: ModelConfig) -> tuple[Param, ...]:
    """The table for `config`. Parameters of a kind of layer that the model has not are left out."""
    table = (*_global(config), *_attention(config), *_indexer(config), *_mlp(config), *_mtp(config))
    return tuple(p for p in table if p.layers(config))


def published_tensors(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the published checkpoint once, with the part of the model it belongs to; scales not listed."""
    seen: set[str] = set()
    for param in parameters(config):
        for layer in param.layers(config):
            for tensor in param.published(config, layer):
                if tensor.name not in seen and not tensor.optional:
                    seen.add(tensor.name)
                    yield param.part, tensor


def config_notes(config: ModelConfig) -> tuple[str, ...]:
    """Sentences a user should read about a config: its own, and exceptions from quantisation that mean nothing."""
    if config.quantization is None or not config.quantization.high_precision:
        return config.notes
    idle = config.quantization.meaningless(_modules(config, experts=False))
    some = dataclasses.replace(config.quantization, high_precision=tuple(idle))
    idle = some.meaningless(_modules(config, experts=True)) if idle else []
    if not idle:
        return config.notes
    what = f"{idle[0]!r}" if len(idle) == 1 else f"{idle[0]!r} and {len(idle) - 1} more"
    means = "means" if len(idle) == 1 else "mean"
    return (*config.notes, f"quantization_config excepts {what}, which {means} no tensor of this model")


def _modules(config: ModelConfig, *, experts: bool) -> set[str]:
    """Names of the published tensors without `.weight`; of one expert of each layer, or of all."""
    found: set[str] = set()
    for param in parameters(config):
        for layer in param.layers(config):
            if experts or param.experts is None:
                names = [tensor.name for tensor in param.published(config, layer)]
            else:
                names = [f"model.layers.{layer}.{name.format(expert=0)}" for name in param.tensors]
            found.update(name.removesuffix(".weight") for name in names)
    return found


def _global(c: ModelConfig) -> tuple[Param, ...]:
    d, v = c.hidden_size, c.vocab_size
    return (
        _matrix("embed", "embedding", Stack.GLOBAL, "model.embed_tokens.weight", (v, d), ("vocab", "embed")),
        _norm("norm", "norms", Stack.GLOBAL, "model.norm", d, "embed"),
        _matrix("head", "output head", Stack.GLOBAL, "lm_head.weight", (v, d), ("vocab", "embed")),
    )


def _attention(c: ModelConfig) -> tuple[Param, ...]:
    d, h, r = c.hidden_size, c.num_attention_heads, c.kv_lora_rank
    nope, value = c.qk_nope_head_dim, c.v_head_dim
    kv_b = {
        "stack": Stack.LAYER,
        "part": "attention",
        "tensors": ("self_attn.kv_b_proj.weight",),
        "tensor_shape": (h * (nope + value), r),
        "logical_shape": (h, nope + value, r),
        "axes": ("heads", None, "kv_lora"),
        "fp8": True,
        "dequantize": True,
    }

    def matrix(path: str, name: str, shape: tuple[int, int], axes: tuple[str | None, ...], **kw) -> Param:
        return _matrix(
            f"attention.{path}", "attention", Stack.LAYER, f"self_attn.{name}.weight", shape, axes, fp8=True, **kw
        )

    def bias(path: str, name: str, size: int, axis: str | None) -> tuple[Param, ...]:
        if not c.attention_bias:
            return ()
        name = f"self_attn.{name}.bias"
        return (_vector(f"attention.{path}", "attention", Stack.LAYER, name, size, axis, init="zeros"),)

    return (
        _norm("attention.input_norm", "norms", Stack.LAYER, "input_layernorm", d, "embed"),
        matrix("q_a", "q_a_proj", (c.q_lora_rank, d), ("q_lora", "embed")),
        *bias("q_a_bias", "q_a_proj", c.q_lora_rank, "q_lora"),
        _norm("attention.q_a_norm", "norms", Stack.LAYER, "self_attn.q_a_layernorm", c.q_lora_rank, "q_lora"),
        matrix(
            "q_b",
            "q_b_proj",
            (h * c.qk_head_dim, c.q_lora_rank),
            ("heads", None, "q_lora"),
            logical_shape=(h, c.qk_head_dim, c.q_lora_rank),
        ),
        matrix("kv_a", "kv_a_proj_with_mqa", (c.latent_width, d), ("kv_lora", "embed")),
        *bias("kv_a_bias", "kv_a_proj_with_mqa", c.latent_width, "kv_lora"),
        _norm("attention.kv_a_norm", "norms", Stack.LAYER, "self_attn.kv_a_layernorm", r, "kv_lora"),
        Param("attention.k_up", shape=(h, nope, r), rows=(0, nope), **kv_b),
        Param("attention.v_up", shape=(h, value, r), rows=(nope, nope + value), **kv_b),
        matrix("o", "o_proj", (d, h * value), ("embed", "heads", None), logical_shape=(d, h, value)),
        *bias("o_bias", "o_proj", d, "embed"),
        _norm("attention.post_norm", "norms", Stack.LAYER, "post_attention_layernorm", d, "embed"),
    )


def _indexer(c: ModelConfig) -> tuple[Param, ...]:
    d, h, w, q = c.hidden_size, c.index_n_heads, c.index_head_dim, c.q_lora_rank
    stack, part, prefix = Stack.INDEXER, "indexer", "self_attn.indexer."
    axes = ("index_heads", None, "q_lora")
    return (
        _matrix(
            "indexer.q_b", part, stack, prefix + "wq_b.weight", (h * w, q), axes, fp8=True, logical_shape=(h, w, q)
        ),
        _matrix("indexer.k", part, stack, prefix + "wk.weight", (w, d), (None, "embed"), fp8=True),
        _vector("indexer.k_norm", part, stack, prefix + "k_norm.weight", w, None, init="ones"),
        _vector("indexer.k_norm_bias", part, stack, prefix + "k_norm.bias", w, None, init="zeros"),
        _matrix("indexer.weights", part, stack, prefix + "weights_proj.weight", (h, d), ("index_heads", "embed")),
    )


def _mlp(c: ModelConfig) -> tuple[Param, ...]:
    d, e = c.hidden_size, c.n_routed_experts

    def mlp(path: str, part: str, stack: Stack, name: str, width: int, lead: tuple[str, ...] = ()) -> tuple[Param, ...]:
        shape, axis = (e,) * len(lead), "expert_mlp" if lead else "mlp"
        down = (f"{name}.down_proj.weight",)
        both = (f"{name}.gate_proj.weight", f"{name}.up_proj.weight")
        up_axes, down_axes = (*lead, None, axis, "embed"), (*lead, "embed", axis)
        return (
            Param(f"{path}gate_up", part, stack, (*shape, 2, width, d), up_axes, both, (width, d), fp8=True),
            Param(f"{path}down", part, stack, (*shape, d, width), down_axes, down, (d, width), fp8=True),
        )

    return (
        *mlp("dense.", "dense MLP", Stack.DENSE, "mlp", c.intermediate_size),
        _matrix("moe.router", "router", Stack.MOE, "mlp.gate.weight", (e, d), ("router_experts", "embed")),
        dataclasses.replace(
            _vector(
                "moe.router_bias",
                "router",
                Stack.MOE,
                "mlp.gate.e_score_correction_bias",
                e,
                "router_experts",
                init="zeros",
            ),
            float32=True,
        ),
        *mlp("moe.", "routed experts", Stack.MOE, "mlp.experts.{expert}", c.moe_intermediate_size, ("experts",)),
        *mlp("moe.shared_", "shared experts", Stack.MOE, "mlp.shared_experts", c.shared_intermediate_size),
    )


def _mtp(c: ModelConfig) -> tuple[Param, ...]:
    d, v, part, stack = c.hidden_size, c.vocab_size, "MTP", Stack.MTP
    return (
        _norm("mtp.embed_norm", part, stack, "enorm", d, "embed"),
        _norm("mtp.hidden_norm", part, stack, "hnorm", d, "embed"),
        _matrix("mtp.project", part, stack, "eh_proj.weight", (d, 2 * d), ("embed", None)),
        _norm("mtp.norm", part, stack, "shared_head.norm", d, "embed"),
        # Other writers ship copies of the embedding and the head with the MTP layer; the published files do not.
        _matrix("mtp.embed", part, stack, "embed_tokens.weight", (v, d), ("vocab", "embed"), optional=True),
        _matrix("mtp.head", part, stack, "shared_head.head.weight", (v, d), ("vocab", "embed"), optional=True),
    )


def _matrix(
    path: str, part: str, stack: Stack, name: str, shape: tuple[int, int], axes: tuple[str | None, ...], **kw
) -> Param:
    """A projection made of one published tensor; `logical_shape` splits its rows or columns into heads."""
    return Param(path, part, stack, kw.get("logical_shape") or shape, axes, (name,), shape, **kw)


def _vector(path: str, part: str, stack: Stack, name: str, size: int, axis: str | None, *, init: str) -> Param:
    return Param(path, part, stack, (size,), (axis,), (name,), (size,), init=init)


def _norm(path: str, part: str, stack: Stack, name: str, size: int, axis: str) -> Param:
    return _vector(path, part, stack, f"{name}.weight", size, axis, init="ones")
