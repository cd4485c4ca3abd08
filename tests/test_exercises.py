"""The exercises: blanked copies, the grader's points, and planted faults that this repository's own tests notice."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from make import FILES, ROOT, blank, ignored, regions

SPOILT = {      # exercise -> (file, what is replaced, by what, a word of the message)
    3: ("speculative.py", "    return min(1.0, chance)", "    return chance / 2", "expected"),
    5: ("tree.py", "    # exercise 5\n    mask = torch.eye", "    mask = torch.eye", "ancestor_mask.. is gone"),
    7: ("draft.py", "        e = e * (trigrams >= 0)", "        e = e * (trigrams >=", "draft.py: invalid syntax"),
}


def run(*argv) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "exercises"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run([sys.executable, *map(str, argv)], capture_output=True, text=True, timeout=300, env=env)


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A student's copy, nothing solved."""
    folder = tmp_path_factory.mktemp("course") / "copy"
    done = run(ROOT / "exercises/make.py", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def results(copy, tmp_path_factory) -> dict:
    """What the grader says of several folders: one process, since it is importing torch that takes the time."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("odd", "even", "endless", "leaving")}
    for name in FILES:
        answer, blanked = ((root / name).read_text() for root in (ROOT, copy))
        for parity in ("odd", "even"):
            lines, theirs, found = answer.splitlines(), blanked.splitlines(), regions(blanked)
            for key, region in reversed(regions(answer).items()):
                if key[0] % 2 == (parity == "odd"):
                    lines[region] = theirs[found[key]]
            folders[parity].joinpath(name).write_text("\n".join(lines))
        text = answer
        for file, old, new, _ in SPOILT.values():
            assert file != name or text.count(old) == 1
            text = text.replace(old, new) if file == name else text
        first = "    total = weights"           # of normalised_or
        folders["endless"].joinpath(name).write_text(text.replace(first, f"    while 1: 0\n{first}"))
        folders["leaving"].joinpath(name).write_text(answer.replace(first, f"    exit()\n{first}"))
    script = """
import json, sys, tempfile
from pathlib import Path
import grade
odd, even, endless, leaving = map(Path, sys.argv[1:])
found = {"answers": grade.grade(grade.ROOT), "odd": grade.grade(odd), "even": grade.grade(even)}
with tempfile.TemporaryDirectory() as folder:
    repo = grade.answers(Path(folder).resolve())
    found |= {number: grade.grade_one(repo, endless, number) for number in (3, 5, 7)}
    found["leaving"] = grade.grade_one(repo, leaving, 2)
    grade.LIMIT = 2
    found["endless"] = grade.grade_one(repo, endless, 2)
found["zoo"] = grade.zoo(None)
print(json.dumps(found))"""
    done = run("-c", script, *folders.values())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def points(result: dict) -> list[tuple[int, int]]:
    return [(row["points"], row["max"]) for row in result["exercises"]]


# -- copies ------------------------------------------------------------------------------------------------------------

def test_there_are_eight_exercises_of_5_to_25_lines():
    sizes = dict.fromkeys(range(1, 9), 0)
    for name in FILES:
        for _, number, size in re.findall(r"(Error)\(\"exercise (\d), about (\d+)", blank((ROOT / name).read_text())):
            sizes[int(number)] += int(size)
    assert len(sizes) == 8 and all(5 <= size <= 25 for size in sizes.values()), sizes


def test_a_copy_has_everything_but_the_answers(copy):
    ours, theirs = ({p.relative_to(root).as_posix() for folder in (".", "tests", "assets", "exercises")
                     for p in (root / folder).glob("*") if not ignored()(None, [p.name]) and p.name[0] != "."}
                    for root in (ROOT, copy))
    assert ours - theirs == {"exercises/bugs", "tests/test_exercises.py"} and theirs - ours == {"exercises/key.zip"}
    for name in FILES:
        answer, blanked = (root.joinpath(name).read_text() for root in (ROOT, copy))
        compile(blanked, name, "exec")
        assert regions(answer).keys() == regions(blanked).keys()
        assert all(region.stop - region.start == 1 for region in regions(blanked).values())
        assert blank(blanked).count("exercise") == blanked.count("exercise")


def test_a_copy_is_made_in_an_empty_folder_only(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    done = run(ROOT / "exercises/make.py", tmp_path)
    assert done.returncode == 2 and "not an empty folder" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    assert "outside" in run(ROOT / "exercises/make.py", ROOT / "never").stderr


# -- points ------------------------------------------------------------------------------------------------------------

def test_the_blanked_copy_scores_0_by_its_own_grader(copy, tmp_path):
    done = run(copy / "exercises/grade.py", "--json", tmp_path / "score.json")
    result = json.loads((tmp_path / "score.json").read_text())
    assert done.returncode == 0 and result["score"] == 0 and "score 0 of 100" in done.stdout
    assert all(got == 0 and "see the docstring" in row["message"]
               for row, (got, _) in zip(result["exercises"], points(result)))
    assert all(row.keys() == {"number", "name", "points", "max", "message"} for row in result["exercises"])


def test_the_answers_score_100(results):
    result = results["answers"]
    assert result["score"] == 100 == sum(most for _, most in points(result))
    assert all(got == most and not row["message"] for row, (got, most) in zip(result["exercises"], points(result)))


@pytest.mark.parametrize("parity", ["odd", "even"])
def test_blanks_cost_no_points_elsewhere(results, parity):
    for row in results[parity]["exercises"]:
        assert row["points"] == (0 if row["number"] % 2 == (parity == "odd") else row["max"]), row


@pytest.mark.parametrize("number", SPOILT)
def test_a_fault_is_told_and_costs_points(results, number):
    got, message = results[str(number)]
    assert re.search(SPOILT[number][3], message), message
    assert got == 0 or number == 3 and got < 12


def test_endless_loops_and_exits_are_told(results):
    got, message = results["endless"]
    assert got == 0 and "ran longer than 2 s" in message
    got, message = results["leaving"]
    assert got == 0 and "SystemExit" in message and "normalised_or" in message


# -- the bug zoo -------------------------------------------------------------------------------------------------------

def test_our_own_tests_notice_every_planted_fault(results):
    assert len(results["zoo"]) == 12 and all(results["zoo"].values()), results["zoo"]


def test_a_students_tests_are_first_tried_on_the_correct_code_and_then_on_every_fault(tmp_path):
    tests = tmp_path / "test_mine.py"
    tests.write_text("def test_mine():\n    assert 0\n")
    done = run(ROOT / "exercises/grade.py", "--zoo", tests)
    assert done.returncode == 2 and "must first pass on the correct code" in done.stderr
    tests.write_text("""
import torch
from speculative import reject
def test_residual():
    assert reject(torch.tensor([0.6, 0.4]), torch.tensor([0.2, 0.8]), 1)[0].tolist() == [1, 0]
""")
    done = run(ROOT / "exercises/grade.py", "--zoo", tests, "--json", tmp_path / "zoo.json")
    zoo = json.loads((tmp_path / "zoo.json").read_text())["zoo"]
    assert [name for name, noticed in zoo.items() if noticed] == ["10-residual-by-softmax"], done.stdout
    assert "1 of 12 faults noticed" in done.stdout
