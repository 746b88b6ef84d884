"""Text while it is being generated: whole characters from token bytes, and stop strings that span tokens.

Both hold back only what may still change, so the work for a token does not grow with the text before it. It must not
know about tokenizers' files, chat formats or requests.
"""

import codecs
from collections.abc import Callable, Sequence

from sharding.errors import InputError

MAX_STOP_STRINGS = 4


class StreamDecoder:
    """Decodes ids one at a time; the joined text is that of decoding them all at once.

    It works on bytes, not on decoded text: at most three bytes of an unfinished character are held, while comparing
    decoded windows would have to reach back further for each byte that never becomes a character.

    Args:
        token_bytes: the bytes that a token id stands for.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is unfinished."""
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """The end: U+FFFD for a character that was never finished, else "". The decoder is then as new."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Ends a text before the earliest place where a stop string begins, however the text is cut into pieces.

    Text that may be the beginning of a stop string is held back until it is one or cannot be. When one stop string
    lies inside the beginning of another ("b" inside "abc"), the longer one is waited for, since it begins earlier; so
    the result never depends on the cuts. Matching is Knuth-Morris-Pratt, one automaton for each stop string.

    Args:
        stops: up to four stop strings, none of them empty; a single string is taken as one.

    Attributes:
        stopped: whether a stop string was found; what follows it is ignored.

    Raises:
        InputError: more than four stop strings, an empty one, or one that is not text.
    """

    def __init__(self, stops: Sequence[str] | str) -> None:
        self._stops = check_stops(stops)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # length of each stop string's beginning that ends the text so far
        self._held = ""
        self._found: int | None = None  # where in `_held` the earliest complete stop string begins
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; returns (text that is now certain, whether the text ends here)."""
        if self.stopped:
            return "", True
        end = len(self._held)
        self._held += text
        for character in text:
            end += 1
            earliest = self._advance(character, end)
            if self._found is not None and earliest >= self._found:
                return self._stop(self._found), True
        certain = min([end - matched for matched in self._matched], default=end)
        if self._found is not None:
            certain = min(certain, self._found)
            self._found -= certain
        emit, self._held = self._held[:certain], self._held[certain:]
        return emit, False

    def flush(self) -> str:
        """The end of the text: releases what was held, up to a stop string that was found while waiting."""
        if self._found is not None:
            return self._stop(self._found)
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str, end: int) -> int:
        """Move every automaton on by one character; returns where the earliest unfinished match begins."""
        earliest = end
        for n, (stop, fallback) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            matched = self._matched[n]
            while matched and stop[matched] != character:
                matched = fallback[matched]
            matched += stop[matched] == character
            if matched == len(stop):
                begin = end - matched
                self._found = begin if self._found is None else min(self._found, begin)
                matched = fallback[matched]
            self._matched[n] = matched
            earliest = min(earliest, end - matched)
        return earliest

    def _stop(self, begin: int) -> str:
        emit, self._held = self._held[:begin], ""
        self._found, self.stopped = None, True
        return emit


def check_stops(stops: Sequence[str] | str) -> tuple[str, ...]:
    """The stop strings of a request as a tuple; `InputError` when there are too many or one is empty or not text."""
    if not isinstance(stops, str | list | tuple):
        raise InputError(f"stop: found {type(stops).__name__}, expected a text or a list of texts")
    found = (stops,) if isinstance(stops, str) else tuple(stops)
    if len(found) > MAX_STOP_STRINGS:
        raise InputError(f"stop: found {len(found)} stop strings, expected at most {MAX_STOP_STRINGS}")
    for n, stop in enumerate(found):
        if not isinstance(stop, str) or not stop:
            raise InputError(f"stop[{n}]: found {stop!r}, expected a text of at least one character")
    return found


def _fallbacks(stop: str) -> list[int]:
    """For each length matched, the longest shorter beginning of `stop` that ends the matched part."""
    fallback = [0] * (len(stop) + 1)
    matched = 0
    for n in range(1, len(stop)):
        while matched and stop[matched] != stop[n]:
            matched = fallback[matched]
        matched += stop[matched] == stop[n]
        fallback[n + 1] = matched
    return fallback
