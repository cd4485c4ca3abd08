"""distill.py: batched answers are the target's own, token for token; a run that was stopped goes on where it was."""
import json
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers import STORY, random_ids, tiny_llama

import train
from chat import chat_prompt
from data import load_samples
from distill import already_done, answer_batch, distill, load_prompts
from speculative import generate

PROMPTS = [random_ids(n, seed=n) for n in (1, 7, 3, 7, 12, 2)]
QUESTIONS = ["Who is Lily?", "What did Tom see?", "Once upon", "The sun was", "Count 1, 2, 3", "Tom", "A nice ball!"]


def greedy(model, prompt: list[int], count: int, eos=()) -> list[int]:
    return [token for block in generate(model, prompt, max_new_tokens=count, eos_ids=eos) for token in block]


def answer(model, prompts: list, temperature: float, count: int = 20, eos=(), seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return answer_batch(model, prompts, [temperature] * len(prompts), count, set(eos), generator)


# -- answers -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("heads", [{}, {"num_key_value_heads": 4}], ids=["grouped", "ungrouped"])
def test_ragged_batches_equal_plain_greedy_decoding(heads):
    model = tiny_llama(**heads)
    assert answer(model, PROMPTS, 0.0) == [greedy(model, prompt, 20) for prompt in PROMPTS]


def test_an_answer_does_not_depend_on_its_batch():
    model = tiny_llama()
    alone = [answer(model, [prompt], 0.0)[0] for prompt in PROMPTS]
    assert answer(model, PROMPTS, 0.0) == alone
    assert answer(model, PROMPTS[::-1], 0.0) == alone[::-1]


def test_answers_end_behind_their_first_eos():
    model = tiny_llama()
    free = [greedy(model, prompt, 20) for prompt in PROMPTS]
    eos = {free[0][4], free[1][7]}                          # declare tokens that it writes anyway to be an end
    answers = answer(model, PROMPTS, 0.0, eos=eos)
    assert answers == [greedy(model, prompt, 20, eos) for prompt in PROMPTS]
    for row, whole in zip(answers, free, strict=True):
        stops = [i for i, token in enumerate(whole) if token in eos]
        assert row == (whole[:stops[0] + 1] if stops else whole)
    assert len({len(row) for row in answers}) > 1           # some stopped earlier than others


@pytest.mark.parametrize("count", [1, 2])
def test_no_answer_is_longer_than_asked(count):
    assert [len(row) for row in answer(tiny_llama(), PROMPTS, 0.0, count)] == [count] * len(PROMPTS)


def test_temperature_1_follows_the_models_distribution():
    """Chi-square of the first two tokens over many rows; 99.9% of exact samplers stay below the bound."""
    model, prompt, rows = tiny_llama(vocab_size=8), [3, 1, 4], 4000
    drawn = answer(model, [prompt] * rows, 1.0, 2)
    first = model(torch.tensor([prompt]))[0, -1].softmax(-1)                    # [V]
    after = torch.stack([model(torch.tensor([[*prompt, token]]))[0, -1].softmax(-1) for token in range(8)])
    expected = (first[:, None] * after).flatten() * rows                        # [V * V]
    counts = Counter(a * 8 + b for a, b in drawn)
    seen = torch.tensor([float(counts[cell]) for cell in range(64)])
    big = expected >= 5                                     # rare cells together are one more
    expected, seen = (torch.cat((x[big], x[~big].sum()[None])) for x in (expected, seen))
    freedom = len(expected) - 1
    chi = ((seen - expected) ** 2 / expected.clamp(min=1e-9)).sum().item()
    assert chi < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3         # Wilson-Hilferty


def test_rows_of_both_temperatures_share_a_batch():
    model = tiny_llama()
    mixed = answer_batch(model, PROMPTS * 2, [0.0] * 6 + [1.0] * 6, 20, set(), torch.Generator().manual_seed(0))
    assert mixed[:6] == answer(model, PROMPTS, 0.0) and mixed[6:] != mixed[:6]


def test_draws_depend_on_the_seed_only():
    model = tiny_llama()
    assert answer(model, PROMPTS, 1.0, seed=7) == answer(model, PROMPTS, 1.0, seed=7)
    assert answer(model, PROMPTS, 1.0, seed=7) != answer(model, PROMPTS, 1.0, seed=8)


# -- files -------------------------------------------------------------------------------------------------------------

@pytest.fixture
def prompts_file(tmp_path) -> Path:
    """Conversations (some that cannot be used) as .jsonl."""
    rows = [{"conversations": [{"from": "human", "value": question}]} for question in QUESTIONS]
    rows[2]["conversations"] += [{"from": "gpt", "value": "another's answer"}, {"from": "human", "value": "more"}]
    rows += [{"conversations": []}, {"conversations": [{"from": "gpt", "value": "I begin"}]}, 5]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def stories_file(tmp_path) -> Path:
    path = tmp_path / "stories.txt"
    path.write_text("<|endoftext|>".join(STORY.splitlines()))
    return path


@pytest.fixture
def model():
    return tiny_llama(vocab_size=400)


def run(model, tok, files: list, out: Path, **changes) -> list[dict]:
    options = {"batch_size": 2, "max_length": 60, "max_new_tokens": 8, "seed": 0} | changes
    distill(model, tok, "none", Namespace(distill=[str(file) for file in files], out=str(out), **options))
    return rows_of(out)


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_every_prompt_is_answered_once(tmp_path, model, toy_tokenizer, prompts_file, stories_file):
    rows = run(model, toy_tokenizer, [prompts_file, stories_file], tmp_path / "out.jsonl")
    ids = [f"prompts.jsonl:{i}" for i in range(len(QUESTIONS))] + [f"stories.txt:{i}" for i in range(4)]
    assert sorted(row["id"] for row in rows) == ids
    assert Counter(row["temperature"] for row in rows) == {0.0: 6, 1.0: 5}


def test_greedy_rows_are_what_the_target_writes(tmp_path, model, toy_tokenizer, prompts_file):
    rows = run(model, toy_tokenizer, [prompts_file], tmp_path / "out.jsonl")
    for row in (row for row in rows if row["temperature"] == 0):
        question, text = (turn["value"] for turn in row["conversations"])
        expected = greedy(model, chat_prompt(toy_tokenizer, "none", [question]), 8, toy_tokenizer.eos_ids)
        assert row["answer_ids"] == expected and text == toy_tokenizer.decode(expected)
        assert row["finished"] == (expected[-1] == 2)


@pytest.mark.parametrize("eos", [set(), {7, 20, 99, *range(100, 300)}], ids=["cut", "finished"])
def test_rows_are_read_back_with_exactly_their_ids(model, toy_tokenizer, prompts_file, stories_file, eos, monkeypatch):
    monkeypatch.setattr(toy_tokenizer, "eos_ids", eos | {2})
    out = prompts_file.with_name("out.jsonl")
    rows = run(model, toy_tokenizer, [prompts_file, stories_file], out)
    samples = load_samples([str(out)], toy_tokenizer, "none", 1000)
    readable = [row for row in rows if "text_ids" in row or row["conversations"][1]["value"].strip()]
    assert len(readable) == len(samples) > 8
    for row, (ids, answer) in zip(readable, samples, strict=True):
        if "text_ids" in row:
            assert ids.tolist() == row["text_ids"] and answer.all()
        else:
            prompt = chat_prompt(toy_tokenizer, "none", [row["conversations"][0]["value"]])
            assert ids.tolist() == prompt + row["answer_ids"]
            assert answer.tolist() == [False] * len(prompt) + [True] * len(row["answer_ids"])
    assert any(row["finished"] for row in rows) == bool(eos)


def test_text_rows_continue_an_opening_of_their_story(tmp_path, model, toy_tokenizer, stories_file):
    for row in run(model, toy_tokenizer, [stories_file], tmp_path / "out.jsonl"):
        story = toy_tokenizer.encode(STORY.splitlines()[int(row["id"].split(":")[1])])
        opening = len(row["text_ids"]) - 8
        assert 3 <= opening <= 16 and row["text_ids"][:opening] == story[:opening]


def test_prompts_that_do_not_fit_are_left_out(tmp_path, model, toy_tokenizer, prompts_file):
    lengths = [len(prompt["prompt"]) for prompt in load_prompts([str(prompts_file)], toy_tokenizer, "none", 0)]
    middle = sorted(lengths)[3]
    rows = run(model, toy_tokenizer, [prompts_file], tmp_path / "out.jsonl", max_length=middle)
    assert len(rows) == sum(n <= middle for n in lengths) < len(lengths)
    rows = run(model, toy_tokenizer, [prompts_file], tmp_path / "full.jsonl", max_new_tokens=128 - middle)
    assert len(rows) == sum(n <= middle for n in lengths)   # the context of 128 limits them too


# -- stopped and continued ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kept, cut", [(0, 0), (0, 9), (3, 0), (3, 1), (3, 40), (6, -1), (7, 0)])
def test_a_stopped_run_goes_on_without_loss_or_duplicate(tmp_path, model, toy_tokenizer, prompts_file, kept, cut):
    """The first `kept` lines are whole, of the next `cut` bytes were written (-1: all but the line's end)."""
    out = tmp_path / "out.jsonl"
    straight = run(model, toy_tokenizer, [prompts_file], out)
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:kept]) + (lines[kept][:cut] if cut else b""))
    rows = run(model, toy_tokenizer, [prompts_file], out)
    assert rows[:kept] == straight[:kept]
    assert sorted(row["id"] for row in rows) == sorted(row["id"] for row in straight)
    by_id = {row["id"]: row for row in straight}
    assert all(row == by_id[row["id"]] for row in rows if row["temperature"] == 0)
    assert all(row["temperature"] == by_id[row["id"]]["temperature"] for row in rows)


