"""train.py: what the loss is taken on, one optimiser step, resuming after any interruption, wrong use."""
import gzip
import hashlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from helpers import STORY, random_ids, tiny_draft, tiny_llama
from safetensors import safe_open

import common
import loss
import optim
import train
from data import HiddenCache, collate
from distill import answer_batch
from draft import Chimera, ChimeraConfig
from loss import Meter, Weights, batch_loss
from model import Llama, LlamaConfig
from optim import Muon, Optimizer, learning_rate

ROOT = Path(train.__file__).parent


def arguments(**changes):
    """train.py's own defaults, changed."""
    sys.argv = ["train.py", "--out", "out", "--steps", "20"]
    args = train.parse_args()
    vars(args).update({"device_used": "cpu", "dtype_used": "float32", "rank": 0, "world": 1} | changes)
    return args


@pytest.fixture(autouse=True)
def _keep_argv(monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)


def cli(*argv) -> int:
    """The command in this process -> its exit status."""
    sys.argv = ["train.py", *map(str, argv)]
    try:
        common.run(train.main)
    except SystemExit as stop:
        return stop.code or 0
    return 0


def random_batch(lengths=(9, 6, 4), vocab: int = 40, seed: int = 0):
    """Texts of random ids with about two thirds answer tokens -> tokens [B, T], labelled [B, T]."""
    answer = torch.rand(len(lengths), max(lengths), generator=torch.Generator().manual_seed(seed)) < 0.67
    return collate([(torch.tensor(random_ids(n, vocab, seed + i)), answer[i, :n]) for i, n in enumerate(lengths)])


def trainable_draft(model, **overrides) -> Chimera:
    return tiny_draft(model, **overrides).requires_grad_(True)


def gradients(draft) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in draft.named_parameters()}


def weights(draft) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in draft.named_parameters()}


def assert_same(ours: dict, theirs: dict, **tolerance):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")


# -- the loss ----------------------------------------------------------------------------------------------------------

def test_step_k_at_i_learns_token_i_plus_k_plus_1(monkeypatch):
    learnt, position_loss = [], loss.position_loss

    def record(logits, wanted):
        learnt.append(wanted.argmax(-1).tolist())           # without KL: the one-hot of the label
        return position_loss(logits, wanted)

    monkeypatch.setattr(loss, "position_loss", record)
    model = tiny_llama()
    tokens, labelled = collate([(torch.arange(6), torch.ones(6, dtype=torch.bool))])
    batch_loss(tiny_draft(model), model, tokens, labelled, Meter(3), Weights(kl=0.0))
    assert learnt == [[2, 3, 4, 5], [3, 4, 5], [4, 5]]      # the target itself supplies token 1


def test_only_answer_tokens_are_learnt():
    model, meter = tiny_llama(), Meter(3)
    answer = torch.tensor([False, False, False, True, True, False, False])
    tokens, labelled = collate([(torch.arange(7), answer)])
    batch_loss(tiny_draft(model), model, tokens, labelled, meter, Weights())
    assert meter.count.tolist() == [2, 2, 1]                # tokens 3 and 4; step 3 starts with token 4


def slow_loss(draft, model, tokens, labelled, kl: float) -> torch.Tensor:
    """batch_loss as it is defined: one position after the other."""
    hidden, logits, total = model.hidden_states(tokens), model(tokens), 0.0
    ids = torch.arange(logits.shape[-1]) if draft.vocab_ids is None else draft.vocab_ids
    for k, state in enumerate(draft(tokens, hidden), 1):
        logq = draft.head_logits(k - 1, state).log_softmax(-1)                  # [B, T - k, W]
        for b in range(len(tokens)):
            for i in range(tokens.shape[1] - k - 1):
                if labelled[b, i + k]:
                    p = logits[b, i + k, ids].softmax(-1)
                    place = (ids == tokens[b, i + k + 1]).nonzero().flatten()   # empty: outside the draft's vocabulary
                    total = total - logq[b, i, place].sum() + kl * F.kl_div(logq[b, i], p, reduction="sum")
    return total


@pytest.mark.parametrize("chunk", [3, 1024])
@pytest.mark.parametrize("kl", [0.0, 0.7])
@pytest.mark.parametrize("shape", [{}, {"draft_vocab": 15}, {"heads": "full"}, {"heads": "full", "draft_vocab": 15}],
                         ids=["light", "light-vocab", "full", "full-vocab"])
