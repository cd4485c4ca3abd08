"""The edges of every setting: lengths, contexts, temperatures, filters, and a process that is stopped half way."""
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exact import assert_same, distribution
from helpers import edit_config, near_copy, random_ids, save_checkpoint, tiny_draft, tiny_llama
from test_cli import PROMPT, check_refused, cli, drafts  # noqa: F401  (cli and drafts are fixtures)

import sample
from model import Tokenizer
from speculative import Cache, Generator, generate, warp

SCRIPT = Path(__file__).parent.parent / "sample.py"
MODEL = tiny_llama()
LIMIT = MODEL.config.max_position_embeddings
DRAFTS = {"none": None, "chimera": tiny_draft(MODEL, depth=4), "near copy": near_copy(MODEL), "itself": MODEL}
K = 4
TREES = {"chain:4": 4, "2,3,2,1": 4}


def text(*args, **kwargs) -> list[int]:
    return [i for ids in generate(*args, **kwargs) for i in ids]


# -- lengths -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("count", [0, 1, 2, K, K + 1, K + 2, 2 * K + 3])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", [name for name in DRAFTS if name != "none"])
def test_nothing_is_drafted_that_could_not_be_kept(name, tree, count):
    """With `left` tokens to write at most left - 1 drafted ones fit: the last is the target's own."""
    rounds, lengths = [], []
    for ids in generate(MODEL, [3, 5], DRAFTS[name], tree, count, on_round=rounds.append):
        lengths.append(len(ids))
    assert sum(lengths) == count and len(rounds) == max(0, len(lengths) - 1)
    for number, seen in enumerate(rounds):
        assert seen.tree.depth == min(K, count - sum(lengths[:number + 1]) - 1)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", DRAFTS)
def test_prompts_shorter_than_a_trigram(name, size):
    for seed in range(4):
        prompt = random_ids(size, seed=seed)
        assert text(MODEL, prompt, DRAFTS[name], max_new_tokens=12) == text(MODEL, prompt, max_new_tokens=12)


@pytest.mark.parametrize("name", DRAFTS)
def test_an_empty_prompt_is_refused(name):
    with pytest.raises(ValueError, match="the prompt is empty: 0 tokens given, 1 needed"):
        generate(MODEL, [], DRAFTS[name])


@pytest.mark.parametrize("name", DRAFTS)
def test_tokens_behind_the_end_are_neither_kept_nor_counted(name):
    """The third token of a round is the end of text: that pass counts three."""
    prompt = next([i] for i in range(40) if len(set(text(MODEL, [i], max_new_tokens=4))) == 4)
    wanted = text(MODEL, prompt, max_new_tokens=4)
    result = sample.Result(list(generate(MODEL, prompt, DRAFTS[name], max_new_tokens=30, eos_ids=[wanted[3]])))
    assert result.ids == wanted
    assert name != "itself" or (list(map(len, result.passes)) == [1, 3] and result.tau == 3)


# -- the context -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("room", [1, 2, 3, K, K + 1, K + 2])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", [name for name in DRAFTS if name != "none"])
def test_the_tree_shrinks_before_the_context_is_full(name, tree, room):
    prompt, rounds, cache = random_ids(LIMIT - room), [], Cache()
    found = text(MODEL, prompt, DRAFTS[name], tree, 99, on_round=rounds.append, cache=cache)
    assert found == text(MODEL, prompt, max_new_tokens=99) and len(found) == room
    used = LIMIT - room + 1
    for seen in rounds:                                     # root, drafted tokens and the target's own all fit
        assert used + seen.tree.depth + 1 <= LIMIT
        used += len(seen.committed)
    assert used == len(cache.tokens) == LIMIT
    with pytest.raises(ValueError, match=f"{LIMIT + 1} tokens and the model's context {LIMIT}: no room"):
        generate(MODEL, [1], DRAFTS[name], cache=cache)


