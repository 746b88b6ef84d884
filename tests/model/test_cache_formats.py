"""Caches in FP8: the rows that come back, the model on them through any path, and that unlike ones never mix."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import glm52_jax as glm
from glm52_jax.cache.cache_format import INDEX_KEY_FORMATS, LATENT_FORMATS, PLAIN_CACHE, CacheFormat
from glm52_jax.cache.paged_cache import PagedCache
from glm52_jax.cache.pages import context_rows, gather_rows
from glm52_jax.cache.row_formats import GroupScaledFormat, PackedStack, TensorScaledFormat, empty_stack
from glm52_jax.config import load_config
from glm52_jax.inspect.account import index_key_bytes, latent_row_bytes
from glm52_jax.kernels.cache_write.api import write_rows
from glm52_jax.kernels.lib.layers import hadamard
from glm52_jax.params.quantization import dequantize_groups, quantize_groups
from infer.generate import generate
from infer.steps import StepProvider
from sharding.errors import InputError
from tests.model.cases import FORMS, figures
from tests.model.paths import Walk
from tests.model.tiny import EXPANDED, random_params, tiny, tiny_case

CONFIG = tiny(index_head_dim=16, index_n_heads=8)
ROWS = {
    "groups": GroupScaledFormat(coded=11, plain=3, dtype=jnp.dtype(jnp.bfloat16), group=4),
    "row": GroupScaledFormat(coded=8, plain=0, dtype=jnp.dtype(jnp.float32), group=8),
    "tensor": TensorScaledFormat(width=9, scales=(0.5, 2.0)),
}
FP8 = [
    CacheFormat("fp8_groups"),
    CacheFormat("fp8_tensor"),
    CacheFormat(index_keys="fp8"),
    CacheFormat("fp8_groups", "fp8_rotated"),
]


@pytest.fixture(scope="module")
def params() -> dict:
    return random_params(CONFIG)


@given(
    values=arrays.arrays(
        np.float32,
        (2, 7),
        elements=st.floats(-1e4, 1e4, width=32),
    ),
    group=st.sampled_from([1, 3, 7]),
)
@settings(max_examples=40, deadline=None)
def test_groups_are_rounded_by_the_least_power_of_two(values: np.ndarray, group: int) -> None:
    codes, scales = (np.asarray(a) for a in quantize_groups(jnp.asarray(values), group))
    assert codes.shape == values.shape
    for index in np.ndindex(*scales.shape):
        part = values[(*index[:-1], slice(index[-1] * group, (index[-1] + 1) * group))]
        most = max(np.abs(part).max(), np.float32(1e-4))
        scale = scales[index]
        assert np.frexp(scale)[0] == 0.5  # a power of two
        assert most <= 448 * scale
        assert most > 448 * scale / 2
        found = codes[(*index[:-1], slice(index[-1] * group, (index[-1] + 1) * group))]
        assert found.tobytes() == (part / scale).astype(ml_dtypes.float8_e4m3fn).tobytes()
    back = np.asarray(dequantize_groups(jnp.asarray(codes), jnp.asarray(scales), group))
    spread = np.repeat(scales, group, axis=-1)[..., : values.shape[-1]]
    # Half a step of e4m3: a sixteenth of the value, or of the least normal number.
    assert (np.abs(back - values) <= np.maximum(np.abs(values) / 16, spread * 2.0**-10)).all()


def test_what_is_beyond_a_layers_range_becomes_the_largest_code() -> None:
    form = TensorScaledFormat(2, (1.0, 0.5))
    codes = form.encode(jnp.array([1e5, -1e5]), 1)
    assert form.decode(codes, 1).tolist() == [224.0, -224.0]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("tokens", [1, 7])
def test_rows_come_back_from_pages_as_they_were_rounded(name: str, tokens: int) -> None:
    form, rng = ROWS[name], np.random.default_rng(tokens)
    width = 14 if name == "groups" else 8 if name == "row" else 9
    stack = empty_stack(form, (2, 6, 3))
    stack = jax.tree.map(lambda part: jnp.full(part.shape, jnp.nan, part.dtype), stack)
    table = jnp.array([[4, 0, 5], [1, 3, 2]], jnp.int32)
    positions = np.full((2, tokens), -1, np.int32)
    positions[0, : tokens - tokens // 3] = np.arange(tokens - tokens // 3)
    rows = rng.normal(size=(2, tokens, width)).astype(np.float32)
    written = write_rows(stack, 1, jnp.asarray(rows), table, jnp.asarray(positions), backend="reference")
    assert isinstance(written, PackedStack)
    expected = np.asarray(form.decode(form.encode(jnp.asarray(rows), 1), 1))
    real = positions >= 0
    found = np.asarray(gather_rows(written, 1, table, jnp.asarray(positions)))
    np.testing.assert_array_equal(found[real], expected[real])
    assert not found[~real].any()
    whole = np.asarray(context_rows(written, 1, table, jnp.array([real[0].sum(), 0])))
    np.testing.assert_array_equal(whole[0, : real[0].sum()], expected[0, : real[0].sum()])
    assert not whole[0, real[0].sum() :].any()
    assert not whole[1].any()


def test_bytes_of_a_row_are_those_of_the_account() -> None:
    config = load_config("glm-5.2")
    for name, account in (("plain", "bf16"), ("fp8_groups", "fp8_groups"), ("fp8_tensor", "fp8_tensor")):
        assert CacheFormat(name).latent_rows(config, 79, jnp.bfloat16).row_bytes == latent_row_bytes(config)[account]
    for name, account in (("plain", "bf16"), ("fp8", "fp8"), ("fp8_rotated", "fp8")):
        form = CacheFormat(index_keys=name).key_rows(config, jnp.bfloat16)
        assert form.row_bytes == index_key_bytes(config)[account]


@pytest.mark.slow
@pytest.mark.parametrize("form", FP8, ids=lambda form: f"{form.latent}-{form.index_keys}")
def test_the_model_is_the_same_through_every_path(params: dict, form: CacheFormat) -> None:
    """Rows are rounded one by one, so chunks, pages, padding and neighbours change nothing but float32's last bits.

    Those can put a value on the other side of a rounding, which is why the logits are allowed more than elsewhere.
    """
    case = tiny_case(CONFIG, (29, 17), params=params, cache_format=form)
    plain = tiny_case(CONFIG, (29, 17), params=params)
    assert np.abs(plain.golden["logits"] - case.golden["logits"])[case.real].max() > 0.01
    for size, way in ((7, "absorbed-indices-cpu"), (16, "absorbed-mask-reference")):
        walk = Walk(case, params, page_size=5, form=form).run(size, FORMS[way])
        found = figures(case, walk.seen)
        assert found["logits"] < 0.01, (way, found)
        assert found["topk"] == 0, (way, found)
        assert found["experts"] == 0, (way, found)


def test_the_rotation_cancels_in_scores() -> None:
    """On both sides it changes nothing, on one side everything."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(5, 16)), jnp.float32) for _ in range(2))
    exact = np.asarray(q @ k.T)
    np.testing.assert_allclose(np.asarray(hadamard(q) @ hadamard(k).T), exact, atol=1e-5)
    assert np.abs(np.asarray(q @ hadamard(k).T) - exact).max() > 0.1
    np.testing.assert_allclose(np.asarray(hadamard(hadamard(q))), np.asarray(q), atol=1e-6)


