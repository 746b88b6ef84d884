#!/usr/bin/env python3
"""Makes the cases of the parity tests: small checkpoints in the published layout, and what `transformers` says of them.

A case is a folder with `config.json`, safetensors (one file, or shards with an index) and `golden.npz`. Everything in
`golden.npz` is computed by `transformers` in float32 on the CPU with eager attention, from exactly the values that are
stored; the draft (MTP) layer, which `transformers` has not, is `DraftLayer` below.

    input_ids, attention_mask   int32 [rows, length]; padding stands on the left
    logits                      float32 [rows, length, vocab]; rows under padding mean nothing, here and below
    hidden                      float32 [layers + 1, rows, length, width], before each layer, then after the final norm
    topk                        int32 [layers, rows, length, index_topk], ascending columns of `input_ids`, then -1
    experts                     int32 [moe_layers, rows * length, experts_per_token], ascending
    greedy                      int32 [rows, steps], the most likely continuation, recomputed from the start each step
    latent_norm_eps             float32, epsilon of `q_a_layernorm` and `kv_a_layernorm`
    mtp_logits                  float32 [rows, length, vocab] of the draft layer; greedy[0] follows the last token
    mtp_topk                    int32 [rows, length, index_topk], its selection, like `topk`
    mtp_draft                   int32 [rows, 3], the chain of drafts after greedy[0]; where the config has
                                `index_share_for_mtp_iteration`, later steps attend to what the first one selected
    bfloat16_error              float32 [layers + 1], median relative error of `hidden` in the reference's bfloat16
    seed                        int64, which gives the case

Every choice in a case (top-k of the indexers, experts, greedy tokens) is clear by `MARGIN`, and most are clear enough
for bfloat16: with noise of that size, the reference changes its own choices in no more than `UNSTEADY` of the rows.
Seeds are tried in turn until one gives such a case. A case is a function of its name, so running the script again gives
the same files.

Needs: the extra `oracle` of the project. Usage: python tests/oracle/make_cases.py [--out FOLDER] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaDecoderLayer

if __package__:
    from tests.oracle.recipes import BLOCK, RECIPES, Recipe, published_config
else:  # run as a script
    from recipes import BLOCK, RECIPES, Recipe, published_config

MARGIN = 3e-5
NOISE, SHAKES, UNSTEADY, TURN = 2.5e-3, 4, 0.03, 0.0007
TRIES = 1000
DRAFTS = 3
FLOAT8_MAX = 448.0

_PLAIN = re.compile(r"(norm|gate|weights_proj|eh_proj|embed_tokens|lm_head)\.weight$")


def torch_config(config: dict[str, Any], **changes: Any) -> GlmMoeDsaConfig:
    fields = {k: v for k, v in config.items() if k not in ("quantization_config", "architectures", "dtype")}
    if fields["rope_parameters"].get("rope_type") is None:
        fields["rope_parameters"] = fields["rope_parameters"] | {"rope_type": "default"}
    made = GlmMoeDsaConfig(**(fields | changes))
    made._attn_implementation = made._experts_implementation = "eager"
    return made


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / torch.sqrt(torch.mean(x**2, -1, keepdim=True) + eps)


class SteeredIndexer(nn.Module):
    """An indexer whose queries from number `first` on repeat the choice of the one before them."""

    def __init__(self, indexer: nn.Module):
        super().__init__()
        self.indexer, self.first = indexer, None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        own = self.indexer(*args, **kwargs)
        if self.first is None:
            return own
        repeated = own[:, self.first - 1 : self.first].expand(-1, own.shape[1] - self.first, -1)
        return torch.cat([own[:, : self.first], repeated], dim=1)


class DraftLayer(nn.Module):
    """The checkpoint's extra layer: one decoder layer on a projection of [next token's embedding, hidden state]."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        width, self.eps = config["hidden_size"], config["rms_norm_eps"]
        self.enorm, self.hnorm, self.final = (nn.Parameter(torch.ones(width)) for _ in range(3))
        self.eh_proj = nn.Parameter(torch.zeros(width, 2 * width))
        only = torch_config(
            config, num_hidden_layers=1, first_k_dense_replace=0, indexer_types=["full"], mlp_layer_types=["sparse"]
        )
        self.layer = GlmMoeDsaDecoderLayer(only, 0)

    def names(self) -> dict[str, nn.Parameter | torch.Tensor]:
        """Tensors by their published names within the layer, experts still fused."""
        own = {"enorm": self.enorm, "hnorm": self.hnorm, "eh_proj": self.eh_proj, "shared_head.norm": self.final}
        return self.layer.state_dict() | {f"{name}.weight": p.data for name, p in own.items()}

    def forward(
        self,
        trunk: GlmMoeDsaForCausalLM,
        hidden: torch.Tensor,
        next_ids: torch.Tensor,
        positions: torch.Tensor,
        real: torch.Tensor,
        shared_from: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output after the final norm, and the selection as `[rows, tokens, tokens]` booleans."""
        embedded = trunk.model.embed_tokens(next_ids)
        x = torch.cat([rms(embedded, self.enorm, self.eps), rms(hidden, self.hnorm, self.eps)], dim=-1)
        x = functional.linear(x, self.eh_proj)
        visible = causal(real)
        blocked = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        attention, chosen = self.layer.self_attn, []
        steered = SteeredIndexer(attention.indexer)
        steered.first, attention.indexer = shared_from, steered
        hook = attention.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
        try:
            x, _ = self.layer(
                x,
                attention_mask=blocked[:, None],
                position_ids=positions,
                position_embeddings=trunk.model.rotary_emb(x, position_ids=positions),
            )
        finally:
            hook.remove()
            attention.indexer = steered.indexer
        return rms(x, self.final, self.eps), selected(chosen[0], visible)


def causal(real: torch.Tensor) -> torch.Tensor:
    """bool `[rows, queries, keys]`: keys that are real and not after the query."""
    length = real.shape[1]
    return torch.ones(length, length, dtype=torch.bool).tril() & real[:, None, :]


def selected(indices: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """The reference lists `index_topk` keys even where fewer are visible; the rest is masked out later."""
    return torch.zeros_like(visible).scatter(-1, indices.long(), True) & visible


def columns(chosen: torch.Tensor, k: int) -> torch.Tensor:
    """Ascending columns that are set, then -1."""
    length = chosen.shape[-1]
    listed = torch.where(chosen, torch.arange(length), length).sort(-1).values[..., :k]
    return torch.where(listed == length, -1, listed)


def random_weight(name: str, shape: torch.Size, recipe: Recipe, config: dict[str, Any], g: torch.Generator):
    """Weights large enough for clear choices; what goes back to the residual stream is smaller, to keep it tame."""
    noise = torch.randn(shape, generator=g)
    if name.endswith("e_score_correction_bias"):
        # Where the published ones lie: far from zero with a small spread, which bfloat16 cannot resolve.
        return 6.817 + 0.246 * torch.rand(shape, generator=g)
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith(".bias"):
        return 0.3 * noise
    if name.endswith("embed_tokens.weight"):
        return noise
    gain = 0.1 if re.search(r"(o_proj|down_proj)(\.weight)?$", name) else 1.0
    weight = noise * (gain / math.sqrt(shape[-1]))
    if name.endswith("q_a_proj.weight"):
        weight *= recipe.latent_gain
    if name.endswith("kv_a_proj_with_mqa.weight"):
        weight[: config["kv_lora_rank"]] *= recipe.latent_gain
    return weight


def split_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """From fused experts to the published names, one expert at a time."""
    out = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                out[name.replace("gate_up_proj", f"{e}.gate_proj.weight")] = gate
                out[name.replace("gate_up_proj", f"{e}.up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            out |= {name.replace("down_proj", f"{e}.down_proj.weight"): w for e, w in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def fuse_experts(tensors: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `split_experts`, with the names of `like`."""

    def fused(name: str) -> torch.Tensor:
        if name in tensors:
            return tensors[name]
        kinds = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        stem = name.rpartition(".")[0]
        return torch.stack(
            [torch.cat([tensors[f"{stem}.{e}.{kind}.weight"] for kind in kinds]) for e in range(len(like[name]))]
        )

    return {name: fused(name) for name in like}


def stored(name: str, tensor: torch.Tensor, recipe: Recipe) -> dict[str, torch.Tensor]:
    """A tensor as the file has it: bfloat16, float32 for the router's bias, or FP8 codes with a scale a block."""
    if name.endswith("e_score_correction_bias"):
        return {name: tensor}
    if not recipe.fp8 or tensor.ndim != 2 or _PLAIN.search(name):
        return {name: tensor.to(torch.bfloat16)}
    scales = torch.empty(-(-tensor.shape[0] // BLOCK), -(-tensor.shape[1] // BLOCK))
    codes = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
    for i, j in np.ndindex(*scales.shape):
        part = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
        scales[i, j] = tensor[part].abs().max() / FLOAT8_MAX
        codes[part] = (tensor[part] / scales[i, j]).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales}


def read_back(files: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The float32 values that stored tensors stand for."""
    out = {}
    for name, tensor in files.items():
        if name.endswith("_scale_inv"):
            continue
        value = tensor.float()
        if tensor.dtype == torch.float8_e4m3fn:
            for i, j in np.ndindex(*files[f"{name}_scale_inv"].shape):
                part = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
                value[part] *= files[f"{name}_scale_inv"][i, j]
        out[name] = value
    return out


class Margins(TorchFunctionMode):
    """Notes how clear each top-k and each argmax inside is: the gap between the last value taken and the next one."""

    def __init__(self):
        super().__init__()
        self.smallest = math.inf

    def note(self, values: torch.Tensor, k: int) -> None:
        if values.shape[-1] > k:
            best = torch.sort(values.float(), dim=-1, descending=True).values
            last, following = best[..., k - 1], best[..., k]
            gaps = (last - following)[torch.isfinite(following) & (following > -1e30)]
            self.smallest = min([self.smallest, *gaps.flatten().tolist()])

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.topk, torch.Tensor.topk):
            self.note(args[0], args[1] if len(args) > 1 else kwargs["k"])
        elif function in (torch.argmax, torch.Tensor.argmax):
            self.note(args[0], 1)
        return function(*args, **kwargs)


@contextmanager
def recorded(trunk: GlmMoeDsaForCausalLM) -> Iterator[dict[str, list[torch.Tensor]]]:
    """What every layer sees and chooses while the context is open."""
    seen: dict[str, list[torch.Tensor]] = {"hidden": [], "topk": [], "experts": []}
    hooks = []
    for layer in trunk.model.layers:
        hooks.append(layer.register_forward_pre_hook(lambda m, args: seen["hidden"].append(args[0].clone())))
        hooks.append(layer.self_attn.register_forward_hook(lambda m, a, out: seen["topk"].append(out[2].clone())))
        if hasattr(layer.mlp, "gate"):
            hooks.append(layer.mlp.gate.register_forward_hook(lambda m, a, out: seen["experts"].append(out[2].clone())))
    hooks.append(trunk.model.norm.register_forward_hook(lambda m, a, out: seen["hidden"].append(out.clone())))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def run_trunk(trunk: GlmMoeDsaForCausalLM, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    positions = (real.long().cumsum(-1) - 1).clamp(min=0)
    return trunk(ids, attention_mask=real.long(), position_ids=positions, use_cache=False).logits


def golden(
    trunk: GlmMoeDsaForCausalLM, draft: DraftLayer | None, config: dict[str, Any], recipe: Recipe, ids, real
) -> dict[str, torch.Tensor]:
    """Everything in `golden.npz`; see the head of this file."""
    k = min(config["index_topk"], ids.shape[1])
    with recorded(trunk) as seen:
        logits = run_trunk(trunk, ids, real)
    longer, longer_real, ones = ids, real, torch.ones(len(ids), 1, dtype=torch.bool)
    for _ in range(recipe.greedy):
        token = run_trunk(trunk, longer, longer_real)[:, -1].argmax(-1)
        longer, longer_real = torch.cat([longer, token[:, None]], 1), torch.cat([longer_real, ones], 1)
    out = {
        "input_ids": ids,
        "attention_mask": real.int(),
        "logits": logits,
        "hidden": torch.stack(seen["hidden"]),
        "topk": torch.stack([columns(selected(chosen, causal(real)), k) for chosen in seen["topk"]]),
        "experts": torch.stack(seen["experts"]).sort(-1).values,
        "greedy": longer[:, ids.shape[1] :],
        "latent_norm_eps": torch.tensor(trunk.model.layers[0].self_attn.q_a_layernorm.variance_epsilon),
    }
    if draft is None:
        return out
    hidden, next_ids, tokens = seen["hidden"][-1], torch.cat([ids[:, 1:], out["greedy"][:, :1]], 1), []
    for step in range(DRAFTS):
        positions = (real.long().cumsum(-1) - 1).clamp(min=0)
        shared_from = ids.shape[1] if step and config["index_share_for_mtp_iteration"] else None
        state, chosen = draft(trunk, hidden, next_ids, positions, real, shared_from)
        if step == 0:
            out["mtp_logits"], out["mtp_topk"] = trunk.lm_head(state), columns(chosen, k)
        tokens.append(trunk.lm_head(state[:, -1]).argmax(-1))
        hidden = torch.cat([hidden, state[:, -1:]], 1)
        next_ids, real = torch.cat([next_ids, tokens[-1][:, None]], 1), torch.cat([real, ones], 1)
    return out | {"mtp_draft": torch.stack(tokens, 1)}


@torch.no_grad()
def attempt(
    recipe: Recipe, seed: int, *, steady: bool = True
) -> tuple[bool, dict[str, Any], dict[str, torch.Tensor], dict[str, Any]]:
    """A case by seed: whether its choices are clear (and `steady`), its config, stored tensors and golden values."""
    g = torch.Generator().manual_seed(seed)
    config = published_config(recipe)
    trunk = GlmMoeDsaForCausalLM(torch_config(config)).eval().float()
    draft = DraftLayer(config).eval().float() if config.get("num_nextn_predict_layers") else None
    prefix = f"model.layers.{config['num_hidden_layers']}."
    state = trunk.state_dict() | ({prefix + n: t for n, t in draft.names().items()} if draft else {})
    state = {name: random_weight(name, state[name].shape, recipe, config, g) for name in sorted(state)}
    files = {}
    for name, tensor in split_experts(state).items():
        files |= stored(name, tensor.contiguous(), recipe)
    exact = fuse_experts(read_back(files), state)
    trunk.load_state_dict({n: exact[n] for n in trunk.state_dict()})
    if draft:
        for name, tensor in draft.names().items():
            tensor.copy_(exact[prefix + name])
    for module in (*trunk.model.layers, *([draft.layer] if draft else [])):
        for norm in (module.self_attn.q_a_layernorm, module.self_attn.kv_a_layernorm):
            norm.variance_epsilon = recipe.latent_norm_eps or config["rms_norm_eps"]  # `transformers` has 1e-6
    length = max(recipe.lengths)
    ids = torch.randint(0, min(config["eos_token_id"]), (len(recipe.lengths), length), generator=g)
    real = torch.stack([torch.arange(length) >= length - n for n in recipe.lengths])
    ids = torch.where(real, ids, config["pad_token_id"])
    with Margins() as margins:
        values = golden(trunk, draft, config, recipe, ids, real)
    clear = margins.smallest >= MARGIN
    if steady:
        clear = clear and shaken(trunk, ids, real, values, g) <= UNSTEADY
        values["bfloat16_error"] = bfloat16_error(trunk, ids, real, values["hidden"])
    arrays = {k: v.numpy().astype(np.float32 if v.is_floating_point() else np.int32) for k, v in values.items()}
    return clear, config, files, arrays


def shaken(trunk: GlmMoeDsaForCausalLM, ids, real, values: dict[str, torch.Tensor], g: torch.Generator) -> float:
    """How much the reference itself changes with noise of the size of bfloat16's rounding at every layer's input.

    Returns the largest share of rows whose selection or experts change, over `SHAKES` runs; one where the logits turn
    by more than `TURN`.
    """
    worst = 0.0
    for _ in range(SHAKES):

        def noisy(layer: nn.Module, args: tuple) -> tuple:
            size = args[0].pow(2).mean(-1, keepdim=True).sqrt()
            return (args[0] + NOISE * size * torch.randn(args[0].shape, generator=g), *args[1:])

        hooks = [layer.register_forward_pre_hook(noisy) for layer in trunk.model.layers]
        with recorded(trunk) as seen:
            logits = run_trunk(trunk, ids, real)[real].flatten()
        for hook in hooks:
            hook.remove()
        topk = torch.stack([columns(selected(t, causal(real)), values["topk"].shape[-1]) for t in seen["topk"]])
        experts = torch.stack(seen["experts"]).sort(-1).values != values["experts"]
        changed = (topk != values["topk"]).any(-1)[:, real], experts.any(-1)[:, real.flatten()]
        turn = 1 - functional.cosine_similarity(logits.double(), values["logits"][real].double().flatten(), dim=0)
        worst = max(worst, *(rows.float().mean().item() for rows in changed), float(turn > TURN))
    return worst


def bfloat16_error(trunk: GlmMoeDsaForCausalLM, ids, real, hidden: torch.Tensor) -> torch.Tensor:
    """By layer, the median over tokens of the relative error of the residual stream in bfloat16; spoils the trunk."""
    for name, parameter in trunk.named_parameters():
        if not name.endswith(("mlp.gate.weight", "indexer.weights_proj.weight")):  # float32 in the reference
            parameter.data = parameter.data.bfloat16()
    with recorded(trunk) as seen:
        run_trunk(trunk, ids, real)
    errors = (torch.stack(seen["hidden"]).float() - hidden)[:, real].norm(dim=-1)
    return (errors / hidden[:, real].norm(dim=-1)).median(-1).values


def write(folder: Path, config: dict[str, Any], files: dict[str, torch.Tensor], arrays: Any, shards: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    np.savez_compressed(folder / "golden.npz", **arrays)
    if shards == 1:
        save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = sorted(files), {}
    for number, part in enumerate(np.array_split(names, shards), 1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file({str(name): files[str(name)] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= {str(name): file for name in part}
    index = {"metadata": {"total_size": sum(t.nbytes for t in files.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")


def make(recipe: Recipe, folder: Path, seed: int, *, steady: bool = True) -> int:
    """Writes a case; returns the seed that gave clear choices, the first from `seed` on.

    Without `steady` the case is for float32 only, and found sooner.
    """
    for number in range(seed, seed + TRIES):
        clear, *content = attempt(recipe, number, steady=steady)
        if clear:
            content[-1]["seed"] = np.int64(number)
            write(folder, *content, shards=recipe.shards)
            return number
    raise RuntimeError(f"no seed from {seed} to {seed + TRIES - 1} gives a case whose choices are clear")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "cases")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECIPES))
    args = parser.parse_args()
    for name in args.names or RECIPES:
        seed = make(RECIPES[name], args.out / name, zlib.crc32(name.encode()))
        size = sum(f.stat().st_size for f in (args.out / name).iterdir())
        print(f"{name}: seed {seed}, {size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
