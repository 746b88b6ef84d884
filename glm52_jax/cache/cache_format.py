"""`CacheFormat`: the formats of a cache's two kinds of rows, by name, for the widths of a model."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from glm52_jax.cache.row_formats import (
    GROUP_SIZE,
    GroupScaledFormat,
    LanePaddedFormat,
    RowFormat,
    TensorScaledFormat,
    UnquantizedFormat,
)
from glm52_jax.config import ModelConfig
from sharding.errors import InputError


@dataclasses.dataclass(frozen=True)
class CacheFormat:
    """The formats of a cache's two kinds of rows, by name.

    Attributes:
        latent: "plain", "fp8_groups" or "fp8_tensor".
        index_keys: "plain", "fp8" (a scale a key) or "fp8_rotated" (the same after a Hadamard rotation, which spreads a
            large value over the key; the rotation cancels in the scores).
        latent_scales: one a layer, for "fp8_tensor"; ones when empty.
        lanes: the width of every part is padded to a multiple of it. A TPU lays arrays out in tiles of 128 lanes: it
            would keep others in another order of dimensions, and copy the whole cache for every step.

    Raises:
        InputError: a name that is none of these.
    """

    latent: str = "plain"
    index_keys: str = "plain"
    latent_scales: tuple[float, ...] = ()
    lanes: int = 1

    def __post_init__(self) -> None:
        for field, known in (("latent", LATENT_FORMATS), ("index_keys", INDEX_KEY_FORMATS)):
            if getattr(self, field) not in known:
                raise InputError(f"cache format of {field} is {getattr(self, field)!r}, expected {' or '.join(known)}")
        if any(not (math.isfinite(scale) and scale > 0) for scale in self.latent_scales):
            raise InputError(f"latent_scales holds {self.latent_scales}, expected finite numbers above zero")

    def on(self, platform: str, config: ModelConfig, dtype: Any) -> CacheFormat:
        """As a platform's devices hold it: in whole lanes of theirs, and never larger than a plain one."""
        form = dataclasses.replace(self, lanes=_LANES.get(platform, 1))
        plain = dataclasses.replace(form, index_keys="plain")
        keys = [one.key_rows(config, dtype).row_bytes for one in (form, plain)]
        return form if keys[0] < keys[1] else plain

    def latent_rows(self, config: ModelConfig, layers: int, dtype: Any) -> RowFormat:
        """The format of latent rows, for a stack of so many layers of a model that computes in `dtype`."""
        if self.latent == "fp8_groups":
            return self._groups(config.kv_lora_rank, config.qk_rope_head_dim, dtype, GROUP_SIZE)
        if self.latent == "fp8_tensor":
            scales = self.latent_scales or (1.0,) * layers
            if len(scales) != layers:
                raise InputError(f"latent_scales has {len(scales)} scales, expected one for each of {layers} layers")
            return TensorScaledFormat(config.latent_width, scales, self.lanes)
        return UnquantizedFormat(config.latent_width, jnp.dtype(dtype), self.lanes)

    def key_rows(self, config: ModelConfig, dtype: Any) -> RowFormat:
        """The format of index keys."""
        width = config.index_head_dim
        if self.index_keys == "plain":
            return UnquantizedFormat(width, jnp.dtype(dtype), self.lanes)
        rotated = self.index_keys == "fp8_rotated"
        if rotated and width & (width - 1):
            raise InputError(f"index_head_dim is {width}, expected a power of two for index keys in fp8_rotated")
        return self._groups(width, 0, dtype, width, rotated=rotated)

    def _groups(self, coded: int, plain: int, dtype: Any, group: int, *, rotated: bool = False) -> RowFormat:
        if self.lanes > 1:
            return LanePaddedFormat(coded, plain, jnp.dtype(dtype), group, rotated, self.lanes)
        return GroupScaledFormat(coded, plain, jnp.dtype(dtype), group, rotated)


_LANES = {"tpu": 128}  # see `CacheFormat.lanes`


LATENT_FORMATS = ("plain", "fp8_groups", "fp8_tensor")


INDEX_KEY_FORMATS = ("plain", "fp8", "fp8_rotated")


PLAIN_CACHE = CacheFormat()


CACHE_FORMATS = {
    "plain": PLAIN_CACHE,
    "fp8": CacheFormat("fp8_groups", "fp8"),
    "fp8-tensor": CacheFormat("fp8_tensor", "fp8"),
}
"""What the commands' `--kv` means."""
