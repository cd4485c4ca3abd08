"""The Chimera draft: training and decoding compute the same, the parts are the paper's, files are checked."""
import copy
import json

import pytest
import torch
from helpers import edit_config, random_ids, tiny_draft, tiny_llama

from draft import Chimera, ChimeraConfig, ChimeraState, attend_diagonal, trigrams_of
from speculative import Cache, draft_tree, generate
from tree import Plan, Tree

MODEL = tiny_llama()
FORMS = [{}, {"heads": "full"}, {"draft_vocab": 11}, {"heads": "full", "draft_vocab": 11}]


def forward_logits(draft: Chimera, ids: list[int], k: int) -> torch.Tensor:
    """What step k of the training forward predicts behind `ids`, whatever follows in the text."""
    tokens = torch.tensor([ids + [0] * draft.config.depth])
    states = draft(tokens, MODEL.hidden_states(tokens))
    return draft.head_logits(k - 1, states[k - 1][0, len(ids) - 1 - k])


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_every_branch_of_a_tree_gets_the_logits_of_the_training_forward(form, n, monkeypatch):
    draft, ids = tiny_draft(MODEL, **{"depth": 4} | form), random_ids(n + 1)
    state, seen = ChimeraState(draft, 64), []
    state.observe(ids[:n], MODEL.hidden_states(torch.tensor([ids[:n]]))[0])
    step = state.step
    monkeypatch.setattr(state, "step", lambda *args: seen.append(step(*args)) or seen[-1])
    plan = Plan(Tree.parse("3,4,4,3"), 64, MODEL.embed.weight)
    tokens, _ = draft_tree(state, plan, ids[-3:], None, None)
    paths = {}
    for node, parent in enumerate(plan.tree.parent):
        paths[node] = ids if node == 0 else [*paths[parent], int(tokens[node])]
    for depth, (level, *_) in enumerate(plan.levels):
        assert len(level.nodes) > 1 or depth == 0
        for row, node in enumerate(level.nodes):
            wanted = forward_logits(draft, paths[node], depth + 1)
            assert torch.allclose(seen[depth][row], wanted, atol=1e-4), (depth, node)


def test_the_draft_state_after_many_rounds_is_that_of_a_fresh_one():
    draft, cache = tiny_draft(MODEL, depth=4), Cache()
    for _ in generate(MODEL, [7], draft, "2,3,2", 30, 1.0, generator=torch.Generator().manual_seed(0), cache=cache):
        fresh, mine = ChimeraState(draft, 64), copy.deepcopy(cache.drafter)
        mine.draft = draft
        fresh.observe([], MODEL.hidden_states(torch.tensor([cache.tokens[:-1]]))[0])
        trigram = trigrams_of(torch.tensor([cache.tokens]))[0, -1:]
        a, b = (state.step(0, trigram, None, None) for state in (mine, fresh))
        assert torch.allclose(a, b, atol=1e-4) and mine.cache.length == fresh.cache.length == len(cache.tokens) - 1
        assert torch.allclose(*(state.cache.kv[0][..., :mine.length, :] for state in (mine, fresh)), atol=1e-5)


def test_trigram_tables_give_the_encoder_s_numbers(monkeypatch):
    draft, trigrams = tiny_draft(MODEL), torch.tensor([[-1, -1, 3], [-1, 0, 39], [39, 0, 7]])
    slow = draft.encode(trigrams)
    draft.tabulate()
    assert torch.allclose(draft.lookup(trigrams), slow, atol=1e-5) and draft.table.shape == (3 * 41, 32)
    monkeypatch.setattr("draft.MOST_TABULATED", 100)
    large = tiny_draft(MODEL)
    large.tabulate()
    assert large.table is None


def test_missing_neighbours_are_zero_vectors():
    draft = tiny_draft(MODEL)
    assert trigrams_of(torch.tensor([[5, 6, 7]])).tolist() == [[[-1, -1, 5], [-1, 5, 6], [5, 6, 7]]]
    e = MODEL.embed(torch.tensor([5, 6]))
    zero = torch.zeros_like(e[0])
    for trigram, parts in (([-1, -1, 5], (zero, zero, e[0])), ([-1, 5, 6], (zero, e[0], e[1]))):
        inner = torch.nn.functional.silu(draft.trigram_in(torch.cat(parts)))
        assert torch.allclose(draft.encode(torch.tensor(trigram)), draft.trigram_out(inner), atol=1e-6)


