"""Plain functions that the tests share: tiny random models and checkpoint folders, nothing that needs a download."""
import io
import json
import shutil
from pathlib import Path

import sentencepiece
import torch

from draft import Chimera, ChimeraConfig
from model import Llama, LlamaConfig

GOLDEN = Path(__file__).parent / "golden"

STORY = """Once upon a time there was a little girl named Lily. She loved to play outside in the sun with her friends.
One day, Lily found a shiny red ball in the park. "What a nice ball!" said Lily. She took it home to her mum.
Tom was a small dog. He liked to run and jump. Tom saw a big cat, and the cat saw Tom. They were happy to play together.
The sun was warm and the sky was blue. The children counted 1, 2, 3, 4, 5, 6, 7, 8, 9 and then went home. The end.
"""


def randomise(module: torch.nn.Module, seed: int) -> None:
    """Seeded weights, large enough that greedy text is no loop: logits of std 1, norm weights near one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise, gain = torch.randn(parameter.shape, generator=generator), 1 if name.startswith("lm_head") else 2
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else gain * noise * parameter.shape[-1] ** -0.5)


def tiny_llama(seed: int = 0, **overrides) -> Llama:
    """A random Llama of 40 tokens, 2 layers, 4 query and 2 key/value heads; overrides are fields of LlamaConfig."""
    config = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128} | overrides
    model = Llama(LlamaConfig(**config))
    randomise(model, seed)
    return model


def near_copy(model: Llama, noise: float = 0.04, seed: int = 5) -> Llama:
    """The same Llama with a little noise on its weights: a draft that is right often, not always."""
    copy = Llama(model.config)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        copy.get_parameter(name).copy_(weight * (1 + noise * torch.randn(weight.shape, generator=generator)))
    return copy


def tiny_draft(model: Llama, seed: int = 1, **overrides) -> Chimera:
    """A random Chimera on `model`, frozen; overrides are fields of ChimeraConfig (vocab_ids come with draft_vocab)."""
    config = ChimeraConfig(**{"depth": 3} | overrides)
    generator = torch.Generator().manual_seed(seed)
    vocab_ids = torch.randperm(model.config.vocab_size, generator=generator)[:config.draft_vocab].sort().values
    draft = Chimera(config, model, vocab_ids if config.draft_vocab else None)
    randomise(draft, seed)
    return draft.requires_grad_(False)


def random_ids(count: int, vocab: int = 40, seed: int = 0) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def train_tokenizer(path: Path, vocab_size: int = 400) -> Path:
    """A sentencepiece BPE with LLaMA's settings: unk 0, bos 1, eos 2, 256 byte tokens, spaces kept as they are."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(STORY.splitlines()), model_writer=model, model_type="bpe", vocab_size=vocab_size,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, split_digits=True, num_threads=1, minloglevel=2)
    path.write_bytes(model.getvalue())
    return path


def save_checkpoint(model: Llama, folder: Path, tokenizer: Path | None = None) -> Path:
    """A Hugging Face folder as users have it: config.json with bos and eos ids, model.safetensors, tokenizer.model."""
    model.save_pretrained(folder)
    edit_config(folder, bos_token_id=1, eos_token_id=2)
    if tokenizer is not None:
        shutil.copy(tokenizer, folder / "tokenizer.model")
    return folder


def edit_config(folder: Path, **changes) -> Path:
    """Changes entries of a folder's config.json; a value of ... removes the entry."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    return folder
