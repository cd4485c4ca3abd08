"""The accept/reject sampler is lossless: proved by following every outcome of the shipped functions with its weight."""
import itertools
import math
from functools import partial

import pytest
import torch
from exact import assert_same, distribution, every_outcome

from speculative import Generator, Randomness, accept, accept_greedy, is_greedy, reject, warp
from tree import Tree


def as_dict(probs) -> dict:
    return {(i,): float(x) for i, x in enumerate(probs)}


def emission(p: torch.Tensor, q: torch.Tensor, count: int):
    """-> run(randomness): the first token committed when `count` children are drawn from q under one root."""
    def run(randomness: Randomness) -> tuple[int]:
        tokens = [0, *randomness.draw_distinct(q[None], count)[0].tolist()]
        return first_token(tokens, p, q, randomness)
    return run


def first_token(tokens: list[int], p, q, randomness: Randomness) -> tuple[int]:
    children = [list(range(1, len(tokens)))] + [[]] * (len(tokens) - 1)
    path, bonus = accept(children, tokens, lambda node: p, lambda node: q, randomness)
    return (tokens[path[0]] if path else bonus,)


# -- the exact vectors -------------------------------------------------------------------------------------------------

P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.6, 0.3, 0.1])


@pytest.mark.parametrize("children", [1, 2, 3, 5])
def test_children_drawn_without_replacement_give_p(children):
    assert_same(distribution(emission(P, Q, children)), as_dict(P))


@pytest.mark.parametrize("candidates", [[0], [1], [0, 1], [2, 0], [1, 2, 0]])
def test_chosen_candidates_judged_by_p_alone_give_p(candidates):
    assert_same(distribution(lambda r: first_token([0, *candidates], P, None, r)), as_dict(P))


def test_the_residual_is_divided_by_its_sum():
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    assert torch.allclose(reject(p, q, 1)[0], torch.tensor([1.0, 0, 0]))
    assert_same(distribution(emission(p, q, 1)), as_dict(p))
    assert_same(distribution(lambda r: first_token([0, 1, 2], p, None, r)), as_dict(p))


PAIRS = {
    "hard pair": ([0.5, 0.4, 0.1], [0.1, 0.3, 0.6]), "p equals q": ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]),
    "q has one token": ([0.5, 0.3, 0.2], [1.0, 0, 0]), "disjoint": ([0, 0, 0.4, 0.6], [0.5, 0.5, 0, 0]),
    "zeros in both": ([0.5, 0, 0.5, 0], [0, 0.2, 0.3, 0.5]), "p is one-hot": ([0, 1.0, 0], [0.3, 0.3, 0.4]),
    "both one-hot": ([0, 1.0, 0], [0, 1.0, 0]), "tiny tail": ([1 - 1e-6, 1e-6, 0], [0.5, 0.5, 0]),
    "two tokens": ([0.9, 0.1], [0.2, 0.8]), "one token": ([1.0], [1.0]),
}


@pytest.mark.parametrize("children", [1, 2, 3, 4])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_every_shape_of_p_and_q_gives_p(pair, children):
    p, q = map(torch.tensor, pair)
    assert_same(distribution(emission(p, q, children)), as_dict(p))


# -- the harness sees faults: known wrong rules give their known wrong values ------------------------------------------

def wrong_argmax_by_ratio(r):
    best = int(Q.argmax())
    return (best,) if r.flip(min(1.0, float(P[best] / Q[best]))) else (r.draw(reject(P, Q, best)[0]),)


def wrong_p_then_residual(r):
    best = int(Q.argmax())
    return (best,) if r.flip(float(P[best])) else (r.draw(reject(P, Q, best)[0]),)


def wrong_fresh_p(r):
    for candidate in (0, 1):
        if r.flip(float(P[candidate])):
            return (candidate,)
    return (r.draw(reject(P, Q, 0)[0]),)


def wrong_q_not_renormalised(r):
    p, q = torch.tensor([0.5, 0.4, 0.1]), torch.tensor([0.1, 0.3, 0.6])
    for token in r.draw_distinct(q[None], 2)[0].tolist():
        if r.flip(min(1.0, float(p[token] / q[token]))):
            return (token,)
        p, q = reject(p, q, token)[0], q.clone().index_fill_(0, torch.tensor(token), 0)
    return (r.draw(p),)


