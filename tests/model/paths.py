"""Running a case through the cache, chunk by chunk, with everything around it made hostile.

Slots that were never written hold NaN, pages are dealt out in random order, padding stands on either side of a row's
tokens and has embeddings of NaN, rows take unequal numbers of tokens in a step, and sometimes none.
"""

import inspect
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from glm52_jax.cache.cache_format import PLAIN_CACHE, CacheFormat
from glm52_jax.cache.paged_cache import PagedCache
from glm52_jax.config import ModelConfig
from glm52_jax.model import mtp, transformer
from glm52_jax.model.decoder_layer import ExecutionPolicy
from sharding.collectives import order_after
from sharding.layout import SINGLE, Layout
from tests.model.cases import Case, Run, sparse_layers


class Seen(NamedTuple):
    """What one step shows."""

    logits: jax.Array
    hidden: jax.Array
    layers: transformer.LayerTrace
    mtp_state: jax.Array | None
    mtp_logits: jax.Array | None
    mtp_selection: Any


def one_step(
    params: dict,
    config: ModelConfig,
    tokens: Any,
    following: Any,
    positions: Any,
    cache: PagedCache,
    policy: ExecutionPolicy,
) -> tuple[Seen, PagedCache]:
    """The model over one chunk, and the draft layer, where there is one, over the same chunk."""
    hidden, cache, layers = transformer.extend(params, config, tokens, positions, cache, policy, traced=True)
    state = logits = selection = None
    if "mtp" in params:
        state, cache, selection = mtp.mtp_layer(params, config, hidden, following, positions, cache, policy)
        logits = mtp.mtp_logits(params, state, policy.layout)
        hidden = order_after(policy.layout, hidden, logits)
    return Seen(
        transformer.model_logits(params, hidden, policy.layout), hidden, layers, state, logits, selection
    ), cache


def draft_step(
    params: dict,
    config: ModelConfig,
    state: Any,
    token: Any,
    positions: Any,
    cache: PagedCache,
    policy: ExecutionPolicy,
    selection: Any,
) -> tuple[jax.Array, jax.Array, PagedCache, Any]:
    """One draft: its logits, the state for the next one, the cache, the selection used."""
    state, cache, selection = mtp.mtp_layer(params, config, state, token, positions, cache, policy, selection=selection)
    return mtp.mtp_logits(params, state), state, cache, selection


def _quick_options() -> dict[str, Any]:
    """Without its costly passes the compiler takes a quarter of the time; results are the same within rounding."""
    options = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
    }

    def known(name: str) -> bool:
        try:
            jax.jit(lambda x: x + 1, compiler_options={name: options[name]})(0)
        except Exception:  # a compiler that has no such option is merely slower
            return False
        return True

    return {name: value for name, value in options.items() if known(name)}


QUICK_OPTIONS = _quick_options()


def compiled(function: Any) -> Any:
    """A quickly jitted function of its own: what is patched now is what it traces."""
    static = [name for name in ("config", "policy", "form") if name in inspect.signature(function).parameters]
    return jax.jit(partial(function), static_argnames=static, compiler_options=QUICK_OPTIONS)


ROOM = 9  # positions beyond a case's length, for the longest continuation
STEP, DRAFT_STEP = compiled(one_step), compiled(draft_step)
TRACE, FORWARD = compiled(transformer._trace.__wrapped__), compiled(transformer._forward.__wrapped__)


def hostile_cache(
    config: ModelConfig,
    batch: int,
    capacity: int,
    page_size: int,
    *,
    dtype: Any = jnp.float32,
    fill: float = np.nan,
    seed: int = 0,
    form: CacheFormat = PLAIN_CACHE,
    layout: Layout = SINGLE,
) -> PagedCache:
    """A cache whose slots hold `fill`, with spare pages, and pages dealt out in random order."""
    cache = PagedCache.create(config, batch, capacity, dtype=dtype, page_size=page_size, form=form, layout=layout)
    used, spare = cache.page_table.size, 3
    order = np.random.default_rng(seed).permutation(used + spare)[:used]

    def spoiled(stack: jax.Array) -> jax.Array:
        return jnp.full((stack.shape[0], used + spare, *stack.shape[2:]), fill, stack.dtype)

    table = jnp.asarray(order.reshape(cache.page_table.shape), jnp.int32)
    return PagedCache(*jax.tree.map(spoiled, (cache.latent, cache.index_keys)), table)


