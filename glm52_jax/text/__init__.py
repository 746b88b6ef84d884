"""Text in and out: the checkpoint's tokenizer, its chat format, and text streamed token by token.

This room must not know of arrays, models, engines or HTTP, and imports no JAX: a client or a test can use it alone.
"""

from glm52_jax.text.byte_tokenizer import GLM_SPECIAL_TOKENS, write_byte_tokenizer
from glm52_jax.text.chat import REASONING_EFFORTS, ChatFormat, built_in_template
from glm52_jax.text.messages import normalise_messages, normalise_tools
from glm52_jax.text.stream import MAX_STOP_STRINGS, StopStrings, StreamDecoder, check_stops
from glm52_jax.text.tokenizer import Tokenizer

__all__ = [
    "GLM_SPECIAL_TOKENS",
    "MAX_STOP_STRINGS",
    "REASONING_EFFORTS",
    "ChatFormat",
    "StopStrings",
    "StreamDecoder",
    "Tokenizer",
    "built_in_template",
    "check_stops",
    "normalise_messages",
    "normalise_tools",
    "write_byte_tokenizer",
]
