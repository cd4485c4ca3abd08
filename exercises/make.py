"""Writes a student's copy of this repository: the bodies of the exercises are blanked, all else is there.

    python exercises/make.py ../chimera-course

In the source a comment `# exercise N` marks the rest of its function as part of exercise N; this repository is the
answer key. The copy carries that key in one zip file, so that exercises/grade.py works in it; --no-key leaves it out.
"""
import argparse
import re
import shutil
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("model.py", "tree.py", "draft.py", "speculative.py", "loss.py")        # where the exercises are
KEY, BLANK = "exercises/key.zip", 'raise NotImplementedError("exercise'


def regions(text: str) -> dict[tuple[int, str], slice]:
    """A source file -> (exercise, function) : the lines below its marker, as far as they are indented like it."""
    lines, found, name, i = text.splitlines(), {}, "", 0
    while i < len(lines):
        name = m[1] if (m := re.match(r" *def (\w+)", lines[i])) else name
        mark, i = re.fullmatch(r"( *)# exercise (\d+)\s*", lines[i]), i + 1
        if mark:
            start, foreign = i, re.compile(rf"(?! {{{len(mark[1])}}})")         # matches a line that is indented less
            while i < len(lines) and (not foreign.match(lines[i]) or re.match(r"\s*(#|$)", lines[i])):
                i += 1
            while i > start and (not lines[i - 1].strip() or foreign.match(lines[i - 1])):
                i -= 1                                      # blank lines and comments of what follows
            found[int(mark[2]), name] = slice(start, i)
    return found


def blank(text: str) -> str:
    """The same source without what the markers mark."""
    lines = text.splitlines(keepends=True)
    for (number, _), region in reversed(regions(text).items()):
        size = sum(not re.match(r"\s*(#|$)", line) for line in lines[region])
        indent = re.match(" *", lines[region.start - 1])[0]
        lines[region] = [f"{indent}{BLANK} {number}, about {size} line{'s' * (size > 1)}: see the docstring\")\n"]
    return "".join(lines)


def ignored(*more: str):
    """What no copy needs: for shutil.copytree."""
    patterns = (ROOT / ".gitignore").read_text().split()
    return shutil.ignore_patterns(".git", *(pattern.rstrip("/") for pattern in patterns), *more)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a student's copy with the exercises blanked.")
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or empty folder outside of this repository")
    parser.add_argument("--no-key", action="store_true", help="without the answers, so that only you can grade")
    args = parser.parse_args()
    folder = args.folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        parser.error(f"{args.folder} exists and is not an empty folder; name another one")
    if folder.is_relative_to(ROOT):
        parser.error(f"{args.folder} lies within this repository; name a folder outside of it")
    if (ROOT / KEY).is_file():
        parser.error("this is a student's copy itself; run make.py in the repository that it came from")
    shutil.copytree(ROOT, folder, ignore=ignored("bugs", "test_exercises.py"), dirs_exist_ok=True)
    for name in FILES:
        (folder / name).write_text(blank((ROOT / name).read_text("utf-8")), "utf-8")
    if not args.no_key:
        with zipfile.ZipFile(folder / KEY, "w", zipfile.ZIP_DEFLATED) as key:
            for path in [*FILES, *sorted(p.relative_to(ROOT) for p in (ROOT / "exercises/bugs").glob("*.patch"))]:
                key.write(ROOT / path, path)
    print(f"{folder}: start with exercises/README.md")


if __name__ == "__main__":
    main()
