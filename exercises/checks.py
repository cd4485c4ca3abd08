"""What each exercise must do: rules with points, checked by exact enumeration, by slow and obvious references, and by
counting target passes. grade.py runs them; they import the repository's own tests' helpers, never a student's tests.
"""
import itertools
import math
from collections import defaultdict

import torch
import torch.nn.functional as F
from exact import distribution
from helpers import random_ids, tiny_draft, tiny_llama

import speculative
from data import collate
from draft import trigrams_of
from loss import Meter, Weights, batch_loss, drafted_from, position_loss, target_distribution
from model import LlamaConfig, additive_mask, attend, rope_table, rotate
from speculative import accept, accept_child, accept_greedy, chance_of, generate, normalised_or, reject, verify
from tree import Plan, Tree, ancestor_mask

RULES = defaultdict(list)       # exercise -> [(rule, points, check)]


def rule(exercise: int, points: int, text: str):
    return lambda check: RULES[exercise].append((text, points, check))


# -- yours against expected --------------------------------------------------------------------------------------------

class Wrong(Exception):
    """Its text is shown to the student as it is."""


def shown(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"{[round(x, 4) for x in value.tolist()]}" if value.dim() == 1 and len(value) <= 8 else \
            f"{value.item():.4g}" if value.dim() == 0 else f"a tensor {list(value.shape)}"
    return f"{value:.6g}" if isinstance(value, float) else f"{value!r}"[:120]


def same(yours, expected, what: str, tolerance: float = 1e-4) -> None:
    """Raises Wrong with both values, those of the first place where they differ."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(yours, torch.Tensor) or yours.shape != expected.shape:
            shape = list(yours.shape) if isinstance(yours, torch.Tensor) else shown(yours)
            raise Wrong(f"{what}: yours has shape {shape}, expected {list(expected.shape)}")
        if yours.dtype != expected.dtype:
            raise Wrong(f"{what}: yours is {yours.dtype}, expected {expected.dtype}")
        a, b = yours.double(), expected.double()
        if (off := ~((a - b).abs().le(tolerance) | a.eq(b))).any():
            if a.dim() == 1 and len(a) <= 8:
                raise Wrong(f"{what}: yours {shown(yours)}, expected {shown(expected)}")
            at = off.nonzero()[0].tolist()
            raise Wrong(f"{what}: at {at} yours {shown(a[tuple(at)])}, expected {shown(b[tuple(at)])}")
    elif isinstance(expected, dict):
        for key in sorted(expected.keys() | yours.keys()):
            a, b = yours.get(key, 0.0), expected.get(key, 0.0)
            if not abs(a - b) < tolerance:
                raise Wrong(f"{what}: the chance of {list(key)} is {a:.5f} with yours, expected {b:.5f}")
    elif isinstance(expected, float):
        if not abs(yours - expected) < tolerance:
            raise Wrong(f"{what}: yours {shown(yours)}, expected {shown(expected)}")
    elif yours != expected or type(yours) is not type(expected):
        raise Wrong(f"{what}: yours {shown(yours)}, expected {shown(expected)}")


def exactly(run, expected: dict, what: str) -> None:
    """All outcomes of run(randomness), each with its weight, against their expected chances."""
    try:
        found = distribution(run)
    except AssertionError:
        raise Wrong(f"{what}: flip() was given no chance between 0 and 1, or draw() no probabilities") from None
    same(found, expected, what, 1e-5)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=seeded(seed))


# -- 1 RoPE and grouped attention --------------------------------------------------------------------------------------

@rule(1, 4, "rope_table: pair j of position m turns by m / rope_factor * theta^(-2j/E)")
def _():
    for theta, factor in ((1e4, 1.0), (5e5, 4.0)):
        config = LlamaConfig(head_dim=8, max_position_embeddings=50, rope_theta=theta, rope_factor=factor)
        with torch.device("meta"):
            cos, sin = rope_table(config)
        if cos.is_meta or sin.is_meta:
            raise Wrong("rope_table: yours is on the default device (here meta), expected on the CPU")
        angles = [[m / factor * theta ** (-2 * (j % 4) / 8) for j in range(8)] for m in range(50)]
        same(cos, torch.tensor([[math.cos(a) for a in row] for row in angles]), f"cos, rope_factor {factor}")
        signed = [[math.sin(a) * (-1 if j < 4 else 1) for j, a in enumerate(row)] for row in angles]
        same(sin, torch.tensor(signed), f"sin, first half negated, rope_factor {factor}")


@rule(1, 4, "rotate: the halves (x1, x2) become (x1 c - x2 s, x2 c + x1 s)")
def _():
    x, angle = randn(2, 5, 3, 8), randn(5, 4, seed=1).double()
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    turned = torch.complex(x[..., :4].double(), x[..., 4:].double()) * turn
    cos, sin = torch.cat((angle.cos(), angle.cos()), 1).float(), torch.cat((-angle.sin(), angle.sin()), 1).float()
    same(rotate(x, cos[:, None], sin[:, None]), torch.cat((turned.real, turned.imag), -1).float(), "rotate")


def slow_attention(q, k, v, allowed) -> torch.Tensor:
    out = torch.zeros_like(q)
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        g, rows = h // (q.shape[1] // k.shape[1]), allowed[i].nonzero().flatten()
        weights = (k[b, g, rows] @ q[b, h, i] / math.sqrt(q.shape[3])).softmax(0)
        out[b, h, i] = weights @ v[b, g, rows]
    return out


@rule(1, 4, "attend: query head h reads key/value head h // (H / G), of the rows that it may see")
def _():
    for G in (1, 2, 4):
        q, k, v = randn(2, 4, 3, 8), randn(2, G, 5, 8, seed=1), randn(2, G, 5, 8, seed=2)
        every, some = torch.ones(3, 5, dtype=torch.bool), torch.ones(3, 5, dtype=torch.bool).tril(1)
        same(attend(q, k, v), slow_attention(q, k, v, every), f"attend, 4 query heads, {G} key/value heads")
        same(attend(q, k, v, additive_mask(some, q.dtype)), slow_attention(q, k, v, some), "attend with a mask")
        k, v = k[:, :, :3], v[:, :, :3]
        same(attend(q, k, v, causal=True), slow_attention(q, k, v, torch.ones(3, 3).tril()), "attend, causal")


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
                     speculative.Generator(seeded()))
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


# -- 4 KV cache --------------------------------------------------------------------------------------------------------

def marked_cache():
    """Six rows, each filled with its number, + 10 in layer 1, + 100 in values."""
    cache = tiny_llama().new_cache(8)
    for layer, part in itertools.product((0, 1), (0, 1)):
        cache.kv[layer, part, :, :, :6] = torch.arange(6.0)[:, None] + 10 * layer + 100 * part
    cache.length = 6
    return cache


@rule(4, 4, "write: new rows stand behind the valid ones, all are returned, length does not move")
def _():
    cache, new = marked_cache(), torch.full((1, 2, 2, 8), 7.0)
    cache.length = 4
    keys, values = cache.write(1, new, new + 100)
    for found, add, what in ((keys, 0, "keys"), (values, 100, "values")):
        wanted = torch.tensor([10.0, 11, 12, 13, 7, 7]) + add
        same(list(found.shape), [1, 2, 6, 8], f"{what} after write(layer 1) of 2 rows behind 4: shape")
        same(found[0, 1, :, 3], wanted, f"{what} after write(layer 1) of 2 rows behind 4: numbers of the rows")
    same(cache.length, 4, "length after write")
    same(keys.data_ptr(), cache.kv[1, 0].data_ptr(), "views of the cache, no copy: address")
    same(cache.kv[0, 0, 0, 0, :6, 0], torch.arange(6.0), "keys of the other layer")


@rule(4, 4, "keep: rows 0..start-1, then the given rows in their order, in all layers")
def _():
    for start, rows in ((6, []), (3, []), (0, []), (2, [3, 5]), (2, [2, 3]), (0, [4]), (1, [4, 2, 5]), (2, [3, 2])):
        cache = marked_cache()
        cache.keep(start, rows)
        same(cache.length, start + len(rows), f"keep({start}, {rows}): length")
        for layer, part in itertools.product((0, 1), (0, 1)):
            found = cache.kv[layer, part, 0, 1, :start + len(rows), 0] - 10 * layer - 100 * part
            same([int(x) for x in found], [*range(start), *rows],
                 f"keep({start}, {rows}), layer {layer}, {('keys', 'values')[part]}: rows")


@rule(4, 2, "text goes on from the kept rows as if the others had never been")
def _():
    model, ids = tiny_llama(), torch.tensor([random_ids(10)])
    cache, tree = model.new_cache(14), torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 1]]).bool()
    model.hidden_states(ids[:, :4], cache)
    mask = additive_mask(torch.cat((torch.ones_like(tree), tree), 1), torch.float32)
    draft = torch.tensor([[1, ids[0, 4], 2, ids[0, 5]]])    # rows 5 and 7 are a path, 4 and 6 its siblings
    model.hidden_states(draft, cache, torch.tensor([4, 4, 5, 5]), mask)
    cache.keep(4, [5, 7])
    rest = model.hidden_states(ids[:, 6:], cache)
    same(rest, model.hidden_states(ids)[:, 6:], "hidden states behind the kept rows")


# -- 5 tree mask and positions -----------------------------------------------------------------------------------------

SPECS = ("chain:3", "3", "2,3,2", "[[0],[1],[2],[0,0],[0,0,0],[0,0,1]]")


@rule(5, 4, "ancestor_mask: a node sees itself and its ancestors, no sibling, no cousin")
def _():
    for spec in SPECS:
        tree = Tree.parse(spec)
        wanted = [[path[:len(other)] == other for other in tree.paths] for path in tree.paths]
        found = ancestor_mask(tree.parent)
        same(found.int(), torch.tensor(wanted).int(), f"parents {tree.parent}: mask")
        same(str(found.dtype), "torch.bool", "dtype")


@rule(5, 4, "_widen: the n cached positions are visible to all, then what is allowed; None where all is")
def _():
    model = tiny_llama()
    plan, allowed = Plan(Tree.parse("2"), 9, model.embed.weight), torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    for like in (torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)):
        plan.like = like
        mask = plan._widen(allowed)
        for n in (0, 1, 5, 9):
            wanted = torch.cat((torch.ones(3, n, dtype=torch.bool), allowed), 1)
            same(mask(n), additive_mask(wanted, like.dtype), f"{n} cached positions")
    same(plan._widen(torch.ones(1, 2, dtype=torch.bool))(3), None, "all allowed")


@rule(5, 6, "verify: in one target pass every node gets what a plain pass over its path gives")
def _():
    model, prompt = tiny_llama(), random_ids(5)
    for spec in SPECS:
        tree, cache, calls = Tree.parse(spec), model.new_cache(30), []
        tokens = [prompt[-1], *random_ids(tree.size, seed=3)]
        tokens[-1] = -1                                     # a leaf without a token
        model.hidden_states(torch.tensor([prompt[:-1]]), cache)
        hook = model.embed.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        hidden, logits = verify(model, cache, Plan(tree, 30, model.embed.weight), torch.tensor(tokens))
        hook.remove()
        same(len(calls), 1, f"tree {spec}: target passes")
        same(cache.length, 4, f"tree {spec}: rows that the cache counts afterwards")
        for node, path in list(enumerate(tree.paths))[:-1]:
            line = [tokens[tree.paths.index(path[:i])] for i in range(len(path) + 1)]
            plain = model.hidden_states(torch.tensor([prompt[:-1] + line]))[0, -1]
            same(hidden[node], plain, f"tree {spec}, node {node} of depth {len(path)}: hidden state")
            same(logits[node], model.lm_head(plain), f"tree {spec}, node {node}: logits", 1e-3)


# -- 7 trigram encoder and residual heads ------------------------------------------------------------------------------

FORMS = ({}, {"heads": "full"}, {"draft_vocab": 11}, {"heads": "full", "draft_vocab": 11})


@rule(7, 3, "trigrams_of: the ids of positions i-2, i-1, i; -1 before the beginning")
def _():
    wanted = torch.tensor([[[-1, -1, 5], [-1, 5, 6], [5, 6, 7]], [[-1, -1, 1], [-1, 1, 2], [1, 2, 3]]])
    same(trigrams_of(torch.tensor([[5, 6, 7], [1, 2, 3]])), wanted, "tokens [[5, 6, 7], [1, 2, 3]]")


@rule(7, 4, "encode: trigram_out(silu(trigram_in(three embeddings))), missing neighbours zero")
def _():
    model = tiny_llama()
    draft = tiny_draft(model)
    for gram in ([-1, -1, 0], [-1, 5, 6], [4, 5, 6]):
        parts = [model.embed.weight[i] if i >= 0 else torch.zeros(32) for i in gram]
        wanted = draft.trigram_out(F.silu(draft.trigram_in(torch.cat(parts))))
        same(draft.encode(torch.tensor(gram)), wanted, f"trigram {gram}")
    grams = torch.tensor([[[1, 2, 3], [2, 3, 4]], [[5, 6, 7], [-1, -1, 1]]])
    same(draft.encode(grams)[1, 1], draft.encode(grams[1, 1]), "a batch of trigrams [2, 2, 3]")
    half = tiny_draft(tiny_llama()).to(torch.bfloat16)
    same(str(half.encode(grams).dtype), "torch.bfloat16", "a bfloat16 draft on a float32 target: dtype")


@rule(7, 3, "head_input and head_logits: h and hhat through head k, light heads through the target's lm_head")
def _():
    model = tiny_llama()
    for form in FORMS:
        draft, h, hhat = tiny_draft(model, **form), randn(2, 3, 32), randn(2, 3, 32, seed=1)
        ids = torch.arange(40) if draft.vocab_ids is None else draft.vocab_ids
        both = torch.cat((h, hhat), -1)
        for step in (0, 2):
            wanted = both @ draft.heads[step].weight.T
            if draft.config.heads == "light":
                wanted = wanted @ model.lm_head.weight[ids].T
            found = draft.head_logits(step, draft.head_input(step, h, hhat))
            same(found, wanted, f"{form or 'light heads'}, step {step}")


@rule(7, 2, "head_input: light heads give a state [..., D], full heads [h; hhat]")
def _():
    h, hhat = randn(3, 32), randn(3, 32, seed=1)
    for heads, width in (("light", 32), ("full", 64)):
        draft = tiny_draft(tiny_llama(), heads=heads)
        same(list(draft.head_input(1, h, hhat).shape), [3, width], f"{heads} heads: shape")
        draft.head_logits(1, draft.head_input(1, h, hhat))


# -- 8 depth-k targets and loss ----------------------------------------------------------------------------------------

@rule(8, 4, "drafted_from: step k predicts token j+1 from position j - k, where there is one")
def _():
    b, j = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 3, 2, 4])
    for k in (1, 2, 3):
        has, (step, texts, i) = drafted_from(k, b, j)
        pairs = [(int(x), int(y)) for x, y in zip(b, j) if y >= k]
        what = f"k {k}, positions j {j.tolist()}: "
        same(has.tolist(), [int(y) >= k for y in j], what + "which are predicted")
        same(int(step), k - 1, what + "row of [K, B, T]")
        same(list(zip(texts.tolist(), i.tolist())), [(x, y - k) for x, y in pairs], what + "(b, i)")


@rule(8, 3, "target_distribution: p over the draft's vocabulary, labels and argmax as places in it")
def _():
    model = tiny_llama()
    hidden, label = randn(6, 32) * 2, torch.tensor(random_ids(6, seed=2))
    for form in ({}, {"draft_vocab": 15}):
        draft, logits = tiny_draft(model, **form), model.lm_head(hidden)
        ids = list(range(40)) if draft.vocab_ids is None else draft.vocab_ids.tolist()
        p, neg_entropy, places, best = target_distribution(draft, model, hidden, label)
        wanted = logits[:, ids].softmax(-1)
        same(p, wanted, f"{form or 'all tokens'}: p")
        same(neg_entropy, (wanted * wanted.clamp(min=1e-30).log()).sum(-1), f"{form or 'all tokens'}: sum p log p")
        for found, tokens, what in ((places, label, "labels"), (best, logits.argmax(-1), "argmax")):
            same(found.tolist(), [ids.index(t) if t in ids else -1 for t in tokens.tolist()], f"{form}: {what}")
    model.lm_head.weight[:20] = -100 * hidden[0]            # so unlikely that p is 0 in float32
    neg_entropy = target_distribution(tiny_draft(model), model, hidden[:1], label[:1])[1]
    if not neg_entropy.isfinite().all():
        raise Wrong(f"sum p log p where some p is 0: yours {shown(neg_entropy)}, expected a finite number")


@rule(8, 3, "position_loss: cross-entropy + kl * KL(p || q); no cross-entropy for an unknown label")
def _():
    logits, p, label = randn(5, 7), randn(5, 7, seed=1).softmax(-1), torch.tensor([0, 6, -1, 3, -1])
    logq = logits.log_softmax(-1)
    for kl in (0.0, 1.0, 0.7):
        wanted = torch.stack([(-logq[c, y] if y >= 0 else 0) + kl * F.kl_div(logq[c], p[c], reduction="sum")
                              for c, y in enumerate(label.tolist())])
        found = position_loss(logits, p, label, kl, torch.xlogy(p, p).sum(-1))
        same(found, wanted, f"kl {kl}, labels {label.tolist()}")


@rule(8, 2, "batch_loss: loss and gradients equal the definition, one position after the other")
def _():
    model = tiny_llama()
    draft = tiny_draft(model, draft_vocab=15).requires_grad_(True)
    samples = [(torch.tensor(random_ids(n, seed=n)), torch.rand(n, generator=seeded(n)) < 0.7) for n in (9, 6, 4)]
    tokens, labelled = collate(samples)
    hidden, slow = model.hidden_states(tokens), 0.0
    for k, state in enumerate(draft(tokens, hidden), 1):
        logq = draft.head_logits(k - 1, state).log_softmax(-1)
        for b, i in itertools.product(range(3), range(tokens.shape[1] - k - 1)):
            if labelled[b, i + k]:
                p = model.lm_head(hidden)[b, i + k, draft.vocab_ids].softmax(-1)
                place = (draft.vocab_ids == tokens[b, i + k + 1]).nonzero().flatten()
                slow = slow - logq[b, i, place].sum() + F.kl_div(logq[b, i], p, reduction="sum")
    slow.backward()
    wanted = {name: w.grad.clone() for name, w in draft.named_parameters()}
    draft.zero_grad()
    found = batch_loss(draft, model, tokens, labelled, Meter(3), Weights(), 1.0)
    same(found / slow.item(), 1.0, "loss, yours / expected")
    for name, weight in draft.named_parameters():
        same(weight.grad, wanted[name], f"gradient of {name}", 1e-3)
