"""Plain and speculative decoding side by side: same process, weights, prompts and settings, interleaved by prompt.

    python bench.py --ckpt DIR --draft DIR --prompts prompts.jsonl --n 40

Speeds count from the first token on, all tokens over all seconds; the first prompt is run once more, before, uncounted.

    plain_tok_s, spec_tok_s   tokens per second without and with the draft
    speedup, interval_95      spec / plain, and what 95% of 1000 redrawings of the prompts give
    tau                       tokens per target pass after the prefill; speedup <= tau
    accept_by_depth           share of rounds whose accepted path is at least 1, 2, ... long
    efficiency                speedup / tau: what drafting and verifying leave of it
    t1_ms                     one plain step; of a round with the draft: t_verify_ms the target's pass over the tree,
                              t_draft_ms all drafting steps, t_other_ms accepting, committing and bookkeeping
    end_to_end_speedup        with the prefill; *_first_token_s: the prefill alone
    compile_s                 with --compile: the seconds of the first, uncounted runs, nearly all of it compiling
    peak_memory_mb            most memory the process (on cuda: the GPU's allocator) held
    identical                 texts equal token for token (temperature 0; in half precision near-ties may part them)
"""
import json
import random
import resource
import time
from collections import defaultdict
from pathlib import Path

import torch

from chat import CHATS, chat_prompt, choose_chat
from common import choose_device, dtype_name, load_target, parse_options, run
from data import broken
from sample import DRAFT, OPENINGS, STORIES, Result, decode, load_draft
from speculative import default_tree, fixed_rows
from tree import Tree

AUTO = ("chain:1", "chain:2", "chain:3", "chain:4", "chain:5", "2,2,2,1", "4,2,1", "6,4,1", "8,8,4,2", "12,12,6,2")


def read_prompts(path: Path, count: int) -> list[tuple[str, str]]:
    """Spec-Bench rows (`turns`, `category`: first turns) or plain lines -> (category, prompt), categories in turn."""
    groups = defaultdict(list)
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; convert the file") from None
    for number, line in enumerate(lines, 1):
        category, prompt = "all", line
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            try:
                row = json.loads(line)
                category, prompt = str(row.get("category", "all")), row["turns"][0]
                if not isinstance(row["turns"], list) or not isinstance(prompt, str) or broken(prompt):
                    raise ValueError
            except (ValueError, KeyError, IndexError, AttributeError, TypeError):
                raise ValueError(f"{path} line {number} has no \"turns\"; give Spec-Bench form or a .txt") from None
        groups[category].append((category, prompt))
    rows = [row for place in range(max(map(len, groups.values()), default=0))
            for group in groups.values() if place < len(group) for row in group[place:place + 1]]
    return rows[:count]


def speed(results: list[Result]) -> float:
    return sum(len(r.ids) - 1 for r in results) / max(1e-9, sum(r.ended - r.first for r in results))


def interval(plain: list[Result], spec: list[Result]) -> list[float]:
    """The middle 95% of the speedups over 1000 redrawings of the prompts (bootstrap)."""
    sums = [(len(a.ids) - 1, a.ended - a.first, len(b.ids) - 1, b.ended - b.first) for a, b in zip(plain, spec)]
    rng, ratios = random.Random(0), []
    for _ in range(1000):
        n, seconds, m, others = map(sum, zip(*rng.choices(sums, k=len(sums))))
        ratios.append(m / max(1e-9, others) / max(1e-9, n / max(1e-9, seconds)))
    return [round(sorted(ratios)[at], 3) for at in (25, 974)]