def wrong_third_draw(r):
    p, q = torch.tensor([0.5, 0.4, 0.1]), torch.tensor([0.1, 0.3, 0.6])
    tokens = r.draw_distinct(q[None], 3)[0].tolist()
    return first_token([0, tokens[0], tokens[2]], p, q, r)


@pytest.mark.parametrize("run, value", [
    (wrong_argmax_by_ratio, (0.8333333, 0, 0.1666667)), (wrong_p_then_residual, (0.5, 0, 0.5)),
    (wrong_fresh_p, (0.5, 0.15, 0.35)), (wrong_q_not_renormalised, (0.35, 0.55, 0.1)),
    (wrong_third_draw, (0.5666667, 0.3333333, 0.1)), ], ids=lambda x: getattr(x, "__name__", ""))
def test_enumeration_exposes_a_wrong_rule(run, value):
    assert_same(distribution(run), as_dict(value))


# -- trees: contexts of depth 3, every outcome -------------------------------------------------------------------------

def table(V: int, seed: int, zeros: bool):
    """context (tuple of tokens) -> its probability vector, always the same; with `zeros` some tokens are impossible."""
    known = {}

    def probs(context: tuple) -> torch.Tensor:
        if context not in known:
            g = torch.Generator().manual_seed(seed * 7919 + hash(context) % 10007)
            weights = torch.rand(V, generator=g) ** 3
            if zeros:
                weights[torch.randint(V, (1,), generator=g)] = 0
            known[context] = weights / weights.sum()
        return known[context]
    return probs


def one_round(tree: Tree, p_of, q_of, drawn: bool):
    """-> run(randomness): tokens committed by one round of drafting and accepting, q and p depending on the path."""
    def run(randomness):
        tokens, context = [0] * (tree.size + 1), [()] * (tree.size + 1)
        for node, children in enumerate(tree.children):
            q = q_of(context[node])
            picks = randomness.draw_distinct(q[None], len(children))[0] if drawn else q.argsort(descending=True)
            drawn_tokens = picks.tolist()
            for rank, child in enumerate(children):
                tokens[child] = drawn_tokens[rank] if rank < len(drawn_tokens) and tokens[node] >= 0 else -1
                context[child] = (*context[node], tokens[child])
        path, bonus = accept(tree.children, tokens, lambda node: p_of(context[node]),
                             lambda node: q_of(context[node]) if drawn else None, randomness)
        return (*(tokens[node] for node in path), bonus)
    return run


def completed(found: dict, p_of, V: int, length: int) -> dict:
    """The distribution of the first `length` tokens when the target alone goes on after what the round committed."""
    total = dict.fromkeys(itertools.product(range(V), repeat=length), 0.0)
    for tokens, weight in found.items():
        for rest in itertools.product(range(V), repeat=max(0, length - len(tokens))):
            full = (*tokens, *rest)
            chance = math.prod(float(p_of(full[:i])[full[i]]) for i in range(len(tokens), length))
            total[full[:length]] += weight * chance
    return total


TREES = {"chain:1": 4, "chain:3": 4, "2": 4, "[[0],[1],[0,0]]": 4, "[[0],[1],[0,0],[1,0],[0,0,0]]": 3,
         "[[0],[1],[2],[0,0],[0,1]]": 3, "2,3,2": 2}


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "chosen"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("spec, V", TREES.items())
def test_a_tree_commits_tokens_distributed_as_the_target(spec, V, zeros, drawn):
    tree, p_of, q_of = Tree.parse(spec), table(V, 1, zeros), table(V, 2, zeros)
    found = distribution(one_round(tree, p_of, q_of, drawn))
    length = tree.depth + 1
    sequences = itertools.product(range(V), repeat=length)
    exact = {s: math.prod(float(p_of(s[:i])[s[i]]) for i in range(length)) for s in sequences}
    assert_same(completed(found, p_of, V, length), exact, 1e-5)


