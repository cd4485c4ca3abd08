"""Trains a Chimera draft on a frozen target: one parallel forward over a text trains all K steps (arXiv 2402.15758, section 3).

    python train.py --ckpt DIR --data answers.jsonl stories.txt.gz --out DIR --steps 2000

Loss: sum over steps k of [cross-entropy on the next token + kl * KL(p || q)], p the target's distribution there, q the
draft's; on answer tokens only. --out holds config.json and model.safetensors (what sample.py --draft reads) and state.pt,
from which --resume continues exactly.
"""
import argparse
import json
import math
import os
import random
import time
from pathlib import Path

import torch
from tqdm import tqdm

from common import choose_chat, choose_device, load_target, run
from data import batch_order, collate, frequent_ids, load_samples
from distill import distill
from draft import Chimera, ChimeraConfig
from model import Llama

CHUNK = 1024            # labelled positions whose logits exist at the same time


# ---------------------------------------------------------------------------------------------------------------------
# Loss

class Meter:
    """Sums over labelled positions, per step k: loss, counts, and how often the draft agrees with the target's argmax."""

    def __init__(self, depth: int):
        self.loss, self.count, self.top1, self.top5, self.prefix, self.whole = torch.zeros(6, depth).unbind()

    def add(self, loss: torch.Tensor, seen: torch.Tensor, top1: torch.Tensor, top5: torch.Tensor) -> None:
        """loss [K]; the rest [K, B, T] bool, indexed by the position i from which step k was drafted."""
        prefix, whole = top1.cummin(0).values, seen.cummin(0).values           # steps 1..k all right / all labelled
        for total, value in ((self.loss, loss), (self.count, seen), (self.top1, top1), (self.top5, top5),
                             (self.prefix, prefix & whole), (self.whole, whole)):
            total += value.detach().flatten(1).sum(1).cpu() if value.dim() > 1 else value.detach().cpu()

    def agreement(self, sums: torch.Tensor) -> list[float]:
        return (sums / self.count.clamp(min=1)).tolist()

    def tau(self) -> float:
        """1 + sum over k of the chance that steps 1..k all agree with the target: a greedy chain's expected tokens per pass."""
        return 1 + (self.prefix / self.whole.clamp(min=1)).sum().item()


def batch_loss(draft: Chimera, model: Llama, tokens: torch.Tensor, labelled: torch.Tensor, meter: Meter, kl: float,
               scale: float | None = None) -> float:
    """One batch -> its summed loss, counted in `meter`; with `scale` the gradient of scale * loss is added to the draft.

    Logits exist for CHUNK labelled positions at a time: each chunk's gradient with respect to the heads' inputs is kept and
    sent through the draft once, at the end.
    """
    short = max(0, draft.config.depth + 1 - tokens.shape[1])                    # every step needs a position
    tokens, labelled = (torch.nn.functional.pad(t, (0, short)) for t in (tokens, labelled))
    with torch.no_grad():
        hidden = model.hidden_states(tokens)
    with torch.set_grad_enabled(scale is not None):
        states = draft(tokens, hidden)                                          # per step k [B, T-k, .]
    leaves = [s.detach().requires_grad_(scale is not None) for s in states]
    seen, top1, top5 = torch.zeros(3, len(states), *tokens.shape, dtype=torch.bool, device=tokens.device)
    total = torch.zeros(len(states), device=tokens.device)
    for b, j in zip(*(index.split(CHUNK) for index in labelled.nonzero(as_tuple=True))):
        p, label, best = target_distribution(draft, model, hidden[b, j], tokens[b, j + 1])
        for k, leaf in enumerate(leaves, 1):
            has = j >= k                                                        # else the text is too short on the left
            at = (k - 1, b[has], j[has] - k)
            with torch.set_grad_enabled(scale is not None):
                logq = draft.head_logits(k - 1, leaf[at[1], at[2]]).float().log_softmax(-1)     # [C, W]
                loss = position_loss(logq, p[has], label[has], kl).sum()
            if scale is not None:
                (scale * loss).backward()
            top = logq.detach().topk(min(5, logq.shape[-1])).indices == best[has, None]     # [C, 5]
            seen[at], top1[at], top5[at] = True, top[:, 0], top.any(-1)
            total[k - 1] += loss.detach()
    if scale is not None and labelled.any():
        torch.autograd.backward(states, [torch.zeros_like(s) if s.grad is None else s.grad for s in leaves])
    meter.add(total, seen, top1, top5)
    return total.sum().item()


