"""A folder whose files are damaged, missing or at odds with each other is refused, and nothing is read from it."""

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm52_jax.checkpoint.load import loader
from glm52_jax.checkpoint.load.loader import load_params
from glm52_jax.checkpoint.sources.published import INDEX_FILE, SINGLE_FILE
from sharding.errors import InputError
from tests.checkpoint.builders import Folder
from tests.checkpoint.damage import Cases, Damage, assert_refused, cut, header_entry, weight_map

SHARD = "model-00002-of-00005.safetensors"
Q_A, O = "model.layers.2.self_attn.q_a_proj.weight", "model.layers.2.self_attn.o_proj.weight"
CASES = Cases()

# Files.


@CASES.add("fp8", INDEX_FILE, SHARD, "not in the folder", "should hold", "download looks incomplete")
def a_shard_is_missing(folder: Folder):
    (folder.path / SHARD).unlink()


@CASES.add("fp8", "model-00001-of-00005.safetensors and 4 more, which are not in the folder")
def all_shards_are_missing(folder: Folder):
    for file in folder.files:
        (folder.path / file).unlink()


@CASES.add("fp8", INDEX_FILE, "names other.safetensors", "not in the folder", "should hold 1 tensors", Q_A)
def the_index_names_a_file_that_is_not_there(folder: Folder):
    weight_map(folder, lambda m: m.update({Q_A: "other.safetensors"}))


@CASES.add("fp8", SHARD, "not in the folder")
def a_shard_is_a_link_to_nothing(folder: Folder):
    (folder.path / SHARD).unlink()
    (folder.path / SHARD).symlink_to("nowhere")


@CASES.add("fp8", SHARD, "not in the folder")
def a_shard_is_a_link_to_itself(folder: Folder):
    (folder.path / SHARD).unlink()
    (folder.path / SHARD).symlink_to(SHARD)


@CASES.add("fp8", SHARD, "is not a regular file")
def a_shard_is_a_folder(folder: Folder):
    (folder.path / SHARD).unlink()
    (folder.path / SHARD).mkdir()


@CASES.add("fp8", SHARD, "is not a regular file")
def a_shard_is_a_pipe(folder: Folder):
    (folder.path / SHARD).unlink()
    os.mkfifo(folder.path / SHARD)


@CASES.add("fp8", SHARD, ": 0 bytes", "expected a safetensors file", "download looks cut")
def a_shard_is_empty(folder: Folder):
    cut(folder.path / SHARD, 0)


@CASES.add("fp8", SHARD, ": 5 bytes", "expected a safetensors file", "download looks cut")
def a_shard_is_cut_within_the_header_length(folder: Folder):
    cut(folder.path / SHARD, 5)


@CASES.add("fp8", SHARD, ": 100 bytes, too short for its header of", "download looks cut")
def a_shard_is_cut_within_the_header(folder: Folder):
    cut(folder.path / SHARD, 100)


@CASES.add("fp8", SHARD, "bytes, but its header describes", "download looks cut")
def a_shard_lacks_one_byte(folder: Folder):
    cut(folder.path / SHARD, -1)


@CASES.add("fp8", SHARD, "bytes, but its header describes", "download looks cut")
def a_shard_lacks_its_last_tensor(folder: Folder):
    cut(folder.path / SHARD, -2048)


@CASES.add("fp8", SHARD, "bytes, but its header describes")
def a_shard_has_one_byte_more(folder: Folder):
    with (folder.path / SHARD).open("ab") as file:
        file.write(b"\0")


@CASES.add("fp8", SHARD, "Git LFS pointer", "git lfs pull")
def a_shard_is_a_pointer(folder: Folder):
    (folder.path / SHARD).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5360000000\n")


@CASES.add("fp8", SHARD, "does not begin with the length of a safetensors header")
def a_shard_is_a_web_page(folder: Folder):
    (folder.path / SHARD).write_text("<!doctype html><html><body>404</body></html>")