def test_a_finished_run_adds_nothing(tmp_path, model, toy_tokenizer, prompts_file):
    out = tmp_path / "out.jsonl"
    run(model, toy_tokenizer, [prompts_file], out)
    before = out.read_bytes()
    run(model, toy_tokenizer, [prompts_file], out)
    assert out.read_bytes() == before


def test_a_second_file_is_added(tmp_path, model, toy_tokenizer, prompts_file, stories_file):
    out = tmp_path / "out.jsonl"
    first = run(model, toy_tokenizer, [prompts_file], out)
    rows = run(model, toy_tokenizer, [prompts_file, stories_file], out)
    assert rows[:len(first)] == first and len({row["id"] for row in rows}) == len(rows) == len(first) + 4


@pytest.mark.parametrize("text", ['[{"conversations": []}]', '{"conversations": []}\n', "Once upon\na time\n",
                                  '{"id": "a"}\n5\n', '{"id": "a"}\nfive\n'])
def test_a_file_of_another_kind_is_never_touched(tmp_path, text):
    out = tmp_path / "mine.json"
    out.write_text(text)
    with pytest.raises(ValueError, match="mine.json"):
        already_done(out)
    assert out.read_text() == text


def test_the_command_writes_the_rows(tmp_path, toy_checkpoint, prompts_file, monkeypatch, capsys):
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(sys, "argv", ["train.py", "--ckpt", str(toy_checkpoint), "--distill", str(prompts_file),
                                      "--out", str(out), "--dtype", "float32", "--max_new_tokens", "6"])
    train.main()
    train.main()                                            # again: nothing to do
    assert len(rows_of(out)) == len(QUESTIONS)
    assert "7 answered before, 0 to go" in capsys.readouterr().out
