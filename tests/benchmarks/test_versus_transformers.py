"""The benchmark beside `transformers`: what one phase sets does not reach the next one."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from benchmarks import versus_transformers
from benchmarks.versus_transformers import DECODE_STEPS, EXPERTS, PROMPT, Theirs, compare


class Model:
    """In place of transformers' model: notes the way of the experts, and tokens known and new, at each call."""

    def __init__(self):
        self.config = SimpleNamespace(_experts_implementation="")
        self.calls: list[tuple[str, int, int]] = []

    def __call__(self, tokens, use_cache, past_key_values=0, logits_to_keep=None):
        self.calls.append((self.config._experts_implementation, past_key_values, tokens.shape[1]))
        logits = np.zeros((len(tokens), 1, 4)).view(Torch)
        return SimpleNamespace(past_key_values=past_key_values + tokens.shape[1], logits=logits)


class Torch(np.ndarray):
    """An array with the names of a tensor's methods that the benchmark calls."""

    def long(self):
        return self

    def numpy(self):
        return np.asarray(self)


class Ours:
    """In place of this project's steps: notes at which lengths it decodes."""

    def __init__(self, folder, batch):
        self.batch, self.lengths = batch, []

    def prefill(self, prompts):
        self.first, self.length = np.zeros(self.batch, int), prompts.shape[1]

    def decode(self):
        self.lengths.append(self.length)
        self.length += 1


@pytest.mark.parametrize("rounds", [1, 9])
def test_each_phase_has_its_own_way_of_experts_and_length(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """`batched_mm`, which decode may take, would need tens of gigabytes in a prefill."""
    model, ours = Model(), []
    theirs = Theirs.__new__(Theirs)
    theirs.model, theirs.torch = model, SimpleNamespace(from_numpy=lambda a: a.view(Torch), inference_mode=nullcontext)
    monkeypatch.setattr(versus_transformers, "Theirs", lambda folder: theirs)
    monkeypatch.setattr(versus_transformers, "Ours", lambda *a: ours.append(Ours(*a)) or ours[-1])
    found = compare(Path(), 2, rounds, Console(quiet=True))
    assert set(found) == {("prefill", 2), ("decode", 2)}
    assert {way for way, _, new in model.calls if new == PROMPT} == set(EXPERTS["prefill"])
    assert {way for way, _, new in model.calls if new == 1} == set(EXPERTS["decode"])
    stand = {known for _, known, new in model.calls if new == 1}
    assert stand == set(ours[0].lengths) == set(range(PROMPT, PROMPT + DECODE_STEPS))
