"""sample.py from the outside: what it prints where, and one readable line for everything that a user can get wrong."""
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers import edit_config, near_copy, save_checkpoint, tiny_draft, tiny_llama

import sample
from chat import chat_prompt
from common import run
from model import Llama, Tokenizer
from sample import GREEN, RESET
from speculative import generate

ROOT = Path(__file__).parent.parent
PROMPT = "Tom saw a cat"


class Output(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def cli(toy_checkpoint, monkeypatch, capfd):
    """Runs sample.py in this process on the toy checkpoint; of options given twice the last counts."""
    def call(*argv) -> Output:
        fixed = ["--prompt", PROMPT, "--max_new_tokens", 24, "--device", "cpu", "--dtype", "float32"]
        monkeypatch.setattr(sys, "argv", [str(word) for word in ("sample.py", "--ckpt", toy_checkpoint, *fixed, *argv)])
        capfd.readouterr()
        code = 0
        try:
            run(sample.main)
        except SystemExit as end:
            code = end.code
        return Output(code, *capfd.readouterr())
    return call


@pytest.fixture
def drafts(toy_checkpoint) -> dict[str, Path]:
    """Drafts beside the toy checkpoint: a Chimera, the target once more, and a second Llama that is right often."""
    model, folder = Llama.from_pretrained(toy_checkpoint), toy_checkpoint.parent
    tiny_draft(model).save_pretrained(folder / "chimera")
    save_checkpoint(near_copy(model), folder / "llama")
    return {"chimera": folder / "chimera", "llama": folder / "llama", "target": toy_checkpoint}


def greedy_passes(folder: Path, draft: Path | None = None) -> tuple[list[int], list[list[int]], Tokenizer]:
    """What the library gives for PROMPT: the prompt's ids, the ids of each pass, the tokenizer."""
    model, tok = Llama.from_pretrained(folder), Tokenizer.from_pretrained(folder)
    prompt = tok.encode(PROMPT)
    passes = generate(model, prompt, Llama.from_pretrained(draft) if draft else None, max_new_tokens=24)
    return prompt, list(passes), tok


# -- what works --------------------------------------------------------------------------------------------------------

def test_text_goes_to_stdout_and_the_rest_to_stderr(cli, toy_checkpoint):
    prompt, passes, tok = greedy_passes(toy_checkpoint)
    text = tok.decode(prompt + [i for ids in passes for i in ids])
    done = cli()
    assert done.code == 0 and text == PROMPT + done.out[:-1] and done.out[-1] == "\n"
    assert "cpu float32 | chat none | temperature 0.0 | no draft" in done.err
    assert "stopped: max_new_tokens" in done.err and re.search(r"plain: 24 tokens, [\d.]+ tokens/s, tau 1.00", done.err)


@pytest.mark.parametrize("name", ["chimera", "llama", "target"])
@pytest.mark.parametrize("tree", [None, "chain:2", "3,4,4", "[[0],[1],[0,0]]"])
def test_every_draft_and_tree_gives_the_plain_text(cli, drafts, name, tree):
    done = cli("--draft", drafts[name], *(["--tree", tree] if tree else []), "--compare")
    assert done.code == 0 and done.out == cli().out
    assert "identical: yes" in done.err and re.search(r"speedup: [\d.]+x", done.err)
    assert f"draft {drafts[name]}, " in done.err and "with the draft: 24 tokens" in done.err


def test_compare_above_temperature_zero_does_not_promise_the_same_text(cli, drafts):
    done = cli("--draft", drafts["llama"], "--compare", "--temperature", 1)
    assert done.code == 0 and "only the distribution is" in done.err


@pytest.mark.parametrize("name", ["chimera", "llama", "target"])
def test_only_accepted_draft_tokens_are_green(cli, drafts, name):
    done = cli("--draft", drafts[name], "--color")
    assert done.out.replace(GREEN, "").replace(RESET, "") == cli().out
    if name == "chimera":                                   # random: hardly anything is accepted
        return
    prompt, passes, tok = greedy_passes(drafts["target"], drafts[name])
    ids, expected = prompt, ""
    for new in passes:
        before, drafted, own = (tok.decode(ids + new[:end]) for end in (0, len(new) - 1, len(new)))
        green = drafted[len(before):]
        expected += (f"{GREEN}{green}{RESET}" if green else "") + own[len(drafted):]
        ids = ids + new
    assert done.out == expected + "\n" and GREEN in expected


def test_no_green_without_color_or_without_a_draft(cli, drafts):
    assert GREEN not in cli("--color").out
    assert GREEN not in cli("--draft", drafts["target"]).out


@pytest.mark.parametrize("name", [None, "chimera", "llama"])
def test_the_seed_decides_the_text(cli, drafts, name):
    def text(seed):
        return cli("--temperature", 1, "--seed", seed, *(["--draft", drafts[name]] if name else [])).out
    texts = [text(seed) for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_a_prompt_can_come_from_a_file(cli, tmp_path):
    (tmp_path / "prompt.txt").write_text("Tom saw été 👍\n", "utf-8")
    from_file = cli("--prompt", f"FILE:{tmp_path / 'prompt.txt'}")
    assert from_file.code == 0 and from_file.out == cli("--prompt", "Tom saw été 👍\n").out


def test_a_character_that_stays_incomplete_is_still_printed(cli, toy_checkpoint):
    model = Llama.from_pretrained(toy_checkpoint)
    model.lm_head.weight.zero_()[243] = 1                   # the likeliest token is byte 0xF0 or byte 0xF1:
    model.lm_head.weight[244] = -1                          # each begins a character of four bytes
    save_checkpoint(model, toy_checkpoint)
    assert cli("--max_new_tokens", 3).out == "\ufffd" * 3 + "\n"


def test_an_empty_prompt_starts_from_bos(cli):
    done = cli("--prompt", "")
    assert done.code == 0 and "24 tokens" in done.err


def test_the_template_is_printed_and_its_system_text_can_be_replaced(cli, toy_checkpoint):
    folder = toy_checkpoint.rename(toy_checkpoint.parent / "llama-2-toy-chat")
    tok = Tokenizer.from_pretrained(folder)
    for options, system in (([], None), (["--system", "Be brief."], "Be brief.")):
        done = cli("--ckpt", folder, "--prompt", "Hi", "--max_new_tokens", 8, *options)
        ids = [i for new in generate(Llama.from_pretrained(folder), chat_prompt(tok, "llama2", ["Hi"], system),
                                     max_new_tokens=8) for i in new]
        assert "| chat llama2 |" in done.err and done.out == tok.decode(ids) + "\n"


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_max_new_tokens_is_exact(cli, drafts, count, draft):
    done = cli("--max_new_tokens", count, *(["--draft", drafts["target"], "--compare"] if draft else []))
    assert done.code == 0 and done.out[-1] == "\n" and (count > 0 or done.out == "\n")
    assert f": {count} tokens" in done.err and "stopped: max_new_tokens" in done.err
    assert ("tokens/s" in done.err) == (count > 1)          # no speed can be measured on a single token


@pytest.mark.parametrize("draft", [False, True])
def test_text_ends_at_the_first_end_token(cli, drafts, toy_checkpoint, draft):
    prompt, passes, tok = greedy_passes(toy_checkpoint)
    ids = [i for new in passes for i in new]
    end = next(i for i in range(5, 24) if ids[i] not in ids[:i])
    edit_config(toy_checkpoint, eos_token_id=ids[end])
    done = cli(*(["--draft", drafts["target"], "--compare"] if draft else []))
    assert PROMPT + done.out == tok.decode(prompt + ids[:end + 1]) + "\n"
    assert "stopped: end of text" in done.err and f": {end + 1} tokens" in done.err


@pytest.mark.parametrize("name", [None, "chimera", "llama"])
def test_text_ends_where_the_context_does(cli, drafts, toy_checkpoint, name):
    done = cli("--max_new_tokens", 500, *(["--draft", drafts[name], "--compare"] if name else []))
    room = 128 - len(Tokenizer.from_pretrained(toy_checkpoint).encode(PROMPT))
    assert "stopped: the context is full" in done.err and f": {room} tokens" in done.err
    assert name is None or "identical: yes" in done.err


@pytest.mark.parametrize("changes", [{}, {"target_fingerprint": ...}], ids=["other checksum", "no checksum"])
def test_a_draft_for_other_weights_warns_and_still_gives_the_same_text(cli, tmp_path, changes):
    tiny_draft(tiny_llama(seed=3, vocab_size=400)).save_pretrained(tmp_path / "other")
    done = cli("--draft", edit_config(tmp_path / "other", **changes))
    assert done.code == 0 and done.out == cli().out
    assert "warning" in done.err and "other weights" in done.err


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "auto"])
def test_other_dtypes(cli, drafts, dtype):
    assert cli("--dtype", dtype, "--draft", drafts["chimera"]).code == 0