def test_greedy_acceptance_is_the_general_rule_with_one_hot_p():
    tree, g = Tree.parse("[[0],[1],[0,0],[0,1],[1,0],[0,0,0]]"), torch.Generator().manual_seed(0)
    for _ in range(200):
        tokens, best = (torch.randint(3, (tree.size + 1,), generator=g).tolist() for _ in range(2))
        one_hot = [torch.eye(3)[b] for b in best]
        outcomes = list(every_outcome(partial(accept, tree.children, tokens, one_hot.__getitem__, lambda n: None)))
        assert outcomes == [(1.0, accept_greedy(tree.children, tokens, best))]


# -- numbers at the edge -----------------------------------------------------------------------------------------------

def test_a_residual_without_mass_falls_back_to_p():
    p = torch.tensor([0.0, 1.0, 0.0])
    for q in (p, None):
        assert torch.equal(reject(p, q, 1)[0], p)
    nearly = torch.tensor([0.1, 0.2, 0.7])
    assert torch.isfinite(reject(nearly, nearly.clone(), 2)[0]).all()


def test_draw_never_gives_a_token_of_probability_zero():
    probs, r = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]), Generator(torch.Generator().manual_seed(0))
    assert {r.draw(probs) for _ in range(2000)} == {1, 3}


def test_draw_refuses_nan():
    with pytest.raises(ValueError, match="not finite"):
        Generator().draw(torch.tensor([float("nan"), 1.0]))


def test_gumbel_draws_follow_the_law_of_repeated_draws():
    q, rows = torch.tensor([0.4, 0.3, 0.2, 0.1]), 60_000
    pairs = Generator(torch.Generator().manual_seed(1)).draw_distinct(q.expand(rows, 4), 2)
    counts = torch.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16).double()
    exact = distribution(lambda r: tuple(r.draw_distinct(q[None], 2)[0].tolist()))
    chi2 = sum((counts[a * 4 + b] - rows * w) ** 2 / (rows * w) for (a, b), w in exact.items())
    assert counts[[0, 5, 10, 15]].sum() == 0 and chi2 < 31.3           # 11 degrees of freedom, p = 0.001


@pytest.mark.parametrize("randomness", [Generator(), None], ids=["gumbel", "in turn"])
def test_fewer_tokens_than_children_leaves_the_rest_empty(randomness):
    q = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    every = [randomness.draw_distinct(q, 4)] if randomness else [
        result for _, result in every_outcome(lambda r: r.draw_distinct(q, 4))]
    for one, two in (rows.tolist() for rows in every):
        assert one == [1, -1, -1, -1] and two[2:] == [-1, -1] and sorted(two[:2]) == [0, 2]


# -- warp --------------------------------------------------------------------------------------------------------------

def test_warp_renormalises_between_top_k_and_top_p():
    logits = torch.tensor([0.35, 0.25, 0.20, 0.05, 0.03, 0.03, 0.03, 0.03, 0.03]).log()
    kept = warp(logits, 1.0, top_k=4, top_p=0.82)
    assert (kept > 0).sum() == 3 and torch.isclose(kept.sum(), torch.tensor(1.0))
    assert (warp(logits, 1.0, top_p=0.82) > 0).sum() == 4


@pytest.mark.parametrize("kwargs, kept", [({"top_k": 1}, 1), ({"top_k": 99}, 5), ({"top_p": 0.0}, 1), ({}, 5),
                                          ({"top_p": 1.0}, 5), ({"top_k": 2, "top_p": 0.0}, 1)])
def test_warp_keeps_at_least_one_and_at_most_all(kwargs, kept):
    assert (warp(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0]), 1.0, **kwargs) > 0).sum() == kept


def test_warp_is_float32_and_finite_at_extreme_temperatures():
    logits = torch.randn(3, 7, dtype=torch.bfloat16) * 30
    for temperature in (1e-5, 1e-4, 1.0, 1e30):
        probs = warp(logits, temperature)
        assert probs.dtype == torch.float32 and torch.allclose(probs.sum(-1), torch.ones(3))


@pytest.mark.parametrize("temperature, greedy", [(0, True), (1e-40, True), (1e-6, True), (1e-5, False), (1.0, False)])
def test_one_threshold_decides_what_is_greedy(temperature, greedy):
    assert is_greedy(temperature) is greedy