def test_loss_and_gradients_equal_the_slow_definition(monkeypatch, shape, kl, chunk):
    monkeypatch.setattr(loss, "CHUNK", chunk)
    model = tiny_llama()
    draft, (tokens, labelled) = trainable_draft(model, **shape), random_batch()
    slow = slow_loss(draft, model, tokens, labelled, kl)
    (0.25 * slow).backward()
    expected = gradients(draft)
    draft.zero_grad()
    found = batch_loss(draft, model, tokens, labelled, Meter(3), Weights(kl), 0.25)
    assert found == pytest.approx(slow.item(), rel=1e-5)
    assert_same(gradients(draft), expected, rtol=1e-4, atol=1e-5)


def test_measuring_makes_no_gradient():
    model = tiny_llama()
    draft, (tokens, labelled) = trainable_draft(model), random_batch()
    batch_loss(draft, model, tokens, labelled, Meter(3), Weights())
    assert all(p.grad is None for p in draft.parameters())


@pytest.mark.parametrize("length", [3, 4, 5, 6])
def test_texts_shorter_than_the_depth_are_learnt_as_far_as_they_go(length):
    model, meter = tiny_llama(), Meter(5)
    draft = trainable_draft(model, depth=5)
    tokens, labelled = collate([(torch.arange(length), torch.ones(length, dtype=torch.bool))])
    assert math.isfinite(batch_loss(draft, model, tokens, labelled, meter, Weights(), 1.0))
    assert meter.count.tolist() == [max(0, length - 1 - k) for k in range(1, 6)]


# -- the meter ---------------------------------------------------------------------------------------------------------

def test_meter_counts_prefixes_from_where_they_were_drafted():
    yes = lambda *rows: torch.tensor(rows, dtype=torch.bool)[:, None]                               # noqa: E731
    seen = yes([1, 1, 1, 1], [1, 1, 1, 0], [0, 1, 0, 0])    # [K, B = 1, T]
    top1 = yes([1, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 0])
    meter = Meter(3)
    meter.add(torch.tensor([4.0, 3.0, 1.0]), seen, top1, seen)
    assert meter.agreement(meter.top1) == pytest.approx([3 / 4, 2 / 3, 1 / 1])
    assert meter.agreement(meter.top5) == [1, 1, 1]
    assert meter.prefix.tolist() == [3, 1, 0] and meter.whole.tolist() == [4, 3, 1]
    assert meter.tau() == pytest.approx(1 + 3 / 4 + 1 / 3 + 0 / 1)
    meter.add(torch.tensor([4.0, 3.0, 1.0]), seen, top1, seen)
    assert meter.tau() == pytest.approx(1 + 3 / 4 + 1 / 3) and meter.loss.tolist() == [8, 6, 2]


@pytest.mark.parametrize("draft_vocab", [0, 15])
def test_meter_agrees_with_a_count_by_hand(draft_vocab):
    model, meter = tiny_llama(), Meter(3)
    draft, (tokens, labelled) = tiny_draft(model, draft_vocab=draft_vocab), random_batch()
    batch_loss(draft, model, tokens, labelled, meter, Weights())
    best = model(tokens).argmax(-1)                         # an argmax outside the draft's vocabulary counts as missed
    ids = torch.arange(40) if not draft_vocab else draft.vocab_ids
    for k, state in enumerate(draft(tokens, model.hidden_states(tokens)), 1):
        guesses = ids[draft.head_logits(k - 1, state).topk(5).indices]          # [B, T - k, 5]
        right = (guesses == best[:, k:, None]) & labelled[:, k:, None]
        assert meter.count[k - 1] == labelled[:, k:].sum()
        assert meter.top1[k - 1] == right[..., 0].sum() and meter.top5[k - 1] == right.sum()


# -- one optimiser step ------------------------------------------------------------------------------------------------

def optimise(draft, model, batches, args, step: int = 0, optimizer=None) -> tuple[float, int]:
    optimizer = optimizer or Optimizer(draft, args.optimizer, args.lr)
    batches = iter([(None, *batch) for batch in batches])
    return train.optimise(draft, model, batches, optimizer, args, step, Meter(draft.config.depth))


