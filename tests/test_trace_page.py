"""sample.py --trace: the page holds the rounds' own numbers, stays small, and runs no text of the model."""
import argparse
import json
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import near_copy, save_checkpoint, tiny_llama

import sample
from common import run
from model import Llama, Tokenizer
from speculative import generate
from trace_page import PAGE, Trace

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "</script><img src=x onerror=\"document.title='gotcha'\"><!--<script>"


def evil_tokenizer() -> Tokenizer:
    """Every token is markup that would run if it were not escaped."""
    return Tokenizer(lambda text: [1], lambda ids: "".join(f"{EVIL}\u2028{i}" for i in ids), 400, {}, 1, {2}, True)


def traced(tok, path, temperature=1.0, tree="3,4,2", tokens=80, eos=(), noise=0.1):
    """A run of a small Llama and a near copy of it -> the rounds, and what the page holds."""
    model, rounds = tiny_llama(vocab_size=400), []
    args = argparse.Namespace(ckpt="a/toy", draft="b/near", temperature=temperature, top_k=0, top_p=1.0)
    with Trace(str(path), tok, [1, 300], args) as trace:
        def both(done):
            rounds.append(done)
            trace(done)
        list(generate(model, [1, 300], near_copy(model, noise), tree, tokens, temperature, eos_ids=eos,
                      generator=torch.Generator().manual_seed(3), on_round=both))
    return rounds, read(path)


def read(path) -> dict:
    text = path.read_text("utf-8")
    return json.loads(text.split('id="data">')[1].split("</script>")[0])


def near(value):
    return pytest.approx(value, rel=1e-3, abs=1e-6)


# -- the numbers -------------------------------------------------------------------------------------------------------

def test_flips_and_verdicts_are_those_of_the_round(toy_tokenizer, tmp_path):
    rounds, data = traced(toy_tokenizer, tmp_path / "run.html")
    assert len(data["rounds"]) == len(rounds) > 10 and {len(r.path) for r in rounds} >= {0, 1, 2}
    for r, shown in zip(rounds, data["rounds"], strict=True):
        judged = [row for row in shown["nodes"] if row[6:] == [1]]
        order = sorted(judged, key=lambda row: shown["nodes"].index(row))       # nodes of one parent are in flip order
        assert [(row[4], row[5]) for row in order] == [near(flip) for flip in r.flips]
        assert [row[0] for row in shown["nodes"]] == r.tree.parent[1:] and shown["path"] == r.path
        for row in judged:
            assert row[4] == near(min(1, row[3] / row[2]))


def test_p_and_q_are_those_that_judged(toy_tokenizer, tmp_path):
    """The residual of each rejection, worked out by hand in float64."""
    rounds, data = traced(toy_tokenizer, tmp_path / "run.html")
    rejections = 0
    for r, shown in zip(rounds, data["rounds"], strict=True):
        for node in (0, *r.path):
            p, q = r.p[node].double(), r.q[node].double() if node in r.q else None
            for child in r.tree.children[node]:
                row, token = shown["nodes"][child - 1], r.tokens[child]
                if row[6]:
                    assert row[2:4] == [near(q[token].item()), near(p[token].item())]
                if not row[6] or child in r.path:
                    break
                p, rejections = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum(), rejections + 1
                q[token] = 0
                q /= q.sum()
        for row in shown["law"]:
            assert min(abs(row[3] - value) for value in p.tolist()) < 1e-3
        assert sum(row[4] for row in shown["law"]) == 1 and all(row[3] > 0 for row in shown["law"] if row[4])
    assert rejections > 10


def test_nodes_that_nobody_judged_show_p_and_q_as_they_were_at_first(toy_tokenizer, tmp_path):
    rounds, data = traced(toy_tokenizer, tmp_path / "run.html")
    for r, shown in zip(rounds, data["rounds"], strict=True):
        for node, row in enumerate(shown["nodes"], 1):
            if row[6:] == [0]:
                parent, token = r.tree.parent[node], r.tokens[node]
                ids, q = r.drawn[parent]
                first = r.logits[parent].softmax(-1)[token].item()
                assert row[2:6] == [near(q[ids == token].item()), near(first), None, None]


def test_greedy_shows_the_argmax_rule(toy_tokenizer, tmp_path):
    rounds, data = traced(toy_tokenizer, tmp_path / "run.html", temperature=0.0)
    assert data["greedy"] and any(r.path for r in rounds) and any(not r.path for r in rounds)
    for r, shown in zip(rounds, data["rounds"], strict=True):
        best = r.logits.argmax(-1).tolist()
        for node, row in enumerate(shown["nodes"], 1):
            assert row[2] is None and row[5] is None
            if row[6]:
                assert row[4] == (r.tokens[node] == best[r.tree.parent[node]]) == (node in r.path)
        assert [row[3] for row in shown["law"] if row[4]] == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_and_totals(toy_tokenizer, tmp_path, temperature):
    rounds, data = traced(toy_tokenizer, tmp_path / "run.html", temperature)
    ids = [1, 300, rounds[0].tokens[0], *(i for r in rounds for i in r.committed)]
    text = data["opening"] + "".join(piece for row in data["rounds"] for piece in row["text"])
    assert toy_tokenizer.decode(ids).startswith(text) and len(text) > 60        # unfinished bytes may be missing
    assert data["tau"] == pytest.approx(sum(len(r.committed) for r in rounds) / len(rounds))
    depths = range(len(data["judged"]))
    assert data["accepted"] == [sum(len(r.path) > k for r in rounds) for k in depths] and data["accepted"][1] > 0
    assert data["judged"] == [sum(len(r.path) >= k and bool(r.tree.children[[0, *r.path][k]]) for r in rounds)
                              for k in depths]


