"""Grades the exercises, or the tests that a student wrote. No network; seconds for exercises, half a minute for tests.

    python exercises/grade.py                               # this folder
    python exercises/grade.py DIR --json score.json         # a student's folder, by the answers and checks of this one
    python exercises/grade.py --zoo my_tests                # which of the planted faults do these tests notice?

Each exercise is judged alone: what stands below its markers is put into a copy of the answer key, and its checks run
there. So a blank or a fault in one exercise costs no point in another, and nothing else that was changed counts.
The student's code runs on this machine: grade strangers' work in a container.
"""
import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
import zipfile
from pathlib import Path

import pytest
import torch  # here, so that the processes that part from this one have it already
from make import BLANK, FILES, KEY, ROOT, ignored, regions

EXERCISES = {           # number: name, points, where its checks are
    1: ("RoPE and grouped attention", 12, "check_model"), 2: ("residual sampling", 12, "check_sampling"),
    3: ("chain accept", 12, "check_sampling"), 4: ("KV cache", 10, "check_model"),
    5: ("tree mask and positions", 14, "check_model"), 6: ("tree accept", 16, "check_sampling"),
    7: ("trigram encoder and residual heads", 12, "check_draft"), 8: ("depth-k targets and loss", 12, "check_draft")}
LIMIT = 60              # seconds for one exercise, which takes about one


# -- processes ---------------------------------------------------------------------------------------------------------

def in_a_process(work, *args, seconds: float) -> bool:
    """Runs work(*args) in a process of its own -> whether it ended in time."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    process = context.Process(target=work, args=args)
    process.start()
    process.join(seconds)
    late = process.is_alive()
    if late:
        process.kill()
        process.join()
    return not late


def enter(repo: Path) -> None:
    """Makes imports find this copy of the repository, whatever was imported before."""
    sys.dont_write_bytecode = True
    os.chdir(repo)
    folders = [str(repo), str(repo / "tests"), str(repo / "exercises")]
    for name in {path.stem for folder in folders for path in Path(folder).glob("*.py")} - {"grade", "make"}:
        sys.modules.pop(name, None)
    sys.path[:0] = folders
    importlib.invalidate_caches()
    torch.set_num_threads(1)


def answers(folder: Path) -> Path:
    """-> a copy of the repository with all answers in it, made in `folder`."""
    repo = folder / "repo"
    shutil.copytree(ROOT, repo, ignore=ignored("assets"))
    try:
        (repo / "assets").symlink_to(ROOT / "assets")
    except OSError:                                         # Windows asks for a privilege
        shutil.copytree(ROOT / "assets", repo / "assets")
    if (ROOT / KEY).is_file():                              # we are in a student's copy
        zipfile.ZipFile(ROOT / KEY).extractall(repo)
    return repo


# -- the exercises -----------------------------------------------------------------------------------------------------

def filled(answer: str, student: str, number: int, name: str) -> str:
    """The answer key's source with the student's lines for one exercise; ValueError for a marker that is missing."""
    lines, theirs, found = answer.splitlines(), student.splitlines(), regions(student)
    for key, region in reversed(regions(answer).items()):
        if key[0] == number:
            if key not in found:
                raise ValueError(f"{name}: the line '# exercise {number}' in {key[1]}() is gone; put it back below the "
                                 "docstring, and the code below it")
            lines[region] = theirs[found[key]]
    return "\n".join(lines) + "\n"


def describe(error: BaseException) -> str:
    """One line for the student, with the line of their code that failed."""
    if isinstance(error, SyntaxError):
        return f"{Path(error.filename or '').name}: {error.msg}: {(error.text or '').strip()}"
    where = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name in FILES]
    at = f" ({Path(where[-1].filename).name}, {where[-1].name}(): {where[-1].line})" if where else ""
    text = " ".join(str(error).split())[:300]
    return text if type(error).__name__ == "Wrong" else f"{type(error).__name__}: {text}{at}"


def examine(repo: Path, number: int, results: Path) -> None:
    """In a process of its own: writes a line for each rule that is begun, and one for its outcome."""
    enter(repo)
    with open(results, "w") as file:
        def note(*entry):
            print(json.dumps(entry), file=file, flush=True)
        try:
            importlib.import_module(EXERCISES[number][2])
            rules = importlib.import_module("checks").RULES[number]
        except BaseException as error:
            note("", 0)
            return note(describe(error), 0)
        for rule, points, check in rules:
            note(rule, 0)
            try:
                check()
                note("", points)
            except NotImplementedError as error:            # blank, and so without the rule
                note(f"{traceback.extract_tb(error.__traceback__)[-1].name}(): {error}", 0)
            except BaseException as error:                  # a student's sys.exit() too
                note(f"{rule}: {describe(error)}", 0)


def grade_one(repo: Path, student: Path, number: int) -> tuple[int, str]:
    """-> points, and what went wrong (empty: nothing)."""
    key, results = {name: (repo / name).read_text("utf-8") for name in FILES}, repo / "results"
    try:
        for name, answer in key.items():
            if any(n == number for n, _ in regions(answer)):
                theirs = (student / name).read_text("utf-8", errors="replace")
                (repo / name).write_text(filled(answer, theirs, number, name), "utf-8")
        results.unlink(missing_ok=True)
        in_time = in_a_process(examine, repo, number, results, seconds=LIMIT)
    except FileNotFoundError as error:
        return 0, f"{Path(error.filename).name} is missing"
    except ValueError as error:
        return 0, str(error)
    finally:
        for name, answer in key.items():
            (repo / name).write_text(answer, "utf-8")
    entries = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    messages = list(dict.fromkeys(text for text, _ in entries[1::2] if text))
    if not in_time or len(entries) % 2 or not entries:      # a rule was begun and has no outcome
        rule = entries[-1][0] if len(entries) % 2 else "start"
        messages.append(f"{rule}: " + ("Python ended" if in_time else f"ran longer than {LIMIT} s; an endless loop?"))
    return sum(points for _, points in entries[1::2]), "\n".join(messages)


def grade(student: Path) -> dict:
    """-> {"score": 0..100, "exercises": [{"number", "name", "points", "max", "message"}, ...]}"""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        repo = answers(Path(folder).resolve())
        for number, (name, most, _) in EXERCISES.items():
            points, message = grade_one(repo, student, number)
            rows.append({"number": number, "name": name, "points": points, "max": most, "message": message})
    return {"score": sum(row["points"] for row in rows), "exercises": rows}


# -- the bug zoo -------------------------------------------------------------------------------------------------------

def patched(repo: Path, patch: str) -> tuple[Path, str]:
    """-> the file that a unified diff changes, and its new text. Hunks are found by their lines, not their numbers."""
    path, text = None, ""
    for line in (hunks := patch.split("\n@@ "))[0].splitlines():
        path = repo / line[6:] if line.startswith("+++ b/") else path
    text = path.read_text("utf-8")
    for hunk in hunks[1:]:
        lines = hunk.splitlines()[1:]
        old, new = ("".join(line[1:] + "\n" for line in lines if line[:1] in kinds) for kinds in (" -", " +"))
        if text.count(old) != 1:
            raise ValueError(f"{path.name} holds these lines {text.count(old)} times, not once:\n{old}")
        text = text.replace(old, new)
    return path, text


def run_tests(repo: Path, tests: list[str], results: Path, quiet: bool) -> None:
    """In a process of its own: pytest, its exit status written to `results`."""
    enter(repo)
    if quiet:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "--rootdir", str(repo),
               "-c", str(repo / "pyproject.toml"), *(["--assert=plain"] if quiet else [])]
    results.write_text(str(int(pytest.main([*options, *tests]))))


def outcome(repo: Path, tests: list[str], seconds: float, quiet: bool = True) -> str:
    """-> pytest's exit code, "0": all passed, "1": one failed; "" if it did not come to an end."""
    results = repo / "results"
    results.write_text("")
    in_a_process(run_tests, repo, tests, results, quiet, seconds=seconds)
    return results.read_text()


