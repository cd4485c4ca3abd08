"""Trains a Chimera draft on a frozen target: a parallel forward over a text trains all K steps (arXiv 2402.15758).

    python train.py                                     (the bundled storyteller's draft anew, in about 3 minutes)
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
import sys
import time
import zlib
from collections import Counter
from functools import lru_cache
from itertools import count, islice
from pathlib import Path

import torch
from tqdm import tqdm

from chat import CHATS, choose_chat
from common import ASSETS, choose_device, dtype_name, load_target, parse_options, run
from data import HiddenCache, batch_order, collate, frequent_ids, load_samples
from distill import distill
from draft import Chimera, ChimeraConfig
from loss import CHUNK, Meter, Weights, batch_loss
from model import AVX2, Llama, LlamaConfig
from optim import Optimizer, learning_rate
from plot import training_chart
from runs import Stop, load_run, open_log, over_processes, processes, save
from sample import DRAFT, OPENINGS, STORIES
from speculative import generate
from tree import Tree

MOST_BAD_STEPS = 20     # steps with a loss that is not finite before the run gives up


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
    """Yields this process's micro-batches (indices, tokens, labelled) from optimiser step `step` on.

    The data position is a function of the step alone; with several processes each takes every world-th micro-batch.
    """
    per_epoch = -(-len(samples) // args.batch_size)
    order = lru_cache(1)(lambda epoch: batch_order(samples, args.batch_size, args.seed, epoch))
    for position in count(step * args.grad_accum * args.world + args.rank, args.world):
        batch = order(position // per_epoch)[position % per_epoch]
        yield batch, *collate([samples[i] for i in batch])


def loss_weights(args) -> Weights:
    return Weights(args.kl, args.state_loss, args.depth_decay)


def autocast(args):
    """Half-precision targets let the draft compute in bfloat16 too; its weights stay float32."""
    return torch.autocast(args.device_used, torch.bfloat16, enabled=args.dtype_used != "float32")


def optimise(draft, model, batches, optimizer, args, step: int, meter: Meter, cache=None) -> tuple[float, int]:
    """One optimiser step over grad_accum micro-batches of each process, weighted by labelled tokens -> (loss, tokens).

    The loss is the mean over labelled tokens, summed over the draft's steps. If it or the gradient is not finite, the
    weights stay as they are. Gradients are summed over processes by hand: DistributedDataParallel counts on one
    backward pass a step, and here each chunk of logits has its own.
    """
    device = model.embed.weight.device
    group = [(batch, tokens.to(device), mask.to(device)) for batch, tokens, mask in islice(batches, args.grad_accum)]
    sums = torch.tensor([0.0, sum(mask.sum().item() for _, _, mask in group)], device=device)
    over_processes(args, sums)
    labelled = max(1.0, sums[1].item())
    optimizer.zero_grad(set_to_none=True)
    for batch, tokens, mask in group:
        with autocast(args):
            hidden = cache.states(model, batch, tokens) if cache else None
            loss = batch_loss(draft, model, tokens, mask, meter, loss_weights(args), 1 / labelled, hidden)
        sums[0] += loss / labelled
    for parameter in draft.parameters():                    # one that had no part in this batch is summed all the same
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    loss = sums[:1]
    over_processes(args, loss, *(parameter.grad for parameter in draft.parameters()), *vars(meter).values())
    norm = torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0).item()
    for entry in optimizer.param_groups:
        entry["lr"] = learning_rate(step, args.steps, args.lr)
    if sums[1] and math.isfinite(loss.item() + norm):
        optimizer.step()
    return (loss.item() if math.isfinite(norm) else math.nan), int(sums[1].item())


def train(args, draft: Chimera, model: Llama, samples: list, held_out: list, optimizer, step: int) -> bool:
    """Runs from `step` to args.steps -> whether it came to the end. Logs each step; saves and measures at times."""
    out, stop, skipped, first = Path(args.out), Stop(), Counter(), args.rank == 0
    cache = HiddenCache(Path(args.hidden_cache, f"rank{args.rank}"), samples, model) if args.hidden_cache else None
    batches, meter, start, used = batches_from(samples, args, step), Meter(args.depth), time.time(), 0
    bar = tqdm(total=args.steps, initial=step, desc="training", mininterval=1.0, disable=not first, dynamic_ncols=True)
    with open_log(out / "log.jsonl", step) if first else open(os.devnull, "w") as log:
        while step < args.steps and not stop.now:
            one = Meter(args.depth)
            loss, tokens = optimise(draft, model, batches, optimizer, args, step, one, cache)
            skipped["loss not finite"] += not math.isfinite(loss)
            skipped["no labelled token"] += not tokens
            if skipped["loss not finite"] > MOST_BAD_STEPS:
                raise ValueError(f"the loss was not finite {MOST_BAD_STEPS} times; use --dtype float32 or a lower --lr")
            step, used, meter = step + 1, used + tokens, meter.merge(one)
            rate, hits = used / (time.time() - start), [round(x, 3) for x in one.agreement(one.top1)]
            lr = optimizer.param_groups[0]["lr"]
            stop.agree(args)
            due = first and (step % args.save_every == 0 or step == args.steps)
            row = {"step": step, "loss": loss, "lr": lr, "tokens": tokens, "tokens_per_s": round(rate),
                   "agreement": hits}
            if due and held_out:
                row["held_out_tau"] = round(evaluate(draft, model, held_out, args).tau(), 3)
            log.write(json.dumps(row) + "\n")
            bar.update()
            if step % 10 == 0:
                shown = " ".join(f"{x:.2f}" for x in meter.agreement(meter.top1))
                bar.set_postfix_str(f"loss {loss:.2f}, lr {lr:.1e}, {rate:.0f} tok/s, agreement {shown}")
                meter = Meter(args.depth)
            if due or (first and stop.now):
                log.flush()
                save(out, draft, optimizer, vars(args), step)
    bar.close()
    stop.restore()
    for reason, times in skipped.items():
        if times and first:
            print(f"{times} steps skipped: {reason}")
    return step == args.steps


OPTIONS = {
    "ckpt": dict(help="folder of the frozen target, Hugging Face layout"),
    "data": dict(nargs="+", metavar="FILE", help="ShareGPT-form .json or .jsonl, answers from --distill, or .txt with "
                 "<|endoftext|> between texts; .gz of each"),
    "out": dict(default="out", help="folder for draft and training state; with --distill the .jsonl for the answers"),
    "force": dict(action="store_true", help="begin anew although --out holds a draft: it is overwritten"),
    "distill": dict(nargs="+", metavar="FILE", help="do not train: let the target answer the prompts in these files; "
                    "an earlier --out is continued"),
    "max_new_tokens": dict(type=int, default=256, help="tokens per answer with --distill"),
    "steps": dict(type=int, help="optimiser steps; not given: --epochs decides"),
    "epochs": dict(type=float, default=2, help="passes over the data, if --steps is not given"),
    "batch_size": dict(type=int, default=8, help="samples per micro-batch"),
    "grad_accum": dict(type=int, default=1, help="micro-batches per optimiser step"),
    "optimizer": dict(choices=["muon", "adamw"], default="muon",
                      help="muon: for the matrices, AdamW for the rest; adamw: for all, the paper's"),
    "lr": dict(type=float, default=2e-3, help="peak learning rate (1e-3 with AdamW; 2e-4 suits a 7B target)"),
    "max_length": dict(type=int, default=512, help="tokens per sample, the rest is cut off; with --distill per prompt"),
    "init": dict(metavar="DIR", help="start from the weights of this earlier draft for the same target"),
    "depth": dict(type=int, default=5, help="steps K that the draft learns"),
    "heads": dict(choices=["light", "full"], default="light", help="light: the target's lm_head; full: one per step"),
    "draft_vocab": dict(type=int, default=0, help="propose only the N token ids most frequent in the answers; 0: all"),
    "greedy_tree": dict(default="", help="the draft's default tree at temperature 0 (sample.py --tree); none: a chain"),
    "sampled_tree": dict(default="", help="the same above temperature 0"),
    "kl": dict(type=float, default=1.0, help="weight of KL(target || draft) beside the cross-entropy"),
    "state_loss": dict(type=float, default=0.0, help="weight of smooth-L1 to the target's states (light heads)"),
    "depth_decay": dict(type=float, default=1.0, help="step k counts decay^(k-1)"),
    "held_out": dict(type=int, default=64, help="samples kept apart for the final measurement"),
    "chat": dict(default="auto", help=f"template for conversations: {', '.join(CHATS)}"),
    "hidden_cache": dict(metavar="DIR", help="keep the target's hidden states there (memory-mapped), so that further "
                         "epochs skip its forward"),
    "save_every": dict(type=int, default=200, help="optimiser steps between checkpoints, each with held-out tau"),
    "resume": dict(action="store_true", help="continue the run in --out, with its own settings"),
    "seed": dict(type=int, default=0, help="of the order of the data, and of drawn answers"),
    "device": dict(default="auto", choices=["auto", "cpu", "cuda"], help="auto: cuda if there is one"),
    "dtype": dict(default="auto", choices=["auto", "float32", "bfloat16", "float16"],
                  help="of the frozen target; in half precision the draft computes in bfloat16, on float32 weights"),
}


BUNDLED = {"ckpt": str(STORIES), "data": [str(ASSETS / "written.jsonl.gz")], "steps": 70, "batch_size": 16,
           "lr": 3e-3, "max_length": 256, "dtype": "float32" if AVX2 else "bfloat16", "save_every": 35,
           "sampled_tree": "chain:2"}


def parse_args() -> argparse.Namespace:
    """Without --ckpt and --data: the bundled storyteller, its text and settings, where nothing else was given."""
    args = parse_options(__doc__, OPTIONS)
    if not (args.ckpt or args.data or args.distill or args.resume):
        unset = {k: v for k, v in BUNDLED.items() if getattr(args, k) == OPTIONS[k].get("default")}
        args = argparse.Namespace(**vars(args) | unset)
    return args


def check(args) -> None:
    if not args.ckpt or not (args.data or args.distill):
        raise ValueError("--ckpt and --data are needed together, or neither for the bundled storyteller "
                         "(--resume needs only the --out of an earlier run)")
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
            raise FileNotFoundError(f"{path} not found; --data and --distill take existing files")
    for spec in filter(None, (args.greedy_tree, args.sampled_tree)):
        if Tree.parse(spec).depth > args.depth:
            raise ValueError(f"tree {spec} is {Tree.parse(spec).depth} deep, the draft has --depth {args.depth}")
    if (Path(args.out) / "config.json").exists() and not args.force:
        raise ValueError(f"{args.out} already holds a draft; continue it with --resume, choose another --out, or "
                         "overwrite it with --force")


def new_draft(args, model: Llama, samples: list, cls: type[Chimera] = Chimera) -> Chimera:
    size = min(args.draft_vocab, model.config.vocab_size - 1)
    ids = frequent_ids(samples, size, model.config.vocab_size).to(model.embed.weight.device) if size else None
    torch.manual_seed(args.seed)
    config = ChimeraConfig(args.depth, args.heads, size, args.greedy_tree, args.sampled_tree)
    draft = cls(config, model, ids).float()     # float32 master weights, whatever the target's dtype
    if args.init:
        start_from(draft, Chimera.from_pretrained(args.init, model))
    return draft


@torch.no_grad()
def start_from(draft: Chimera, earlier: Chimera) -> None:
    """Takes over every weight of the same name and shape, but full heads only if they are for the same vocabulary.
    Steps that the earlier draft lacks begin as its last."""
    theirs, last = dict(earlier.named_parameters()), f"heads.{earlier.config.depth - 1}.weight"
    theirs = {name: theirs[last] for name, _ in draft.named_parameters() if name.startswith("heads.")} | theirs
    ours, before = (None if d.vocab_ids is None else d.vocab_ids.tolist() for d in (draft, earlier))
    if draft.config.heads == "full" and ours != before:
        theirs = {name: weight for name, weight in theirs.items() if not name.startswith("heads.")}
    for name, parameter in draft.named_parameters():
        if name in theirs and theirs[name].shape == parameter.shape:
            parameter.copy_(theirs[name])


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


def beside_bundled(out: str, model: Llama, tok) -> str:
    """Greedy tau on the held-out openings: this draft, and the bundled one."""
    taus = []
    for folder in (out, DRAFT):
        draft, tokens, passes = Chimera.from_pretrained(folder, model), 0, 0
        for opening in OPENINGS.read_text("utf-8").splitlines()[:8]:
            rounds = list(generate(model, tok.encode(opening), draft, max_new_tokens=96, eos_ids=tok.eos_ids))[1:]
            tokens, passes = tokens + sum(map(len, rounds)), passes + len(rounds)
        taus.append(tokens / max(1, passes))
    return f"tau on 8 held-out openings, greedy: {taus[0]:.2f}; the bundled draft: {taus[1]:.2f}"


def memory_estimate(draft: Chimera, target: LlamaConfig, target_bytes: int, args) -> dict[str, float]:
    """GB by part, before anything is allocated for training: a guide, not a measurement."""
    own = sum(p.numel() for p in draft.parameters())
    B, T, D, K = args.batch_size, args.max_length, target.hidden_size, args.depth
    scores = 3 * K * B * target.num_attention_heads * T * T * 4                 # kept for the backward pass
    states = (K + 1) * B * T * (12 * D + 4 * target.intermediate_size) * (4 if args.dtype_used == "float32" else 2)
    logits = CHUNK * (4 * target.vocab_size + 20 * (args.draft_vocab or target.vocab_size))
    parts = {"target": target_bytes, "draft, 16 bytes a weight": 16 * own, "batch": scores + states + logits}
    return {name: size / 1e9 for name, size in parts.items()} | {"in all": sum(parts.values()) / 1e9}


def main() -> None:
    args, state = parse_args(), None
    if args.resume:
        state, args = load_run(args.out)
        if state["step"] >= args.steps:
            return print(f"the run in {args.out} is finished ({args.steps} steps)")
    else:
        check(args)
    args.device_used = choose_device(args.device).type
    processes(args)
    model, tok = load_target(args.ckpt, torch.device(args.device_used), args.dtype)
    args.dtype_used = dtype_name(model)
    chat = args.chat_used = choose_chat(args.chat, tok, args.ckpt)
    if args.distill and args.world > 1:
        raise ValueError("--distill runs in one process; start it without torchrun")
    if args.distill:
        return distill(model, tok, chat, args)
    samples, held_out = split_samples(args, model, tok, chat)
    args.steps = args.steps or math.ceil(args.epochs * len(samples) / args.batch_size / args.grad_accum / args.world)
    data = zlib.crc32(torch.cat([ids for ids, _ in samples]).numpy().tobytes())
    if state and data != args.data_crc:
        raise ValueError("the texts in --data are not those that this run began with; restore the files, or train anew "
                         "with another --out")
    args.data_crc = data
    print("settings:", json.dumps(vars(args)))
    draft = new_draft(args, model, samples)
    target_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    parts = memory_estimate(draft, model.config, target_bytes, args)
    print("memory, about:", ", ".join(f"{name} {size:.1f} GB" for name, size in parts.items()))
    optimizer = Optimizer(draft, args.optimizer, args.lr)
    if state:
        draft.load_state_dict(state["draft"])
        optimizer.load_state_dict(state["optimizer"])
    elif args.rank == 0:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        save(Path(args.out), draft, optimizer, vars(args), 0)       # shows at once whether --out can be written
    if not train(args, draft, model, samples, held_out, optimizer, state["step"] if state else 0):
        return print(f"stopped and saved; continue with: python train.py --out {args.out} --resume")
    if args.rank == 0:
        rows = [json.loads(line) for line in Path(args.out, "log.jsonl").read_text().splitlines()]
        training_chart(rows, Path(args.out))
        print(f"held out ({len(held_out)} samples):\n{report(evaluate(draft, model, held_out, args))}")
        if args.ckpt == BUNDLED["ckpt"]:
            print(beside_bundled(args.out, model, tok))
        print(f"draft in {args.out}; try: python sample.py --ckpt {args.ckpt} --draft {args.out} --compare")


if __name__ == "__main__":
    run(main)
    if torch.distributed.is_initialized():      # gloo's threads can abort an interpreter that is shutting down
        torch.distributed.barrier()
        sys.stdout.flush()
        os._exit(0)
