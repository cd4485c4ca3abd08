"""LLaMA in one file: the forward pass, its KV cache, the loader of Hugging Face folders, the tokenizer.

The arithmetic is that of LLaMA-2 (Touvron et al., arXiv 2307.09288): RMSNorm before each part, rotary positions,
grouped-query attention, SwiGLU. It equals Hugging Face transformers' on the same folder. Left out on purpose: biases,
sliding windows, experts, rope types other than plain and linear. A checkpoint that needs one is refused by name.

Shapes: B batch, T new tokens, S cached + new tokens, D hidden size, H query heads, G key/value heads, E head size,
V vocabulary.
"""
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from checkpoint import check_sizes, hf_parts, read_json, read_tensor, refuse_pointer, refuse_unknown, tensor_files

MOST = {"max_position_embeddings": 2**20 + 1, "num_hidden_layers": 1000}    # lists of this length are made


@dataclass
class LlamaConfig:
    """The fields of config.json that change the arithmetic, under their Hugging Face names."""
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None      # None: as many as query heads (no grouping)
    head_dim: int | None = None                 # None: hidden_size / num_attention_heads
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_factor: float = 1.0                    # linear rope scaling: positions are divided by it
    tie_word_embeddings: bool = False

    def __post_init__(self):
        """Checks types before any arithmetic: config.json is a user's file."""
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        for name, value in asdict(self).items():
            whole = name not in ("rms_norm_eps", "rope_theta", "rope_factor")
            if name == "tie_word_embeddings":
                if not isinstance(value, bool):
                    raise ValueError(f"tie_word_embeddings must be true or false, not {value!r}")
            elif name == "head_dim" and value is None:
                self.head_dim = self.hidden_size // self.num_attention_heads
            elif type(value) not in ((int,) if whole else (int, float)) or not 0 < value < MOST.get(name, 2**31):
                kind, most = "integer" if whole else "number", MOST.get(name, 2**31) - 1
                raise ValueError(f"{name} must be a positive {kind}, not {value!r} (at most {most})")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"{self.num_attention_heads} query heads do not divide into "
                             f"{self.num_key_value_heads} key/value heads")

    @classmethod
    def from_dict(cls, raw: dict) -> "LlamaConfig":
        """Reads a Hugging Face config.json, old form or new; raises ValueError for what this file does not compute."""
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise ValueError(f"rope_scaling must be an object, not {rope!r}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if raw.get("model_type", "llama") != "llama":
            raise ValueError(f"model_type {raw['model_type']!r} is not supported, only 'llama' is")
        if kind not in ("default", "linear"):
            raise ValueError(f"rope type {kind!r} is not supported, only 'default' and 'linear' are (LLaMA-2 style)")
        only = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None,
                "sliding_window": None, "num_local_experts": None}
        for key, value in only.items():
            if raw.get(key, value) not in (value, None):
                raise ValueError(f"{key} = {raw[key]!r} is not supported; this code computes {key} = {value!r} only")
        fields = {k: raw[k] for k in cls.__dataclass_fields__ if k in raw}
        fields["rope_theta"] = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
        fields["rope_factor"] = rope.get("factor") if kind == "linear" else 1.0
        return cls(**fields)

    @classmethod
    def from_pretrained(cls, folder) -> "LlamaConfig":
        """Reads folder/config.json; what is wrong with it is said with the file's name."""
        path = Path(folder) / "config.json"
        raw = read_json(path)
        try:
            return cls.from_dict(raw)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None

    def to_dict(self) -> dict:
        """The Hugging Face form of this config."""
        raw = asdict(self) | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
        factor = raw.pop("rope_factor")
        return raw | {"rope_scaling": None if factor == 1.0 else {"type": "linear", "factor": factor}}


