"""bench.py: the figures are the pooled ones that its docstring tells."""
import json
import sys
from types import SimpleNamespace

import pytest
from helpers import near_copy, save_checkpoint, tiny_llama

import bench
from common import run


@pytest.fixture
def cli(toy_checkpoint, monkeypatch):
    save_checkpoint(near_copy(tiny_llama(vocab_size=400)), toy_checkpoint.parent / "near")

    def call(*argv) -> int:
        fixed = ["--ckpt", toy_checkpoint, "--draft", toy_checkpoint.parent / "near", "--dtype", "float32", *argv]
        monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, fixed)])
        try:
            run(bench.main)
        except SystemExit as end:
            return end.code
        return 0
    return call


def test_figures_agree_with_each_other(cli, tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("Tom saw a cat\nThe sun was warm\nOne day Lily\n")
    assert cli("--prompts", tmp_path / "lines.txt", "--max_new_tokens", 24, "--json", tmp_path / "out.json") == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["identical"] == "3/3" and found["prompts"] == 3 and found["dtype"] == "float32"
    assert found["speedup"] == pytest.approx(found["spec_tok_s"] / found["plain_tok_s"], rel=0.01)
    assert found["efficiency"] == pytest.approx(found["speedup"] / found["tau"], rel=0.01)
    assert found["tau"] == pytest.approx(1 + sum(found["accept_by_depth"]), abs=0.01)
    assert "speedup" in capsys.readouterr().out


def test_prompts_are_spread_over_the_categories(tmp_path):
    rows = [{"category": name, "turns": [f"{name}{i}", "later"]} for name in "abc" for i in range(5)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [p for _, p in bench.read_prompts(tmp_path / "p.jsonl", 7)] == ["a0", "b0", "c0", "a1", "b1", "c1", "a2"]


@pytest.mark.parametrize("text, words", [("{}\n", "no \"turns\""), ("\n", "no prompt that leaves room")])
def test_useless_prompts_are_named(cli, tmp_path, capsys, text, words):
    (tmp_path / "p.jsonl").write_text(text)
    assert cli("--prompts", tmp_path / "p.jsonl") == 1
    assert words in capsys.readouterr().err


def test_tree_auto_tries_trees_and_keeps_one(cli, tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("Tom saw a cat\n")
    assert cli("--prompts", tmp_path / "lines.txt", "--max_new_tokens", 6, "--tree", "auto") == 0
    out = capsys.readouterr().out
    tried = dict(line[5:].split(": ") for line in out.splitlines() if line.startswith("tree chain"))
    assert len(tried) == 5 and any(f"  tree {tree}  " in out for tree in bench.AUTO)


def test_stages_add_up_to_a_round(cli, tmp_path):
    (tmp_path / "lines.txt").write_text("Tom saw a cat\n")
    options = ["--prompts", tmp_path / "lines.txt", "--max_new_tokens", 60, "--json", tmp_path / "out.json"]
    assert cli(*options) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert min(found["t_draft_ms"], found["t_verify_ms"], found["t_other_ms"], found["t1_ms"]) > 0
    low, high = found["interval_95"]
    assert low <= found["speedup"] <= high and found["peak_memory_mb"] > 10


@pytest.mark.parametrize("options, words", [(["--n", 0], "--n must be"), (["--threads", 0], "--threads must be"),
                                            (["--max_new_tokens", 1], "--max_new_tokens must be 2")])
def test_useless_options_are_named(cli, capsys, options, words):
    assert cli(*options) == 1
    assert words in capsys.readouterr().err


def test_every_size_of_either_sides_cache_is_compiled_before_measuring(monkeypatch):
    ran = []
    monkeypatch.setattr(bench, "decode", lambda model, ids, draft, *rest: ran.append((draft, len(ids))))
    tok, args = SimpleNamespace(eos_ids=()), SimpleNamespace(tree="4,4,2", max_new_tokens=128)      # 10 nodes
    bench.warm_up(None, tok, "draft", [("all", [5] * length) for length in (20, 118, 128)], args)
    # rows: plain 149, 247 -> 256 and 257 -> 512; with the draft 159 -> 256 and 257, 267 -> 512
    assert len(ran) == 4 and set(ran) == {("draft", 20), ("draft", 128), (None, 118), (None, 128)}
