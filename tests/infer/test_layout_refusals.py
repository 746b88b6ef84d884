"""A rule of a layout is right or refused, by the same sentence in plans, loading, generation and the selftest.

That what is not refused is right is shown by `tests.model.random_layouts`.
"""

from pathlib import Path
from typing import Any

import jax
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_jax.checkpoint.load.loader import load_params
from glm52_jax.cli import glm52
from glm52_jax.params.axis_rules import AXIS_RULES, check_rules
from infer.commands.on_hosts import choose_layout
from infer.generate import Generation
from infer.planning.request import plan_request
from infer.selftest.machine import Machine
from infer.steps import StepProvider
from sharding.errors import InputError
from sharding.hosts.process_group import ALONE
from sharding.layout import AXES, Layout, logical_names
from sharding.presets import PRESETS
from tests.infer.conftest import CONFIG

SIZES = [(d, e, 8 // d // e) for d in (1, 2, 4, 8) for e in (1, 2, 4, 8) if d * e <= 8]
SLICE = "v5p:2x2x2"

# On data 1 x expert 4 x tensor 2: what no step computes right, and words of why.
REFUSED = {
    'heads = ["expert"]': ("batch and heads", "expert of 4", "sum over heads"),
    'tokens = ["tensor"]\nbatch = []': ("tokens and heads", "tensor of 2", "sum over heads"),
    'tokens = ["expert"]': ("batch and tokens", "expert of 4", "one array"),
    'kv_pages = ["expert"]': ("batch and kv_pages", "expert of 4", "its own sequences"),
    'kv_pages = ["tensor", "expert"]': ("batch and kv_pages", "expert of 4", "its own sequences"),
    'expert_mlp = ["expert"]': ("experts and expert_mlp", "expert of 4", "one array"),
    'q_lora = ["expert"]': ("q_lora", "expert of 4", "no step communicates"),
    'kv_lora = ["expert"]': ("kv_lora", "expert of 4", "no step communicates"),
    'embed = ["data", "tensor"]': ("embed", "tensor of 2", "no step communicates"),
    'layers = ["expert"]': ("layers", "expert of 4", "no step communicates"),
}
RIGHT = (
    'mlp = ["expert", "tensor"]',
    'vocab = ["expert", "tensor"]',
    'router_experts = ["tensor"]',
    'index_heads = ["tensor"]',
    'heads = ["data"]\nq_lora = ["data"]\nembed = "data"',  # an axis of one device
)


def sentence(call: Any) -> str:
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def toml(folder: Path, rules: str) -> str:
    path = folder / "mine.toml"
    path.write_text(f"data = 1\nexpert = 4\ntensor = 2\n[rules]\n{rules}\n")
    return str(path)


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As many devices as the layouts have, of which nothing but their number is asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    devices = jax.devices()[:1] * 8
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    monkeypatch.setattr(jax, "devices", lambda *_: devices)


@pytest.mark.parametrize("rules", REFUSED)
def test_every_command_refuses_by_one_sentence(eight: None, tmp_path: Path, checkpoint: Path, rules: str) -> None:
    layout, model = toml(tmp_path, rules), str(checkpoint)
    plan = ("plan", model, "--topology", SLICE, "--context", "1k", "--layout")
    said = set()
    for command in (
        (*plan, layout),
        (*plan, layout, "--sweep"),
        (*plan, layout, "--fit", "--step", "prefill", "--chunk", "64"),
        ("generate", model, "Hello", "--layout", layout),
        ("chat", model, "--layout", layout),
        ("selftest", "--layout", layout),
    ):
        result = CliRunner().invoke(glm52, list(command))
        assert isinstance(result.exception, InputError), (command, result.output)
        said.add(str(result.exception))
    [one] = said
    assert all(word in one for word in ("layout mine", *REFUSED[rules])), one


@pytest.mark.parametrize("rules", RIGHT)
def test_right_rules_are_taken(eight: None, tmp_path: Path, rules: str) -> None:
    layout = toml(tmp_path, rules)
    assert choose_layout(layout, CONFIG, "keep", ALONE) == plan_request(CONFIG, SLICE, layout, context=1024).layout
    assert Machine.of(layout).layout.devices == 8


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    rules = draw(
        st.dictionaries(
            st.sampled_from(logical_names()),
            st.lists(st.sampled_from(AXES), max_size=3, unique=True).map(tuple),
            max_size=3,
        )
    )
    return Layout(*draw(st.sampled_from(SIZES)), name="drawn").with_rules(**rules)


@settings(max_examples=60, deadline=None)
@given(layout=layouts())
def test_plan_loading_and_generation_say_the_same(checkpoint: Path, params: dict, layout: Layout) -> None:
    """Rules and sizes alike, before a device is asked for; what is refused nowhere needs the eight devices."""
    said = [
        sentence(lambda: load_params(checkpoint, layout=layout)),
        sentence(lambda: Generation(params, CONFIG, [[1, 2, 3]], 4, layout=layout)),
    ]
    try:
        plan_request(CONFIG, SLICE, layout, context=1024)
    except InputError as error:
        said.append(str(error))
        with pytest.raises(InputError):
            choose_layout_of(layout)
    else:
        assert "needs 8 devices, found 1" in said[0]
    assert len(set(said)) == 1, said


def choose_layout_of(layout: Layout) -> None:
    """What `choose_layout` asks, of a layout that is not from a file."""
    from glm52_jax.params.init import abstract_params
    from glm52_jax.params.sharding import param_specs

    param_specs(abstract_params(CONFIG), CONFIG, layout)


def test_every_name_has_its_line_in_the_table() -> None:
    assert sorted(AXIS_RULES) == sorted(logical_names())
    assert all(bool(d.how) != bool(d.whole) for d in AXIS_RULES.values())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_never_refused(name: str) -> None:
    for devices in (1, 2, 4, 8, 16, 64, 256, 1024):
        for layout in PRESETS[name](devices, experts=256):
            check_rules(layout)


def test_a_provider_is_refused_too() -> None:
    """Whoever builds steps without `generate`."""
    wrong = Layout(expert=4, tensor=2).with_rules(heads=("expert",))
    said = sentence(lambda: StepProvider(CONFIG, jax.numpy.float32, 8, 64, 16, layout=wrong, mesh=object()))  # type: ignore[arg-type]
    assert "batch and heads are both over mesh axis expert" in said


def test_names_that_are_none_and_names_without_a_rule() -> None:
    unknown = Layout(expert=2).with_rules(head=("tensor",))
    assert "rule for 'head', expected one of batch, tokens" in sentence(lambda: check_rules(unknown))
    missing = Layout(expert=2, rules=(("batch", ("expert",)),))
    assert "no rule for 'tokens'" in sentence(lambda: check_rules(missing))


def test_rules_as_lists_and_by_one_name() -> None:
    assert Layout(tensor=2).with_rules(heads="tensor", mlp=["tensor"]) == Layout(tensor=2)
