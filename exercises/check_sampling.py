"""Exercises 2, 3 and 6: what is accepted, what is drawn, and that both together are the target's distribution."""
import itertools
import math

import torch
from checks import Wrong, exactly, rule, same, seeded, shown
from helpers import tiny_llama

from speculative import Generator, accept, accept_child, accept_greedy, chance_of, generate, normalised_or, reject
from tree import Tree

# -- 2 residual sampling -----------------------------------------------------------------------------------------------

PAIRS = [([0.5, 0.3, 0.2], [0.6, 0.3, 0.1]), ([0.5, 0.4, 0.1], [0.1, 0.3, 0.6]), ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]),
         ([0.5, 0.3, 0.2], [1.0, 0, 0]), ([0, 0, 0.4, 0.6], [0.5, 0.5, 0, 0]), ([0.5, 0, 0.5, 0], [0, 0.2, 0.3, 0.5]),
         ([0, 1.0, 0], [0.3, 0.3, 0.4]), ([0, 1.0, 0], [0, 1.0, 0]), ([0.9, 0.1], [0.2, 0.8])]
PAIRS = [tuple(map(torch.tensor, pair)) for pair in PAIRS]


def as_dict(probs) -> dict:
    return {(i,): float(x) for i, x in enumerate(probs)}


@rule(2, 2, "normalised_or: weights / sum, or the fallback where the sum is 0, infinite or NaN")
def _():
    fallback = torch.tensor([0.2, 0.8])
    same(normalised_or(torch.tensor([1.0, 3.0]), fallback), torch.tensor([0.25, 0.75]), "weights [1, 3]")
    for bad in (0.0, math.inf, math.nan):
        same(normalised_or(torch.tensor([bad, 0.0]), fallback), fallback, f"weights [{bad}, 0], fallback [0.2, 0.8]")


@rule(2, 3, "reject, drawn candidate: p becomes norm(max(p - q, 0)), or stays where that has no mass")
def _():
    same(reject(*PAIRS[1], 2)[0], torch.tensor([0.8, 0.2, 0.0]), "p [.5 .4 .1], q [.1 .3 .6], token 2 refused: p")
    same(reject(*PAIRS[2], 0)[0], PAIRS[2][0], "p equal to q: p")


@rule(2, 2, "reject, drawn candidate: q loses the token and is normalised; the arguments stay as they are")
def _():
    p, q = PAIRS[1][0].clone(), PAIRS[1][1].clone()
    same(reject(p, q, 2)[1], torch.tensor([0.25, 0.75, 0.0]), "q [.1 .3 .6], token 2 refused: q")
    same(torch.stack((p, q)), torch.stack(PAIRS[1]), "p and q themselves after the call")
    same(reject(PAIRS[3][0], PAIRS[3][1], 0)[1], torch.zeros(3), "q [1 0 0], token 0 refused: q")


@rule(2, 2, "reject, chosen candidate (q None): p loses the token and is normalised; q stays None")
def _():
    p = torch.tensor([0.5, 0.3, 0.2])
    found = reject(p, None, 0)
    same(found[0], torch.tensor([0.0, 0.6, 0.4]), "p [.5 .3 .2], token 0 refused: p")
    same(found[1], None, "q")
    same(p, torch.tensor([0.5, 0.3, 0.2]), "p itself after the call")
    same(reject(torch.tensor([0.0, 1.0]), None, 1)[0], torch.tensor([0.0, 1.0]), "p without mass elsewhere: p")


@rule(2, 3, "one candidate from q, then the residual: together exactly p")
def _():
    for p, q in PAIRS:
        def one(r, p=p, q=q):
            token = r.draw(q)
            return (token,) if r.flip(min(1.0, float(p[token] / q[token]))) else (r.draw(reject(p, q, token)[0]),)
        exactly(one, as_dict(p), f"p {shown(p)}, q {shown(q)}")


# -- 3 chain accept, 6 tree accept: one round against the target alone -------------------------------------------------

def table(V: int, seed: int):
    """context (tuple of tokens) -> its probability vector [V], always the same; some tokens are impossible."""
    known = {}

    def probs(context: tuple) -> torch.Tensor:
        if context not in known:
            g = seeded(1000 * seed + sum((token + 1) * (V + 1) ** i for i, token in enumerate(context)))
            weights = torch.rand(V, generator=g) ** 3
            weights[torch.randint(V, (1,), generator=g)] = 0
            known[context] = weights / weights.sum()
        return known[context]
    return probs


def one_round(tree: Tree, p_of, q_of, drawn: bool):
    """-> run(randomness): the tokens that one round of drafting and accepting commits."""
    def run(randomness):
        tokens, context = [0] * (tree.size + 1), [()] * (tree.size + 1)
        for node, children in enumerate(tree.children):
            q = q_of(context[node])
            picks = randomness.draw_distinct(q[None], len(children))[0] if drawn else q.argsort(descending=True)
            for child, token in itertools.zip_longest(children, picks.tolist()[:len(children)], fillvalue=-1):
                tokens[child] = token if tokens[node] >= 0 else -1
                context[child] = (*context[node], tokens[child])
        path, bonus = accept(tree.children, tokens, lambda node: p_of(context[node]),
                             lambda node: q_of(context[node]) if drawn else None, randomness)
        return (*(tokens[node] for node in path), bonus)
    return run


