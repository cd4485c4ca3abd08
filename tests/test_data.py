"""data.py: which tokens are learnt, which rows are refused and counted, and in which order the samples come."""
import gzip
import json

import pytest
import torch
from helpers import STORY

from chat import chat_segments
from data import batch_order, collate, frequent_ids, load_samples
from model import Tokenizer

START, END = 256, 257


@pytest.fixture
def byte_tok() -> Tokenizer:
    """One token per byte, with the control tokens of chatml; no bos, eos is <|im_end|>."""
    special = {"<|im_start|>": START, "<|im_end|>": END}
    decode = lambda ids: bytes(i for i in ids if i < 256).decode()              # noqa: E731
    return Tokenizer(lambda text: list(text.encode()), decode, 258, special, None, {END}, False)


def talk(*turns: str) -> dict:
    """User first, then alternating."""
    return {"conversations": [{"from": ("human", "gpt")[i % 2], "value": turn} for i, turn in enumerate(turns)]}


def load(tmp_path, rows: list, tok, chat: str = "none", max_length: int = 1000) -> list:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return load_samples([str(path)], tok, chat, max_length)


def answers(sample) -> list[list[int]]:
    """The runs of answer tokens in a sample."""
    runs, before = [], False
    for token, is_answer in zip(sample[0].tolist(), sample[1].tolist(), strict=True):
        if is_answer:
            runs = runs if before else [*runs, []]
            runs[-1].append(token)
        before = is_answer
    return runs


# -- labels ------------------------------------------------------------------------------------------------------------

TURNS = ["How many?", "One, two.", "And then?", "Three: the end.", "Go on", " four "]


@pytest.mark.parametrize("turns", [2, 4, 6])
def test_chatml_labels_are_the_answers_and_their_end(tmp_path, byte_tok, turns):
    [sample] = load(tmp_path, [talk(*TURNS[:turns])], byte_tok, "chatml")
    assert answers(sample) == [[*answer.encode(), END] for answer in TURNS[1:turns:2]]
    assert sample[0].tolist() == [i for ids, _ in chat_segments(byte_tok, "chatml", TURNS[:turns]) for i in ids]
    assert sample[0][0] == START


@pytest.mark.parametrize("turns", [2, 4, 6])
def test_labels_without_a_template_are_the_answers_and_eos(tmp_path, toy_tokenizer, turns):
    [sample] = load(tmp_path, [talk(*TURNS[:turns])], toy_tokenizer)
    assert answers(sample) == [[*toy_tokenizer.encode(answer, bos=False), 2] for answer in TURNS[1:turns:2]]
    assert sample[0].tolist().count(1) == 1 and sample[0][0] == 1               # one bos, in front


def test_each_segment_is_tokenised_on_its_own(tmp_path, toy_tokenizer):
    turns = ["Once upon a ti", "me there was"]              # the seam would merge into one token
    encode = toy_tokenizer.encode
    [(ids, _)] = load(tmp_path, [talk(*turns)], toy_tokenizer)
    assert ids.tolist() == encode(turns[0]) + encode(turns[1], bos=False) + [2]
    assert ids.tolist() != encode("".join(turns)) + [2]


def test_a_last_question_without_an_answer_is_left_out(tmp_path, byte_tok):
    [one], [two] = (load(tmp_path, [talk(*TURNS[:n])], byte_tok, "chatml") for n in (2, 3))
    assert one[0].tolist() == two[0].tolist() and one[1].tolist() == two[1].tolist()


def test_typed_control_tokens_stay_text(tmp_path, byte_tok):
    [(ids, answer)] = load(tmp_path, [talk("<|im_end|>", "<|im_start|>x")], byte_tok, "chatml")
    assert (ids[answer] >= 256).sum() == 1                  # only the end that belongs there


@pytest.mark.parametrize("end", [[END], []], ids=["finished", "cut"])
def test_answer_ids_are_used_exactly(tmp_path, byte_tok, end):
    row = talk("Hi", "as text") | {"answer_ids": [5, 7, 5, *end], "finished": bool(end)}
    [sample] = load(tmp_path, [row], byte_tok, "chatml")
    assert answers(sample) == [[5, 7, 5, *end]]
    prompt = [i for ids, _ in chat_segments(byte_tok, "chatml", ["Hi"]) for i in ids]
    assert sample[0].tolist() == [*prompt, 5, 7, 5, *end]


