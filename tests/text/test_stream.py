"""Streaming: whole characters from pieces of bytes, and stop strings however the text is cut."""

import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_jax.text import StopStrings, StreamDecoder, Tokenizer, write_byte_tokenizer
from sharding.errors import InputError

# Few letters, so that stop strings overlap themselves, each other and the text.
LETTERS = st.text(alphabet="abé", max_size=24)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), max_size=4)


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


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special=skip_special)
    return [*(stream.push(id_) for id_ in ids), stream.flush()]


@pytest.mark.parametrize(
    "text",
    ["👍🏽 ok", "👩‍👩‍👧", "한국어 자모", "שָׁלוֹם", "é̀ô", " é", "a\u200bb", "𐍈𐌰", "é\n\n 界"],
    ids=["skin tone", "joined emoji", "korean", "hebrew", "combining", "space-led", "zero width", "plane 1", "lines"],
)
def test_stream_of_single_bytes_is_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    """One token a chunk, each a part of a character: the pieces join to the text, without U+FFFD."""
    pieces = streamed(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_character_cut_off_by_the_end_is_flushed(tokenizer: Tokenizer) -> None:
    """An end in the middle of a character gives what decoding everything gives, once."""
    ids = tokenizer.encode("ok 👍")[:-1]
    stream = tokenizer.stream()
    assert "".join(stream.push(id_) for id_ in ids) == "ok "
    assert stream.flush() == "\ufffd"
    assert tokenizer.decode(ids) == "ok \ufffd"
    assert stream.flush() == ""
    assert stream.push(97) == "a"


def test_invalid_bytes_become_replacement_characters(tokenizer: Tokenizer) -> None:
    """U+FFFD appears where bytes are really invalid, and good text around them survives."""
    assert "".join(streamed(tokenizer, [97, 0xFF, 98, 0xE2, 0x82, 99])) == "a\ufffdb\ufffdc"


def test_special_token_between_the_bytes_of_a_character(tokenizer: Tokenizer) -> None:
    """A skipped token does not cut a character; one that is shown does."""
    ids = [0xC3, tokenizer.token_id("<|user|>"), 0xA9]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == "é"
    shown = "".join(streamed(tokenizer, ids, skip_special=False))
    assert shown == tokenizer.decode(ids, skip_special=False) == "\ufffd<|user|>\ufffd"


@settings(deadline=None)  # shared machines stall
@given(st.text())
def test_any_text_streams_to_itself(tokenizer: Tokenizer, text: str) -> None:
    """Random Unicode text through single bytes."""
    assert "".join(streamed(tokenizer, tokenizer.encode(text))) == text


@settings(deadline=None)  # shared machines stall
@given(st.lists(st.one_of(st.integers(0, 299), st.sampled_from([0xF0, 0x9F, 0xED, 0xA0, 0x80])), max_size=30))
def test_any_ids_stream_to_the_librarys_decoding(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, ids: list[int]
) -> None:
    """Invalid bytes, special tokens and ids without a token too."""
    assert "".join(streamed(tokenizer, ids)) == library.decode(ids)


def test_each_token_is_looked_at_once() -> None:
    """The work for a token does not grow with the text so far, invalid bytes included."""
    looked_at: list[int] = []

    def token_bytes(token_id: int) -> bytes:
        looked_at.append(token_id)
        return bytes([token_id])

    stream = StreamDecoder(token_bytes)
    ids = [0x80] * 500 + [0xF0, 0x9F] * 500
    pushed = "".join(stream.push(id_) for id_ in ids)
    assert looked_at == ids
    assert len(pushed) == 500 + 499  # only the last, unfinished character is held
    assert stream.flush() == "\ufffd"


def cut(text: str, stops: list[str]) -> str:
    """What a text is without streaming: everything before the earliest stop string."""
    return text[: min([at for stop in stops if (at := text.find(stop)) >= 0], default=len(text))]


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    watch = StopStrings(stops)
    out = ""
    for piece in pieces:
        emit, stopped = watch.push(piece)
        out += emit
        if stopped:
            assert watch.push("more") == ("", True)
            break
    return out + watch.flush(), watch.stopped


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["The quick br", "own", " f", "ox jumps"], ["own fox"], "The quick br"),
        (["a >", "> U", "PD x"], [">> U", ">> UPD"], "a "),
        (["St", "op here"], ["Stop"], ""),
        (["ab", "ac", "ab", "ab", "c"], ["ababc"], "abac"),
        (["1 é", "è 2"], ["éè"], "1 "),
        (["one two three four"], ["four", "three", "two", "x"], "one "),
        (["xx", "abc", "d"], ["abcd", "bc"], "xx"),
        (["xx", "abc", "e"], ["abcd", "bc"], "xxa"),
        (["xx", "abc"], ["abcd", "bc"], "xxa"),
        (["text"], [], "text"),
    ],
)
def test_text_ends_before_the_earliest_stop_string(pieces: list[str], stops: list[str], expected: str) -> None:
    """Stop strings over several pieces, at the start, inside one another: nothing of them is emitted."""
    text = "".join(pieces)
    assert run(pieces, stops) == run([text], stops) == run(list(text), stops) == (expected, expected != text)
    assert cut(text, stops) == expected


