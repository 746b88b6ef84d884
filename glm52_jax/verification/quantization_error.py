"""Error of each quantised form: the same texts in float32 with nothing quantised, and with one thing after another.

Two things are measured. *One layer*: every layer gets the stream that the plain model has there, so that what is seen
is the error that one layer adds. *Whole model*: the form runs by itself from the first token to the logits, so that a
position or an expert that one layer chooses otherwise has its effect on all later ones. A small random model has many
choices that are nearly ties, and there the second is large for any rounding, BF16 included: it is the yardstick.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from glm52_jax.cache.cache_format import PLAIN_CACHE, CacheFormat
from glm52_jax.cache.page_sharding import TokenPositions
from glm52_jax.cache.paged_cache import PagedCache
from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.checkpoint.load.loader import load_params
from glm52_jax.config import FULL, ModelConfig, QuantizationConfig
from glm52_jax.kernels.lib.layers import Rotary, rms_norm
from glm52_jax.model import embedding
from glm52_jax.model.decoder_layer import ExecutionPolicy, LayerIndex, decoder_layer
from glm52_jax.model.transformer import Params, model_logits
from sharding.errors import InputError
from sharding.jax_settings import with_project_settings
from sharding.layout import SINGLE

BLOCK = (128, 128)


@dataclasses.dataclass(frozen=True)
class QuantizationError:
    """How far a form is from the plain float32 model, over the tokens that are no padding.

    Attributes:
        form: what was quantised.
        layer: what one layer adds to the stream: median over layers and tokens of the relative error of that.
        layer_sets: share of selections of one layer (a query of a full layer with more than `index_topk` positions to
            choose from) that are the plain model's set; None where no query has as many.
        layer_kept: mean share of such a selection's positions that are in the plain one's.
        logits: of the whole model: root mean square of the difference, relative to that of the centred logits.
        divergence: mean Kullback-Leibler divergence of the next token's distribution, in nats.
        top: share of tokens whose most likely next token is the same.
        sets, kept: as above, of the whole model.
    """

    form: str
    layer: float
    layer_sets: float | None
    layer_kept: float | None
    logits: float
    divergence: float
    top: float
    sets: float | None
    kept: float | None


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the table: what is done to the parameters, and the format of the cache."""

    name: str
    weights: str | None = None  # a `quant_method`, or a type to round to
    cache: CacheFormat = PLAIN_CACHE


def variants(scales: tuple[float, ...], *, rotation: bool) -> list[Variant]:
    """The rows of the table.

    Args:
        scales: of the latent rows of each layer, found on the texts themselves.
        rotation: whether index keys have a Hadamard rotation, which needs a width that is a power of two.
    """
    keys = {"fp8": "FP8", "fp8_rotated": "FP8, Hadamard"} if rotation else {"fp8": "FP8"}
    cache = CacheFormat("fp8_groups", "fp8")
    return [
        Variant("weights BF16", "bfloat16"),
        Variant("weights FP8 blocks", "fp8"),
        Variant("weights INT8 blocks", "blockwise_int8"),
        Variant("latent FP8 groups", cache=CacheFormat("fp8_groups")),
        Variant("latent FP8 tensor, scale 1", cache=CacheFormat("fp8_tensor")),
        Variant("latent FP8 tensor, calibrated", cache=CacheFormat("fp8_tensor", latent_scales=scales)),
        *(Variant(f"index keys {word}", cache=CacheFormat(index_keys=name)) for name, word in keys.items()),
        Variant("cache FP8 (groups, keys)", cache=cache),
        Variant("weights and cache FP8", "fp8", cache),
    ]


@with_project_settings
def measure(params: Params, config: ModelConfig, tokens: np.ndarray, mask: np.ndarray) -> Iterator[QuantizationError]:
    """Yields a row of the table after another.

    Args:
        params: plain float32.
        tokens: int `[batch, length]`.
        mask: bool `[batch, length]`, False for padding.

    Raises:
        InputError: the output of the plain model, or of a form, is NaN or infinite, so that no error can be stated.
    """
    whole, config = config, config.without_mtp()
    order = np.argsort(~mask, axis=1, stable=True)  # real tokens first
    tokens = np.take_along_axis(tokens, order, axis=1).astype(np.int32)
    columns = np.arange(tokens.shape[1], dtype=np.int32)
    positions = np.where(columns < mask.sum(axis=1, keepdims=True), columns, -1).astype(np.int32)
    nothing = np.zeros((config.num_hidden_layers, *tokens.shape, config.hidden_size), np.float32)
    plain = _run(params, config, tokens, positions, nothing, PLAIN_CACHE)
    _refuse_no_numbers("the plain model's", plain, positions)
    scales = tuple(float(value) / 448 if value > 0 else 1.0 for value in np.asarray(plain.largest))
    rotation = config.index_head_dim & (config.index_head_dim - 1) == 0
    held: dict[str | None, Params] = {None: params}
    for form in variants(scales, rotation=rotation):
        if form.weights not in held:
            held = {None: params, form.weights: rounded(params, whole, str(form.weights))}
        found = _run(held[form.weights], config, tokens, positions, plain.hidden, form.cache)
        _refuse_no_numbers(f"with {form.name}, the model's", found, positions)
        yield _compare(form.name, config, plain, found, positions)


