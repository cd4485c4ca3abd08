"""Lossless speculative decoding: the accept/reject sampler and the decode loop.

A round: (1) draft a tree of candidate tokens, (2) verify them in ONE target pass, (3) accept a path from the root,
(4) commit that path and one token that the target itself supplies. The text is distributed exactly as the target's:
speculative sampling (Chen et al., arXiv 2302.01318; Leviathan et al., arXiv 2211.17192), over a tree (SpecInfer, arXiv
2305.09781) whose siblings are drawn without replacement (recursive rejection sampling, Jeon et al., arXiv 2402.14160).
Plain decoding is the same loop with a tree of no candidates. Batch size 1.

p is always the target's distribution and q the draft's. V vocabulary, N drafted nodes (node 0 is the root), n cached
positions, M nodes of one depth.
"""
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache as memoize
from functools import partial

import torch
import torch.nn.functional as F

from draft import Chimera, ChimeraState
from model import KVCache, Llama
from tree import Plan, Tree

DRAFT_TOP = 64          # candidates come from the draft's best 64 tokens; q = 0 elsewhere is lossless, and cheaper


# ---------------------------------------------------------------------------------------------------------------------
# Distributions and randomness

def is_greedy(temperature: float) -> bool:
    """The one place that decides: below this a draw is the argmax in all but name."""
    return temperature < 1e-5


