"""What a round is made of, measured on this machine: three small tables.

    python costs.py --ckpt DIR --draft DIR --dtype bfloat16

1. T_verify(N) / T1: a target pass over N rows against a plain step. Flat means that checking is free.
2. A draft step, beside the bytes of weights that it reads.
3. A plain step against the context length: linear, with a small slope.
"""
import time
from pathlib import Path

import torch

from common import choose_device, dtype_name, load_target, parse_options, run
from draft import Chimera
from model import Llama
from sample import DRAFT, STORIES
from speculative import Generator, draft_tree, verify
from tree import Plan, Tree


def milliseconds(function, device: torch.device, seconds: float = 1.0) -> float:
    """The lower quartile over repetitions: other work on the machine only ever adds time."""
    times, end = [], time.perf_counter() + seconds
    function()
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return 1e3 * sorted(times)[len(times) // 4]


def cache_of(model: Llama, length: int, rows: int):
    """A cache that holds `length` positions of some text."""
    cache = model.new_cache(length + rows)
    tokens = torch.arange(length, device=model.embed.weight.device) % model.config.vocab_size
    for part in tokens.split(512):
        hidden = model.hidden_states(part[None], cache)
    return cache, hidden[0]


def pass_over(model: Llama, cache, rows: int) -> float:
    """ms of one target pass over a root and rows - 1 candidates for the next token."""
    device = model.embed.weight.device
    plan = Plan(Tree([(rank,) for rank in range(rows - 1)]), cache.length + rows, model.embed.weight)
    return milliseconds(lambda: verify(model, cache, plan, torch.full((rows,), 5, device=device)), device)


def draft_step(model: Llama, draft: Chimera, hidden: torch.Tensor) -> float:
    """ms of one of the K steps of a chain, the absorption of two accepted rows included."""
    plan = Plan(Tree.parse(f"chain:{draft.config.depth}"), len(hidden) + 64, model.embed.weight)
    state = draft.new_state(len(hidden) + 64)

    def draft_round(new=hidden[-2:]):
        state.length = len(hidden) - len(new)
        state.observe([], new)
        draft_tree(state, plan, [5, 6, 7], None, Generator())
    draft_round(hidden)
    return milliseconds(draft_round, hidden.device) / draft.config.depth


def step_bytes(draft: Chimera) -> int:
    """Weights that one step reads: trigram encoder (tables: three rows), block, one head, the shared lm_head."""
    parts = [draft.trigram_out, draft.block, draft.norm, draft.heads[0]]
    parts += [] if draft.table is not None else [draft.trigram_in]
    own = sum(p.numel() for part in parts for p in part.parameters())
    return (own + (draft.frozen["head"].numel() if draft.config.heads == "light" else 0)) * draft.norm.weight.itemsize


OPTIONS = {
    "ckpt": dict(default=str(STORIES), help="folder of the target model"),
    "draft": dict(default=str(DRAFT), help="folder of its Chimera draft"),
    "device": dict(default="auto", choices=["auto", "cpu", "cuda"], help="auto: cuda if there is one"),
    "dtype": dict(default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="auto: the faster one"),
    "context": dict(type=int, default=200, help="cached positions for the first two tables"),
}


@torch.inference_mode()
def main() -> None:
    args = parse_options(__doc__, OPTIONS)
    device = choose_device(args.device)
    model, _ = load_target(args.ckpt, device, args.dtype)
    draft, limit = Chimera.from_pretrained(Path(args.draft), model), model.config.max_position_embeddings
    cache, hidden = cache_of(model, min(args.context, limit // 2), 64)
    print(f"{args.ckpt}  {device.type} {dtype_name(model)}  threads {torch.get_num_threads()}  context {cache.length}")
    t1 = pass_over(model, cache, 1)
    weights = sum(p.numel() * p.itemsize for p in model.parameters()) - model.embed.weight.nbytes
    print(f"\nT1 {t1:.2f} ms for {weights / 1e6:.0f} MB of weights: {weights / t1 / 1e6:.1f} GB/s")
    print("\n| N | T_verify(N) / T1 |\n|---|---|")
    for rows in (2, 4, 6, 8, 12, 16, 24, 32):
        print(f"| {rows} | {pass_over(model, cache, rows) / t1:.2f} |")
    step, read = draft_step(model, draft, hidden), step_bytes(draft)
    print(f"\nT_draft {step:.3f} ms = {step / t1:.3f} T1 for {read / 1e6:.2f} MB: {read / step / 1e6:.1f} GB/s; those "
          f"bytes are {read / weights:.3f} of the target's\n\n| context | ms per token |\n|---|---|")
    for length in (n for n in (128, 256, 448, 1024, 2048, 4096) if n + 64 <= limit):
        print(f"| {length} | {pass_over(model, cache_of(model, length, 8)[0], 1):.2f} |", flush=True)


if __name__ == "__main__":
    run(main)