@pytest.mark.parametrize("draft", [None, "llama"])
def test_a_context_that_is_exactly_full_is_said(cli, drafts, toy_checkpoint, draft):  # noqa: F811
    size = len(Tokenizer.from_pretrained(toy_checkpoint).encode(PROMPT))
    options = ["--draft", drafts[draft], "--compare"] if draft else []
    edit_config(toy_checkpoint, max_position_embeddings=size + 1)
    done = cli(*options)
    assert done.code == 0 and ": 1 tokens" in done.err and "stopped: the context is full" in done.err
    done = cli("--max_new_tokens", 1, *options)
    assert done.code == 0 and "stopped: max_new_tokens" in done.err
    edit_config(toy_checkpoint, max_position_embeddings=size)
    check_refused(cli(*options), f"the prompt has {size} tokens and the model's context {size}: no room to continue")


def test_the_cache_holds_key_value_heads_only():
    model, cache = tiny_llama(num_attention_heads=4, num_key_value_heads=2, head_dim=8), Cache()
    text(model, [1], max_new_tokens=2, cache=cache)
    assert cache.kv.kv[0].shape[-3] == 2 and cache.kv.kv[0].shape[-1] == 8


@pytest.mark.parametrize("name", ["itself", "near copy"])
def test_the_second_llamas_cache_is_that_of_a_fresh_prefill(name):
    """After every round, whether none, some or all of what it drafted was accepted."""
    draft, cache, seen = DRAFTS[name], Cache(), set()
    for ids in generate(MODEL, [10], draft, "chain:4", 61, cache=cache):
        seen.add(len(ids))
        state, n = cache.drafter, cache.drafter.length - len(cache.drafter.waiting)
        assert state.cache.length == n and state.waiting == cache.tokens[n:-1]
        fresh = draft.new_cache(n + 1)
        draft.hidden_states(torch.tensor([cache.tokens[:n + 1]]), fresh)
        assert all(torch.allclose(a[..., :n, :], b[..., :n, :], atol=1e-4) for a, b in zip(state.cache.kv, fresh.kv))
    assert seen == {1, 5} if name == "itself" else seen >= {1, 2, 3}, seen


# -- temperature, top_k, top_p -----------------------------------------------------------------------------------------

GREEDY = [{"temperature": 0.0}, {"temperature": 1e-40}, {"temperature": 1e-6}, {"temperature": 1.0, "top_k": 1},
          {"temperature": 1e30, "top_k": 1}, {"temperature": 1.0, "top_p": 0.0}, {"temperature": 2.0, "top_p": 1e-9}]


@pytest.mark.parametrize("settings", GREEDY, ids=str)
@pytest.mark.parametrize("name", DRAFTS)
def test_settings_that_leave_one_token_are_greedy(name, settings):
    assert text(MODEL, [5], DRAFTS[name], None, 40, **settings) == text(MODEL, [5], max_new_tokens=40)


@pytest.mark.parametrize("settings", [{"top_k": 0}, {"top_k": 40}, {"top_k": 10**9}, {"top_p": 1.0}], ids=str)
@pytest.mark.parametrize("name", DRAFTS)
def test_settings_that_leave_every_token_change_nothing(name, settings):
    def run(**more):
        return text(MODEL, [5], DRAFTS[name], None, 40, 1.0, generator=torch.Generator().manual_seed(3), **more)
    assert run(**settings) == run()


SMALL = {"vocab_size": 4, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "num_attention_heads": 2,
         "num_key_value_heads": 1}


@pytest.mark.parametrize("name", ["none", "chimera", "near copy"])
@pytest.mark.parametrize("settings", [{"temperature": 1e30}, {"temperature": 1e-4}, {"temperature": 1e30, "top_k": 3},
                                      {"temperature": 0.7, "top_k": 2, "top_p": 0.999}], ids=str)
def test_extreme_settings_keep_the_distribution(name, settings):
    """All outcomes of two tokens; at 1e30 every token is equally likely."""
    model = tiny_llama(**SMALL)
    draft = {"none": None, "chimera": tiny_draft(model), "near copy": near_copy(model, 0.3)}[name]
    found = distribution(lambda r: tuple(text(model, [1], draft, "2" if draft else None, 2, generator=r, **settings)))
    p = warp(model(torch.tensor([[1, i] for i in range(4)])), **settings)       # [4, 2, V]
    assert_same(found, {(i, j): float(p[0, 0, i] * p[i, 1, j]) for i in range(4) for j in range(4)}, 1e-5)
    if settings == {"temperature": 1e30}:
        assert all(chance == pytest.approx(1 / 16, abs=1e-5) for chance in found.values())


