"""The cases of the parity tests: loading them, and judging a run of the model against what the reference says.

A case is a folder as `tests/oracle/make_cases.py` writes it. Those of `tests/cases` are always run; the environment
variable `GLM52_CASES` names another folder of cases to run through the same tests.
"""

import dataclasses
import os
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from glm52_jax.checkpoint.load.loader import load_params
from glm52_jax.config import SPARSE, ModelConfig, load_config
from glm52_jax.model.decoder_layer import ExecutionPolicy

LOGITS, HIDDEN = 2e-4, 5e-4
FOLDER = Path(__file__).parents[1] / "cases"
FORMS = {
    f"{attention}-{selection}-{backend}": ExecutionPolicy(attention, selection, backend)
    for attention, selection in (("absorbed", "indices"), ("absorbed", "mask"), ("expanded", "mask"))
    for backend in ("reference", "cpu")
}

ON_TPUS = {
    f"{attention}-{selection}": ExecutionPolicy(attention, selection, "interpret")
    for attention, selection in (("absorbed", "indices"), ("absorbed", "mask"), ("expanded", "mask"))
}
"""The same with the kernels for TPUs, interpreted: slow to compile."""


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A checkpoint with golden values; `name` is that of its folder."""

    name: str
    folder: Path

    @cached_property
    def golden(self) -> dict[str, np.ndarray]:
        with np.load(self.folder / "golden.npz") as arrays:
            return dict(arrays)

    @cached_property
    def config(self) -> ModelConfig:
        """The published config with the epsilon that the reference ran with, which no published field says."""
        epsilon = float(self.golden["latent_norm_eps"])
        return dataclasses.replace(
            load_config(self.folder), latent_norm_eps=float(np.format_float_scientific(epsilon, 3))
        )

    @property
    def tokens(self) -> np.ndarray:
        return self.golden["input_ids"]

    @cached_property
    def real(self) -> np.ndarray:
        """bool `[rows, length]`, false for padding."""
        return self.golden["attention_mask"].astype(bool)

    @property
    def lengths(self) -> np.ndarray:
        return self.real.sum(1)

    @cached_property
    def first(self) -> np.ndarray:
        """Column of each row's first real token; the real tokens of a row stand together."""
        return self.real.argmax(1)

    @property
    def k(self) -> int:
        return self.golden["topk"].shape[-1]

    @cached_property
    def unused_token(self) -> int:
        """A token that the case never uses for real, so that its embedding may be spoiled."""
        real = [self.tokens[self.real], *(self.golden[name] for name in ("greedy", "mtp_draft") if name in self.golden)]
        used = set(np.concatenate([array.ravel() for array in real]).tolist())
        return next(token for token in reversed(range(self.config.vocab_size)) if token not in used)

    @cached_property
    def next_tokens(self) -> np.ndarray:
        """The token after each column, the first greedy one after a row's last."""
        following = np.concatenate([self.tokens[:, 1:], self.tokens[:, :1]], 1)
        following[np.arange(len(following)), self.first + self.lengths - 1] = self.golden["greedy"][:, 0]
        return following

    def params(self, dtype: Any = jnp.float32, fp8: str = "keep") -> dict[str, Any]:
        return _params(self, jnp.dtype(dtype), fp8)

    def spoiled_params(self, dtype: Any = jnp.float32) -> dict[str, Any]:
        """Parameters with NaN for the embedding of `unused_token`, to be used as padding."""
        params = self.params(dtype)
        return params | {"embed": params["embed"].at[self.unused_token].set(jnp.nan)}


@cache
def _params(case: Case, dtype: jnp.dtype, fp8: str) -> dict[str, Any]:
    return load_params(case.folder, case.config, dtype=dtype, fp8=fp8)


@cache
def all_cases() -> dict[str, Case]:
    """Every case by name; those of `GLM52_CASES` under `other-NAME`."""
    found = {path.name: Case(path.name, path) for path in _folders(FOLDER)}
    other = os.environ.get("GLM52_CASES")
    return found | ({f"other-{p.name}": Case(f"other-{p.name}", p) for p in _folders(Path(other))} if other else {})


def each_case(*quick: str, having: str = "input_ids") -> pytest.MarkDecorator:
    """Runs a test for every case that has the golden values `having`; slow but for those named.

    The cases of `GLM52_CASES` are never slow: who names them wants to see them run.
    """
    found = [c for c in all_cases().values() if having in c.golden]
    slow = {c.name: [pytest.mark.slow] * (c.folder.parent == FOLDER and c.name not in quick) for c in found}
    return pytest.mark.parametrize("case", [pytest.param(c, id=c.name, marks=slow[c.name]) for c in found])


def each_case_and(name: str, table: dict[str, tuple[str, ...]], *, having: str = "input_ids") -> pytest.MarkDecorator:
    """The same for every value of another argument, which `table` maps to the cases that are quick with it."""
    values = [
        pytest.param(value, *case.values, id=f"{case.id}-{value}", marks=case.marks)
        for value, quick in table.items()
        for case in each_case(*quick, having=having).args[1]
    ]
    return pytest.mark.parametrize((name, "case"), values)