def test_text_ids_are_used_exactly(tmp_path, byte_tok):
    [(ids, answer)] = load(tmp_path, [{"text_ids": [9, 8, 7, 6]}], byte_tok)
    assert ids.tolist() == [9, 8, 7, 6] and answer.all()


# -- files -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("zipped", ["", ".gz"])
@pytest.mark.parametrize("kind", [".json", ".jsonl"])
def test_conversations_are_read_from_every_kind_of_file(tmp_path, byte_tok, kind, zipped):
    rows = [talk("a", "b"), talk("c", "\u00e9", "e", "f")]
    text = json.dumps(rows) if kind == ".json" else "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path = tmp_path / f"talk{kind}{zipped}"
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    samples = load_samples([str(path)], byte_tok, "none", 100)
    assert [answers(s) for s in samples] == [[[*b"b", END]], [[*"\u00e9".encode(), END], [*b"f", END]]]


@pytest.mark.parametrize("zipped", ["", ".gz"])
def test_texts_are_answers_from_bos_to_eos(tmp_path, toy_tokenizer, zipped):
    path = tmp_path / f"stories.txt{zipped}"
    stories = STORY.splitlines()
    text = "\n<|endoftext|>\n".join([*stories, "  "])
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    samples = load_samples([str(path)], toy_tokenizer, "none", 1000)
    assert [ids.tolist() for ids, _ in samples] == [[*toy_tokenizer.encode(story), 2] for story in stories]
    assert all(answer.all() for _, answer in samples)


def test_files_are_joined_in_order(tmp_path, byte_tok):
    for name in "ba":
        (tmp_path / f"{name}.txt").write_text(f"{name}{name}{name}")
    samples = load_samples([str(tmp_path / "b.txt"), str(tmp_path / "a.txt")], byte_tok, "none", 9)
    assert [ids.tolist() for ids, _ in samples] == [[*b"bbb", END], [*b"aaa", END]]


@pytest.mark.parametrize("name", ["a.csv", "a.txt.zip", "a", "a.gz"])
def test_an_unknown_extension_names_the_known_ones(tmp_path, byte_tok, name):
    (tmp_path / name).write_bytes(gzip.compress(b"x"))
    with pytest.raises(ValueError, match="must be .txt, .json or .jsonl"):
        load_samples([str(tmp_path / name)], byte_tok, "none", 9)


# -- rows that cannot be used ------------------------------------------------------------------------------------------

ALTERNATE, NO_TURNS, ROLE, EMPTY = ("turns do not alternate, user first", "no list of turns with text", "unknown role",
                                    "empty or unanswered")
BAD = {
    "assistant first": ({"conversations": talk("a", "b", "c")["conversations"][1:]}, ALTERNATE),
    "user twice": ({"conversations": [{"from": "human", "value": "a"}, {"from": "user", "value": "b"}]}, ALTERNATE),
    "system first": ({"conversations": [{"from": "system", "value": "a"}]}, ROLE),
    "no role": ({"conversations": [{"value": "a"}]}, ROLE),
    "role is a list": ({"conversations": [{"from": ["human"], "value": "a"}]}, ROLE),
    "no turns": ({"conversations": []}, EMPTY),
    "question only": (talk("a"), EMPTY),
    "empty answer": (talk("a", " \n"), EMPTY),
    "text is a number": ({"conversations": [{"from": "human", "value": 1}]}, NO_TURNS),
    "text is missing": ({"conversations": [{"from": "human"}]}, NO_TURNS),
    "turn is a string": ({"conversations": ["a", "b"]}, NO_TURNS),
    "turns are a string": ({"conversations": "ab"}, NO_TURNS),
    "no conversation": ({"text": "a"}, NO_TURNS),
    "list": ([talk("a", "b")], NO_TURNS),
    "number": (7, NO_TURNS),
    "null": (None, NO_TURNS),
    "string": ("just a string", NO_TURNS),
    "half a character": (talk("a", "b\ud800"), "half a surrogate pair in the text"),
    "ids in words": ({"text_ids": ["a"]}, "text_ids are no token ids"),
    "ids below 0": ({"text_ids": [5, -1]}, "text_ids are no token ids"),
    "one id": ({"text_ids": 5}, "text_ids are no token ids"),
    "ids past the vocabulary": (talk("a", "b") | {"answer_ids": [10**6]}, "answer_ids are no token ids"),
}


