"""From logits to a token: greedy, temperature, the k likeliest, nucleus.

A row's draws depend on its seed and position alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from glm52_jax.inputs.values import number, seed_number, whole_number
from sharding.errors import InputError

# What a random number is for; each purpose at a position has its own.
SAMPLE, DRAFT, ACCEPT = 0, 1, 2


@flax.struct.dataclass
class Sampling:
    """How each sequence of a batch is sampled.

    Attributes:
        temperature: float32 `[batch]`; 0 takes the most likely token.
        top_k: int32 `[batch]`; so many of the most likely tokens are kept, all of them where it is 0.
        top_p: float32 `[batch]`; of those that `top_k` keeps, the smallest set of most likely tokens that has at least
            this share of their probability is kept.
        seed: uint32 `[batch]`.
    """

    temperature: jax.Array
    top_p: jax.Array
    seed: jax.Array
    top_k: jax.Array

    @classmethod
    def of(cls, batch: int, temperature: float, top_p: float, seeds: Sequence[int], top_k: int = 0) -> Sampling:
        """The same temperature, `top_k` and nucleus for every sequence, a seed for each.

        Raises:
            InputError: a negative temperature, a `top_p` outside (0, 1], a negative `top_k`, a seed that is no 32-bit
                number.
        """
        if not 0 <= number(temperature, "temperature", "a number of at least 0") < float("inf"):
            raise InputError(f"temperature is {temperature}, expected a number of at least 0")
        if not 0 < number(top_p, "top_p", "a number above 0 and at most 1") <= 1:
            raise InputError(f"top_p is {top_p}, expected a number above 0 and at most 1")
        top_k = whole_number(top_k, "top_k", 0, 2**31 - 1)
        seeds = [seed_number(seed) for seed in seeds]
        return cls(
            jnp.full(batch, temperature, jnp.float32),
            jnp.full(batch, top_p, jnp.float32),
            jnp.asarray(np.asarray(seeds, np.uint32)),
            jnp.full(batch, top_k, jnp.int32),
        )


def probabilities(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """The distribution that a token is drawn from, float32 of the shape of `logits` `[batch, ..., vocab]`.

    At temperature 0 it is one at the most likely token (the lowest id of equals).
    """
    shape = (-1, *[1] * (logits.ndim - 1))
    temperature, top_k, top_p = (x.reshape(shape) for x in (sampling.temperature, sampling.top_k, sampling.top_p))
    greedy = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    scaled = jax.nn.softmax(logits / jnp.where(temperature > 0, temperature, 1.0), axis=-1)
    return jnp.where(temperature > 0, _kept(scaled, top_k, top_p), greedy)


def _kept(probability: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """What `top_k` and then `top_p` leave of a distribution, made to sum to one."""
    order = jnp.argsort(-probability, axis=-1, stable=True)
    ranked = jnp.take_along_axis(probability, order, axis=-1)
    among = (jnp.arange(ranked.shape[-1]) < top_k) | (top_k == 0)
    whole = jnp.where(top_k == 0, 1.0, jnp.sum(jnp.where(among, ranked, 0.0), axis=-1, keepdims=True))
    # A token stays while those before it hold less than top_p, so the first one always does.
    kept = among & (jnp.cumsum(ranked, axis=-1) - ranked < top_p * whole)
    kept = jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
    probability = jnp.where(kept, probability, 0.0)
    return probability / jnp.sum(probability, axis=-1, keepdims=True)


def draw(probability: jax.Array, sampling: Sampling, positions: jax.Array, purpose: int) -> jax.Array:
    """One token a row, int32 `[batch]`, of distributions `[batch, vocab]`, for the position that it will stand at."""
    keys = _keys(sampling.seed, positions, purpose)
    return jax.vmap(jax.random.categorical)(keys, jnp.log(probability)).astype(jnp.int32)


def uniform(sampling: Sampling, positions: jax.Array, purpose: int) -> jax.Array:
    """float32 in [0, 1), one for each position of `[batch, n]`."""
    seeds = jnp.broadcast_to(sampling.seed[:, None], positions.shape)
    keys = jax.vmap(lambda s, p: _keys(s, p, purpose))(seeds, positions)
    return jax.vmap(jax.vmap(jax.random.uniform))(keys)


def _keys(seed: jax.Array, position: jax.Array, purpose: int) -> jax.Array:
    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), purpose)

    return jax.vmap(one)(seed, position)


def next_token(logits: jax.Array, sampling: Sampling | None, positions: jax.Array) -> jax.Array:
    """The token after each row of `logits` `[batch, vocab]`; the most likely one when `sampling` is None."""
    if sampling is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return draw(probabilities(logits, sampling), sampling, positions, SAMPLE)
