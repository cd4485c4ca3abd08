"""The token tree: which candidates a round drafts. Its shape is fixed before decoding (SpecInfer, arXiv 2305.09781).

A tree is given by index paths, as in Medusa and EAGLE: (0, 1) is the second choice after the first choice. Node 0 is
the root, the token that the target has just supplied. `Tree` is pure topology; `Plan` holds its tensors for one call.

N drafted nodes, n cached positions, M nodes of one depth, R of the depth above, E nodes that were expanded before.
"""
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from model import additive_mask

MOST_NODES = 4096       # far beyond use: keeps a mistyped tree from filling the memory


def from_widths(widths: list[int]) -> list[tuple[int, ...]]:
    """Nodes per depth -> index paths. They go to the (parent, rank) pairs of the best score prod 1 / (1 + rank)^2:
    a rule on ranks alone, since a tree that looked at drawn values would not be lossless."""
    level, paths = [((), 1.0)], []
    for width in widths:
        pairs = [((*path, rank), score / (1 + rank) ** 2) for path, score in level for rank in range(width)]
        level = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:width]
        paths += [path for path, _ in level]
    return paths


@dataclass
class Level:
    """The nodes of one depth that have children, as the draft's step needs them."""
    nodes: list[int]
    offsets: torch.Tensor       # [R + M] positions behind n: those of the level above, then their own
    mask: torch.Tensor          # [M, E + M] bool: which of the nodes expanded before, and of their own, each may see
    fan: int                    # most children of one node
    first: int                  # the children are the nodes first, first + 1, ...
    pick: torch.Tensor | slice      # [children] where each child stands among the M x fan candidates
    parent: torch.Tensor | slice    # [children] row of each child's parent in `nodes`
    grow: torch.Tensor | slice      # rows of the children that have children themselves: the next level


def as_index(rows: list[int], total: int) -> torch.Tensor | slice:
    """Rows of a tensor that has `total`; all of them in order need no gather."""
    return slice(None) if rows == list(range(total)) else torch.tensor(rows, dtype=torch.long)


def ancestor_mask(parent: list[int]) -> torch.Tensor:
    """parent[i] < i of every node i > 0 -> [N + 1, N + 1] bool: row i is True at i, its parent, ..., the root 0."""
    # exercise 5
    mask = torch.eye(len(parent), dtype=torch.bool)
    for node in range(1, len(parent)):
        mask[node] |= mask[parent[node]]
    return mask


