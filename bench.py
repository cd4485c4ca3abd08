"""Plain and speculative decoding side by side: same process, weights, prompts and settings, interleaved by prompt.

    python bench.py --ckpt DIR --draft DIR --prompts prompts.jsonl --n 40

Speeds count from the first token on (the prefill is reported apart) and are pooled: all tokens over all seconds.
speedup = spec_tok_s / plain_tok_s; tau = tokens per target pass after the prefill; efficiency = speedup / tau.
"""
import json
from collections import defaultdict
from pathlib import Path

from common import CHATS, chat_prompt, choose_chat, choose_device, dtype_name, load_target, parse_options, run
from sample import DRAFT, STORIES, Result, decode, load_draft
from speculative import default_tree
from tree import Tree

OPENINGS = Path(__file__).parent / "assets" / "openings.txt"


def read_prompts(path: Path, count: int) -> list[tuple[str, str]]:
    """Spec-Bench rows (`turns`, `category`: first turns) or plain lines -> (category, prompt), categories in turn."""
    groups = defaultdict(list)
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        category, prompt = "all", line
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            try:
                row = json.loads(line)
                category, prompt = str(row.get("category", "all")), row["turns"][0]
                if not isinstance(row["turns"], list) or not isinstance(prompt, str):
                    raise ValueError
            except (ValueError, KeyError, IndexError, AttributeError, TypeError):
                raise ValueError(f"{path} line {number} has no \"turns\"; give Spec-Bench form or a .txt") from None
        groups[category].append((category, prompt))
    rows = [row for place in range(max(map(len, groups.values()), default=0))
            for group in groups.values() if place < len(group) for row in group[place:place + 1]]
    return rows[:count]


class Side:
    """The pooled sums of one way of decoding."""

    def __init__(self):
        self.tokens = self.seconds = self.first = self.total = self.passes = 0
        self.reached = defaultdict(int)                     # rounds whose accepted path was at least k long

    def add(self, result: Result) -> None:
        self.tokens += len(result.ids) - 1
        self.seconds += result.ended - result.first
        self.first += result.first - result.started
        self.total += result.ended - result.started
        self.passes += len(result.passes) - 1
        for ids in result.passes[1:]:
            for depth in range(1, len(ids)):
                self.reached[depth] += 1

    @property
    def speed(self) -> float:
        return self.tokens / max(1e-9, self.seconds)

    def whole(self, prompts: int) -> float:
        """Seconds per token with the prefill and the first tokens."""
        return self.total / (self.tokens + prompts)

    @property
    def tau(self) -> float:
        return self.tokens / max(1, self.passes)        # the first token of each text came before any pass


def figures(plain: Side, spec: Side, identical: list[bool]) -> dict:
    if not plain.passes or not spec.passes:
        raise ValueError("no prompt got a second token, so there is no speed to compare; raise --max_new_tokens")
    speedup, count = spec.speed / max(1e-9, plain.speed), len(identical)
    return {"plain_tok_s": round(plain.speed, 2), "spec_tok_s": round(spec.speed, 2), "speedup": round(speedup, 3),
            "tau": round(spec.tau, 3), "efficiency": round(speedup / spec.tau, 3),
            "accept_by_depth": [round(spec.reached[k] / max(1, spec.passes), 3) for k in sorted(spec.reached)],
            "end_to_end_speedup": round(plain.whole(count) / spec.whole(count), 3),
            "plain_first_token_s": round(plain.first / count, 4),
            "spec_first_token_s": round(spec.first / count, 4),
            "identical": f"{sum(identical)}/{count}", "prompts": count, "tokens": spec.tokens}


def measure(model, tok, draft, prompts, args) -> dict[str, dict]:
    """-> figures by category and for "all"; what Ctrl-C leaves is reported."""
    sides, same = defaultdict(lambda: (Side(), Side())), defaultdict(list)
    try:
        for number, (category, prompt) in enumerate(prompts):
            order = (None, draft) if number % 2 == 0 else (draft, None)         # neither side always goes first
            for _ in range(2 if number == 0 else 1):                            # the first time only warms up
                results = {d is not None: decode(model, prompt, d, args, tok.eos_ids) for d in order}
            for key in {"all", category}:
                for side, result in zip(sides[key], (results[False], results[True])):
                    side.add(result)
                same[key].append(results[False].ids == results[True].ids)
    except KeyboardInterrupt:
        print(f"stopped after {len(same['all'])} prompts")
    return {key: figures(*sides[key], same[key]) for key in sorted(same, key=lambda k: (k == "all", k))}


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
    "tree": dict(help="chain:K, nodes per depth as 4,8,8, or index paths as JSON; not given: the draft's own"),
    "seed": dict(type=int, default=0, help="of the random draws"),
    "device": dict(default="auto", choices=["auto", "cpu", "cuda"], help="auto: cuda if there is one"),
    "dtype": dict(default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="auto: the faster one"),
    "json": dict(metavar="FILE", help="also write the figures there"),
}


def main() -> None:
    args = parse_options(__doc__, OPTIONS)
    device = choose_device(args.device)
    model, tok = load_target(args.ckpt, device, args.dtype)
    draft, chat = load_draft(args.draft, model), choose_chat(args.chat, tok)
    room = model.config.max_position_embeddings - args.max_new_tokens
    rows = read_prompts(Path(args.prompts), args.n)
    prompts = [(category, chat_prompt(tok, chat, [text])) for category, text in rows]
    fitting = [row for row in prompts if 0 < len(row[1]) <= room]
    if not fitting:
        raise ValueError(f"{args.prompts} holds no prompt that leaves room for {args.max_new_tokens} tokens")
    if len(fitting) < len(prompts):
        print(f"{len(prompts) - len(fitting)} prompts left out: longer than {room} tokens")
    if args.max_new_tokens < 2:
        raise ValueError(f"--max_new_tokens must be 2 or more to measure a speed, not {args.max_new_tokens}")
    tree = args.tree or default_tree(draft, args.temperature)
    setting = {"ckpt": args.ckpt, "draft": args.draft, "device": device.type, "tree": tree,
               "dtype": dtype_name(model), "nodes": Tree.parse(tree).size,
               "temperature": args.temperature, "max_new_tokens": args.max_new_tokens}
    print("  ".join(f"{key} {value}" for key, value in setting.items()))
    table = measure(model, tok, draft, fitting, args)
    for category, row in table.items():
        print(f"\n{category}")
        for key, value in row.items():
            print(f"  {key:20} {value}")
    if args.json:
        Path(args.json).write_text(json.dumps(setting | table.get("all", {}) | {"categories": table}, indent=2))


if __name__ == "__main__":
    run(main)
