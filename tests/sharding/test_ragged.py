"""Offsets of exchanged rows: every row arrives once, in the rounds that were counted, and its result comes home."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sharding.errors import InputError
from sharding.exchange import (
    ExchangeGroup,
    ExchangeRound,
    join_rows,
    resolve_exchange,
    round_windows,
    rounds_needed,
    rows_to_send,
    split_rows,
)
from sharding.layout import Layout


@st.composite
def counts_of_rows(draw: st.DrawFn) -> np.ndarray:
    """Rows from each device to each: even, or with devices that send or get nothing, or all to one."""
    devices = draw(st.integers(1, 6))
    counts = draw(arrays(np.int32, (devices, devices), elements=st.integers(0, 9)))
    counts[draw(arrays(np.bool_, devices))] = 0
    counts[:, draw(arrays(np.bool_, devices))] = 0
    return counts


def simulate(operands: list[np.ndarray], outputs: list[np.ndarray], windows: list[ExchangeRound]) -> None:
    """`jax.lax.ragged_all_to_all` row by row, by its documentation; what it does not define is refused."""
    written: list[set[int]] = [set() for _ in outputs]
    for source, window in enumerate(windows):
        for target, output in enumerate(outputs):
            size = window.send_sizes[target]
            assert size == windows[target].recv_sizes[source]
            for row in range(size):
                taken, place = window.input_offsets[target] + row, window.output_offsets[target] + row
                assert 0 <= taken < len(operands[source])
                assert 0 <= place < len(output), "past the end of the receive buffer"
                assert place not in written[target], "two rows in one place"
                written[target].add(place)
                output[place] = operands[source][taken]


@given(counts=counts_of_rows(), capacity=st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_every_row_arrives_once_and_comes_home(counts: np.ndarray, capacity: int) -> None:
    devices = range(len(counts))
    # A row is (source, row of its send buffer) as one number; results are its negative.
    sent = [1 + 1000 * device + np.arange(counts[device].sum()) for device in devices]
    home = [np.zeros_like(rows) for rows in sent]
    arrived: list[list[int]] = [[] for _ in devices]
    rounds = rounds_needed(counts, capacity)
    assert rounds == max(-(-total // capacity) for total in counts.sum(0))
    for number in range(rounds):
        pairs = [round_windows(counts, device, capacity, number) for device in devices]
        received = [np.zeros(capacity, int) for _ in devices]
        simulate(sent, received, [there for there, _ in pairs])
        for device in devices:
            rows = received[device][received[device] > 0]
            # The buffer is filled from its start and is full in every round but the receiver's last.
            assert len(rows) == np.clip(counts[:, device].sum() - number * capacity, 0, capacity)
            assert (received[device][: len(rows)] > 0).all()
            arrived[device].extend(rows.tolist())
        simulate([-rows for rows in received], home, [back for _, back in pairs])
    for device in devices:
        begins = np.cumsum(counts, axis=1) - counts
        expected = [
            1 + 1000 * source + begins[source, device] + row
            for source in devices
            for row in range(counts[source, device])
        ]
        assert arrived[device] == expected
        np.testing.assert_array_equal(home[device], -sent[device])


@given(data=st.data(), tokens=st.integers(1, 9), k=st.integers(1, 5), count=st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_a_token_is_sent_once_to_each_of_its_devices(data: st.DataObject, tokens: int, k: int, count: int) -> None:
    destinations = data.draw(arrays(np.int32, (tokens, k), elements=st.integers(-1, count - 1)))
    sending = rows_to_send(destinations, count)
    pairs = [(d, t) for d in range(count) for t in range(tokens) if d in destinations[t]]
    used = len(pairs)
    assert len(sending.token_of) == tokens * min(k, count) >= used
    assert sending.token_of[:used].tolist() == [token for _, token in pairs]
    np.testing.assert_array_equal(sending.counts, [sum(d == device for d, _ in pairs) for device in range(count)])
    for token in range(tokens):
        rows = sending.row_of[token][sending.row_of[token] >= 0]
        assert sorted(rows) == [row for row, (_, t) in enumerate(pairs) if t == token]
        for place, row in enumerate(sending.row_of[token]):
            assert row < 0 or pairs[row][0] == destinations[token, place]


def test_rows_survive_the_form_in_which_they_travel():
    for dtype in (jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.int32):
        for width in (1, 6, 8):
            x = jnp.arange(5 * width, dtype=jnp.float32).reshape(5, width).astype(dtype)
            assert split_rows(x).ndim == 3
            np.testing.assert_array_equal(join_rows(split_rows(x)), x)
    assert split_rows(jnp.zeros((5, 6), jnp.bfloat16)).shape == (5, 2, 3)  # two values of 16 bits in a word


def test_groups_of_slices():
    layout = Layout(data=4, expert=3, slices=2)
    assert ExchangeGroup.across_slices(layout) == ExchangeGroup(("data",), 2, ((0, 2), (1, 3)))
    assert ExchangeGroup.inside_slice(layout, ("data", "expert")) == ExchangeGroup(
        ("data", "expert"), 6, (tuple(range(6)), tuple(range(6, 12)))
    )
    one = Layout(data=2, expert=3, slices=2)
    assert ExchangeGroup.across_slices(one) == ExchangeGroup(("data",), 2)
    assert ExchangeGroup.inside_slice(one, ("data", "expert")) == ExchangeGroup(("expert",), 3)


def test_transport_is_chosen_by_platform_or_by_name():
    assert [resolve_exchange(None, p) for p in ("cpu", "tpu")] == ["padded", "ragged"]
    assert resolve_exchange("padded", "tpu") == "padded"
    with pytest.raises(InputError, match="'fast' is not one of ragged, padded"):
        resolve_exchange("fast", "tpu")
