"""sample.py --interactive: answers equal those of fresh runs, only new tokens are fed, and the commands."""
import io
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import edit_config, near_copy, save_checkpoint, tiny_draft, tiny_llama
from test_cli import check_refused, cli  # noqa: F401  (cli is a fixture)

import sample
from chat import chat_prompt, next_turn
from draft import ChimeraState
from model import Llama, Tokenizer
from speculative import default_tree, generate

SCRIPT = Path(__file__).parent.parent / "sample.py"
LINES = ["Tom saw a cat", "Lily", "The sun was warm"]


@pytest.fixture
def talk(toy_checkpoint, monkeypatch, capfd):
    """Lines into converse() -> its turns [(prompt ids, answer ids)], what it printed, the target, its rows a pass."""
    def call(lines, chat="llama2", draft=None, limit=1024, eos=None, presses=0, **settings):
        model = Llama.from_pretrained(edit_config(toy_checkpoint, max_position_embeddings=limit))
        tok = Tokenizer.from_pretrained(toy_checkpoint)
        tok.eos_ids = tok.eos_ids if eos is None else eos
        draft = {"chimera": tiny_draft, "llama": near_copy}[draft](model) if draft else None
        turns, rows, real, passes = [], [], sample.decode, model.hidden_states

        def hidden_states(ids, *rest, **more):
            rows.append(ids.shape[1])
            return passes(ids, *rest, **more)

        def decode(*args):                                  # Ctrl-C comes with the third pass of the first answer
            def show(ids, passes=[]):  # noqa: B006
                args[5](ids)
                passes.append(ids)
                for _ in range(presses * (len(passes) == 3 and not turns)):
                    signal.raise_signal(signal.SIGINT)
            turns.append((args[1], real(*args[:5], show, *args[6:]).ids))
            return sample.Result([turns[-1][1]])
        model.hidden_states = hidden_states
        monkeypatch.setattr(sample, "decode", decode)
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        tree = default_tree(draft, 0) if draft else None
        sample.converse(model, tok, draft, chat, sample.settings(**{"max_new_tokens": 20, "tree": tree} | settings))
        monkeypatch.setattr(sample, "decode", real)
        del model.hidden_states
        return turns, capfd.readouterr(), model, rows
    return call


def fresh_answers(model, turns, count=20, eos=()) -> list[list[int]]:
    """Each turn once more, from its whole prompt and without a cache or draft."""
    whole, answers = [], []
    for prompt, answer in turns:
        whole = whole + prompt
        answers.append([i for new in generate(model, whole, max_new_tokens=count, eos_ids=eos) for i in new])
        whole = whole + answer
    return answers


@pytest.mark.parametrize("chat", ["llama2", "vicuna", "zephyr", "none"])
@pytest.mark.parametrize("draft", [None, "chimera", "llama"])
def test_every_answer_equals_that_of_a_fresh_run(talk, toy_tokenizer, chat, draft):
    turns, printed, model, _ = talk(LINES, chat, draft)
    assert [answer for _, answer in turns] == fresh_answers(model, turns)
    assert turns[0][0] == chat_prompt(toy_tokenizer, chat, LINES[:1])
    for line, (_, before), (prompt, _) in zip(LINES[1:], turns, turns[1:]):
        assert prompt == next_turn(toy_tokenizer, chat, line, before[-1])
    assert printed.out.count("\n") >= 3 and printed.err.count("stopped: max_new_tokens") == 3


@pytest.mark.parametrize("chat", ["llama2", "none"])
def test_only_new_tokens_are_prefilled(talk, chat):
    turns, _, _, rows = talk(LINES, chat)
    expected = []
    for number, (prompt, answer) in enumerate(turns):       # the last token of an answer has no row yet
        expected += [len(prompt) + (number > 0)] + [1] * (len(answer) - 1)
    assert rows == expected


def test_the_chimera_draft_sees_every_token_once(talk, monkeypatch):
    seen, observe = [], ChimeraState.observe
    monkeypatch.setattr(ChimeraState, "observe", lambda self, tokens, hidden: (seen.extend(tokens),
                                                                               observe(self, tokens, hidden))[1])
    turns, _, _, rows = talk(LINES, draft="chimera")
    assert seen == [i for prompt, answer in turns for i in prompt + answer][:-1]
    assert max(rows) <= 1 + max(len(prompt) for prompt, _ in turns)


def test_the_llama_draft_is_fed_new_tokens_only(talk, monkeypatch):
    fed, hidden_states = [], Llama.hidden_states
    monkeypatch.setattr(Llama, "hidden_states", lambda self, ids, *rest: (fed.append(ids.shape[1]),
                                                                          hidden_states(self, ids, *rest))[1])
    turns, *_ = talk(LINES, draft="llama")
    longest = max(len(prompt) for prompt, _ in turns)
    assert max(fed) <= longest + 6 < len(turns[0][0]) + len(turns[1][0])      # 6: what its last round left to feed