@torch.no_grad()
def target_distribution(draft: Chimera, model: Llama, hidden: torch.Tensor, label: torch.Tensor):
    """hidden [C, D], next tokens [C] -> (p over the draft's vocabulary [C, W], label and argmax of p as places in it or -1)."""
    logits = model.lm_head(hidden)                                              # [C, V]
    best, ids = logits.argmax(-1), draft.vocab_ids
    if ids is None:
        return logits.softmax(-1, dtype=torch.float32), label, best
    place = torch.full((logits.shape[1],), -1, device=ids.device)
    place[ids] = torch.arange(len(ids), device=ids.device)
    return logits[:, ids].softmax(-1, dtype=torch.float32), place[label], place[best]


def position_loss(logq: torch.Tensor, p: torch.Tensor, label: torch.Tensor, kl: float) -> torch.Tensor:
    """[C, W], [C, W], [C] -> [C]: cross-entropy (none where the label is outside the draft's vocabulary) + kl * KL(p || q)."""
    loss = -logq.gather(-1, label.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (label >= 0)
    return loss + kl * ((p.clamp(min=1e-30).log() * p).sum(-1) - (p * logq).sum(-1)) if kl else loss


# ---------------------------------------------------------------------------------------------------------------------
# The run: schedule, checkpoints, loop

def learning_rate(step: int, steps: int, peak: float) -> float:
    """1% warm-up (at least 10 steps), then a cosine to a tenth of the peak, never below. step counts optimiser steps."""
    warmup = max(10, steps // 100)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def save_atomically(write, path: Path) -> None:
    """write(temporary path), then fsync and rename: a reader sees the old file or the new one, never half of one."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save(out: Path, draft: Chimera, optimizer, settings: dict, step: int) -> None:
    """The exported draft (in the target's dtype) for sample.py, and everything that --resume needs in one file."""
    state = {"settings": settings, "step": step, "optimizer": optimizer.state_dict(), "draft": draft.state_dict()}
    draft.save_pretrained(out, torch.bfloat16 if settings["dtype_used"] != "float32" else None)
    save_atomically(lambda path: torch.save(state, path), out / "state.pt")     # last: --resume repeats a save cut off


@torch.no_grad()
def evaluate(draft: Chimera, model: Llama, samples: list, batch_size: int, kl: float, autocast) -> Meter:
    meter = Meter(draft.config.depth)
    for start in range(0, len(samples), batch_size):
        tokens, labelled = (t.to(model.embed.weight.device) for t in collate(samples[start:start + batch_size]))
        with autocast():
            batch_loss(draft, model, tokens, labelled, meter, kl)
    return meter


def report(meter: Meter) -> str:
    rows = [f"step {k}: top-1 {a:.3f}  top-5 {b:.3f}" for k, (a, b) in
            enumerate(zip(meter.agreement(meter.top1), meter.agreement(meter.top5)), 1)]
    return "\n".join([*rows, f"expected tau of a greedy chain: {meter.tau():.2f}"])


def batches_from(samples: list, args, step: int):
    """Yields the micro-batches from optimiser step `step` on: the data position is a function of the step alone."""
    per_epoch = -(-len(samples) // args.batch_size)
    position = step * args.grad_accum
    while True:
        order = batch_order(samples, args.batch_size, args.seed, position // per_epoch)
        for batch in order[position % per_epoch:]:
            yield collate([samples[i] for i in batch])
            position += 1


def optimise(draft, model, batches, optimizer, args, step: int, meter: Meter, autocast) -> int:
    """One optimiser step over grad_accum micro-batches, each weighted by its labelled tokens -> tokens used."""
    device = model.embed.weight.device
    group = [tuple(t.to(device) for t in next(batches)) for _ in range(args.grad_accum)]
    labelled = sum(mask.sum().item() for _, mask in group)
    optimizer.zero_grad(set_to_none=True)
    loss = 0.0
    for tokens, mask in group:
        with autocast():
            loss += batch_loss(draft, model, tokens, mask, meter, args.kl, 1 / max(1, labelled))
    norm = torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    for entry in optimizer.param_groups:
        entry["lr"] = learning_rate(step, args.steps, args.lr)
    if math.isfinite(loss) and torch.isfinite(norm):
        optimizer.step()
    else:
        tqdm.write(f"step {step}: loss {loss}, gradient {norm}: step skipped")
    return labelled


def train(args, draft: Chimera, model: Llama, samples: list, held_out: list, step: int, optimizer) -> None:
    autocast = lambda: torch.autocast(args.device_used, torch.bfloat16, enabled=args.dtype_used != "float32")     # noqa: E731
    out, settings = Path(args.out), vars(args)
    batches, meter, start, used = batches_from(samples, args, step), Meter(args.depth), time.time(), 0
    bar = tqdm(range(step, args.steps), initial=step, total=args.steps, desc="training", mininterval=1.0)
    for step in bar:
        used += optimise(draft, model, batches, optimizer, args, step, meter, autocast)
        if (step + 1) % 20 == 0 or step + 1 == args.steps:
            hits = " ".join(f"{a:.2f}" for a in meter.agreement(meter.top1))
            bar.set_postfix_str(f"loss {meter.loss.sum() / meter.count.max():.3f}, {used / (time.time() - start):.0f} tok/s, agree {hits}")
            meter = Meter(args.depth)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(out, draft, optimizer, settings, step + 1)
    print(f"held out ({len(held_out)} samples):")
    print(report(evaluate(draft, model, held_out, args.batch_size, args.kl, autocast)))
    print(f"draft in {out}; try: python sample.py --ckpt {args.ckpt} --draft {out} --compare")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ckpt", help="folder of the frozen target, Hugging Face layout")
    parser.add_argument("--data", nargs="+", metavar="FILE", help="ShareGPT-form .json/.jsonl, or .txt with <|endoftext|> between texts; .gz of each")
    parser.add_argument("--out", required=True, help="folder for the draft and the training state; with --distill the .jsonl for the answers")
    parser.add_argument("--distill", nargs="+", metavar="FILE", help="do not train: let the target answer the prompts in these files; an earlier --out is continued")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="tokens per answer with --distill")
    parser.add_argument("--steps", type=int, help="optimiser steps (default: --epochs)")
    parser.add_argument("--epochs", type=float, default=2, help="passes over the data, if --steps is not given")
    parser.add_argument("--batch_size", type=int, default=8, help="samples per micro-batch")
    parser.add_argument("--grad_accum", type=int, default=1, help="micro-batches per optimiser step")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (2e-4 suits a 7B target)")
    parser.add_argument("--max_length", type=int, default=256, help="tokens per sample; the rest is cut off")
    parser.add_argument("--depth", type=int, default=5, help="steps K that the draft learns")
    parser.add_argument("--heads", choices=["light", "full"], default="light", help="light: the target's lm_head is shared; full: one of its own per step")
    parser.add_argument("--draft_vocab", type=int, default=0, help="draft only the N most frequent token ids of the answers (0: all)")
    parser.add_argument("--kl", type=float, default=1.0, help="weight of KL(target || draft) beside the cross-entropy")
    parser.add_argument("--held_out", type=int, default=64, help="samples kept apart for the final measurement")
    parser.add_argument("--chat", default="auto", help="chat template for conversations: auto, none, chatml")
    parser.add_argument("--save_every", type=int, default=200, help="optimiser steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out with its own settings")
    parser.add_argument("--seed", type=int, default=0, help="order of the data")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="of the frozen target; bfloat16 also computes the draft in it (float32 weights)")
    return parser.parse_args()


def check(args) -> None:
    if not args.ckpt or not (args.data or args.distill):
        raise ValueError("--ckpt and --data are needed (or --resume with the --out of an earlier run)")
    for name in ("batch_size", "grad_accum", "lr", "max_length", "depth", "save_every", "epochs", "max_new_tokens"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name} must be positive, not {getattr(args, name)}")
    for name in ("held_out", "draft_vocab", "kl"):
        if not 0 <= getattr(args, name) < math.inf:
            raise ValueError(f"--{name} must be 0 or more, not {getattr(args, name)}")
    if args.steps is not None and args.steps <= 0:
        raise ValueError(f"--steps must be positive, not {args.steps}")
    for path in args.distill or args.data:
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} not found; --data takes existing files")
    if (Path(args.out) / "config.json").exists():
        raise ValueError(f"{args.out} already holds a draft; continue it with --resume or choose another --out")


def load_run(out: str) -> tuple[dict, argparse.Namespace]:
    path = Path(out) / "state.pt"
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found; there is no run to resume in {out}")
    state = torch.load(path, map_location="cpu", weights_only=True)
    settings = state["settings"]
    return state, argparse.Namespace(**settings | {"out": out, "resume": True, "dtype": settings["dtype_used"]})


def main() -> None:
    args, state = parse_args(), None
    if args.resume:
        state, args = load_run(args.out)
        if state["step"] >= args.steps:
            print(f"the run in {args.out} is finished ({args.steps} steps)")
            return
    else:
        check(args)
    device = choose_device(args.device)
    model, tok = load_target(args.ckpt, device, args.dtype)
    args.device_used, args.dtype_used = device.type, str(model.embed.weight.dtype).removeprefix("torch.")
    chat = choose_chat(args.chat, tok)
    if args.distill:
        return distill(model, tok, chat, args.distill, args.out, args.batch_size, args.max_length, args.max_new_tokens, args.seed)
    samples = load_samples(args.data, tok, chat, min(args.max_length, model.config.max_position_embeddings))
    rng = random.Random(args.seed)
    rng.shuffle(samples)
    held_out, samples = samples[:args.held_out], samples[args.held_out:]
    if len(samples) < args.batch_size:
        raise ValueError(f"{len(samples)} samples are left for training, one batch needs {args.batch_size}; give more --data")
    args.steps = args.steps or math.ceil(args.epochs * len(samples) / args.batch_size / args.grad_accum)
    print("settings:", json.dumps(vars(args)))
    answers = sum(int(a.sum()) for _, a in samples)
    print(f"data: {len(samples)} samples, {answers} answer tokens, {len(held_out)} held out")
    draft = new_draft(args, model, samples)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=args.lr, weight_decay=0.0)
    if state:
        draft.load_state_dict(state["draft"])
        optimizer.load_state_dict(state["optimizer"])
    Path(args.out).mkdir(parents=True, exist_ok=True)
    train(args, draft, model, samples, held_out, state["step"] if state else 0, optimizer)


def new_draft(args, model: Llama, samples: list) -> Chimera:
    size = min(args.draft_vocab, model.config.vocab_size - 1)
    ids = frequent_ids(samples, size, model.config.vocab_size).to(model.embed.weight.device) if size else None
    torch.manual_seed(args.seed)
    draft = Chimera(ChimeraConfig(depth=args.depth, heads=args.heads, draft_vocab=size), model, ids)
    return draft.float()                        # float32 master weights, whatever the target's dtype


if __name__ == "__main__":
    run(main)
