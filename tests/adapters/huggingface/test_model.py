"""The model object: of its own class, its module loaded only when somebody needs it, its engine never out of date."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)
from waiting import wait_until

from paged_backend import get_engine
from paged_backend.adapters.huggingface import PagedModelForCausalLM, accelerate
from paged_backend.errors import EngineClosedError, ModelLoadError, UnsupportedModelError
from paged_backend.testing import StepGate

GREEDY = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor([tokens or (5, 9, 44, 21, 60)])


def in_memory(folder: Path, **options: Any) -> tuple[Any, Any]:
    """(plain model, paged model) of the same weights."""
    options = {"kernels": "reference", "max_num_batched_tokens": 32, **options}
    return AutoModelForCausalLM.from_pretrained(folder), accelerate(
        AutoModelForCausalLM.from_pretrained(folder), **options
    )


# --- from a checkpoint ---------------------------------------------------------------------------------------------


def test_it_is_an_instance_of_its_own_class(ours: Any) -> None:
    assert isinstance(ours, LlamaForCausalLM)
    assert type(ours).__name__ == "LlamaForCausalLM"
    assert ours.can_generate()
    assert ours.config.architectures == ["LlamaForCausalLM"]
    assert ours.device == torch.device("cpu")
    assert ours.dtype == torch.float32
    assert not ours.training


def test_generating_loads_no_module(ours: Any, theirs: Any) -> None:
    assert ours.generate(ids(), **GREEDY).tolist() == theirs.generate(ids(), **GREEDY).tolist()
    ours.eval().to("cpu")
    assert repr(ours)
    assert ours._pending
    assert next(iter(ours.__dict__["_modules"].values())).embed_tokens.weight.device.type == "meta"


@pytest.mark.parametrize(
    "use",
    [
        lambda m: m(ids()).logits,
        lambda m: m.model.layers[0].self_attn.q_proj.weight,
        lambda m: m.get_input_embeddings().weight,
        lambda m: m.state_dict()["lm_head.weight"],
        lambda m: next(m.parameters()),
        lambda m: dict(m.named_modules())["lm_head"].weight,
        lambda m: m.to(torch.float64).lm_head.weight,
        lambda m: copy.deepcopy(m).lm_head.weight,
    ],
)
def test_whatever_needs_the_module_loads_it(use: Any, ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(use(ours).to(torch.float32), use(theirs).to(torch.float32))
    assert not ours._pending
    assert ours.generate(ids(), **GREEDY).shape == (1, 17)
    theirs.to(torch.float32)


def test_save_pretrained_writes_an_ordinary_checkpoint(ours: Any, theirs: Any, tmp_path: Path) -> None:
    ours.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is LlamaForCausalLM
    torch.testing.assert_close(again.state_dict(), theirs.state_dict())


def test_copies_and_pickles_are_plain_models(ours: Any) -> None:
    twin = pickle.loads(pickle.dumps(ours))
    assert type(twin) is LlamaForCausalLM
    assert twin.generate(ids(), **GREEDY).tolist() == ours.generate(ids(), **GREEDY).tolist()


def test_everyone_who_names_the_folder_shares_its_engine(ours: Any, folder: Path, engine: Any) -> None:
    assert ours.engine.model is engine.model
    other = get_engine(str(folder), kernels="reference")
    assert other.model is engine.model
    other.close()


def test_a_call_that_runs_while_the_weights_change_ends_with_those_it_began_with(theirs: Any) -> None:
    model = accelerate(copy.deepcopy(theirs), kernels="reference")
    expected = theirs.generate(ids(), **GREEDY).tolist()
    before, core = model.engine.model, model.engine._core
    with StepGate(core.runner) as gate:
        running = model.submit(ids(), **GREEDY)
        gate.allow()
        with torch.no_grad():
            model.lm_head.weight.neg_()
        assert model.generate(ids(), **GREEDY).tolist() != expected
        assert model.engine.model is not before
        assert hasattr(core, "runner")
    assert running.result().tolist() == expected
    del running
    gc.collect()
    wait_until(lambda: not hasattr(core, "runner"))


def test_the_engine_is_given_up_with_the_model(folder: Path) -> None:
    model = PagedModelForCausalLM.from_pretrained(folder, kernels="reference", dtype="bfloat16")
    engine = model.engine
    del model
    gc.collect()
    with pytest.raises(EngineClosedError):
        engine.submit([1, 2, 3])


def test_generation_config_and_dtype(folder: Path) -> None:
    model = PagedModelForCausalLM.from_pretrained(folder, kernels="reference", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == 2
    assert model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device_map": "cuda"}, ValueError, "CPU"),
        ({"torch_dtype": torch.float16}, ValueError, "bfloat16"),
        ({"load_in_8bit": True}, ValueError, "quantization"),
        ({"trust_remote_code": True}, ValueError, "trust_remote_code"),
        ({"use_safetensors": False}, ValueError, "pickled"),
        ({"max_num_seq": 3}, TypeError, "max_num_seq"),
        ({"config": object()}, ValueError, "accelerate"),
    ],
)
def test_options_that_cannot_be_honoured_raise(
    options: dict[str, Any], error: type[Exception], message: str, folder: Path
) -> None:
    with pytest.raises(error, match=message):
        PagedModelForCausalLM.from_pretrained(folder, **options)


def test_options_that_ask_for_what_is_so_anyway(folder: Path) -> None:
    model = PagedModelForCausalLM.from_pretrained(
        str(folder), kernels="reference", device_map="auto", low_cpu_mem_usage=True, use_safetensors=True
    )
    assert model.generate(ids(), **GREEDY).shape == (1, 17)


def test_a_subfolder(folder: Path, ours: Any) -> None:
    model = PagedModelForCausalLM.from_pretrained(folder.parent, subfolder=folder.name, kernels="reference")
    assert model.generate(ids(), **GREEDY).tolist() == ours.generate(ids(), **GREEDY).tolist()


def test_a_missing_model_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        PagedModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(OSError, match="from_pretrained"):
        PagedModelForCausalLM()


# --- a model in memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["pack", "share"])
def test_accelerate_changes_no_token(weights: str, folder: Path) -> None:
    plain, paged = in_memory(folder, weights=weights)
    assert type(paged).__name__ == "LlamaForCausalLM"
    assert paged.generate(ids(), **GREEDY).tolist() == plain.generate(ids(), **GREEDY).tolist()
    options = {**GREEDY, "num_beams": 3, "repetition_penalty": 1.3}
    assert paged.generate(ids(), **options).tolist() == plain.generate(ids(), **options).tolist()
    torch.testing.assert_close(paged(ids()).logits, plain(ids()).logits)


def test_bfloat16_weights_may_be_shared(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    paged = accelerate(model, weights="share", kernels="reference")
    assert paged.generate(ids(), **GREEDY).shape[1] > 5
    assert paged.lm_head.weight.dtype == torch.bfloat16


def test_sharing_holds_the_weights_once(folder: Path) -> None:
    _, paged = in_memory(folder, weights="share")
    module = paged.engine._core.runner.model.module
    mine = {name: p.data_ptr() for name, p in paged.named_parameters()}
    assert mine == {name: p.data_ptr() for name, p in module.named_parameters()}
    assert paged.config._attn_implementation != module.config._attn_implementation


def test_other_architectures_share_their_module() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = accelerate(GPT2LMHeadModel(config).eval(), kernels="reference")
    assert isinstance(model, GPT2LMHeadModel)
    plain = copy.deepcopy(model)
    assert type(plain) is GPT2LMHeadModel
    options = {**GREEDY, "eos_token_id": 7}
    assert model.generate(ids(), **options).tolist() == plain.generate(ids(), **options).tolist()


@pytest.mark.parametrize("weights", ["pack", "share"])
def test_changed_weights_are_noticed(weights: str, folder: Path) -> None:
    plain, paged = in_memory(folder, weights=weights)
    before = paged.generate(ids(), **GREEDY).tolist()
    for change in (
        lambda m: m.lm_head.weight.data.mul_(torch.linspace(-2, 2, 300)[:, None]),
        lambda m: m.load_state_dict({k: v * 1.5 for k, v in m.state_dict().items()}),
        lambda m: setattr(m.lm_head, "weight", torch.nn.Parameter(m.lm_head.weight.flip(0))),
    ):
        with torch.no_grad():
            change(plain)
            change(paged)
        after = paged.generate(ids(), **GREEDY).tolist()
        assert after == plain.generate(ids(), **GREEDY).tolist()
        assert after != before
        before = after


def test_training_steps_are_noticed(folder: Path) -> None:
    plain, paged = in_memory(folder)
    paged.generate(ids(), **GREEDY)
    for model in (plain, paged):
        optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
        model(ids(), labels=ids()).loss.backward()
        optimizer.step()
    assert paged.generate(ids(), **GREEDY).tolist() == plain.generate(ids(), **GREEDY).tolist()


def test_weights_changed_behind_a_checkpoint_are_noticed(ours: Any, theirs: Any, engine: Any) -> None:
    twin = copy.deepcopy(theirs)
    for model in (ours, twin):
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    assert ours.generate(ids(), **GREEDY).tolist() == twin.generate(ids(), **GREEDY).tolist()
    assert ours.engine.model is not engine.model
    assert engine.submit([5, 9]).result(60).finished, "the others' engine went on"


def test_a_model_on_another_device_is_left_to_transformers(folder: Path, said: Any) -> None:
    _, paged = in_memory(folder)
    paged.to("meta")
    with pytest.raises(RuntimeError, match="meta"):  # which cannot do it either on this one
        paged.generate(ids(), **GREEDY)
    assert "the model is on meta" in said()[0]


def test_half_precision_after_loading(ours: Any, theirs: Any) -> None:
    twin = copy.deepcopy(theirs).half()
    assert ours.half().generate(ids(), **GREEDY).tolist() == twin.generate(ids(), **GREEDY).tolist()


def test_a_vocabulary_that_grows_is_noticed(ours: Any, theirs: Any) -> None:
    twin = copy.deepcopy(theirs)
    for model in (ours, twin):
        torch.manual_seed(0)
        model.resize_token_embeddings(320)
    assert ours.generate(ids(), **GREEDY).tolist() == twin.generate(ids(), **GREEDY).tolist()
    assert ours.engine.vocab_size == 320


class Adapter(torch.nn.Module):
    """Wraps a linear layer, as PEFT's LoRA layers do."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.delta = torch.nn.Parameter(torch.ones(1) * 0.7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.delta