def _folders(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("*/golden.npz"))


@dataclasses.dataclass
class Run:
    """What a run shows, laid out like the golden values; None where it does not show it."""

    logits: np.ndarray
    hidden: np.ndarray
    topk: np.ndarray
    experts: np.ndarray
    mtp_logits: np.ndarray | None = None
    mtp_topk: np.ndarray | None = None

    @classmethod
    def of(cls, trace: Any) -> "Run":
        """From `glm52_jax.trace`."""
        arrays = (trace.logits, trace.hidden, trace.topk, trace.experts, trace.mtp_logits)
        return cls(
            *(None if a is None else np.asarray(a, a.dtype if a.dtype == jnp.int32 else np.float32) for a in arrays)
        )


def figures(case: Case, run: Run) -> dict[str, float]:
    """Largest difference of each array on real tokens; of the choices, the share of rows that differ."""
    gold, real = case.golden, case.real
    out = {
        "logits": _gap(run.logits, gold["logits"], real),
        "hidden": float(np.max([_gap(a, b, real) for a, b in zip(run.hidden, gold["hidden"], strict=True)])),
        "topk": _unequal(run.topk, gold["topk"], real),
        "experts": _unequal(_experts(run.experts, real), _experts(gold["experts"], real), real),
    }
    if run.mtp_logits is not None and "mtp_logits" in gold:
        known = min(run.mtp_logits.shape[1], gold["mtp_logits"].shape[1])
        out["mtp_logits"] = _gap(run.mtp_logits[:, :known], gold["mtp_logits"][:, :known], real[:, :known])
    if run.mtp_topk is not None and "mtp_topk" in gold:
        out["mtp_topk"] = _unequal(run.mtp_topk[None], gold["mtp_topk"][None], real)
    return out


def complaints(case: Case, run: Run) -> Iterator[str]:
    """One sentence for each thing that is not as the reference has it; nothing for a run that is right."""
    gold, real = case.golden, case.real
    found = figures(case, run)
    if not found["hidden"] <= HIDDEN:
        gaps = [_gap(a, b, real) for a, b in zip(run.hidden, gold["hidden"], strict=True)]
        first = next(i for i, gap in enumerate(gaps) if not gap <= HIDDEN)
        cosine = [_cosine(a, b, real) for a, b in zip(run.hidden, gold["hidden"], strict=True)]
        # Stream number i is the input of layer i, so that it is layer i - 1 which departs.
        place = {0: "the embedding", len(gaps) - 1: "the final norm"}.get(first, f"layer {first - 1}")
        yield f"{place} departs first, by {gaps[first]:.1e} (cosine {cosine[first]:.6f})"
    for name, rows in (("topk", real), ("experts", real)):
        if found[name]:
            mine, theirs = getattr(run, name), gold[name]
            if name == "experts":
                mine, theirs = _experts(mine, rows), _experts(theirs, rows)
            wrong = np.argwhere((mine != theirs).any(-1) & rows)[0]
            kind = "layer" if name == "topk" else "sparse layer number"
            place = f"{kind} {wrong[0]}, row {wrong[1]}, column {wrong[2]}"
            pair = f"{mine[tuple(wrong)].tolist()}, not {theirs[tuple(wrong)].tolist()}"
            yield f"{name} differs in {found[name]:.1%} of rows, first at {place}: {pair}"
    for name in ("logits", "mtp_logits"):
        if name in found and not found[name] <= LOGITS:
            yield f"{name} differ by {found[name]:.1e}"
    if found.get("mtp_topk"):
        yield f"mtp_topk differs in {found['mtp_topk']:.1%} of rows"
    if (case.first > 0).any():
        before = (run.topk >= 0) & (run.topk < case.first[None, :, None, None])
        if before.any():
            yield "topk holds padding"


def check(case: Case, run: Run) -> None:
    """Fails with every complaint."""
    found = list(complaints(case, run))
    assert not found, f"{case.name}: " + "; ".join(found)


def cosine_of_logits(case: Case, run: Run) -> float:
    return _cosine(run.logits, case.golden["logits"], case.real)


def _experts(experts: np.ndarray, real: np.ndarray) -> np.ndarray:
    return experts.reshape(len(experts), *real.shape, -1)


def _gap(mine: np.ndarray, theirs: np.ndarray, real: np.ndarray) -> float:
    return float(np.abs(mine - theirs)[real].max())


def _unequal(mine: np.ndarray, theirs: np.ndarray, real: np.ndarray) -> float:
    return float((mine != theirs).any(-1)[:, real].mean())


def _cosine(mine: np.ndarray, theirs: np.ndarray, real: np.ndarray) -> float:
    a, b = mine[real].astype(np.float64), theirs[real].astype(np.float64)
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def sparse_layers(config: ModelConfig) -> np.ndarray:
    return np.flatnonzero([kind == SPARSE for kind in config.mlp_layer_types])
