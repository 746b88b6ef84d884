"""A link that leads nowhere is no absent file; an index is compared with what is there; what is unfinished says so."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from glm52_jax import load_config, load_params
from glm52_jax.checkpoint import commands
from glm52_jax.checkpoint.convert import conversion
from glm52_jax.checkpoint.convert.options import ConversionOptions
from glm52_jax.checkpoint.export import export
from glm52_jax.checkpoint.load.loader import load_with_report
from glm52_jax.checkpoint.sources.open_source import open_checkpoint
from glm52_jax.checkpoint.sources.published import INDEX_FILE
from glm52_jax.cli import COMMANDS
from glm52_jax.own_imports import import_ours
from glm52_jax.text import write_byte_tokenizer
from glm52_jax.verification.verify import verify
from sharding.errors import InputError
from tests.checkpoint.builders import Folder
from tests.checkpoint.conversions import contents, run_convert, run_export
from tests.checkpoint.damage import weight_map
from tests.checkpoint.test_user_data import stopped

SIDECARS = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


def command(name: str, *arguments: Any) -> str:
    """What a command refuses its arguments with."""
    module, function = COMMANDS[name][0].split(":")
    result = CliRunner().invoke(getattr(import_ours(module), function), [str(a) for a in arguments])
    assert isinstance(result.exception, InputError), (name, result.output, result.exception)
    return str(result.exception)


def every_reader(folder: Path, other: Path, place: Path) -> dict[str, str]:
    """What each command that reads a checkpoint refuses it with."""
    return {
        "generate": command("generate", folder, "Hello"),
        "chat": command("chat", folder),
        "inspect": command("inspect", folder),
        "precision": command("precision", folder),
        "convert": command("convert", folder, place / "out"),
        "export": command("export", folder, place / "out"),
        "verify": command("verify", folder, "--against", other),
        "verify as source": command("verify", other, "--against", folder),
    }


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory, fp8_folder: Folder) -> Folder:
    """`fp8_folder` with tokenizer and template. Not to be changed."""
    folder = fp8_folder.copy(tmp_path_factory.mktemp("complete") / "c")
    write_byte_tokenizer(folder.path)
    (folder.path / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.mark.parametrize("name", [*SIDECARS, INDEX_FILE, "model-00002-of-00005.safetensors"])
def test_a_dead_link_is_refused_by_every_command(name: str, complete: Folder, tmp_path: Path):
    folder = complete.copy(tmp_path / "c").path
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "blobs" / "gone")
    found = every_reader(folder, complete.path, tmp_path)
    if name.endswith(".safetensors"):  # those that read the tokenizer first find that it has more tokens than the model
        found = {reader: text for reader, text in found.items() if reader not in ("generate", "chat", "precision")}
    for reader, sentence in found.items():
        assert f"{name}" in sentence, reader
        assert f"is a link to {tmp_path / 'blobs' / 'gone'}, where there is no such file" in sentence, reader
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja"])
def test_a_link_that_leads_back_is_refused(name: str, complete: Folder, tmp_path: Path):
    folder = complete.copy(tmp_path / "c").path
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    assert f"{name}: is a link to {name}, which leads back to itself" in command("convert", folder, tmp_path / "out")
    with pytest.raises(InputError, match="leads back to itself"):
        load_config(folder)


def test_a_folder_that_is_a_dead_link_is_none_of_the_built_in_models(tmp_path: Path):
    (tmp_path / "model").symlink_to("gone")
    with pytest.raises(InputError, match="model: is a link to gone, where there is no such file"):
        load_config(tmp_path / "model")
    with pytest.raises(InputError, match=r"asked for by 3, expected a path or one of glm-5\.2"):
        load_config(3)  # type: ignore[arg-type]


def test_a_good_link_is_a_file(complete: Folder, tmp_path: Path):
    """As every file of a cache is."""
    shutil.copytree(complete.path, tmp_path / "blobs")
    (tmp_path / "c").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "c" / path.name).symlink_to(f"../blobs/{path.name}")
    run_convert(tmp_path / "c", tmp_path / "out")
    run_convert(complete.path, tmp_path / "expected")
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_a_file_that_cannot_be_read_is_refused_at_once(
    complete: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = complete.copy(tmp_path / "c").path
    opened = Path.open

    def opening(path: Path, *arguments: Any, **keywords: Any) -> Any:
        if path.name == "chat_template.jinja":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", opening)
    assert "chat_template.jinja: cannot be read (Permission denied)" in command("convert", folder, tmp_path / "out")


def test_a_folder_that_is_a_dead_link(tmp_path: Path, complete: Folder):
    (tmp_path / "c").symlink_to("gone")
    for sentence in every_reader(tmp_path / "c", complete.path, tmp_path).values():
        assert "c" in sentence
    assert "is a link to gone, where there is no such file" in command("generate", tmp_path / "c", "Hello")


# The index.


def test_a_stale_index_says_what_is_there(fp8: Folder):
    files = fp8.files
    for number, file in enumerate(files[:3], start=1):
        (fp8.path / file).rename(fp8.path / f"part-{number}.safetensors")
    for file in files[3:]:
        (fp8.path / file).unlink()
    (fp8.path / "part-3.safetensors").write_bytes((fp8.path / "part-3.safetensors").read_bytes()[:-1])
    with pytest.raises(InputError) as error:
        open_checkpoint(fp8.path)
    sentence = str(error.value)
    assert f"{INDEX_FILE}: is stale; it names {', '.join(files)}, not in the folder" in sentence
    assert "does not name part-1.safetensors, part-2.safetensors, which are there and whole" in sentence


def test_a_stale_index_beside_a_single_file(fp8: Folder, tmp_path: Path):
    single = fp8.as_single(tmp_path / "single")
    shutil.copy(fp8.path / INDEX_FILE, single.path)
    with pytest.raises(InputError, match=r"is stale; it names .* does not name model\.safetensors, which is there"):
        open_checkpoint(single.path)


@pytest.mark.parametrize("form", ["./{}", ".//{}", "././{}", "./{}/."])
def test_names_in_an_index_have_one_form(form: str, fp8: Folder, tmp_path: Path):
    expected = load_with_report(fp8.path)[1]
    weight_map(fp8, lambda m: m.update({name: form.format(file) for name, file in m.items()}))
    assert load_with_report(fp8.path)[1] == expected
    run_convert(fp8.path, tmp_path / "out")
    assert all(
        file in fp8.files for file in json.loads((tmp_path / "out" / "manifest.json").read_text())["source_files"]
    )


@pytest.mark.parametrize("file", ["../x.safetensors", "a/../../x.safetensors", "/x.safetensors", ".", "./", ""])
def test_names_that_lead_out_of_the_folder_are_refused(file: str, fp8: Folder):
    weight_map(fp8, lambda m: m.update(dict.fromkeys(list(m)[:1], file)))
    with pytest.raises(InputError, match="expected the name of a file in the folder"):
        open_checkpoint(fp8.path)


def test_a_tensor_that_moved_is_found(fp8: Folder):
    name = next(iter(fp8.tensors(fp8.files[0])))
    weight_map(fp8, lambda m: m.update({name: fp8.files[1]}))
    with pytest.raises(InputError, match=rf"which does not hold it; {fp8.files[0]} does, so the index is stale"):
        open_checkpoint(fp8.path)


# What is not finished.


@pytest.mark.parametrize("late", [False, True])
def test_every_command_says_how_to_go_on(late: bool, complete: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also when all but the manifest is there."""
    place = tmp_path / "a place; $(of) 'mine'"
    place.mkdir()
    source = complete.copy(place / "the source").path
    if late:
        with monkeypatch.context() as patch:
            patch.setattr(conversion.Manifest, "text", lambda _: _raise(OSError(5, "Input/output error")))
            with pytest.raises(InputError):
                run_convert(source, place / "half")
        assert (place / "half" / "config.json").exists()
    else:
        stopped(run_convert, source, place / "half")
    line = shlex.join(["glm52", "convert", str(source), str(place / "half"), "--chunk-size", "8192"])
    for reader, sentence in every_reader(place / "half", complete.path, tmp_path).items():
        assert f"half: is not finished; `{line}` goes on where it was stopped" in sentence, reader
    with pytest.raises(InputError, match="is not finished"):
        load_params(place / "half")