def warp(logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """logits [..., V] -> probabilities [..., V] float32: temperature, top-k, renormalise, top-p (keeps at least 1)."""
    probs = (logits.float() / temperature).softmax(-1)
    k = min(top_k or probs.shape[-1], probs.shape[-1])
    if k == probs.shape[-1] and top_p >= 1:
        return probs
    ids = logits.topk(k).indices                            # sorted, so that top-p cuts a tail; probs tie at 1e30
    values = probs.gather(-1, ids)
    values = values / values.sum(-1, keepdim=True)
    before = values.cumsum(-1) - values
    before[..., 0] = -1.0                                                       # the best token is always kept
    values = values * (before < top_p) if top_p < 1 else values
    return torch.zeros_like(probs).scatter(-1, ids, values / values.sum(-1, keepdim=True))


class Randomness:
    """Where chance enters: flip and draw. Tests replace it by one that follows every branch with its weight."""
    log: list[tuple[float, float]] = []                                         # what Generator notes for display

    def flip(self, probability: float) -> bool:
        raise NotImplementedError

    def draw(self, probs: torch.Tensor) -> int:
        """probs [V] -> an index, never one of probability 0."""
        raise NotImplementedError

    def draw_distinct(self, probs: torch.Tensor, count: int) -> torch.Tensor:
        """probs [M, V] -> indices [M, count] in draw order, without replacement; -1 where none of q > 0 is left."""
        rows = []
        for row in probs.clone():
            rows.append([])
            for _ in range(count):
                rows[-1].append(self.draw(row / row.sum()) if row.sum() > 0 else -1)
                if rows[-1][-1] >= 0:
                    row[rows[-1][-1]] = 0
        return torch.tensor(rows, dtype=torch.long, device=probs.device).view(len(probs), count)


class Generator(Randomness):
    """Randomness from a torch.Generator (None: torch's global one)."""

    def __init__(self, generator: torch.Generator | None = None):
        self.generator, self.log = generator, []                                # log: (chance, uniform) of each flip

    def _uniform(self, *shape: int) -> torch.Tensor:
        device = "cpu" if self.generator is None else self.generator.device
        return torch.rand(shape, generator=self.generator, device=device)

    def flip(self, probability: float) -> bool:
        self.log.append((probability, self._uniform().item()))
        return self.log[-1][1] < probability

    def draw(self, probs: torch.Tensor) -> int:
        cdf = probs.double().cumsum(-1)
        if not math.isfinite(cdf[-1].item()):
            raise ValueError(NON_FINITE)
        point = self._uniform().to(cdf.device, torch.float64) * cdf[-1]
        return int(torch.searchsorted(cdf, point, right=True))                  # right: probability 0 has no width

    def draw_distinct(self, probs: torch.Tensor, count: int) -> torch.Tensor:
        """An exponential race (Gumbel-top-k, Kool et al., arXiv 1903.06059), the same law as drawing in turn."""
        noise = -torch.log1p(-self._uniform(*probs.shape)).to(probs.device)     # u in [0, 1) -> never infinite
        best, index = best_of(probs / noise.clamp(min=1e-30), count)
        index = index.masked_fill(best == 0, -1)
        return index if index.shape[1] == count else F.pad(index, (0, count - index.shape[1]), value=-1)


NON_FINITE = "the model's logits are not finite; use dtype bfloat16 or float32 (float16 overflows on some checkpoints)"


# ---------------------------------------------------------------------------------------------------------------------
# Accept / reject: pure functions of probabilities

def normalised_or(weights: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
    """weights [V] / sum; the fallback [V] if the sum is 0 (rounding left nothing: p == q), infinite or NaN."""
    # exercise 2
    total = weights.sum().item()
    return weights / total if 0 < total < math.inf else fallback


def reject(p: torch.Tensor, q: torch.Tensor | None, token: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """p [V], q [V] -> what they become when the candidate `token` has been refused; the arguments stay as they are.

    Drawn from q: p becomes norm(max(p - q, 0)), or stays p if that has no mass; q loses the token, norm(q without it),
    since the next sibling is another one. q None (the candidate was chosen, not drawn): p loses the token, or stays p
    if that leaves no mass; q stays None. A q without mass is all zeros.
    """
    # exercise 2
    if q is None:
        rest = p.clone()
        rest[token] = 0
        return normalised_or(rest, p), None
    rest = q.clone()
    rest[token] = 0
    return normalised_or((p - q).clamp(min=0), p), normalised_or(rest, rest)


def chance_of(p: torch.Tensor, q: torch.Tensor | None, token: int) -> float:
    """The chance with which a candidate is accepted: min(1, p(token) / q(token)); q None (chosen, not drawn): p(token).

    ValueError(NON_FINITE) if that is NaN, which would pass for certainty: min(1.0, nan) is 1.0.
    """
    # exercise 3
    chance = (p[token] if q is None else p[token] / q[token]).item()
    if not chance >= 0:
        raise ValueError(NON_FINITE)
    return min(1.0, chance)


def accept_child(candidates: list[int], tokens: list[int], p: torch.Tensor, q: torch.Tensor | None,
                 randomness: Randomness) -> tuple[int | None, torch.Tensor]:
    """Judges a node's children in turn: -> (the accepted one or None, what then is left of p).

    candidates are nodes; tokens[c] is candidate c's token, -1 where q had none left (it is passed over). Each is
    accepted with chance_of(p, q, token), by randomness.flip; after a refusal the next one is judged by what reject()
    makes of p and q. Chen et al. Algorithm 2 for one child; Jeon et al. (recursive rejection sampling) for several.
    """
    # exercise 6
    for child in candidates:
        if tokens[child] < 0:
            continue
        if randomness.flip(chance_of(p, q, tokens[child])):
            return child, p
        p, q = reject(p, q, tokens[child])
    return None, p


def accept(children: list[list[int]], tokens: list[int], p_at: Callable[[int], torch.Tensor],
           q_at: Callable[[int], torch.Tensor | None], randomness: Randomness) -> tuple[list[int], int]:
    """Walks from the root (node 0): -> (accepted nodes, the token the target supplies after them), distributed as p.

    children[i] lists node i's candidates in the order in which they were drawn from q_at(i), without replacement;
    tokens[c] is -1 where q had no token left. q_at(i) None: they were chosen, not drawn, so p alone judges each.
    accept_child() judges a node's children by p_at and q_at of that node, called once for each node on the path. Where
    it accepts none, the target's token is drawn (randomness.draw) from what it left of p.
    """
    # exercise 3
    path = [0]
    while True:
        child, p = accept_child(children[path[-1]], tokens, p_at(path[-1]), q_at(path[-1]), randomness)
        if child is None:
            return path[1:], randomness.draw(p)
        path.append(child)


def accept_greedy(children: list[list[int]], tokens: list[int], best: list[int]) -> tuple[list[int], int]:
    """accept() where p is one-hot: from node 0 follow the child whose token is the target's argmax, best[node], while
    there is one: -> (accepted nodes, the target's argmax after them)."""
    # exercise 6
    path = [0]
    while (child := next((c for c in children[path[-1]] if tokens[c] == best[path[-1]]), None)) is not None:
        path.append(child)
    return path[1:], best[path[-1]]


# ---------------------------------------------------------------------------------------------------------------------
# The decode loop

class LlamaState:
    """A second, smaller Llama as the draft: the same interface as ChimeraState, fed with tokens instead of states."""
    vocab_ids = None                            # it proposes every token

    def __init__(self, draft: Llama, rows: int):
        self.draft, self.cache = draft, draft.new_cache(rows)
        self.waiting: list[int] = []            # committed tokens that are not in its cache
        self.length = 0                         # n: committed tokens, those waiting included

    def observe(self, tokens: list[int], hidden: torch.Tensor) -> None:
        self.cache.length = self.length - len(self.waiting)                     # drop what was drafted
        self.waiting, self.length = self.waiting + tokens, self.length + len(tokens)

    def step(self, depth, trigrams, offsets, mask):
        ids, positions = trigrams[:, 2], None
        if depth == 0:
            ids, self.waiting = torch.cat((ids.new_tensor(self.waiting), ids)), []
        else:
            positions = self.length + offsets[-len(ids):]
        hidden = self.draft.hidden_states(ids[None], self.cache, positions, mask)
        return self.draft.lm_head(hidden[0, -len(trigrams):])


class Cache:
    """What a call leaves for the next one: pass the same Cache() again with only the new tokens as the prompt."""

    def __init__(self):
        self.tokens: list[int] = []             # all committed; those from kv.length on have no row yet
        self.kv: KVCache | None = None
        self.drafter: ChimeraState | LlamaState | None = None
        self.owner = None                       # the model and draft that it belongs to
        self.calls = 0                          # only the newest call may go on

    def check(self, call: int) -> None:
        if self.calls != call:
            raise ValueError("another call has gone on with this cache since; finish one before the next")

    def prepare(self, model: Llama, draft, rows: int) -> None:
        """Makes or grows the target's and the draft's state for `rows` positions."""
        if self.owner is None:
            self.owner, self.kv = (model, draft), model.new_cache(rows)
            if draft is not None:
                self.drafter = LlamaState(draft, rows) if isinstance(draft, Llama) else draft.new_state(rows)
        for state in (self.kv, self.drafter and self.drafter.cache):
            if state is not None:
                state.reserve(rows)


@dataclass
class Round:
    """One round, for display: p and q [V] by visited node (none when greedy), flips (chance, uniform) in order, the
    seconds that each of the four steps took.

    logits [N + 1, V] of the target and drawn, the draft's (ids, q) by node, are what p and q come from at every node.
    """
    tree: Tree
    tokens: list[int]
    q: dict[int, torch.Tensor]
    p: dict[int, torch.Tensor]
    flips: list[tuple[float, float]]
    path: list[int]
    committed: list[int]
    logits: torch.Tensor
    drawn: dict[int, tuple[torch.Tensor, torch.Tensor]]
    seconds: list[float]


def best_of(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [M, W] -> the `count` highest of each row and their places, [M, count] (fewer if W is smaller)."""
    return logits.max(-1, keepdim=True) if count == 1 else logits.topk(min(count, logits.shape[-1]))


@memoize
def compiled(step: Callable, cuda: bool) -> Callable:
    """torch.compile of one step: as CUDA graphs on a GPU, on a CPU without Python between the kernels."""
    torch._dynamo.config.cache_size_limit = 256             # one graph for each tree, depth and cache size
    if cuda:
        return torch.compile(step, dynamic=False, mode="reduce-overhead")
    if not shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")):
        raise ValueError("compiled steps need a C++ compiler; install g++, or leave out --compile")
    return torch.compile(step, dynamic=False, options={"cpp_wrapper": True})


def fixed_rows(rows: int) -> int:
    """The size of a cache for compiled steps: few sizes, so that few calls compile anew."""
    return 2 ** math.ceil(math.log2(max(rows, 256)))


def draft_tree(drafter, plan: Plan, context: list[int], q_of: Callable | None, randomness: Randomness):
    """Step 1: -> token ids of all nodes [N + 1] (-1: q had no token left), and (ids, q) by node.

    A node's children are drawn from q = q_of(top logits); q_of None: they are the top of the logits, nothing is drawn.
    """
    grams = torch.tensor([[-1, -1, *context][-3:]], device=plan.depths.device)  # [M, 3], -1 before the beginning
    levels = [(level, mask(drafter.length)) for level, mask in plan.levels]
    if not plan.fixed or not levels:
        return grow(drafter, plan.tree.size, levels, grams, q_of, randomness)
    drafter.fix()
    if q_of is None:                                        # all depths are one compiled graph
        found = compiled(grow, grams.is_cuda)(drafter, plan.tree.size, levels, grams, None, None)
    else:                                                   # chance comes in between: one graph a depth
        found = grow(drafter, plan.tree.size, levels, grams, q_of, randomness,
                     partial(compiled(ChimeraState.step, grams.is_cuda), drafter))
    drafter.release()
    return found


def grow(drafter, size: int, levels: list, grams: torch.Tensor, q_of: Callable | None, randomness, step=None):
    """draft_tree's loop over the depths: levels holds each Level with its mask for this n, grams [1, 3] the root's."""
    tokens, drawn = grams[0, 2].repeat(size + 1), {}
    for depth, (level, mask) in enumerate(levels):
        logits = (step or drafter.step)(depth, grams, level.offsets, mask)              # [M, W]
        top, ids = best_of(logits, level.fan if q_of is None else DRAFT_TOP)    # [M, top]
        chosen = ids = ids if drafter.vocab_ids is None else drafter.vocab_ids[ids]
        if q_of is not None:
            q = q_of(top)
            drawn |= {node: (ids[row], q[row]) for row, node in enumerate(level.nodes)}
            picks = randomness.draw_distinct(q, level.fan)
            chosen = ids.gather(1, picks.clamp(min=0)).masked_fill(picks < 0, -1)
        if chosen.shape[1] < level.fan:                     # a tiny vocabulary
            chosen = F.pad(chosen, (0, level.fan - chosen.shape[1]), value=-1)
        children = chosen.flatten()[level.pick]
        tokens[level.first:level.first + len(children)] = children
        grams = torch.cat((grams[level.parent, 1:], children.clamp(min=0).unsqueeze(1)), 1)[level.grow]
    return tokens, drawn


def verify(model: Llama, cache: KVCache, plan: Plan, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Step 2: one target pass over root and nodes -> (hidden [N + 1, D], logits [N + 1, V]).

    tokens [N + 1]; a node without a token (-1) is fed any id. A node of depth d (plan.depths) stands at position n + d
    and sees what plan.mask(n) allows. The cache counts n rows before and after, though hidden_states moves its length:
    commit alone decides which of the new ones stay.
    """
    score = compiled(Llama.score, tokens.is_cuda) if plan.fixed else Llama.score
    cache.where = cache.length + plan.order if plan.fixed else None             # the rows that the new ones get
    # exercise 5
    n = cache.length
    try:
        return score(model, tokens.clamp(min=0)[None], cache, n + plan.depths, plan.mask(n))
    finally:
        cache.length, cache.where = n, None     # so what an interrupt leaves here does not count


def judge(children, tokens: list[int], logits: torch.Tensor, drawn: dict, p_of: Callable | None, randomness):
    """Step 3: -> (accepted nodes, the target's own token, p and q by visited node); p is formed for those only."""
    if p_of is None:
        value, best = (row.tolist() for row in logits.max(-1))
        if not all(map(math.isfinite, value)):
            raise ValueError(NON_FINITE)
        return *accept_greedy(children, tokens, best), {}, {}
    p, q = {}, {}
    if logits.is_cuda:                          # the walk asks for numbers one by one: fetch them all in one go
        logits, drawn = logits.cpu(), fetched(drawn)

    def p_at(node):
        p[node] = p_of(logits[node])
        return p[node]

    def q_at(node):
        if node in drawn:
            ids, values = drawn[node]
            q[node] = values.new_zeros(logits.shape[-1]).scatter(0, ids, values)        # the very numbers drawn from
        return q.get(node)

    return *accept(children, tokens, p_at, q_at, randomness), p, q


def fetched(drawn: dict) -> dict:
    """(ids, q) by node, brought to the CPU in two transfers."""
    columns = [torch.stack(parts).cpu() for parts in zip(*drawn.values())]
    return dict(zip(drawn, zip(*columns)))


def until_eos(ids: list[int], eos) -> list[int]:
    """ids up to and with the first that is in eos."""
    return ids[:next((i + 1 for i, token in enumerate(ids) if token in eos), len(ids))]


def commit(cache: Cache, tokens: list[int], hidden: torch.Tensor, path: list[int], bonus: int, eos,
           left: int) -> list[int]:
    """Step 4: keep the rows of root and path, drop the rest -> the new tokens, cut behind the first eos or at left."""
    new = until_eos([tokens[node] for node in path] + [bonus], eos)[:left]
    kept, n = [0, *path][:len(new)], len(cache.tokens) - 1
    cache.kv.keep(n, [n + node for node in kept])
    if cache.drafter is not None:
        cache.drafter.observe([cache.tokens[-1], *new[:-1]], hidden[kept])
    cache.tokens += new
    return new


def prefill(model: Llama, cache: Cache, prompt: list[int], p_of: Callable | None, randomness: Randomness) -> list[int]:
    """Runs the target over the prompt (and what an earlier call left without a row) -> its first token, as a list."""
    n = cache.kv.length
    feed = [*cache.tokens, *prompt][n:]
    hidden = model.hidden_states(torch.tensor([feed], device=model.embed.weight.device), cache.kv)[0]
    cache.kv.length = n
    _, first, _, _ = judge([[]], feed[-1:], model.lm_head(hidden[-1:]), {}, p_of, randomness)
    if cache.drafter is not None:
        cache.drafter.observe(feed, hidden)
    cache.kv.length = n + len(feed)             # only now prompt and rows count: an interrupt changes nothing
    cache.tokens += [*prompt, first]
    return [first]


class Watch:
    """Times the steps of a round; without a device it does nothing."""

    def __init__(self, device: torch.device | None):
        self.device, self.laps, self.last = device, [], time.perf_counter()

    def lap(self) -> None:
        if self.device is not None:
            if self.device.type == "cuda":                  # kernels are only queued until then
                torch.cuda.synchronize(self.device)
            now = time.perf_counter()
            self.laps, self.last = [*self.laps, now - self.last], now


@torch.inference_mode()
def _rounds(model, cache, call, prompt, plan_for, max_new_tokens, p_of, randomness, eos, on_round):
    """The decode loop."""
    cache.check(call)
    new, left = prefill(model, cache, prompt, p_of, randomness), max_new_tokens - 1
    yield new
    while left > 0 and new[-1] not in eos:
        cache.check(call)
        flips, plan = len(randomness.log), plan_for(left, len(cache.tokens))
        watch = Watch(on_round and plan.depths.device)
        ids, drawn = draft_tree(cache.drafter, plan, cache.tokens[-3:], p_of, randomness)                   # 1. draft
        watch.lap()
        hidden, logits = verify(model, cache.kv, plan, ids)                                                 # 2. verify
        watch.lap()
        tokens = ids.tolist()
        path, bonus, p, q = judge(plan.tree.children, tokens, logits, drawn, p_of, randomness)              # 3. accept
        watch.lap()
        new = commit(cache, tokens, hidden, path, bonus, eos, left)                                         # 4. commit
        watch.lap()
        left -= len(new)
        if on_round is not None:
            on_round(Round(plan.tree, tokens, q, p, randomness.log[flips:], path, new, logits, drawn, watch.laps))
        yield new


def default_tree(draft, temperature: float) -> str:
    if isinstance(draft, Llama):
        return "chain:4"
    chosen = draft.config.greedy_tree if is_greedy(temperature) else draft.config.sampled_tree
    return chosen or f"chain:{draft.config.depth}"


def generate(model: Llama, prompt: list[int], draft: Chimera | Llama | None = None, tree=None,
             max_new_tokens: int = 256, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
             eos_ids: Iterable[int] = (), generator: torch.Generator | Randomness | None = None,
             cache: Cache | None = None, on_round: Callable[[Round], None] | None = None,
             compile: bool = False) -> Iterator[list[int]]:
    """Yields, per target pass, the token ids that it committed; the first list is the prefill's one token.

    The continuation ends right after the first eos id, never exceeds max_new_tokens, and with the prompt never
    max_position_embeddings. tree: anything that Tree.parse reads; None is the draft's default for this temperature.
    cache: a Cache() passed again continues its text; prompt then holds only the new tokens. compile: torch.compile of
    the target's and the draft's steps, with fixed shapes: the first rounds take long. Raises ValueError, at the call,
    for arguments that do not fit; the first step of the iteration raises it for logits that are not finite.
    """
    prompt, cache, limit = list(prompt), Cache() if cache is None else cache, model.config.max_position_embeddings
    check_settings(max_new_tokens, temperature, top_k, top_p)
    check_draft(model, draft, tree, cache, compile)
    total = check_prompt(model, prompt, cache)
    tree = Tree([]) if draft is None else Tree.parse(default_tree(draft, temperature) if tree is None else tree)
    check_tree(draft, tree)
    cache.calls += 1
    if max_new_tokens == 0:
        cache.tokens += prompt                              # without rows yet: the next call feeds them
        return iter(())
    max_new_tokens = min(max_new_tokens, limit - total)
    rows = total + max_new_tokens + tree.size + 1
    cache.prepare(model, draft, fixed_rows(rows) if compile else rows)
    plans = memoize(lambda depth: Plan(tree.cut(depth), cache.kv.rows, model.embed.weight,
                                       fixed=compile and depth == tree.depth))
    reach = draft.config.max_position_embeddings if isinstance(draft, Llama) else limit

    def plan_for(left: int, used: int) -> Plan:
        """The tree cut so that accepted tokens and the target's own never exceed `left`, nor the draft its context.
        Compiled steps keep the whole tree as long as it fits the context: another tree would have to be compiled."""
        return plans(max(0, min(tree.depth, tree.depth if compile else left - 1, reach - used)))

    p_of = None if is_greedy(temperature) else partial(warp, temperature=temperature, top_k=top_k, top_p=top_p)
    randomness = generator if isinstance(generator, Randomness) else Generator(generator)
    eos = frozenset(eos_ids)
    return _rounds(model, cache, cache.calls, prompt, plan_for, max_new_tokens, p_of, randomness, eos, on_round)


# ---------------------------------------------------------------------------------------------------------------------
# What a caller can get wrong

def check_settings(max_new_tokens: int, temperature: float, top_k: int, top_p: float) -> None:
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be 0 or more, not {max_new_tokens}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 or more and finite, not {temperature}")
    if top_k < 0:
        raise ValueError(f"top_k must be 0 (off) or more, not {top_k}")
    if not 0 <= top_p <= 1:
        raise ValueError(f"top_p must lie between 0 and 1, not {top_p}")


def check_draft(model: Llama, draft, tree, cache: Cache, compile: bool) -> None:
    if draft is None and tree is not None:
        raise ValueError("a tree was given, but no draft to fill it")
    if isinstance(draft, Llama) and draft.config.vocab_size != model.config.vocab_size:
        raise ValueError(f"the draft has {draft.config.vocab_size} tokens, the target {model.config.vocab_size}; "
                         "a draft must share the target's vocabulary")
    if compile:
        compiled(Llama.score, model.embed.weight.is_cuda)   # raises where there is no compiler
    if compile and isinstance(draft, Llama):
        raise ValueError("compiled steps are made for Chimera drafts; leave out --compile with a LLaMA as the draft")
    if isinstance(draft, Chimera) and draft.frozen["model"] is not model:
        raise ValueError("the draft was built for another model object; build it with this one")
    if cache.owner is not None and (cache.owner[0] is not model or cache.owner[1] is not draft):
        raise ValueError("the cache belongs to another model or draft; start a new Cache()")


def check_prompt(model: Llama, prompt: list[int], cache: Cache) -> int:
    """-> tokens committed once the prompt is in."""
    V, limit, total = model.config.vocab_size, model.config.max_position_embeddings, len(cache.tokens) + len(prompt)
    if odd := [i for i in prompt if not 0 <= i < V]:
        raise ValueError(f"the prompt holds token id {odd[0]}, the model's vocabulary has {V}")
    if total == 0:
        raise ValueError("the prompt is empty: 0 tokens given, 1 needed")
    if total >= limit:
        raise ValueError(f"the prompt has {total} tokens and the model's context {limit}: no room to continue; "
                         "shorten the prompt")
    return total


def check_tree(draft, tree: Tree) -> None:
    if isinstance(draft, Chimera) and tree.depth > draft.config.depth:
        raise ValueError(f"the tree is {tree.depth} deep, the draft has {draft.config.depth} heads")
    if tree.max_rank >= DRAFT_TOP:
        raise ValueError(f"the tree has rank {tree.max_rank}, but candidates come from the best {DRAFT_TOP}, "
                         f"ranks 0 to {DRAFT_TOP - 1}")