def chunks(lengths: np.ndarray, size: int) -> list[np.ndarray]:
    """Tokens of each row in each step, at most `size`: unequal among rows, none where it is a row's turn to pause."""
    done, steps = np.zeros_like(lengths), []
    while (done < lengths).any():
        turn = len(steps) + np.arange(len(lengths))
        counts = np.where(turn % 4 == 1, 0, size - turn % 2 * (size // 3))
        steps.append(np.minimum(counts, lengths - done))
        done = done + steps[-1]
    return steps


def pad(rows: list[np.ndarray], width: int, fill: Any, *, left: np.ndarray) -> np.ndarray:
    """`[rows, width]` int32, each row's tokens on the left or on the right of its padding, which takes from `fill`."""
    out = np.resize(np.asarray(fill, np.int32), (len(rows), width))
    for row, (tokens, padded_left) in enumerate(zip(rows, left, strict=True)):
        out[row, slice(width - len(tokens), None) if padded_left else slice(len(tokens))] = tokens
    return out


class Walk:
    """The rows of a case on their way through the cache; collects what every step shows."""

    def __init__(
        self,
        case: Case,
        params: dict,
        *,
        page_size: int,
        room: int = ROOM,
        fill: float = np.nan,
        step: Any = STEP,
        form: CacheFormat = PLAIN_CACHE,
    ):
        self.case, self.config, self.params, self.step = case, case.config, params, step
        batch, length = case.tokens.shape
        dtype = transformer.compute_dtype(params)
        self.cache = hostile_cache(self.config, batch, length + room, page_size, dtype=dtype, fill=fill, form=form)
        self.done = np.zeros(batch, int)
        layers, width = self.config.num_hidden_layers, self.config.hidden_size
        shape, vocab = (batch, length), self.config.vocab_size
        self.logits = np.zeros((*shape, vocab), np.float32)
        self.hidden = np.zeros((layers + 1, *shape, width), np.float32)
        self.topk = np.full((layers, *shape, case.k), -1, np.int32)
        self.experts = np.full((layers, *shape, self.config.num_experts_per_tok), -1, np.int32)
        self.mtp_logits = np.zeros((*shape, vocab), np.float32) if "mtp" in params else None
        self.mtp_topk = np.full((*shape, case.k), -1, np.int32) if "mtp" in params else None

    def run(self, size: int, policy: ExecutionPolicy, upto: np.ndarray | None = None) -> "Walk":
        """Takes every row to its length, or to `upto`, in steps of at most `size` tokens."""
        goal = self.case.lengths if upto is None else upto
        for counts in chunks(goal - self.done, size):
            self.take(counts, size, policy)
        return self

    def take(self, counts: np.ndarray, width: int, policy: ExecutionPolicy) -> tuple[Seen, np.ndarray]:
        """One step of `width` columns with `counts[b]` tokens of each row; also returns the positions."""
        case, rows = self.case, range(len(counts))
        ranges = [np.arange(self.done[b], self.done[b] + counts[b]) for b in rows]
        columns = [ranges[b] + case.first[b] for b in rows]
        left = (np.arange(len(counts)) + self.done) % 2 == 0
        nonsense = [case.unused_token, -1, 10**6]
        positions = pad(ranges, width, -1, left=left)
        tokens = pad([case.tokens[b, columns[b]] for b in rows], width, nonsense, left=left)
        following = pad([case.next_tokens[b, columns[b]] for b in rows], width, nonsense, left=left)
        seen, self.cache = self.step(self.params, self.config, tokens, following, positions, self.cache, policy=policy)
        self._note(seen, positions)
        self.done = self.done + counts
        return seen, positions

    def _note(self, seen: Seen, positions: np.ndarray) -> None:
        batch, width = positions.shape
        rows, places = np.nonzero(positions >= 0)
        columns = positions[rows, places] + self.case.first[rows]
        self.logits[rows, columns] = np.asarray(seen.logits, np.float32)[rows, places]
        self.hidden[:-1, rows, columns] = np.asarray(seen.layers.hidden, np.float32)[:, rows, places]
        self.hidden[-1, rows, columns] = np.asarray(seen.hidden, np.float32)[rows, places]
        topk = self._columns(jax.vmap(lambda s: s.sorted_indices(self._k(s)))(seen.layers.selection))
        self.topk[:, rows, columns, : topk.shape[-1]] = topk[:, rows, places]
        experts = np.asarray(seen.layers.experts).reshape(-1, batch, width, self.experts.shape[-1])
        self.experts[:, rows, columns] = np.sort(experts, -1)[:, rows, places]
        if self.mtp_logits is not None:
            self.mtp_logits[rows, columns] = np.asarray(seen.mtp_logits, np.float32)[rows, places]
            topk = self._columns(seen.mtp_selection.sorted_indices(self._k(seen.mtp_selection))[None])[0]
            self.mtp_topk[rows, columns, : topk.shape[-1]] = topk[rows, places]

    def _k(self, selection: Any) -> int:
        return min(self.case.k, (selection.mask if selection.indices is None else selection.indices).shape[-1])

    def _columns(self, topk: jax.Array) -> np.ndarray:
        """From positions to columns of the case."""
        topk = np.asarray(topk)
        return np.where(topk < 0, -1, topk + self.case.first[:, None, None])

    @property
    def seen(self) -> Run:
        experts = self.experts[sparse_layers(self.config)]
        experts = experts.reshape(len(experts), -1, experts.shape[-1])
        return Run(self.logits, self.hidden, self.topk, experts, self.mtp_logits, self.mtp_topk)

    def written(self) -> tuple[int, int]:
        """Slots of the two stacks that are no longer as they were."""
        return tuple(int((~np.isnan(np.asarray(a, np.float32))).all(-1).sum()) for a in self.stacks())

    def partly_written(self) -> bool:
        rows = [np.isnan(np.asarray(a, np.float32)) for a in self.stacks()]
        return any((row.any(-1) & ~row.all(-1)).any() for row in rows)

    def stacks(self) -> tuple[jax.Array, jax.Array]:
        return self.cache.latent, self.cache.index_keys

    def draft(
        self,
        policy: ExecutionPolicy,
        steps: int,
        *,
        width: int,
        counts: np.ndarray | None = None,
        draft_step: Any = DRAFT_STEP,
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """`counts` tokens of every row in one step, all that are left when None, then a chain of drafts from there.

        Returns the tokens of the chain, and what each of its steps selected.
        """
        seen, positions = self.take(self.case.lengths - self.done if counts is None else counts, width, policy)
        rows, last = np.arange(len(positions)), positions.argmax(1)
        state = np.asarray(seen.mtp_state)[rows, last][:, None]
        tokens = [np.asarray(seen.mtp_logits)[rows, last].argmax(-1)]
        chosen = seen.mtp_selection.rows(jnp.asarray(last, jnp.int32))
        sets = [np.asarray(chosen.sorted_indices(self._k(chosen)))]
        reused = chosen if self.config.index_share_for_mtp_iteration else None
        for number in range(1, steps):
            where = (self.done - 1 + number)[:, None].astype(np.int32)
            logits, state, self.cache, chosen = draft_step(
                self.params, self.config, state, tokens[-1][:, None].astype(np.int32), where, self.cache,
                policy=policy, selection=reused,
            )  # fmt: skip
            tokens.append(np.asarray(logits)[:, 0].argmax(-1))
            sets.append(np.asarray(chosen.sorted_indices(self._k(chosen))))
        return np.stack(tokens, 1), sets