# -- what a user can get wrong -----------------------------------------------------------------------------------------

def write(path: Path, content: str | bytes) -> list:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return []


def remove(path: Path) -> list:
    path.unlink()
    return []


def cut(path: Path) -> list:
    return write(path, path.read_bytes()[:-9])


def config(folder: Path, **changes) -> list:
    edit_config(folder, **changes)
    return []


def resave(folder: Path, **shape) -> list:
    save_checkpoint(tiny_llama(**shape), folder)
    return []


def not_finite(folder: Path) -> list:
    model = Llama.from_pretrained(folder)
    model.norm.weight.fill_(torch.nan)
    model.save_pretrained(folder)
    return []


def draft_of(folder: Path, **shape) -> list:
    """Options for a Chimera that was saved for a target of another shape."""
    tiny_draft(tiny_llama(**{"vocab_size": 400} | shape)).save_pretrained(folder / "other")
    return ["--draft", folder / "other"]


def llama_of(folder: Path, **shape) -> list:
    return ["--draft", save_checkpoint(tiny_llama(**shape), folder / "small")]


def binary(folder: Path, content) -> list:
    torch.save(content, folder / "pytorch_model.bin")
    return []


class Code:
    def __reduce__(self):
        return print, ("executed",)


def with_code(folder: Path) -> list:
    """What an attacker would put into a checkpoint."""
    return remove(folder / "model.safetensors") + binary(folder, {"model.norm.weight": Code()})


