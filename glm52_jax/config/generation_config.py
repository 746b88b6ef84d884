"""The published `generation_config.json`: how a text ends, and how its tokens are chosen unless someone says otherwise.

Values are read as `transformers` and vLLM read them, where both have a meaning for them. What this project does not
apply, and what makes the choice greedy, becomes a note. It must not know how tokens are sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm52_jax.io.json_fields import LARGEST, Fields, shown

# Fields that would change a text, with the values that leave it as it is. Null does too.
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "dola_layers": (),
    "sequence_bias": (),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_length": (20,),  # which transformers writes by itself
    "max_new_tokens": (),
    "max_time": (),
    "stop_strings": ([],),
    "watermarking_config": (),
}


def read_sampling(fields: Fields) -> dict[str, Any]:
    """`temperature`, `top_p` and `top_k` of `ModelConfig`.

    The most likely token is taken, which is temperature 0 here, where the file says so: `do_sample` false, a
    temperature, `top_p` or `top_k` that leaves one token. `top_k` 0 or -1 keeps all tokens (`transformers`, vLLM).

    Raises:
        InputError: a value of the wrong kind, or one that neither program has a meaning for.
    """
    temperature = fields.number("temperature", 1.0, zero=True)
    top_p = fields.number("top_p", 1.0, zero=True)
    top_k = max(0, fields.integer("top_k", 0, minimum=-1))
    sampled = fields.boolean("do_sample", True)
    for field, neutral in _NOT_APPLIED.items():
        value = fields.raw.get(field)
        if value is not None and (isinstance(value, bool) or value not in neutral):
            fields.note(f"{field} is {shown(value)}, which is not applied")
    if temperature == 0 or top_p > 1:  # the second is refused with the other contradictions
        return {"temperature": temperature, "top_p": top_p or 1.0, "top_k": top_k}
    reason = next(
        (
            text
            for text, alone in (
                ("do_sample is false", not sampled),
                ("top_k is 1", top_k == 1),
                (f"top_p is {shown(fields.raw.get('top_p'))}", top_p == 0),
            )
            if alone
        ),
        None,
    )
    if reason is None:
        return {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    fields.note(f"{reason}, so the most likely token is taken unless a temperature is asked for")
    return {"temperature": 0.0, "top_p": top_p or 1.0, "top_k": 0 if top_k == 1 else top_k}


def read_eos(vocab_size: int, *sources: Fields) -> tuple[int, ...]:
    """Every end-of-text id: a number or a list, in `config.json` or `generation_config.json`, joined in that order."""
    ids: dict[int, None] = {}
    for fields in sources:
        found = fields.raw.get("eos_token_id")
        for eos in found if isinstance(found, list) else [] if found is None else [found]:
            if isinstance(eos, bool) or not isinstance(eos, int) or not 0 <= eos <= LARGEST:
                raise fields.error("eos_token_id", f"holds {shown(eos)}, expected token ids")
            if eos >= vocab_size:
                raise fields.error("eos_token_id", f"holds {eos}, but the vocabulary has {vocab_size} tokens")
            ids[eos] = None
    return tuple(ids)


def read_pad(vocab_size: int, fields: Fields) -> int | None:
    """`pad_token_id`; nothing here reads it, so one beyond the vocabulary is only said."""
    if not fields.has("pad_token_id"):
        return None
    pad = fields.integer("pad_token_id", minimum=0)
    if pad >= vocab_size:
        fields.note(f"pad_token_id is {pad}, but the vocabulary has {vocab_size} tokens; it is not used")
    return pad


def write_generation(values: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `generation_config.json` from the fields of `ModelConfig`."""
    raw: dict[str, Any] = {"eos_token_id": list(values["eos_token_ids"]) or None}
    if values["pad_token_id"] is not None:
        raw["pad_token_id"] = values["pad_token_id"]
    if values["top_k"]:
        raw["top_k"] = values["top_k"]
    # `transformers` samples only where the file says so, and refuses a temperature of 0 then.
    return raw | {
        "do_sample": values["temperature"] > 0,
        "temperature": values["temperature"],
        "top_p": values["top_p"],
    }
