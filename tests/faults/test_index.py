"""The index of the fault log is complete, and names tests that are there."""

import ast
import re
from pathlib import Path

import pytest

from tests.faults.index import CASES, Verdict, summary

TESTS = Path(__file__).parents[1]
NUMBERS = (
    "01 02 03 04 05 06 08 11 12 13 16 17 18 19 21 22 23 24 26 27 28 29 31 33 34 36 37 38 39 41 43 45 47 48 50 52 53 54 "
    "56 58 60 61 63 64"
)


def functions_of(path: Path) -> dict[str, str]:
    """The docstring of every test function of a file, by its name."""
    return {
        node.name: ast.get_docstring(node) or ""
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_index_names_every_case_of_the_log_once() -> None:
    assert list(CASES) == [f"KF-{number}" for number in NUMBERS.split()]
    assert len(CASES) == 44


@pytest.mark.parametrize("case", CASES)
def test_index_case_names_tests_that_exist(case: str) -> None:
    for name in CASES[case].tests:
        file, function = name.split("::")
        assert function in functions_of(TESTS / file), name


def test_index_cases_without_a_test_say_why() -> None:
    for name, case in CASES.items():
        assert case.tests or (case.verdict is Verdict.LATER and case.note), name
        assert case.note or case.verdict is Verdict.SHOWN, name


def test_index_and_docstrings_tell_the_same() -> None:
    """A test here names its cases in its docstring, and each of those names the test."""
    for path in sorted((TESTS / "faults").glob("test_*.py")):
        for function, docstring in functions_of(path).items():
            name = f"faults/{path.name}::{function}"
            listed = {case for case in CASES if name in CASES[case].tests}
            said = set(re.findall(r"KF-\d\d", docstring))
            assert said <= listed, name
            assert not said or listed == said, name


def test_index_summary_adds_up() -> None:
    covered, total = summary()
    left = [case for case in CASES.values() if case.verdict in (Verdict.OPEN, Verdict.LATER)]
    assert covered + len(left) == total == len(CASES)
    assert covered > total // 2
