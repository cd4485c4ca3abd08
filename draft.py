"""Chimera, the draft (Zeng et al., arXiv 2402.15758): trigram encoder, full-context decoder block, residual heads.

It guesses the next K tokens of a frozen LLaMA, each at a few percent of the target's cost. Positions count from 0. The
target has committed hidden states h_0..h_{n-1} (after its final norm) and just supplied the token at position n,
the root, which has no hidden state yet. Step 1 predicts position n+1, step 2 n+2, ..., along every branch of a tree.

The same step stands here twice: `Chimera.forward` runs all K steps at all positions of a text at once (training),
`ChimeraState.step` runs one step for the nodes of one tree depth (decoding). A test holds the two together.

Shapes: B batch, T tokens, D hidden size, H query heads, G key/value heads, E head size, V vocabulary, W draft
vocabulary, M tree nodes of one depth, R rows that became known since the step before.
"""
import json
import sys
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from checkpoint import open_tensors, read_json, read_part
from model import Block, KVCache, Linear, Llama, RMSNorm, attend, lay_out, linear

MOST_TABULATED = 2**24      # numbers that the trigram tables may hold: beyond, W1 is applied at every step


@dataclass
class ChimeraConfig:
    """What a draft is besides its target's shapes."""
    depth: int = 4                  # K: steps, and so the deepest tree it can draft
    heads: str = "light"            # light: lm_head(R_k [h; hhat]) with the target's lm_head; full: Linear_k(2D -> W)
    draft_vocab: int = 0            # W: how many token ids the draft can propose; 0: all
    greedy_tree: str = ""           # default tree at temperature 0, and above it; "": a chain of `depth`
    sampled_tree: str = ""

    def __post_init__(self):
        if type(self.depth) is not int or not 1 <= self.depth <= 64:
            raise ValueError(f"depth must be from 1 to 64, not {self.depth!r}")
        if type(self.draft_vocab) is not int or self.draft_vocab < 0:
            raise ValueError(f"draft_vocab must be 0 or more, not {self.draft_vocab!r}")
        if self.heads not in ("light", "full"):
            raise ValueError(f"heads must be 'light' or 'full', not {self.heads!r}")


