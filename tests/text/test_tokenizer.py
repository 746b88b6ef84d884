"""The tokenizer: ids by text, content kept apart from special tokens, and files that are refused."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_jax.text import GLM_SPECIAL_TOKENS, Tokenizer, write_byte_tokenizer
from sharding.errors import InputError

TEXTS = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(GLM_SPECIAL_TOKENS)), max_size=8).map("".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def library(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def edit(folder: Path, name: str = "tokenizer.json", **changes: Any) -> None:
    """Replace top-level fields of a JSON file; a change may be a function of the old value."""
    path = folder / name
    data = json.loads(path.read_text())
    for key, value in changes.items():
        data[key] = value(data[key]) if callable(value) else value
    path.write_text(json.dumps(data))


def test_byte_tokenizer_gives_glm_ids_in_the_published_order(tmp_path: Path) -> None:
    ids = write_byte_tokenizer(tmp_path, vocab_size=154880, first_special=154820)
    published = {
        "<|endoftext|>": 154820,
        "[MASK]": 154821,
        "[gMASK]": 154822,
        "<sop>": 154824,
        "<|system|>": 154826,
        "<|user|>": 154827,
        "<|assistant|>": 154828,
        "<|observation|>": 154829,
        "<|code_prefix|>": 154838,
        "<|code_suffix|>": 154840,
        "<think>": 154841,
        "</think>": 154842,
        "<tool_call>": 154843,
        "</tool_call>": 154844,
        "<arg_key>": 154847,
        "</arg_key>": 154848,
        "<arg_value>": 154849,
        "</arg_value>": 154850,
    }
    assert {text: ids[text] for text in published} == published
    assert len(ids) == 31
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_ids == ids
    assert tokenizer.vocab_size == 154851
    assert tokenizer.encode("é") == [0xC3, 0xA9]


def test_byte_tokenizer_has_the_same_ids_in_the_library(tmp_path: Path) -> None:
    ids = write_byte_tokenizer(tmp_path, first_special=1000)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert {text: library.token_to_id(text) for text in ids} == ids


@pytest.mark.parametrize(("sizes", "word"), [({"vocab_size": 286}, "287"), ({"first_special": 255}, "256")])
def test_byte_tokenizer_refuses_sizes_that_do_not_fit(tmp_path: Path, sizes: dict[str, int], word: str) -> None:
    with pytest.raises(InputError, match=word):
        write_byte_tokenizer(tmp_path, **sizes)
    assert write_byte_tokenizer(tmp_path, vocab_size=287)["</arg_value>"] == 286


def test_ids_of_special_tokens_come_from_the_file(tmp_path: Path) -> None:
    """With shuffled ids every special token is still found, by its text, as one id."""
    old = write_byte_tokenizer(tmp_path)
    shuffled = list(old.values())
    random.Random(0).shuffle(shuffled)
    new = dict(zip(old, shuffled, strict=True))
    edit(
        tmp_path,
        added_tokens=lambda tokens: [token | {"id": new[token["content"]]} for token in tokens],
        model=lambda model: model | {"vocab": model["vocab"] | new},
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_ids == new != old
    for text in ("</think>", "<think>", "<|user|>"):
        assert tokenizer.token_id(text) == new[text]
        assert tokenizer.encode(text, special=True) == [new[text]]


def test_token_id_of_an_absent_token_is_an_error(tokenizer: Tokenizer) -> None:
    """A missing token is reported, not replaced by a number from another generation."""
    assert tokenizer.token_id("A") == 65
    with pytest.raises(InputError, match=r"tokenizer\.json: found no token '<\|box\|>'"):
        tokenizer.token_id("<|box|>")


@pytest.mark.parametrize("text", GLM_SPECIAL_TOKENS)
def test_text_of_a_special_token_is_content_by_default(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(f"a{text}b") == list(f"a{text}b".encode())
    assert tokenizer.encode(f"a{text}b", special=True) == [97, tokenizer.token_id(text), 98]


def test_nothing_is_added_around_a_text(folder: Path, tmp_path: Path) -> None:
    """A post-processor that adds a first token, truncation and padding in the file have no effect."""
    write_byte_tokenizer(tmp_path)
    sop = {"id": "<sop>", "ids": [260], "tokens": ["<sop>"]}
    single = [{"SpecialToken": {"id": "<sop>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    edit(
        tmp_path,
        post_processor={
            "type": "TemplateProcessing",
            "single": single,
            "pair": single,
            "special_tokens": {"<sop>": sop},
        },
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
    )
    assert tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("abcdef").ids == [260, 97, 98]
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("abcdef") == tokenizer.encode("abcdef", special=True) == list(b"abcdef")
    assert tokenizer.encode("") == tokenizer.encode("", special=True) == []


@settings(deadline=None)  # shared machines stall
@given(TEXTS)
def test_encoding_with_special_tokens_is_the_librarys(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, text: str
) -> None:
    assert tokenizer.encode(text, special=True) == library.encode(text, add_special_tokens=False).ids


@settings(deadline=None)  # shared machines stall
@given(st.lists(st.integers(0, 300), max_size=40), st.booleans())
def test_decoding_is_the_librarys(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, ids: list[int], skip: bool
) -> None:
    assert tokenizer.decode(ids, skip_special=skip) == library.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)  # shared machines stall
@given(TEXTS)
def test_content_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.special_ids.values())
    assert tokenizer.decode(ids) == text


def test_skipping_special_tokens_keeps_the_markup_of_answers(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>a</think><|user|>b<|endoftext|>", special=True)
    assert tokenizer.decode(ids) == "<think>a</think>b"
    assert tokenizer.decode(ids, skip_special=False) == "<think>a</think><|user|>b<|endoftext|>"


def test_ids_without_a_token_are_nothing_and_negative_ones_an_error(tokenizer: Tokenizer) -> None:
    """A padded vocabulary has rows without a token; -1 stands for "no token" elsewhere and is never decoded."""
    assert tokenizer.decode([97, 287, 154879, 98]) == "ab"
    with pytest.raises(InputError, match="found -1, expected 0 or more"):
        tokenizer.decode([97, -1])


def test_half_a_surrogate_pair_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="half of a surrogate pair at character 1"):
        tokenizer.encode("a\ud83d")
    with pytest.raises(InputError, match="byte 0xff, which is not UTF-8, at character 1"):  # as arguments hold it
        tokenizer.encode("a\udcff")


@pytest.mark.parametrize("extra", [["<|user|>", "<|system|>"], {"eot": "<|endoftext|>"}], ids=["list", "dict"])
def test_extra_special_tokens_may_be_a_list_or_an_object(tmp_path: Path, extra: object) -> None:
    """Both forms of extra_special_tokens load, with the same ids."""
    ids = write_byte_tokenizer(tmp_path)
    edit(tmp_path, "tokenizer_config.json", extra_special_tokens=extra)
    assert Tokenizer.load(tmp_path).special_ids == ids


def test_tokens_that_only_the_config_lists_count(tmp_path: Path) -> None:
    ids = write_byte_tokenizer(tmp_path)
    token = {"content": "<|box|>", "special": True}
    edit(tmp_path, "tokenizer_config.json", extra_special_tokens=[])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"287": token}}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_ids == ids | {"<|box|>": 287}
    assert tokenizer.encode("<|box|>", special=True) == [287]
    assert tokenizer.decode([287, 97]) == "a"


def test_config_file_is_optional(tmp_path: Path) -> None:
    ids = write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path).special_ids == ids


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path)
    with pytest.raises(InputError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path / "absent")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "found a JSON list, expected a JSON object"),
        (b"\xff", "could not be read as UTF-8"),
        (b"{}", "found a model of type None with a decoder of type None, expected BPE with ByteLevel"),
        (b'{"model": {"type": "Unigram"}, "decoder": {"type": "Metaspace"}}', "type Unigram"),
        (b'{"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}}', "found no vocabulary"),
        (b'{"model": {"type": "BPE", "vocab": {"a": "1"}}, "decoder": {"type": "ByteLevel"}}', "whole number"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 1}}, "decoder": {"type": "ByteLevel"}}', "library cannot load"),
    ],
)
def test_broken_file_is_named_with_what_was_found(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(InputError, match=rf"tokenizer\.json: .*{words}"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ({"id": 1000}, "expected an id of 0 or more and a content text"),
        ({"content": "<x>"}, "expected an id of 0 or more and a content text"),
        ({"id": 263, "content": "<x>"}, "expected one id for each token"),
        ({"id": 500, "content": "<|user|>"}, "expected one id for each token"),
        ({"id": 500, "content": "<x>", "rstrip": True}, "found rstrip set"),
    ],
)
def test_added_tokens_that_contradict_are_refused(tmp_path: Path, token: dict[str, Any], words: str) -> None:
    write_byte_tokenizer(tmp_path)
    edit(tmp_path, added_tokens=lambda tokens: [*tokens, token])
    with pytest.raises(InputError, match=words):
        Tokenizer.load(tmp_path)


def test_config_that_contradicts_the_tokenizer_is_refused(tmp_path: Path) -> None:
    """Two files with different ids for one token are not resolved by chance."""
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"999": {"content": "<think>"}}}')
    with pytest.raises(InputError, match=r"tokenizer_config\.json: found added token '<think>' with id 999"):
        Tokenizer.load(tmp_path)
