"""Lets the target answer prompts itself: the data on which a draft learns best (train.py --distill).

Rows are decoded in batches with the same model code: prompts are padded on the left, each row has its own positions.
Half the rows are greedy, half at temperature 1. Answers are appended batch by batch: a stopped run goes on.

Shapes: B rows, P padded prompt length, T tokens so far, V vocabulary.
"""
import json
import random
import zlib
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm

from chat import chat_prompt
from data import read_records, turns_of
from model import Llama, Tokenizer, additive_mask
from speculative import NON_FINITE, until_eos


def load_prompts(paths: list[str], tok: Tokenizer, chat: str, seed: int) -> list[dict]:
    """The first user turn of each conversation, or of each plain text an opening of 3 to 16 tokens."""
    prompts, skipped, rng = [], Counter(), random.Random(seed)
    for path in paths:
        for number, record in enumerate(read_records(Path(path), skipped)):
            row = {"id": f"{Path(path).name}:{number}"}
            if isinstance(record, str):
                row |= {"prompt": tok.encode(record)[:rng.randint(3, 16)]}
            elif isinstance(turns := turns_of(record, answered=False), str):
                skipped[turns] += 1
                continue
            else:
                row |= {"prompt": chat_prompt(tok, chat, turns[:1]), "turn": turns[0]}
            prompts.append(row | {"temperature": float(len(prompts) % 2)})
    for reason, count in skipped.items():
        print(f"prompts: {count} rows skipped: {reason}")
    return prompts


@torch.inference_mode()
def answer_batch(model: Llama, prompts: list[list[int]], temperatures: list[float], max_new_tokens: int,
                 eos_ids: set[int], generator: torch.Generator) -> list[list[int]]:
    """Decodes B prompts together -> the new ids of each, cut behind its first eos id."""
    device, B, P = model.embed.weight.device, len(prompts), max(map(len, prompts))
    pad = torch.tensor([P - len(prompt) for prompt in prompts], device=device)                  # [B]
    tokens = torch.tensor([[0] * (P - len(prompt)) + prompt for prompt in prompts], device=device)
    columns = torch.arange(P + max_new_tokens, device=device)
    seen = columns >= pad[:, None]                                              # [B, P + new]: not padding
    causal = columns[None, :P, None] >= columns[None, None, :P]
    own = columns[:P, None] == columns[None, :P]            # a padding row must see something: itself
    mask = additive_mask((causal & seen[:, None, :P]) | own, model.embed.weight.dtype)[:, None]         # [B, 1, P, P]
    steps = additive_mask(seen, model.embed.weight.dtype)[:, None, None]                        # [B, 1, 1, P + new]
    cache, answers = model.new_cache(P + max_new_tokens, B), torch.empty(B, 0, dtype=torch.long, device=device)
    hidden = model.hidden_states(tokens, cache, (columns[:P] - pad[:, None]).clamp(min=0), mask)[:, -1]
    hot = torch.tensor(temperatures, device=device).nonzero()[:, 0]             # rows at temperature 1, others greedy
    stop, done = torch.tensor(sorted(eos_ids), device=device), torch.zeros(B, dtype=torch.bool, device=device)
    for new in range(max_new_tokens):
        logits = model.lm_head(hidden).contiguous().float()                                     # [B, V]
        if not torch.isfinite(hidden).all():
            raise ValueError(NON_FINITE)
        chosen = logits.argmax(-1, keepdim=True)                                                # [B, 1]
        if len(hot):
            cdf = logits[hot].softmax(-1).cumsum(-1)
            point = torch.rand(len(hot), 1, generator=generator).to(device) * cdf[:, -1:]
            chosen[hot] = torch.searchsorted(cdf, point, right=True).clamp(max=cdf.shape[1] - 1)
        answers = torch.cat((answers, chosen), 1)
        done |= torch.isin(chosen[:, 0], stop)
        if done.all() or new + 1 == max_new_tokens:
            break
        end = P + new + 1
        hidden = model.hidden_states(chosen, cache, (end - 1 - pad)[:, None], steps[..., :end])[:, -1]
    return [until_eos(row, eos_ids) for row in answers.tolist()]


def already_done(out: Path) -> set[str]:
    """Ids in an earlier output; a last line that was cut off by a kill is removed from the file."""
    if not out.exists():
        return set()
    text = out.read_bytes()
    if not b'{"id": "'.startswith(text[:8]):
        raise ValueError(f"{out} holds something else than answers; choose another --out")
    whole = text[:text.rfind(b"\n") + 1]
    if whole != text:
        out.write_bytes(whole)
    try:
        return {json.loads(line)["id"] for line in whole.splitlines()}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{out} holds something else than answers; choose another --out") from None


def distill(model: Llama, tok: Tokenizer, chat: str, args) -> None:
    """Appends one JSON row per prompt to args.out: temperature, finished, exact ids. Longer prompts are left out."""
    paths, out, batch_size, max_new_tokens = args.distill, args.out, args.batch_size, args.max_new_tokens
    room = min(args.max_length, model.config.max_position_embeddings - max_new_tokens)
    prompts = [p for p in load_prompts(paths, tok, chat, args.seed) if 0 < len(p["prompt"]) <= room]
    random.Random(args.seed).shuffle(prompts)
    done = already_done(Path(out))
    todo = [p for p in prompts if p["id"] not in done]
    print(f"{len(prompts)} prompts of at most {room} tokens, {len(done)} answered before, {len(todo)} to go, "
          f"chat {chat} -> {out}")
    total = 0
    with open(out, "a", encoding="utf-8") as file, tqdm(total=len(todo), unit="answer") as bar:
        for start in range(0, len(todo), 8 * batch_size):                       # neighbours in length share a batch
            group = sorted(todo[start:start + 8 * batch_size], key=lambda p: len(p["prompt"]))
            for rows in (group[i:i + batch_size] for i in range(0, len(group), batch_size)):
                generator = torch.Generator().manual_seed(zlib.crc32(f"{args.seed} {rows[0]['id']}".encode()))
                answers = answer_batch(model, [p["prompt"] for p in rows], [p["temperature"] for p in rows],
                                       max_new_tokens, tok.eos_ids, generator)
                lines = (json.dumps(to_row(p, ids, tok), ensure_ascii=False) for p, ids in zip(rows, answers))
                file.writelines(line + "\n" for line in lines)
                file.flush()
                total += sum(map(len, answers))
                bar.set_postfix_str(f"{total} tokens")
                bar.update(len(rows))


def to_row(prompt: dict, ids: list[int], tok: Tokenizer) -> dict:
    finished = ids[-1] in tok.eos_ids
    row = {"id": prompt["id"], "temperature": prompt["temperature"], "finished": finished}
    if "turn" not in prompt:
        return row | {"text_ids": prompt["prompt"] + ids}
    talk = [{"from": "human", "value": prompt["turn"]}, {"from": "gpt", "value": tok.decode(ids)}]
    return row | {"conversations": talk, "answer_ids": ids}