class Tree:
    """A static tree of candidates, given by index paths: (0, 1) is the second choice after the first choice."""

    def __init__(self, paths: Iterable[tuple[int, ...]]):
        self.paths = sorted({()} | {tuple(p) for p in paths}, key=lambda p: (len(p), p))
        index = {path: i for i, path in enumerate(self.paths)}
        for *above, rank in self.paths[1:]:
            path, before = (*above, rank), (*above, rank - 1) if rank else tuple(above)
            if before not in index:             # candidates are drawn in rank order: skipping one is not lossless
                raise ValueError(f"tree: path {list(path)} needs path {list(before)}; ranks count from 0 without a gap")
        self.parent = [index[path[:-1]] for path in self.paths]
        self.children = [[] for _ in self.paths]
        for node in range(1, len(self.paths)):
            self.children[self.parent[node]].append(node)
        self.depths = torch.tensor([len(path) for path in self.paths])          # [N + 1]
        self.depth, self.size = len(self.paths[-1]), len(self.paths) - 1
        self.max_rank = max((r for path in self.paths for r in path), default=0)
        self.mask = ancestor_mask(self.parent)                                  # [N + 1, N + 1]: ancestors and self
        self.levels = [self._level(depth) for depth in range(self.depth)]

    def _level(self, depth: int) -> Level:
        inner = [node for node, kids in enumerate(self.children) if kids and len(self.paths[node]) <= depth]
        nodes = [node for node in inner if len(self.paths[node]) == depth]
        above = sum(len(self.paths[node]) == depth - 1 for node in inner)
        kids = sorted(child for node in nodes for child in self.children[node])
        fan = max(len(self.children[node]) for node in nodes)
        parent = [nodes.index(self.parent[kid]) for kid in kids]
        pick = [row * fan + self.paths[kid][-1] for row, kid in zip(parent, kids)]
        grow = [row for row, kid in enumerate(kids) if self.children[kid]]
        return Level(nodes, torch.tensor([depth - 1] * above + [depth] * len(nodes)), self.mask[nodes][:, inner], fan,
                     kids[0], as_index(pick, len(nodes) * fan), as_index(parent, len(nodes)), as_index(grow, len(kids)))

    def cut(self, depth: int) -> "Tree":
        """The same tree without the nodes below `depth`."""
        return self if depth >= self.depth else Tree(p for p in self.paths[1:] if len(p) <= depth)

    @classmethod
    def parse(cls, spec) -> "Tree":
        """A Tree, "chain:K", widths [4, 8, 8] or "4,8,8", index paths [(0,), (1,), (0, 0)] or the same as JSON."""
        if isinstance(spec, Tree):
            return spec
        shown = spec
        try:
            if isinstance(spec, str) and spec.startswith("chain:"):
                spec = [1] * min(int(spec[6:]), MOST_NODES + 1)
            elif isinstance(spec, str):
                spec = json.loads(spec if spec.startswith("[") else f"[{spec}]")
            spec = list(spec)
            widths = all(isinstance(item, int) for item in spec)
            if len(spec) > MOST_NODES or (widths and sum(spec) > MOST_NODES):
                raise ValueError
            paths = from_widths(spec) if widths else [tuple(path) for path in spec]
            usable = paths and all(path and min(path) >= 0 and all(isinstance(r, int) for r in path) for path in paths)
            usable = usable and not (widths and min(spec) < 1)
        except (TypeError, ValueError):
            usable = False
        if not usable:
            raise ValueError(f"tree {shown!r} is not understood; give chain:K, widths such as 4,8,8, or index paths "
                             f"such as [[0],[1],[0,0]], of at most {MOST_NODES} nodes")
        return cls(paths)


class Plan:
    """A tree's tensors for one call: on the model's device, its masks widened for any number n of cached positions.

    fixed: every mask is as wide as a cache of `rows` positions, whatever n: for compiled steps.
    """

    def __init__(self, tree: Tree, rows: int, like: torch.Tensor, fixed: bool = False):
        self.tree, self.rows, self.like, self.fixed = tree, rows, like, fixed
        self.order = torch.arange(tree.size + 1, device=like.device)
        self.depths, self.mask, self.levels = tree.depths.to(like.device), self._widen(tree.mask), []
        for level in tree.levels:
            tensors = {k: v.to(like.device) for k, v in vars(level).items() if isinstance(v, torch.Tensor)}
            self.levels.append((replace(level, **tensors), self._widen(level.mask)))

    def _widen(self, allowed: torch.Tensor) -> Callable[[int], torch.Tensor | None]:
        """allowed [M, C] -> a function of n that gives the additive mask [M, n + C]: a slice, built once.

        All may see the n cached positions in front; n never exceeds self.rows, for which the mask is built here. dtype
        and device are those of self.like. Where everything is allowed the function gives None.
        """
        if self.fixed:
            shape = (len(allowed), self.rows)
            seen = torch.cat((torch.ones(shape, dtype=torch.bool), allowed, torch.zeros(shape, dtype=torch.bool)), 1)
            table = additive_mask(seen, self.like.dtype).to(self.like.device)
            return lambda n: table[:, self.rows - n:2 * self.rows - n]
        # exercise 5
        if allowed.all():
            return lambda n: None
        prefix = torch.ones(len(allowed), self.rows, dtype=torch.bool)
        wide = additive_mask(torch.cat((prefix, allowed), 1), self.like.dtype).to(self.like.device)
        return lambda n: wide[:, self.rows - n:]
