"""Special tokens in text: finding them, and keeping text of others from becoming them.

A rendered prompt mixes a template's own special tokens with text from users, tools and earlier answers. Content is
*marked* before rendering: one private-use character goes behind the first character of whatever looks like a special
token. In the rendered prompt the unmarked special tokens are then exactly the template's own, whichever template it
is. It must not know about templates or messages.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from sharding.errors import InputError

_FIRST_MARK, _LAST_MARK = 0xE000, 0xF8FF
# A template may write JSON with every non-ASCII character escaped, so a mark must be free in that form too.
_MARK_LIKE = re.compile(r"[\ue000-\uf8ff]|\\u(?:e[0-9a-f]{3}|f[0-8][0-9a-f]{2})")


class SpecialTokens:
    """The special tokens of one tokenizer, by text.

    Args:
        ids: text of each special token -> its id.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids: dict[str, int] = dict(ids)
        # Longest first, so that of two tokens that begin alike the longer one is found, as the tokenizer would.
        longest_first = sorted(self.ids, key=len, reverse=True)
        any_token = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._token = re.compile(any_token)
        # Looks ahead and takes one character, so that tokens which overlap are each found.
        self._first_character = re.compile(f"(?=(?:{any_token}))(.)", re.DOTALL)
        self._beginnings = frozenset(text[:n] for text in self.ids for n in range(1, len(text)))
        self._longest = max(map(len, self.ids), default=0)

    def split(self, text: str, mark: str = "") -> Iterator[tuple[str, int | None]]:
        """Cut `text` into (piece, None) for ordinary text and (token, id) for unmarked special tokens, in order."""
        start = 0
        for match in self._token.finditer(text):
            # Only a token of one character can be found although it is marked: its mark is behind it.
            if mark and text.startswith(mark, match.end()) and len(match[0]) == 1:
                continue
            if match.start() > start:
                yield text[start : match.start()], None
            yield match[0], self.ids[match[0]]
            start = match.end()
        if start < len(text):
            yield text[start:], None

    def mark(self, text: str, mark: str) -> str:
        """`text` with `mark` behind the first character of each special token, whole or begun at the text's end.

        The end matters because a template may put two contents next to each other: "<|us" and "er|>" must not meet
        to form a token. White space behind such a beginning is looked through, since templates strip it.
        """
        body = text.rstrip()
        cuts = [
            index + 1
            for index in range(max(0, len(body) - self._longest + 1), len(body))
            if body[index:] in self._beginnings
        ]
        for cut in reversed(cuts):
            text = text[:cut] + mark + text[cut:]
        return self._first_character.sub(rf"\1{mark}", text)

    def mark_all(self, value: Any, mark: str) -> Any:
        """A copy of a JSON `value` with every string in it marked, the keys of its objects too."""
        return map_strings(value, lambda text: self.mark(text, mark))


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON `value` with `change` applied to every string in it, the keys of its objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    return value


def strings_in(value: Any) -> Iterator[str]:
    """Every string in a JSON `value`, the keys of its objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)


def free_mark(texts: Iterable[str]) -> str:
    """A private-use character that occurs in none of `texts`, neither itself nor as a JSON escape."""
    taken: set[int] = set()
    for text in texts:
        taken.update(int(found[2:], 16) if found[0] == "\\" else ord(found) for found in _MARK_LIKE.findall(text))
    for code in range(_FIRST_MARK, _LAST_MARK + 1):
        if code not in taken:
            return chr(code)
    raise InputError(
        f"messages: found every private-use character from U+{_FIRST_MARK:04X} to U+{_LAST_MARK:04X}, "
        "expected at least one of them unused"
    )


def unescape_mark(text: str, mark: str) -> str:
    """`text` with the mark put back where a template wrote it as a JSON escape."""
    return text.replace(json.dumps(mark)[1:-1], mark)
