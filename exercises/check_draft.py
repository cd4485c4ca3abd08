"""Exercises 7 and 8: the draft's parts, and what it learns from."""
import itertools

import torch
import torch.nn.functional as F
from checks import Wrong, randn, rule, same, seeded, shown
from helpers import random_ids, tiny_draft, tiny_llama

from data import collate
from draft import trigrams_of
from loss import Meter, Weights, batch_loss, drafted_from, position_loss, target_distribution

# -- 7 trigram encoder and residual heads ------------------------------------------------------------------------------

FORMS = ({}, {"heads": "full"}, {"draft_vocab": 11}, {"heads": "full", "draft_vocab": 11})


@rule(7, 3, "trigrams_of: the ids of positions i-2, i-1, i; -1 before the beginning")
def _():
    wanted = torch.tensor([[[-1, -1, 5], [-1, 5, 6], [5, 6, 7]], [[-1, -1, 1], [-1, 1, 2], [1, 2, 3]]])
    same(trigrams_of(torch.tensor([[5, 6, 7], [1, 2, 3]])), wanted, "tokens [[5, 6, 7], [1, 2, 3]]")


@rule(7, 4, "encode: trigram_out(silu(trigram_in(three embeddings))), missing neighbours zero")
def _():
    model = tiny_llama()
    draft = tiny_draft(model)
    for gram in ([-1, -1, 0], [-1, 5, 6], [4, 5, 6]):
        parts = [model.embed.weight[i] if i >= 0 else torch.zeros(32) for i in gram]
        wanted = draft.trigram_out(F.silu(draft.trigram_in(torch.cat(parts))))
        same(draft.encode(torch.tensor(gram)), wanted, f"trigram {gram}")
    grams = torch.tensor([[[1, 2, 3], [2, 3, 4]], [[5, 6, 7], [-1, -1, 1]]])
    same(draft.encode(grams)[1, 1], draft.encode(grams[1, 1]), "a batch of trigrams [2, 2, 3]")
    half = tiny_draft(tiny_llama()).to(torch.bfloat16)
    same(str(half.encode(grams).dtype), "torch.bfloat16", "a bfloat16 draft on a float32 target: dtype")


@rule(7, 3, "head_input and head_logits: h and hhat through head k, light heads through the target's lm_head")
def _():
    model = tiny_llama()
    for form in FORMS:
        draft, h, hhat = tiny_draft(model, **form), randn(2, 3, 32), randn(2, 3, 32, seed=1)
        ids = torch.arange(40) if draft.vocab_ids is None else draft.vocab_ids
        both = torch.cat((h, hhat), -1)
        for step in (0, 2):
            wanted = both @ draft.heads[step].weight.T
            if draft.config.heads == "light":
                wanted = wanted @ model.lm_head.weight[ids].T
            found = draft.head_logits(step, draft.head_input(step, h, hhat))
            same(found, wanted, f"{form or 'light heads'}, step {step}")


@rule(7, 2, "head_input: light heads give a state [..., D], full heads [h; hhat]")
def _():
    h, hhat = randn(3, 32), randn(3, 32, seed=1)
    for heads, width in (("light", 32), ("full", 64)):
        draft = tiny_draft(tiny_llama(), heads=heads)
        same(list(draft.head_input(1, h, hhat).shape), [3, width], f"{heads} heads: shape")
        draft.head_logits(1, draft.head_input(1, h, hhat))


# -- 8 depth-k targets and loss ----------------------------------------------------------------------------------------

@rule(8, 4, "drafted_from: step k predicts token j+1 from position j - k, where there is one")
def _():
    b, j = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 3, 2, 4])
    for k in (1, 2, 3):
        has, (step, texts, i) = drafted_from(k, b, j)
        pairs = [(int(x), int(y)) for x, y in zip(b, j) if y >= k]
        what = f"k {k}, positions j {j.tolist()}: "
        same(has.tolist(), [int(y) >= k for y in j], what + "which are predicted")
        same(int(step), k - 1, what + "row of [K, B, T]")
        same(list(zip(texts.tolist(), i.tolist())), [(x, y - k) for x, y in pairs], what + "(b, i)")


