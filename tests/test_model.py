"""LLaMA's arithmetic, its cache and its checkpoint files.

The folders in golden/ hold random checkpoints and, in expected.safetensors, what transformers computed from them.
"""
import json
import math
import shutil

import pytest
import torch
from helpers import GOLDEN, edit_config, random_ids, save_checkpoint, tiny_llama
from safetensors.torch import load_file, save_file

import model as model_file
from model import Llama, LlamaConfig, additive_mask, attend, lay_out, linear, rope_table, split_product
from speculative import generate

GOLDEN_NAMES = sorted(path.name for path in GOLDEN.iterdir())


def ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor([random_ids(count, seed=seed)])


@pytest.fixture
def saved(tmp_path):
    """A tiny model and the folder that it was saved in."""
    model = tiny_llama()
    return model, save_checkpoint(model, tmp_path / "saved")


def edit_tensors(folder, **changes) -> None:
    """Sets tensors of a folder's model.safetensors ("__" in a key stands for "."); a value of ... removes one."""
    tensors = load_file(folder / "model.safetensors") | {k.replace("__", "."): v for k, v in changes.items()}
    save_file({k: v for k, v in tensors.items() if v is not ...}, folder / "model.safetensors")


# -- equal to transformers ---------------------------------------------------------------------------------------------

@pytest.fixture(params=GOLDEN_NAMES)
def golden(request):
    return GOLDEN / request.param, load_file(GOLDEN / request.param / "expected.safetensors")


def test_golden_logits_and_hidden_states(golden):
    folder, expected = golden
    model = Llama.from_pretrained(folder)
    hidden = model.hidden_states(expected["input_ids"])
    torch.testing.assert_close(hidden, expected["last_hidden"], atol=1e-4, rtol=0)
    torch.testing.assert_close(model.lm_head(hidden), expected["logits"], atol=1e-4, rtol=0)


def test_golden_greedy_text(golden):
    folder, expected = golden
    prompt, text = expected["greedy_prompt"][0].tolist(), expected["greedy"][0].tolist()
    passes = generate(Llama.from_pretrained(folder), prompt, max_new_tokens=len(text) - len(prompt))
    assert prompt + [i for new in passes for i in new] == text


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.06), (torch.float16, 0.01)])
def test_half_precision_is_close(golden, dtype, tolerance):
    folder, expected = golden
    model = Llama.from_pretrained(folder, dtype=dtype)
    assert {p.dtype for p in model.parameters()} | {model.cos.dtype, model.sin.dtype} == {dtype}
    logits = model(expected["input_ids"]).float()
    assert (logits - expected["logits"]).norm() < tolerance * expected["logits"].norm()


def test_golden_files_are_written_as_they_were_read(golden, tmp_path):
    folder, _ = golden
    original = {k: v for f in folder.glob("model*.safetensors") for k, v in load_file(f).items() if "inv_freq" not in k}
    dtype = original["model.norm.weight"].dtype
    Llama.from_pretrained(folder).save_pretrained(tmp_path, dtype)
    again = load_file(tmp_path / "model.safetensors")
    assert again.keys() == original.keys()
    assert all(again[name].dtype == dtype and torch.equal(again[name], original[name]) for name in original)


# -- attention and cache -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("chunks", [[1] * 12, [12], [5, 7], [1, 3, 8], [4, 1, 7]], ids=str)
def test_cached_decoding_equals_the_full_pass(groups, chunks):
    model, tokens = tiny_llama(num_key_value_heads=groups), ids(12)
    cache = model.new_cache(12)
    assert [kv.shape for kv in cache.kv] == 2 * [(2, 1, groups, 12, 8)]        # not by query heads
    parts = [model.hidden_states(part, cache) for part in tokens.split(chunks, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model.hidden_states(tokens), atol=1e-5, rtol=0)
    assert cache.length == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 0), (1, 1), (1, 2), (1, 7), (5, 1), (3, 4), (2, 100)])
