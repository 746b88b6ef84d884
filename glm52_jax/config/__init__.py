"""Configuration of the model: `ModelConfig`, its published JSON files, and the configs of the released models."""

from glm52_jax.config.layer_types import DENSE, FULL, SHARED, SPARSE
from glm52_jax.config.model_config import BUILT_IN, ModelConfig, load_config
from glm52_jax.config.quantization_config import QuantizationConfig

__all__ = [
    "BUILT_IN",
    "DENSE",
    "FULL",
    "SHARED",
    "SPARSE",
    "ModelConfig",
    "QuantizationConfig",
    "load_config",
]