@rule(8, 3, "target_distribution: kl * p + one-hot(label) over the draft's vocabulary, the argmax as a place in it")
def _():
    model = tiny_llama()
    hidden, label = randn(6, 32) * 2, torch.tensor(random_ids(6, seed=2))
    for form, kl in itertools.product(({}, {"draft_vocab": 15}), (1.0, 0.5)):
        draft, logits = tiny_draft(model, **form), model.lm_head(hidden)
        ids = list(range(40)) if draft.vocab_ids is None else draft.vocab_ids.tolist()
        found, neg_entropy, best = target_distribution(draft, model, hidden, label, kl)
        p, what = logits[:, ids].softmax(-1), f"{form or 'all tokens'}, kl {kl}: "
        one_hot = torch.tensor([[float(i == t) for i in ids] for t in label.tolist()])
        same(found, kl * p + one_hot, what + "kl * p + one-hot")
        same(neg_entropy, (p * p.clamp(min=1e-30).log()).sum(-1), what + "sum p log p")
        same(best.tolist(), [ids.index(t) if t in ids else -1 for t in logits.argmax(-1).tolist()], what + "argmax")
    model.lm_head.weight[:20] = -100 * hidden[0]            # so unlikely that p is 0 in float32
    neg_entropy = target_distribution(tiny_draft(model), model, hidden[:1], label[:1], 1.0)[1]
    if not neg_entropy.isfinite().all():
        raise Wrong(f"sum p log p where some p is 0: yours {shown(neg_entropy)}, expected a finite number")


@rule(8, 3, "position_loss: minus the sum of wanted * log q, which is cross-entropy + kl * KL(p || q) + kl * entropy")
def _():
    logits, p, label = randn(5, 7), randn(5, 7, seed=1).softmax(-1), torch.tensor([0, 6, 2, 3, 2])
    logq = logits.log_softmax(-1)
    for kl in (0.0, 1.0, 0.7):
        wanted = torch.stack([-logq[c, y] - kl * (p[c] * logq[c]).sum() for c, y in enumerate(label.tolist())])
        goal, leaf = kl * p + F.one_hot(label, 7).float(), logits.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad((goal * -leaf.log_softmax(-1)).sum(), leaf)
        found, found_slope = position_loss(logits, goal.clone())
        same(found, wanted, f"kl {kl}, labels {label.tolist()}")
        same(found_slope, slope, f"gradient by the logits, kl {kl}, labels {label.tolist()}")


@rule(8, 2, "batch_loss: loss and gradients equal the definition, one position after the other")
def _():
    model = tiny_llama()
    draft = tiny_draft(model, draft_vocab=15).requires_grad_(True)
    samples = [(torch.tensor(random_ids(n, seed=n)), torch.rand(n, generator=seeded(n)) < 0.7) for n in (9, 6, 4)]
    tokens, labelled = collate(samples)
    hidden, slow = model.hidden_states(tokens), 0.0
    for k, state in enumerate(draft(tokens, hidden), 1):
        logq = draft.head_logits(k - 1, state).log_softmax(-1)
        for b, i in itertools.product(range(3), range(tokens.shape[1] - k - 1)):
            if labelled[b, i + k]:
                p = model.lm_head(hidden)[b, i + k, draft.vocab_ids].softmax(-1)
                place = (draft.vocab_ids == tokens[b, i + k + 1]).nonzero().flatten()
                slow = slow - logq[b, i, place].sum() + F.kl_div(logq[b, i], p, reduction="sum")
    slow.backward()
    wanted = {name: w.grad.clone() for name, w in draft.named_parameters()}
    draft.zero_grad()
    found = batch_loss(draft, model, tokens, labelled, Meter(3), Weights(), 1.0)
    same(found / slow.item(), 1.0, "loss, yours / expected")
    for name, weight in draft.named_parameters():
        same(weight.grad, wanted[name], f"gradient of {name}", 1e-3)
