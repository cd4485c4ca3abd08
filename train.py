"""Trains a Chimera draft on a frozen target: a parallel forward over a text trains all K steps (arXiv 2402.15758).

    python train.py --ckpt DIR --data answers.jsonl stories.txt.gz --out DIR --steps 2000

Loss: sum over steps k of [cross-entropy on the next token + kl * KL(p || q)], p the target's distribution there, q the
draft's; on answer tokens only. --out holds config.json and model.safetensors (what sample.py --draft reads), log.jsonl,
and state.pt, from which --resume continues exactly.
"""
import argparse
import json
import math
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm

from common import CHATS, choose_chat, choose_device, load_target, run
from data import batch_order, collate, frequent_ids, load_samples
from distill import distill
from draft import Chimera, ChimeraConfig
from loss import Meter, Weights, batch_loss
from model import Llama

MOST_BAD_STEPS = 20     # steps with a loss that is not finite before the run gives up


def learning_rate(step: int, steps: int, peak: float) -> float:
    """1% warm-up (at least 10 steps), then a cosine to a tenth of the peak, never below; counts optimiser steps."""
    warmup = max(10, steps // 100)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def save(out: Path, draft: Chimera, optimizer, settings: dict, step: int) -> None:
    """The exported draft for sample.py, and in state.pt everything that --resume needs.

    Each file is written beside its place, flushed to the disk and renamed: a kill leaves the old file or the new one.
    state.pt comes last, so that --resume repeats a save that was cut off between two of them; the very first time it
    comes first, so that there is something to resume.
    """
    scratch = out / "saving"
    draft.save_pretrained(scratch, getattr(torch, settings["dtype_used"]))
    torch.save({"settings": settings, "step": step, "optimizer": optimizer.state_dict(), "draft": draft.state_dict()},
               scratch / "state.pt")
    order = ("model.safetensors", "config.json", "state.pt")
    for name in order if step else order[::-1]:
        with open(scratch / name, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(scratch / name, out / name)
    scratch.rmdir()


def evaluate(draft: Chimera, model: Llama, samples: list, args) -> Meter:
    meter = Meter(draft.config.depth)
    for start in range(0, len(samples), args.batch_size):
        tokens, labelled = (t.to(model.embed.weight.device) for t in collate(samples[start:start + args.batch_size]))
        with autocast(args):
            batch_loss(draft, model, tokens, labelled, meter, loss_weights(args))
    return meter


def report(meter: Meter) -> str:
    pairs = zip(meter.agreement(meter.top1), meter.agreement(meter.top5))
    rows = [f"step {k}: top-1 {a:.3f}  top-5 {b:.3f}" for k, (a, b) in enumerate(pairs, 1)]
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


def loss_weights(args) -> Weights:
    return Weights(args.kl, args.state_loss, args.depth_decay)


def autocast(args):
    """Half-precision targets let the draft compute in bfloat16 too; its weights stay float32."""
    return torch.autocast(args.device_used, torch.bfloat16, enabled=args.dtype_used != "float32")


def optimise(draft, model, batches, optimizer, args, step: int, meter: Meter) -> tuple[float, int]:
    """One optimiser step over grad_accum micro-batches, each weighted by its labelled tokens -> (loss, tokens).

    The loss is the mean over labelled tokens, summed over the draft's steps. If it or the gradient is not finite, the
    weights stay as they are.
    """
    group = [tuple(t.to(model.embed.weight.device) for t in next(batches)) for _ in range(args.grad_accum)]
    labelled = sum(mask.sum().item() for _, mask in group)
    optimizer.zero_grad(set_to_none=True)
    loss = 0.0
    for tokens, mask in group:
        with autocast(args):
            summed = batch_loss(draft, model, tokens, mask, meter, loss_weights(args), 1 / max(1, labelled))
        loss += summed / max(1, labelled)
    norm = torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0).item()
    for entry in optimizer.param_groups:
        entry["lr"] = learning_rate(step, args.steps, args.lr)
    if labelled and math.isfinite(loss + norm):
        optimizer.step()
    return (loss if math.isfinite(norm) else math.nan), labelled


class Stop:
    """Ctrl-C and SIGTERM ask for a save after the running step instead of ending the process in the middle of it."""

    def __init__(self):
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self)

    def __call__(self, number, frame) -> None:
        self.asked = True


