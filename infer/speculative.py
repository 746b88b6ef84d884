"""Drafts by the MTP layer and what becomes of them: several tokens a step, none of them other than without drafts.

A chain of drafts starts from the hidden states of the tokens that the last step verified; the model then looks at all
drafts at once and keeps those it would have chosen. Sampled drafts are kept or replaced so that the result has the
model's own distribution.

Source: speculative sampling (arXiv 2302.01318); the chain as in `glm52_jax.model.mtp`.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from glm52_jax.cache.paged_cache import PagedCache
from glm52_jax.config import ModelConfig
from glm52_jax.model import mtp
from glm52_jax.model.decoder_layer import ExecutionPolicy
from infer.finite_check import is_finite, mark_not_finite
from infer.sampling import ACCEPT, DRAFT, SAMPLE, Sampling, draw, probabilities, uniform

MAX_DRAFT_TOKENS = 7


@flax.struct.dataclass
class DraftWindow:
    """The tokens that the last step verified, not yet seen by the MTP layer; room for one more than there are drafts.

    Attributes:
        hidden: `[batch, room, embed]`, of the model after its final norm.
        tokens: int32 `[batch, room]`, the token after each of them.
        positions: int32 `[batch, room]` of the hidden states, real ones first, -1 for the rest.
    """

    hidden: jax.Array
    tokens: jax.Array
    positions: jax.Array

    @classmethod
    def empty(cls, batch: int, room: int, width: int, dtype: jnp.dtype) -> DraftWindow:
        return cls(
            jnp.zeros((batch, room, width), dtype),
            jnp.zeros((batch, room), jnp.int32),
            jnp.full((batch, room), -1, jnp.int32),
        )


def draft(
    params: dict[str, Any],
    config: ModelConfig,
    window: DraftWindow,
    cache: PagedCache,
    count: int,
    sampling: Sampling | None,
    policy: ExecutionPolicy,
) -> tuple[jax.Array, jax.Array | None, jax.Array, PagedCache]:
    """A chain of `count` drafts a sequence.

    Returns:
        Drafts int32 `[batch, count]`, the distributions they were drawn from `[batch, count, vocab]` (None when
        greedy), whether all logits of a sequence's drafts were finite (bool `[batch]`), and the cache with the MTP
        layer's rows of the window.
    """
    hidden, cache, selection = mtp.mtp_layer(
        params, config, window.hidden, window.tokens, window.positions, cache, policy
    )
    last = jnp.maximum(jnp.sum(window.positions >= 0, axis=1) - 1, 0)
    state = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
    position = jnp.take_along_axis(window.positions, last[:, None], axis=1)
    shared = selection.rows(last) if config.index_share_for_mtp_iteration else None
    drafts, distributions, whole = [], [], []
    for step in range(count):
        if step:
            position = jnp.where(position >= 0, position + 1, -1)
            state, cache, _ = mtp.mtp_layer(
                params, config, state, drafts[-1][:, None], position, cache, policy, selection=shared
            )
        logits = mtp.mtp_logits(params, state[:, 0], policy.layout)
        whole.append(is_finite(logits))
        if sampling is None:
            drafts.append(jnp.argmax(logits, axis=-1).astype(jnp.int32))
        else:
            distributions.append(probabilities(logits, sampling))
            # A hidden state at p with the token at p + 1 predicts the token at p + 2.
            drafts.append(draw(distributions[-1], sampling, position[:, 0] + 2, DRAFT))
    drawn_from = jnp.stack(distributions, 1) if distributions else None
    return jnp.stack(drafts, 1), drawn_from, jnp.all(jnp.stack(whole), axis=0), cache


def accept(
    logits: jax.Array,
    drafts: jax.Array,
    distributions: jax.Array | None,
    sampling: Sampling | None,
    position: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The drafts that stand, then one token of the model's own.

    Args:
        logits: float32 `[batch, drafts + 1, vocab]`, of the last verified token and of each draft after it.
        drafts: int32 `[batch, drafts]`.
        distributions: what they were drawn from; None when greedy.
        position: int32 `[batch]` of the first draft.

    Returns:
        tokens int32 `[batch, drafts + 1]`, of which the first `accepted + 1` count; accepted int32 `[batch]`. Where
        logits are not finite no further draft stands, and the token is a mark, see `infer.finite_check`.
    """
    whole = is_finite(logits)
    before = position[:, None] - 1 + jnp.arange(drafts.shape[1] + 1)
    if sampling is None or distributions is None:
        own = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return mark_not_finite(own, whole, before), _leading((own[:, :-1] == drafts) & whole[:, :-1])
    count = drafts.shape[1]
    target = probabilities(logits, sampling)
    at_draft = jnp.take_along_axis(target[:, :-1], drafts[..., None], axis=-1)[..., 0]
    drawn_with = jnp.take_along_axis(distributions, drafts[..., None], axis=-1)[..., 0]
    places = position[:, None] + jnp.arange(count)
    accepted = _leading((uniform(sampling, places, ACCEPT) * drawn_with < at_draft) & whole[:, :-1])
    # After a refusal the token comes from what the target has beyond the draft's distribution; after none, from the
    # target's last row.
    beyond = jnp.concatenate([jnp.maximum(target[:, :-1] - distributions, 0.0), target[:, -1:]], axis=1)
    residual = jnp.take_along_axis(beyond, accepted[:, None, None], axis=1)[:, 0]
    plain = jnp.take_along_axis(target, accepted[:, None, None], axis=1)[:, 0]
    residual = jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > 0, residual, plain)
    own = draw(residual, sampling, position + accepted, SAMPLE)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    own = mark_not_finite(own[:, None], whole, before)
    return jnp.where(jnp.arange(count + 1) == accepted[:, None], own, padded), accepted


def _leading(flags: jax.Array) -> jax.Array:
    """Number of true values before the first false one, int32 `[batch]`."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1)