def figures(plain: list[Result], spec: list[Result]) -> dict:
    """The pooled figures of both sides over the same prompts; the header of this file says what each is."""
    rounds, steps = (sum(len(r.passes) - 1 for r in side) for side in (spec, plain))
    if not rounds or not steps:
        raise ValueError("no prompt got a second token, so there is no speed to compare; raise --max_new_tokens")
    speedup, count = speed(spec) / max(1e-9, speed(plain)), len(spec)
    reached = [len(ids) - 1 for r in spec for ids in r.passes[1:]]
    tau = sum(len(r.ids) - 1 for r in spec) / rounds        # the first token of each text came before any pass
    whole = [sum(r.ended - r.started for r in side) / sum(len(r.ids) for r in side) for side in (plain, spec)]
    first = [sum(r.first - r.started for r in side) / count for side in (plain, spec)]
    return {"plain_tok_s": round(speed(plain), 2), "spec_tok_s": round(speed(spec), 2), "speedup": round(speedup, 3),
            "interval_95": interval(plain, spec), "tau": round(tau, 3),
            "accept_by_depth": [round(sum(r >= k for r in reached) / rounds, 3) for k in range(1, max(reached) + 1)],
            "efficiency": round(speedup / tau, 3), "end_to_end_speedup": round(whole[0] / whole[1], 3),
            "t1_ms": round(1e3 * sum(r.ended - r.first for r in plain) / steps, 3),
            "plain_first_token_s": round(first[0], 4), "spec_first_token_s": round(first[1], 4),
            "identical": f"{sum(a.ids == b.ids for a, b in zip(plain, spec))}/{count}", "prompts": count,
            "tokens": sum(len(r.ids) - 1 for r in spec)}


def warm_up(model, tok, draft, prompts, args) -> float:
    """With --compile: one uncounted run for each side and size of its cache -> the seconds that compiling took."""
    nodes, start = {None: 0, draft: Tree.parse(args.tree).size}, time.perf_counter()
    runs = {(side, fixed_rows(len(ids) + args.max_new_tokens + nodes[side] + 1)): ids
            for _, ids in prompts for side in nodes}
    for (side, _), ids in runs.items():
        decode(model, ids, side, args, tok.eos_ids)
    return round(time.perf_counter() - start, 1)


def measure(model, tok, draft, prompts, args) -> dict[str, dict]:
    """-> figures by category and for "all"; what Ctrl-C leaves is reported."""
    sides = defaultdict(lambda: ([], []))
    try:
        for number, (category, prompt) in enumerate(prompts):
            order = (None, draft) if number % 2 == 0 else (draft, None)         # neither side always goes first
            for _ in range(2 if number == 0 else 1):                            # the first time only warms up
                results = {d is not None: decode(model, prompt, d, args, tok.eos_ids) for d in order}
            for key in {"all", category}:
                sides[key][0].append(results[False])
                sides[key][1].append(results[True])
    except KeyboardInterrupt:
        print(f"stopped after {len(sides['all'][0])} prompts")
    if not sides["all"][0]:
        raise ValueError("stopped before the first prompt was measured")
    return {key: figures(*sides[key]) for key in sorted(sides, key=lambda k: (k == "all", k))}


def stage_times(model, tok, draft, prompts, args) -> dict[str, float]:
    """Milliseconds per round, measured apart on a few prompts, since looking costs a little time on a GPU."""
    laps = []
    for _, prompt in prompts[:4]:
        decode(model, prompt, draft, args, tok.eos_ids, on_round=lambda r: laps.append(r.seconds))
    times = torch.tensor(laps or [[0.0] * 4]).mean(0) * 1e3                     # draft, verify, accept, commit
    return {"t_draft_ms": round(times[0].item(), 3), "t_verify_ms": round(times[1].item(), 3),
            "t_other_ms": round(times[2:].sum().item(), 3)}


def fastest_tree(model, tok, draft, prompts, args) -> str:
    """--tree auto: every tree of AUTO that this draft can fill, on the first four prompts."""
    depth, best = getattr(draft.config, "depth", 5), {}
    for tree in (t for t in AUTO if Tree.parse(t).depth <= depth):
        args.tree = tree
        decode(model, prompts[0][1], draft, args, tok.eos_ids)
        best[tree] = speed([decode(model, prompt, draft, args, tok.eos_ids) for _, prompt in prompts[:4]])
        print(f"tree {tree}: {best[tree]:.1f} tokens/s", flush=True)
    return max(best, key=best.get)


def peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 1e6)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)


