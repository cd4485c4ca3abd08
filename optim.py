"""How a draft's weights follow their gradients: learning rate, and Muon for the matrices beside AdamW for the rest.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) makes the momentum of a matrix orthogonal before it
steps: every direction moves alike, also those whose gradients are small. Its steps are scaled to the size of AdamW's
(Liu et al., arXiv 2502.16982), so that one learning rate serves both.
"""
import math

import torch

from draft import Chimera
from model import AVX2


def learning_rate(step: int, steps: int, peak: float) -> float:
    """1% warm-up (at least 10 steps), then a cosine to a tenth of the peak, never below; counts optimiser steps."""
    warmup = max(10, steps // 100)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """matrix [N, K] -> nearly U V^T of its singular value decomposition: five Newton-Schulz steps, in bfloat16 unless
    that is slow here."""
    x = matrix.to(torch.float32 if AVX2 and matrix.device.type == "cpu" else torch.bfloat16)
    x = x.t() if len(x) > x.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.t()
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.775 * gram) @ x
    return x.t() if len(matrix) > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """As torch.optim.Muon (2.9) with adjust_lr_fn="match_rms_adamw" and no weight decay, which knows bfloat16 only."""

    def __init__(self, weights: list[torch.nn.Parameter], lr: float):
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                mean = state["momentum"].lerp_(weight.grad, 0.05)
                update = orthogonal(weight.grad.lerp(mean, 0.95))               # Nesterov
                weight.add_(update, alpha=-0.2 * math.sqrt(max(weight.shape)) * group["lr"])


class Optimizer:
    """AdamW for all weights, or Muon for the matrices that map states to states, behind one face."""

    def __init__(self, draft: Chimera, name: str, lr: float):
        """name: "adamw" or "muon"."""
        groups = {"muon": [], "adamw": []}
        for part, weight in draft.named_parameters():       # full heads, as high as a vocabulary, are none of Muon's
            inner = weight.dim() == 2 and not (part.startswith("heads.") and draft.config.heads == "full")
            groups["muon" if name == "muon" and inner else "adamw"].append(weight)
        self.parts = [torch.optim.AdamW(groups["adamw"], lr=lr, weight_decay=0.0)]
        if groups["muon"]:
            self.parts.append(Muon(groups["muon"], lr))
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