def test_injected_adapters_fall_back_until_they_are_merged(folder: Path, said: Any) -> None:
    plain, paged = in_memory(folder)
    for model in (plain, paged):
        attention = model.model.layers[0].self_attn
        attention.q_proj = Adapter(attention.q_proj)
    assert paged.generate(ids(), **GREEDY).tolist() == plain.generate(ids(), **GREEDY).tolist()
    assert "modules were changed" in said()[0]
    for model in (plain, paged):
        attention = model.model.layers[0].self_attn
        merged = attention.q_proj.inner
        with torch.no_grad():
            merged.weight.mul_(0.7)
        attention.q_proj = merged
    assert paged.generate(ids(), **GREEDY).tolist() == plain.generate(ids(), **GREEDY).tolist()
    assert len(said()) == 1


def test_what_accelerate_refuses(folder: Path, ours: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="already"):
        accelerate(ours)
    with pytest.raises(TypeError, match="can generate"):
        accelerate(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="max_num_seq"):
        accelerate(model, max_num_seq=2)
    with pytest.raises(ValueError, match="pack"):
        accelerate(model, weights="both")
    with pytest.raises(UnsupportedModelError, match="quantization"):
        accelerate(model, weights="share", quantization="int8", kernels="reference")
    assert type(model) is LlamaForCausalLM, "a refused model is left as it was"
    mamba = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(UnsupportedModelError, match="position_ids"):
        accelerate(mamba, kernels="reference")


def test_the_core_imports_no_transformers(folder: Path) -> None:
    code = (
        "import sys; from paged_backend import get_engine, SamplingParams;"
        f"e = get_engine({str(folder)!r}, kernels='reference');"
        "e.submit([5, 6], SamplingParams(max_tokens=2)).result(60); e.close();"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_options_of_a_tokenizer_hold_for_one_out_of_a_gguf_file():
    from paged_backend.adapters.huggingface import load_tokenizer

    tokenizer = load_tokenizer("demo", padding_side="left", model_max_length=99)
    assert (tokenizer.padding_side, tokenizer.model_max_length) == ("left", 99)
    with pytest.raises(ValueError, match="use_fast"):
        load_tokenizer("demo", use_fast=False)
