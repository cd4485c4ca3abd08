"""ablation.py: each arm leaves out what it says, in training and in decoding alike, and stays lossless."""
from argparse import Namespace

import pytest
import torch
from helpers import random_ids, randomise, tiny_draft, tiny_llama

from ablation import ARMS, HeadsAlone, WithoutContext, decode_arm
from draft import ChimeraConfig
from model import Llama, Tokenizer
from speculative import generate

MODEL = tiny_llama()
CLASSES = sorted({cls for cls, _ in ARMS.values()}, key=lambda cls: cls.__name__)


def arm(cls):
    draft = cls(ChimeraConfig(depth=4), MODEL)
    randomise(draft, 1)
    return draft.requires_grad_(False)


@pytest.mark.parametrize("cls", CLASSES)
def test_training_and_decoding_compute_the_same(cls):
    draft, ids = arm(cls), random_ids(12)
    tokens = torch.tensor([ids])
    states, state = draft(tokens, MODEL.hidden_states(tokens)), draft.new_state(40)
    state.observe(ids[:6], MODEL.hidden_states(tokens)[0, :6])
    for k in range(4):
        trigram = torch.tensor([ids[4 + k:7 + k]])
        found = state.step(k, trigram, torch.tensor([k - 1, k]), None)
        assert torch.allclose(found[0], draft.head_logits(k, states[k][0, 5]), atol=1e-4)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_arm_gives_the_plain_text(cls):
    plain = [i for p in generate(MODEL, [5], max_new_tokens=20) for i in p]
    assert [i for p in generate(MODEL, [5], arm(cls), "chain:4", 20) for i in p] == plain


def test_without_context_no_earlier_state_matters():
    ids = torch.tensor([random_ids(12)])
    hidden = MODEL.hidden_states(ids)
    changed = torch.cat((hidden[:, :5] + 1, hidden[:, 5:]), 1)
    for cls, same in ((WithoutContext, True), (HeadsAlone, True), (ARMS["K = 4"][0], False)):
        a, b = (arm(cls)(ids, h)[0][0, 6] for h in (hidden, changed))
        assert torch.allclose(a, b) is same


def test_an_arm_is_measured_beside_plain_decoding(toy_checkpoint, tmp_path):
    model, tok = Llama.from_pretrained(toy_checkpoint), Tokenizer.from_pretrained(toy_checkpoint)
    tiny_draft(model).save_pretrained(tmp_path / "0")
    (tmp_path / "lines.txt").write_text("Once upon a time\nThe dog\n")
    options = Namespace(out=tmp_path, questions=tmp_path / "lines.txt", prompts=2)
    figures = decode_arm(next(iter(ARMS)), model, tok, "none", options)
    assert figures["tau"] >= 1 and figures["identical"] == "2/2"