@pytest.mark.parametrize("kind", [".json", ".jsonl"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_skipped_and_counted_by_its_reason(tmp_path, byte_tok, capsys, name, kind):
    row, reason = BAD[name]
    rows = [talk("a", "b"), row, row, talk("c", "d")]
    path = tmp_path / f"rows{kind}"
    path.write_text(json.dumps(rows) if kind == ".json" else "\n".join(map(json.dumps, rows)))
    assert len(load_samples([str(path)], byte_tok, "none", 99)) == 2
    assert f"2 rows: {reason}" in capsys.readouterr().out


def test_a_line_that_is_cut_off_is_skipped_and_counted(tmp_path, byte_tok, capsys):
    whole = json.dumps(talk("a", "b"))
    assert len(load(tmp_path, [whole, "{not json", whole, whole[:-5]], byte_tok)) == 2
    assert "2 rows: line is not JSON" in capsys.readouterr().out


@pytest.mark.parametrize("text", ['{"conversations": []}', "7", "[1, 2"])
def test_a_json_file_that_is_no_list_is_a_value_error(tmp_path, byte_tok, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError):
        load_samples([str(tmp_path / "a.json")], byte_tok, "none", 9)


# -- truncation --------------------------------------------------------------------------------------------------------

def test_truncation_keeps_the_earlier_turns(tmp_path, byte_tok, capsys):
    first = talk("ask", "answer")
    [(whole, _)] = load(tmp_path, [first], byte_tok)
    [sample] = load(tmp_path, [talk("ask", "answer", "more", "and a long answer")], byte_tok, max_length=len(whole) + 2)
    assert answers(sample) == [[*b"answer", END]] and len(sample[0]) == len(whole) + 2
    assert "1 rows: (cut to --max_length)" in capsys.readouterr().out


def test_truncation_inside_an_answer_keeps_its_beginning(tmp_path, byte_tok):
    [sample] = load(tmp_path, [talk("ask", "answer")], byte_tok, max_length=6)
    assert answers(sample) == [[*b"ans"]]


def test_a_row_cut_before_its_answer_is_skipped_and_counted(tmp_path, byte_tok, capsys):
    rows = [talk("a long question", "yes"), talk("ask", "yes"), {"text_ids": [1, 2]}]
    assert len(load(tmp_path, rows, byte_tok, max_length=5)) == 1
    assert "2 rows: no answer token within --max_length" in capsys.readouterr().out


# -- batches -----------------------------------------------------------------------------------------------------------

def toy_samples(lengths: list[int]) -> list:
    return [(torch.arange(n), torch.ones(n, dtype=torch.bool)) for n in lengths]


def test_collate_labels_the_position_before_an_answer_token():
    ids = torch.tensor([7, 3, 4, 5, 9])
    answer = torch.tensor([True, False, True, True, False])
    tokens, labelled = collate([(ids, answer), (torch.tensor([1, 2, 8]), torch.tensor([False, True, True]))])
    assert tokens.tolist() == [[7, 3, 4, 5, 9], [1, 2, 8, 0, 0]]
    assert labelled.nonzero().tolist() == [[0, 1], [0, 2], [1, 0], [1, 1]]
    assert tokens[labelled.roll(1, 1)].tolist() == [4, 5, 2, 8]                 # the tokens that are learnt


def test_every_epoch_holds_every_sample_once():
    samples = toy_samples([3 + i % 11 for i in range(101)])
    for epoch in range(3):
        batches = batch_order(samples, 4, 0, epoch)
        assert sorted(i for batch in batches for i in batch) == list(range(101))
        assert len(batches) == 26 and sorted(map(len, batches))[:2] == [1, 4]


def test_order_is_a_function_of_seed_and_epoch():
    samples = toy_samples([3 + i % 11 for i in range(101)])
    assert batch_order(samples, 4, 5, 2) == batch_order(samples, 4, 5, 2)
    orders = [batch_order(samples, 4, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_batches_hold_samples_of_similar_length():
    samples = toy_samples([3 + i % 50 for i in range(64)])
    for batch in batch_order(samples, 4, 0, 0):
        lengths = [len(samples[i][0]) for i in batch]
        assert max(lengths) - min(lengths) <= 8


def test_frequent_ids_counts_answers_only_and_sorts():
    ids, answer = torch.tensor([9, 9, 9, 4, 4, 7, 2, 2, 2]), torch.tensor([False] * 3 + [True] * 6)
    assert frequent_ids([(ids, answer)], 2, 10).tolist() == [2, 4]
    assert frequent_ids([(ids, answer)] * 2, 3, 10).tolist() == [2, 4, 7]
    assert frequent_ids([(ids, answer)], 4, 10).tolist() == [0, 2, 4, 7]        # ties: the lower id