def shard_at(folder: Path, place) -> list:
    return write(folder / "model.safetensors.index.json", json.dumps({"weight_map": {"model.norm.weight": place}}))


def vocab_ids(folder: Path, ids: list) -> list:
    """Options for a Chimera whose draft vocabulary was tampered with."""
    draft = tiny_draft(Llama.from_pretrained(folder / "toy"), draft_vocab=2)
    draft.vocab_ids = torch.tensor(ids)
    draft.save_pretrained(folder / "chimera")
    return ["--draft", folder / "chimera"]


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
CHIMERA = "chimera/config.json", "chimera/model.safetensors"

BAD_CHECKPOINTS = {
    "no such folder": (lambda d: ["--ckpt", d / "nowhere"], "config.json not found"),
    "a file, no folder": (lambda d: ["--ckpt", d / "config.json"], "config.json not found"),
    "no config": (lambda d: remove(d / "config.json"), "config.json not found"),
    "config is no JSON": (lambda d: write(d / "config.json", "{'a': 1}"), "config.json is not valid JSON"),
    "config is binary": (lambda d: write(d / "config.json", b"\xff\xfe\x00"), "config.json is not valid JSON"),
    "config is a list": (lambda d: write(d / "config.json", "[]"), "config.json is not a JSON object"),
    "another family": (lambda d: config(d, model_type="gpt2"), "model_type 'gpt2' is not supported"),
    "rope type": (lambda d: config(d, rope_scaling={"rope_type": "llama3"}), "rope type 'llama3' is not supported"),
    "other size": (lambda d: config(d, vocab_size=401), "config.json asks for [401, 32]"),
    "no weights": (lambda d: remove(d / "model.safetensors"), "model.safetensors not found"),
    "cut weights": (lambda d: cut(d / "model.safetensors"), "model.safetensors is damaged"),
    "weights not finite": (not_finite, "tensor 'model.norm.weight' holds NaN or infinities; fetch the file again"),
    "missing shard": (lambda d: write(d / "model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}'),
                      "b.safetensors not found"),
    "a .bin that is none": (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin") and [],
                            "pytorch_model.bin is damaged, too old, or holds code"),
    "a .bin with code": (lambda d: with_code(d), "holds code instead of weights"),
    "a .bin with a list": (lambda d: remove(d / "model.safetensors") + binary(d, [1]), "is no table of tensors"),
    "shard outside the folder": (lambda d: shard_at(d, "../model.safetensors"), "is no plain file name"),
    "shard at a full path": (lambda d: shard_at(d, "/etc/passwd"), "'/etc/passwd' is no plain file name"),
    "shard without a name": (lambda d: shard_at(d, 5), "5 is no plain file name"),
    "shards in a list": (lambda d: write(d / "model.safetensors.index.json", '{"weight_map": []}'), "no weight_map"),
    **{f"{name} of Git LFS": (lambda d, name=name: write(d / name, POINTER), f"{name} is a Git LFS pointer")
       for name in ("config.json", "model.safetensors", "tokenizer.model")},
    "sliding window": (lambda d: config(d, sliding_window=4096), "sliding_window = 4096 is not supported"),
    "experts": (lambda d: config(d, num_local_experts=8), "num_local_experts = 8 is not supported"),
    "mistral": (lambda d: config(d, model_type="mistral"), "model_type 'mistral' is not supported"),
    "bias": (lambda d: config(d, attention_bias=True), "attention_bias = True is not supported"),
    "quantised": (lambda d: config(d, quantization_config={"bits": 4}), "quantization_config"),
    "10^12 parameters": (lambda d: config(d, hidden_size=10**6, intermediate_size=10**6), "asks for [400, 1000000]"),
    "endless context": (lambda d: config(d, max_position_embeddings=2**30), "max_position_embeddings must be"),
    "endless layers": (lambda d: config(d, num_hidden_layers=10**9), "num_hidden_layers must be"),
    "more layers": (lambda d: config(d, num_hidden_layers=99), "no tensor 'model.layers.98."),
    "too few layers": (lambda d: config(d, num_hidden_layers=1), "unknown tensors, such as 'model.layers.1"),
    "heads in words": (lambda d: config(d, num_attention_heads="four"), "num_attention_heads must be a positive"),
    **{f"eos {eos!r}": (lambda d, eos=eos: config(d, eos_token_id=eos), "eos_token_id must be an id or a list of ids")
       for eos in ([[1]], "2", -1, True, {"a": 1})},
    "eos to generate with": (lambda d: write(d / "generation_config.json", '{"eos_token_id": "x"}'),
                             "generation_config.json: eos_token_id must be"),
    "no tokenizer": (lambda d: remove(d / "tokenizer.model"), "neither tokenizer.model nor tokenizer.json"),
    "no such tokenizer": (lambda d: write(d / "tokenizer.model", "?"), "tokenizer.model is not a sentencepiece model"),
    "tokenizer too large": (lambda d: resave(d, vocab_size=300), "prompt holds token id"),
}
BAD_DRAFTS = {
    "no such draft": (lambda d: ["--draft", d / "nowhere"], "config.json not found"),
    "no draft": (lambda d: config(d / "chimera", model_type="gpt2") + ["--draft", d / "chimera"], "no Chimera draft"),
    "for another shape": (lambda d: draft_of(d, hidden_size=48), "target with hidden_size 48, this one has 32"),
    "for another vocabulary": (lambda d: draft_of(d, vocab_size=40), "target with vocab_size 40, this one has 400"),
    "config is no JSON": (lambda d: write(d / CHIMERA[0], "{") + ["--draft", d / "chimera"], "config.json"),
    "config is a list": (lambda d: write(d / CHIMERA[0], "[]") + ["--draft", d / "chimera"], "config.json"),
    "config without a target": (lambda d: config(d / "chimera", target=...) + ["--draft", d / "chimera"], "target"),
    "other depth": (lambda d: config(d / "chimera", depth=2) + ["--draft", d / "chimera"], "and weights differ"),
    "depth 0": (lambda d: config(d / "chimera", depth=0) + ["--draft", d / "chimera"], "depth must be from 1 to 64"),
    "depth 10^9": (lambda d: config(d / "chimera", depth=10**9) + ["--draft", d / "chimera"], "depth must be from 1"),
    "vocabulary in words": (lambda d: config(d / "chimera", draft_vocab="x") + ["--draft", d / "chimera"], "vocab"),
    **{f"vocab_ids {what}": (lambda d, ids=ids: vocab_ids(d, ids), "vocab_ids are no sorted list")
       for what, ids in {"twice": [1, 1], "unsorted": [2, 1], "too high": [1, 400], "negative": [-1, 2],
                         "2-D": [[1], [2]], "real": [0.5, 1.5]}.items()},
    "draft of Git LFS": (lambda d: write(d / CHIMERA[1], POINTER) + ["--draft", d / "chimera"], "Git LFS pointer"),
    "no weights": (lambda d: remove(d / CHIMERA[1]) + ["--draft", d / "chimera"], "model.safetensors not found"),
    "cut weights": (lambda d: cut(d / CHIMERA[1]) + ["--draft", d / "chimera"], "model.safetensors is damaged"),
    "Llama of another vocabulary": (lambda d: llama_of(d), "40 tokens, the target 400"),
    "deep tree": (lambda d: ["--draft", d / "chimera", "--tree", "chain:4"], "4 deep, the draft has 3 heads"),
    "rank too high": (lambda d: ["--draft", d / "chimera", "--tree", "65"], "the tree has rank 64"),
    "tree with a gap": (lambda d: ["--draft", d / "chimera", "--tree", "[[0],[2]]"], "needs path [1]"),
    "tree without a parent": (lambda d: ["--draft", d / "chimera", "--tree", "[[0],[1,0]]"], "needs path [1]"),
    **{f"tree {spec!r}": (lambda d, spec=spec: ["--draft", d / "chimera", "--tree", spec], "is not understood; give")
       for spec in ("bush", "chain:x", "chain:-1", "4,,8", "0", "2,-1", "[[0],", "[]", "1.5", '"a"', "[[.5]]", "[[]]")},
}
BAD_OPTIONS = {
    "compare alone": (lambda d: ["--compare"], "need a --draft"),
    "tree alone": (lambda d: ["--tree", "chain:2"], "need a --draft"),
    "long prompt": (lambda d: ["--prompt", "the cat " * 200], "the model's context 128: no room to continue"),
    "no prompt file": (lambda d: ["--prompt", f"FILE:{d / 'no.txt'}"], "no.txt not found"),
    "prompt is a folder": (lambda d: ["--prompt", f"FILE:{d}"], "Is a directory"),
    "prompt not UTF-8": (lambda d: write(d / "p.txt", b"\xe9") + ["--prompt", f"FILE:{d / 'p.txt'}"], "is not UTF-8"),
    "negative top_k": (lambda d: ["--top_k", -1], "top_k must be 0 (off) or more, not -1"),
    "top_p above 1": (lambda d: ["--top_p", 2], "top_p must lie between 0 and 1, not 2.0"),
    "negative temperature": (lambda d: ["--temperature", -0.5], "temperature must be 0 or more and finite, not -0.5"),
    "temperature nan": (lambda d: ["--temperature", "nan"], "temperature must be 0 or more and finite, not nan"),
    "negative length": (lambda d: ["--max_new_tokens", -1], "max_new_tokens must be 0 or more, not -1"),
    "seed": (lambda d: ["--seed", 2**64], "--seed must fit into 64 bits"),
    "unknown template": (lambda d: ["--chat", "alpaca"], "unknown chat template 'alpaca'; choose one of"),
    "system without a template": (lambda d: ["--system", "Be brief."], "--system needs a chat template"),
    "unfitting template": (lambda d: ["--chat", "chatml"], "use --chat none"),
}


def check_refused(done: Output, phrase: str) -> None:
    errors = [line for line in done.err.splitlines() if line.startswith("error")]
    assert done.code == 1 and len(errors) == 1 and done.err.endswith(errors[0] + "\n"), done.err
    assert phrase in errors[0] and "Traceback" not in done.err


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_bad_checkpoint(cli, toy_checkpoint, name):
    spoil, phrase = BAD_CHECKPOINTS[name]
    check_refused(cli(*spoil(toy_checkpoint)), phrase)


@pytest.mark.parametrize("name", BAD_DRAFTS)
def test_bad_draft(cli, drafts, name):
    spoil, phrase = BAD_DRAFTS[name]
    check_refused(cli(*spoil(drafts["target"].parent)), phrase)


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_option(cli, toy_checkpoint, name):
    options, phrase = BAD_OPTIONS[name]
    check_refused(cli(*options(toy_checkpoint)), phrase)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(cli):
    check_refused(cli("--device", "cuda"), "this torch sees no CUDA GPU; use --device cpu")


@pytest.mark.parametrize("options", [["--dtype", "int8"], ["--device", "tpu"], ["--max_new_tokens", "many"],
                                     ["--nonsense"]], ids=" ".join)
def test_argparse_errors(cli, options):
    done = cli(*options)
    assert done.code == 2 and done.out == "" and "Traceback" not in done.err
    assert "error: " in done.err.splitlines()[-1] and options[0] in done.err.splitlines()[-1]


# -- the process -------------------------------------------------------------------------------------------------------

def test_ctrl_c_ends_without_a_traceback(capfd):
    def interrupted():
        raise KeyboardInterrupt
    with pytest.raises(SystemExit) as end:
        run(interrupted)
    assert end.value.code == 130 and capfd.readouterr().err == ""


def test_an_error_of_several_lines_is_printed_as_one(capfd):
    def fails():
        raise ValueError("one\n\ttwo\nthree")
    with pytest.raises(SystemExit):
        run(fails)
    assert capfd.readouterr().err == "error: one two three\n"


def test_program_errors_keep_their_traceback():
    with pytest.raises(KeyError):
        run(lambda: {}["bug"])


def process(*argv, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "sample.py", *map(str, argv)], capture_output=True, text=True,
                          encoding="utf-8", **options)


def test_as_a_process_from_another_folder(toy_checkpoint, tmp_path):
    done = process("--ckpt", "toy", "--prompt", PROMPT, "--max_new_tokens", 8, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.strip() and "8 tokens" in done.stderr


def test_as_a_process_with_a_mistake(tmp_path):
    done = process("--ckpt", "nowhere", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_closed_pipe_ends_it_in_silence(toy_checkpoint):
    script = '"$0" "$1" --ckpt "$2" --max_new_tokens 100 | head -c 1 > /dev/null'
    done = subprocess.run(["sh", "-c", script, sys.executable, ROOT / "sample.py", toy_checkpoint],
                          capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr and "error" not in done.stderr
