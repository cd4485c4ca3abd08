"""Trains the bundled storyteller: a small LLaMA from text, or a deeper one from a shallower one.

    python assets/pretrain.py --init DIR --layers 16 --data stories.train.txt.gz --valid stories.valid.txt.gz --out DIR

Each story is <s> ... </s>; windows of 256 tokens are cut anywhere. New layers start as the identity, spread evenly.
Goes on from --out where it was stopped. Says bits per byte on the first 60 stories of --valid at the end.
"""
import argparse
import copy
import json
import math
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import run
from data import read_records
from model import Llama, Tokenizer

LENGTH = 256


def deepen(model: Llama, layers: int) -> Llama:
    """The same function with more layers: a new one is a copy of the one before it that adds nothing yet."""
    old, where = list(model.layers), torch.linspace(0, len(model.layers) - 1, layers).round().int().tolist()
    model.config.num_hidden_layers, blocks = layers, []
    for position, source in enumerate(where):
        block = copy.deepcopy(old[source])
        if position and where[position - 1] == source:
            block.o_proj.weight.zero_()
            block.down_proj.weight.zero_()
        blocks.append(block)
    model.layers = torch.nn.ModuleList(blocks)
    return model


def learning_rate(step: int, steps: int, peak: float) -> float:
    """50 steps of warm-up, then linear to 2%."""
    return peak * min((step + 1) / 50, 1 - 0.98 * step / steps)


@torch.no_grad()
def bits_per_byte(model: Llama, tok: Tokenizer, stories: list[str]) -> float:
    """On the first LENGTH tokens of each story, the first token given."""
    nats = letters = 0
    for story in stories:
        ids = tok.encode(story)[:LENGTH + 1]
        logits = model(torch.tensor([ids[:-1]]))[0]
        nats += F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item()
        letters += len(tok.decode(ids).encode())
    return nats / math.log(2) / letters


def train(model: Llama, tokens: torch.Tensor, args) -> None:
    for parameter in model.requires_grad_(True).parameters():
        parameter.data = parameter.data.contiguous()        # by rows: faster to train
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer, state, first = torch.optim.AdamW(groups, betas=(0.9, 0.95)), Path(args.out, "state.pt"), 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    bar, mean = tqdm(range(first, args.steps), initial=first, total=args.steps), None
    for step in bar:
        generator = torch.Generator().manual_seed(args.seed + step)
        starts = torch.randint(len(tokens) - LENGTH - 1, (args.batch_size,), generator=generator)
        window = tokens[starts[:, None] + torch.arange(LENGTH + 1)]             # [B, LENGTH + 1]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        optimizer.step()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        bar.set_postfix_str(f"loss {mean:.3f}")
        if (step + 1) % 100 == 0 or step + 1 == args.steps:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1},
                       state.with_suffix(".new"))
            os.replace(state.with_suffix(".new"), state)
    model.requires_grad_(False)


@torch.no_grad()
def average(model: Llama, states: list[str]) -> None:
    """The mean of the model's weights and those in the state.pt files, in place: often better than each of them
    (Wortsman et al., arXiv 2203.05482)."""
    weights = [model.state_dict(), *(torch.load(path, weights_only=True)["model"] for path in states)]
    for name, parameter in model.named_parameters():
        parameter.data = torch.stack([w[name].contiguous() for w in weights]).mean(0)


def shard(folder: Path, most: int = 15 * 2**20) -> None:
    """model.safetensors -> shards of less than `most` bytes with an index: the published checkpoints' form."""
    tensors = load_file(folder / "model.safetensors")
    parts, size = [[]], 0
    for name in sorted(tensors):
        size += tensors[name].nbytes
        if size > most:
            parts, size = [*parts, []], tensors[name].nbytes
        parts[-1].append(name)
    files = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    for file, names in zip(files, parts):
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, names in zip(files, parts) for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "model.safetensors").unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", required=True, help="folder with the weights to start from, and the tokenizer")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--data", required=True)
    parser.add_argument("--valid", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=850)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mean", nargs="+", metavar="STATE", help="no training: average --init and these state.pt")
    args = parser.parse_args()
    tok, model = Tokenizer.from_pretrained(args.init), Llama.from_pretrained(args.init)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    held_out = list(read_records(Path(args.valid), Counter()))[:60]
    print(f"before: {bits_per_byte(model, tok, held_out):.4f} bits per byte")
    model = deepen(model, args.layers)
    if args.mean:
        average(model, args.mean)
    else:
        stories = (tok.encode(story) + sorted(tok.eos_ids)[:1] for story in read_records(Path(args.data), Counter()))
        train(model, torch.tensor([i for ids in stories for i in ids]), args)
    print(f"after: {bits_per_byte(model, tok, held_out):.4f} bits per byte")
    model.save_pretrained(args.out, torch.bfloat16)
    shutil.copy(Path(args.init, "tokenizer.model"), args.out)
    shard(Path(args.out))


if __name__ == "__main__":
    run(main)