def test_linear_is_the_plain_product_in_every_layout(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(*shape, 48, generator=generator), torch.randn(20, 48, generator=generator)
    found = linear(x.to(dtype), lay_out(weight.to(dtype)))
    wanted = x.to(dtype).double() @ weight.to(dtype).double().t()
    assert found.shape == (*shape, 20) and torch.allclose(found.double(), wanted, rtol=0.01, atol=0.05)


@pytest.mark.parametrize("shape", [(1, 0), (1, 1), (1, 3), (3, 4), (1, 33)])
def test_linear_is_the_plain_product_on_a_cpu_without_avx512(shape, monkeypatch):
    monkeypatch.setattr(model_file, "AVX2", True)
    for dtype in (torch.float32, torch.bfloat16):
        test_linear_is_the_plain_product_in_every_layout(shape, dtype)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_one_row_is_split_over_the_cores(threads):
    row, weight, before = torch.randn(1, 48), torch.randn(20, 48), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.testing.assert_close(split_product(row, weight), row @ weight.t())
    finally:
        torch.set_num_threads(before)


def test_a_row_in_bfloat16_rounds_alike_alone_and_among_others():
    """Not promised, but the reason why plain and speculative text in bfloat16 agree more often than not."""
    x, weight = torch.randn(8, 64).bfloat16(), torch.randn(96, 64).bfloat16()
    together = linear(x, weight)
    alone = torch.cat([linear(row[None], weight) for row in x])
    assert (together == alone).float().mean() > 0.9


def test_texts_of_a_batch_do_not_mix():
    model, both = tiny_llama(), torch.cat((ids(9), ids(9, seed=1)))
    cache = model.new_cache(9, batch=2)
    cached = torch.cat([model.hidden_states(part, cache) for part in both.split([4, 5], 1)], 1)
    for row in (0, 1):
        alone = model.hidden_states(both[row:row + 1])[0]
        torch.testing.assert_close(model.hidden_states(both)[row], alone, atol=1e-5, rtol=0)
        torch.testing.assert_close(cached[row], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_neighbouring_query_heads_share_a_key_value_head(groups):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 6, 8, generator=generator) for heads in (4, groups, groups))
    group = torch.arange(4) // (4 // groups)                # with 2: [0, 0, 1, 1], not [0, 1, 0, 1]
    weights = (q @ k[:, group].transpose(-1, -2) * 8 ** -0.5).softmax(-1)
    torch.testing.assert_close(attend(q, k, v), weights @ v[:, group])


