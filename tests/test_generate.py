"""The decode loop: lossless end to end, equal to plain decoding when greedy, and right at every limit."""
import itertools
import math
from functools import partial

import pytest
import torch
from exact import assert_same, distribution
from helpers import near_copy, random_ids, tiny_llama

import speculative
from draft import Chimera, ChimeraConfig
from model import Llama
from speculative import Cache, generate, warp

MODEL = tiny_llama()
SPECS = ["chain:1", "chain:2", "chain:3", "chain:4", "chain:5", "4", "2,3,2", "4,8,8,3,2",
         "[[0],[1],[2],[0,0],[0,0,0],[0,0,1]]"]


def noisy(model: Llama, noise: float, seed: int = 0, **config) -> Chimera:
    """A draft that agrees with the target more or less, depending on the noise in its weights."""
    ids = torch.arange(0, model.config.vocab_size, 2) if config.pop("half_vocabulary", False) else None
    draft = Chimera(ChimeraConfig(**{"depth": 5, "draft_vocab": 0 if ids is None else len(ids)} | config), model, ids)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=g)
    return draft


def hostile(model: Llama) -> Llama:
    """A second LLaMA whose favourite is what the target likes least: never accepted when greedy."""
    wrong = Llama(model.config)
    wrong.load_state_dict(model.state_dict())
    wrong.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight, requires_grad=False)
    return wrong


DRAFTS = {"untrained": Chimera(ChimeraConfig(depth=5), MODEL), "noisy": noisy(MODEL, 0.1),
          "full heads": noisy(MODEL, 0.05, heads="full"), "half vocabulary": noisy(MODEL, 0.05, half_vocabulary=True),
          "perfect": MODEL, "hostile": hostile(MODEL), "smaller": tiny_llama(num_hidden_layers=1)}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text(*args, **kwargs) -> list[int]:
    return [i for ids in generate(*args, **kwargs) for i in ids]


def prompts(count: int) -> list[list[int]]:
    g = seeded(7)
    return [torch.randint(MODEL.config.vocab_size, (1 + n % 9,), generator=g).tolist() for n in range(count)]


# -- greedy: token for token -------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [text(MODEL, prompt, max_new_tokens=24) for prompt in prompts(42)]


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_with_a_draft_equals_greedy_without(name, plain):
    for n, (prompt, wanted) in enumerate(zip(prompts(42), plain, strict=True)):
        assert text(MODEL, prompt, DRAFTS[name], SPECS[n % len(SPECS)], 24) == wanted


@pytest.mark.parametrize("spec", SPECS)
def test_every_tree_gives_the_plain_text(spec, plain):
    for prompt, wanted in list(zip(prompts(42), plain, strict=True))[:6]:
        assert text(MODEL, prompt, DRAFTS["noisy"], spec, 24) == wanted


def test_a_perfect_draft_is_always_accepted_and_a_hostile_one_never():
    passes = list(generate(MODEL, [5], MODEL, "chain:4", 41))
    assert [len(p) for p in passes] == [1] + [5] * 8                    # also after full acceptance, for 8 rounds
    assert all(len(p) == 1 for p in generate(MODEL, [5], DRAFTS["hostile"], "chain:4", 30))


def test_plain_decoding_is_the_argmax_of_the_full_forward():
    ids = [3, 1, 4]
    for _ in range(20):
        ids.append(int(MODEL(torch.tensor([ids]))[0, -1].argmax()))
    assert text(MODEL, [3, 1, 4], max_new_tokens=20) == ids[3:]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", [DRAFTS["noisy"], near_copy(MODEL)], ids=["chimera", "near copy"])
def test_after_every_round_the_cache_is_that_of_a_fresh_prefill(draft, temperature):
    cache, seen = Cache(), set()
    for ids in generate(MODEL, [10], draft, "2,3,2", 60, temperature, generator=seeded(0), cache=cache):
        seen.add(len(ids))
        n = cache.kv.length
        assert n == len(cache.tokens) - 1 == cache.drafter.length
        fresh = MODEL.new_cache(n)
        hidden = MODEL.hidden_states(torch.tensor([cache.tokens[:-1]]), fresh)[0]
        assert all(torch.allclose(a[..., :n, :], b[..., :n, :], atol=1e-4) for a, b in zip(cache.kv.kv, fresh.kv))
        if isinstance(draft, Chimera):
            assert torch.allclose(cache.drafter.newest[0], hidden[-1], atol=1e-4)   # the state of the ACCEPTED path
    assert isinstance(draft, Chimera) or seen == {1, 2, 3, 4}           # rounds with none, some and all accepted


