"""Pages dealt to several devices: which positions each keeps and sees, against counting them one by one."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_jax.cache.page_sharding import PageSharding

POSITIONS = np.arange(-1, 48)


@pytest.mark.slow
@given(page_size=st.integers(1, 7), count=st.integers(1, 6), data=st.data())
@settings(max_examples=40, deadline=None)
def test_what_a_device_keeps_is_a_sequence_of_its_own(page_size: int, count: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, count - 1))
    deal = PageSharding(index, count, page_size)
    mine = [int(p) for p in POSITIONS if p >= 0 and p // page_size % count == index]
    local_slots, last_visible = (np.asarray(f(jnp.asarray(POSITIONS))) for f in (deal.local_slots, deal.last_visible))
    for position, where, last in zip(POSITIONS, local_slots, last_visible, strict=True):
        assert where == (mine.index(position) if position in mine else -1)
        assert last == (sum(p <= position for p in mine) - 1 if position >= 0 else -1)
    assert np.asarray(deal.positions(jnp.arange(len(mine)))).tolist() == mine
    assert np.asarray(deal.positions(jnp.array([-1]))).tolist() == [-1]


@given(page_size=st.integers(1, 7), count=st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_every_position_is_kept_once(page_size: int, count: int) -> None:
    local_slots = [
        np.asarray(PageSharding(i, count, page_size).local_slots(jnp.asarray(POSITIONS))) for i in range(count)
    ]
    assert ((np.array(local_slots) >= 0).sum(0) == (POSITIONS >= 0)).all()
