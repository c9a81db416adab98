"""Reading checkpoints: whole and sharded, damaged and contradictory ones."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from paged_backend.checkpoints.gguf import demo_path
from paged_backend.checkpoints.loading import load_checkpoint
from paged_backend.checkpoints.resolve import resolve_model
from paged_backend.config import EngineConfig
from paged_backend.errors import ModelLoadError
from paged_backend.kernels.reference import ReferenceKernels
from paged_backend.kernels.tensor import as_tensor
from paged_backend.models.loading import load_model

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
PROMPT = list(range(5, 45))
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(save_random):
    return save_random(hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL))


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the untied Llama checkpoint that a test may damage."""
    return shutil.copytree(saved[0], tmp_path / "model")


@pytest.fixture(scope="module")
def sharded_source(saved, tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded")
    saved[1].save_pretrained(path, max_shard_size="100KB")
    assert (path / INDEX).exists()
    return path


@pytest.fixture
def sharded(sharded_source, tmp_path):
    """A copy of the same checkpoint in several files."""
    return shutil.copytree(sharded_source, tmp_path / "sharded")


def load(path, **options):
    return load_model(EngineConfig(str(path), **options), ReferenceKernels())


def edit_tensors(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@torch.inference_mode()
def their_logits(path):
    return hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(torch.tensor([PROMPT])).logits[
        0
    ]


def test_shards_and_a_single_file_give_the_same_model(folder, sharded, paged):
    assert torch.equal(paged(folder).logits(PROMPT), paged(sharded).logits(PROMPT))


def test_a_bfloat16_checkpoint_is_computed_in_float32(saved, tmp_path, paged, close):
    model = hf.LlamaForCausalLM.from_pretrained(saved[0], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    ours = paged(tmp_path)
    close(ours.logits(PROMPT), their_logits(tmp_path))
    compact = paged(tmp_path, dtype="bfloat16")
    assert torch.equal(compact.logits(PROMPT), ours.logits(PROMPT))
    assert compact.decoder.nbytes() == ours.decoder.nbytes() // 2


def test_the_model_outlives_its_files(folder, paged):
    model = paged(folder)
    before = model.logits(PROMPT)
    for file in folder.iterdir():
        file.write_bytes(b"")
    shutil.rmtree(folder)
    assert torch.equal(model.logits(PROMPT), before)


def test_a_tied_head_is_held_once(save_random, paged):
    path, _ = save_random(hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL, tie_word_embeddings=True))
    decoder = paged(path).decoder
    assert decoder.lm_head is decoder.embed_tokens


def test_what_surrounds_the_weights_comes_along(folder):
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [2, 9]}')
    loaded = load(folder, max_model_len=64)
    assert loaded.checkpoint.generation_config == {"temperature": 0.6, "eos_token_id": [2, 9]}
    assert loaded.eos_token_ids == (2, 9)
    assert loaded.tokenizer_source == str(folder)
    assert loaded.max_model_len == 64
    assert load(folder).max_model_len == 256
    assert load(folder, tokenizer="elsewhere").tokenizer_source == "elsewhere"
    (folder / "generation_config.json").unlink()
    assert load(folder).checkpoint.generation_config == {}
    assert load(folder).eos_token_ids == (2,)


def test_nothing_is_read_before_a_tensor_is_asked_for(folder):
    checkpoint = load_checkpoint(folder)
    name = "model.layers.1.mlp.down_proj.weight"
    assert checkpoint.shapes[name] == (64, 96)
    assert torch.equal(as_tensor(checkpoint.tensors[name]()), load_file(folder / WEIGHTS)[name])


def test_a_context_beyond_the_model_is_refused(folder):
    with pytest.raises(ModelLoadError, match=r"max_model_len 257 .* at most 256"):
        load(folder, max_model_len=257)


def test_scaled_ropes_allow_a_longer_context_on_request(folder):
    edit_json(
        folder / "config.json", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    assert load(folder).max_model_len == 256
    assert load(folder, max_model_len=512).max_model_len == 512
    with pytest.raises(ModelLoadError, match="at most 512"):
        load(folder, max_model_len=513)


def test_quantization_the_kernels_lack_is_refused(folder):
    for kind in ("int8", "int4"):
        with pytest.raises(ValueError, match="int8 and int4 weights need the C kernels"):
            load(folder, quantization=kind)


# --- damaged folders -----------------------------------------------------------------------------------


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"there is no folder .*nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"there is no file .*x\.gguf"):
        load(tmp_path / "x.gguf")


def test_a_file_that_is_no_folder_is_refused(folder):
    with pytest.raises(ModelLoadError, match="neither a folder nor a"):
        load(folder / WEIGHTS)


def test_a_missing_or_broken_config_is_named(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read as JSON"):
        load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="must hold a JSON object"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load(folder)


def test_a_folder_without_weights_is_named(folder):
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelLoadError, match="has no weights: neither"):
        load(folder)


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_way_to_convert(folder, pickle):
    (folder / WEIGHTS).unlink()
    (folder / pickle).write_bytes(b"")
    with pytest.raises(ModelLoadError, match=rf"{pickle}.*save_pretrained"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -50])
def test_a_truncated_shard_is_named(sharded, keep):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=rf"{shard.name} is damaged or cut short"):
        load(sharded)