@pytest.mark.slow
def test_a_rotation_of_keys_alone_is_seen(params: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    form = CacheFormat(index_keys="fp8_rotated")
    right = tiny_case(CONFIG, (29,), params=params, cache_format=form)
    monkeypatch.setattr(
        "glm52_jax.cache.row_formats.GroupScaledFormat.encode", _encode_unturned(GroupScaledFormat.encode)
    )
    jax.clear_caches()
    try:
        wrong = tiny_case(CONFIG, (29,), params=params, cache_format=form)
    finally:
        jax.clear_caches()
    assert (right.golden["topk"] != wrong.golden["topk"]).any()


def _encode_unturned(encode):
    @functools.wraps(encode)
    def wrapped(self: GroupScaledFormat, rows: jax.Array, layer: jax.Array | int) -> dict[str, jax.Array]:
        return encode(self, hadamard(rows) if self.rotated else rows, layer)  # turned back

    return wrapped


def test_unlike_caches_do_not_mix(params: dict) -> None:
    """The format is part of a cache's type: a compiled step takes no other, and leaves of two are never paired."""
    plain, rotated, unrotated = (
        PagedCache.create(CONFIG, 1, 16, dtype=jnp.dtype(jnp.float32), form=form)
        for form in (PLAIN_CACHE, CacheFormat(index_keys="fp8_rotated"), CacheFormat(index_keys="fp8"))
    )
    for one, other in ((rotated, plain), (rotated, unrotated)):
        with pytest.raises(ValueError, match=r"(?i)pytree|mismatch"):
            jax.tree.map(lambda a, _: a, one, other)
    compiled = jax.jit(lambda cache: jax.tree.map(lambda a: a + 1, cache)).lower(rotated).compile()
    compiled(rotated)
    with pytest.raises(TypeError):
        compiled(unrotated)
    scaled = CacheFormat("fp8_tensor", latent_scales=(2.0,) * 5)
    assert scaled.latent_rows(CONFIG, 5, jnp.float32) != CacheFormat("fp8_tensor").latent_rows(CONFIG, 5, jnp.float32)


@pytest.mark.slow
def test_generation_is_that_of_whole_texts(params: dict) -> None:
    form = CacheFormat("fp8_groups", "fp8")
    prompt = list(range(3, 20))
    found = generate(params, CONFIG, [prompt], 6, stop_ids=(), cache_format=form, chunk=8)[0]
    logits = glm.forward(params, CONFIG, np.array([prompt + found[:-1]]), policy=EXPANDED, cache_format=form)
    assert np.asarray(jnp.argmax(logits[0, len(prompt) - 1 :], axis=-1)).tolist() == found


def test_a_state_has_the_format_that_was_asked_for(params: dict) -> None:
    provider = StepProvider.of(params, CONFIG, batch=1, capacity=16, chunk=8, cache_format=CacheFormat("fp8_groups"))
    state = jax.eval_shape(provider.state)
    assert state.cache.latent.parts["codes"].dtype == jnp.float8_e4m3fn
    assert state.cache.index_keys.dtype == jnp.float32


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: CacheFormat("fp8"), f"cache format of latent is 'fp8', expected {' or '.join(LATENT_FORMATS)}"),
        (
            lambda: CacheFormat(index_keys="int4"),
            f"cache format of index_keys is 'int4', expected {' or '.join(INDEX_KEY_FORMATS)}",
        ),
        (lambda: CacheFormat(latent_scales=(0.0,)), "expected finite numbers above zero"),
        (
            lambda: CacheFormat("fp8_tensor", latent_scales=(1.0,)).latent_rows(CONFIG, 5, jnp.float32),
            "latent_scales has 1 scales, expected one for each of 5 layers",
        ),
        (
            lambda: CacheFormat(index_keys="fp8_rotated").key_rows(
                dataclasses.replace(CONFIG, index_head_dim=20), jnp.float32
            ),
            "index_head_dim is 20, expected a power of two",
        ),
    ],
)
def test_bad_formats_are_refused(make, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        make()
    assert sentence in str(error.value)
