"""Checkpoint files in Hugging Face layout: names, shards, and one clear line for whatever is wrong with them.

No file is ever executed: safetensors and JSON hold data only, .bin files are read with torch's weights_only unpickler.
"""
import json
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

HF_NAMES = {"embed": ["model.embed_tokens"], "norm": ["model.norm"], "lm_head": ["lm_head"],
            "input_norm": ["input_layernorm"], "post_norm": ["post_attention_layernorm"],
            "qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "o_proj": ["self_attn.o_proj"],
            "gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"], "down_proj": ["mlp.down_proj"]}


def hf_parts(name: str, parameter: torch.Tensor, config) -> list[tuple[str, list[int]]]:
    """One of our (fused) parameters -> the Hugging Face tensors stacked in it, with their shapes."""
    *prefix, module, leaf = name.split(".")
    rows, rest = parameter.shape[0], list(parameter.shape[1:])
    kv = config.num_key_value_heads * config.head_dim
    sizes = {"qkv_proj": [rows - 2 * kv, kv, kv], "gate_up_proj": [rows // 2] * 2}.get(module, [rows])
    start = ".".join(["model", *prefix]) + "." if prefix else ""
    return [(f"{start}{hf}.{leaf}", [size, *rest]) for hf, size in zip(HF_NAMES[module], sizes)]


def refuse_pointer(path: Path) -> None:
    """A clone without Git LFS holds small text files in the place of the large ones."""
    if path.is_file():
        with open(path, "rb") as file:
            if file.read(26) == b"version https://git-lfs.gi":
                raise ValueError(f"{path} is a Git LFS pointer, not the file itself; run git lfs pull in its folder")


def read_json(path: Path) -> dict:
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found; give a folder in Hugging Face layout (config.json, *.safetensors)")
    refuse_pointer(path)
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch the file again") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} is not a JSON object; fetch the file again")
    return raw


class BinFile:
    """A pytorch_model*.bin under safetensors' interface; memory-mapped, so only what is used is read."""

    def __init__(self, path: Path):
        try:
            self.tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged, too old, or holds code instead of weights ({str(error)[:80]}...); "
                             "fetch it again, or the safetensors form") from None
        if not isinstance(self.tensors, dict) or not all(map(torch.is_tensor, self.tensors.values())):
            raise ValueError(f"{path} is no table of tensors; fetch the checkpoint again")

    def keys(self):
        return self.tensors.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    get_slice = get_tensor


def open_tensors(path: Path):
    """A .safetensors or .bin file, opened; its tensors are not read yet."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found; the checkpoint is incomplete, fetch that file again")
    refuse_pointer(path)
    if path.suffix == ".bin":
        return BinFile(path)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}); fetch the file again") from None


def tensor_files(folder: Path) -> dict:
    """Tensor name -> the open file that holds it. safetensors before .bin; an index decides which files."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index, single = folder / f"{stem}.{suffix}.index.json", folder / f"{stem}.{suffix}"
        if index.is_file():
            names = shard_names(index)
            files = {file: open_tensors(folder / file) for file in sorted(set(names.values()))}
            return {name: files[file] for name, file in names.items()}
        if single.is_file() or suffix == "bin":
            file = open_tensors(single if single.is_file() else folder / "model.safetensors")
            return dict.fromkeys(file.keys(), file)


def shard_names(index: Path) -> dict[str, str]:
    """The index's table; an entry that points out of the folder is refused."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise ValueError(f"{index} has no weight_map; fetch the file again")
    for file in names.values():
        if not isinstance(file, str) or file != Path(file).name or "\\" in file or "\0" in file:
            raise ValueError(f"{index}: {file!r} is no plain file name; fetch the file again")
    return names


def shape_of(where: dict, name: str) -> list[int]:
    """From the file's header: nothing is read."""
    if name not in where:
        raise ValueError(f"the checkpoint has no tensor {name!r}; it is incomplete or not a LLaMA checkpoint")
    try:
        part = where[name].get_slice(name)
        return list(part.shape if torch.is_tensor(part) else part.get_shape())
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"tensor {name!r} cannot be read ({error}); fetch the checkpoint again") from None


def check_sizes(where: dict, config) -> None:
    """config.json's sizes against the files' headers, before anything of such a size is made."""
    D, first, last = config.hidden_size, "model.layers.0.", f"model.layers.{config.num_hidden_layers - 1}."
    wanted = {"model.embed_tokens.weight": [config.vocab_size, D], last + "input_layernorm.weight": [D],
              first + "self_attn.q_proj.weight": [config.num_attention_heads * config.head_dim, D],
              first + "self_attn.k_proj.weight": [config.num_key_value_heads * config.head_dim, D],
              first + "mlp.gate_proj.weight": [config.intermediate_size, D]}
    for name, shape in wanted.items():
        check_shape(where, name, shape)


def check_shape(where: dict, name: str, shape: list[int]) -> None:
    found = shape_of(where, name)
    if found != shape:
        raise ValueError(f"tensor {name!r} has shape {found}, config.json asks for {shape}")


def read_tensor(where: dict, name: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    check_shape(where, name, shape)
    tensor = read_part(where[name], name)
    if not tensor.is_floating_point():
        raise ValueError(f"tensor {name!r} holds {tensor.dtype}, not floating-point numbers; quantised checkpoints are "
                         "not supported")
    return tensor.to(dtype)


def read_part(file, name: str) -> torch.Tensor:
    """A tensor of an open file; one with NaN or infinities is refused, since no text could come from it."""
    try:
        tensor = file.get_tensor(name)
    except (SafetensorError, RuntimeError, OSError) as error:
        raise ValueError(f"tensor {name!r} cannot be read ({error}); fetch the file again") from None
    if tensor.is_floating_point() and not tensor.sum(dtype=torch.float32).isfinite():
        raise ValueError(f"tensor {name!r} holds NaN or infinities; fetch the file again")
    return tensor


def refuse_unknown(where: dict, known: set[str], tied: bool) -> None:
    """An unread tensor would mean another model than config.json tells; only recomputable rope buffers may be there."""
    known = known | ({"lm_head.weight"} if tied else set())
    odd = [n for n in where if n not in known and not n.endswith(("rotary_emb.inv_freq", "rope.freqs"))]
    if odd:
        raise ValueError(f"the checkpoint has {len(odd)} unknown tensors, such as {odd[0]!r}; it is not a plain LLaMA")
