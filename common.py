"""What the scripts share: text that streams, device and dtype, command line, errors in one line."""
import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from model import Llama, LlamaConfig, Tokenizer, lay_out, linear

ASSETS = Path(__file__).parent / "assets"


# -- streaming --------------------------------------------------------------------------------------------------------

class TextStream:
    """Ids in, text out as soon as it is final: the joined pieces equal decode(all ids) behind the prompt's text.

    A token alone does not decode to its text (leading spaces, characters of several tokens), so each piece is the
    difference between two decodes that share a left context.
    """

    def __init__(self, tok: Tokenizer, prompt: list[int]):
        self.tok, self.ids, self.start, self.done = tok, list(prompt[-8:]), 0, len(prompt[-8:])

    def push(self, ids: list[int], last: bool = False) -> str:
        """New ids -> the text that they complete; `last` gives out what is left, broken characters included."""
        self.ids += ids
        before, now = self.tok.decode(self.ids[self.start:self.done]), self.tok.decode(self.ids[self.start:])
        if now.endswith("\ufffd") and not last:             # perhaps the first bytes of a character
            return ""
        if len(now) > len(before):                          # the left context must hold text that really decoded
            self.start = max(self.done - 8, self.start)
        self.done = len(self.ids)
        return now[len(before):]


# -- device, dtype, command line -------------------------------------------------------------------------------------

def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this torch sees no CUDA GPU; use --device cpu")
    torch.set_float32_matmul_precision("highest")           # no TF32: float32 means float32
    return torch.device(name)


def choose_dtype(name: str, device: torch.device, hidden_size: int) -> torch.dtype:
    """auto: bfloat16 on a GPU; on a CPU the faster of float32 and bfloat16 at one small product."""
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cpu":
        return torch.bfloat16
    best, end = {torch.float32: 1e9, torch.bfloat16: 1e9}, time.perf_counter() + 0.2
    while time.perf_counter() < end:                        # taking turns: other work on the machine must not decide
        best = {dtype: min(seconds, product_seconds(dtype, hidden_size)) for dtype, seconds in best.items()}
    return min(best, key=best.get)


def product_seconds(dtype: torch.dtype, width: int) -> float:
    """One row, as in a plain step, and four, as in a verifying pass, times a matrix of a feed-forward part."""
    x, weight = torch.ones(4, width, dtype=dtype), lay_out(torch.ones(8 * width, width, dtype=dtype))
    start = time.perf_counter()
    linear(x[:1], weight)
    linear(x, weight)
    return time.perf_counter() - start


def run(main: Callable[[], None]) -> None:
    """What a user can get wrong ends in one line and exit code 1; Ctrl-C in 130; a closed pipe in silence."""
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except torch.OutOfMemoryError as error:
        first = str(error).split(". ")[0]
        print(f"error: {first}; use --dtype bfloat16, fewer --max_new_tokens or a smaller --tree; in training a "
              "smaller --batch_size with --grad_accum, or --max_length", file=sys.stderr)
        sys.exit(1)
    except (ValueError, OSError) as error:
        text = " ".join(str(error).split())
        text += f" (it came with the repository: git -C {ASSETS.parent} checkout assets)" * (str(ASSETS) in text)
        print("error:", text, file=sys.stderr)
        sys.exit(1)


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Docstrings as they are written, defaults behind each option."""


def parser_of(options: dict[str, dict], description: str = "") -> argparse.ArgumentParser:
    """options: {name: keywords of add_argument}."""
    parser = argparse.ArgumentParser(description=description, formatter_class=Help)
    for name, keywords in options.items():
        parser.add_argument(f"--{name}", **keywords)
    return parser


def defaults(options: dict[str, dict], **changed) -> argparse.Namespace:
    """What a script's command line without arguments gives, some of it changed: for callers from other files."""
    return argparse.Namespace(**vars(parser_of(options).parse_args([])) | changed)


def parse_options(description: str, options: dict[str, dict]) -> argparse.Namespace:
    """The command line of a script."""
    args = parser_of(options, description).parse_args()
    if not -2**63 <= getattr(args, "seed", 0) < 2**63:
        raise ValueError(f"--seed must fit into 64 bits, {args.seed} does not")
    return args


def dtype_name(model: Llama) -> str:
    return str(model.embed.weight.dtype).removeprefix("torch.")


def load_target(folder: str, device: torch.device, dtype: str) -> tuple[Llama, Tokenizer]:
    width = LlamaConfig.from_pretrained(folder).hidden_size
    try:
        model = Llama.from_pretrained(folder, device, choose_dtype(dtype, device, width))
    except ValueError as error:
        raise ValueError(str(error) if str(folder) in str(error) else f"{folder}: {error}") from None
    return model, Tokenizer.from_pretrained(folder)
