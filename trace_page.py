"""A run as one HTML page to step through: every round's tree, and what p, q and chance made of each candidate.

    python sample.py --trace run.html

The page needs no network and no library: trace_page.html beside this file, with the rounds in it as JSON. Above
temperature 0 p and q of a judged candidate are those that it was judged with, replayed from the round's own p, q and
flips; those of a candidate that nobody judged are what they would have been at first. At temperature 0 the rule is the
argmax; the p shown is the target's softmax, for orientation only.
"""
import json
from collections import Counter
from pathlib import Path

import torch

from common import TextStream
from model import Tokenizer
from speculative import Round, is_greedy, reject, warp

PAGE = Path(__file__).with_suffix(".html")
ROWS = 5                # likeliest tokens listed of the distribution that the target's own token comes from


def replay(done: Round) -> tuple[dict[int, tuple], torch.Tensor]:
    """-> (q, p, chance, uniform) by judged node, as judged, and the law [V] of the target's own token."""
    flips, judged = iter(done.flips), {}
    for node in (0, *done.path):
        p, q = done.p[node], done.q.get(node)
        for child in done.tree.children[node]:
            token = done.tokens[child]
            if token < 0:                                   # q had no token left
                continue
            judged[child] = (q[token].item(), p[token].item(), *next(flips))
            if child in done.path:
                break
            p, q = reject(p, q, token)
    return judged, p


def replay_greedy(done: Round, p: torch.Tensor) -> tuple[dict[int, tuple], torch.Tensor]:
    """The same at temperature 0: no q, no flip; the chance is 1 at the target's argmax and 0 elsewhere. p [N + 1, V]"""
    best, judged = done.logits.argmax(-1).tolist(), {}
    for node in (0, *done.path):
        for child in done.tree.children[node]:
            token = done.tokens[child]
            judged[child] = (None, p[node, token].item(), float(token == best[node]), None)
            if child in done.path:
                break
    law = torch.zeros_like(p[0])
    law[best[([0] + done.path)[-1]]] = 1
    return judged, law


def first_q(done: Round, parent: int, token: int) -> float | None:
    """q of a candidate before any sibling was taken away; None where nothing was drawn (temperature 0)."""
    ids, q = done.drawn.get(parent, (None, None))
    return None if ids is None else q[ids == token].item()


def short(*values: float | None) -> list[float | None]:
    """Four digits are enough to look at, and keep the page small."""
    return [None if value is None else float(f"{value:.4g}") for value in values]


class Trace:
    """Notes each round (it is generate's on_round) and writes the page when its `with` ends, however that ends."""

    def __init__(self, path: str, tok: Tokenizer, prompt: list[int], args):
        self.path, self.tok, self.args, self.rounds = Path(path), tok, args, []
        self.stream, self.opening = TextStream(tok, prompt), tok.decode(prompt)
        self.special = {i: name for name, i in tok.special.items()}
        self.judged, self.accepted = Counter(), Counter()   # rounds by depth
        self.before = prompt[-1]                            # the token in front of the next round's root

    def __enter__(self) -> "Trace":
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise ValueError(f"--trace {self.path}: give a file name in a folder that exists")
        self.path.open("a").close()                         # what cannot be written is refused before decoding
        return self

    def __exit__(self, *error) -> None:
        self.path.write_text(page(self.data()), "utf-8")

    def __call__(self, done: Round) -> None:
        if not self.rounds:                                 # the prefill's token is the first round's root
            self.opening += self.stream.push(done.tokens[:1])
        p = self.target_p(done.logits)
        judged, law = replay_greedy(done, p) if is_greedy(self.args.temperature) else replay(done)
        self.judged.update({len(done.tree.paths[node]) for node in judged})
        self.accepted.update(range(1, len(done.path) + 1))
        self.rounds.append({"root": self.label(done.tokens[0], self.before), "nodes": self.nodes(done, judged, p),
                            "path": done.path, "law": self.law(done, p[([0] + done.path)[-1]], law),
                            "text": [self.stream.push([token]) for token in done.committed]})
        self.before = [done.tokens[0], *done.committed][-2]

    def target_p(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [N + 1, V] -> p before any rejection; at temperature 0 the softmax."""
        if is_greedy(self.args.temperature):
            return logits.float().softmax(-1)
        return warp(logits, self.args.temperature, self.args.top_k, self.args.top_p)

    def label(self, token: int, before: int) -> str:
        """The text that a token adds behind the token `before`; its number if that is no text of its own."""
        text = self.tok.decode([before, token])[len(self.tok.decode([before])):]
        return self.special.get(token) or (text if text and "\ufffd" not in text else f"#{token}")

    def nodes(self, done: Round, judged: dict, p: torch.Tensor) -> list[list]:
        """By drafted node: parent, text, q, p, chance, uniform, 1 if judged; [parent] where q had no token left."""
        rows = []
        for node, parent in enumerate(done.tree.parent[1:], 1):
            token, before = done.tokens[node], done.tokens[parent]
            if token < 0 or before < 0:
                rows.append([parent])
                continue
            values = judged.get(node) or (first_q(done, parent, token), p[parent, token].item(), None, None)
            rows.append([parent, self.label(token, before), *short(*values), int(node in judged)])
        return rows

    def law(self, done: Round, p: torch.Tensor, law: torch.Tensor) -> list[list]:
        """Where the target's own token came from: text, p, q, what is left of p, 1 if drawn; of the chief tokens.

        p [V] is the one before any rejection. Nothing is marked where an end of text in the path came before the draw.
        """
        last = ([0] + done.path)[-1]
        own = done.committed[-1] if len(done.committed) > len(done.path) else -1
        tried = [done.tokens[child] for child in done.tree.children[last]]
        chief = {own, *tried, *p.topk(min(ROWS, len(p))).indices.tolist(), law.argmax().item()} - {-1}
        q = done.q.get(last)
        return [[self.label(token, done.tokens[last]), *short(p[token].item(), None if q is None else q[token].item(),
                                                              law[token].item()), int(token == own)]
                for token in sorted(chief, key=lambda token: -p[token].item())]

    def data(self) -> dict:
        """All that the page shows; the last characters of a text may be missing if a stop cut them in two."""
        tokens, depths = sum(len(row["text"]) for row in self.rounds), range(1, max(self.judged, default=0) + 1)
        return {"target": Path(self.args.ckpt).name, "draft": Path(self.args.draft).name,
                "temperature": self.args.temperature, "greedy": is_greedy(self.args.temperature),
                "opening": self.opening, "rounds": self.rounds, "tokens": tokens,
                "tau": tokens / max(1, len(self.rounds)),
                "judged": [self.judged[k] for k in depths], "accepted": [self.accepted[k] for k in depths]}


def page(data: dict) -> str:
    """trace_page.html with the data in it. No text of a model can end the script element, since every < is escaped."""
    return PAGE.read_text("utf-8").replace("{{DATA}}", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))
