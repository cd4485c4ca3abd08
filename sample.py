"""Decodes with a Chimera draft, or without one: the command line.

    python sample.py                            (the bundled storyteller and its draft, on a random opening)
    python sample.py --ckpt DIR --draft DIR --prompt "Once upon a time" --compare --color
    python sample.py --ckpt DIR --draft DIR --interactive           (a conversation; Ctrl-C stops an answer)

The text goes to standard output as it is committed, everything else to standard error.
"""
import argparse
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from chat import CHATS, chat_prompt, choose_chat, next_turn
from checkpoint import read_json
from common import (
    ASSETS,
    TextStream,
    choose_device,
    defaults,
    dtype_name,
    load_target,
    parse_options,
    run,
)
from draft import Chimera
from model import Llama
from speculative import Cache, default_tree, generate, is_greedy
from trace_page import Trace
from tree import Tree

GREEN, RESET = "\033[32m", "\033[0m"
STORIES, DRAFT, OPENINGS = (ASSETS / name for name in ("stories", "stories-chimera", "openings.txt"))


@dataclass
class Result:
    """What one generation gave: ids per target pass, and when."""
    passes: list[list[int]] = field(default_factory=list)
    started: float = 0.0
    first: float = 0.0
    ended: float = 0.0

    @property
    def ids(self) -> list[int]:
        return [i for ids in self.passes for i in ids]

    @property
    def tau(self) -> float:
        """Tokens per target pass after the prefill."""
        return sum(map(len, self.passes[1:])) / max(1, len(self.passes) - 1)

    @property
    def speed(self) -> float:
        """Tokens per second from the first token on: the prefill is not in it."""
        return (len(self.ids) - 1) / max(1e-9, self.ended - self.first)


def decode(model, prompt, draft, args, eos_ids, show=lambda ids: None, on_round=None, cache=None,
           stopped=lambda: False) -> Result:
    """One generation, timed; show(ids) is called with each pass as it is committed, then stopped() may end it."""
    result = Result(started=time.perf_counter())
    passes = generate(model, prompt, draft, args.tree if draft else None, args.max_new_tokens, args.temperature,
                      args.top_k, args.top_p, eos_ids, torch.Generator().manual_seed(args.seed), cache, on_round,
                      args.compile)
    for ids in passes:
        result.ended = time.perf_counter()
        result.first = result.first or result.ended
        result.passes.append(ids)
        show(ids)
        if stopped():
            break
    return result


def printer(stream: TextStream, color: bool, opening: str = ""):
    """show() for decode(): writes each pass; with color the accepted draft tokens are green, the target's own plain.

    The opening that the text goes on from is shown in front of it, on standard error.
    """
    openings = [opening]

    def show(ids: list[int]) -> None:
        print(openings.pop() if openings else "", end="", file=sys.stderr, flush=True)
        drafted, own = stream.push(ids[:-1]), stream.push(ids[-1:])
        sys.stdout.write((f"{GREEN}{drafted}{RESET}" if color and drafted else drafted) + own)
        sys.stdout.flush()
    return show


def describe(name: str, result: Result) -> str:
    if len(result.ids) < 2:                                 # speed is measured from the first token on
        return f"{name}: {len(result.ids)} tokens"
    return (f"{name}: {len(result.ids)} tokens, {result.speed:.1f} tokens/s, tau {result.tau:.2f}, "
            f"first token after {result.first - result.started:.3f} s")


def compare(model: Llama, prompt: list[int], with_draft: Result, plain: Result, temperature: float) -> str:
    """The two speeds, and whether the texts are the same; if not, where they part and how near the tie was there."""
    lines = [describe("plain", plain)]
    if len(plain.ids) > 1:
        lines.append(f"speedup: {with_draft.speed / plain.speed:.2f}x")
    a, b = with_draft.ids, plain.ids
    if a == b:
        return "\n".join([*lines, "identical: yes"])
    at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    if not is_greedy(temperature):
        return "\n".join([*lines, f"identical: no, from token {at} on (above temperature 0 only the distribution is)"])
    with torch.inference_mode():
        hidden = model.hidden_states(torch.tensor([prompt + a[:at]], device=model.embed.weight.device))
        best = model.lm_head(hidden[0, -1]).float().topk(2).values
    gap = f"the target's two best logits differ by {best[0] - best[1]:.5f} there"
    return "\n".join([*lines, f"identical: no, from token {at} on; {gap}"])