def test_micro_batches_add_up_to_the_big_batch():
    model, lengths = tiny_llama(), (12, 9, 5, 4)
    samples = [(torch.tensor(random_ids(n, seed=n)), torch.arange(n) >= n // 2) for n in lengths]
    results = []
    for batches in ([collate(samples)], [collate(samples[:1]), collate(samples[1:])]):
        draft = trainable_draft(model)
        used = optimise(draft, model, batches, arguments(grad_accum=len(batches)))
        results.append((*used, gradients(draft)))
    assert results[0][1] == results[1][1] == sum(n - n // 2 for n in lengths)
    assert results[0][0] == pytest.approx(results[1][0])                # the loss is a mean over labelled tokens
    assert_same(results[0][2], results[1][2], rtol=0, atol=1e-6)


def test_a_batch_without_labels_changes_nothing():
    model = tiny_llama()
    draft, before = trainable_draft(model), weights(trainable_draft(model))
    tokens, labelled = collate([(torch.arange(6), torch.zeros(6, dtype=torch.bool))])
    assert batch_loss(draft, model, tokens, labelled, Meter(3), Weights(), 1.0) == 0
    assert optimise(draft, model, [(tokens, labelled)], arguments()) == (0, 0)
    assert_same(weights(draft), before, rtol=0, atol=0)


def test_a_loss_that_is_not_finite_skips_the_step():
    model = tiny_llama()
    draft, before = trainable_draft(model), weights(trainable_draft(model))
    assert math.isnan(optimise(draft, model, [random_batch()], arguments(kl=math.nan))[0])
    assert_same(weights(draft), before, rtol=0, atol=0)
    optimise(draft, model, [random_batch()], arguments())   # and the next one works
    assert all(torch.isfinite(p).all() for p in draft.parameters())
    assert any((p != before[name]).any() for name, p in draft.named_parameters())


def test_learning_rate_warms_up_and_never_falls_below_its_floor():
    rates = [learning_rate(step, 2000, 1e-3) for step in range(2500)]
    assert rates[:20] == pytest.approx([1e-3 * (i + 1) / 20 for i in range(20)])            # 1% of 2000
    assert max(rates) == pytest.approx(1e-3)
    assert all(a >= b for a, b in zip(rates[20:], rates[21:], strict=False))
    assert min(rates[20:]) == pytest.approx(1e-4) == rates[-1]
    assert [learning_rate(i, 5, 1.0) for i in range(3)] == pytest.approx([0.1, 0.2, 0.3])   # at least 10 steps


def test_learning_rate_follows_optimiser_steps():
    model, args = tiny_llama(), arguments(grad_accum=4)
    draft = trainable_draft(model)
    optimizer = Optimizer(draft, args.optimizer, args.lr)
    for step in range(12):
        optimise(draft, model, [random_batch()] * 4, args, step, optimizer)
        assert optimizer.param_groups[0]["lr"] == learning_rate(step, 20, args.lr)


@pytest.mark.parametrize("heads, name", [("light", "muon"), ("full", "muon"), ("light", "adamw")])
def test_muon_moves_the_matrices_but_full_heads_and_adamw_the_rest(heads, name):
    model = tiny_llama()
    draft = train.new_draft(arguments(depth=3, heads=heads), model, [])
    before, optimizer = weights(draft), Optimizer(draft, name, 1e-3)
    optimise(draft, model, [random_batch()], arguments(depth=3), 10, optimizer)
    owner = {id(p): type(part) for part in optimizer.parts for group in part.param_groups for p in group["params"]}
    for key, weight in draft.named_parameters():
        matrix = name == "muon" and weight.dim() == 2 and (heads == "light" or "heads" not in key)
        assert owner[id(weight)] is (Muon if matrix else torch.optim.AdamW)
        assert (weight != before[key]).any()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has it since 2.9")
@pytest.mark.parametrize("shape", [(6, 6), (4, 10), (10, 4)])
@pytest.mark.parametrize("slow_bfloat16", [False, True])
def test_muon_steps_as_torch_s_does(shape, slow_bfloat16, monkeypatch):
    monkeypatch.setattr(optim, "AVX2", slow_bfloat16)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    both = (Muon([ours], 0.1), torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    for seed in range(5):
        ours.grad = theirs.grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for optimizer in both:
            optimizer.step()
    assert (ours - 1).abs().mean() > 0.05 and (ours - theirs).abs().max() < 0.02


def digest(model) -> str:
    state = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(tensor.view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_target_stays_as_it_is(dtype, tied):
    model = tiny_llama(tie_word_embeddings=tied).to(dtype)
    before, samples = digest(model), [(torch.tensor(random_ids(12)), torch.ones(12, dtype=torch.bool))]
    args = arguments(draft_vocab=12, dtype_used=str(dtype).removeprefix("torch."))
    draft = train.new_draft(args, model, samples)
    start, optimizer = weights(draft), Optimizer(draft, args.optimizer, 1e-2)
    for step in range(3):
        train.optimise(draft, model, iter([(None, *random_batch())]), optimizer, args, step, Meter(5))
    assert any((p != start[name]).any() for name, p in draft.named_parameters())
    assert digest(model) == before
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    assert all(p.dtype == torch.float32 for p in draft.parameters())            # master weights
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    learnt = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(learnt) == len(list(draft.parameters()))
    assert not storages & {p.untyped_storage().data_ptr() for p in learnt}


def test_a_draft_learns_a_deterministic_target():
    model = tiny_llama()
    prompts = [random_ids(3, seed=seed) for seed in range(16)]
    written = answer_batch(model, prompts, [0.0] * 16, 24, set(), torch.Generator())
    samples = [(torch.tensor(p + w), torch.arange(27) >= 3) for p, w in zip(prompts, written, strict=True)]
    args = arguments(depth=3, steps=150, batch_size=16, lr=5e-3)
    draft = train.new_draft(args, model, samples)
    optimizer = Optimizer(draft, args.optimizer, args.lr)
    batches = train.batches_from(samples, args, 0)
    for step in range(args.steps):
        train.optimise(draft, model, batches, optimizer, args, step, Meter(3))
    meter = train.evaluate(draft, model, samples, args)
    assert min(meter.agreement(meter.top1)) > 0.9 and meter.tau() > 3.7


# -- runs, interrupted and resumed -------------------------------------------------------------------------------------

@pytest.fixture
def stories(tmp_path) -> Path:
    """18 short texts of different length."""
    words = STORY.split()
    texts = [" ".join(words[start:start + 4 + start % 5]) for start in range(0, 90, 5)]
    path = tmp_path / "stories.txt"
    path.write_text("<|endoftext|>".join(texts))
    return path


@pytest.fixture
def tiny_run(toy_checkpoint, stories) -> list:
    """The options of a run of 9 steps, over three times its data."""
    return ["--ckpt", toy_checkpoint, "--data", stories, "--steps", 9, "--batch_size", 3, "--depth", 2, "--held_out", 4,
            "--save_every", 2, "--dtype", "float32", "--device", "cpu", "--max_length", 40]


def final(out: Path) -> tuple[bytes, dict, dict]:
    """The exported files and the training state, for comparison."""
    state = torch.load(out / "state.pt", weights_only=True)
    flat = {f"draft.{name}": tensor for name, tensor in state["draft"].items()}
    for part, optimizer in enumerate(state["optimizer"]):
        for index, entry in optimizer["state"].items():
            flat |= {f"{part}.{index}.{key}": value for key, value in entry.items()}
    return (out / "model.safetensors").read_bytes(), json.loads((out / "config.json").read_text()), flat


def assert_same_run(out: Path, other: Path):
    (ours, our_config, our_state), (theirs, their_config, their_state) = final(out), final(other)
    assert ours == theirs and our_config == their_config
    assert_same(our_state, their_state, rtol=0, atol=0)


def fail_at(monkeypatch, owner, name: str, call: int):
    """Stops the process, as far as a test can, at the given call of a function (0: the first)."""
    real, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(name)
        if len(calls) > call:
            raise OSError("power cut")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("options", [[], ["--heads", "full", "--draft_vocab", 50, "--grad_accum", 2],
                                     ["--optimizer", "adamw"]], ids=["light", "full", "adamw"])
def test_a_resumed_run_equals_the_straight_one(tmp_path, tiny_run, monkeypatch, options):
    assert cli(*tiny_run, *options, "--out", tmp_path / "straight") == 0
    for stop_at in (5, 2):                                  # optimiser steps until the next interruption
        with monkeypatch.context() as patch:
            fail_at(patch, train, "optimise", stop_at)
            start = [*tiny_run, *options] if stop_at == 5 else ["--resume"]
            assert cli(*start, "--out", tmp_path / "broken") == 1
    assert torch.load(tmp_path / "broken/state.pt")["step"] == 6
    assert cli("--resume", "--out", tmp_path / "broken") == 0
    assert_same_run(tmp_path / "broken", tmp_path / "straight")


@pytest.mark.parametrize("call", [1, 4], ids=["middle", "last"])
@pytest.mark.parametrize("owner, name", [(os, "replace"), (torch, "save"), (Chimera, "save_pretrained")])
def test_an_interrupted_save_loses_nothing(tmp_path, tiny_run, monkeypatch, owner, name, call):
    assert cli(*tiny_run, "--out", tmp_path / "straight") == 0
    with monkeypatch.context() as patch:
        fail_at(patch, owner, name, call)
        assert cli(*tiny_run, "--out", tmp_path / "broken") == 1
    assert cli("--resume", "--out", tmp_path / "broken") == 0
    assert_same_run(tmp_path / "broken", tmp_path / "straight")


def test_a_full_disk_is_said_and_loses_no_checkpoint(tmp_path, tiny_run, capsys, monkeypatch):
    monkeypatch.setattr(train, "save", limited_after(train.save, 3))
    try:
        assert cli(*tiny_run, "--out", tmp_path / "run") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "cannot save to" in capsys.readouterr().err
    monkeypatch.undo()
    assert step_of(tmp_path / "run") > 0 and cli("--resume", "--out", tmp_path / "run") == 0


def limited_after(save, calls: int):
    """From the given call on no file may grow over 20 kB, as on a disk that is nearly full."""
    seen = []

    def limited(*args):
        seen.append(args)
        if len(seen) == calls:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        return save(*args)
    return limited


def test_what_a_killed_save_left_is_in_nobodys_way(tmp_path, tiny_run):
    (tmp_path / "run" / "saving").mkdir(parents=True)
    (tmp_path / "run" / "saving" / ".tmp123").write_text("half a file")
    assert cli(*tiny_run, "--out", tmp_path / "run") == 0
    assert not (tmp_path / "run" / "saving").exists()


def test_resume_refuses_other_data(tmp_path, tiny_run, stories, capsys):
    assert cli(*tiny_run, "--out", tmp_path / "run", "--save_every", 4) == 0
    state = torch.load(tmp_path / "run" / "state.pt", weights_only=True)
    torch.save(state | {"step": 4}, tmp_path / "run" / "state.pt")
    stories.write_text("<|endoftext|>".join(stories.read_text().split("<|endoftext|>")[::-1]))
    assert cli("--resume", "--out", tmp_path / "run") == 1
    assert "not those that this run began with" in capsys.readouterr().err


def test_a_run_of_an_earlier_version_is_told(tmp_path, tiny_run, capsys):
    assert cli(*tiny_run, "--out", tmp_path / "run") == 0
    state = torch.load(tmp_path / "run" / "state.pt", weights_only=True)
    del state["settings"]["optimizer"]
    torch.save(state | {"step": 4}, tmp_path / "run" / "state.pt")
    assert cli("--resume", "--out", tmp_path / "run") == 1
    assert "--init" in capsys.readouterr().err


def test_a_run_can_start_from_an_earlier_draft(tmp_path, tiny_run):
    """The weights of the same shape are taken over: with a tiny learning rate they stay."""
    assert cli(*tiny_run, "--out", tmp_path / "first") == 0
    assert cli(*tiny_run, "--out", tmp_path / "second", "--init", tmp_path / "first", "--depth", 3, "--lr", 1e-9) == 0
    first, second = (torch.load(tmp_path / run / "state.pt", weights_only=True)["draft"] for run in ("first", "second"))
    assert all(torch.allclose(second[name], weight, atol=1e-6) for name, weight in first.items())


def test_full_heads_start_from_those_for_the_same_vocabulary_only():
    model = tiny_llama()
    earlier, same, other = (tiny_draft(model, seed, heads="full", draft_vocab=4) for seed in (1, 1, 2))
    for parameter in earlier.parameters():
        parameter.fill_(0.5)
    for draft, all_taken in ((same, True), (other, False)):
        train.start_from(draft, earlier)
        taken = {name for name, weight in draft.named_parameters() if (weight == 0.5).all()}
        assert "trigram_in.weight" in taken and ("heads.0.weight" in taken) == all_taken


def test_killed_runs_resume_bit_for_bit(tmp_path, tiny_run):
    """kill -9 at three random moments, mostly in or near a save."""
    options = [*map(str, tiny_run), "--steps", "120", "--save_every", "1"]
    out, env, rng = tmp_path / "killed", os.environ | {"OMP_NUM_THREADS": "1"}, random.Random(0)
    for attempt in range(3):
        start = ["--resume"] if attempt else options
        before = step_of(out)
        process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *start, "--out", str(out)], env=env,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.time() + 300             # a busy machine
        while step_of(out) == before and process.poll() is None and time.time() < deadline:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.1)
        process.kill()
        assert process.wait() == -signal.SIGKILL and step_of(out) > before      # it was at work
    assert cli("--resume", "--out", out) == 0
    assert cli(*options, "--out", tmp_path / "straight") == 0
    assert_same_run(out, tmp_path / "straight")
    logs = [[json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
            for folder in (out, tmp_path / "straight")]
    assert [(row["step"], row["loss"]) for row in logs[0]] == [(row["step"], row["loss"]) for row in logs[1]]


def step_of(out: Path) -> int:
    """Steps in the newest checkpoint; there never is a broken one."""
    return torch.load(out / "state.pt", weights_only=True)["step"] if (out / "state.pt").exists() else 0


def test_resume_keeps_the_dtype_of_the_run(tmp_path, tiny_run, monkeypatch):
    def fastest(dtype):
        monkeypatch.setattr(common, "product_seconds", lambda candidate, width: float(candidate != dtype))

    fastest(torch.bfloat16)
    with monkeypatch.context() as patch:
        fail_at(patch, train, "optimise", 5)
        assert cli(*tiny_run, "--dtype", "auto", "--out", tmp_path / "run") == 1
    fastest(torch.float32)                                  # auto would choose otherwise today
    assert cli("--resume", "--out", tmp_path / "run") == 0
    assert torch.load(tmp_path / "run/state.pt")["settings"]["dtype_used"] == "bfloat16"


def test_a_finished_run_says_so(tmp_path, tiny_run, capsys):
    assert cli(*tiny_run, "--out", tmp_path / "run") == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    capsys.readouterr()
    assert cli("--resume", "--out", tmp_path / "run") == 0
    assert "is finished (9 steps)" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_steps_are_optimiser_steps(tmp_path, tiny_run):
    assert cli(*tiny_run, "--grad_accum", 8, "--out", tmp_path / "run") == 0
    _, _, state = final(tmp_path / "run")
    assert {int(value) for name, value in state.items() if name.endswith(".step")} == {9}


def test_epochs_become_steps(tmp_path, tiny_run, capsys):
    options = tiny_run[:4] + tiny_run[6:]                   # no --steps
    assert cli(*options, "--epochs", 1.5, "--grad_accum", 2, "--out", tmp_path / "run") == 0
    assert torch.load(tmp_path / "run/state.pt")["step"] == math.ceil(1.5 * 14 / 3 / 2)


def test_the_exported_draft_holds_nothing_of_the_target(tmp_path, tiny_run, toy_checkpoint):
    assert cli(*tiny_run, "--draft_vocab", 50, "--out", tmp_path / "run") == 0
    with safe_open(tmp_path / "run/model.safetensors", "pt") as file:
        names = set(file.keys())
    assert not any("lm_head" in name or "embed" in name or "frozen" in name for name in names)
    state = torch.load(tmp_path / "run/state.pt", weights_only=True)
    assert names == set(state["draft"])                     # and the training state neither
    draft = Chimera.from_pretrained(tmp_path / "run", common.Llama.from_pretrained(toy_checkpoint))
    assert_same(dict(draft.state_dict()), state["draft"], rtol=0, atol=0)


def test_a_run_reports_data_settings_and_agreement(tmp_path, tiny_run, capsys):
    assert cli(*tiny_run, "--out", tmp_path / "run") == 0
    out = capsys.readouterr().out
    for part in ("settings: {", "14 samples", "answer tokens", "4 held out", "step 1: top-1", "step 2", "expected tau"):
        assert part in out


# -- what a user can get wrong -----------------------------------------------------------------------------------------

OK = ["--ckpt", "toy", "--data", "stories.txt"]
WRONG = {
    "no ckpt": (["--data", "stories.txt"], "--ckpt and --data are needed together"),
    "no data": (["--ckpt", "toy"], "--ckpt and --data are needed"),
    "missing ckpt": (["--ckpt", "nowhere", "--data", "stories.txt"], "nowhere/config.json not found"),
    "missing data": ([*OK, "no.txt"], "no.txt not found"),
    "data is a folder": (["--ckpt", "toy", "--data", "toy"], "toy not found"),
    "extension": (["--ckpt", "toy", "--data", "toy/tokenizer.model"], "must be .txt, .json or .jsonl"),
    "json is no list": (["--ckpt", "toy", "--data", "toy/config.json"], "list of conversations"),
    "gz cut off": (["--ckpt", "toy", "--data", "cut.txt.gz"], "error:"),
    "too little data": ([*OK, "--held_out", "15"], "3 samples are left"),
    "all held out": ([*OK, "--held_out", "99"], "one batch needs 8"),
    "nothing fits": ([*OK, "--max_length", "2"], "0 samples are left"),
    "steps": ([*OK, "--steps", "-1"], "--steps must be positive"),
    "no steps": ([*OK, "--steps", "0"], "--steps must be positive"),
    "steps no number": ([*OK, "--steps", "many"], "--steps"),
    "batch": ([*OK, "--batch_size", "0"], "--batch_size must be positive"),
    "depth": ([*OK, "--depth", "0"], "--depth must be positive"),
    "lr": ([*OK, "--lr", "nan"], "--lr must be positive"),
    "held_out": ([*OK, "--held_out", "-1"], "--held_out"),
    "kl": ([*OK, "--kl", "-1"], "--kl"),
    "draft_vocab": ([*OK, "--draft_vocab", "-5"], "--draft_vocab"),
    "max_new_tokens": (["--ckpt", "toy", "--distill", "stories.txt", "--max_new_tokens", "0"], "--max_new_tokens"),
    "chat": ([*OK, "--chat", "alpaca"], "unknown chat template"),
    "chatml": ([*OK, "--chat", "chatml"], "needs <|im_start|>"),
    "heads": ([*OK, "--heads", "half"], "--heads"),
    "dtype": ([*OK, "--dtype", "int8"], "--dtype"),
    "device": ([*OK, "--device", "abacus"], "--device"),
    "out is a file": ([*OK, "--held_out", "4", "--out", "stories.txt"], "stories.txt"),
    "nothing to resume": (["--resume"], "no run to resume"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_ends_in_one_line(tmp_path, toy_checkpoint, stories, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    Path("cut.txt.gz").write_bytes(gzip.compress(STORY.encode())[:-20])
    argv, message = WRONG[name]
    assert cli("--out", "new", *argv) in (1, 2)
    error = capsys.readouterr().err.strip()
    last = error.splitlines()[-1]
    assert "error:" in last and message in last
    assert error == last or error.startswith("usage:")      # argparse puts its usage in front
    assert not Path("new").exists()


def test_a_draft_is_never_overwritten(tmp_path, tiny_run, capsys):
    assert cli(*tiny_run, "--out", tmp_path / "run") == 0
    before = (tmp_path / "run/model.safetensors").read_bytes()
    capsys.readouterr()
    assert cli(*tiny_run, "--out", tmp_path / "run") == 1
    assert "already holds a draft" in capsys.readouterr().err
    assert (tmp_path / "run/model.safetensors").read_bytes() == before


# -- several processes, cached states, what is printed ----------------------------------------------------------------

def losses(out) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


def test_two_processes_give_the_losses_of_one_at_the_same_global_batch(tmp_path, tiny_run):
    assert cli(*tiny_run, "--grad_accum", 2, "--out", tmp_path / "one") == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    done = subprocess.run([*launch, Path(train.__file__), *map(str, tiny_run), "--out", tmp_path / "two"],
                          capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    saved = [safe_open(tmp_path / name / "model.safetensors", "pt") for name in ("one", "two")]
    assert saved[0].keys() == saved[1].keys()               # the draft alone, under its own names


def test_cached_states_change_nothing_and_are_begun_anew_for_other_data(tmp_path, tiny_run, toy_checkpoint):
    assert cli(*tiny_run, "--out", tmp_path / "plain") == 0
    for out in ("first", "second"):                         # the second run reads what the first one wrote
        assert cli(*tiny_run, "--hidden_cache", tmp_path / "states", "--out", tmp_path / out) == 0
        assert losses(tmp_path / out) == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    model = Llama.from_pretrained(toy_checkpoint)
    samples = [(torch.tensor(random_ids(n, 400)), torch.ones(n)) for n in (5, 7)]
    cache = HiddenCache(tmp_path / "states", samples, model)
    assert not cache.present.any()
    batch, (tokens, _) = [1, 0], collate(samples[::-1])
    fresh, read = cache.states(model, batch, tokens), cache.states(model, batch, tokens)
    assert torch.equal(fresh[0], read[0]) and torch.equal(fresh[1, :5], read[1, :5])


def test_the_state_loss_is_smooth_l1_to_the_targets_states():
    model, (tokens, labelled) = tiny_llama(), random_batch()
    draft, hidden = tiny_draft(model), model.hidden_states(tokens)
    base, more = (batch_loss(draft, model, tokens, labelled, Meter(3), Weights(state=w)) for w in (0.0, 2.0))
    wanted = 0.0
    for k, state in enumerate(draft(tokens, hidden), 1):
        apart = F.smooth_l1_loss(state[:, :-1], hidden[:, k:-1], reduction="none").mean(-1)
        wanted += 2.0 * (apart * labelled[:, k:-1]).sum().item()
    assert more - base == pytest.approx(wanted, rel=1e-4)


def test_later_steps_can_count_less():
    model, (tokens, labelled) = tiny_llama(), random_batch()
    meters = [Meter(3), Meter(3)]
    for meter, decay in zip(meters, (1.0, 0.5)):
        batch_loss(tiny_draft(model), model, tokens, labelled, meter, Weights(decay=decay))
    assert torch.allclose(meters[1].loss, meters[0].loss * torch.tensor([1, 0.5, 0.25]))


def test_a_7b_target_with_light_heads_fits_24_gb():
    with torch.device("meta"):
        model = Llama(LlamaConfig()).to(torch.bfloat16)
        draft = Chimera(ChimeraConfig(depth=4), model)
    args = arguments(batch_size=1, max_length=1024, depth=4, dtype_used="bfloat16")
    parts = train.memory_estimate(draft, model.config, 2 * sum(p.numel() for p in model.parameters()), args)
    assert 13 < parts["target"] < 14 and parts["in all"] == pytest.approx(sum(parts.values()) / 2)
    assert parts["in all"] < 24


def test_a_run_leaves_a_log_line_a_step_and_charts(tmp_path, tiny_run):
    assert cli(*tiny_run, "--out", tmp_path / "run") == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    for name in ("loss.svg", "agreement.svg"):
        assert ElementTree.parse(tmp_path / "run" / name).getroot().tag.endswith("svg")


def test_without_arguments_the_bundled_draft_is_trained_anew(tmp_path, capsys, monkeypatch):
    """The run of `python train.py`, cut to two steps: its own texts, its settings, both drafts compared."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.txt").write_text("\n".join(train.OPENINGS.read_text().splitlines()[:2]))
    monkeypatch.setattr(train, "OPENINGS", tmp_path / "two.txt")
    assert cli("--steps", 2, "--batch_size", 2, "--held_out", 4) == 0
    out = capsys.readouterr().out
    settings = json.loads(re.search(r"settings: (.*)", out)[1])
    assert settings["lr"] == train.BUNDLED["lr"] and settings["data"] == train.BUNDLED["data"]
    new, bundled = re.search(r"greedy: ([\d.]+); the bundled draft: ([\d.]+)", out).groups()
    assert 1 <= float(new) < 1.5 < 2 < float(bundled)
    assert f"--ckpt {train.STORIES} --draft out" in out and (tmp_path / "out" / "model.safetensors").exists()


def test_force_overwrites_a_draft(tmp_path, tiny_run):
    assert cli(*tiny_run, "--out", tmp_path / "run") == 0
    assert cli(*tiny_run, "--out", tmp_path / "run") == 1
    assert cli(*tiny_run, "--out", tmp_path / "run", "--force", "--steps", 3) == 0
    assert step_of(tmp_path / "run") == 3 and len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 3


def test_a_damaged_asset_is_named_with_the_command_that_restores_it(tmp_path, capsys, monkeypatch):
    bundled = tmp_path / "assets" / "stories"
    shutil.copytree(train.STORIES, bundled)
    shard = sorted(bundled.glob("*.safetensors"))[-1]
    shard.write_bytes(b"cut")
    monkeypatch.setattr(common, "ASSETS", tmp_path / "assets")
    monkeypatch.setattr(train, "BUNDLED", train.BUNDLED | {"ckpt": str(bundled)})
    assert cli("--out", tmp_path / "run") == 1
    error = capsys.readouterr().err
    assert f"{shard.name} is damaged" in error and f"git -C {tmp_path} checkout assets" in error
