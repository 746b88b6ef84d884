"""Generation: jitted prefill, decode and verify steps over the cache, sampling, drafting, streaming text.

This package layer may import from `glm52_jax` and `sharding`, never from `train`.
"""