def test_an_end_of_text_in_the_path_leaves_no_own_token(toy_tokenizer, tmp_path):
    rounds, _ = traced(toy_tokenizer, tmp_path / "run.html", temperature=0.0, noise=0.0)
    end = rounds[1].committed[0]
    rounds, data = traced(toy_tokenizer, tmp_path / "run.html", temperature=0.0, noise=0.0, eos=[end])
    assert rounds[-1].committed[-1] == end and len(rounds[-1].committed) <= len(rounds[-1].path)
    assert not any(row[4] for row in data["rounds"][-1]["law"])


# -- the page ----------------------------------------------------------------------------------------------------------

def test_a_hundred_rounds_stay_small_and_need_nothing_else(toy_tokenizer, tmp_path):
    rounds, data = traced(toy_tokenizer, tmp_path / "run.html", tree="4,4,3,2", tokens=110, noise=2.0)
    per_round = (tmp_path / "run.html").stat().st_size - PAGE.stat().st_size
    assert len(rounds) > 80 and PAGE.stat().st_size + per_round / len(rounds) * 100 < 300_000
    text = PAGE.read_text("utf-8")
    assert "default-src 'none'" in text and "src=" not in text and "url(" not in text and text.count("http:") == 1


def test_markup_in_tokens_stays_text(tmp_path):
    _, data = traced(evil_tokenizer(), tmp_path / "run.html", tokens=8)
    text = (tmp_path / "run.html").read_text("utf-8")
    assert data["opening"].startswith(EVIL) and "onerror" in text
    assert text.count("</script") == 2 and "<img" not in text and "<!--" not in text and "\u2028" not in text


def test_an_interrupted_run_is_written_too(toy_tokenizer, tmp_path):
    args = argparse.Namespace(ckpt="toy", draft="near", temperature=0.0, top_k=0, top_p=1.0)
    with pytest.raises(KeyboardInterrupt), Trace(str(tmp_path / "run.html"), toy_tokenizer, [1], args):
        raise KeyboardInterrupt
    assert read(tmp_path / "run.html")["rounds"] == []


@pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")
def test_in_a_browser(tmp_path):
    """Two steps by key, one back by button; every text is shown as text."""
    page = tmp_path / "run.html"
    rounds, _ = traced(evil_tokenizer(), page)
    page.write_text(page.read_text("utf-8") + """<script>
        for (const key of ["ArrowRight", "ArrowRight"]) document.dispatchEvent(new KeyboardEvent("keydown", {key}));
        $("back").click();
        addEventListener("load", () => document.body.append("images: " + document.images.length));</script>""", "utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
               "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert f"Round 2 of {len(rounds)}: 9 candidates, {len(rounds[1].path)} accepted" in dom
    assert "images: 0" in dom and "<title>Speculative decoding, round by round</title>" in dom
    assert dom.count('class="accepted"') == 2 * len(rounds[1].path)             # a box and a line each


# -- the command line --------------------------------------------------------------------------------------------------

@pytest.fixture
def cli(toy_checkpoint, monkeypatch, capfd):
    near_folder = save_checkpoint(near_copy(Llama.from_pretrained(toy_checkpoint)), toy_checkpoint.parent / "near")

    def call(*argv):
        fixed = ["--ckpt", toy_checkpoint, "--draft", near_folder, "--prompt", "Tom saw", "--max_new_tokens", 12]
        monkeypatch.setattr(sys, "argv", ["sample.py", *map(str, fixed), "--dtype", "float32", *map(str, argv)])
        code = 0
        try:
            run(sample.main)
        except SystemExit as end:
            code = end.code
        return code, *capfd.readouterr()
    return call


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_page_of_a_command_and_the_same_text_without_it(cli, tmp_path, temperature):
    code, out, _ = cli("--trace", tmp_path / "run.html", "--temperature", temperature)
    data = read(tmp_path / "run.html")
    assert code == 0 and cli("--temperature", temperature)[:2] == (0, out)
    assert out.startswith(data["opening"].removeprefix("Tom saw")) and 1 + data["tokens"] == 12


def test_one_token_gives_a_page_without_rounds(cli, tmp_path):
    assert cli("--trace", tmp_path / "run.html", "--max_new_tokens", 1)[0] == 0
    assert read(tmp_path / "run.html")["rounds"] == []


@pytest.mark.parametrize("path, options, phrase", [
    ("no/run.html", [], "no/run.html: give a file name in a folder that exists"), (".", [], "give a file name"),
    ("run.html", ["--draft", "none"], "--compare, --tree and --trace need a --draft")])
def test_a_bad_path_is_refused_before_decoding(cli, tmp_path, path, options, phrase):
    code, out, err = cli("--trace", tmp_path / path, *options)
    assert code == 1 and out == "" and phrase in err.splitlines()[-1] and "Traceback" not in err