def train(args, draft: Chimera, model: Llama, samples: list, optimizer, step: int) -> bool:
    """Runs from `step` to args.steps -> whether it came to the end. Logs each step, saves every save_every steps."""
    out, stop, skipped = Path(args.out), Stop(), Counter()
    batches, meter, start, used = batches_from(samples, args, step), Meter(args.depth), time.time(), 0
    bar = tqdm(total=args.steps, initial=step, desc="training", mininterval=1.0, dynamic_ncols=True)
    with open(out / "log.jsonl", "a", encoding="utf-8") as log:
        while step < args.steps and not stop.asked:
            one = Meter(args.depth)
            loss, tokens = optimise(draft, model, batches, optimizer, args, step, one)
            skipped["loss not finite"] += not math.isfinite(loss)
            skipped["no labelled token"] += not tokens
            if skipped["loss not finite"] > MOST_BAD_STEPS:
                raise ValueError(f"the loss was not finite {MOST_BAD_STEPS} times; use --dtype float32 or a lower --lr")
            step, used, meter = step + 1, used + tokens, meter.merge(one)
            rate, hits = used / (time.time() - start), [round(x, 3) for x in one.agreement(one.top1)]
            log.write(json.dumps({"step": step, "loss": loss, "lr": optimizer.param_groups[0]["lr"], "tokens": tokens,
                                  "tokens_per_s": round(rate), "agreement": hits}) + "\n")
            bar.update()
            if step % 10 == 0:
                shown = " ".join(f"{x:.2f}" for x in meter.agreement(meter.top1))
                bar.set_postfix_str(f"loss {loss:.2f}, {rate:.0f} tok/s, agreement {shown}")
                meter = Meter(args.depth)
            if step % args.save_every == 0 or step == args.steps or stop.asked:
                log.flush()
                save(out, draft, optimizer, vars(args), step)
    bar.close()
    for reason, count in skipped.items():
        if count:
            print(f"{count} steps skipped: {reason}")
    return step == args.steps


OPTIONS = {
    "ckpt": dict(help="folder of the frozen target, Hugging Face layout"),
    "data": dict(nargs="+", metavar="FILE", help="ShareGPT-form .json or .jsonl, answers from --distill, or .txt with "
                 "<|endoftext|> between texts; .gz of each"),
    "out": dict(required=True, help="folder for draft and training state; with --distill the .jsonl for the answers"),
    "distill": dict(nargs="+", metavar="FILE", help="do not train: let the target answer the prompts in these files; "
                    "an earlier --out is continued"),
    "max_new_tokens": dict(type=int, default=256, help="tokens per answer with --distill"),
    "steps": dict(type=int, help="optimiser steps; not given: --epochs decides"),
    "epochs": dict(type=float, default=2, help="passes over the data, if --steps is not given"),
    "batch_size": dict(type=int, default=8, help="samples per micro-batch"),
    "grad_accum": dict(type=int, default=1, help="micro-batches per optimiser step"),
    "lr": dict(type=float, default=1e-3, help="peak learning rate (2e-4 suits a 7B target)"),
    "max_length": dict(type=int, default=256, help="tokens per sample, the rest is cut off; with --distill per prompt"),
    "depth": dict(type=int, default=5, help="steps K that the draft learns"),
    "heads": dict(choices=["light", "full"], default="light", help="light: the target's lm_head; full: one per step"),
    "draft_vocab": dict(type=int, default=0, help="propose only the N token ids most frequent in the answers; 0: all"),
    "kl": dict(type=float, default=1.0, help="weight of KL(target || draft) beside the cross-entropy"),
    "state_loss": dict(type=float, default=0.0, help="weight of smooth-L1 to the target's states (light heads)"),
    "depth_decay": dict(type=float, default=1.0, help="step k counts decay^(k-1)"),
    "held_out": dict(type=int, default=64, help="samples kept apart for the final measurement"),
    "chat": dict(default="auto", help=f"template for conversations: {', '.join(CHATS)}"),
    "save_every": dict(type=int, default=200, help="optimiser steps between checkpoints"),
    "resume": dict(action="store_true", help="continue the run in --out, with its own settings"),
    "seed": dict(type=int, default=0, help="of the order of the data, and of drawn answers"),
    "device": dict(default="auto", choices=["auto", "cpu", "cuda"], help="auto: cuda if there is one"),
    "dtype": dict(default="auto", choices=["auto", "float32", "bfloat16", "float16"],
                  help="of the frozen target; in half precision the draft computes in bfloat16, on float32 weights"),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, keywords in OPTIONS.items():
        parser.add_argument(f"--{name}", **keywords)
    return parser.parse_args()


def check(args) -> None:
    if not args.ckpt or not (args.data or args.distill):
        raise ValueError("--ckpt and --data are needed (or --resume with the --out of an earlier run)")
    for name in ("batch_size", "grad_accum", "lr", "max_length", "depth", "save_every", "epochs", "max_new_tokens",
                 "depth_decay"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name} must be positive, not {getattr(args, name)}")
    for name in ("held_out", "draft_vocab", "kl", "state_loss"):
        if not 0 <= getattr(args, name) < math.inf:
            raise ValueError(f"--{name} must be 0 or more, not {getattr(args, name)}")
    if args.state_loss and args.heads == "full":
        raise ValueError("--state_loss compares states, full heads make logits only; use --heads light")
    if args.steps is not None and args.steps <= 0:
        raise ValueError(f"--steps must be positive, not {args.steps}")
    for path in args.distill or args.data:
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} not found; --data takes existing files")
    if (Path(args.out) / "config.json").exists():
        raise ValueError(f"{args.out} already holds a draft; continue it with --resume or choose another --out")


