"""The tables of tests/README.md name tests that exist."""
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
NAMED = sorted(set(re.findall(r"`tests/(\w+\.py)::(\w+)`", (FOLDER / "README.md").read_text("utf-8"))))


@pytest.mark.parametrize("file, name", NAMED, ids=str)
def test_every_named_test_exists(file, name):
    assert re.search(rf"^def {name}\(", (FOLDER / file).read_text("utf-8"), re.M)


def test_every_fault_has_a_test():
    rows = [line for line in (FOLDER / "README.md").read_text("utf-8").splitlines() if re.match(r"\| \d", line)]
    numbers = [int(row.split("|")[1]) for row in rows]
    assert len(numbers) == 43 and numbers == sorted(set(numbers)) and all("::" in row for row in rows)
