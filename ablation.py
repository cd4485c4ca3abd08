"""What each part of the draft is worth: trains one draft per arm, all for the same number of steps, and measures them.

    python ablation.py --data answers.jsonl --raw stories.txt.gz --out out/ablation
    python ablation.py --ckpt DIR --data answers.jsonl --out out/ablation2 --arms 0 4 8 --questions spec_bench.jsonl

Each arm is the default draft with one thing changed (as in the paper, and more). Figures: top-1 agreement
by depth on held-out samples, tau and speedup of a greedy chain on held-out openings (bench.py). A finished arm is not
trained again, so the loop can be stopped and started; the last thing printed is the table.
"""
import argparse
import json
from pathlib import Path

import torch

import bench
import train
from chat import chat_prompt, choose_chat
from common import defaults, load_target, run
from draft import Chimera, ChimeraState
from optim import Optimizer
from sample import OPENINGS, STORIES, settings


class WithoutTrigram(Chimera):
    """z sees the newest token only."""
    def encode(self, trigrams):
        return super().encode(torch.cat((torch.full_like(trigrams[..., :2], -1), trigrams[..., 2:]), -1))

    def tabulate(self):
        """The tables would know the neighbours."""


class WithoutContext(Chimera):
    """The block attends to the draft's own outputs, not to the target's states."""
    def context(self, hidden):
        return hidden[:, :0]

    def new_state(self, rows):
        return NoContextState(self, rows)


class NoContextState(ChimeraState):
    def observe(self, tokens, hidden):
        self.cache.length, self.pending, self.newest = 0, hidden[:0], hidden[-1:]
        self.length += len(hidden)


class WithoutResidual(Chimera):
    """The heads read hhat alone."""
    def head_input(self, step, h, hhat):
        return super().head_input(step, torch.zeros_like(h), hhat)


class HeadsAlone(Chimera):
    """No encoder, no block: each head reads the target's last state, as Medusa's do."""
    def forward(self, tokens, hidden):
        hidden, T = hidden.to(self.norm.weight.dtype), tokens.shape[1]
        return [self.head_input(k, hidden[:, :T - k - 1], torch.zeros_like(hidden[:, :T - k - 1]))
                for k in range(min(self.config.depth, T - 1))]

    def new_state(self, rows):
        return HeadsAloneState(self, rows)


class HeadsAloneState(ChimeraState):
    def observe(self, tokens, hidden):
        self.newest, self.length = hidden[-1:], self.length + len(hidden)

    def step(self, depth, trigrams, offsets, mask):
        h = self.newest.expand(len(trigrams), -1)
        return self.draft.head_logits(depth, self.draft.head_input(depth, h, torch.zeros_like(h)))


RAW = "raw stories instead of its own"
ARMS = {                        # name: (class, changed settings)
    "default (K = 5, light heads, KL)": (Chimera, {}),
    "without trigram": (WithoutTrigram, {}),
    "without context": (WithoutContext, {}),
    "without residual": (WithoutResidual, {}),
    "heads alone (Medusa-like)": (HeadsAlone, {}),
    "cross-entropy only": (Chimera, {"kl": 0.0}),
    "with state loss": (Chimera, {"state_loss": 1.0}),
    "AdamW instead of Muon": (Chimera, {"optimizer": "adamw"}),
    "later steps count less (0.8)": (Chimera, {"depth_decay": 0.8}),
    "full heads": (Chimera, {"heads": "full"}),
    "draft vocabulary 1024": (Chimera, {"draft_vocab": 1024}),
    "K = 3": (Chimera, {"depth": 3}),
    "K = 4": (Chimera, {"depth": 4}),
    "K = 6": (Chimera, {"depth": 6}),
    RAW: (Chimera, {"data": "raw"}),
}


def one_arm(name: str, model, tok, chat: str, base: argparse.Namespace, options) -> dict:
    """Trains and measures one arm -> its row; the draft stays in options.out/<number>."""
    cls, changed = ARMS[name]
    args = argparse.Namespace(**vars(base) | changed)
    args.data = options.raw if args.data == "raw" else options.data
    args.out = str(Path(options.out) / str(list(ARMS).index(name)))
    _, held_out = train.split_samples(argparse.Namespace(**vars(args) | {"data": options.data}), model, tok, chat)
    samples, _ = train.split_samples(args, model, tok, chat)
    draft = train.new_draft(args, model, samples, cls)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    optimizer = Optimizer(draft, args.optimizer, args.lr)
    if not train.train(args, draft, model, samples, held_out, optimizer, 0):
        raise KeyboardInterrupt                             # half an arm is no row
    meter = train.evaluate(draft, model, held_out, args)
    return {"agreement": meter.agreement(meter.top1), "top5": meter.agreement(meter.top5)}


def decode_arm(name: str, model, tok, chat: str, options) -> dict:
    """Greedy chains on prompts that no draft saw, beside plain decoding -> tau, speedup."""
    draft = ARMS[name][0].from_pretrained(Path(options.out) / str(list(ARMS).index(name)), model)
    args = settings(max_new_tokens=128, tree=f"chain:{draft.config.depth}")
    rows = bench.read_prompts(Path(options.questions), options.prompts)
    prompts = [(category, chat_prompt(tok, chat, [text])) for category, text in rows]
    figures = bench.measure(model, tok, draft, prompts, args)["all"]
    return {key: figures[key] for key in ("tau", "speedup", "identical")}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", default=str(STORIES))
    parser.add_argument("--data", nargs="+", required=True, help="the target's own texts")
    parser.add_argument("--raw", nargs="+", help="texts of somebody else, for the last arm")
    parser.add_argument("--out", required=True)
    parser.add_argument("--arms", nargs="+", type=int, default=range(len(ARMS)), help="numbers of the table's rows")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--draft_vocab", type=int, default=0)
    parser.add_argument("--questions", default=str(OPENINGS), help="what to decode: as bench.py --prompts")
    parser.add_argument("--prompts", type=int, default=20, help="how many of them")
    parser.add_argument("--dtype", default="float32", help="in which they are decoded")
    return parser.parse_args()


def main() -> None:
    options = parse_args()
    names = [name for number, name in enumerate(ARMS) if number in options.arms and (options.raw or name != RAW)]
    base = defaults(train.OPTIONS, data=options.data, steps=options.steps, save_every=options.steps, lr=options.lr,
                    rank=0, world=1, draft_vocab=options.draft_vocab, dtype_used=train.BUNDLED["dtype"],
                    device_used="cpu")
    device, rows_file = torch.device("cpu"), Path(options.out) / "rows.json"
    model, tok = load_target(options.ckpt, device, train.BUNDLED["dtype"])
    chat = choose_chat("auto", tok, options.ckpt)
    rows = json.loads(rows_file.read_text()) if rows_file.exists() else {}
    rows_file.parent.mkdir(parents=True, exist_ok=True)
    for name in (name for name in names if name not in rows):
        rows[name] = one_arm(name, model, tok, chat, base, options)
        rows_file.write_text(json.dumps(rows, indent=1))
    model, _ = load_target(options.ckpt, device, options.dtype)
    print("| arm | agreement by depth | tau | speedup |\n|---|---|---|---|")
    for name in names:
        row = rows[name] = rows[name] | decode_arm(name, model, tok, chat, options)
        agreement = " ".join(f"{a:.3f}"[1:] for a in row["agreement"])
        print(f"| {name} | {agreement} | {row['tau']:.2f} | {row['speedup']:.2f} |", flush=True)
    rows_file.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    run(main)