class KVCache:
    """Keys and values of the committed positions, preallocated for `rows` positions.

    Contract: the rows 0..length-1 are valid. `write` puts T new rows behind them and returns all S = length + T;
    nothing counts until `length` is moved. `keep(start, rows)` moves rows to start, start+1, ... and cuts behind them.

    With `where` [T] set, `write` puts the new rows there instead and returns the whole cache, S = rows, for a mask to
    hide what is not valid: then no shape depends on the length, and a compiled step serves every position.
    """

    def __init__(self, layers: int, config: LlamaConfig, rows: int, like: torch.Tensor, batch: int = 1):
        shape = (2, batch, config.num_key_value_heads, rows, config.head_dim)
        self.kv = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(layers)]     # zeros: a row
        self.length = 0                                     # that a mask hides must still not hold a NaN
        self.where: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.kv[0].shape[3]

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` positions in all, keeping what is there."""
        if rows > self.rows:
            self.kv = [F.pad(kv, (0, 0, 0, rows - self.rows)) for kv in self.kv]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v [B, G, T, E] -> all keys and values up to and with them, [B, G, S, E] each; length stays.

        They are views of self.kv[layer], [2, B, G, rows, E], keys before values: nothing but the T new rows is copied.
        """
        if self.where is not None:
            return tuple(self.kv[layer].index_copy_(3, self.where, torch.stack((k, v))))
        # exercise 4
        end = self.length + k.shape[2]
        keys, values = self.kv[layer]
        keys[:, :, self.length:end] = k
        values[:, :, self.length:end] = v
        return keys[:, :, :end], values[:, :, :end]

    def keep(self, start: int, rows: list[int]) -> None:
        """Leaves rows 0..start-1, followed by the given (absolute) rows, in that order: of all layers, keys and values.

        `rows` may overlap the places they move to: read all before writing any.
        """
        # exercise 4
        self.length = start + len(rows)
        if rows != list(range(start, self.length)):         # already in place: nothing to move
            index = torch.tensor(rows, device=self.kv[0].device)
            for kv in self.kv:
                kv[:, :, :, start:self.length] = kv.index_select(3, index)


def rope_table(config: LlamaConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [positions, E] in float32; the first half of sin is negated, as rotate() wants it.

    Pair j of position m turns by the angle m / rope_factor * rope_theta^(-2j / E), j = 0..E/2-1. Columns j and j + E/2
    belong to pair j. On the CPU, whatever the default device (a loader's may be "meta").
    """
    # exercise 1
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    steps = torch.arange(config.max_position_embeddings, dtype=torch.float32, device="cpu") / config.rope_factor
    angles = torch.outer(steps, config.rope_theta ** -half)                     # [positions, E/2]
    return torch.cat((angles.cos(), angles.cos()), 1), torch.cat((-angles.sin(), angles.sin()), 1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the half-rotation layout of Hugging Face files (no permutation): x [B, T, heads, E] -> same.

    The halves (x1, x2) become (x1 c - x2 s, x2 c + x1 s). cos and sin are rows of rope_table, [T, 1, E]: that sin has
    the minus already.
    """
    # exercise 1
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"    # a CPU without AVX-512: it has no bfloat16 either


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., K], weight [N, K] -> x @ weight.T [..., N], by the kernel that is fastest here (all of them measured).

    On a CPU few rows are up to twice as fast as columns behind the weight: in bfloat16 with AVX-512, in float32
    without it. In bfloat16 one column takes longer than two: it is doubled. (So a row also rounds the same alone and
    among others, more often than not.)
    """
    few = weight.device.type == "cpu" and x.numel() <= (32 if AVX2 else 128) * x.shape[-1]
    if not few or weight.dtype != (torch.float32 if AVX2 else torch.bfloat16):
        return F.linear(x, weight)
    if AVX2 and x.numel() == x.shape[-1]:
        return split_product(x, weight)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = weight @ (rows.expand(2, -1) if len(rows) == 1 else rows).t()         # [N, M or 2]
    return out[:, :len(rows)].t().view(*x.shape[:-1], len(weight))


def split_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """linear() of one row: a product with one vector would run on one core, so each gets a part of the weight."""
    N, K = weight.shape
    parts = math.gcd(N, torch.get_num_threads())
    out = torch.bmm(weight.view(parts, N // parts, K), x.reshape(1, K, 1).expand(parts, K, 1))
    return out.view(*x.shape[:-1], N)


class Linear(nn.Linear):
    """Without bias, through linear()."""

    def __init__(self, width: int, out: int):
        super().__init__(width, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight)


def lay_out(weight: torch.Tensor) -> torch.Tensor:
    """The same matrix, stored as it is read fastest: float32 with AVX-512 by columns, so that few rows cost as one."""
    by_columns = weight.dim() == 2 and weight.dtype == torch.float32 and weight.device.type == "cpu" and not AVX2
    return weight.t().contiguous().t() if by_columns else weight


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last dimension; torch's own, kept to the weight's dtype when autocast mixes them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.normalized_shape, self.weight, self.eps)


class Block(nn.Module):
    """One decoder layer as two halves around attention: the draft puts its own attention between them."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.heads, self.groups, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        D, inner = config.hidden_size, config.intermediate_size
        self.input_norm = RMSNorm(D, config.rms_norm_eps)
        self.qkv_proj = Linear(D, (self.heads + 2 * self.groups) * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, D)
        self.post_norm = RMSNorm(D, config.rms_norm_eps)
        self.gate_up_proj = Linear(D, 2 * inner)
        self.down_proj = Linear(inner, D)

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        """x [B, T, D] -> q [B, H, T, E], k and v [B, G, T, E], q and k rotated."""
        B, T, _ = x.shape
        qkv = self.qkv_proj(self.input_norm(x)).contiguous().view(B, T, self.heads + 2 * self.groups, self.head_dim)
        qk = rotate(qkv[:, :, :self.heads + self.groups], cos, sin).transpose(1, 2)
        return qk[:, :self.heads], qk[:, self.heads:], qkv[:, :, self.heads + self.groups:].transpose(1, 2)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of the layer: x [B, T, D] and what attention gathered, [B, H, T, E] -> [B, T, D]."""
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(self.post_norm(x)).chunk(2, -1)
        return x + self.down_proj(F.silu(gate) * up)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, causal: bool = False):
    """q [B, H, T, E], k and v [B, G, S, E] -> [B, H, T, E]; query head h reads key/value head h // (H / G).

    softmax(q k^T / sqrt(E) + mask) v. mask [T, S] is additive (0 or -inf); causal (only without mask, S = T): row i
    reads the rows 0..i.
    """
    # exercise 1
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def additive_mask(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Boolean -> 0 / -inf. Combine booleans first and fill once: adding two such masks makes NaN in half precision."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -math.inf)


class Llama(nn.Module):
    """The target model. Frozen: no parameter asks for a gradient."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed.weight
        self.requires_grad_(False)
        cos, sin = rope_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def rope(self, positions: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] or [B, T] (or a slice) -> cos, sin [T or B, T, 1, E]."""
        return self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)

    def hidden_states(self, tokens: torch.Tensor, cache: KVCache | None = None, positions: torch.Tensor | None = None,
                      mask: torch.Tensor | None = None) -> torch.Tensor:
        """tokens [B, T] int64 -> [B, T, D] after the final norm.

        With a cache the T tokens follow its rows and are added to it. positions [T] or [B, T] default to the rows'
        numbers; mask [T, S] or [B, 1, T, S], additive, defaults to causal.
        """
        T, past = tokens.shape[1], 0 if cache is None or cache.where is not None else cache.length
        cos, sin = self.rope(slice(past, past + T) if positions is None else positions)
        if mask is None and past and T > 1:     # is_causal would align top-left and hide the past
            mask = additive_mask(torch.ones(T, past + T, dtype=torch.bool, device=tokens.device).tril(past), cos.dtype)
        x = self.embed(tokens)                                                  # [B, T, D]
        for i, block in enumerate(self.layers):
            q, k, v = block.project(x, cos, sin)
            if cache is not None:
                k, v = cache.write(i, k, v)                                     # [B, G, S, E]
            x = block.finish(x, attend(q, k, v, mask, causal=mask is None and T > 1))
        x = self.norm(x)
        if cache is not None and cache.where is None:       # last: an interrupt before it changes nothing
            cache.length += T
        return x

    def score(self, tokens: torch.Tensor, cache: KVCache, positions: torch.Tensor, mask: torch.Tensor | None):
        """One step of decoding: hidden_states of one text and their logits, [T, D] and [T, V]."""
        hidden = self.hidden_states(tokens, cache, positions, mask)[0]
        return hidden, self.lm_head(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [B, T] int64 -> logits [B, T, V]."""
        return self.lm_head(self.hidden_states(tokens))

    def new_cache(self, rows: int, batch: int = 1) -> KVCache:
        return KVCache(len(self.layers), self.config, rows, self.embed.weight, batch)

    @classmethod
    def from_pretrained(cls, folder, device="cpu", dtype: torch.dtype = torch.float32) -> "Llama":
        """Loads a Hugging Face folder: config.json and the weights, as checkpoint.tensor_files finds them.

        Raises FileNotFoundError for a missing file, ValueError for what cannot be computed or does not fit.
        """
        folder, config = Path(folder), LlamaConfig.from_pretrained(folder)
        where = tensor_files(folder)
        check_sizes(where, config)              # before anything as large as config.json asks for is made
        with torch.device("meta"):              # shapes only; each tensor is replaced below, one at a time
            model = cls(config)
        for name, parameter in list(model.named_parameters()):
            parts = hf_parts(name, parameter, config)
            weight = torch.cat([read_tensor(where, hf, shape, dtype) for hf, shape in parts])
            owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            weight = weight.to(device) if "embed" in name else lay_out(weight.to(device))
            setattr(owner, leaf, nn.Parameter(weight, requires_grad=False))
        if config.tie_word_embeddings:
            model.lm_head.weight = model.embed.weight
        refuse_unknown(where, {hf for name, p in model.named_parameters() for hf, _ in hf_parts(name, p, config)},
                       config.tie_word_embeddings)
        model.cos, model.sin = (table.to(device, dtype) for table in (model.cos, model.sin))    # made on the CPU above
        return model

    def save_pretrained(self, folder, dtype: torch.dtype | None = None) -> None:
        """Writes the Hugging Face layout: config.json and model.safetensors; tied embeddings once."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, parameter in self.named_parameters():
            parts = hf_parts(name, parameter, self.config)
            for (hf, _), piece in zip(parts, parameter.detach().split([shape[0] for _, shape in parts])):
                tensors[hf] = piece.to("cpu", dtype or piece.dtype).contiguous()
        Path(folder, "config.json").write_text(json.dumps(self.config.to_dict(), indent=2))
        save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer

class Tokenizer:
    """Text <-> ids through the folder's own tokenizer.model (sentencepiece) or tokenizer.json (tokenizers, optional).

    encode treats text as plain text: a typed "</s>" stays text, control ids are inserted by chat templates only.
    """

    def __init__(self, encode, decode, vocab_size: int, special: dict[str, int], bos_id: int | None, eos_ids: set[int],
                 adds_bos: bool):
        self._encode, self._decode, self.special = encode, decode, special
        self.vocab_size, self.bos_id, self.eos_ids, self.adds_bos = vocab_size, bos_id, eos_ids, adds_bos

    @classmethod
    def from_pretrained(cls, folder) -> "Tokenizer":
        """Raises FileNotFoundError without tokenizer files, ValueError if they cannot be read."""
        folder = Path(folder)
        raw, eos_ids = read_json(folder / "config.json"), set()
        for path in filter(Path.is_file, (folder / "config.json", folder / "generation_config.json")):
            eos = read_json(path).get("eos_token_id")
            ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
            if not all(type(i) is int and i >= 0 for i in ids):
                raise ValueError(f"{path}: eos_token_id must be an id or a list of ids, not {eos!r}")
            eos_ids.update(ids)
        for name in ("tokenizer.model", "tokenizer.json"):
            refuse_pointer(folder / name)
        if (folder / "tokenizer.model").is_file():
            return cls._sentencepiece(folder / "tokenizer.model", eos_ids)
        if (folder / "tokenizer.json").is_file():
            return cls._tokenizers(folder / "tokenizer.json", raw.get("bos_token_id"), eos_ids)
        raise FileNotFoundError(f"{folder} has neither tokenizer.model nor tokenizer.json; copy one of them there")

    @classmethod
    def _sentencepiece(cls, path: Path, eos_ids: set[int]) -> "Tokenizer":
        import sentencepiece
        sp = sentencepiece.SentencePieceProcessor()
        try:
            sp.Load(str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} is not a sentencepiece model ({error}); fetch the file again") from None
        special = {sp.IdToPiece(i): i for i in range(sp.vocab_size()) if sp.IsControl(i)}
        bos = sp.bos_id() if sp.bos_id() >= 0 else None
        return cls(sp.EncodeAsIds, sp.DecodeIds, sp.vocab_size(), special, bos, eos_ids or {sp.eos_id()} - {-1},
                   adds_bos=bos is not None)

    @classmethod
    def _tokenizers(cls, path: Path, bos_id: int | None, eos_ids: set[int]) -> "Tokenizer":
        try:
            import tokenizers
        except ImportError:
            raise ValueError(f"{path} needs the tokenizers package: pip install tokenizers") from None
        try:
            tok = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:      # the package raises bare Exception
            raise ValueError(f"{path} cannot be read ({error}); fetch the file again") from None
        adds_bos = bos_id is not None and tok.encode("a").ids[:1] == [bos_id]
        tok.encode_special_tokens = True
        special = {t.content: i for i, t in tok.get_added_tokens_decoder().items() if t.special}
        return cls(lambda text: tok.encode(text, add_special_tokens=False).ids, tok.decode, tok.get_vocab_size(),
                   special, bos_id, eos_ids, adds_bos)

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """bos=True puts BOS in front where the folder's own tokenizer does (LLaMA: yes, SmolLM2: no)."""
        return ([self.bos_id] if bos and self.adds_bos else []) + self._encode(text)

    def decode(self, ids: list[int]) -> str:
        """Control ids, and ids past the tokenizer's size (padded embeddings), decode to nothing."""
        return self._decode([i for i in ids if 0 <= i < self.vocab_size])
