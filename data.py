"""Texts and conversations -> token ids with the answers marked: what train.py learns from and distill.py asks.

Reads ShareGPT-form .json and .jsonl ({"conversations": [{"from": "human" | "gpt", "value": ...}]}) and plain .txt with
<|endoftext|> between texts, .gz of each, and the rows that distill.py writes (their exact answer ids are used).
"""
import gzip
import json
import random
import zlib
from collections import Counter
from itertools import accumulate
from pathlib import Path

import torch

from chat import chat_segments
from draft import fingerprint
from model import Llama, Tokenizer


def read_records(path: Path, skipped: Counter):
    """Yields a text (str) per story of a .txt, a conversation (dict) per row of a .json or .jsonl; .gz of either."""
    try:
        yield from _read_records(path, skipped)
    except (EOFError, UnicodeDecodeError, json.JSONDecodeError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged, or no UTF-8 text or JSON ({error}); fetch the file again") from None


def _read_records(path: Path, skipped: Counter):
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
        if kind == ".txt":
            yield from (t.strip() for t in file.read().split("<|endoftext|>") if t.strip())
        elif kind == ".json":
            rows = json.load(file)
            if not isinstance(rows, list):
                raise ValueError(f"{path}: a .json must hold a list of conversations")
            yield from (row if isinstance(row, dict) else {} for row in rows)
        elif kind == ".jsonl":
            for line in filter(str.strip, file):
                try:
                    row = json.loads(line)
                except ValueError:
                    skipped["line is not JSON"] += 1
                    continue
                yield row if isinstance(row, dict) else {}
        else:
            raise ValueError(f"{path}: data must be .txt, .json or .jsonl, or one of them with .gz")


def broken(text: str) -> bool:
    """JSON may escape half a character (\\ud800), which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def is_ids(ids, tok: Tokenizer) -> bool:
    return isinstance(ids, list) and all(type(i) is int and 0 <= i < tok.vocab_size for i in ids)


def turns_of(row, answered: bool = True) -> list[str] | str:
    """A ShareGPT row -> its turns, user first; or, as a string, the reason why it cannot be used."""
    talk = row.get("conversations") if isinstance(row, dict) else None
    if not isinstance(talk, list) or not all(isinstance(t, dict) and isinstance(t.get("value"), str) for t in talk):
        return "no list of turns with text"
    roles = {"human": 0, "user": 0, "gpt": 1, "assistant": 1}
    parts = [roles.get(str(t.get("from"))) for t in talk]
    if None in parts:
        return "unknown role"
    if parts != [i % 2 for i in range(len(parts))]:
        return "turns do not alternate, user first"
    if any(broken(t["value"]) for t in talk):
        return "half a surrogate pair in the text"
    if len(parts) < 1 + answered or not all(t["value"].strip() for t in talk):
        return "empty or unanswered"
    return [t["value"] for t in talk]


def to_sample(record, tok: Tokenizer, chat: str, skipped: Counter):
    """-> (ids, is_answer) or None. A text is all answer; of a conversation the assistant's turns, with their ends."""
    if isinstance(record, str):
        record = {"text_ids": tok.encode(record) + sorted(tok.eos_ids)[:1]}
    for key in ("text_ids", "answer_ids"):
        if key in record and not is_ids(record[key], tok):
            skipped[f"{key} are no token ids"] += 1
            return None
    if "text_ids" in record:
        return record["text_ids"], [True] * len(record["text_ids"])
    turns = turns_of(record)
    if isinstance(turns, str):
        skipped[turns] += 1
        return None
    segments = chat_segments(tok, chat, turns[:len(turns) // 2 * 2])
    if "answer_ids" in record:                              # exactly what the target wrote, with its end if any
        segments[-1] = (record["answer_ids"], True)
    return [i for ids, _ in segments for i in ids], [answer for ids, answer in segments for _ in ids]


def load_samples(paths: list[str], tok: Tokenizer, chat: str, max_length: int) -> list[tuple]:
    """All samples, cut to max_length, with at least one answer token; says what was skipped and why."""
    samples, skipped = [], Counter()
    for path in paths:
        for record in read_records(Path(path), skipped):
            sample = to_sample(record, tok, chat, skipped)
            if sample is None:
                continue
            skipped["(cut to --max_length)"] += len(sample[0]) > max_length
            ids, answer = (torch.tensor(part[:max_length]) for part in sample)
            if len(ids) < 3 or not answer.any():
                skipped["no answer token within --max_length"] += 1
                continue
            samples.append((ids, answer))
    for reason, count in skipped.items():
        if count:
            print(f"data: {count} rows: {reason}")
    return samples


def collate(samples: list) -> tuple[torch.Tensor, torch.Tensor]:
    """-> tokens [B, T], padded on the right, and labelled [B, T]: True at j if token j+1 is an answer token."""
    T = max(len(ids) for ids, _ in samples)
    tokens, labelled = torch.zeros(len(samples), T, dtype=torch.long), torch.zeros(len(samples), T, dtype=torch.bool)
    for row, (ids, answer) in enumerate(samples):
        tokens[row, :len(ids)] = ids
        labelled[row, :len(ids) - 1] = answer[1:]
    return tokens, labelled


def batch_order(samples: list, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """This epoch's batches: shuffled, then of similar length within groups of 16. The same for the same arguments."""
    rng = random.Random(seed * 1_000_003 + epoch)
    order = rng.sample(range(len(samples)), len(samples))
    groups = (order[i:i + 16 * batch_size] for i in range(0, len(order), 16 * batch_size))
    groups = [sorted(group, key=lambda j: len(samples[j][0])) for group in groups]
    batches = [g[i:i + batch_size] for g in groups for i in range(0, len(g), batch_size)]
    rng.shuffle(batches)
    return batches


def frequent_ids(samples: list, size: int, vocab: int) -> torch.Tensor:
    """The `size` most frequent token ids of the answers, sorted: the draft's vocabulary."""
    counts = torch.zeros(vocab)
    for ids, answer in samples:
        counts += torch.bincount(ids[answer], minlength=vocab)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


class HiddenCache:
    """The target's hidden states of all samples in one memory-mapped file: computed once, read in further epochs.

    A sample counts as present once its flag is set, after its rows were written; a file made from other samples or
    another target is begun anew.
    """

    def __init__(self, folder: Path, samples: list, model: Llama):
        folder.mkdir(parents=True, exist_ok=True)
        lengths = [len(ids) for ids, _ in samples]
        self.starts, self.lengths, D = [0, *accumulate(lengths)], lengths, model.config.hidden_size
        dtype = model.embed.weight.dtype
        ids = torch.cat([ids for ids, _ in samples]).numpy().tobytes()
        key = json.dumps([zlib.crc32(ids), lengths, fingerprint(model), str(dtype)])
        if not (folder / "key.json").is_file() or (folder / "key.json").read_text() != key:
            for name in ("present.bin", "hidden.bin"):
                (folder / name).unlink(missing_ok=True)
            (folder / "key.json").write_text(key)
        size = self.starts[-1] * D
        self.rows = torch.from_file(str(folder / "hidden.bin"), shared=True, size=size, dtype=dtype).view(-1, D)
        self.present = torch.from_file(str(folder / "present.bin"), shared=True, size=len(samples), dtype=torch.uint8)

    def states(self, model: Llama, batch: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """Sample numbers and their tokens [B, T] -> hidden states [B, T, D]; the padding may be zeros."""
        slices = [slice(self.starts[i], self.starts[i] + self.lengths[i]) for i in batch]
        if self.present[batch].all():
            hidden = torch.zeros(*tokens.shape, self.rows.shape[1], dtype=self.rows.dtype)
            for row, part in enumerate(slices):
                hidden[row, :part.stop - part.start] = self.rows[part]
            return hidden.to(tokens.device)
        with torch.no_grad():
            hidden = model.hidden_states(tokens)
        for row, part in enumerate(slices):
            self.rows[part] = hidden[row, :part.stop - part.start].cpu()
        self.present[batch] = 1
        return hidden
