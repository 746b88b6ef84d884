"""How a row of the cache is made of what its projection gives: norm, rotation, the Hadamard turn of some formats."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from glm52_jax.kernels.lib.layers import Rotary, hadamard, layer_norm, rms_norm


@flax.struct.dataclass
class LatentRowTransform:
    """Root-mean-square norm of the first values, the latent; rotation of the others, the rope key.

    Attributes:
        norm: scale of the norm, `[kv_lora_rank]`.
        rotary: angles of the tokens, `[batch, tokens, pairs]`.
        eps: of the norm.
        interleave: how dimensions pair up, see `Rotary.rotate`.
    """

    norm: jax.Array
    rotary: Rotary
    eps: float = flax.struct.field(pytree_node=False)
    interleave: bool = flax.struct.field(pytree_node=False)

    def __call__(self, values: jax.Array) -> jax.Array:
        """Rows `[batch, tokens, width]` in the type of the values."""
        rank = self.norm.shape[0]
        latent = rms_norm(values[..., :rank], self.norm, self.eps)
        return jnp.concatenate([latent, self.rotary.rotate(values[..., rank:], interleave=self.interleave)], axis=-1)


@flax.struct.dataclass
class IndexKeyTransform:
    """Layer norm of an index key, rotation of its first values.

    Attributes:
        norm, bias: scale and bias of the norm, `[index_head_dim]`.
        rotary: angles of the tokens, `[batch, tokens, pairs]`.
        eps: of the norm.
        interleave: how dimensions pair up, see `Rotary.rotate`.
        turned: whether the key is then turned by the Hadamard rotation.
    """

    norm: jax.Array
    bias: jax.Array
    rotary: Rotary
    eps: float = flax.struct.field(pytree_node=False)
    interleave: bool = flax.struct.field(pytree_node=False)
    hadamard_rotated: bool = flax.struct.field(pytree_node=False, default=False)

    def __call__(self, values: jax.Array) -> jax.Array:
        """float32 keys `[batch, tokens, index_head_dim]`."""
        keys = layer_norm(values, self.norm, self.bias, self.eps)
        width = 2 * self.rotary.cos.shape[-1]
        rotated = self.rotary.rotate(keys[..., :width], interleave=self.interleave)
        keys = jnp.concatenate([rotated, keys[..., width:]], axis=-1)
        return hadamard(keys) if self.hadamard_rotated else keys


RowTransform = LatentRowTransform | IndexKeyTransform
