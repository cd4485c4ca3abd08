"""What a draft learns from one batch: the loss of all K steps at all labelled positions, and how often it was right.

Sum over steps k of decay^(k-1) * [cross-entropy on the next token + kl * KL(p || q) + state * smooth-L1 to the target's
own state], p the target's distribution at that position, q the draft's (Chimera, arXiv 2402.15758, section 3.3).

Shapes: B texts, T tokens, K steps, C labelled positions of one chunk, D hidden size, V vocabulary, W draft vocabulary.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from draft import Chimera
from model import Llama

CHUNK = 256             # labelled positions whose logits exist at the same time: few enough for a processor's cache


@dataclass
class Weights:
    """How much each part of the loss counts."""
    kl: float = 1.0
    state: float = 0.0          # on R_k [h; hhat], not on hhat alone: that would fight the residual path
    decay: float = 1.0


class Meter:
    """Sums over labelled positions, per step k: loss, counts, agreements of the draft with the target's argmax."""

    def __init__(self, depth: int):
        self.loss, self.count, self.top1, self.top5, self.prefix, self.whole = torch.zeros(6, depth).unbind()

    def add(self, loss: torch.Tensor, seen: torch.Tensor, top1: torch.Tensor, top5: torch.Tensor) -> None:
        """loss [K]; the rest [K, B, T] bool, indexed by the position i from which step k was drafted."""
        prefix, whole = top1.cummin(0).values, seen.cummin(0).values           # steps 1..k all right / all labelled
        for total, value in ((self.loss, loss), (self.count, seen), (self.top1, top1), (self.top5, top5),
                             (self.prefix, prefix), (self.whole, whole)):
            total += value.detach().flatten(1).sum(1).cpu() if value.dim() > 1 else value.detach().cpu()

    def merge(self, other: "Meter") -> "Meter":
        for mine, theirs in zip(vars(self).values(), vars(other).values()):
            mine += theirs
        return self

    def agreement(self, sums: torch.Tensor) -> list[float]:
        return (sums / self.count.clamp(min=1)).tolist()

    def tau(self) -> float:
        """1 + sum over k of the chance that steps 1..k all agree: a greedy chain's expected tokens per target pass."""
        return 1 + (self.prefix / self.whole.clamp(min=1)).sum().item()


def batch_loss(draft: Chimera, model: Llama, tokens: torch.Tensor, labelled: torch.Tensor, meter: Meter,
               weights: Weights, scale: float | None = None, hidden: torch.Tensor | None = None) -> float:
    """One batch -> its summed loss, counted in `meter`; with `scale` the draft gets the gradient of scale * loss.

    tokens and labelled [B, T] as data.collate makes them; hidden [B, T, D] saves the target's forward. Logits exist for
    CHUNK labelled positions at a time: each chunk's gradient with respect to the heads' inputs is kept and sent through
    the draft once, at the end.
    """
    if hidden is None:
        with torch.no_grad():
            hidden = model.hidden_states(tokens)
    with torch.set_grad_enabled(scale is not None):
        states = draft(tokens, hidden)                                          # per step k [B, T-k, .]
    # The graph is cut here: the gradients of the heads' inputs gather in leaf.grad, chunk by chunk.
    leaves = [s.detach().requires_grad_(scale is not None) for s in states]
    seen, top1, top5 = torch.zeros(3, draft.config.depth, *tokens.shape, dtype=torch.bool, device=tokens.device)
    total = torch.zeros(draft.config.depth, device=tokens.device)
    for b, j in zip(*(index.split(CHUNK) for index in labelled.nonzero(as_tuple=True))):
        wanted, neg_entropy, best = target_distribution(draft, model, hidden[b, j], tokens[b, j + 1], weights.kl)
        for k, leaf in enumerate(leaves, 1):
            has, at = drafted_from(k, b, j)
            has = slice(None) if has.all() else has         # a view instead of a copy
            with torch.set_grad_enabled(scale is not None):
                state = leaf[at[1], at[2]]
                logits = draft.head_logits(k - 1, state)                                        # [C, W]
                apart = state_loss(state, hidden[b[has], j[has]]) if weights.state else logits.new_zeros(())
            loss, slope = position_loss(logits.detach().float(), wanted[has])
            step = weights.decay ** (k - 1)
            total[k - 1] += step * (loss.sum() + weights.kl * neg_entropy[has].sum() + weights.state * apart.detach())
            if scale is not None:
                logits.backward(slope.mul_(scale * step).to(logits.dtype), retain_graph=bool(weights.state))
                if weights.state:
                    (scale * step * weights.state * apart).backward()
            top = logits.detach().topk(min(5, logits.shape[-1])).indices == best[has, None]     # [C, 5]
            seen[at], top1[at], top5[at] = True, top[:, 0], top.any(-1)
    if scale is not None and labelled.any():
        torch.autograd.backward(states, [torch.zeros_like(s) if s.grad is None else s.grad for s in leaves])
    meter.add(total, seen, top1, top5)
    return total.sum().item()


