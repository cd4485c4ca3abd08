"""How a draft's weights follow their gradients: learning rate, and Muon for the matrices beside AdamW for the rest.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) makes the momentum of a matrix orthogonal before it
steps: every direction moves alike, also those whose gradients are small. Its steps are scaled to the size of AdamW's
(Liu et al., arXiv 2502.16982), so that one learning rate serves both.
"""
import math

import torch

from draft import Chimera


def learning_rate(step: int, steps: int, peak: float) -> float:
    """1% warm-up (at least 10 steps), then a cosine to a tenth of the peak, never below; counts optimiser steps."""
    warmup = max(10, steps // 100)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


class Optimizer:
    """AdamW for all weights, or Muon for the matrices that map states to states: torch's own, behind one face."""

    def __init__(self, draft: Chimera, name: str, lr: float):
        """name: "adamw" or "muon"; ValueError where torch has no Muon (before 2.9)."""
        if name == "muon" and not hasattr(torch.optim, "Muon"):
            raise ValueError(f"torch {torch.__version__} has no Muon (2.9 has); use --optimizer adamw")
        groups = {"muon": [], "adamw": []}
        for part, weight in draft.named_parameters():       # full heads, as high as a vocabulary, are none of Muon's
            inner = weight.dim() == 2 and not (part.startswith("heads.") and draft.config.heads == "full")
            groups["muon" if name == "muon" and inner else "adamw"].append(weight)
        self.parts = [torch.optim.AdamW(groups["adamw"], lr=lr, weight_decay=0.0)]
        if groups["muon"]:
            self.parts.append(torch.optim.Muon(groups["muon"], lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> list[dict]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