@CASES.add("fp8", SHARD, "does not begin with the length", str(2**64 - 1))
def a_header_is_said_to_be_huge(folder: Folder):
    data = (folder.path / SHARD).read_bytes()
    (folder.path / SHARD).write_bytes(b"\xff" * 8 + data[8:])


# Headers.


@CASES.add("plain", SINGLE_FILE, "header is not JSON")
def a_header_is_garbage(folder: Folder):
    data = (folder.path / SINGLE_FILE).read_bytes()
    (folder.path / SINGLE_FILE).write_bytes(data[:8] + b"\x80" * 64 + data[72:])


@CASES.add("plain", SINGLE_FILE, "header is not JSON")
def a_header_is_in_another_encoding(folder: Folder):
    text = '{"a": 1}'.encode("utf-16")
    (folder.path / SINGLE_FILE).write_bytes(len(text).to_bytes(8, "little") + text)


@CASES.add("plain", SINGLE_FILE, "header is not JSON")
def a_header_is_nested_without_end(folder: Folder):
    text = b"[" * 200_000
    (folder.path / SINGLE_FILE).write_bytes(len(text).to_bytes(8, "little") + text)


@CASES.add("plain", SINGLE_FILE, "header is a JSON list, expected an object")
def a_header_is_a_list(folder: Folder):
    folder.edit_header(lambda header: [1, 2])


@CASES.add("plain", SINGLE_FILE, "'model.norm.weight' is in one object twice")
def a_header_names_a_tensor_twice(folder: Folder):
    data = (folder.path / SINGLE_FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].rstrip()
    entry = json.dumps(json.loads(text)["model.norm.weight"]).encode()
    text = text[:-1] + b',"model.norm.weight":' + entry + b"}"
    (folder.path / SINGLE_FILE).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@CASES.add("plain", SINGLE_FILE, "a tensor 'two\\nlines'", "expected printable text")
def a_name_has_a_line_break(folder: Folder):
    folder.edit_header(lambda header: header.update({"two\nlines": header.pop(O)}))


@CASES.add("plain", SINGLE_FILE, "header has 7 for model.norm.weight, expected an object")
def an_entry_is_a_number(folder: Folder):
    folder.edit_header(lambda header: header.update({"model.norm.weight": 7}))


@CASES.add("plain", SINGLE_FILE, O, "has dtype 'F4', expected one of F64, F32")
def a_dtype_is_unknown(folder: Folder):
    header_entry(folder, O, dtype="F4")


@CASES.add("plain", SINGLE_FILE, O, "has dtype ['F32'], expected one of")
def a_dtype_is_a_list(folder: Folder):
    header_entry(folder, O, dtype=["F32"])


@CASES.add("plain", SINGLE_FILE, O, "has shape [True, 8192], expected a list of sizes")
def a_shape_holds_a_bool(folder: Folder):
    header_entry(folder, O, shape=[True, 64 * 128])


@CASES.add("plain", SINGLE_FILE, O, "has shape [-64, -128], expected a list of sizes")
def a_shape_is_negative_twice(folder: Folder):
    header_entry(folder, O, shape=[-64, -128])


@CASES.add("plain", SINGLE_FILE, O, "has shape '88', expected a list of sizes")
def a_shape_is_text(folder: Folder):
    header_entry(folder, O, shape="88")


@CASES.add("plain", SINGLE_FILE, O, "has shape [64.0, 128], expected a list of sizes")
def a_shape_is_a_float(folder: Folder):
    header_entry(folder, O, shape=[64.0, 128])


@CASES.add("plain", SINGLE_FILE, O, "expected a list of sizes")
def a_shape_has_a_thousand_dimensions(folder: Folder):
    header_entry(folder, O, shape=[2**62] * 1000)


@CASES.add("plain", SINGLE_FILE, O, "has data_offsets [-32768, 0], expected a start and an end")
def offsets_are_negative(folder: Folder):
    header_entry(folder, O, data_offsets=[-32768, 0])


@CASES.add("plain", SINGLE_FILE, O, "has data_offsets None, expected a start and an end")
def offsets_are_missing(folder: Folder):
    folder.edit_header(lambda header: header[O].pop("data_offsets") and None)