def test_an_answer_that_ends_itself_is_not_ended_again(talk):
    first = talk(LINES[:1])[0][0][1]
    end = next(i for i in first[3:] if first.index(i) >= 3)
    turns, printed, model, _ = talk(LINES[:2], "llama2", eos={end})
    assert "stopped: end of text" in printed.err and turns[0][1][-1] == end
    assert [answer for _, answer in turns] == fresh_answers(model, turns, eos={end})


def test_reset_forgets_everything_and_quit_ends(talk):
    turns, printed, *_ = talk([LINES[0], "", "  ", "/reset", LINES[0], "/quit", LINES[1]])
    assert len(turns) == 2 and turns[0] == turns[1]
    assert printed.err.count("> ") == 6                     # blank lines are asked for again


def test_a_full_context_is_said_with_the_advice(talk):
    turns, printed, *_ = talk([LINES[0], LINES[1], "/reset", LINES[1]], limit=64, max_new_tokens=500, draft="llama")
    said = [line for line in printed.err.splitlines() if "the context is full" in line]
    assert len(turns) == 2 and all("/reset" in line for line in said)
    assert ["tokens with this turn, 64 at most" in line for line in said] == [False, True, False]
    assert all(len(prompt) + len(answer) == 64 for prompt, answer in turns)


def test_a_line_longer_than_the_context_changes_nothing(talk):
    turns, printed, model, _ = talk([LINES[0], "cat " * 200, LINES[1]], limit=200)
    assert len(turns) == 2 and "200 at most" in printed.err
    assert [answer for _, answer in turns] == fresh_answers(model, turns)


@pytest.mark.parametrize("draft", [None, "chimera", "llama"])
@pytest.mark.parametrize("chat", ["llama2", "none"])
def test_a_stopped_answer_is_kept_and_the_next_one_is_right(talk, draft, chat):
    turns, printed, model, _ = talk(LINES, chat, draft, presses=1)
    (whole, *others), (part, *rest) = fresh_answers(model, turns), [answer for _, answer in turns]
    assert 3 <= len(part) < 20 and part == whole[:len(part)] and rest == others
    assert printed.err.count("stopped: Ctrl-C") == 1 and printed.err.count("stopped: max_new_tokens") == 2


def test_ctrl_c_twice_ends_the_program(talk):
    with pytest.raises(KeyboardInterrupt):
        talk(LINES, presses=2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler    # as it was


@pytest.mark.parametrize("options", [["--compare", "--draft", "x"], ["--prompt", "Tom"]], ids=" ".join)
def test_options_that_do_not_go_together(cli, toy_checkpoint, options):  # noqa: F811
    draft = save_checkpoint(tiny_llama(vocab_size=400), toy_checkpoint.parent / "x")
    options = [str(draft) if word == "x" else word for word in options]
    check_refused(cli("--interactive", *options), "leave out --prompt, --compare, --trace")


# -- the process -------------------------------------------------------------------------------------------------------

def start(folder, *options) -> subprocess.Popen:
    words = [sys.executable, SCRIPT, "--ckpt", folder, "--interactive", "--dtype", "float32", *options]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([*map(str, words)], text=True, encoding="utf-8", **pipes)


@pytest.mark.parametrize("end", ["/quit\n", ""], ids=["quit", "end of input"])
def test_a_conversation_through_pipes(toy_checkpoint, end):
    out, err = (process := start(toy_checkpoint, "--max_new_tokens", 6)).communicate("Tom\nLily\n" + end)
    assert process.returncode == 0 and "Traceback" not in err and err.count("> ") == 3
    assert len(re.findall(r"stopped: max_new_tokens \| answer: 6 tokens", err)) == 2 and out.count("\n") == 2


def test_bytes_that_are_no_text_do_not_end_it(toy_checkpoint):
    command = [sys.executable, SCRIPT, "--ckpt", toy_checkpoint, "--interactive", "--max_new_tokens", "3"]
    done = subprocess.run(command, input=b"caf\xe9\nTom", capture_output=True)
    assert done.returncode == 0 and done.stderr.count(b"answer: 3 tokens") == 2


@pytest.mark.parametrize("draft", [False, True])
def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(toy_checkpoint, draft):
    edit_config(toy_checkpoint, max_position_embeddings=60_000)
    options = ["--draft", toy_checkpoint] if draft else []
    process = start(toy_checkpoint, "--max_new_tokens", 50_000, *options)
    process.stdin.write("Tom saw\n")
    process.stdin.flush()
    begun = process.stdout.read(5)                          # so the answer is on its way
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("/reset\n/quit\n")
    assert process.returncode == 0 and "Traceback" not in err and len(begun) == 5
    assert "stopped: Ctrl-C" in err and out.endswith("\n")