def load_run(out: str) -> tuple[dict, argparse.Namespace]:
    """-> (state, settings) of the run in `out`; the settings are the saved ones, the dtype as it was chosen then."""
    path = Path(out) / "state.pt"
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found; there is no run to resume in {out}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        settings = state["settings"]
    except Exception as error:                              # torch.load raises many kinds for a damaged file
        raise ValueError(f"{path} is damaged ({type(error).__name__}); train again with another --out") from None
    return state, argparse.Namespace(**settings | {"out": out, "resume": True, "dtype": settings["dtype_used"]})


def new_draft(args, model: Llama, samples: list) -> Chimera:
    size = min(args.draft_vocab, model.config.vocab_size - 1)
    ids = frequent_ids(samples, size, model.config.vocab_size).to(model.embed.weight.device) if size else None
    torch.manual_seed(args.seed)
    draft = Chimera(ChimeraConfig(depth=args.depth, heads=args.heads, draft_vocab=size), model, ids)
    return draft.float()                        # float32 master weights, whatever the target's dtype


def split_samples(args, model: Llama, tok, chat: str) -> tuple[list, list]:
    """-> (samples to train on, samples held out), the same for the same files and seed."""
    samples = load_samples(args.data, tok, chat, min(args.max_length, model.config.max_position_embeddings))
    random.Random(args.seed).shuffle(samples)
    held_out, samples = samples[:args.held_out], samples[args.held_out:]
    if len(samples) < args.batch_size:
        raise ValueError(f"{len(samples)} samples are left for training, one batch needs {args.batch_size}; "
                         "give more --data")
    answers = sum(int(answer.sum()) for _, answer in samples)
    print(f"data: {len(samples)} samples, {answers} answer tokens, {len(held_out)} held out")
    return samples, held_out


def main() -> None:
    args, state = parse_args(), None
    if args.resume:
        state, args = load_run(args.out)
        if state["step"] >= args.steps:
            return print(f"the run in {args.out} is finished ({args.steps} steps)")
    else:
        check(args)
    device = choose_device(args.device)
    model, tok = load_target(args.ckpt, device, args.dtype)
    args.device_used, args.dtype_used = device.type, str(model.embed.weight.dtype).removeprefix("torch.")
    chat = choose_chat(args.chat, tok)
    if args.distill:
        return distill(model, tok, chat, args)
    samples, held_out = split_samples(args, model, tok, chat)
    args.steps = args.steps or math.ceil(args.epochs * len(samples) / args.batch_size / args.grad_accum)
    print("settings:", json.dumps(vars(args)))
    draft = new_draft(args, model, samples)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=args.lr, weight_decay=0.0)
    if state:
        draft.load_state_dict(state["draft"])
        optimizer.load_state_dict(state["optimizer"])
    else:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        save(Path(args.out), draft, optimizer, vars(args), 0)       # shows at once whether --out can be written
    if not train(args, draft, model, samples, optimizer, state["step"] if state else 0):
        return print(f"stopped and saved; continue with: python train.py --out {args.out} --resume")
    print(f"held out ({len(held_out)} samples):\n{report(evaluate(draft, model, held_out, args))}")
    print(f"draft in {args.out}; try: python sample.py --ckpt {args.ckpt} --draft {args.out} --compare")


if __name__ == "__main__":
    run(main)
