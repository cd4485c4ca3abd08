"""figures.py: the figures in the README are small, well formed and carry both colour schemes."""
from xml.etree import ElementTree

import figures
import pytest
import torch

from sample import GREEN, RESET
from tree import Tree


@pytest.mark.parametrize("name", ["round", "mask", "speedup", "run"])
def test_bundled_figures(name):
    text = (figures.OUT / f"{name}.svg").read_text("utf-8")
    assert ElementTree.fromstring(text).tag.endswith("svg") and len(text.encode()) < 40_000
    assert "prefers-color-scheme:dark" in text and str(figures.OUT.parent) not in text


def test_mask_figure_fills_what_the_mask_allows():
    tree = Tree.parse("2,2")
    svg = figures.mask_figure(tree, ["<a>", " b", " c", " d", " e"], prefix=3)
    assert svg.count('class="seen"') == int(tree.mask.sum()) + 3 * 5 and "&lt;a&gt;" in svg
    ElementTree.fromstring(svg)


def test_places_gives_each_leaf_its_line():
    tree = Tree([(0,), (1,), (0, 0), (0, 1)])
    assert figures.places(tree, 10, 1) == [(0, 0), (10, 0), (10, 2), (20, 0), (20, 1)]


def test_speed_figure_has_a_line_per_kind():
    rows = [{"tree": spec, "nodes": nodes, "temperature": t, "speedup": 1 + nodes / 10}
            for spec, nodes in (("chain:1", 1), ("chain:3", 3), ("2,2", 4)) for t in (0.0, 1.0)]
    assert figures.speed_figure(rows).count("<polyline") == 5
    ElementTree.fromstring(figures.speed_figure(rows))


def test_terminal_lines_wrap_at_spaces_and_keep_their_colour():
    words = ["word"] * 30
    lines = figures.screen(f"{' '.join(words)} {GREEN}green bits{RESET} end\nnext")
    plain = ["".join(piece for piece, _ in line).strip() for line in lines]
    assert " ".join(plain) == " ".join(words) + " green bits end next" and max(map(len, plain)) <= figures.COLUMNS
    assert [piece for line in lines for piece, green in line if green and piece != " "] == ["green", "bits"]


def test_matrix_names_its_rows():
    assert "0 root" in "".join(figures.matrix(torch.eye(2, dtype=torch.bool), ["0 root", "1 x"], 0, 50, 1, 20))
