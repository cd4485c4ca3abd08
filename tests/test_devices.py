"""What must hold on every device: the CPU always, a CUDA GPU where there is one."""
from functools import partial

import pytest
import torch
from helpers import GOLDEN, random_ids, tiny_draft, tiny_llama

from data import collate
from draft import Chimera
from loss import Meter, Weights, batch_loss
from model import Llama
from sample import DRAFT, STORIES, decode, settings
from speculative import generate, warp

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])


def on(device: str, dtype=torch.float32) -> tuple[Llama, Chimera]:
    model = Llama.from_pretrained(STORIES, device, dtype)
    return model, Chimera.from_pretrained(DRAFT, model)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_those_of_the_cpu_in_float32(device, dtype):
    folder = GOLDEN / "gqa_tied"
    ids = torch.tensor([random_ids(12, 30)])
    wanted, found = Llama.from_pretrained(folder)(ids), Llama.from_pretrained(folder, device, dtype)(ids.to(device))
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    assert torch.allclose(found.float().cpu(), wanted, atol=tolerance * wanted.abs().max().item())


@DEVICES
@pytest.mark.parametrize("tree", ["chain:5", "3,3,2"])
def test_greedy_text_is_that_of_plain_decoding(device, tree):
    model, draft = on(device)
    prompt = [1, 400, 300]
    plain = [i for p in generate(model, prompt, max_new_tokens=60) for i in p]
    assert [i for p in generate(model, prompt, draft, tree, 60) for i in p] == plain


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_seed_draws_the_same_text(device, dtype):
    model, draft = on(device, dtype)
    args = settings(tree="2,2,1", max_new_tokens=40, temperature=1.0, top_k=50, top_p=0.95, seed=3)
    first, second = (decode(model, [1, 400], draft, args, [2]).ids for _ in range(2))
    assert first == second and len(first) > 1


@DEVICES
def test_the_second_token_has_the_target_s_frequencies(device):
    """The first one that a draft proposes, 1,500 times, against the law that the target alone gives."""
    model = tiny_llama().to(device)
    draft, generator, counts = tiny_draft(model), torch.Generator().manual_seed(0), torch.zeros(40)
    law = partial(warp, temperature=1.0, top_k=3)
    first = law(model(torch.tensor([[5]], device=device))[0, -1]).cpu()
    wanted = sum(first[i] * law(model(torch.tensor([[5, i]], device=device))[0, -1]).cpu() for i in range(40))
    for _ in range(1500):
        passes = generate(model, [5], draft, "3", 2, 1.0, top_k=3, generator=generator)
        counts[[i for ids in passes for i in ids][1]] += 1
    assert (counts / 1500 - wanted).abs().max() < 0.05


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_has_finite_gradients(device, dtype):
    model = tiny_llama().to(device, dtype)
    draft = tiny_draft(model).float().requires_grad_(True)
    tokens, labelled = (t.to(device) for t in collate([(torch.tensor(random_ids(9)), torch.ones(9, dtype=torch.bool))]))
    with torch.autocast(device, torch.bfloat16, enabled=dtype != torch.float32):
        batch_loss(draft, model, tokens, labelled, Meter(3), Weights(), 0.1)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in draft.parameters())