def lossless(spec: str, V: int, drawn: bool) -> None:
    """A round, completed by the target alone, must give each text of depth + 1 tokens the target's own chance."""
    tree, p_of, q_of = Tree([]) if spec == "" else Tree.parse(spec), table(V, 1), table(V, 2)
    length, what = tree.depth + 1, f"tree {spec or 'without nodes'}, {V} tokens: texts of {tree.depth + 1} tokens"

    def chance(text: tuple, start: int) -> float:
        return math.prod(float(p_of(text[:i])[text[i]]) for i in range(start, length))

    def run(randomness):
        found = one_round(tree, p_of, q_of, drawn)(randomness)
        while len(found) < length:
            found = (*found, randomness.draw(p_of(found)))
        return found

    exactly(run, {text: chance(text, 0) for text in itertools.product(range(V), repeat=length)}, what)


@rule(3, 3, "chance_of: min(1, p/q), or p for a chosen candidate; NaN is refused")
def _():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.6, 0.3, 0.1])
    for token, wanted in enumerate((0.5 / 0.6, 1.0, 1.0)):
        same(chance_of(p, q, token), wanted, f"p [.5 .3 .2], q [.6 .3 .1], token {token}")
    same(chance_of(p, None, 1), 0.3, "p [.5 .3 .2], q None, token 1")
    for pair in ((torch.tensor([math.nan]), torch.ones(1)), (torch.zeros(1), torch.zeros(1))):
        try:
            chance = chance_of(*pair, 0)
        except ValueError:
            continue
        raise Wrong(f"chance_of(p {shown(pair[0])}, q {shown(pair[1])}): yours {chance}, expected a ValueError")


@rule(3, 5, "accept: a chain's tokens and the target's own have exactly the target's distribution")
def _():
    for spec in ("", "chain:1", "chain:2", "chain:3"):
        lossless(spec, 3, drawn=True)


@rule(3, 2, "accept: p and q are asked for once at each node on the path, at no other")
def _():
    asked, p = [], torch.tensor([0.5, 0.5])
    path, _ = accept([[1], [2], [3], []], [0, 1, 0, 1], lambda node: asked.append(node) or p, lambda node: p,
                     Generator(seeded()))
    same(path, [1, 2, 3], "p equal to q, a chain of 3: accepted nodes")
    same(asked, [0, 1, 2, 3], "nodes at which p was asked for")


@rule(3, 2, "a perfect draft costs one target pass for 5 tokens")
def _():
    model = tiny_llama()
    found = [len(new) for new in generate(model, [5], model, "chain:4", 41, 1.0, generator=seeded())]
    same(found, [1] + [5] * 8, "tokens by target pass, chain of 4, temperature 1")


@rule(6, 5, "accept_child: siblings drawn without replacement give exactly p")
def _():
    for p, q in PAIRS:
        for count in (1, 2, 3, 4):
            exactly(lambda r, p=p, q=q, n=count: first_token([0, *r.draw_distinct(q[None], n)[0].tolist()], p, q, r),
                    as_dict(p), f"p {shown(p)}, q {shown(q)}, {count} children")


def first_token(tokens: list[int], p, q, randomness) -> tuple[int]:
    child, rest = accept_child(list(range(1, len(tokens))), tokens, p, q, randomness)
    return (randomness.draw(rest) if child is None else tokens[child],)


@rule(6, 4, "accept_child: chosen candidates, judged by p alone (q None), give exactly p")
def _():
    p = torch.tensor([0.5, 0.3, 0.2])
    for tokens in ([0], [1], [0, 1], [2, 0], [1, 2, 0], [-1, 2]):
        exactly(lambda r, tokens=tokens: first_token([0, *tokens], p, None, r), as_dict(p),
                f"p {shown(p)}, candidates {tokens}")


@rule(6, 4, "a tree's tokens and the target's own have exactly the target's distribution")
def _():
    for spec in ("[[0],[1],[0,0]]", "[[0],[1],[0,0],[1,0],[0,0,0]]", "[[0],[1],[2],[0,0],[0,1]]"):
        lossless(spec, 3, drawn=True)
        lossless(spec, 3, drawn=False)


@rule(6, 3, "accept_greedy: follow the child that is the target's argmax")
def _():
    tree = Tree.parse("[[0],[1],[0,0],[1,0],[1,1],[1,0,0]]")
    tokens = [9, 1, 2, 1, 1, 4, -1]
    for best, wanted in (([2, 0, 4, 7, 0, 3, 0], ([2, 5], 3)), ([3, 0, 0, 0, 0, 0, 0], ([], 3)),
                         ([2, 0, 1, 0, 6, 0, 0], ([2, 4], 6)), ([1, 2, 0, 0, 0, 0, 0], ([1], 2))):
        same(tuple(accept_greedy(tree.children, tokens, best)), wanted,
             f"children {tree.children}, tokens {tokens}, argmax by node {best}")