def _raise(error: Exception) -> None:
    raise error


def test_an_unfinished_export_says_so(complete: Folder, tmp_path: Path):
    stopped(run_export, complete.path, tmp_path / "half")
    for reader, sentence in every_reader(tmp_path / "half", complete.path, tmp_path).items():
        assert "half: is not finished; `glm52 export" in sentence, reader


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, []),
        ({"dtype": "bfloat16", "without_mtp": True}, ["--dtype", "bfloat16", "--without-mtp"]),
        ({"quantize": "int8", "layers": (0, 2)}, ["--quantize", "int8", "--layers", "0,2"]),
        ({"chunk_bytes": 8192}, ["--chunk-size", "8192"]),
    ],
)
def test_the_command_that_goes_on_is_one_for_a_shell(
    settings: dict[str, Any], options: list[str], plain_folder: Folder, tmp_path: Path
):
    planned = conversion.plan(plain_folder.path, tmp_path / "my models" / "$x", ConversionOptions(**settings))
    expected = ["glm52", "convert", str(plain_folder.path), str(tmp_path / "my models" / "$x"), *options]
    assert shlex.split(planned.command()) == expected
    assert shlex.split(planned.command(["--jobs", "3"])) == [*expected, "--jobs", "3"]


def test_names_that_look_like_options_stay_names(plain_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-c").symlink_to(plain_folder.path)
    planned = export.plan("-c", "-o", ConversionOptions("bfloat16"), shard_bytes=200_000)
    assert planned.command() == "glm52 export --dtype bfloat16 --shard-size 200000 -- -c -o"
    result = CliRunner().invoke(commands.export, shlex.split(planned.command())[2:])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "-o" / "config.json").exists()


def test_the_options_that_were_given_are_in_the_command(
    complete: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def failing(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion._Writer, "unit", failing)
    arguments = [
        str(complete.path),
        str(tmp_path / "out"),
        "--dtype",
        "bfloat16",
        "--unit-size",
        "70000",
        "--jobs",
        "3",
    ]
    CliRunner().invoke(commands.convert, arguments)
    with pytest.raises(InputError, match="is not finished; `glm52 convert") as error:
        verify(open_checkpoint(tmp_path / "out"), open_checkpoint(complete.path))
    (said,) = [part for part in str(error.value).split("`") if part.startswith("glm52 ")]
    assert shlex.split(said) == ["glm52", "convert", *arguments]