OPTIONS = {
    "ckpt": dict(default=str(STORIES), help="folder of the target model"),
    "draft": dict(default=str(DRAFT), help="folder of its Chimera draft, or of a smaller LLaMA"),
    "prompts": dict(default=str(OPENINGS), help="Spec-Bench form .jsonl (first turns), or text, one prompt a line"),
    "n": dict(type=int, default=20, help="prompts, spread evenly over the categories"),
    "chat": dict(default="auto", help=f"chat template: {', '.join(CHATS)}"),
    "max_new_tokens": dict(type=int, default=128, help="tokens per prompt, at least 2"),
    "temperature": dict(type=float, default=0.0, help="0: greedy"),
    "top_k": dict(type=int, default=0, help="0: off"),
    "top_p": dict(type=float, default=1.0, help="1: off"),
    "tree": dict(help="chain:K, nodes per depth as 4,8,8, index paths as JSON, or auto: the fastest of a few on the "
                 "first prompts; not given: the draft's own"),
    "seed": dict(type=int, default=0, help="of the random draws"),
    "device": dict(default="auto", choices=["auto", "cpu", "cuda"], help="auto: cuda if there is one"),
    "dtype": dict(default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="auto: the faster one"),
    "compile": dict(action="store_true", help="torch.compile both sides' steps (sample.py --compile)"),
    "threads": dict(type=int, help="of the CPU; not given: torch's own choice"),
    "json": dict(metavar="FILE", help="also write the figures there"),
}


def check(args) -> None:
    if args.max_new_tokens < 2:
        raise ValueError(f"--max_new_tokens must be 2 or more to measure a speed, not {args.max_new_tokens}")
    for name in ("n", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} must be 1 or more, not {getattr(args, name)}")
    if args.threads:
        torch.set_num_threads(args.threads)


def show(table: dict[str, dict]) -> None:
    if len(table) > 2:
        print("\n| category | prompts | plain tok/s | with draft | speedup | tau |\n|---|---|---|---|---|---|")
        for name, row in table.items():
            print(f"| {name} | {row['prompts']} | {row['plain_tok_s']} | {row['spec_tok_s']} | {row['speedup']} | "
                  f"{row['tau']} |")
    print("\n" + "\n".join(f"{key:20} {value}" for key, value in table["all"].items()))


def main() -> None:
    args = parse_options(__doc__, OPTIONS)
    check(args)
    device = choose_device(args.device)
    model, tok = load_target(args.ckpt, device, args.dtype)
    draft, chat = load_draft(args.draft, model), choose_chat(args.chat, tok, args.ckpt)
    room = model.config.max_position_embeddings - args.max_new_tokens
    rows = read_prompts(Path(args.prompts), args.n)
    prompts = [(category, chat_prompt(tok, chat, [text])) for category, text in rows]
    fitting = [row for row in prompts if 0 < len(row[1]) <= room]
    if not fitting:
        raise ValueError(f"{args.prompts} holds no prompt that leaves room for {args.max_new_tokens} tokens")
    if len(fitting) < len(prompts):
        print(f"{len(prompts) - len(fitting)} prompts left out: longer than {room} tokens")
    args.tree = args.tree or default_tree(draft, args.temperature)
    args.tree = fastest_tree(model, tok, draft, fitting, args) if args.tree == "auto" else args.tree
    setting = {"ckpt": args.ckpt, "draft": args.draft, "device": device.type, "threads": torch.get_num_threads(),
               "tree": args.tree, "chat": chat, "dtype": dtype_name(model), "nodes": Tree.parse(args.tree).size,
               "temperature": args.temperature, "max_new_tokens": args.max_new_tokens}
    print("  ".join(f"{key} {value}" for key, value in setting.items()))
    waited = {"compile_s": warm_up(model, tok, draft, fitting, args)} if args.compile else {}
    table = measure(model, tok, draft, fitting, args)
    table["all"] |= waited | stage_times(model, tok, draft, fitting, args) | {"peak_memory_mb": peak_memory_mb(device)}
    show(table)
    if args.json:
        Path(args.json).write_text(json.dumps(setting | table["all"] | {"categories": table}, indent=2))


if __name__ == "__main__":
    run(main)
