"""The token tree: which candidates are drafted in a round. Its shape is fixed before decoding (SpecInfer, arXiv 2305.09781).

A tree is given by index paths, as in Medusa and EAGLE: (0, 1) is the second choice after the first choice. Node 0 is the root,
the token that the target has just supplied. `Tree` is pure topology; `Plan` holds its tensors for one call.

N drafted nodes, n cached positions, M nodes of one depth, R of the depth above, E nodes that were expanded before.
"""
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from model import additive_mask


def chain(depth: int) -> list[tuple[int, ...]]:
    return [(0,) * d for d in range(1, depth + 1)]


def from_widths(widths: list[int]) -> list[tuple[int, ...]]:
    """Nodes per depth -> index paths. A depth's nodes go to the (parent, rank) pairs of the best score prod 1 / (1 + rank)^2:
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
    mask: torch.Tensor          # [M, E + M] bool: which of the E nodes expanded before, and of their own, each may see
    first: int                  # the children are the nodes first, first + 1, ...
    parent: torch.Tensor        # [children] row of each child's parent in `nodes`
    rank: torch.Tensor          # [children]


class Tree:
    """A static tree of candidates, given by index paths: (0, 1) is the second choice after the first choice."""

    def __init__(self, paths: Iterable[tuple[int, ...]]):
        self.paths = [()] + sorted({tuple(p) for p in paths}, key=lambda p: (len(p), p))
        index = {path: i for i, path in enumerate(self.paths)}
        for path in self.paths[1:]:
            before = path[:-1] if path[-1:] == (0,) else (*path[:-1], path[-1] - 1) if path else None
            if before not in index:             # candidates are drawn in rank order: skipping one is not lossless
                raise ValueError(f"tree: path {list(path)} needs path {list(before)}; ranks count from 0 without a gap")
        self.parent = [index[path[:-1]] for path in self.paths]
        self.children = [[] for _ in self.paths]
        for node in range(1, len(self.paths)):
            self.children[self.parent[node]].append(node)
        self.depths = torch.tensor([len(path) for path in self.paths])          # [N + 1]
        self.depth, self.size = len(self.paths[-1]), len(self.paths) - 1
        self.max_rank = max((r for path in self.paths for r in path), default=0)
        self.mask = torch.eye(len(self.paths), dtype=torch.bool)                # [N + 1, N + 1]: ancestors and self
        for node in range(1, len(self.paths)):
            self.mask[node] |= self.mask[self.parent[node]]
        self.levels = [self._level(depth) for depth in range(self.depth)]

    def _level(self, depth: int) -> Level:
        inner = [i for i, kids in enumerate(self.children) if kids and len(self.paths[i]) <= depth]
        nodes = [i for i in inner if len(self.paths[i]) == depth]
        above = sum(len(self.paths[i]) == depth - 1 for i in inner)
        kids = [c for i in nodes for c in self.children[i]]
        return Level(nodes, torch.tensor([depth - 1] * above + [depth] * len(nodes)), self.mask[nodes][:, inner], min(kids),
                     torch.tensor([nodes.index(self.parent[c]) for c in sorted(kids)]),
                     torch.tensor([self.paths[c][-1] for c in sorted(kids)]))

    def cut(self, depth: int) -> "Tree":
        """The same tree without the nodes below `depth`."""
        return self if depth >= self.depth else Tree(p for p in self.paths[1:] if len(p) <= depth)

    @classmethod
    def parse(cls, spec) -> "Tree":
        """A Tree, "chain:K", widths [4, 8, 8] or "4,8,8", index paths [(0,), (1,), (0, 0)] or the same as JSON."""
        try:
            if isinstance(spec, Tree):
                return spec
            if isinstance(spec, str) and spec.startswith("chain:"):
                return cls(chain(int(spec[6:])))
            if isinstance(spec, str):
                spec = json.loads(spec if spec.startswith("[[") else f"[{spec}]")
            spec = list(spec)
            if spec and all(isinstance(item, int) and item > 0 for item in spec):
                return cls(from_widths(spec))
            if spec and all(len(path) > 0 and all(isinstance(r, int) and r >= 0 for r in path) for path in spec):
                return cls(spec)
        except (TypeError, json.JSONDecodeError):
            pass
        except ValueError as error:
            if "path" in str(error):
                raise
        raise ValueError(f"tree {spec!r} is not understood; give chain:K, widths such as 4,8,8, or index paths [[0],[1],[0,0]]")


class Plan:
    """A tree's tensors for one call: on the model's device, with its masks widened for any number n of cached positions."""

    def __init__(self, tree: Tree, rows: int, like: torch.Tensor):
        self.tree, self.rows, self.like = tree, rows, like
        self.depths = tree.depths.to(like.device)
        self.mask = self._widen(tree.mask)
        self.levels = [(level, level.offsets.to(like.device), self._widen(level.mask), level.parent.to(like.device),
                        level.rank.to(like.device)) for level in tree.levels]

    def _widen(self, allowed: torch.Tensor) -> Callable[[int], torch.Tensor | None]:
        """allowed [M, C] -> a function of n that gives the additive mask [M, n + C], a slice: a round builds nothing."""
        if allowed.all():
            return lambda n: None
        prefix = torch.ones(len(allowed), self.rows, dtype=torch.bool)
        wide = additive_mask(torch.cat((prefix, allowed), 1), self.like.dtype).to(self.like.device)
        return lambda n: wide[:, self.rows - n:]
