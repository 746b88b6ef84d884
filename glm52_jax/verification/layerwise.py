"""`glm52 verify --layers`: this project's layers on a target's weights beside `transformers`' on the source's.

Both sides get the same float32 input, and the next layer that is listed gets the reference's output of the one before,
so that a difference is found in the layer and the stage where it arises. One layer of one side is in memory at a time.
It must not know how either side computes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from glm52_jax.checkpoint.sources.converted import ConvertedCheckpoint
from glm52_jax.checkpoint.sources.open_source import Checkpoint
from glm52_jax.checkpoint.sources.published import CheckpointContents
from glm52_jax.config import SHARED, SPARSE, ModelConfig
from glm52_jax.inputs.sizes import short_size
from glm52_jax.verification.layer_stages import STAGES, OwnLayers, Stages, held_bytes, layer_params
from sharding.errors import InputError
from sharding.jax_settings import with_project_settings

if TYPE_CHECKING:
    from glm52_jax.verification.layer_reference import ReferenceLayers

BOUND = 1e-4
"""What rounding may change a value by, of its own size and of the RMS of its token's values.

Sums of up to 16,384 float32 products in another order differ by about sqrt(16,384) * 2**-24 = 8e-6 of their RMS, and
a stage is a few of them after another: ten times that."""
_ANGLE = 2.0**-22  # of a rotary angle: the frequency, its inverse and the product, each rounded to 24 bits
BEYOND = 64
"""Tokens beyond `index_topk`, so that indexers have something to leave out."""
_CHOICES = {"selected set": "index scores", "chosen experts": "biased scores"}


@dataclasses.dataclass(frozen=True)
class StageDifference:
    """One stage of one layer.

    Attributes:
        where: the layer, or what comes before the layers.
        stage: see `layer_stages.STAGES`.
        largest: the largest absolute difference; of a choice, the number of rows that differ.
        relative: the largest difference by the RMS of the reference; of a choice, the share of rows that differ.
        share: the largest difference by what rounding explains; more than one is beyond rounding.
        worst: the difference where `share` is largest, and what was expected there at most.
        note: what a user should know.
    """

    where: str
    stage: str
    largest: float
    relative: float
    share: float
    worst: tuple[float, float]
    note: str = ""

    @property
    def beyond(self) -> bool:
        return not self.share <= 1

    @property
    def is_choice(self) -> bool:
        return self.stage in _CHOICES

    @property
    def figures(self) -> tuple[float, float, float]:
        return self.largest, self.relative, self.share

    @property
    def sentence(self) -> str:
        if self.is_choice:
            return f"{self.where}, {self.stage}: {self.note}"
        return f"{self.where}, {self.stage}: |d| {self.worst[0]:.1e}, expected at most {self.worst[1]:.1e}"


@dataclasses.dataclass(frozen=True)
class LayerComparison:
    """A comparison that has been found possible.

    Attributes:
        tokens: int `[tokens]`, what the layers run on.
        layers: in the order in which they run; the MTP layer is number `num_hidden_layers`.
        notes: sentences a user should read before it starts.
    """

    target: Checkpoint
    contents: CheckpointContents
    source: Checkpoint
    source_config: ModelConfig
    tokens: np.ndarray
    layers: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def memory_bound(self) -> int:
        """Anonymous memory that the comparison stays under: the larger side of the largest layer, on this host."""
        return _PROCESS + max(max(self._ours(layer), self._theirs(layer)) for layer in self.layers)

    def _ours(self, layer: int) -> int:
        """Parameters as they are stored, two matrices in float32, and the activations."""
        held = held_bytes(self.target, self.contents, layer)
        return held + 8 * _largest_matrix(self.contents.config, layer) + _activations(self, scores=1)

    def _theirs(self, layer: int) -> int:
        """Parameters in float32, of the experts one at a time, a matrix being read, and the activations."""
        plain = (p for p in layer_params(self.source_config, layer) if p.experts is None)
        matrices = sum(p.elements for p in plain) + 2 * _largest_matrix(self.source_config, layer)
        return 4 * matrices + _activations(self, scores=3)


_PROCESS = 2**30  # what the libraries and their compilers hold, torch and JAX among them


def plan(
    target: Checkpoint, source: Checkpoint, layers: Sequence[int], *, tokens: int | None = None, seed: int = 0
) -> LayerComparison:
    """Checks that layers can be compared; `verify(..., quick=True)` has found the two checkpoints to fit.

    Args:
        target: a converted folder, or a published one.
        source: the published folder that it was made from.
        layers: numbers, ascending; the MTP layer is number `num_hidden_layers`.
        tokens: how many to run; `index_topk` and `BEYOND` more when None.
        seed: of the tokens.

    Raises:
        InputError: a layer that the model or the target has not, a shared one whose selection nobody makes, too many
            tokens, a source that is no published checkpoint.
    """
    if isinstance(source, ConvertedCheckpoint):
        raise InputError(
            f"{source.folder}: is a converted checkpoint, expected the published one that it was made from"
        )
    if isinstance(target, ConvertedCheckpoint):
        target.partial = True
    contents = target.check(ModelConfig.from_folder(target.folder))
    config = contents.config
    _refuse_layers(config, contents, layers, target)
    count = min(config.index_topk + BEYOND, config.max_position_embeddings) if tokens is None else tokens
    if not 2 <= count <= config.max_position_embeddings:
        raise InputError(f"--tokens is {count}, expected 2 to max_position_embeddings {config.max_position_embeddings}")
    notes = []
    if count <= config.index_topk:
        notes.append(f"{count} tokens are no more than index_topk {config.index_topk}: every position is selected")
    numbers = np.random.default_rng(seed).integers(0, config.vocab_size, count)
    source_config = ModelConfig.from_folder(source.folder)
    return LayerComparison(target, contents, source, source_config, numbers, tuple(layers), tuple(notes))


@with_project_settings
def compare(
    planned: LayerComparison, *, backend: str | None = None, said: Callable[[str], None] = lambda _: None
) -> Iterator[list[StageDifference]]:
    """Runs layer after layer; the findings of each as it is done, the first list those of what comes before them.

    Args:
        backend: of this project's kernels, see `kernels.resolve_backend`.
        said: is told of each layer before it runs.

    Raises:
        InputError: torch or transformers is not installed, or a checkpoint can no longer be read.
    """
    theirs, ours = reference(planned), OwnLayers(planned.target, planned.contents, backend)
    config, tokens = planned.contents.config, planned.tokens
    x, selection = theirs.embed(tokens), None
    pairs = zip(("cosines", "sines"), ours.rotary(len(tokens)), theirs.own_rotary(len(tokens)), strict=True)
    angle = (1e-6 + _ANGLE * np.arange(len(tokens)))[:, None]
    yield [
        _values("before", "embedding", ours.embed(tokens), x),
        *(_values("before", f"rotary {name}", a, b, bound=angle) for name, a, b in pairs),
    ]
    for layer in planned.layers:
        said(f"layer {layer}: {short_size(held_bytes(planned.target, planned.contents, layer))} of parameters")
        if layer == config.num_hidden_layers:
            following = theirs.embed(tokens[1:], layer)
            before = _values(f"layer {layer}", "embedding", ours.embed(tokens[1:], layer), following)
            expected = theirs.mtp(x[:-1], following)
            yield [before, *differences(layer, ours.mtp(x[:-1], following), expected)]
            return
        expected = theirs.layer(layer, x, selection)
        yield list(differences(layer, ours.layer(layer, x, selection), expected))
        x, selection = expected["layer output"], expected["selected set"]


def reference(planned: LayerComparison) -> ReferenceLayers:
    """The side of `transformers`, whose weights are rounded as the conversion rounded those of the target."""
    try:
        from glm52_jax.verification.layer_reference import ReferenceLayers, StoredType
    except ImportError as error:
        raise InputError(
            f"--layers compares with transformers, but {error.name} cannot be imported: pip install 'glm52-jax[oracle]'"
        ) from None
    quantization = planned.contents.config.quantization
    block = quantization.block if quantization else None

    def form(name: str) -> StoredType:
        return StoredType(planned.target.entry(planned.contents.tensors[name].name).dtype, block)

    return ReferenceLayers(planned.source, planned.source_config, form)


def differences(layer: int, ours: Stages, theirs: Stages) -> Iterator[StageDifference]:
    """Compares the stages of a layer in order.

    A row whose choice differs by rounding alone is left out of what is computed after it.
    """
    where, rows = f"layer {layer}", np.ones(len(theirs["layer output"]), bool)
    for stage in STAGES:
        given = stage == "selected set" and "index scores" not in theirs  # on a shared layer
        if stage not in theirs or given:
            continue
        if stage not in _CHOICES:
            yield _values(where, stage, ours[stage], theirs[stage], rows=rows)
            continue
        scores = theirs[_CHOICES[stage]]
        # The router's bias shifts the scores far from zero; what is rounded is the part that it is added to.
        scale = theirs["router scores"] if stage == "chosen experts" else scores
        finding, tied = _choice(where, stage, ours[stage], theirs[stage], scores, scale, rows)
        rows = rows & ~tied
        yield finding


def _values(
    where: str,
    stage: str,
    ours: np.ndarray,
    theirs: np.ndarray,
    *,
    rows: np.ndarray | None = None,
    bound: np.ndarray | None = None,
) -> StageDifference:
    """Compares values `[tokens, ...]`, scores (minus infinity after the query) where the reference has any.

    Args:
        rows: bool `[tokens]`, the ones to compare.
        bound: of the differences; `BOUND` of each value and of the RMS of its row when None.
    """
    rows = np.ones(len(theirs), bool) if rows is None else rows
    real = ~np.isneginf(theirs) & rows[:, None]
    reference = np.where(real, theirs, 0)
    difference = np.abs(np.where(real, ours, 0) - reference)
    if bound is None:
        bound = BOUND * (_rms(reference, real, whole=stage == "index scores") + np.abs(reference))
    share = np.divide(difference, bound, out=np.where(difference == 0, 0, np.inf), where=bound > 0)
    share = np.nan_to_num(share, nan=np.inf)
    at = np.unravel_index(np.argmax(share), share.shape)
    rms = math.sqrt(float(np.square(reference, dtype=np.float64).sum()) / max(1, int(real.sum())))
    largest = float(difference.max())
    expected = float(np.broadcast_to(bound, share.shape)[at])
    return StageDifference(
        where, stage, largest, largest / (rms or 1.0), float(share[at]), (float(difference[at]), expected)
    )


def _choice(
    where: str,
    stage: str,
    ours: np.ndarray,
    theirs: np.ndarray,
    scores: np.ndarray,
    scale: np.ndarray,
    rows: np.ndarray,
) -> tuple[StageDifference, np.ndarray]:
    """Compares sets, bool `[tokens, members]`, and says in which rows they differ by near ties alone.

    A near tie is a difference whose every member has a score, in the reference, that rounding could have brought to the
    lowest chosen one.
    """
    differing = (ours != theirs).any(-1) & rows
    lowest = np.where(theirs, scores, np.inf).min(-1, keepdims=True)
    real = np.isfinite(scale)
    near = np.abs(scores - lowest) <= 2 * BOUND * _rms(np.where(real, scale, 0), real, whole=True)
    tied = differing & ((ours == theirs) | near).all(-1) & (ours.sum(-1) == theirs.sum(-1))
    wrong = int((differing & ~tied).sum())
    note = f"{differing.sum()} of {len(rows)} rows differ" if differing.any() else ""
    if wrong:
        note += f", {wrong} of them beyond near ties"
    elif note:
        note += " by near ties and are left out from here on"
    count = int(differing.sum())
    share = math.inf if wrong else float(count > 0)
    return StageDifference(where, stage, count, count / len(rows), share, (count, 0), note), tied


def _rms(values: np.ndarray, real: np.ndarray, *, whole: bool = False) -> np.ndarray:
    """Root mean square of each row's real values, `[tokens, 1]`, or of all; the others are zero.

    Scores want that of all: an early row has few, and each is a sum over heads that can cancel.
    """
    axis = None if whole else -1
    count = np.maximum(real.sum(axis, keepdims=True), 1)
    return np.sqrt(np.square(values, dtype=np.float64).sum(axis, keepdims=True) / count).astype(np.float32)


def _refuse_layers(
    config: ModelConfig, contents: CheckpointContents, layers: Sequence[int], target: Checkpoint
) -> None:
    last = config.num_hidden_layers + config.has_mtp - 1
    maker = False
    for layer in layers:
        if not 0 <= layer <= last:
            raise InputError(f"--layers names {layer}, but {target.folder} has layers 0 to {last}")
        shared = layer < config.num_hidden_layers and config.indexer_types[layer] == SHARED
        if shared and not maker:
            full = max(i for i in range(layer) if config.indexer_types[i] != SHARED)
            raise InputError(
                f"--layers names {layer}, which is shared, and no full layer before it to take a selection from, "
                f"expected {full} or an earlier one too"
            )
        maker = maker or not shared
        if f"model.layers.{layer}.input_layernorm.weight" not in contents.tensors:
            raise InputError(f"--layers names {layer}, which was not converted to {target.folder}")


def _largest_matrix(config: ModelConfig, layer: int) -> int:
    """Values of the largest published matrix of a layer."""
    return max(math.prod(p.tensor_shape) for p in layer_params(config, layer))


def _activations(planned: LayerComparison, *, scores: int) -> int:
    """Bytes of activations in float32: some rows of the stream and of all heads, and `scores` arrays of scores."""
    config, tokens = planned.contents.config, len(planned.tokens)
    heads = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    experts = config.num_experts_per_tok if SPARSE in config.mlp_layer_types else 1
    rows = 12 * config.hidden_size + 4 * heads + 2 * experts * config.hidden_size
    pairs = scores * max(config.num_attention_heads, config.index_n_heads) + 8
    return 4 * tokens * (rows + pairs * tokens)
