"""A small tokenizer of 256 bytes and GLM's special tokens, so that a small checkpoint can be spoken to.

It must not know about models; how many rows an embedding has is for the caller to say.
"""

from pathlib import Path

from glm52_jax.io.files import writing
from glm52_jax.io.json_file import write_json_object
from glm52_jax.text.tokenizer import CONFIG_FILE, TOKENIZER_FILE, byte_characters
from sharding.errors import InputError

# In the order of their ids, which in GLM-5.2 are 154820 to 154850.
CONTROL_TOKENS = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
    *("<|begin_of_audio|>", "<|end_of_audio|>", "<|begin_of_transcription|>", "<|end_of_transcription|>"),
    *("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"),
)
# The file does not call these special, so that decoding keeps them: they are part of an answer's form.
MARKUP_TOKENS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
GLM_SPECIAL_TOKENS = (*CONTROL_TOKENS, *MARKUP_TOKENS)


def write_byte_tokenizer(
    folder: Path | str, *, vocab_size: int | None = None, first_special: int | None = None
) -> dict[str, int]:
    """Write `tokenizer.json` and `tokenizer_config.json`; returns text of each special token -> its id.

    Byte b is id b. It has no merges, so a text has as many tokens as bytes.

    Args:
        folder: created where it does not exist.
        vocab_size: rows of the model's embedding, when known, to check that every id has one.
        first_special: id of `<|endoftext|>`, the others follow; 256 by default, 154820 gives GLM-5.2's own ids.

    Raises:
        InputError: `first_special` is below 256, the ids do not fit `vocab_size`, or another tokenizer is there.
    """
    first = 256 if first_special is None else first_special
    if first < 256:
        raise InputError(f"first_special: found {first}, expected 256 or more, since bytes take the ids below")
    end = first + len(GLM_SPECIAL_TOKENS)
    if vocab_size is not None and vocab_size < end:
        raise InputError(f"vocab_size: found {vocab_size}, expected {end} or more for special tokens from id {first}")
    ids = {text: first + n for n, text in enumerate(GLM_SPECIAL_TOKENS)}
    folder = Path(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json_object(folder / CONFIG_FILE, _config())
    write_json_object(folder / TOKENIZER_FILE, _tokenizer(ids))
    return ids


def _tokenizer(ids: dict[str, int]) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {character: byte for byte, character in sorted(byte_characters().items())}
    model: dict[str, object] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        # The tokenizers library numbers added tokens itself unless the vocabulary has them, and would close the gap
        # between the bytes and the first special token.
        "vocab": vocab | ids,
        "merges": [],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id_, "content": text, **flags, "special": text in CONTROL_TOKENS} for text, id_ in ids.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }


def _config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "extra_special_tokens": list(CONTROL_TOKENS[1:]),
    }