def test_a_missing_shard_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=rf"names '{shard.name}', but that file is missing"):
        load(sharded)


def test_a_tensor_that_the_index_misplaces_is_named(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.layers.7.ghost"] = next(iter(index["weight_map"].values()))
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.7\.ghost'"):
        load(sharded)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", 3])
def test_an_index_may_not_point_outside_of_its_folder(sharded, shard):
    edit_json(sharded / INDEX, weight_map={"lm_head.weight": shard})
    with pytest.raises(ModelLoadError, match="no plain file name"):
        load(sharded)


def test_an_index_without_a_map_is_refused(sharded):
    (sharded / INDEX).write_text("{}")
    with pytest.raises(ModelLoadError, match="no weight_map"):
        load(sharded)


def test_missing_and_unknown_tensors_are_named(folder):
    edit_tensors(folder, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"no tensor 'model\.layers\.1\.self_attn\.k_proj\.weight'"):
        load(folder)


def test_an_unknown_tensor_is_named(folder):
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(ModelLoadError, match=r"tensor 'model\.layers\.0\.self_attn\.q_proj\.bias'"):
        load(folder)


def test_a_wrong_shape_is_named(folder):
    edit_json(folder / "config.json", intermediate_size=80)
    with pytest.raises(ModelLoadError, match=r"gate_proj\.weight.*shape \(96, 64\).*asks for \(80, 64\)"):
        load(folder)


def test_weights_that_are_no_floats_are_refused(folder):
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(folder, lambda t: t.update({name: torch.zeros(96, 64, dtype=torch.int8)}))
    with pytest.raises(ModelLoadError, match=rf"{name}.*dtype I8"):
        load(folder)


def test_harmless_extras_are_ignored(folder, paged):
    before = paged(folder).logits(PROMPT)
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert torch.equal(paged(folder).logits(PROMPT), before)


EXTRAS = {
    "model.embed_tokens.position_ids": torch.arange(8),
    "model.layers.0.self_attn.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
    "model.layers.1.self_attn.masked_bias": torch.tensor(-1e4),
    "model.rotary_emb.inv_freq": torch.zeros(8),
    "v_head.summary.weight": torch.zeros(1, 64),
    "score.weight": torch.zeros(2, 64),
    "model.layers.2.self_attn.q_proj.weight": torch.zeros(64, 64),
    "model.layers.2.eh_proj.weight": torch.zeros(64, 128),
    "mtp.fc.weight": torch.zeros(64, 128),
    "steps": torch.tensor(7),
}


def test_what_the_decoder_does_not_use_is_left_alone_and_said_in_one_line(folder, paged, caplog):
    before = paged(folder).logits(PROMPT)
    edit_tensors(folder, lambda t: t.update(EXTRAS))
    with caplog.at_level("INFO", "paged_backend"):
        assert torch.equal(paged(folder).logits(PROMPT), before)
    (line,) = {record.getMessage() for record in caplog.records if "not used" in record.getMessage()}
    assert "v_head.summary.weight" in line
    assert "model.layers.2.eh_proj.weight" in line
    assert "inv_freq" not in line


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.1.mlp.up_proj.weight_scale",
        "model.embed_positions.weight",
        "model.norm.bias",
        "lm_head.bias",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_what_would_change_the_results_is_refused(folder, name, dtype):
    edit_tensors(folder, lambda t: t.update({name: torch.zeros(64, dtype=dtype)}))
    with pytest.raises(ModelLoadError, match=rf"tensor '{name}'"):
        load(folder)


def test_all_that_is_missing_is_named_in_one_line(folder):
    names = [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
    ]
    edit_tensors(folder, lambda t: [t.pop(name) for name in names])
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    assert all(repr(name) in str(caught.value) for name in names)
    assert "\n" not in str(caught.value)


@pytest.fixture
def gpt2(save_random, tmp_path):
    """A checkpoint that runs through its transformers module."""
    config = hf.GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    return shutil.copytree(save_random(hf.GPT2LMHeadModel, config)[0], tmp_path / "gpt2")


def test_a_module_s_checkpoint_may_have_more_than_the_module(gpt2, paged, caplog):
    before = paged(gpt2).logits(PROMPT)
    extras = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8),
        "transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
        "transformer.wpe.position_ids": torch.arange(64),
        "v_head.summary.weight": torch.zeros(1, 64),
    }
    edit_tensors(gpt2, lambda t: t.update(extras))
    with caplog.at_level("INFO", "paged_backend"):
        assert torch.equal(paged(gpt2).logits(PROMPT), before)
    assert any("v_head.summary.weight" in record.getMessage() for record in caplog.records)


