"""What documents refer to is there: links and their headings, files, tests, and names in the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(p.relative_to(ROOT).as_posix() for p in (*ROOT.glob("*.md"), *ROOT.glob("*/*.md")))
PACKAGES = ("glm52_jax", "infer", "sharding", "train", "tests", "benchmarks")

LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(rf"(?:{'|'.join((*PACKAGES, 'docs', 'deploy'))})/[\w/.-]*")
NAME = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
MODULE = re.compile(r"python -m ([\w.]+)")


def prose(document: str) -> str:
    return FENCE.sub("", (ROOT / document).read_text(encoding="utf-8"))


@cache
def headings(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    lines = FENCE.sub("", path.read_text(encoding="utf-8")).splitlines()
    titles = [line.lstrip("#").strip() for line in lines if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@cache
def names_of(path: Path) -> frozenset[str]:
    """Names that a module defines or imports, and those of its classes' members behind the class's."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return frozenset(found)


def resolves(name: str) -> bool:
    """Whether a dotted name is a package, a module, or something in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:count])
        module = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
        if module.is_file():
            return all(part in names_of(module) or part in module.read_text(encoding="utf-8") for part in parts[count:])
        if place.is_dir():
            return count == len(parts)
    return False


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links(document: str) -> None:
    for target in LINK.findall(prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / document).parent / file if file else ROOT / document
        assert path.exists(), f"{document}: {target} is not there"
        assert not anchor or anchor in headings(path), f"{document}: {target}: no such heading"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_names(document: str) -> None:
    for code in CODE.findall(prose(document)):
        file, _, test = code.partition("::")
        if FILE.fullmatch(file):
            assert (ROOT / file).exists(), f"{document}: {file} is not there"
            assert not test or test in names_of(ROOT / file), f"{document}: {code}: no such test"
        elif NAME.fullmatch(code) and not code.endswith(".py"):
            assert resolves(code), f"{document}: {code} is not there"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_modules_that_are_run(document: str) -> None:
    for module in MODULE.findall((ROOT / document).read_text(encoding="utf-8")):
        assert module.split(".")[0] not in PACKAGES or resolves(module), f"{document}: {module} is not there"


def test_every_module_is_on_the_map() -> None:
    """Of packages whose modules are described together, such as one kernel's, the package alone."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    together = re.compile(
        r"glm52_jax/kernels/|infer/selftest/|infer/commands/|sharding/compiler/hlo/|sharding/hosts/|\w+/inputs/|\w+/io/"
    )
    modules = [
        path for package in PACKAGES[:3] for path in (ROOT / package).rglob("*.py") if path.stem.strip("_") == path.stem
    ]
    named = [path for path in modules if not together.match(path.relative_to(ROOT).as_posix())]
    assert [path.relative_to(ROOT).as_posix() for path in named if path.name not in text] == []