class Chimera(nn.Module):
    """The trainable draft on a frozen target, whose embedding and lm_head it uses and never owns."""

    def __init__(self, config: ChimeraConfig, model: Llama, vocab_ids: torch.Tensor | None = None):
        """vocab_ids [W]: the token ids that the draft may propose, if config.draft_vocab is set; else ValueError."""
        super().__init__()
        given = 0 if vocab_ids is None else len(vocab_ids)
        if config.draft_vocab and given != config.draft_vocab:
            raise ValueError(f"draft_vocab is {config.draft_vocab}, but {given} vocab_ids were given")
        self.config, self.target, D = config, model.config, model.config.hidden_size
        self.register_buffer("vocab_ids", vocab_ids if config.draft_vocab else None)
        head = model.lm_head.weight[vocab_ids] if config.draft_vocab else model.lm_head.weight          # [W, D]
        self.frozen = {"model": model, "head": lay_out(head)}   # in a dict: no submodule, no parameter of the draft
        self.trigram_in, self.trigram_out = nn.Linear(3 * D, D), nn.Linear(D, D)    # in place of the target's bottom
        self.block = Block(self.target)
        self.norm = RMSNorm(D, self.target.rms_norm_eps)
        width = D if config.heads == "light" else len(head)
        self.heads = nn.ModuleList(Linear(2 * D, width) for _ in range(config.depth))
        self.table = None
        self.to(head.device, head.dtype)
        self._init_from(model)

    @torch.no_grad()
    def _init_from(self, model: Llama) -> None:
        """The norm starts as the target's last, heads as the mean of h and hhat, so that logits have their scale; the
        block starts random, which learns faster than a copy of the target's last block (measured)."""
        self.norm.weight.copy_(model.norm.weight)
        half = torch.eye(self.target.hidden_size) / 2 if self.config.heads == "light" else self.frozen["head"] / 2
        for head in self.heads:
            head.weight.copy_(torch.cat((half, half), 1))

    # -- the parts ----------------------------------------------------------------------------------------------------

    def encode(self, trigrams: torch.Tensor) -> torch.Tensor:
        """Trigram ids [..., 3], oldest first, -1 where the text has not begun -> z [..., D].

        z = trigram_out(silu(trigram_in([e_{i-2}; e_{i-1}; e_i]))), e the target's embeddings (frozen["model"].embed) in
        the draft's dtype (norm.weight's); missing neighbours are zero vectors (unigram, bigram).
        """
        # exercise 7
        e = self.frozen["model"].embed(trigrams.clamp(min=0)).to(self.norm.weight.dtype)        # [..., 3, D]
        e = e * (trigrams >= 0).unsqueeze(-1)
        return self.trigram_out(F.silu(self.trigram_in(e.flatten(-2))))

    @torch.no_grad()
    def tabulate(self) -> None:
        """For decoding: trigram_in applied to the whole embedding once, so that a trigram is three gathers and a sum.
        Row 0 of each of the three tables, [V + 1, D], is the missing neighbour."""
        embed, D = self.frozen["model"].embed.weight, self.target.hidden_size
        if 3 * embed.numel() > MOST_TABULATED:
            return
        tables = [F.pad(embed @ part.t(), (0, 0, 1, 0)) for part in self.trigram_in.weight.split(D, 1)]
        tables[2] = tables[2] + self.trigram_in.bias        # the newest token is never missing
        self.table = torch.cat(tables)                                          # [3 * (V + 1), D]
        self.first_rows = torch.arange(3, device=embed.device) * len(tables[0]) + 1

    def lookup(self, trigrams: torch.Tensor) -> torch.Tensor:
        """encode(), by the tables where there are any."""
        if self.table is None:
            return self.encode(trigrams)
        return self.trigram_out(F.silu(F.embedding_bag(trigrams + self.first_rows, self.table, mode="sum")))

    def context(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's states [B, T, D] that the block may attend to: all (an ablation leaves them out)."""
        return hidden

    def head_input(self, step: int, h: torch.Tensor, hhat: torch.Tensor) -> torch.Tensor:
        """Residual path: the last verified target state h and hhat, [..., D] each -> what head_logits reads.

        Light heads: R_k [h; hhat], [..., D], where R_k is heads[step]; full heads: [h; hhat] itself, [..., 2D].
        """
        # exercise 7
        both = torch.cat((h, hhat), -1)
        return self.heads[step](both) if self.config.heads == "light" else both

    def head_logits(self, step: int, state: torch.Tensor) -> torch.Tensor:
        """What head_input gave -> logits over the draft's vocabulary [..., W].

        Full heads: heads[step], Linear_k(2D -> W). Light heads: the target's lm_head, whose rows of the draft's
        vocabulary are the matrix frozen["head"] [W, D], in that matrix's dtype.
        """
        # exercise 7
        if self.config.heads == "full":
            return self.heads[step](state)
        return linear(state.to(self.frozen["head"].dtype), self.frozen["head"])

    # -- training: all steps at all positions at once -----------------------------------------------------------------

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
        """tokens [B, T], the target's hidden states [B, T, D] -> per step k = 1..K its head's inputs [B, T-k, .].

        Step k at position i takes z_{i+k}; attends to h_0..h_i, to the outputs of steps 1..k-1 at the same i, and to
        itself; and predicts token i+k+1. T tokens so give T-k positions, the last of which predicts the unseen token T;
        a text too short for a step has no states there.
        """
        T, rope = tokens.shape[1], self.frozen["model"].rope
        hidden = hidden.to(self.norm.weight.dtype)
        z = self.encode(trigrams_of(tokens))                                    # [B, T, D]
        q_z, k_z, v_z = self.block.project(z, *rope(slice(0, T)))               # z_j is the same whichever step uses it
        context = self.context(hidden)
        _, k_h, v_h = self.block.project(context, *rope(slice(0, context.shape[1])))
        own, states = [], []                                                    # own: keys and values of hhat, per step
        for k in range(1, min(self.config.depth, T - 1) + 1):
            L = T - k
            diagonal = [(key[:, :, :L], value[:, :, :L]) for key, value in own] + [(k_z[:, :, k:], v_z[:, :, k:])]
            attended = attend_diagonal(q_z[:, :, k:], k_h[:, :, :L], v_h[:, :, :L], diagonal)
            hhat = self.norm(self.block.finish(z[:, k:], attended))             # [B, L, D]
            own.append(self.block.project(hhat, *rope(slice(k, T)))[1:])
            states.append(self.head_input(k - 1, hidden[:, :L], hhat))
        return states

    def new_state(self, rows: int) -> "ChimeraState":
        """The state of one text in decoding, with room for `rows` positions."""
        return ChimeraState(self, rows)

    # -- files --------------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder, dtype: torch.dtype | None = None) -> None:
        """Writes config.json and model.safetensors: only what the draft owns, in its own dtype or `dtype`."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        raw = {"model_type": "chimera", **asdict(self.config), "target": asdict(self.target),
               "target_fingerprint": fingerprint(self.frozen["model"])}
        tensors = {k: v.detach().cpu().contiguous() for k, v in self.state_dict().items()}
        tensors = {k: v.to(dtype) if dtype and v.is_floating_point() else v for k, v in tensors.items()}
        save_file(tensors, Path(folder, "model.safetensors"))
        Path(folder, "config.json").write_text(json.dumps(raw, indent=2))

    @classmethod
    def from_pretrained(cls, folder, model: Llama) -> "Chimera":
        """Loads a draft in the dtype and on the device of `model`; ValueError if it was made for another target."""
        path = Path(folder) / "config.json"
        raw = read_json(path)
        if raw.get("model_type") != "chimera":
            raise ValueError(f"{path} is no Chimera draft (model_type {raw.get('model_type')!r}); train one")
        made_for = raw["target"] if isinstance(raw.get("target"), dict) else {}
        for key, ours in asdict(model.config).items():
            if made_for.get(key) != ours:
                raise ValueError(f"{folder} was trained for a target with {key} {made_for.get(key)}, this one has "
                                 f"{ours}; train a draft for it with train.py")
        if raw.get("target_fingerprint") != fingerprint(model):
            print(f"warning: {folder} was trained for other weights of this shape; the text stays right, the speed may "
                  "suffer", file=sys.stderr)
        file = open_tensors(Path(folder) / "model.safetensors")
        weights = {name: read_part(file, name) for name in file.keys()}
        config = ChimeraConfig(**{k: raw[k] for k in ChimeraConfig.__dataclass_fields__ if k in raw})
        check_vocabulary(weights.get("vocab_ids"), model.config.vocab_size, folder)
        draft = cls(config, model, weights.get("vocab_ids", torch.empty(0)).to(model.lm_head.weight.device))
        try:
            draft.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"{folder}: config.json and weights differ: {' '.join(str(error).split())}") from None
        for parameter in draft.requires_grad_(False).parameters():
            parameter.data = lay_out(parameter.data)
        draft.tabulate()
        return draft


def check_vocabulary(ids: torch.Tensor | None, vocab_size: int, folder) -> None:
    """vocab_ids [W] of a draft's file: ids of the target, sorted, none twice (drawn twice it would not be lossless)."""
    if ids is not None and (ids.dim() != 1 or ids.dtype != torch.int64 or len(ids) == 0 or ids[0] < 0
                            or ids[-1] >= vocab_size or (ids.diff() <= 0).any()):
        raise ValueError(f"{folder}: vocab_ids are no sorted list of the target's token ids; train the draft again")


def trigrams_of(tokens: torch.Tensor) -> torch.Tensor:
    """tokens [B, T] -> ids of positions i-2, i-1, i, [B, T, 3]; -1 before the beginning."""
    # exercise 7
    return F.pad(tokens, (2, 0), value=-1).unfold(1, 3, 1)


def attend_diagonal(q, k, v, diagonal: list) -> torch.Tensor:
    """Causal attention over k, v and, for row i, over row i of each (key, value) in `diagonal`: q [B, H, L, E] -> same.

    One softmax over both parts: what a row of the decoding cache sees, written for all positions at once.
    """
    L, S, E = q.shape[2], k.shape[2], q.shape[3]                                                # S is L or, left out, 0
    q = q.unflatten(1, (k.shape[1], -1)) * E ** -0.5                                            # [B, G, H/G, L, E]
    own_k, own_v = (torch.stack(pair, 3).unsqueeze(2) for pair in zip(*diagonal))               # [B, G, 1, L, k, E]
    far = q @ k.unsqueeze(2).transpose(-1, -2)                                                  # [B, G, H/G, L, S]
    far = far.masked_fill(~torch.ones(L, S, dtype=torch.bool, device=q.device).tril(), float("-inf"))
    near = (own_k @ q.unsqueeze(-1)).squeeze(-1)                                                # [B, G, H/G, L, k]
    weights = torch.cat((far, near), -1).softmax(-1, dtype=torch.float32).to(v.dtype)
    out = weights[..., :S] @ v.unsqueeze(2) + (weights[..., None, S:] @ own_v).squeeze(-2)
    return out.flatten(1, 2)


@torch.no_grad()
def fingerprint(model: Llama) -> int:
    """A checksum of a few numbers of each weight, the same in float32 and bfloat16: tells a fine-tune from its base."""
    sample = torch.cat([p.flatten()[:64].to("cpu", torch.bfloat16) for p in model.parameters()])
    return zlib.crc32(sample.view(torch.int16).numpy().tobytes())


# ---------------------------------------------------------------------------------------------------------------------
# Decoding: one step for the nodes of one tree depth

class ChimeraState:
    """One text's draft state. `observe` takes the states that the target committed, `step` drafts one tree depth.

    Rows of the cache at depth d: h_0..h_{n-1} | hhat of the nodes expanded at depths 0..d-1 | z of depth d. Only a z
    itself sees its row; the next step writes its node's hhat over it. The next `observe` drops all behind h_{n-1}.
    """

    def __init__(self, draft: Chimera, rows: int):
        self.draft, self.vocab_ids = draft, draft.vocab_ids
        self.cache = KVCache(1, draft.target, rows, draft.norm.weight)
        self.pending = draft.norm.weight.new_empty(0, draft.target.hidden_size) # committed h, not in the cache
        self.above = self.pending                                               # hhat of the depth above
        self.length = 0                                                         # n: committed, pending ones included
        self.at: torch.Tensor | None = None                                     # n as a tensor while shapes are fixed
        self.drafted = 0                                                        # then: rows behind n that hold hhat

    def observe(self, tokens: list[int], hidden: torch.Tensor) -> None:
        """hidden [R, D]: the target's states of the newly committed positions (their tokens are not needed here)."""
        self.cache.length, self.at, self.cache.where = self.length - len(self.pending), None, None
        self.pending, self.newest = torch.cat((self.pending, hidden)), hidden[-1:]
        self.length += len(hidden)

    def fix(self) -> None:
        """For compiled steps: from here to release() no shape and no Python number depends on n or on how many states
        are pending. The last pending state is repeated up to K + 1 rows, and each writes its own row."""
        n, most = self.length, self.draft.config.depth + 1
        old, last = self.pending[:-most], self.pending[-most:]
        if len(old):                                        # of the prompt: into the cache at once
            positions = slice(n - len(self.pending), n - len(last))
            self.cache.write(0, *self.draft.block.project(old[None], *self.draft.frozen["model"].rope(positions))[1:])
        place = torch.arange(most, device=last.device).clamp(max=len(last) - 1)
        self.fixed = last[place], place + (n - len(last))
        self.at, self.drafted = torch.tensor(n, device=place.device), 0

    def release(self) -> None:
        self.cache.length, self.pending = self.length, self.pending[:0]
        self.at = self.cache.where = None

    def step(self, depth: int, trigrams: torch.Tensor, offsets: torch.Tensor, mask) -> torch.Tensor:
        """Drafts the M nodes of one depth: trigrams [M, 3], offsets [R + M] (positions behind n) -> logits [M, W].

        One pass projects the R rows that became known (pending h at depth 0, then hhat of the depth above) and M new z.
        """
        known, draft, n = self.pending if depth == 0 else self.above, self.draft, self.length
        z = draft.lookup(trigrams)                                                                  # [M, D]
        if self.at is None:                                 # a slice costs less than a gather
            chain = depth == 0 or len(known) == len(z) == 1
            positions = slice(n + depth - len(known), n + depth + 1) if chain else n + offsets
        else:
            known, positions = self._fixed_rows(depth, offsets, len(z))
        R = len(known)
        q, k, v = draft.block.project(torch.cat((known, z))[None], *draft.frozen["model"].rope(positions))
        k, v = self.cache.write(0, k, v)                                                            # [1, G, S, E]
        if self.at is None:
            self.cache.length, self.pending = self.cache.length + R, self.pending[:0]
        self.above = hhat = draft.norm(draft.block.finish(z[None], attend(q[:, :, R:], k, v, mask)))[0]
        return draft.head_logits(depth, draft.head_input(depth, self.newest.expand_as(hhat), hhat))

    def _fixed_rows(self, depth: int, offsets: torch.Tensor, M: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Between fix() and release(): -> the states that became known [R, D], and the positions of them and the M new
        z, [R + M]. Tells the cache where the rows go."""
        if depth == 0:
            known, before = self.fixed
            self.cache.where = torch.cat((before, self.at + torch.arange(M, device=offsets.device)))
            return known, torch.cat((before, self.at + offsets))
        start, self.drafted = self.drafted, self.drafted + len(self.above)
        self.cache.where = self.at + torch.arange(start, self.drafted + M, device=offsets.device)
        return self.above, self.at + offsets