def stop_reason(result: Result, args, eos_ids) -> str:
    if result.ids and result.ids[-1] in eos_ids:
        return "end of text"
    return "max_new_tokens" if len(result.ids) == args.max_new_tokens else "the context is full"


# -- conversation ------------------------------------------------------------------------------------------------------

@contextmanager
def ctrl_c_noted() -> Iterator[list]:
    """Ctrl-C fills the list, and the answer ends behind its pass: caches are never left half written. A second Ctrl-C,
    for when a pass takes too long, ends the program."""
    pressed = []

    def note(*_) -> None:
        pressed.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def read_turn() -> str | None:
    """The next line that is not blank, asked for on standard error; None at the end of the input."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return print(file=sys.stderr)                   # the shell's prompt begins a line
        if line.strip():
            return line.strip()


def converse(model: Llama, tok, draft, chat: str, args) -> None:
    """Answers line after line. One Cache holds the conversation, so a turn's prefill runs over its own tokens only."""
    cache, limit = Cache(), model.config.max_position_embeddings
    while (line := read_turn()) not in (None, "/quit"):
        if line == "/reset":
            cache = Cache()
            continue
        prompt = (next_turn(tok, chat, line, cache.tokens[-1]) if cache.tokens
                  else chat_prompt(tok, chat, [line], args.system))
        if (used := len(cache.tokens) + len(prompt)) >= limit:
            say(f"the context is full: {used} tokens with this turn, {limit} at most; shorten it, or /reset")
        else:
            say(reply(model, tok, draft, chat, args, cache, prompt))


def reply(model: Llama, tok, draft, chat: str, args, cache: Cache, prompt: list[int]) -> str:
    """Streams one answer -> a line on how it ended."""
    stream = TextStream(tok, cache.tokens + prompt if chat == "none" else [])
    with ctrl_c_noted() as pressed:
        result = decode(model, prompt, draft, args, tok.eos_ids, printer(stream, args.color), None, cache,
                        lambda: bool(pressed))
    print(stream.push([], last=True), flush=True)
    why = stop_reason(result, args, tok.eos_ids)
    why = "Ctrl-C" if pressed and why != "end of text" else why
    why += "; /reset begins a new one" * (why == "the context is full")
    return f"stopped: {why} | {describe('answer', result)}"


# -- command line ------------------------------------------------------------------------------------------------------

OPTIONS = {
    "ckpt": dict(help="folder of the target, Hugging Face layout; not given: the bundled storyteller with its draft"),
    "draft": dict(help="folder of its Chimera draft, or of a smaller LLaMA with the same vocabulary; none (or not "
                  "given beside --ckpt): plain decoding"),
    "prompt": dict(default="Once upon a time", help="text, or FILE:path for the text of a file"),
    "chat": dict(default="auto", help=f"chat template: {', '.join(CHATS)}; auto: by the folder's "
                 "chat_template, its name or its control tokens"),
    "system": dict(help="what the model is told before the first turn; not given: the template's own, if it has one"),
    "max_new_tokens": dict(type=int, default=256, help="most tokens to write"),
    "temperature": dict(type=float, default=0.0, help="0: always the likeliest token"),
    "top_k": dict(type=int, default=0, help="draw from the k likeliest tokens; 0: from all"),
    "top_p": dict(type=float, default=1.0, help="draw from the likeliest tokens that together hold this probability"),
    "seed": dict(type=int, default=0, help="of the random draws; the same seed gives the same text"),
    "device": dict(default="auto", choices=["auto", "cpu", "cuda"], help="auto: cuda if there is one"),
    "dtype": dict(default="auto", choices=["auto", "float32", "bfloat16", "float16"],
                  help="auto: bfloat16 on cuda, on a CPU the faster of float32 and bfloat16"),
    "compile": dict(action="store_true", help="torch.compile the steps, with and without the draft: faster, "
                    "after a wait of half a minute to two"),
    "tree": dict(help="candidates per round: chain:K, nodes per depth as 4,8,8, or index paths as JSON; "
                 "not given: the draft's own"),
    "interactive": dict(action="store_true", help="a conversation: turns are read from standard input, a line each; "
                        "/reset begins a new one, /quit ends it"),
    "compare": dict(action="store_true", help="also decode without the draft: both speeds, and if the texts are equal"),
    "color": dict(action="store_true", help="accepted draft tokens in green"),
    "trace": dict(metavar="FILE", help="write every round's tree as one HTML page to step through (decodes slower)"),
}