@CASES.add("plain", SINGLE_FILE, O, "has data_offsets [0, 1, 2], expected a start and an end")
def offsets_are_three(folder: Folder):
    header_entry(folder, O, data_offsets=[0, 1, 2])


@CASES.add("plain", SINGLE_FILE, O, "-32768 bytes, but shape [64, 128] of F32 needs 32768")
def offsets_are_turned_round(folder: Folder):
    folder.edit_header(lambda header: header[O]["data_offsets"].reverse())


@CASES.add("plain", SINGLE_FILE, O, "4 bytes, but shape [64, 128] of F32 needs 32768")
def offsets_do_not_fit_the_shape(folder: Folder):
    header_entry(folder, O, data_offsets=[0, 4])


@CASES.add("plain", SINGLE_FILE, "overlaps", "expected byte")
def tensors_overlap(folder: Folder):
    def edit(header: dict[str, Any]) -> None:
        start = header["model.embed_tokens.weight"]["data_offsets"][0]
        header[O]["data_offsets"] = [start, start + 32768]

    folder.edit_header(edit)


@CASES.add("plain", SINGLE_FILE, "leaves a gap after", "expected byte")
def tensors_leave_a_gap(folder: Folder):
    folder.edit_header(lambda header: header.pop(O) and None)


@CASES.add("plain", SINGLE_FILE, "bytes, but its header describes", "download looks cut")
def a_header_points_past_the_end(folder: Folder):
    def edit(header: dict[str, Any]) -> None:
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        header["more"] = {"dtype": "F32", "shape": [1000], "data_offsets": [end, end + 4000]}

    folder.edit_header(edit)


# The folder and its index.


@CASES.add("fp8", "holds neither model.safetensors.index.json nor model.safetensors")
def the_index_is_missing(folder: Folder):
    (folder.path / INDEX_FILE).unlink()


@CASES.add("fp8", INDEX_FILE, "no such file")
def the_index_is_a_link_to_nothing(folder: Folder):
    (folder.path / INDEX_FILE).unlink()
    (folder.path / INDEX_FILE).symlink_to("nowhere")


@CASES.add("fp8", INDEX_FILE, "not valid JSON")
def the_index_is_cut(folder: Folder):
    cut(folder.path / INDEX_FILE, -20)


@CASES.add("fp8", INDEX_FILE, "weight_map is {}, expected the file of each tensor")
def the_index_is_empty(folder: Folder):
    weight_map(folder, lambda m: m.clear())


@CASES.add("fp8", INDEX_FILE, "weight_map is None, expected the file of each tensor")
def the_index_has_no_map(folder: Folder):
    folder.edit_json(lambda index: index.pop("weight_map") and None, INDEX_FILE)


@CASES.add("fp8", INDEX_FILE, "weight_map has 3, expected the name of a file in the folder")
def the_index_has_a_number_for_a_file(folder: Folder):
    weight_map(folder, lambda m: m.update({Q_A: 3}))


@CASES.add("fp8", INDEX_FILE, "'../elsewhere.safetensors', expected the name of a file in the folder")
def the_index_leads_out_of_the_folder(folder: Folder):
    folder.write("../elsewhere.safetensors", folder.tensors(SHARD))
    weight_map(folder, lambda m: m.update({t: "../elsewhere.safetensors" for t in m if m[t] == SHARD}))


@CASES.add("fp8", INDEX_FILE, "expected the name of a file in the folder")
def the_index_has_an_absolute_path(folder: Folder):
    weight_map(folder, lambda m: m.update({t: str(folder.path / SHARD) for t in m if m[t] == SHARD}))


@CASES.add("fp8", INDEX_FILE, "'a\\x00b', expected the name of a file in the folder")
def the_index_has_a_file_with_a_zero(folder: Folder):
    weight_map(folder, lambda m: m.update({Q_A: "a\0b"}))


