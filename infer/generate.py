"""Generation: prompts in, tokens out, as they come.

`generate` is the whole of it for a program; `Generation` yields tokens step by step for whoever streams them, and keeps
the figures that a user wants to see.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from glm52_jax.cache.cache_format import PLAIN_CACHE, CacheFormat
from glm52_jax.config import ModelConfig
from glm52_jax.inputs.values import seed_number, token_row, whole_number
from glm52_jax.kernels import resolve_backend
from glm52_jax.params.sharding import param_specs
from infer.finite_check import check_selection_scores, refuse_not_finite
from infer.sampling import Sampling
from infer.speculative import MAX_DRAFT_TOKENS
from infer.steps import StepProvider
from sharding.errors import InputError
from sharding.jax_settings import with_project_settings
from sharding.layout import SINGLE, Layout

CHUNK = 512
"""Tokens of each prompt in a prefill step, unless the prompts are shorter."""

STOP, LENGTH = "stop", "length"


@dataclasses.dataclass
class GenerationStats:
    """What a generation took; seconds of the first step of a kind, which compiles it, are counted apart.

    Attributes:
        prompt_tokens, new_tokens: tokens read and made, over all sequences.
        prefill_seconds, decode_seconds: time in steps after the first of each kind.
        prefill_tokens, decode_tokens: tokens of those steps.
        compile_seconds: time of the first step of each kind.
        rounds: verify steps, counted once a sequence.
        accepted: for each draft position, how many drafts stood.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    compile_seconds: float = 0.0
    rounds: int = 0
    accepted: list[int] = dataclasses.field(default_factory=list)

    @property
    def tokens_per_round(self) -> float:
        """Mean number of tokens a verify step gave a sequence, its own token included; 0 without drafts."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 0.0


def generate(
    params: dict[str, Any],
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    draft_tokens: int = 0,
    seed: int | Sequence[int] = 0,
    *,
    top_p: float = 1.0,
    top_k: int = 0,
    stop_ids: Sequence[int] | None = None,
    chunk: int = CHUNK,
    backend: str | None = None,
    cache_format: CacheFormat | None = None,
    layout: Layout | None = None,
) -> list[list[int]]:
    """Continues every prompt.

    Args:
        params: from `load_params`.
        prompts: token ids of each prompt, of any lengths.
        max_new_tokens: how many tokens to make at most.
        temperature: 0 takes the most likely token.
        draft_tokens: drafts a step by the MTP layer, 0 to 7. The greedy result is the same for any number, the
            distribution of a sampled one too.
        seed: `prompts[i]` is sampled with `seed + i`, or with `seed[i]`, whatever its neighbours.
        top_p: the nucleus that is sampled from.
        top_k: how many of the most likely tokens are sampled from; all of them when 0.
        stop_ids: ids that end a text; the config's when None, none when empty.
        chunk: tokens of each prompt in a prefill step.
        backend: backend of the kernels; the best for the platform when None.
        cache_format: how the cache keeps its rows; plain when None.
        layout: how the work is divided over all devices, as `params` are; one device when None.

    Returns:
        The new tokens of each prompt, without the one that ended it.

    Raises:
        InputError: an empty prompt, a token that the vocabulary has not, more tokens than the model has positions for,
            drafts without an MTP layer, a layout that does not divide the model or whose rules no step computes right,
            all before any work; or the model's output is NaN or infinite, and from which position on. The first prompt
            is prompt 1 in what it says.
    """
    generation = Generation(
        params,
        config,
        prompts,
        max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        draft_tokens=draft_tokens,
        seed=seed,
        stop_ids=stop_ids,
        chunk=chunk,
        backend=backend,
        cache_format=cache_format,
        layout=layout,
    )
    texts: list[list[int]] = [[] for _ in generation.prompts]
    for row, tokens in generation:
        texts[row].extend(tokens)
    return texts


class Generation:
    """One run over a batch of prompts: iterate for `(row, new tokens)`; arguments as in `generate`.

    All of a request is checked here, and nothing of it needs a weight: `params` may be shapes (`abstract_params`) until
    the first token is asked for.

    Attributes:
        params: to be replaced by the weights before the first token, where shapes were given.
        figures: grow while it runs.
        reasons: why each row ended, "stop" or "length"; None while it runs.
    """

    @with_project_settings
    def __init__(
        self,
        params: dict[str, Any],
        config: ModelConfig,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        draft_tokens: int = 0,
        seed: int | Sequence[int] = 0,
        stop_ids: Sequence[int] | None = None,
        chunk: int = CHUNK,
        backend: str | None = None,
        cache_format: CacheFormat | None = None,
        layout: Layout | None = None,
    ):
        self.params, self.max_new_tokens = params, whole_number(max_new_tokens, "max_new_tokens")
        draft_tokens = whole_number(draft_tokens, "draft_tokens", 0, MAX_DRAFT_TOKENS)
        self.prompts = _checked_prompts(config, prompts, self.max_new_tokens)
        longest = max((len(p) for p in self.prompts), default=1)
        seeds = _seeds(seed, len(self.prompts))
        layout = layout or SINGLE
        param_specs(params, config, layout)  # says what the layout cannot divide
        # Rows of nothing but padding make the batch a multiple of the devices that share it.
        self._rows = -(-len(self.prompts) // layout.parts("batch")) * layout.parts("batch")
        sampling = Sampling.of(self._rows, temperature, top_p, seeds + [0] * (self._rows - len(self.prompts)), top_k)
        self.sampling = sampling if temperature > 0 else None
        self.stop_ids = frozenset(config.eos_token_ids) if stop_ids is None else _checked_stop_ids(stop_ids)
        self.provider = StepProvider.of(
            params,
            config,
            batch=self._rows,
            capacity=min(_rounded(longest + self.max_new_tokens), config.max_position_embeddings),
            chunk=_chunk(chunk, longest, layout.parts("tokens")),
            draft_tokens=draft_tokens,
            sampled=self.sampling is not None,
            backend=backend,
            cache_format=cache_format or PLAIN_CACHE,
            layout=layout,
            mesh=layout.mesh() if layout.devices > 1 else None,
        )
        resolve_backend(backend, self.provider.platform, self.provider.kind)
        self.provider.state_shapes()
        self.stats = GenerationStats(accepted=[0] * draft_tokens)
        self.reasons: list[str | None] = [None] * len(self.prompts)
        self._made = [0] * len(self.prompts)
        self._timed: set[str] = set()

    @with_project_settings
    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        if not len(self.prompts) or not self.max_new_tokens:
            self.reasons = [LENGTH] * len(self.prompts)
            return
        check_selection_scores(self.params)
        state = self.provider.state()
        state, first = self._prefill(state)
        yield from self._emit(first[:, None], np.zeros(self._rows, np.int64))
        drafting = self.provider.draft_tokens > 0
        step = self.provider.verify(self.params) if drafting else self.provider.decode(self.params)
        while None in self.reasons:
            active = np.array([reason is None for reason in self.reasons] + [False] * (self._rows - len(self.prompts)))
            start = time.perf_counter()
            state, *found = step(self.params, state, *self.provider.device_put_args("_decode", active, self.sampling))
            tokens, *counts = (np.asarray(f) for f in found)
            seconds = time.perf_counter() - start
            accepted = counts[0] if drafting else np.zeros(len(active), np.int64)
            self._count_decode(seconds, active, accepted)
            yield from self._emit(tokens.reshape(len(active), -1), accepted)

    @property
    def figures(self) -> GenerationStats:
        """The former name of `stats`."""
        return self.stats

    def end(self, row: int) -> None:
        """Ends a row before its time, for instance at a stop string."""
        self.reasons[row] = STOP

    def _prefill(self, state: Any) -> tuple[Any, np.ndarray]:
        """All prompts chunk by chunk, right-padded; the token after each of them."""
        step, chunk = self.provider.prefill(self.params), self.provider.chunk
        lengths = np.array([len(p) for p in self.prompts] + [0] * (self._rows - len(self.prompts)))
        padded = np.full((len(lengths), -(-lengths.max() // chunk) * chunk + 1), -1, np.int32)
        for row, prompt in enumerate(self.prompts):
            padded[row, : len(prompt)] = prompt
        first = np.zeros(len(lengths), np.int32)
        for begin in range(0, padded.shape[1] - 1, chunk):
            columns = np.arange(begin, begin + chunk, dtype=np.int32)
            positions = np.where(columns < lengths[:, None], columns, -1).astype(np.int32)
            last = np.where((lengths > begin) & (lengths <= begin + chunk), lengths - 1 - begin, -1).astype(np.int32)
            start = time.perf_counter()
            chunk_of = padded[:, columns], positions, padded[:, columns + 1]
            state, token = step(
                self.params, state, *self.provider.device_put_args("_prefill", *chunk_of, last, self.sampling)
            )
            token = np.asarray(token)
            for row, prompt in enumerate(self.prompts):
                refuse_not_finite(row, int(token[row]), len(prompt))
            first = np.where(last >= 0, token, first)
            self._count_prefill(time.perf_counter() - start, int((positions >= 0).sum()))
        return state, first

    def _emit(self, tokens: np.ndarray, accepted: np.ndarray) -> Iterator[tuple[int, list[int]]]:
        """Yields what each running row got, up to a stop id or its last token, and ends the rows that are through."""
        for row, reason in enumerate(self.reasons):
            if reason is not None:
                continue
            new = []
            for token in tokens[row, : accepted[row] + 1].tolist():
                refuse_not_finite(row, token, len(self.prompts[row]))
                if token in self.stop_ids:
                    self.reasons[row] = STOP
                    break
                new.append(token)
                if self._made[row] + len(new) == self.max_new_tokens:
                    self.reasons[row] = LENGTH
                    break
            self._made[row] += len(new)
            self.stats.new_tokens += len(new)
            yield row, new

    def _count_prefill(self, seconds: float, tokens: int) -> None:
        self.stats.prompt_tokens += tokens
        if self._first("prefill", seconds):
            return
        self.stats.prefill_seconds += seconds
        self.stats.prefill_tokens += tokens

    def _count_decode(self, seconds: float, active: np.ndarray, accepted: np.ndarray) -> None:
        for position in range(self.provider.draft_tokens):
            self.stats.accepted[position] += int((accepted[active] > position).sum())
        if self.provider.draft_tokens:
            self.stats.rounds += int(active.sum())
        if self._first("decode", seconds):
            return
        self.stats.decode_seconds += seconds
        self.stats.decode_tokens += int((accepted[active] + 1).sum())

    def _first(self, kind: str, seconds: float) -> bool:
        if kind in self._timed:
            return False
        self._timed.add(kind)
        self.stats.compile_seconds += seconds
        return True


def _chunk(chunk: int, longest: int, parts: int) -> int:
    """`chunk`, or for shorter prompts the power of two that holds them, so that few lengths compile anew.

    The devices that divide it have as many tokens each.
    """
    chunk = whole_number(chunk, "chunk", 1)
    chunk = min(chunk, max(16, 1 << (longest - 1).bit_length())) if chunk > 16 else chunk
    return -(-chunk // parts) * parts


def _rounded(tokens: int) -> int:
    """A capacity of at most an eighth more, so that the lengths of a conversation share a few compiled steps."""
    step = max(64, (1 << (tokens - 1).bit_length()) // 8)
    return -(-tokens // step) * step


def _checked_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[np.ndarray]:
    """The token ids of each prompt, int32 `[length]`; rows of an array are prompts too."""
    if (
        isinstance(prompts, str | bytes | dict)
        or not hasattr(prompts, "__len__")
        or not hasattr(prompts, "__getitem__")
    ):
        raise InputError("prompts holds text or single numbers, expected a list of token ids for each prompt")
    if getattr(prompts, "ndim", 2) != 2:
        raise InputError("prompts is an array of another shape, expected a list of token ids for each prompt")
    if any(isinstance(p, str | bytes) or not hasattr(p, "__len__") for p in prompts):
        raise InputError("prompts holds text or single numbers, expected a list of token ids for each prompt")
    checked = [token_row(prompt, config.vocab_size, f"prompt {row + 1}") for row, prompt in enumerate(prompts)]
    for row, prompt in enumerate(checked):
        if len(prompt) + max_new_tokens > config.max_position_embeddings:
            raise InputError(
                f"prompt {row + 1} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}, together more than "
                f"the {config.max_position_embeddings} positions of the model (max_position_embeddings)"
            )
    return checked


def _checked_stop_ids(stop_ids: Sequence[int]) -> frozenset[int]:
    if isinstance(stop_ids, str | bytes) or not hasattr(stop_ids, "__iter__"):
        raise InputError(f"stop_ids is {stop_ids!r}, expected a list of token ids")
    return frozenset(whole_number(stop, "an id of stop_ids") for stop in stop_ids)


def _seeds(seed: int | Sequence[int], prompts: int) -> list[int]:
    """A seed for each prompt."""
    if isinstance(seed, str | bytes) or not isinstance(seed, Sequence | np.ndarray) or not np.ndim(seed):
        first = seed_number(seed)
        return [first + row for row in range(prompts)]
    seeds = [seed_number(one, "a number of seed") for one in seed]
    if len(seeds) != prompts:
        raise InputError(f"seed has {len(seeds)} entries for {prompts} prompts")
    return seeds
