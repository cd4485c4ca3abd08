"""Fixtures that the tests share: a toy tokenizer and checkpoint, trained and saved in a temporary folder."""
import signal
from pathlib import Path

import pytest
import torch
from helpers import save_checkpoint, tiny_llama, train_tokenizer

from model import Tokenizer

torch.set_num_threads(1)            # the models are so small that threads only cost
signal.signal(signal.SIGINT, signal.default_int_handler)    # a shell's background job ignores it, and so would children


@pytest.fixture(scope="session")
def toy_tokenizer_file(tmp_path_factory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")


@pytest.fixture(scope="session")
def toy_tokenizer(toy_tokenizer_file) -> Tokenizer:
    """sentencepiece, 400 tokens, bos 1, eos 2, byte fallback."""
    (toy_tokenizer_file.parent / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
    return Tokenizer.from_pretrained(toy_tokenizer_file.parent)


@pytest.fixture
def toy_checkpoint(tmp_path, toy_tokenizer_file) -> Path:
    """A folder of a random 400-token Llama (tiny_llama otherwise) with its tokenizer; its greedy text is readable."""
    model = tiny_llama(vocab_size=400)
    model.lm_head.weight[:259] = 0                          # so that no byte token and no end of text is the likeliest
    return save_checkpoint(model, tmp_path / "toy", toy_tokenizer_file)