def test_held_text_is_released_when_it_is_no_stop_string() -> None:
    """Text is held while it may begin a stop string, and comes out when it does not, at the latest at the end."""
    watch = StopStrings(["own fox"])
    assert watch.push("br") == ("br", False)
    assert watch.push("own f") == ("", False)
    assert watch.push("ish") == ("own fish", False)
    assert watch.push(" ow") == (" ", False)
    assert watch.flush() == "ow"
    assert not watch.stopped


def test_stop_string_inside_a_character_that_spans_tokens(tokenizer: Tokenizer) -> None:
    """A stop string of multi-byte characters is found although no token holds one."""
    stream, watch, out = tokenizer.stream(), StopStrings("👍🏽"), ""
    for id_ in tokenizer.encode("fine 👍👍🏽 never"):
        emit, stopped = watch.push(stream.push(id_))
        out += emit
        if stopped:
            break
    assert (out, watch.stopped) == ("fine 👍", True)


@settings(deadline=None)  # shared machines stall
@given(LETTERS, STOPS, st.randoms(use_true_random=False))
def test_stop_strings_do_not_depend_on_the_cuts(text: str, stops: list[str], rng: random.Random) -> None:
    """Random stop strings in random pieces give the text cut at once."""
    pieces, rest = [], text
    while rest:
        size = rng.randint(1, 4)
        pieces.append(rest[:size])
        rest = rest[size:]
    expected = cut(text, stops)
    assert run(pieces, stops) == (expected, expected != text)


@settings(deadline=None)  # shared machines stall
@given(LETTERS, STOPS)
def test_no_more_is_held_than_a_stop_string_needs(text: str, stops: list[str]) -> None:
    """What is held stays shorter than the longest stop string, so the work for a token is bounded."""
    watch, out, longest = StopStrings(stops), "", max(map(len, stops), default=1)
    for n, character in enumerate(text, start=1):
        emit, stopped = watch.push(character)
        out += emit
        if stopped:
            break
        assert n - len(out) < longest


@pytest.mark.parametrize(
    ("stops", "words"),
    [
        ("", r"stop\[0\]: found ''"),
        (["a", ""], r"stop\[1\]: found ''"),
        (list("abcde"), "found 5 stop strings, expected at most 4"),
        (["a", 1], r"stop\[1\]: found 1"),
        (7, "found int"),
    ],
)
def test_empty_or_too_many_stop_strings_are_refused(stops: list[str], words: str) -> None:
    """'' and five stop strings are errors before anything is generated; four are fine."""
    with pytest.raises(InputError, match=words):
        StopStrings(stops)
    assert StopStrings(list("abcd")).push("xd") == ("x", True)