def zoo(theirs: Path | None) -> dict[str, bool]:
    """-> fault: whether the tests noticed it. None: this repository's own tests, of which each fault names one."""
    with tempfile.TemporaryDirectory() as folder:
        repo, seconds = answers(Path(folder).resolve()), 120.0
        if theirs is not None:
            place = repo / "their_tests" / theirs.name
            place.parent.mkdir()
            place = shutil.copytree(theirs, place) if theirs.is_dir() else shutil.copy(theirs, place)
            start = time.monotonic()
            if outcome(repo, [str(place)], seconds=600, quiet=False) != "0":
                raise ValueError(f"{theirs} must first pass on the correct code; what pytest says stands above")
            seconds = 20 + 5 * (time.monotonic() - start)   # a fault may also make an endless loop: that is noticed
        noticed = {}
        for file in sorted((repo / "exercises/bugs").glob("*.patch")):
            patch = file.read_text("utf-8")
            own = [line.removeprefix("Noticed by: ") for line in patch.splitlines() if line.startswith("Noticed by: ")]
            path, text = patched(repo, patch)
            correct = path.read_text("utf-8")
            path.write_text(text, "utf-8")
            code = outcome(repo, own if theirs is None else [str(place)], seconds)
            path.write_text(correct, "utf-8")
            if theirs is None and code not in "01":
                raise ValueError(f"{file.name}: {own} did not run, pytest's exit code is {code!r}")
            noticed[file.stem] = code != "0"
            print(f"{'killed  ' if noticed[file.stem] else 'SURVIVES'}  {file.stem}", flush=True)
    return noticed


# -- command line ------------------------------------------------------------------------------------------------------

def main() -> None:
    parser = argparse.ArgumentParser(description="Grade the exercises, or a student's tests.")
    parser.add_argument("folder", metavar="DIR", nargs="?", type=Path, default=ROOT, help="the student's repository")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result for an autograder")
    parser.add_argument("--zoo", metavar="THEIR_TESTS", nargs="?", const="", help="a file or folder of pytest tests: "
                        "which planted faults do they notice? Without a name: this repository's own tests")
    args = parser.parse_args()
    if not (ROOT / KEY).is_file() and any(BLANK in (ROOT / name).read_text("utf-8") for name in FILES):
        parser.error("this folder has blanks and no answer key; grade it by a copy that has the answers")
    if args.zoo is not None:
        theirs = Path(args.zoo).resolve() if args.zoo else None
        if theirs and not theirs.exists():
            parser.error(f"{args.zoo} not found")
        try:
            noticed = zoo(theirs)
        except ValueError as error:
            parser.error(str(error))
        print(f"{sum(noticed.values())} of {len(noticed)} faults noticed")
        result = {"score": round(100 * sum(noticed.values()) / len(noticed)), "zoo": noticed}
    else:
        if not args.folder.is_dir():
            parser.error(f"{args.folder} is no folder")
        result = grade(args.folder.resolve())
        for row in result["exercises"]:
            print(f"{row['number']}. {row['name']:36} {row['points']:3} of {row['max']}")
            print("".join(f"      {line}\n" for line in row["message"].splitlines()), end="")
        print(f"score {result['score']} of 100")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