def test_diagonal_attention_is_plain_attention_over_what_each_row_may_see():
    B, H, G, L, E = 2, 4, 2, 5, 8
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, heads, L, E, generator=g) for heads in (H, G, G))
    own = [(torch.randn(B, G, L, E, generator=g), torch.randn(B, G, L, E, generator=g)) for _ in range(3)]
    out = attend_diagonal(q, k, v, own)
    for i in range(L):
        keys, values = (torch.cat([far[:, :, :i + 1], *(pair[part][:, :, i:i + 1] for pair in own)], 2)
                        for part, far in enumerate((k, v)))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, i:i + 1], keys.repeat_interleave(H // G, 1), values.repeat_interleave(H // G, 1))
        assert torch.allclose(out[:, :, i:i + 1], wanted, atol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_fresh_head_gives_the_targets_logits_when_hhat_is_h(form):
    ids = torch.arange(0, 22, 2) if "draft_vocab" in form else None
    draft = Chimera(ChimeraConfig(**form), MODEL, ids)
    h = torch.randn(3, MODEL.config.hidden_size, generator=torch.Generator().manual_seed(0))
    wanted = MODEL.lm_head(h) if ids is None else MODEL.lm_head(h)[:, ids]
    assert torch.allclose(draft.head_logits(2, draft.head_input(2, h, h)), wanted, atol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_saved_draft_comes_back_and_holds_nothing_of_the_target(form, tmp_path):
    draft = tiny_draft(MODEL, depth=2, **form)
    draft.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "chimera"
    again = Chimera.from_pretrained(tmp_path, MODEL)
    assert again.config == draft.config and not any(p.requires_grad for p in again.parameters())
    for (name, a), (_, b) in zip(draft.state_dict().items(), again.state_dict().items()):
        assert torch.equal(a, b), name
    assert not any(name.startswith(("frozen", "embed", "lm_head", "layers")) for name in draft.state_dict())


def test_a_draft_follows_its_targets_dtype(tmp_path):
    tiny_draft(MODEL).save_pretrained(tmp_path, torch.bfloat16)
    half = tiny_llama().to(torch.bfloat16)
    assert {p.dtype for p in Chimera.from_pretrained(tmp_path, half).parameters()} == {torch.bfloat16}


def test_a_draft_for_other_shapes_is_refused_with_both_numbers(tmp_path):
    tiny_draft(MODEL).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="vocab_size 40, this one has 41"):
        Chimera.from_pretrained(tmp_path, tiny_llama(vocab_size=41))
    with pytest.raises(ValueError, match="hidden_size 32, this one has 64"):
        Chimera.from_pretrained(tmp_path, tiny_llama(hidden_size=64))


def test_a_draft_for_other_weights_is_a_warning(tmp_path, capsys):
    tiny_draft(MODEL).save_pretrained(tmp_path)
    Chimera.from_pretrained(tmp_path, tiny_llama())
    Chimera.from_pretrained(tmp_path, tiny_llama().to(torch.bfloat16))
    assert capsys.readouterr().err == ""
    Chimera.from_pretrained(tmp_path, tiny_llama(seed=1))
    assert "other weights" in capsys.readouterr().err


def test_odd_draft_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        Chimera.from_pretrained(tmp_path, MODEL)
    tiny_draft(MODEL).save_pretrained(tmp_path)
    edit_config(tmp_path, depth=2)
    with pytest.raises(ValueError, match="differ"):
        Chimera.from_pretrained(tmp_path, MODEL)
    edit_config(tmp_path, model_type="llama")
    with pytest.raises(ValueError, match="no Chimera draft"):
        Chimera.from_pretrained(tmp_path, MODEL)


@pytest.mark.parametrize("config", [{"depth": 0}, {"heads": "heavy"}, {"draft_vocab": 3}])
def test_a_config_that_makes_no_draft_is_refused(config):
    with pytest.raises(ValueError):
        Chimera(ChimeraConfig(**config), MODEL)