@pytest.mark.parametrize("past, new, counts", [(4, 3, [5, 6, 7]), (3, 1, [4]), (0, 3, [1, 2, 3]), (0, 1, [1])])
def test_a_row_sees_the_whole_past_and_itself_but_nothing_later(past, new, counts):
    model, tokens = tiny_llama(), ids(past + new)

    def new_rows(tokens):
        cache = model.new_cache(past + new)
        return [model.hidden_states(part, cache) for part in tokens.split([past, new] if past else new, 1)][-1][0]

    seen = []
    for i in range(past + new):                             # which rows change with token i
        changed = tokens.clone()
        changed[0, i] = (changed[0, i] + 1) % 40
        seen.append((new_rows(changed) - new_rows(tokens)).abs().amax(1) > 1e-6)
    assert torch.stack(seen).sum(0).tolist() == counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_are_finite_after_softmax_in_every_dtype(dtype):
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    mask = additive_mask(torch.cat((torch.ones(3, 4, dtype=torch.bool), tree), 1), dtype)
    assert set(mask.unique().tolist()) == {0.0, -math.inf} and mask.dtype == dtype
    x = torch.randn(1, 2, 7, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = attend(x[:, :, 4:], x, x, mask)
    assert out.isfinite().all()
    seen = x[:, :, [0, 1, 2, 3, 4, 6]]                      # the last row does not see its sibling
    torch.testing.assert_close(out[:, :, 2:], attend(x[:, :, 6:], seen, seen))


@pytest.mark.parametrize("start, rows", [(6, []), (3, []), (0, []), (2, [3, 5]), (2, [2, 3, 4, 5]), (2, [2, 3]),
                                         (0, [4]), (1, [4, 2, 5]), (2, [3, 2])], ids=str)
def test_keep_leaves_the_start_and_the_given_rows_in_their_order(start, rows):
    cache = tiny_llama().new_cache(8)
    marks = torch.arange(6.).view(1, 1, 6, 1).expand(1, 2, 6, 8)
    for layer in (0, 1):
        cache.write(layer, marks + 10 * layer, marks + 10 * layer + 100)
    cache.length = 6
    cache.keep(start, rows)
    assert cache.length == start + len(rows)
    for layer in (0, 1):
        for part in (0, 1):
            kept = cache.kv[layer][part, 0, :, :cache.length, 0] - 10 * layer - 100 * part
            assert kept.tolist() == [[*range(start), *rows]] * 2


def test_text_goes_on_from_kept_rows_as_if_the_others_had_never_been():
    model, tokens = tiny_llama(), ids(10)
    cache = model.new_cache(14)
    model.hidden_states(tokens[:, :4], cache)
    draft = torch.tensor([[1, tokens[0, 4], 2, tokens[0, 5]]])          # rows 5 and 7 are a path, 4 and 6 its siblings
    tree = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 1]], dtype=torch.bool)
    mask = additive_mask(torch.cat((torch.ones_like(tree), tree), 1), torch.float32)
    model.hidden_states(draft, cache, torch.tensor([4, 4, 5, 5]), mask)
    cache.keep(4, [5, 7])
    rest = model.hidden_states(tokens[:, 6:], cache)
    torch.testing.assert_close(rest, model.hidden_states(tokens)[:, 6:], atol=1e-5, rtol=0)


def test_reserve_grows_and_keeps_and_never_shrinks():
    model, tokens = tiny_llama(), ids(9)
    cache = model.new_cache(5)
    model.hidden_states(tokens[:, :5], cache)
    before = [kv.clone() for kv in cache.kv]
    cache.reserve(3)
    assert cache.rows == before[0].shape[3]
    cache.reserve(9)
    assert cache.rows == 9 and all(torch.equal(kv[:, :, :, :5], old) for kv, old in zip(cache.kv, before))
    rest = model.hidden_states(tokens[:, 5:], cache)
    torch.testing.assert_close(rest, model.hidden_states(tokens)[:, 5:], atol=1e-5, rtol=0)


# -- config ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("theta, angle", [(1e4, 5.168), (1e6, 1.594)])
def test_rope_angle(theta, angle):
    cos, sin = rope_table(LlamaConfig(head_dim=128, max_position_embeddings=1001, rope_theta=theta))
    assert cos.shape == sin.shape == (1001, 128)
    for pair, sign in ((1, -1), (65, 1)):                   # the first half of sin is negated
        found = math.atan2(sign * sin[1000, pair], cos[1000, pair]) % (2 * math.pi)
        assert found == pytest.approx(angle, abs=1e-3)


def test_linear_rope_divides_positions():
    plain = rope_table(LlamaConfig(head_dim=16, max_position_embeddings=64))
    scaled = rope_table(LlamaConfig(head_dim=16, max_position_embeddings=256, rope_factor=4.0))
    for part in (0, 1):
        torch.testing.assert_close(plain[part], scaled[part][::4])


@pytest.mark.parametrize("raw, theta, factor", [
    ({}, 1e4, 1),
    ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, 1),
    ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}, 5e5, 4),
    ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 1e4, 4),
    ({"rope_scaling": {"rope_type": "default"}}, 1e4, 1),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, 1),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}, 5e5, 2)], ids=str)
