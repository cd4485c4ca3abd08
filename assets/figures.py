"""The figures of the README, from real runs of the bundled storyteller: SVG files in assets/figures.

    python assets/figures.py                    (round.svg, mask.svg, run.svg, and speedup.svg from figures/bench.json)
    python assets/figures.py --measure 20       (first measures bench.json anew, on 20 openings a tree: some minutes)

Each figure brings its own background, light or dark as the reader's system is, so it reads on any page.
"""
import json
import math
import re
import subprocess
import sys
from html import escape
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import bench
from common import load_target, parse_options, run
from plot import line_chart
from sample import DRAFT, GREEN, STORIES, decode, load_draft, settings
from speculative import Round
from trace_page import Trace
from tree import Tree

ROOT = Path(__file__).parent.parent
OUT = ROOT / "assets" / "figures"
TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)]       # of the round that is drawn
SIZES = [*(f"chain:{k}" for k in range(1, 6)), "2,2,1", "3,3,2,1", "4,4,3,2,1", "8,8,5,2"]
COLUMNS = 96                                                            # of the terminal
COLORS = """--paper:#ffffff;--ink:#1c2430;--dim:#5d6876;--line:#cfd6df;--box:#f4f6f9;--yes:#17703f;--yes-box:#e2f4e8;
--no:#a8341f;--no-box:#fcebe7;--root:#2a5aa5;--root-box:#e6eefa"""
DARK = """--paper:#12161c;--ink:#e4e9f0;--dim:#98a4b3;--line:#3a4452;--box:#1b212a;--yes:#6fd598;--yes-box:#14301f;
--no:#f0907c;--no-box:#381c17;--root:#8db8f5;--root-box:#182a45"""
STYLE = f"""<style>svg{{{COLORS};fill:var(--ink)}}@media(prefers-color-scheme:dark){{svg{{{DARK}}}}}
.paper{{fill:var(--paper);stroke:var(--line)}}.dim{{fill:var(--dim)}}.word{{font:600 14px ui-monospace,monospace}}
.box,.unseen{{fill:var(--box);stroke:var(--line)}}.unseen{{stroke-dasharray:4 4}}.edge{{fill:none;stroke:var(--line)}}
.root{{fill:var(--root-box);stroke:var(--root)}}.accepted{{fill:var(--yes-box);stroke:var(--yes);stroke-width:2}}
.seen{{fill:var(--yes)}}.rejected{{fill:var(--no-box);stroke:var(--no)}}.yes{{fill:var(--yes)}}.no{{fill:var(--no)}}.own{{fill:var(--root)}}
</style>"""


def card(svg: str) -> str:
    """An SVG with colours for light and dark and a background of its own."""
    head, body = svg.split(">", 1)
    return f'{head}>{STYLE}<rect class="paper" x=".5" y=".5" width="99.8%" height="99.6%" rx="8"/>{body}'


