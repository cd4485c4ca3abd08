"""--compile: fixed shapes change no token. Most tests leave out the compiler, so that the shapes alone are tested."""
import shutil

import pytest
import torch
from helpers import near_copy, random_ids, tiny_draft, tiny_llama

import speculative
from speculative import Cache, generate
from tree import Plan, Tree

PROMPT = random_ids(9)
TREES = ["chain:3", "2,3,2", "[[0],[1],[2],[0,0],[2,0],[2,1],[2,1,0]]"]


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(speculative, "compiled", lambda step, cuda: step)


def text(model, draft=None, compile=False, prompt=PROMPT, seed=0, **settings) -> list[int]:
    settings = {"max_new_tokens": 40} | settings
    generator = torch.Generator().manual_seed(seed)
    return [i for ids in generate(model, prompt, draft, generator=generator, compile=compile, **settings) for i in ids]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [{}, {"draft_vocab": 15}, {"heads": "full"}], ids=["light", "vocab", "full"])
@pytest.mark.parametrize("tree", TREES)
def test_fixed_shapes_give_the_same_text(uncompiled, tree, shape, temperature):
    model = tiny_llama()
    draft = tiny_draft(model, **shape)
    for length in (1, 2, 9):
        settings = {"tree": tree, "temperature": temperature, "prompt": random_ids(length), "max_new_tokens": 39}
        eager, fixed = (text(model, draft, compile, **settings) for compile in (False, True))
        # The eager loop cuts its last trees short: above temperature 0 they draw other numbers.
        assert len(eager) == len(fixed) and (eager == fixed if temperature == 0 else eager[:36] == fixed[:36])
    assert text(model, None, True) == text(model)


def test_text_ends_at_eos_at_the_limit_and_at_the_context(uncompiled):
    model = tiny_llama(max_position_embeddings=64)
    draft, whole = tiny_draft(model), text(model, max_new_tokens=200)
    assert len(whole) == 55
    for count in (1, 2, 3, 20, 54, 55, 200):
        assert text(model, draft, True, max_new_tokens=count) == whole[:count]
    assert text(model, draft, True, eos_ids={whole[20]}) == whole[:whole.index(whole[20]) + 1]


def test_a_cache_goes_on_after_compiled_and_plain_calls(uncompiled):
    model = tiny_llama(max_position_embeddings=600)
    draft, prompt, more = tiny_draft(model), random_ids(9), random_ids(7, seed=3)
    cache, wanted = Cache(), Cache()
    for ids, count, compile in ((prompt, 11, True), (more, 12, False), (more, 300, True), (prompt, 5, True)):
        found = [i for part in generate(model, ids, draft, "2,3,2", count, cache=cache, compile=compile) for i in part]
        assert found == [i for part in generate(model, ids, None, None, count, cache=wanted) for i in part]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cache_goes_on_without_compiling_after_a_failed_draft(uncompiled, tree, temperature, monkeypatch):
    model, cache = tiny_llama(max_position_embeddings=600), Cache()
    draft, got = tiny_draft(model), []

    def failing(*args):
        raise MemoryError
    passes = generate(model, PROMPT, draft, tree, 30, temperature, cache=cache, compile=True)
    got += next(passes) + next(passes)
    monkeypatch.setattr(speculative.ChimeraState, "step", failing)
    with pytest.raises(MemoryError):
        next(passes)
    monkeypatch.undo()
    found = [i for ids in generate(model, [7], draft, tree, 260, cache=cache) for i in ids]
    assert found == text(model, prompt=[*PROMPT, *got, 7], max_new_tokens=260)


def test_masks_of_fixed_width_allow_what_the_others_allow():
    tree, like = Tree.parse("2,3,2"), torch.zeros(1)
    free, fixed = Plan(tree, 30, like), Plan(tree, 30, like, fixed=True)
    for n in (0, 1, 17, 22):
        pairs = [(free.mask(n), fixed.mask(n))] + [(a(n), b(n)) for (_, a), (_, b) in zip(free.levels, fixed.levels)]
        for narrow, wide in pairs:
            narrow = torch.zeros(len(wide), n + 1) if narrow is None else narrow
            assert wide.shape[1] == 30 and torch.equal(wide[:, :narrow.shape[1]], narrow)
            assert (wide[:, narrow.shape[1]:] == -torch.inf).all()


def test_a_llama_as_draft_is_not_compiled():
    model = tiny_llama()
    with pytest.raises(ValueError, match="leave out --compile"):
        generate(model, [1], near_copy(model), compile=True)


def test_without_a_compiler_the_message_names_the_way_out(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="install g\\+\\+, or leave out --compile"):
        speculative.compiled.__wrapped__(lambda: None, cuda=False)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_steps_give_the_same_text():
    model = tiny_llama(num_hidden_layers=1)
    draft = tiny_draft(model, depth=2)
    assert text(model, draft, True, tree="2,2") == text(model) == text(model, None, True)