# -- above temperature 0: every outcome of the whole loop --------------------------------------------------------------

def exact(model: Llama, prompt: list[int], length: int, eos: set, p_of) -> dict[tuple, float]:
    """Text -> probability under the target alone."""
    total = {}
    for full in itertools.product(range(model.config.vocab_size), repeat=length):
        stop = next((i + 1 for i, t in enumerate(full) if t in eos), length)
        if full[stop:] != (0,) * (length - stop):
            continue
        p = p_of(model(torch.tensor([[*prompt, *full[:stop]]]))[0, len(prompt) - 1:-1])
        total[full[:stop]] = math.prod(float(p[i, t]) for i, t in enumerate(full[:stop]))
    return total


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "num_attention_heads": 2,
         "num_key_value_heads": 1}
CASES = {
    "chain": (3, "chain:2", {}, {}, set()), "two children": (3, "2", {}, {}, set()),
    "tree": (2, "[[0],[1],[0,0],[1,0]]", {}, {}, set()), "deep": (2, "chain:3", {}, {}, set()),
    "top-k": (4, "2,1", {"top_k": 2}, {}, set()), "top-p": (3, "2,2", {"top_p": 0.7}, {}, set()),
    "cold": (3, "2,1", {"temperature": 0.4}, {}, set()),
    "draft vocabulary": (4, "2,1", {}, {"half_vocabulary": True}, set()),
    "eos": (3, "2,1", {}, {}, {1}), "full heads": (3, "2,1", {}, {"heads": "full"}, set()),
    "small llama": (3, "2,1", {}, None, set()), "perfect": (3, "2,1", {}, "self", set()),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_all_outcomes_of_the_loop_together_are_the_targets_distribution(case):
    V, spec, warping, config, eos = case
    warping = {"temperature": 1.0} | warping
    model = tiny_llama(vocab_size=V, **SMALL)
    if config == "self":
        draft = model
    else:
        draft = tiny_llama(vocab_size=V, **SMALL, seed=5) if config is None else noisy(model, 0.3, **config)
    length = 4 if V == 2 else 3
    found = distribution(lambda r: tuple(text(model, [1], draft, spec, length, eos_ids=eos, generator=r, **warping)))
    assert_same(found, exact(model, [1], length, eos, partial(warp, **warping)), 1e-5)


def test_whole_generations_pass_a_chi_square_test_with_paths_of_depth_3():
    V, length, runs = 3, 5, 1500
    model = tiny_llama(vocab_size=V, **SMALL)
    draft, g, counts, longest = noisy(model, 0.2, depth=3), seeded(3), {}, 0
    for _ in range(runs):
        passes = list(generate(model, [2], draft, "2,2,1", length, 1.0, generator=g))
        longest = max(longest, *map(len, passes))
        key = tuple(i for ids in passes for i in ids)
        counts[key] = counts.get(key, 0) + 1
    wanted = {k: w * runs for k, w in exact(model, [2], length, set(), partial(warp, temperature=1.0)).items()}
    rare = [k for k, w in wanted.items() if w < 5]
    cells = [(counts.get(k, 0), w) for k, w in wanted.items() if w >= 5]
    cells.append((sum(counts.get(k, 0) for k in rare), sum(wanted[k] for k in rare)))
    chi2, freedom = sum((o - w) ** 2 / w for o, w in cells if w > 0), len(cells) - 1
    assert longest == 4                                                 # three accepted and the target's own
    assert chi2 < freedom + 3.1 * math.sqrt(2 * freedom) + 5            # about p = 0.001


@pytest.mark.parametrize("draft", [None, DRAFTS["noisy"]], ids=["plain", "draft"])
def test_the_first_token_obeys_the_temperature_and_the_seed_decides(draft):
    def first(seed):
        return text(MODEL, [5], draft, None, 6, 1.0, generator=seeded(seed))
    assert len({first(seed)[0] for seed in range(30)}) > 1
    assert first(7) == first(7) and len({tuple(first(seed)) for seed in range(5)}) > 1


def test_a_draft_at_low_temperature_keeps_the_warped_distribution():
    model, runs = tiny_llama(vocab_size=6), 3000
    draft, g = noisy(model, 0.1), torch.Generator().manual_seed(0)
    counts = torch.zeros(6)
    for _ in range(runs):
        counts[text(model, [3], draft, "2,2", 2, 0.3, generator=g)[1]] += 1
    first = warp(model(torch.tensor([[3]]))[0, -1], 0.3)
    second = torch.stack([warp(model(torch.tensor([[3, t]]))[0, -1], 0.3) for t in range(6)])
    assert (counts / runs - first @ second).abs().max() < 0.03


# -- stopping and limits -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["noisy", "perfect", "hostile"])
@pytest.mark.parametrize("at", range(1, 12))
def test_text_ends_right_behind_the_first_eos(name, at):
    wanted = text(MODEL, [9], max_new_tokens=20)
    eos, stop = wanted[at], wanted.index(wanted[at]) + 1
    cache = Cache()
    assert text(MODEL, [9], DRAFTS[name], "chain:5", 20, eos_ids=[eos], cache=cache) == wanted[:stop]
    assert cache.tokens == [9, *wanted[:stop]] and cache.kv.length == stop          # nothing behind it is cached


@pytest.mark.parametrize("count", [0, 1, 2, 5, 6, 7])
def test_never_more_than_max_new_tokens(count):
    for draft in (None, MODEL, DRAFTS["noisy"]):
        assert len(text(MODEL, [1, 2], draft, None, count)) == count


@pytest.mark.parametrize("left", [1, 2, 3, 4, 6])
def test_the_last_tokens_before_the_context_limit_equal_plain_decoding(left):
    prompt = random_ids(MODEL.config.max_position_embeddings - left)
    wanted = text(MODEL, prompt, max_new_tokens=99)
    assert len(wanted) == left
    for name in ("noisy", "perfect", "hostile"):
        assert text(MODEL, prompt, DRAFTS[name], "2,3,2", 99) == wanted


def test_a_draft_with_a_shorter_context_stops_drafting():
    short = tiny_llama(num_hidden_layers=1, max_position_embeddings=16)
    assert text(MODEL, [4], short, "chain:3", 40) == text(MODEL, [4], max_new_tokens=40)
    assert text(MODEL, list(range(20)), short, "chain:3", 9) == text(MODEL, list(range(20)), max_new_tokens=9)


@pytest.mark.parametrize("name", [None, "noisy", "perfect"])
def test_a_cache_continues_the_text_with_only_the_new_tokens(name):
    draft, cache = DRAFTS.get(name), Cache()
    one = text(MODEL, [5, 6], draft, max_new_tokens=7, cache=cache)
    two = text(MODEL, [8, 9], draft, max_new_tokens=9, cache=cache)
    assert two == text(MODEL, [5, 6, *one, 8, 9], max_new_tokens=9)
    with pytest.raises(ValueError, match="another model or draft"):
        generate(MODEL, [1], DRAFTS["hostile"], cache=cache)


def test_a_consumer_that_stops_early_leaves_a_usable_cache():
    cache = Cache()
    passes = generate(MODEL, [5], DRAFTS["noisy"], max_new_tokens=30, cache=cache)
    got = next(passes) + next(passes) + next(passes)
    passes.close()
    more = text(MODEL, [7], DRAFTS["noisy"], max_new_tokens=5, cache=cache)
    assert more == text(MODEL, [5, *got, 7], max_new_tokens=5)


@pytest.mark.parametrize("part", ["lm_head", "norm"])
@pytest.mark.parametrize("call", range(1, 6))
def test_an_interrupt_inside_a_pass_leaves_a_usable_cache(part, call, monkeypatch):
    """What a GPU that runs out of memory does, too: the last parts of a pass fail."""
    layer, calls, cache, got = getattr(MODEL, part), [], Cache(), []

    def interrupted(x):
        calls.append(0)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(x)

    real = layer.forward
    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            for ids in generate(MODEL, [5, 6], DRAFTS["noisy"], max_new_tokens=30, cache=cache):
                got += ids
    start = [5, 6, *got] if got else []
    assert cache.tokens == start and len(calls) == call
    more = text(MODEL, [7], DRAFTS["noisy"], max_new_tokens=8, cache=cache)
    assert more == text(MODEL, [*start, 7], max_new_tokens=8)


def test_of_two_calls_on_one_cache_only_the_newest_begins():
    cache = Cache()
    first, second = (generate(MODEL, [token], max_new_tokens=30, cache=cache) for token in (5, 6))
    with pytest.raises(ValueError, match="another call has gone on with this cache"):
        next(first)
    assert cache.tokens == [] and sum(second, []) == text(MODEL, [6], max_new_tokens=30)


def test_two_calls_cannot_take_turns_on_one_cache():
    cache = Cache()
    first = generate(MODEL, [5], max_new_tokens=30, cache=cache)
    next(first)
    next(generate(MODEL, [6], max_new_tokens=30, cache=cache))
    with pytest.raises(ValueError, match="another call has gone on with this cache"):
        next(first)


@pytest.mark.parametrize("name", ["verify", "judge"])
@pytest.mark.parametrize("call", [0, 1, 3])
def test_an_interrupt_leaves_a_usable_cache(name, call, monkeypatch):
    real, calls, cache, got = getattr(speculative, name), [], Cache(), []

    def interrupted(*args):
        calls.append(0)
        result = real(*args)
        if len(calls) == call + 1:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(speculative, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            for ids in generate(MODEL, iter([5, 6]), DRAFTS["noisy"], max_new_tokens=30, cache=cache):
                got += ids
    start = [5, 6, *got] if got else []                     # nothing committed: the prompt may be given again
    assert cache.tokens == start
    more = text(MODEL, [7], DRAFTS["noisy"], max_new_tokens=8, cache=cache)
    assert more == text(MODEL, [*start, 7], max_new_tokens=8)


@pytest.mark.parametrize("kwargs, words", [
    ({"prompt": []}, "0 tokens"), ({"prompt": [40]}, "token id 40, the model's vocabulary has 40"),
    ({"prompt": [-1]}, "token id -1"), ({"prompt": [1] * 128}, "128 tokens and the model's context 128"),
    ({"temperature": -1.0}, "temperature"), ({"temperature": float("nan")}, "temperature"), ({"top_k": -1}, "top_k"),
    ({"top_p": 1.5}, "top_p"), ({"max_new_tokens": -1}, "max_new_tokens"), ({"tree": "chain:2"}, "no draft"),
    ({"draft": DRAFTS["noisy"], "tree": "chain:6"}, "6 deep, the draft has 5"),
    ({"draft": DRAFTS["noisy"], "tree": [[r] for r in range(65)]}, "rank 64"),
    ({"draft": DRAFTS["noisy"], "tree": [[0], [2]]}, "without a gap"),
    ({"draft": DRAFTS["noisy"], "tree": [[0, 0]]}, "needs path"),
    *(({"draft": DRAFTS["noisy"], "tree": odd}, "not understood") for odd in ("bush", [], "chain:0", "0,2", [[]], 3)),
    ({"draft": tiny_llama(vocab_size=39)}, "39 tokens, the target 40"),
    ({"draft": noisy(tiny_llama(), 0.1)}, "another model object")])
def test_wrong_arguments_are_refused_at_the_call(kwargs, words):
    with pytest.raises(ValueError, match=words):
        generate(MODEL, **{"prompt": [1]} | kwargs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_stop_with_advice(temperature):
    broken = tiny_llama()
    broken.lm_head.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        text(broken, [1], temperature=temperature)


def test_a_draft_whose_numbers_are_not_finite_is_no_licence_to_accept():
    broken = noisy(MODEL, 0.1)
    broken.norm.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        text(MODEL, [1], broken, temperature=1.0, generator=seeded(0))


# -- what a round reports ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_on_round_sees_what_was_committed(temperature):
    rounds = []
    passes = list(generate(MODEL, [5], DRAFTS["noisy"], "2,3,2", 30, temperature, generator=seeded(1),
                           on_round=rounds.append))
    assert [r.committed for r in rounds] == passes[1:]
    for r in rounds:
        assert [r.tokens[node] for node in r.path] == r.committed[:len(r.path)]
        assert all(0 <= u < 1 for _, u in r.flips) and (temperature == 0 or set(r.p) == {0, *r.path})


def test_half_precision_parts_from_float32_only_at_near_ties():
    half = tiny_llama().to(torch.bfloat16)
    plain = text(half, [5], max_new_tokens=60)
    fast = text(half, [5], noisy(half, 0.05), "2,3,2", 60)
    at = next((i for i, (a, b) in enumerate(zip(plain, fast, strict=True)) if a != b), None)
    if at is not None:
        best = half(torch.tensor([[5, *plain[:at]]]))[0, -1].float().topk(2).values
        assert best[0] - best[1] < 0.03 * best[0].abs()