def settings(**changed) -> argparse.Namespace:
    """For callers of decode(): the command line's defaults, some of them changed."""
    return defaults(OPTIONS, **changed)


def parse_args() -> argparse.Namespace:
    args = parse_options(__doc__, OPTIONS)
    args.draft = args.draft or ("none" if args.ckpt else str(DRAFT))
    args.ckpt = args.ckpt or str(STORIES)
    if len(sys.argv) == 1:                                  # the first run shows everything
        args.compare, args.color = True, sys.stdout.isatty()
        args.prompt = random.choice(OPENINGS.read_text("utf-8").splitlines())
    return args


def check(args, chat: str) -> None:
    if args.draft == "none" and (args.compare or args.tree or args.trace):
        raise ValueError("--compare, --tree and --trace need a --draft")
    alone = args.prompt == OPTIONS["prompt"]["default"] and not (args.compare or args.trace)
    if args.interactive and not alone:
        raise ValueError("--interactive reads its prompts from standard input; leave out --prompt, --compare, --trace")
    if args.system is not None and chat == "none":
        raise ValueError("--system needs a chat template, and this is --chat none")


def read_prompt(text: str) -> str:
    if not text.startswith("FILE:"):
        if not text.isprintable() and any(0xD800 <= ord(c) < 0xE000 for c in text):
            raise ValueError("--prompt is not UTF-8 text")          # bytes that the shell passed through
        return text
    try:
        return Path(text[5:]).read_text("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{text[5:]} is not UTF-8 text; convert the file") from None
    except FileNotFoundError:
        raise FileNotFoundError(f"{text[5:]} not found; --prompt FILE:path takes an existing file") from None


def load_draft(folder: str, model: Llama):
    """A Chimera folder, or the folder of a second LLaMA, told apart by config.json."""
    if read_json(Path(folder) / "config.json").get("model_type") == "llama":
        return Llama.from_pretrained(folder, model.embed.weight.device, model.embed.weight.dtype)
    return Chimera.from_pretrained(folder, model)


def main() -> None:
    args = parse_args()
    text, device = read_prompt(args.prompt), choose_device(args.device)
    model, tok = load_target(args.ckpt, device, args.dtype)
    draft = None if args.draft == "none" else load_draft(args.draft, model)
    chat = choose_chat(args.chat, tok, args.ckpt)
    check(args, chat)
    tree = Tree.parse(args.tree or default_tree(draft, args.temperature)) if draft else None
    used = f"draft {args.draft}, {tree.size} nodes, depth {tree.depth}" if draft else "no draft"
    say(f"{args.ckpt} | {device.type} {dtype_name(model)} | chat {chat} | temperature "
        f"{args.temperature} | {used}")
    if args.interactive:
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        return converse(model, tok, draft, chat, args)
    prompt = chat_prompt(tok, chat, [text], args.system)
    trace = Trace(args.trace, tok, prompt, args) if args.trace else None
    if args.compare:                                        # both sides warm before either is timed
        few = args.max_new_tokens if args.compile else min(8, args.max_new_tokens)      # compiled for one cache size
        short = argparse.Namespace(**vars(args) | {"max_new_tokens": few})
        decode(model, prompt, draft, short, tok.eos_ids), decode(model, prompt, None, short, tok.eos_ids)
    stream = TextStream(tok, prompt if chat == "none" else [])              # an answer begins without a space
    opening = text if chat == "none" else ""
    with trace or nullcontext():                            # what Ctrl-C leaves is written too
        result = decode(model, prompt, draft, args, tok.eos_ids, printer(stream, args.color, opening), trace)
    print(stream.push([], last=True), flush=True)
    say(f"stopped: {stop_reason(result, args, tok.eos_ids)}")
    say(describe("with the draft" if draft else "plain", result))
    if args.compare:
        say(compare(model, prompt, result, decode(model, prompt, None, args, tok.eos_ids), args.temperature))


def say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    run(main)
