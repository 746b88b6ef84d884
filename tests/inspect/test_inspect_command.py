"""`glm52 inspect` as a user runs it: names, configs and folders, refusals, and what it does not import."""

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from glm52_jax.config import BUILT_IN
from glm52_jax.inputs.lengths import parse_length, short_length
from glm52_jax.inspect import report
from glm52_jax.inspect.account import model_breakdown
from glm52_jax.inspect.command import inspect
from glm52_jax.params.spec import published_tensors
from sharding.errors import InputError

TINY = BUILT_IN["glm-5.2-tiny"]
DOCS = Path(__file__).parents[2] / "docs" / "inspect.md"


def run(*args: str) -> str:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(inspect, [str(a) for a in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_dict()))
    return tmp_path


def write_zeros(folder: Path, *, without: str | None = None, extra: dict[str, tuple[int, ...]] | None = None) -> None:
    """A `model.safetensors` of zeros with the tensors of the tiny model; only its header will be read."""
    tensors = {t.name: (t.shape, "F32" if t.float32 else "BF16") for _, t in published_tensors(TINY)}
    tensors |= {name: (shape, "BF16") for name, shape in (extra or {}).items()}
    header, end = {}, 0
    for name, (shape, dtype) in tensors.items():
        if without is None or not name.startswith(without):
            start, end = end, end + math.prod(shape) * {"F32": 4, "BF16": 2}[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("ops", [False, True])
def test_the_report_fits_80_columns_and_is_plain(name, ops):
    sizes = ["--ops", "--batch", "4096", "--chunk", "3k"] if ops else []
    text = run(name, *sizes, "--context", "4k" if name.endswith("tiny") else "100000")
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    assert "\x1b" not in text


def test_the_report_states_the_published_figures():
    text = run("glm-5.2")
    for figure in ("743.38 B", "40.30 B", "59,585", "753,329,940,480", "1,506,659,919,872", "0-2, 6-74 by 4", "2.74"):
        assert figure in text


def test_the_documented_output_is_the_real_one():
    blocks = re.findall(r"```text\n\$ glm52 inspect (.*?)\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert blocks
    for args, shown in blocks:
        real = "\n".join(line.rstrip() for line in run(*args.split()).splitlines())
        assert shown.strip() in real


def test_json():
    found = json.loads(run("glm-5.2", "--json"))
    assert found["published_tensors"] == 59_585
    assert found["files"] is None
    assert "operators" not in found
    assert found == model_breakdown(BUILT_IN["glm-5.2"], "glm-5.2").as_json() | {"notes": [], "files": None}


def test_json_with_operators():
    found = json.loads(run("glm-5.2", "--json", "--ops", "--batch", "8", "--context", "256k", "--chunk", "1k"))
    assert {k: found["operators"][k] for k in ("batch", "context", "chunk")} == {
        "batch": 8,
        "context": 262_144,
        "chunk": 1024,
    }
    assert list(found["flops_per_token"]) == ["32768", "131072", "262144", "1048576"]


def test_batch_or_chunk_imply_the_operators():
    assert "operators" in json.loads(run("glm-5.2", "--json", "--batch", "2"))
    assert "sparse attention" in run("glm-5.2", "--chunk", "4k")


def test_a_short_model_is_shown_at_its_own_length():
    found = json.loads(run("glm-5.2-tiny", "--json", "--ops"))
    assert found["operators"]["context"] == 4096
    assert "4096" in found["flops_per_token"]
    assert " 1m" not in run("glm-5.2-tiny", "--ops")


def test_a_config_alone(folder):
    assert "no safetensors" in run(folder)
    found = json.loads(run(folder, "--json"))
    assert found["files"] is None
    assert found["published_tensors"] == model_breakdown(TINY, "").published.tensors
    assert json.loads(run(folder / "config.json", "--json"))["parameters"] == found["parameters"]


def test_a_folder_with_all_tensors(folder):
    write_zeros(folder)
    found = json.loads(run(folder, "--json"))
    assert found["files"] == {
        "tensors": found["published_tensors"],
        "bytes": found["tensor_bytes"],
        "ignored": {},
        "notes": [],
    }
    text = run(folder)
    assert re.search(r"tensors +440 +440", text)
    assert "no safetensors" not in text


def test_a_folder_as_the_writer_makes_it(tmp_path):
    from glm52_jax.checkpoint.export.write import write_checkpoint
    from glm52_jax.params.init import build_tree

    params = build_tree(TINY, lambda p: None if p.optional else np.zeros(p.stacked_shape(TINY), np.float32))
    write_checkpoint(tmp_path / "tiny", TINY, params, shard_bytes=500_000)
    found = json.loads(run(tmp_path / "tiny", "--json"))
    assert found["files"]["tensors"] == found["published_tensors"] == 440
    assert found["files"]["bytes"] == found["tensor_bytes"]
    assert found["name"] == str(tmp_path / "tiny")


def test_a_folder_without_the_mtp_layer_and_with_a_tensor_too_many(folder):
    unused = "model.layers.3.self_attn.indexer.wk.weight"
    write_zeros(folder, without="model.layers.8.", extra={unused: (32, 64)})
    found = json.loads(run(folder, "--json"))
    assert found["layers"]["mtp"] == 0
    assert found["parameters"]["total"] == found["parameters"]["total_without_mtp"]
    assert found["files"]["tensors"] == found["published_tensors"] + 1
    assert list(found["files"]["ignored"]) == [unused]
    text = " ".join(run(folder).split())
    assert any("no tensor of the MTP layer" in note for note in found["files"]["notes"])
    assert any(unused in note for note in found["files"]["notes"])
    for note in found["files"]["notes"]:
        assert note in text


def test_a_folder_that_is_not_this_model(folder):
    write_zeros(folder, without="model.norm.weight")
    with pytest.raises(InputError, match=r"model\.norm\.weight is missing"):
        run(folder)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["glm-7"], "glm-7: neither a checkpoint folder nor one of the built-in names"),
        (["glm-5.2", "--context", "2m"], "--context is 2097152 tokens, more than the model's max_position_embeddings"),
        (["glm-5.2", "--context", "12q"], "--context is '12q', expected a number of tokens such as 4096, 128k or 1m"),
        (["glm-5.2", "--chunk", "64k", "--context", "32k"], "the chunk of 65536 tokens is longer than the context"),
        (["glm-5.2", "--batch", "0"], "batch is 0, expected at least 1"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(args, message):
    done = subprocess.run(
        [sys.executable, "-c", "from glm52_jax.cli import main; main()", "inspect", *args],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


@pytest.mark.parametrize("args", [["--help"], ["inspect", "--help"], ["inspect", "glm-5.2-tiny", "--ops"]])
def test_no_jax_is_imported(args):
    code = (
        "import sys\n"
        "from glm52_jax.cli import main\n"
        "try:\n    main()\nexcept SystemExit as exit:\n    assert not exit.code, exit.code\n"
        "print({name.split('.')[0] for name in sys.modules} & {'jax', 'jaxlib', 'flax'} or 'none', file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "none"


def test_help_is_quick():
    """The best of three, so that a busy machine does not fail it."""
    took = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "from glm52_jax.cli import main; main()", "--help"], capture_output=True)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.3


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("128k", 131_072),
        ("128K", 131_072),
        ("1m", 1_048_576),
        ("0.5m", 524_288),
        ("1.5k", 1536),
        (" 2k ", 2048),
        ("1_000", 1000),
    ],
)
def test_lengths(text, tokens):
    assert parse_length(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "-1", "0", "0k", "1g", "1.3", "0.3k", "1e3", "1 k", "1__0", "٣"])