@CASES.add("fp8", INDEX_FILE, "names a tensor 'a\\nb', expected printable text")
def the_index_has_a_name_with_a_line_break(folder: Folder):
    weight_map(folder, lambda m: m.update({"a\nb": SHARD}))


@CASES.add("fp8", INDEX_FILE, f"'{Q_A}' is in one object twice")
def the_index_names_a_tensor_twice(folder: Folder):
    text = (folder.path / INDEX_FILE).read_text()
    line = f'"{Q_A}": "{folder.file_of(Q_A)}"'
    assert line in text
    (folder.path / INDEX_FILE).write_text(text.replace(line, f"{line}, {line}"))


@CASES.add("fp8", Q_A, "is in two files", "model-00005-of-00005.safetensors")
def a_tensor_is_in_two_files(folder: Folder):
    last = folder.files[-1]
    folder.write(last, folder.tensors(last) | {Q_A: folder.tensors()[Q_A]})


@CASES.add("fp8", "model-00005-of-00005.safetensors", f"holds model.extra.weight, which {INDEX_FILE} does not list")
def a_tensor_is_not_in_the_index(folder: Folder):
    last = folder.files[-1]
    folder.write(last, folder.tensors(last) | {"model.extra.weight": np.zeros(3, np.float32)})


@CASES.add("fp8", INDEX_FILE, f"says that {Q_A} is in model-00005-of-00005.safetensors, which does not hold it")
def the_index_has_the_wrong_file(folder: Folder):
    weight_map(folder, lambda m: m.update({Q_A: folder.files[-1]}))


@CASES.add("fp8", "holds model.safetensors and model.safetensors.index.json, which does not name it")
def there_is_a_single_file_beside_the_index(folder: Folder):
    folder.write(SINGLE_FILE, {"model.norm.weight": np.zeros(64, np.float32)})


@CASES.add("fp8", "config.json: no such file")
def the_config_is_missing(folder: Folder):
    (folder.path / "config.json").unlink()


@CASES.add("fp8", "config.json: holds a JSON list, expected an object")
def the_config_is_a_list(folder: Folder):
    folder.edit_json(lambda config: [config])


@pytest.mark.parametrize(("name", "damage", "fragments"), CASES.rows)
def test_refused(
    name: str,
    damage: Damage,
    fragments: tuple[str, ...],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
):
    folder = request.getfixturevalue(name)
    damage(folder)
    assert_refused(folder, fragments, monkeypatch)


@pytest.mark.parametrize("name", ["fp8", "plain"])
def test_what_is_not_damaged_is_not_refused(name: str, request: pytest.FixtureRequest):
    assert "moe" in load_params(request.getfixturevalue(name).path)


def test_what_is_no_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(InputError, match="no such folder, expected one with config"):
            load_params(path)


@pytest.mark.parametrize("file", ["config.json", INDEX_FILE, SHARD])
def test_a_file_that_may_not_be_read(fp8: Folder, file: str, monkeypatch: pytest.MonkeyPatch):
    # The superuser may read everything, so the system's answer is put in here.
    opened = io.open

    def refuse(path: Any, *args: Any, **keywords: Any) -> Any:
        if Path(path).name == file:
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **keywords)

    monkeypatch.setattr(io, "open", refuse)
    assert_refused(fp8, (file, "cannot be read", "Permission denied"), monkeypatch)


def test_a_folder_that_may_not_be_read(fp8: Folder, config: Any, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    assert_refused(fp8, ("fp8: cannot be read (Permission denied)",), monkeypatch)


def test_a_file_that_changes_after_the_check_is_refused(fp8: Folder, monkeypatch: pytest.MonkeyPatch):
    # Were the file mapped, reading what is no longer there would end the process.
    check = loader.PublishedCheckpoint.check

    def then_cut(self: Any, config: Any) -> Any:
        contents = check(self, config)
        cut(fp8.path / SHARD, 1000)
        return contents

    monkeypatch.setattr(loader.PublishedCheckpoint, "check", then_cut)
    with pytest.raises(InputError, match=r"00002-of-\d+.safetensors: 1000 bytes, too short to hold"):
        load_params(fp8.path)
