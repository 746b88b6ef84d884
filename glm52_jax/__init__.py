"""GLM-5.2 in JAX: configuration, parameters, the model as pure functions, checkpoints, tokenizer and chat format.

Public names are resolved when first used, so that importing the package imports no JAX, and so that the names that
live in higher package layers (`generate`) are found here too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm52_jax.checkpoint.load.loader import load_params as load_params
    from glm52_jax.config import ModelConfig as ModelConfig
    from glm52_jax.config import load_config as load_config
    from glm52_jax.model.transformer import forward as forward
    from glm52_jax.model.transformer import trace as trace
    from glm52_jax.params.init import init_params as init_params
    from sharding.errors import InputError as InputError

_PUBLIC = {
    "InputError": "sharding.errors",
    "ModelConfig": "glm52_jax.config",
    "forward": "glm52_jax.model.transformer",
    "generate": "infer.generate",
    "init_params": "glm52_jax.params.init",
    "load_config": "glm52_jax.config",
    "load_params": "glm52_jax.checkpoint.load.loader",
    "plan": "infer.planning.plan",
    "trace": "glm52_jax.model.transformer",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'glm52_jax' has no attribute {name!r}")
    from glm52_jax.own_imports import import_ours

    return getattr(import_ours(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