def test_lengths_that_are_none(text):
    with pytest.raises(InputError, match=r"^length is .*, expected a .*number of tokens[^\n]*$"):
        parse_length(text)


@pytest.mark.parametrize("tokens", [1, 1000, 1024, 1536, 131_072, 1_048_576, 1_572_864])
def test_short_length_is_the_inverse(tokens):
    assert parse_length(short_length(tokens)) == tokens


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((), ""),
        ((0,), "0"),
        ((0, 1), "0, 1"),
        ((0, 1, 2, 6, 10, 14), "0-2, 6-14 by 4"),
        (range(78), "0-77"),
        ((0, 5, 6, 7), "0, 5, 6, 7"),
    ],
)
def test_ranges(layers, text):
    assert report.ranges(layers) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, ""),
        (12, "12 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_996, "10.0 kB"),
        (999_900, "1.00 MB"),
        (123_456_789, "123 MB"),
        (1_506_659_919_872, "1.51 TB"),
    ],
)
def test_numbers_with_units(value, text):
    assert report.si(value, "B") == text


def test_notes_on_the_config_and_its_sampling(folder: Path) -> None:
    """A file that asks for one token, and fields that differ, are said and stop nothing."""
    (folder / "generation_config.json").write_text(json.dumps({"top_p": 0, "min_p": 0.1}))
    fields = TINY.to_dict() | {"index_topk_freq": 2, "index_skip_topk_offset": 1}
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["o_proj", "re:nothing$"]}
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": quantized}))
    notes = json.loads(run(str(folder), "--json"))["notes"]
    assert len(notes) == 4
    for part in (
        "indexer_types is taken",
        "min_p is 0.1, which is not applied",
        "top_p is 0, so the most likely token",
        "quantization_config excepts 're:nothing$', which means no tensor of this model",
    ):
        assert sum(part in note for note in notes) == 1, part
    text = " ".join(run(str(folder)).split())
    assert "Note: " in text
    assert "indexer_types is taken." in text