def drawing(width: int, height: int, parts: list[str]) -> str:
    frame = f'viewBox="0 0 {width} {height}" font-family="system-ui,sans-serif" font-size="13"'
    return card("\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {frame}>', *parts, "</svg>\n"]))


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="{kind}"/>'


def visible(token: str) -> str:
    return token.replace(" ", "\u2423").replace("\n", "\u23ce")


def chips(x: float, y: float, tokens: list[tuple[str, str]]) -> list[str]:
    """Tokens in a row, each a box of its class."""
    parts = []
    for token, kind in tokens:
        width = 8.6 * len(token) + 14
        parts += [rect(x, y, width, 26, kind), text(x + 7, y + 18, visible(token), "word")]
        x += width + 6
    return parts


# -- one round ---------------------------------------------------------------------------------------------------------

def some_rounds(model, tok, draft, seed: int) -> list[tuple[Round, dict, str]]:
    """Rounds of a story at temperature 1: each as it was, as the trace page has it, and the text before it."""
    args = settings(ckpt=str(STORIES), draft=str(DRAFT), temperature=1.0, seed=seed, tree=TREE, max_new_tokens=300)
    prompt, kept = tok.encode("Once upon a time"), []
    trace = Trace("", tok, prompt, args)

    def keep(done: Round) -> None:
        before = "".join(piece for shown in trace.rounds for piece in shown["text"])
        trace(done)
        kept.append((done, trace.rounds[-1], trace.opening + before))

    decode(model, prompt, draft, args, tok.eos_ids, on_round=keep)
    return kept


def instructive(done: Round, shown: dict) -> bool:
    """Two accepted, one of them after a sibling was refused; and words that are worth showing."""
    words = [row[1] for row in shown["nodes"] if len(row) > 1 and re.fullmatch(" [A-Za-z]+", row[1])]
    refused = [node for node, row in enumerate(shown["nodes"], 1) if row[6:] == [1] and node not in done.path]
    elder = any(done.tree.parent[a] == done.tree.parent[b] for a in refused for b in done.path)
    return len(done.path) == 2 and elder and len(words) == len(TREE)


def verdict(node: int, shown: dict) -> tuple[str, str, str]:
    """-> the class of its box, the class of its last line, that line."""
    *_, chance, uniform, judged = shown["nodes"][node - 1]
    if not judged:
        return "unseen", "dim", "not visited"
    if node in shown["path"]:
        return "accepted", "yes", f"\u2713 {uniform:.2f} < {chance:.2f}"
    return "rejected", "no", f"\u2717 {uniform:.2f} \u2265 {chance:.2f}"


def places(tree: Tree, width: int, height: int) -> list[tuple[int, int]]:
    """(x, y) by node: a column for each depth, a line for each leaf, a parent on its first child's line."""
    order = sorted(range(tree.size + 1), key=lambda node: tree.paths[node])
    return [(len(tree.paths[node]) * width, height * sum(not tree.children[o] for o in order[:order.index(node)]))
            for node in range(tree.size + 1)]


def edges(tree: Tree, at: list[tuple[int, int]], width: int, middle: int) -> list[str]:
    """Lines from each box, `width` wide, to its children, at the height `middle`."""
    parts = []
    for node in range(1, tree.size + 1):
        (a, b), (x, y) = at[tree.parent[node]], at[node]
        a, b, y = a + width, b + middle, y + middle
        parts.append(f'<path class="edge" d="M{a} {b} C{(a + x) / 2} {b} {(a + x) / 2} {y} {x} {y}"/>')
    return parts


def tree_boxes(done: Round, shown: dict, at: list[tuple[int, int]]) -> list[str]:
    """The tree with q, p and the verdict in every box, 134 x 60."""
    boxes = [("root", visible(shown["root"]), "the root: from", "the target itself", "dim")]
    for node, (_, token, q, p, *_) in enumerate(shown["nodes"], 1):
        kind, color, line = verdict(node, shown)
        boxes.append((kind, visible(token), f"q {q:.3f} \u2002 p {p:.3f}", line, color))
    parts = edges(done.tree, at, 134, 30)
    for (x, y), (kind, token, numbers, line, color) in zip(at, boxes):
        parts += [rect(x, y, 134, 60, kind), text(x + 9, y + 20, token, "word"), text(x + 9, y + 37, numbers, "dim"),
                  text(x + 9, y + 53, line, color)]
    return parts


STEPS = [("1  Draft", "candidates, drawn from q", 76), ("2  Verify", "one target pass: p for all", 126),
         ("3  Accept", "if u < min(1, p/q); else", 176), ("", "p = norm(max(p - q, 0))", 193)]


def round_figure(done: Round, shown: dict, before: str) -> str:
    """The four steps, with the numbers of one real round."""
    at = [(x + 240, y + 56) for x, y in places(done.tree, 166, 74)]
    bottom = max(y for _, y in at) + 96
    end = "\u2026 " + before[-78:].split(" ", 1)[1].replace("\n", " ")
    parts = [text(20, 32, "The text so far"), text(240, 32, end, "dim"), *tree_boxes(done, shown, at)]
    for name, line, y in [*STEPS, ("4  Commit", "path + the target's own token", bottom + 10)]:
        parts += [text(20, y, name, "word"), text(20, y + 18, line, "dim")]
    tokens = [(shown["nodes"][node - 1][1], "accepted") for node in shown["path"]]
    return drawing(892, bottom + 46, parts + chips(240, bottom, tokens + [(own_token(shown), "root")]))


def own_token(shown: dict) -> str:
    return next(row[0] for row in shown["law"] if row[4])


# -- the mask ----------------------------------------------------------------------------------------------------------

def mask_figure(tree: Tree, tokens: list[str], prefix: int = 4, cell: int = 26) -> str:
    """The tree at the left; at the right, row by row, what each token of the target's pass may look at."""
    names = [f"{node} {visible(token)}" for node, token in enumerate(tokens)]
    width = round(8.7 * max(map(len, names))) + 16
    at = [(x + 20, y + 58) for x, y in places(tree, width + 20, 48)]
    parts = [text(20, 30, "The tree"), *edges(tree, at, width, 15)]
    for node, (x, y) in enumerate(at):
        parts += [rect(x, y, width, 30, "box" if node else "root"), text(x + 8, y + 20, names[node], "word")]
    left = at[-1][0] + width + 40
    parts += matrix(tree.mask, names, left, left + width, prefix, cell)
    return drawing(left + width + (prefix + len(names)) * cell + 24, 58 + len(names) * cell + 16, parts)


def matrix(mask: torch.Tensor, names: list[str], left: int, right: int, prefix: int, cell: int) -> list[str]:
    """A filled square where the row's token may look at the column's; names at `left`, squares from `right` on."""
    parts = [text(left, 30, "Each row: what this token may look at (filled)"),
             text(right + prefix * cell / 2, 50, "cached text", "dim", "middle")]
    for row, name in enumerate(names):
        y, x = 58 + row * cell, right + (prefix + row) * cell + 8
        parts += [text(left, y + 18, name, "word"), text(x + cell / 2, 50, str(row), "dim", "middle")]
        for column, seen in enumerate([True] * prefix + mask[row].tolist()):
            x = right + column * cell + 8 * (column >= prefix)
            parts.append(rect(x, y, cell - 4, cell - 4, "seen" if seen else "unseen"))
    return parts


# -- the speed, the terminal -------------------------------------------------------------------------------------------

def measure(model, tok, draft, count: int) -> list[dict]:
    """bench.py's figures for every tree of SIZES, greedy and at temperature 1."""
    prompts, rows = [(kind, tok.encode(line)) for kind, line in bench.read_prompts(bench.OPENINGS, count)], []
    for temperature in (0.0, 1.0):
        for spec in SIZES:
            args = settings(max_new_tokens=128, temperature=temperature, tree=spec)
            row = bench.measure(model, tok, draft, prompts, args)["all"]
            rows.append({"tree": spec, "nodes": Tree.parse(spec).size, "temperature": temperature, **row})
            print(f"{spec:12} temperature {temperature:.0f}  tau {row['tau']:.2f}  speedup {row['speedup']:.2f}")
    return rows


def speed_figure(rows: list[dict]) -> str:
    """rows: what bench.py --json writes, one per tree."""
    series = {}
    for row in sorted(rows, key=lambda row: row["nodes"]):
        kind = "chain" if row["tree"].startswith("chain") else "tree"
        name = f"{kind}, " + (f"temp. {row['temperature']:g}" if row["temperature"] else "greedy")
        series.setdefault(name, []).append((row["nodes"], row["speedup"]))
    series["plain"] = [(0, 1), (-(-max(row["nodes"] for row in rows) // 4) * 4, 1)]
    top = math.ceil(max(row["speedup"] for row in rows) * 2) / 2
    return card(line_chart(series, "speedup over plain decoding", "drafted tokens per round", top=top))


def screen(output: str) -> list[list[tuple[str, bool]]]:
    """Terminal output -> lines of (piece, green), wrapped at spaces."""
    green, lines, line, word, width = False, [], [], [], 0
    for part in re.split(r"(\033\[\d+m|\n| )", output + "\n"):
        if part.startswith("\033"):
            green = part == GREEN
        elif part in (" ", "\n"):
            if width + sum(len(w) for w, _ in word) > COLUMNS:
                lines.append(line)
                line, width = [], 0
            line, width, word = line + word, width + sum(len(w) for w, _ in word), [(" ", green)]
            if part == "\n":
                lines.append(line)
                line, width, word = [], 0, []
        else:
            word.append((part, green))
    return lines


def terminal_figure() -> str:
    """What `python sample.py` shows in a terminal: accepted draft tokens in green."""
    command = [sys.executable, str(ROOT / "sample.py"), "--compare", "--color"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    output = done.stdout.decode().replace(f"{ROOT}/", "").rstrip("\n")
    lines = screen("$ python sample.py\n" + output)
    parts = ['<g font-family="ui-monospace,SFMono-Regular,Menlo,monospace" xml:space="preserve">']
    for number, line in enumerate(lines):
        spans = [f'<tspan class="yes">{escape(word)}</tspan>' if green else escape(word) for word, green in line]
        parts.append(f'<text x="20" y="{32 + 20 * number}">{"".join(spans)}</text>')
    return drawing(COLUMNS * 8 + 40, 20 * len(lines) + 32, [*parts, "</g>"])


OPTIONS = {"measure": dict(type=int, default=0, metavar="N", help="measure bench.json anew, N openings a tree")}


def main() -> None:
    args = parse_options(__doc__, OPTIONS)
    torch.manual_seed(0)
    OUT.mkdir(exist_ok=True)
    model, tok = load_target(str(STORIES), torch.device("cpu"), "float32")
    draft, rows = load_draft(str(DRAFT), model), OUT / "bench.json"
    if args.measure:
        lines = map(json.dumps, measure(model, tok, draft, args.measure))
        rows.write_text("[" + ",\n ".join(lines) + "]\n")
    kept = (kept for seed in range(37, 999) for kept in some_rounds(model, tok, draft, seed))
    done, shown, before = next(one for one in kept if instructive(*one[:2]))
    figures = {"round": round_figure(done, shown, before), "run": terminal_figure(),
               "mask": mask_figure(done.tree, [shown["root"], *(row[1] for row in shown["nodes"])])}
    if rows.exists():
        figures["speedup"] = speed_figure(json.loads(rows.read_text()))
    for name, svg in figures.items():
        (OUT / f"{name}.svg").write_text(svg, "utf-8")
        print(f"{OUT / name}.svg: {len(svg.encode()):,} bytes")


if __name__ == "__main__":
    run(main)
