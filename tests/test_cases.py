"""The table of cases says the truth: each case is named by a test, or it says why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROW = re.compile(r"^\| (B\d{3}) \| (.+?) \|(.*)\|$", re.MULTILINE)
ROWS = {case: reason.strip() for case, _, reason in ROW.findall((TESTS / "CASES.md").read_text())}
NAMED = set(re.findall(r"\bB\d{3}\b", "".join(path.read_text() for path in TESTS.rglob("test_*.py"))))


def test_no_case_is_forgotten() -> None:
    assert len(ROWS) == 83


@pytest.mark.parametrize("case", sorted(ROWS))
def test_a_case_is_named_by_a_test_or_says_why_not(case: str) -> None:
    assert (case in NAMED) != bool(ROWS[case]), ROWS[case]


def test_no_test_names_a_case_that_is_not_in_the_table() -> None:
    assert not NAMED - set(ROWS)
