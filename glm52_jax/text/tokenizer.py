"""Text to token ids and back, for a checkpoint's own byte-level `tokenizer.json`.

Ids of special tokens are always looked up by their text: no id is written in code, since each generation of GLM has
others. It must not know about chat formats, models or requests.
"""

import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from glm52_jax.io.files import is_there
from glm52_jax.io.json_file import read_json_object
from glm52_jax.text.special import SpecialTokens
from glm52_jax.text.stream import StreamDecoder
from sharding.errors import InputError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = {character: byte for byte, character in byte_characters().items()}


class Tokenizer:
    """A byte-level tokenizer in which text from outside never becomes a special token by accident.

    Build one with `Tokenizer.load`. A special token here is any entry of the file's `added_tokens`, whether the file
    calls it special or not: GLM's `<think>` and `<tool_call>` are not, and steer the model all the same.

    Attributes:
        special: the special tokens, with the means to find them in text.
        vocab_size: one more than the highest id, so the fewest rows an embedding must have; padding of the
            checkpoint's vocabulary is not counted.
    """

    def __init__(self, spec: Mapping[str, Any], config: Mapping[str, Any], path: Path) -> None:
        """Take the contents of tokenizer.json and tokenizer_config.json; `path` names the first in errors."""
        vocab = _checked_vocab(spec, path)
        added = _added_tokens(spec, config, vocab, path)
        self.special = SpecialTokens({text: id_ for text, (id_, _) in added.items()})
        self.vocab_size = 1 + max([*vocab.values(), *self.special.ids.values()])
        self._plain = _plain_tokenizer(spec, vocab, self.special.ids, path)
        self._special_bytes = {id_: text.encode() for text, (id_, _) in added.items()}
        self._skipped = frozenset(id_ for id_, skipped in added.values() if skipped)
        self._path = path

    @classmethod
    def load(cls, folder: Path | str) -> "Tokenizer":
        """Read `tokenizer.json`, and `tokenizer_config.json` where there is one, from a checkpoint's folder.

        Raises:
            InputError: a file is missing, broken, or describes another kind of tokenizer.
        """
        path = Path(folder) / TOKENIZER_FILE
        spec = read_json_object(path)
        config_path = Path(folder) / CONFIG_FILE
        config = read_json_object(config_path) if is_there(config_path) else {}
        return cls(spec, config, path)

    @property
    def special_ids(self) -> dict[str, int]:
        """Text of each special token -> its id (a copy)."""
        return dict(self.special.ids)

    def token_id(self, text: str) -> int:
        """The id of the one token written `text`: a special token, else an entry of the vocabulary as spelled there."""
        id_ = self.special.ids.get(text)
        if id_ is None:
            id_ = self._plain.token_to_id(text)
        if id_ is None:
            raise InputError(f"{self._path}: found no token {text!r}, expected it in the vocabulary")
        return id_

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`, with nothing added before or behind.

        Args:
            text: any valid Unicode text.
            special: False takes the text as content, in which "<|user|>" is eight ordinary characters; True turns the
                text of special tokens into their ids, for prompts whose author may do so.

        Raises:
            InputError: the text holds half of a surrogate pair.
        """
        return self.encode_marked(text, "") if special else self._encode_content(text)

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Token ids of a rendered prompt: unmarked special tokens become ids, marked ones stay text, marks vanish."""
        ids: list[int] = []
        for piece, id_ in self.special.split(text, mark):
            if id_ is None:
                ids += self._encode_content(piece.replace(mark, "") if mark else piece)
            else:
                ids.append(id_)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, ids without a token become nothing.

        Args:
            ids: token ids, none of them negative.
            skip_special: leave out the tokens that the file itself calls special (in GLM: role and control tokens,
                not `<think>`, `<tool_call>` and their like).
        """
        data = b"".join([self.token_bytes(id_, skip_special=skip_special) for id_ in ids])
        return data.decode("utf-8", errors="replace")

    def stream(self, *, skip_special: bool = True) -> StreamDecoder:
        """A decoder that takes one id at a time and whose joined text is that of `decode`."""
        return StreamDecoder(lambda id_: self.token_bytes(id_, skip_special=skip_special))

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The bytes that one token stands for, which need not be whole characters."""
        token_id = operator.index(token_id)  # NumPy's integers too
        if token_id < 0:
            raise InputError(f"token id: found {token_id}, expected 0 or more (-1 stands for no token)")
        if token_id in self._special_bytes:
            return b"" if skip_special and token_id in self._skipped else self._special_bytes[token_id]
        # Ids between the last token and the checkpoint's padded vocabulary have no token.
        token = self._plain.id_to_token(token_id) if token_id < self.vocab_size else None
        return b"" if token is None else _bytes_of_token(token)

    def _encode_content(self, text: str) -> list[int]:
        try:
            return self._plain.encode(text, add_special_tokens=False).ids
        except TypeError:
            # The library's word for half of a surrogate pair, as a JSON escape can bring one in.
            if not isinstance(text, str):
                raise
            place = next((n for n, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
            if place is None:
                raise
            byte = ord(text[place]) - 0xDC00  # Python's way to hold bytes of arguments and names that are not UTF-8
            found = f"byte 0x{byte:02x}, which is not UTF-8," if byte >= 0x80 else "half of a surrogate pair"
            raise InputError(f"text: found {found} at character {place}, expected valid Unicode") from None


def _bytes_of_token(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        # As the tokenizers library does: a token that is not spelled in byte characters stands for its own text.
        return token.encode()


def _checked_vocab(spec: Mapping[str, Any], path: Path) -> dict[str, int]:
    model, decoder = spec.get("model"), spec.get("decoder")
    kind = model.get("type") if isinstance(model, dict) else None
    decoder_kind = decoder.get("type") if isinstance(decoder, dict) else None
    if kind != "BPE" or decoder_kind != "ByteLevel":
        raise InputError(
            f"{path}: found a model of type {kind} with a decoder of type {decoder_kind}, "
            "expected BPE with ByteLevel as in GLM's tokenizer.json"
        )
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict) or not vocab:
        raise InputError(f"{path}: found no vocabulary in model.vocab, expected an object of token to id")
    if not all(type(id_) is int and id_ >= 0 for id_ in vocab.values()):
        raise InputError(f"{path}: found an id in model.vocab that is not a whole number of 0 or more")
    return vocab


def _added_tokens(
    spec: Mapping[str, Any], config: Mapping[str, Any], vocab: Mapping[str, int], path: Path
) -> dict[str, tuple[int, bool]]:
    """Text -> (id, whether the file calls it special), from both files, which must agree."""
    added: dict[str, tuple[int, bool]] = {}
    id_of, text_of = dict(vocab), {id_: text for text, id_ in vocab.items()}
    for file, id_, entry in _added_entries(spec, config, path):
        text = entry.get("content")
        if not isinstance(text, str) or not text or type(id_) is not int or id_ < 0:
            raise InputError(f"{file}: found the added token {entry}, expected an id of 0 or more and a content text")
        for flag in ("lstrip", "rstrip", "single_word"):
            if entry.get(flag):
                raise InputError(f"{file}: found {flag} set on added token {text!r}, expected it unset as in GLM's")
        if id_of.setdefault(text, id_) != id_ or text_of.setdefault(id_, text) != text:
            raise InputError(
                f"{file}: found added token {text!r} with id {id_}, expected one id for each token "
                f"(elsewhere {text!r} is {id_of[text]} and {id_} is {text_of.get(id_, text)!r})"
            )
        added.setdefault(text, (id_, bool(entry.get("special"))))
    return added


def _added_entries(
    spec: Mapping[str, Any], config: Mapping[str, Any], path: Path
) -> Iterator[tuple[Path, Any, dict[str, Any]]]:
    """(file, id, description) of every added token; those that only tokenizer_config.json lists count as well."""
    listed, by_id = spec.get("added_tokens") or [], config.get("added_tokens_decoder") or {}
    config_path = path.with_name(CONFIG_FILE)
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise InputError(f"{path}: found added_tokens in another form, expected a list of objects")
    if not isinstance(by_id, dict) or not all(isinstance(entry, dict) for entry in by_id.values()):
        raise InputError(f"{config_path}: found added_tokens_decoder in another form, expected an object of objects")
    for entry in listed:
        yield path, entry.get("id"), entry
    for id_text, entry in by_id.items():
        yield config_path, int(id_text) if id_text.isdecimal() else id_text, entry


def _plain_tokenizer(
    spec: Mapping[str, Any], vocab: Mapping[str, int], special_ids: Mapping[str, int], path: Path
) -> tokenizers.Tokenizer:
    """The file's tokenizer without its added tokens, so that it cannot produce one.

    Its post-processor goes too (some add a token at the start), and so do truncation and padding, which would cut a
    long prompt without a word.
    """
    model = {**spec["model"], "vocab": {text: id_ for text, id_ in vocab.items() if text not in special_ids}}
    nothing: dict[str, Any] = {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    try:
        return tokenizers.Tokenizer.from_str(json.dumps({**spec, **nothing, "model": model}))
    except Exception as error:  # the library raises nothing more exact
        raise InputError(f"{path}: found a tokenizer that the tokenizers library cannot load ({error})") from error
