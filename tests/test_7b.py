"""A checkpoint of LLaMA-2-7B's shape (random float16, shards of the real names and sizes, 13.5 GB) loads and decodes.

    CHIMERA_7B=/a/folder/with/14/GB/free pytest -m slow tests/test_7b.py

The folder is written once and may be deleted afterwards. Needs about 16 GB of memory, and some minutes.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model import Llama, LlamaConfig, hf_parts

CONFIG = LlamaConfig(rms_norm_eps=1e-5, max_position_embeddings=4096)          # the other defaults are the 7B's
ROOT = Path(__file__).parent.parent
LOAD = """
import resource, sys, torch
from model import Llama
from speculative import generate
def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))
before = anonymous()
model = Llama.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
weights, held = sum(p.nbytes for p in model.parameters()), anonymous() - before
print(held / weights, [i for ids in generate(model, [1, 2, 3], max_new_tokens=4) for i in ids])
"""


def write_checkpoint(folder: Path) -> None:
    """Two shards, split as the published ones are (after layer 23), filled layer by layer."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = Llama(CONFIG)
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    where, tensors = {}, ({}, {})
    for name, parameter in model.named_parameters():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
        second = layer > 23 or name in ("norm.weight", "lm_head.weight")
        for hf, shape in hf_parts(name, parameter, CONFIG):
            tensors[second][hf] = (torch.ones if len(shape) == 1 else torch.randn)(shape, dtype=torch.float16)
            tensors[second][hf] *= 1 if len(shape) == 1 else 0.02
            where[hf] = shards[second]
        if not second and name.startswith("layers.23.down"):
            save_file(tensors[0], folder / shards[0])
            tensors[0].clear()
    save_file(tensors[1], folder / shards[1])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(CONFIG.to_dict()))


@pytest.mark.slow
@pytest.mark.skipif("CHIMERA_7B" not in os.environ, reason="CHIMERA_7B names no folder")
def test_a_7b_checkpoint_loads_within_its_own_size_and_decodes():
    folder = Path(os.environ["CHIMERA_7B"])
    if not (folder / "config.json").exists():
        write_checkpoint(folder)
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) > 13.4e9
    done = subprocess.run([sys.executable, "-c", LOAD, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ratio, ids = done.stdout.split(" ", 1)
    assert float(ratio) < 1.1 and len(json.loads(ids)) == 4
