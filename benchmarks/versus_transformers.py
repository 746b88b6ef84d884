"""Prefill and decode on this CPU beside `transformers`, with the same checkpoint, in the same run.

    make oracle && .venv/bin/python -m benchmarks.versus_transformers

The model has GLM-5.2's shape in small: 11 layers (3 dense; indexers on 0, 1, 2, 6, 10), hidden size 512, 32 experts,
`index_topk` 256, about 130M parameters, float32 with random weights. Both run on the same threads, in turns, and the
best time of each counts. Of transformers' ways to run experts, each row takes the fastest of those in `EXPERTS`. Every
decode step that is timed stands within `DECODE_STEPS` tokens of the end of a prompt.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.checkpoint.load.loader import load_params
from glm52_jax.config import ModelConfig
from glm52_jax.inspect.account import model_breakdown
from glm52_jax.params.init import init_params
from infer.steps import StepProvider

PROMPT, DECODE_STEPS = 1024, 8
# By phase, since "batched_mm" gathers the weights of every token: tens of gigabytes for a prompt.
EXPERTS = {"prefill": ("eager", "grouped_mm"), "decode": ("eager", "grouped_mm", "batched_mm")}
GOALS = {("decode", 1): 2.5, ("decode", 8): 5.0, ("prefill", 1): 2.0, ("prefill", 8): 3.0}

CONFIG = ModelConfig.from_dict(
    {
        "vocab_size": 16384,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 11,
        "first_k_dense_replace": 3,
        "num_attention_heads": 16,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 16,
        "v_head_dim": 64,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.5,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 256,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 8_000_000},
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        # transformers has 1e-6 here; see the field's description.
        "latent_norm_eps": 1e-6,
        "eos_token_id": [],
        "dtype": "float32",
    },
    source="benchmark",
)


class Ours:
    """Jitted prefill and decode of one batch size."""

    def __init__(self, folder: Path, batch: int):
        self.params = load_params(folder, CONFIG)
        self.provider = StepProvider.of(self.params, CONFIG, batch=batch, capacity=PROMPT + DECODE_STEPS, chunk=PROMPT)
        self.batch = batch

    def prefill(self, prompts: np.ndarray) -> None:
        columns = np.arange(PROMPT, dtype=np.int32)
        positions = np.broadcast_to(columns, prompts.shape)
        last = np.full(self.batch, PROMPT - 1, np.int32)
        state, self.token = self.provider.prefill(self.params)(
            self.params, self.provider.state(), prompts, positions, prompts, last, None
        )
        self.state = state
        self.first = np.asarray(self.token)

    def decode(self) -> None:
        active = np.ones(self.batch, bool)
        self.state, token = self.provider.decode(self.params)(self.params, self.state, active, None)
        self.first = np.asarray(token)


class Theirs:
    """The same with transformers; every call names the way of its experts, so that none is left from another phase."""

    def __init__(self, folder: Path):
        import torch
        from transformers import GlmMoeDsaForCausalLM

        self.torch = torch
        model = GlmMoeDsaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.model = model.eval()

    def prefill(self, prompts: np.ndarray, experts: str) -> None:
        out = self._run(self.torch.from_numpy(prompts).long(), EXPERTS["prefill"], experts, logits_to_keep=1)
        self._keep(out)

    def decode(self, experts: str) -> None:
        out = self._run(self.token[:, None], EXPERTS["decode"], experts, **{self.cache_name: self.cache})
        self._keep(out)

    def _run(self, tokens: Any, known: tuple[str, ...], experts: str, **arguments: Any) -> Any:
        assert experts in known
        self.model.config._experts_implementation = experts
        with self.torch.inference_mode():
            return self.model(tokens, use_cache=True, **arguments)

    def _keep(self, out: object) -> None:
        self.cache_name = "cache" if hasattr(out, "cache") else "past_key_values"
        self.cache = getattr(out, self.cache_name)
        self.token = out.logits[:, -1].argmax(-1)
        self.first = self.token.numpy()


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(folder: Path, batch: int, rounds: int, console: Console) -> dict[tuple[str, int], tuple[float, float, str]]:
    """Best seconds of prefill and of a decode step: (phase, batch) -> (ours, theirs, their setting)."""
    prompts = np.random.default_rng(batch).integers(0, CONFIG.vocab_size, (batch, PROMPT), dtype=np.int32)
    ours, theirs = Ours(folder, batch), Theirs(folder)
    ours.prefill(prompts)  # compiles
    ours.decode()
    own, best = dict.fromkeys(EXPERTS, np.inf), dict.fromkeys(EXPERTS, (np.inf, ""))

    def note_ours(phase: str, run: Callable[[], None]) -> None:
        own[phase] = min(own[phase], seconds(run))

    def note_theirs(phase: str, run: Callable[[], None], experts: str) -> None:
        best[phase] = min(best[phase], (seconds(run), experts))

    for _ in range(rounds):
        for experts in EXPERTS["decode"]:
            note_ours("prefill", partial(ours.prefill, prompts))
            first = ours.first
            for _ in range(DECODE_STEPS):
                note_ours("decode", ours.decode)
            prefill = experts if experts in EXPERTS["prefill"] else EXPERTS["prefill"][-1]
            note_theirs("prefill", partial(theirs.prefill, prompts, prefill), prefill)
            if not np.array_equal(theirs.first, first):
                raise SystemExit("the two models disagree on the token after the prompt")
            for _ in range(DECODE_STEPS):
                note_theirs("decode", partial(theirs.decode, experts), experts)
    for phase in EXPERTS:
        console.print(f"batch {batch} {phase}: {best[phase][0] / own[phase]:.2f}x", style="dim")
    return {(phase, batch): (own[phase], *best[phase]) for phase in EXPERTS}


def matmul_peak() -> float:
    """FLOP/s of the best of a few large float32 products in JAX."""
    a = jnp.ones((2048, 2048), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    product(a).block_until_ready()
    return 2 * 2048**3 / min(seconds(lambda: product(a).block_until_ready()) for _ in range(8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    args = parser.parse_args()
    if args.rounds < 1 or min(args.batch, default=0) < 1:
        parser.error("--rounds and --batch are expected to be at least 1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "checkpoint"
        write_checkpoint(folder, CONFIG, init_params(CONFIG, jax.random.key(0), dtype=jnp.float32))
        results = {}
        for batch in args.batch:
            results |= compare(folder, batch, args.rounds, console)
    peak = matmul_peak()
    report = model_breakdown(CONFIG, "benchmark", [PROMPT // 2, PROMPT]).as_json()
    table = Table(
        title=f"{report['parameters']['total'] / 1e6:.0f}M parameters, {PROMPT}-token prompts, {os.cpu_count()} threads"
    )
    for column in ("phase", "batch", "glm52-jax", "transformers", "its experts", "ratio", "goal", "share of peak"):
        table.add_column(column, justify="left" if column in ("phase", "its experts") else "right")
    for (phase, batch), (own, theirs, setting) in sorted(results.items(), reverse=True):
        tokens = batch * (PROMPT if phase == "prefill" else 1)
        flops = tokens * report["flops_per_token"][str(PROMPT // 2 if phase == "prefill" else PROMPT)]["total"]
        shown = [f"{tokens / t:,.0f} tok/s" if phase == "prefill" else f"{t * 1e3:.1f} ms" for t in (own, theirs)]
        ratio, goal = theirs / own, GOALS.get((phase, batch))
        table.add_row(
            phase,
            str(batch),
            *shown,
            setting,
            f"{ratio:.2f}x",
            f"{goal}x" if goal else "",
            f"{flops / own / peak:.0%}",
        )
    console.print(table)
    console.print(f"float32 matmul peak in JAX here: {peak / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