def test_a_module_s_checkpoint_that_lacks_or_misplaces_tensors_is_refused(gpt2):
    names = ["transformer.h.0.mlp.c_fc.weight", "transformer.h.1.ln_1.bias"]
    whole = load_file(gpt2 / WEIGHTS)
    edit_tensors(gpt2, lambda t: [t.pop(name) for name in names])
    with pytest.raises(ModelLoadError) as caught:
        load(gpt2)
    assert all(repr(name) in str(caught.value) for name in names)
    wrong = {**whole, names[0]: whole[names[0]].to(torch.int8)}
    save_file(wrong, gpt2 / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=rf"{names[0]}.*dtype I8"):
        load(gpt2)
    save_file({**whole, "transformer.h.0.ln_1.scale": torch.zeros(64)}, gpt2 / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"ln_1\.scale"):
        load(gpt2)


# --- tie_word_embeddings against what is in the file: vllm #5621, #51063, PR #51665, sglang PR #1508 -------


def test_tied_without_a_head_uses_the_embedding(folder, paged, close):
    edit_json(folder / "config.json", tie_word_embeddings=True)
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    close(paged(folder).logits(PROMPT), their_logits(folder))


def test_tied_with_an_equal_head_holds_it_once(folder, paged, close):
    edit_json(folder / "config.json", tie_word_embeddings=True)
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = paged(folder)
    assert model.decoder.lm_head is model.decoder.embed_tokens
    close(model.logits(PROMPT), their_logits(folder))


def test_tied_with_a_different_head_uses_that_head_and_says_so(folder, paged, close, caplog):
    edit_json(folder / "config.json", tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING, "paged_backend"):
        model = paged(folder)
    assert "using that head" in caplog.text
    close(model.logits(PROMPT), their_logits(folder))