def test_rope_settings_old_form_and_new(raw, theta, factor):
    config = LlamaConfig.from_dict(raw)
    assert (config.rope_theta, config.rope_factor) == (theta, factor)
    again = LlamaConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config


@pytest.mark.parametrize("raw, named", [
    ({"model_type": "mistral"}, "model_type 'mistral'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope type 'llama3'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 8.0}}, "rope type 'yarn'"),
    ({"rope_scaling": {"type": "linear"}}, "rope_factor must be a positive number, not None"),
    ({"attention_bias": True}, "attention_bias = True"),
    ({"mlp_bias": True}, "mlp_bias = True"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
    ({"num_attention_heads": 6, "num_key_value_heads": 4}, "6 query heads do not divide into 4 key/value heads"),
    ({"hidden_size": 0}, "hidden_size must be a positive integer"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a positive number, not '1e-6'")], ids=str)
def test_what_is_not_computed_is_refused_by_name(saved, raw, named):
    _, folder = saved
    with pytest.raises(ValueError) as error:
        Llama.from_pretrained(edit_config(folder, **raw))
    assert named in str(error.value) and str(folder / "config.json") in str(error.value)


def test_entries_that_change_nothing_are_accepted(saved):
    model, folder = saved
    edit_config(folder, attention_bias=False, mlp_bias=None, quantization_config=None, hidden_act="silu",
                use_cache=True, torch_dtype="float16", initializer_range=0.02, pretraining_tp=1)
    assert Llama.from_pretrained(folder).config == model.config


def test_head_size_and_head_counts_default_from_the_others():
    config = LlamaConfig.from_dict({"hidden_size": 48, "num_attention_heads": 6, "head_dim": None})
    assert (config.head_dim, config.num_key_value_heads) == (8, 6)


@pytest.mark.parametrize("eps, value", [(1e-5, 0.3015), (1e-6, 0.7071)])
def test_every_norm_uses_the_epsilon_of_the_config(eps, value):
    model = tiny_llama(hidden_size=4, rms_norm_eps=eps)
    for norm in (model.norm, model.layers[1].input_norm, model.layers[1].post_norm):
        scaled = norm(torch.full((4,), 1e-3)) / norm.weight
        torch.testing.assert_close(scaled, torch.full((4,), value), atol=1e-4, rtol=0)


# -- checkpoint files --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", [{}, {"num_key_value_heads": 1}, {"head_dim": 16}, {"tie_word_embeddings": True},
                                   {"rope_factor": 2.0, "rms_norm_eps": 1e-5}], ids=str)
def test_what_was_saved_loads_equal(tmp_path, shape):
    model = tiny_llama(**shape)
    model.save_pretrained(tmp_path)
    again = Llama.from_pretrained(tmp_path)
    assert again.config == model.config and torch.equal(again(ids(9)), model(ids(9)))
    assert not any(p.requires_grad for p in [*model.parameters(), *again.parameters()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_load_as_float32(tmp_path, dtype):
    model = tiny_llama()
    model.save_pretrained(tmp_path, dtype)
    again = Llama.from_pretrained(tmp_path)
    for name, weight in model.named_parameters():
        read = again.get_parameter(name)
        assert read.dtype == torch.float32 and torch.equal(read, weight.to(dtype).float())


def test_tied_embeddings_are_stored_once(tmp_path):
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = Llama.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.lm_head.weight is model.embed.weight


def test_tied_embeddings_win_over_a_stored_head(tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    edit_tensors(tmp_path, lm_head__weight=torch.zeros(40, 32))
    assert torch.equal(Llama.from_pretrained(tmp_path)(ids(5)), model(ids(5)))


def test_an_untied_checkpoint_needs_its_head(saved):
    _, folder = saved
    edit_tensors(folder, lm_head__weight=...)
    with pytest.raises(ValueError, match="no tensor 'lm_head.weight'"):
        Llama.from_pretrained(folder)


def test_recomputable_rope_buffers_are_ignored(saved):
    model, folder = saved
    edit_tensors(folder, rope__freqs=torch.ones(4), model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    assert torch.equal(Llama.from_pretrained(folder)(ids(5)), model(ids(5)))


@pytest.mark.parametrize("changes, message", [
    ({"model__layers__0__self_attn__q_proj__bias": torch.ones(32)}, "unknown .*0.self_attn.q_proj.bias'"),
    ({"model__layers__2__mlp__up_proj__weight": torch.ones(48, 32)}, "unknown .* 'model.layers.2.mlp.up_proj.weight'"),
    ({"model__layers__1__mlp__up_proj__weight": ...}, "no tensor 'model.layers.1.mlp.up_proj.weight'"),
    ({"model__layers__1__self_attn__k_proj__weight": torch.ones(32, 32)}, r"has shape \[32, 32\], .* \[16, 32\]"),
    ({"model__norm__weight": torch.ones(31)}, r"'model.norm.weight' has shape \[31\]")],
    ids=["bias", "third layer", "missing", "wrong shape", "wrong length"])
def test_tensors_that_do_not_fit_the_config_are_an_error(saved, changes, message):
    _, folder = saved
    edit_tensors(folder, **changes)
    with pytest.raises(ValueError, match=message):
        Llama.from_pretrained(folder)


@pytest.mark.parametrize("bytes_left", [0, 5, 100, -1])
def test_a_cut_file_is_called_damaged(saved, bytes_left):
    _, folder = saved
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:bytes_left])
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        Llama.from_pretrained(folder)


@pytest.mark.parametrize("text", ["", "{", "not json", "[]", "7"])
def test_a_config_that_is_no_json_object_is_an_error(saved, text):
    _, folder = saved
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json"):
        Llama.from_pretrained(folder)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(saved, missing):
    _, folder = saved
    (folder / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        Llama.from_pretrained(folder)


@pytest.mark.parametrize("shards", [1, 2])
def test_bin_files_are_read_as_safetensors_are(saved, shards):
    model, folder = saved
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        where = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(names)}
        for file in set(where.values()):
            torch.save({name: tensors[name] for name in names if where[name] == file}, folder / file)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    loaded = Llama.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def test_safetensors_come_before_bin(saved):
    _, folder = saved
    (folder / "pytorch_model.bin").write_text("not looked at")
    Llama.from_pretrained(folder)


def test_links_inside_a_folder_are_followed(saved, tmp_path):
    """As in a hub's cache, where a snapshot holds links to blobs."""
    model, folder = saved
    (tmp_path / "snapshot").mkdir()
    for file in folder.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert torch.equal(Llama.from_pretrained(tmp_path / "snapshot").norm.weight, model.norm.weight)


@pytest.fixture
def sharded(tmp_path):
    return shutil.copytree(GOLDEN / "sharded_bf16", tmp_path / "sharded")


@pytest.mark.parametrize("stray", ["model-00004-of-00004.safetensors", "model.safetensors"])
def test_only_files_named_by_the_index_are_read(sharded, stray):
    (sharded / stray).write_text("not a tensor file")
    Llama.from_pretrained(sharded)


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003.safetensors"):
        Llama.from_pretrained(sharded)


@pytest.mark.parametrize("change, message", [
    (lambda names: names.pop("model.norm.weight"), "no tensor 'model.norm.weight'"),
    (lambda names: names.update({"lm_head.weight": "model-00001-of-00003.safetensors"}), "lm_head.weight' cannot be"),
    (lambda names: names.clear(), "no tensor")], ids=["dropped", "wrong file", "empty"])
def test_an_index_that_does_not_match_its_files_is_an_error(sharded, change, message):
    index = sharded / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    change(raw["weight_map"])
    index.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        Llama.from_pretrained(sharded)


def test_an_index_without_a_weight_map_is_an_error(sharded):
    (sharded / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(ValueError, match="weight_map"):
        Llama.from_pretrained(sharded)