def rounded(params: Params, config: ModelConfig, how: str) -> Params:
    """float32 parameters as they come back from a checkpoint that stores them so.

    Args:
        how: a `quant_method`, in blocks of 128 x 128 and with the policy of the published FP8 files, or the name of a
            type, for all but the float32 parameters.
    """
    plain = dataclasses.replace(config if "mtp" in params else config.without_mtp(), quantization=None)
    if how in ("bfloat16", "float16"):
        stored = dataclasses.replace(plain, dtype=how)
    else:
        stored = dataclasses.replace(plain, dtype="float32", quantization=QuantizationConfig(BLOCK, method=how))
    with tempfile.TemporaryDirectory(prefix="glm52-precision-") as folder:
        write_checkpoint(Path(folder), stored, params)
        return load_params(folder, dtype="float32")


class _Seen(NamedTuple):
    """A run: the whole model, and each layer on the recorded stream.

    Attributes:
        logits: float32 `[batch, length, vocab]`.
        hidden: `[layers, batch, length, embed]`, the stream before each layer.
        added: the same shape, what each layer adds to it.
        topk: int32 `[layers, batch, length, k]`, ascending, then -1.
        layer_added, layer_topk: the same of each layer on the recorded stream.
        largest: `[layers]`, largest value of a latent row; of a plain cache only.
    """

    logits: jax.Array
    hidden: jax.Array
    added: jax.Array
    topk: jax.Array
    layer_added: jax.Array
    layer_topk: jax.Array
    largest: jax.Array


@partial(jax.jit, static_argnames=("config", "form"))
def _run(
    params: Params, config: ModelConfig, tokens: jax.Array, positions: jax.Array, recorded: jax.Array, form: CacheFormat
) -> _Seen:
    """Both runs at once, as two halves of one batch; `recorded` is the stream before each layer."""
    batch, length = tokens.shape
    variants = ExecutionPolicy.best(length)
    positions = jnp.concatenate([positions, positions])
    cache = PagedCache.create(config, 2 * batch, length, dtype=jnp.dtype(jnp.float32), page_size=length, form=form)
    rotary = Rotary.at(positions, config.qk_rope_head_dim, config.rope_theta)
    places = TokenPositions.of(SINGLE, cache, positions)
    k = min(config.index_topk, length)

    def body(carry: Any, step: tuple[LayerIndex, jax.Array]) -> tuple[Any, Any]:
        (free, cache, selection), (place, stream) = carry, step
        before = jnp.concatenate([free, stream])
        after, cache, selection, _ = decoder_layer(
            params, config, place, before, rotary, places, cache, selection, variants
        )
        return (after[:batch], cache, selection), (free, after - before, selection.sorted_indices(k))

    free = embedding.embed_tokens(params["embed"], tokens, jnp.dtype(jnp.float32))
    start = (free, cache, variants.no_selection(config, cache, 2 * batch, length))
    (free, cache, _), (hidden, added, topk) = jax.lax.scan(body, start, (LayerIndex.plan(config), recorded))
    latent = cache.latent
    return _Seen(
        logits=model_logits(params, rms_norm(free, params["norm"], config.rms_norm_eps)),
        hidden=hidden,
        added=added[:, :batch],
        topk=topk[:, :batch],
        layer_added=added[:, batch:],
        layer_topk=topk[:, batch:],
        largest=jnp.max(jnp.abs(latent[:, :batch]), axis=(1, 2, 3)) if isinstance(latent, jax.Array) else jnp.zeros(0),
    )


def _refuse_no_numbers(whose: str, seen: _Seen, positions: np.ndarray) -> None:
    real = positions >= 0
    for values in (seen.logits[real], seen.layer_added[:, real]):
        if not bool(jnp.all(jnp.isfinite(values))):
            raise InputError(
                f"{whose} output is NaN or infinite, so there is no error to state; a weight is damaged or overflows "
                "(glm52 verify compares every weight with its source)"
            )


def _compare(name: str, config: ModelConfig, plain: _Seen, found: _Seen, positions: np.ndarray) -> QuantizationError:
    """The row of one form."""
    real = positions >= 0
    added, other = (np.asarray(a, np.float64)[:, real] for a in (plain.added, found.layer_added))
    expected, logits = (np.asarray(seen.logits, np.float64)[real] for seen in (plain, found))
    centred = expected - expected.mean(axis=-1, keepdims=True)
    log_p, log_q = (_log_softmax(values) for values in (expected, logits))
    layer_sets, layer_kept = _selections(config, plain.topk, found.layer_topk, positions)
    sets, kept = _selections(config, plain.topk, found.topk, positions)
    return QuantizationError(
        name,
        layer=float(np.median(np.linalg.norm(other - added, axis=-1) / np.linalg.norm(added, axis=-1))),
        layer_sets=layer_sets,
        layer_kept=layer_kept,
        logits=float(np.sqrt(np.mean(np.square(logits - expected)) / np.mean(np.square(centred)))),
        divergence=float(np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1))),
        top=float(np.mean(expected.argmax(-1) == logits.argmax(-1))),
        sets=sets,
        kept=kept,
    )


def _selections(
    config: ModelConfig, plain: jax.Array, found: jax.Array, positions: np.ndarray
) -> tuple[float | None, float | None]:
    full = [layer for layer, kind in enumerate(config.indexer_types) if kind == FULL]
    chosen = positions >= config.index_topk  # others attend to all there is
    if not chosen.any():
        return None, None
    a, b = (np.asarray(topk)[full][:, chosen].reshape(-1, topk.shape[-1]) for topk in (plain, found))
    same = np.all(a == b, axis=-1)
    kept = [len(np.intersect1d(x, y)) / len(x) for x, y in zip(a, b, strict=True)]
    return float(np.mean(same)), float(np.mean(kept))


def _log_softmax(values: np.ndarray) -> np.ndarray:
    values = values - values.max(axis=-1, keepdims=True)
    return values - np.log(np.exp(values).sum(axis=-1, keepdims=True))