def test_tied_with_only_a_head_embeds_with_it(folder, paged, close):
    edit_json(folder / "config.json", tie_word_embeddings=True)
    edit_tensors(folder, lambda t: t.pop("model.embed_tokens.weight"))
    close(paged(folder).logits(PROMPT), their_logits(folder))


def test_untied_without_a_head_is_refused(folder):
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ModelLoadError, match=r"no tensor 'lm_head\.weight'.*tie_word_embeddings"):
        load(folder)


def test_both_tensor_layouts_of_a_multimodal_gemma3_load(save_random, tmp_path, paged, close):
    text = {
        **SMALL,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    path, model = save_random(hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**text))
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": json.loads((path / "config.json").read_text()),
    }
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT])).logits[0]
    for prefix, vision in (
        ("language_model.model.", "vision_tower."),
        ("model.language_model.", "model.vision_tower."),
    ):
        folder = tmp_path / prefix
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {
            name.replace("model.", prefix, 1): value for name, value in load_file(path / WEIGHTS).items()
        }
        save_file({**tensors, f"{vision}encoder.weight": torch.zeros(2)}, folder / WEIGHTS)
        close(paged(folder).logits(PROMPT), theirs)


# --- names ------------------------------------------------------------------------------------------------


def test_a_folder_wins_over_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == (tmp_path / "org" / "name").resolve()


def test_a_hub_id_without_network_or_cache_gives_a_clear_error(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked = {}

    def offline(name, allow_patterns, **options):
        asked["patterns"] = allow_patterns
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        ModelLoadError, match=r"'org/name' is not in the local cache and the hub cannot be reached"
    ):
        resolve_model("org/name")
    assert not any("bin" in p or "py" in p for p in asked["patterns"])


def test_a_downloaded_hub_model_is_loaded_from_its_folder(folder, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(folder))
    assert load("org/name").tokenizer_source == str(folder)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are dropped on Linux only")
@pytest.mark.parametrize("made", ["safetensors", "gguf"])
def test_a_file_takes_no_memory_once_its_weights_are_packed(made: str, tmp_path: Path) -> None:
    """Else a model would be in memory twice: as it is computed with, and as pages of its file."""
    code = (
        "import sys\n"
        "from paged_backend.config import EngineConfig\n"
        "from paged_backend.kernels.cpu.backend import CpuKernels\n"
        "from paged_backend.models.loading import load_model\n"
        "model = load_model(EngineConfig(sys.argv[1]), CpuKernels(1))\n"
        "mapped = 0\n"
        "for line in open('/proc/self/smaps'):\n"
        "    if line.split()[-1].endswith(('.gguf', '.safetensors')):\n"
        "        mapped = 1\n"
        "    elif mapped and line.startswith('Rss:'):\n"
        "        print(line.split()[1])\n"
        "        mapped = 0\n"
    )
    if made == "gguf":
        model = str(demo_path())
    else:
        config = hf.LlamaConfig(
            vocab_size=300,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
        hf.LlamaForCausalLM(config).save_pretrained(tmp_path)
        model = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=True)
    kilobytes = [int(line) for line in done.stdout.split()]
    assert kilobytes
    assert max(kilobytes) < 3000, "the file of the demo has 96,000, that of the other model 14,000"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"eos_token_id": "2"}, "eos_token_id must be a token id"),
        ({"eos_token_id": [2, "3"]}, "eos_token_id must be a token id"),
        ({"top_p": 1.5}, "top_p must be"),
        ({"temperature": "warm"}, "temperature must be"),
        ({"repetition_penalty": 0}, "repetition_penalty must be"),
    ],
)
def test_defaults_that_nothing_can_be_sampled_with_name_their_file(folder, said, told):
    (folder / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json: {told}"):
        load_checkpoint(folder)


def test_a_damaged_number_of_layers_is_told_before_anything_is_built_for_them(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    with pytest.raises(ModelLoadError, match="asks for 1000000000 layers, but there are only 21 tensors"):
        load(folder)
