"""Exercises 1, 4 and 5: attention, the cache, the tree's mask and positions."""
import itertools
import math

import torch
from checks import Wrong, randn, rule, same
from helpers import random_ids, tiny_llama

from model import LlamaConfig, additive_mask, attend, rope_table, rotate
from speculative import verify
from tree import Plan, Tree, ancestor_mask

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


# -- 4 KV cache --------------------------------------------------------------------------------------------------------

def marked_cache():
    """Six rows, each filled with its number, + 10 in layer 1, + 100 in values."""
    cache = tiny_llama().new_cache(8)
    for layer, part in itertools.product((0, 1), (0, 1)):
        cache.kv[layer][part, :, :, :6] = torch.arange(6.0)[:, None] + 10 * layer + 100 * part
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
    same(keys.data_ptr(), cache.kv[1][0].data_ptr(), "views of the cache, no copy: address")
    same(cache.kv[0][0, 0, 0, :6, 0], torch.arange(6.0), "keys of the other layer")


@rule(4, 4, "keep: rows 0..start-1, then the given rows in their order, in all layers")
def _():
    for start, rows in ((6, []), (3, []), (0, []), (2, [3, 5]), (2, [2, 3]), (0, [4]), (1, [4, 2, 5]), (2, [3, 2])):
        cache = marked_cache()
        cache.keep(start, rows)
        same(cache.length, start + len(rows), f"keep({start}, {rows}): length")
        for layer, part in itertools.product((0, 1), (0, 1)):
            found = cache.kv[layer][part, 0, 1, :start + len(rows), 0] - 10 * layer - 100 * part
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