def drafted_from(k: int, b: torch.Tensor, j: torch.Tensor) -> tuple[torch.Tensor, tuple]:
    """Text b and position j [C] of labelled tokens j+1 -> (which of them step k predicts, bool [C]; their indices).

    Step k = 1..K at position i predicts token i+k+1: so token j+1 from i = j - k, if there is one. The indices are
    those of [K, B, T] tensors: (k - 1, b, i), b and i of the predicted ones only.
    """
    # exercise 8
    has = j >= k
    return has, (k - 1, b[has], j[has] - k)


@torch.no_grad()
def target_distribution(draft: Chimera, model: Llama, hidden: torch.Tensor, label: torch.Tensor, kl: float):
    """hidden [C, D], next tokens [C] -> kl * p + one-hot(label) over the draft's vocabulary [C, W], sum p log p [C],
    and the place of the target's argmax in that vocabulary [C] (-1: not in it).

    p is the softmax, in float32, of the target's logits (model.lm_head) at draft.vocab_ids [W] (None: at all V tokens);
    the argmax is that over all V. A label outside the vocabulary has no one-hot.
    """
    # exercise 8
    logits, ids = model.lm_head(hidden), draft.vocab_ids                        # [C, V]
    if ids is None:
        best = logits.argmax(-1)
    else:
        place = torch.full((logits.shape[1],), -1, device=ids.device)
        place[ids] = torch.arange(len(ids), device=ids.device)
        highest, logits, label = logits.amax(-1), logits[:, ids], place[label]  # amax is much faster than argmax
        value, best = logits.max(-1)
        best = best.masked_fill(value < highest, -1)
    p = logits.softmax(-1, dtype=torch.float32)
    neg_entropy = torch.linalg.vecdot(p, logits.float()) - log_total(logits.float(), p)
    known = (label >= 0).float().unsqueeze(-1)
    return p.mul_(kl).scatter_add_(-1, label.clamp(min=0).unsqueeze(-1), known), neg_entropy, best


def log_total(logits: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """logits [C, W] and their softmax [C, W] -> logsumexp of the logits [C], without a pass of exponentials."""
    return logits.amax(-1) - probs.amax(-1).log()


@torch.no_grad()
def position_loss(logits: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits of q [C, W] and kl * p + one-hot [C, W] -> minus the sum over W of wanted * log q [C], and its gradient by
    the logits [C, W]: q * (the sum of wanted) - wanted.

    That is cross-entropy + kl * KL(p || q), less kl * sum p log p, which does not depend on the draft. The gradient is
    written by hand because a vocabulary is wide: fewer passes over [C, W] are most of the training speed.
    """
    # exercise 8
    q, mass = logits.softmax(-1), wanted.sum(-1)
    loss = mass * log_total(logits, q) - torch.linalg.vecdot(wanted, logits)
    return loss, q.mul_(mass.unsqueeze(-1)).sub_(wanted)


def state_loss(state: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Summed smooth-L1, [C, D] each, averaged over D: R_k [h; hhat] against the target's own state."""
    return F.smooth_l1_loss(state.float(), target.float(), reduction="none").mean(-1).sum()
