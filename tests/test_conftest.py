"""What skips is written down and can be run again, says which command runs it, and may not skip in CI."""

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

MODULES = {
    "test_whole": "from tests import needs\nneeds.package('no_such_package')\ndef test_a(): ...\n",
    "test_other": "from tests import needs\nneeds.package('no_such_package')\ndef test_a(): ...\n",
    "test_parts": """
import pytest
from tests import needs
@pytest.mark.parametrize("case", ["one case", "two"])
def test_some(case):
    if case != "two":
        needs.package("no_such_package.part")
@pytest.mark.slow
def test_slow():
    raise AssertionError
""",
}
OPTIONS = ("-p", "no:cacheprovider", "-p", "no:randomly", "--strict-markers")


@pytest.fixture
def tests(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini("[pytest]\nmarkers =\n    slow: slow\n    quick: quick\n")
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile(**MODULES)
    return pytester


@pytest.mark.parametrize("workers", ["0", "1"])
def test_what_skips_is_written_down_and_runs_again(tests: pytest.Pytester, workers: str) -> None:
    """Single sets of parameters and whole files, under xdist too, which counts skips of one place as one."""
    file = Path("skipped")
    first = tests.runpytest_inprocess(*OPTIONS, "-n", workers, "-m", "not slow", "--record-skips", file)
    first.assert_outcomes(passed=1, skipped=3, deselected=1 - int(workers))
    assert first.ret == 0
    assert file.read_text().splitlines() == [
        *("-m", "not slow", "test_other.py", "test_parts.py::test_some[one case]", "test_whole.py")
    ]
    again = tests.runpytest_inprocess(*OPTIONS, "-n", workers, "--no-skips", f"@{file}")
    again.assert_outcomes(skipped=3)
    assert again.ret == pytest.ExitCode.TESTS_FAILED
    again.stdout.fnmatch_lines(
        ["*skipped, though --no-skips is given*", "*needs no_such_package: `make test-skipped`*"]
    )


def test_nothing_is_written_down_where_nothing_skips(tests: pytest.Pytester) -> None:
    done = tests.runpytest_inprocess(*OPTIONS, "-k", "two", "test_parts.py", "-m", "not slow", "--record-skips", "none")
    done.assert_outcomes(passed=1, deselected=2)
    assert Path("none").read_text() == ""


def test_a_skip_that_names_no_command_fails(tests: pytest.Pytester) -> None:
    tests.makepyfile(test_lazy="import pytest\ndef test_a(): pytest.skip('not today')\n")
    done = tests.runpytest_inprocess(*OPTIONS, "test_lazy.py")
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines(["*does not name `make test-skipped`*", "test_lazy.py::test_a: not today"])


def test_a_sample_has_one_set_of_parameters_of_each_test(tests: pytest.Pytester) -> None:
    tests.makepyfile(
        test_many="import pytest\n@pytest.mark.parametrize('n', range(3))\ndef test_a(n): print(f'<{n}>')\n"
        "def test_b(): print('<b>')\n"
    )
    for number in (1, 2, 3):
        done = tests.runpytest_inprocess(*OPTIONS, "-s", "test_many.py", "--sample", number)
        done.assert_outcomes(passed=2, deselected=2)
        assert f"<{number % 3}>" in done.stdout.str()


def test_of_quick_ones_the_rest_is_slow(tests: pytest.Pytester) -> None:
    tests.makepyfile(
        test_many="import pytest\nslow = pytest.param(9, marks=pytest.mark.slow)\n@pytest.mark.quick(2)\n"
        "@pytest.mark.parametrize('n', [0, slow, 1, 2, 3])\ndef test_a(n): print(f'<{n}>')\n"
    )
    quick = tests.runpytest_inprocess(*OPTIONS, "-s", "test_many.py", "-m", "not slow")
    quick.assert_outcomes(passed=2, deselected=3)
    assert "<0>" in quick.stdout.str()
    assert "<2>" in quick.stdout.str()
    tests.runpytest_inprocess(*OPTIONS, "test_many.py").assert_outcomes(passed=5)


def test_values_of_options_follow_an_equals_sign() -> None:
    """A word of its own is a path to pytest, which then looks for options there: with a file of that name it fails."""
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    assert "--record-skips=" in makefile
    assert not re.search("--(record-skips|sample) ", makefile)
