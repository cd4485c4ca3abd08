"""What lets a training run survive and spread: atomic checkpoints, signals, the log, several processes."""
import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError

from draft import Chimera


def save(out: Path, draft: Chimera, optimizer, settings: dict, step: int) -> None:
    """The exported draft for sample.py, and in state.pt everything that --resume needs.

    Each file is written beside its place, flushed to the disk and renamed: a kill leaves the old file or the new one.
    state.pt comes last, so that --resume repeats a save that was cut off between two of them; the very first time it
    comes first, so that there is something to resume.
    """
    scratch, order = out / "saving", ("model.safetensors", "config.json", "state.pt")
    try:
        draft.save_pretrained(scratch, getattr(torch, settings["dtype_used"]))
        torch.save({"settings": settings, "step": step, "optimizer": optimizer.state_dict(),
                    "draft": draft.state_dict()}, scratch / "state.pt")
        for name in order if step else order[::-1]:
            with open(scratch / name, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(scratch / name, out / name)
        shutil.rmtree(scratch)                              # with what a kill may have left there
    except (OSError, RuntimeError, SafetensorError) as error:       # a full disk, told by three libraries
        raise OSError(f"cannot save to {out} ({error}); make room and continue with --resume") from None


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
    if "optimizer" not in settings:
        raise ValueError(f"{path} is of an earlier version; begin anew with --init {out} and another --out")
    return state, argparse.Namespace(**settings | {"out": out, "resume": True, "dtype": settings["dtype_used"]})


def open_log(path: Path, step: int):
    """The log up to `step`, open for more: what a killed run logged after its last save will come once more."""
    lines = path.read_text("utf-8").splitlines()[:step] if path.exists() else []
    path.with_suffix(".new").write_text("".join(line + "\n" for line in lines), "utf-8")
    os.replace(path.with_suffix(".new"), path)
    return open(path, "a", encoding="utf-8")


class Stop:
    """Ctrl-C and SIGTERM ask for a save after the running step instead of ending the process in the middle of it."""

    def __init__(self):
        self.asked = self.now = False
        self.before = {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM)}

    def __call__(self, number, frame) -> None:
        self.asked = True

    def agree(self, args) -> None:
        """Decides once a step, for all processes alike: a signal that comes later waits for the next step."""
        votes = torch.tensor([float(self.asked)], device=args.device_used)
        over_processes(args, votes)
        self.now = votes.item() > 0

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def processes(args) -> None:
    """Joins the processes of a torchrun, if there are any: args.rank of args.world, each with its own GPU."""
    args.rank, args.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if args.world > 1:
        if args.device_used == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if args.device_used == "cuda" else "gloo")
        if args.rank:
            sys.stdout = open(os.devnull, "w")              # rank 0 speaks for all


def over_processes(args, *tensors: torch.Tensor) -> None:
    """Sums each tensor, in place, over the processes that torchrun started."""
    for tensor in tensors if args.world > 1 else ():
        total = tensor.to(args.device_used)                 # a Meter counts on the CPU
        torch.distributed.all_reduce(total)
        tensor.copy_(total)
