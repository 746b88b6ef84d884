"""One decoder layer of `transformers` with the weights of a published folder, and what it does, stage by stage.

The weights are read here by name, and codes are multiplied by their scales here, in torch, so that nothing of the
project's own reading or arithmetic is shared with what is compared. Two things are not as `transformers` has them: the
epsilon of the two latent norms is the config's (`transformers` builds them with 1e-6), and the rotary frequencies are
rounded once from float64 (its float32 power is an ulp away, which alone turns position 2,000 by 1e-4;
`ReferenceLayers.own_rotary` has its own). The MTP layer, which it has not, is its decoder layer behind the MTP
projection.

Importing this module needs torch and transformers, the extra `oracle`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch  # pyrefly: ignore[missing-import]
from torch.overrides import TorchFunctionMode  # pyrefly: ignore[missing-import]
from transformers import GlmMoeDsaConfig  # pyrefly: ignore[missing-import]
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm  # pyrefly: ignore[missing-import]

from glm52_jax.checkpoint.sources.open_source import Checkpoint
from glm52_jax.config import ModelConfig
from glm52_jax.io.json_fields import read_json

Stages = dict[str, np.ndarray]
"""Arrays by the names of `layer_stages.STAGES`, without the batch: `[tokens, ...]`."""

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
}
_LARGEST = {"F8_E4M3": 448.0, "I8": 127.0}


@dataclasses.dataclass(frozen=True)
class StoredType:
    """How the target stores a weight; one that the conversion rounds is rounded here too, before it is used."""

    dtype: str
    block: tuple[int, int] | None


class Weights:
    """Tensors of a source as float32, by published name.

    Args:
        source: any checkpoint that can be read in parts.
        config: of the source.
        form: how the target stores the weight of that name.
    """

    def __init__(self, source: Checkpoint, config: ModelConfig, form: Callable[[str], StoredType]):
        self.source, self.form = source, form
        self.block = config.quantization.block if config.quantization else None

    def __contains__(self, name: str) -> bool:
        return name in self.source.where

    def __call__(self, name: str) -> torch.Tensor:
        entry = self.source.entry(name)
        values = self._read(name, entry.shape)
        if entry.dtype in _LARGEST:
            scale = next(name + suffix for suffix in ("_scale_inv", "_scale") if name + suffix in self)
            values = _scaled(values, self._read(scale, self.source.entry(scale).shape), self.block)
        return self._as_stored(name, entry.dtype, values)

    def rows(self, name: str, numbers: np.ndarray) -> torch.Tensor:
        """Some rows of a matrix, without reading the others."""
        width = self.source.entry(name).shape[1]
        rows = torch.cat([self._read(name, (1, width), int(n) * width) for n in numbers])
        return self._as_stored(name, self.source.entry(name).dtype, rows)

    def expert(self, stem: str, fused: str, number: int) -> torch.Tensor:
        """One expert as `transformers` stacks them: gate above up, or down."""
        parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
        names = [f"{stem}.{number}.{part}.weight" for part in parts]
        if names[0] in self:
            return torch.cat([self(name) for name in names])
        whole = self.source.entry(f"{stem}.{fused}")
        both = self._read(f"{stem}.{fused}", whole.shape[1:], number * math.prod(whole.shape[1:]))
        halves = zip(names, both.chunk(len(parts)), strict=True)
        return torch.cat([self._as_stored(name, whole.dtype, half) for name, half in halves])

    def _read(self, name: str, shape: tuple[int, ...], start: int = 0) -> torch.Tensor:
        dtype = _DTYPES[self.source.entry(name).dtype]
        data = bytearray(math.prod(shape) * dtype.itemsize)
        self.source.pread(name, start * dtype.itemsize, memoryview(data))
        return torch.frombuffer(data, dtype=dtype).reshape(shape).float()

    def _as_stored(self, name: str, found: str, values: torch.Tensor) -> torch.Tensor:
        form = self.form(name)
        if form.dtype == found or form.dtype == "F32":
            return values
        if form.dtype in _LARGEST:
            assert form.block is not None
            return _quantized(values, form.dtype, form.block)
        return values.to(_DTYPES[form.dtype]).float()


class ReferenceLayers:
    """The layers of a model by number, one in memory at a time; the MTP layer is number `num_hidden_layers`."""

    def __init__(self, source: Checkpoint, config: ModelConfig, form: Callable[[str], StoredType]):
        self.weights, self.ours = Weights(source, config, form), config
        self.config = _their_config(read_json(source.folder / "config.json"))
        self._rotary = glm.GlmMoeDsaRotaryEmbedding(self.config)

    def embed(self, tokens: np.ndarray, layer: int | None = None) -> np.ndarray:
        """float32 `[tokens, embed]`; for the MTP layer its own embedding where the file has one."""
        own = f"model.layers.{layer}.embed_tokens.weight"
        return self.weights.rows(own if own in self.weights else "model.embed_tokens.weight", tokens).numpy()

    def own_rotary(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """The cosines and sines that `transformers` makes itself, float32 `[tokens, pairs]`."""
        tables = self._rotary(torch.zeros(1), torch.arange(tokens)[None])
        cos, sin = (t[0, :, : t.shape[-1] // 2].numpy() for t in tables)
        return cos, sin

    @torch.no_grad()
    def layer(self, number: int, x: np.ndarray, selection: np.ndarray | None) -> Stages:
        """Runs a decoder layer on the stream `x` `[tokens, embed]`.

        Args:
            selection: bool `[tokens, tokens]`, what each query attends to; used where the layer is shared.
        """
        return self._run(number, torch.tensor(x)[None], selection)

    @torch.no_grad()
    def mtp(self, x: np.ndarray, next_embedding: np.ndarray) -> Stages:
        """Runs the MTP layer on the stream after the last decoder layer and the embeddings of the tokens that follow.

        Both are float32 `[tokens, embed]`; the stream goes through the model's final norm first.
        """
        number = self.ours.num_hidden_layers
        prefix = f"model.layers.{number}."
        hidden = self._norm("model.norm", torch.tensor(x)[None])
        both = self._norm(prefix + "enorm", torch.tensor(next_embedding)[None]), self._norm(prefix + "hnorm", hidden)
        projected = torch.nn.functional.linear(torch.cat(both, -1), self.weights(prefix + "eh_proj.weight"))
        stages = self._run(number, projected, None)
        output = self._norm(prefix + "shared_head.norm", torch.tensor(stages["layer output"])[None])
        named = {"final norm": hidden, "MTP projection": projected, "MTP output": output}
        return stages | {name: value[0].numpy() for name, value in named.items()}

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        norm = glm.GlmMoeDsaRMSNorm(x.shape[-1], self.ours.rms_norm_eps)
        norm.weight.data = self.weights(f"{name}.weight")
        return norm(x)

    def _run(self, number: int, x: torch.Tensor, selection: np.ndarray | None) -> Stages:
        tokens = x.shape[1]
        layer = self._module(number)
        visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        blocked = torch.zeros(tokens, tokens).masked_fill(~visible, torch.finfo(torch.float32).min)
        positions = torch.arange(tokens)[None]
        previous = None if selection is None else _listed(torch.tensor(selection), visible)
        recorded = _Recorded(layer)
        seen = recorded.seen
        with recorded:
            seen["layer output"], _ = layer(
                x,
                attention_mask=blocked[None, None],
                position_ids=positions,
                position_embeddings=self._tables(positions),
                prev_topk_indices=previous,
            )
        chosen = torch.zeros(tokens, tokens, dtype=torch.bool).scatter(-1, seen.pop("indices")[0].long(), True)
        seen["selected set"] = (chosen & visible)[None]
        if "index scores" in seen:
            seen["index scores"] = seen["index scores"].masked_fill(~visible, -math.inf)
        return {name: value.reshape(tokens, *value.shape[value.ndim - 1 :]).numpy() for name, value in seen.items()}

    def _module(self, number: int) -> Any:
        with torch.device("meta"):
            layer = glm.GlmMoeDsaDecoderLayer(self.config, number)
        prefix = f"model.layers.{number}."
        if hasattr(layer.mlp, "experts"):
            for fused in ("gate_up_proj", "down_proj"):
                delattr(layer.mlp.experts, fused)
                setattr(layer.mlp.experts, fused, _LazyExperts(self.weights, f"{prefix}mlp.experts", fused))
        layer.load_state_dict({name: self.weights(prefix + name) for name in layer.state_dict()}, assign=True)
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.variance_epsilon = self.ours.latent_norm_eps
        return layer.eval()

    def _tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dim = self.config.qk_rope_head_dim
        frequency = float(self.config.rope_parameters["rope_theta"]) ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
        angle = positions[..., None].float() * torch.tensor(frequency.astype(np.float32))
        angle = torch.cat([angle, angle], -1)
        return angle.cos(), angle.sin()


class _LazyExperts:
    """Stands for the stacked experts of a layer: one is read when the loop over experts indexes it."""

    def __init__(self, weights: Weights, stem: str, fused: str):
        self.weights, self.stem, self.fused = weights, stem, fused

    def __getitem__(self, number: torch.Tensor) -> torch.Tensor:
        return self.weights.expert(self.stem, self.fused, int(number))


class _Recorded(TorchFunctionMode):
    """Collects the stages of a layer that runs inside of it, `[1, tokens, ...]` or `[tokens, ...]`.

    Scores that a choice is made of are nowhere returned, so they are taken from the calls of `topk`.
    """

    def __init__(self, layer: Any):
        super().__init__()
        self.seen: dict[str, torch.Tensor] = {}
        self.scores: list[torch.Tensor] = []
        keep = self.seen.update
        kept = {layer.input_layernorm: "input norm", layer.post_attention_layernorm: "post-attention norm"}
        for module, name in (kept | {layer.mlp: "MLP output"}).items():
            module.register_forward_hook(lambda module, args, out, name=name: keep({name: out}))
        attention = layer.self_attn
        attention.register_forward_hook(lambda m, args, out: keep({"attention output": out[0], "indices": out[2]}))
        if attention.indexer is not None:
            attention.indexer.register_forward_hook(lambda m, args, out: keep({"index scores": self.scores[-1]}))
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda m, args, out: keep(self._routed(*out)))

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, torch.Tensor.topk):
            self.scores.append(args[0])
        return func(*args, **(kwargs or {}))

    def _routed(self, logits: torch.Tensor, gates: torch.Tensor, experts: torch.Tensor) -> dict[str, torch.Tensor]:
        """`[tokens, experts]`: scores, scores with the bias (what the choice is made of), the choice, the gates."""
        chosen = torch.zeros(logits.shape, dtype=torch.bool).scatter(-1, experts, True)
        spread = torch.zeros(logits.shape).scatter(-1, experts, gates)
        scores = {"router scores": logits.sigmoid(), "biased scores": self.scores[-1]}
        return scores | {"chosen experts": chosen, "gates": spread}


def _their_config(raw: dict[str, Any]) -> Any:
    """`transformers`' config, with one more layer for the MTP layer; what it computes is float32 whatever is stored."""
    fields = {k: v for k, v in raw.items() if k not in ("quantization_config", "dtype", "torch_dtype")}
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_type") is None:
        fields["rope_parameters"] = rope | {"rope_type": "default"}
    config = GlmMoeDsaConfig.from_dict(fields)
    config._attn_implementation = config._experts_implementation = "eager"
    config.indexer_types = [*(config.indexer_types or ()), "full"]
    config.mlp_layer_types = [*(config.mlp_layer_types or ()), "sparse"]
    return config


def _listed(selection: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """int32 `[1, tokens, k]` as a full layer returns them: where fewer are visible, later positions fill the row."""
    k = int(selection.sum(-1).max())
    rank = selection.float() * 2 + (~visible).float()
    return rank.topk(k, dim=-1).indices.to(torch.int32)[None]


def _scaled(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """Codes times the scale of their block, in place."""
    assert block is not None
    for number, row in enumerate(scales):
        codes[number * block[0] : (number + 1) * block[0]] *= row.repeat_interleave(block[1])[: codes.shape[1]]
    return codes


def _quantized(values: torch.Tensor, codes: str, block: tuple[int, int]) -> torch.Tensor:
    """What is left of weights that a conversion quantised: the largest value of each block gets the largest code."""
    for rows in values.split(block[0]):
        for part in rows.split(block[1], dim=1):
            scale = part.abs().max().clamp(min=1e-12) / _LARGEST[codes]
            scaled = (part / scale).round().clamp(-127, 127) if codes == "I8" else part / scale
            part.copy_(scaled.to(_DTYPES[codes]).float() * scale)
    return values
