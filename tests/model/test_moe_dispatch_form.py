"""The choice of a form of dispatch: its buffers, its bytes, and where the rule turns over."""

import math
from dataclasses import replace

import numpy as np
import pytest

from glm52_jax.config import load_config
from glm52_jax.model.dispatch_policy import DispatchPolicy, choose_policy, plan_hops
from sharding.errors import InputError
from sharding.layout import Layout

CONFIG = load_config("glm-5.2")
SENT = DispatchPolicy("all_to_all", "ragged")
POD = Layout(expert=64)
COUNTS = (1, 4, 16, 64, 1024)


def test_mean_rows_are_those_of_even_routing():
    """A token of 8 experts out of 256 on 16 devices, drawn many times."""
    (hop,) = plan_hops(Layout(expert=16), 100, 256, 8, SENT)
    generator = np.random.default_rng(0)
    drawn = np.argsort(generator.random((4000, 256)), axis=-1)[:, :8] // 16
    distinct = np.mean([len(set(row)) for row in drawn.tolist()])
    assert math.isclose(hop.mean, 100 * distinct, rel_tol=0.01)
    assert hop.sends == 800
    assert hop.receives == -(-math.ceil(1.25 * hop.mean) // 8) * 8


def test_buffers_do_not_grow_past_what_can_come():
    (hop,) = plan_hops(Layout(expert=2), 5, 256, 8, replace(SENT, capacity=9.0))
    assert (hop.sends, hop.receives) == (10, 16)


def test_by_slice_a_row_crosses_once():
    """Flat, a token crosses to each of its devices in another slice; by slice once to each slice."""
    layout = Layout(data=4, expert=16, slices=4).with_rules(experts=("data", "expert"))
    across, inside = plan_hops(layout, 100, 256, 8, SENT)
    (flat,) = plan_hops(layout, 100, 256, 8, replace(SENT, by_slice=False))
    assert across.group.axes == ("data",)
    assert inside.group.axes == ("expert",)
    assert across.mean * 3 / 4 < 400 * 3 / 4 < flat.mean * 48 / 64
    assert inside.mean == flat.mean
    assert inside.tokens == across.receives


def test_few_tokens_are_gathered_and_many_are_sent():
    for devices, most in ((8, 64), (16, 4), (32, 1)):  # on more devices fewer tokens are worth gathering
        names = [choose_policy(Layout(expert=devices), tokens, CONFIG).form.name for tokens in COUNTS]
        assert names == ["gather" if tokens <= most else "all_to_all" for tokens in COUNTS], devices
    # On four devices nearly every token goes everywhere anyway.
    assert choose_policy(Layout(expert=4), 4096, CONFIG).form.name == "gather"


def test_the_account_is_in_bytes_of_this_device():
    choice = choose_policy(POD, 16, CONFIG)
    row, total = 6144 * 2 + 8 * 8, 6144 * 4
    assert choice.gather.moved == 63 * 16 * (row + total)
    (hop,) = plan_hops(POD, 16, 256, 8, SENT)
    assert choice.all_to_all.moved == math.ceil(hop.mean * 63 / 64) * (row + total) + 64 * 63 * 4
    assert "16 tokens a device: gather moves 35.5 MiB in 3 steps, all-to-all" in choice.reason


def test_experts_that_all_have_the_tokens_of_are_not_sent():
    for layout in (Layout(), Layout(data=8), Layout(tensor=8)):
        choice = choose_policy(layout, 4096, CONFIG)
        assert choice.form.name == "gather"
        assert choice.reason == "every device has all tokens that its experts may get"


def test_a_wrong_form_is_refused():
    with pytest.raises(InputError, match="'scatter' is not one of gather, all_to_all"):
        DispatchPolicy("scatter")
    with pytest.raises(InputError, match="capacity is 0, expected a positive number"):
        DispatchPolicy("all_to_all", capacity=0)