class Noted(Generator):
    """Remembers every q that candidates were drawn from."""

    def draw_distinct(self, probs, count):
        self.drawn = [*getattr(self, "drawn", []), *probs.clone()]
        return super().draw_distinct(probs, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_candidates_are_judged_by_the_numbers_they_were_drawn_from(dtype):
    """The same float32 vector, bit for bit, also where the draft's logits are bfloat16 and top_k cuts them."""
    model, randomness, judged = tiny_llama().to(dtype), Noted(torch.Generator().manual_seed(0)), []
    draft = tiny_draft(model)
    for _ in generate(model, [5], draft, "2,2,1", 30, 0.7, 5, 0.95, generator=randomness,
                      on_round=lambda seen: judged.extend(seen.q.values())):
        pass
    rows = {tuple(sorted(row[row > 0].tolist())) for row in randomness.drawn}
    assert len(judged) > 10 and all(q.dtype == torch.float32 for q in judged)
    assert all(tuple(sorted(q[q > 0].tolist())) in rows for q in judged)


# -- the process -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("draft", [False, True])
def test_ctrl_c_keeps_the_text_so_far(toy_checkpoint, draft):
    """Exit code 130, no traceback, and what was printed is the beginning of the whole text."""
    edit_config(toy_checkpoint, max_position_embeddings=60_000)
    words = [sys.executable, SCRIPT, "--ckpt", toy_checkpoint, "--prompt", PROMPT, "--dtype", "float32"]
    words = [str(word) for word in words + ["--draft", toy_checkpoint] * draft]
    process = subprocess.Popen([*words, "--max_new_tokens", "50000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    begun = process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate()
    whole = subprocess.run([*words, "--max_new_tokens", "60"], capture_output=True).stdout.rstrip(b"\n")
    size = min(len(begun + rest), len(whole))
    assert process.returncode == 130 and b"Traceback" not in err and size >= 5
    assert (begun + rest)[:size] == whole[:size]


def test_ctrl_c_while_waiting_for_a_turn(toy_checkpoint):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, str(SCRIPT), "--ckpt", str(toy_checkpoint), "--interactive"], **pipes)
    seen = b""
    while not seen.endswith(b"> "):
        seen += process.stderr.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130 and b"Traceback" not in err


def test_a_reader_that_leaves_ends_it(toy_checkpoint):
    """The pipe closes while text is still being written: it stops there, long before its 50,000 tokens."""
    edit_config(toy_checkpoint, max_position_embeddings=60_000)
    words = [sys.executable, str(SCRIPT), "--ckpt", str(toy_checkpoint), "--max_new_tokens", "50000"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() != 0 and b"Traceback" not in err and b"error" not in err and b"stopped" not in err


@pytest.mark.parametrize("content", [b"\xff\xfeT\x00", b"caf\xe9", b"ok \xc3"], ids=["UTF-16", "Latin-1", "cut off"])
def test_a_prompt_file_in_another_encoding(cli, tmp_path, content):  # noqa: F811
    (tmp_path / "prompt.txt").write_bytes(content)
    check_refused(cli("--prompt", f"FILE:{tmp_path / 'prompt.txt'}"), "prompt.txt is not UTF-8 text; convert the file")


def test_an_empty_prompt_file_starts_from_bos(cli, tmp_path):  # noqa: F811
    (tmp_path / "prompt.txt").write_bytes(b"")
    done = cli("--prompt", f"FILE:{tmp_path / 'prompt.txt'}")
    assert done.code == 0 and "24 tokens" in done.err


def test_an_empty_prompt_without_bos_is_refused(cli, tmp_path):  # noqa: F811
    from test_tokenizer import write_tokenizer_json
    folder = save_checkpoint(tiny_llama(vocab_size=300), tmp_path / "bytes")
    config = (folder / "config.json").read_text()
    write_tokenizer_json(folder)
    (folder / "config.json").write_text(config)
    check_refused(cli("--ckpt", folder, "--chat", "none", "--prompt", ""), "the prompt is empty: 0 tokens given")
