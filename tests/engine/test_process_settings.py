"""Nothing that a process sets for itself changes a token, a bit or the heap: neither before an engine nor meanwhile."""

from __future__ import annotations

import contextlib
import locale
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from paged_backend import LLM, SamplingParams

PROMPTS = [[5, 6, 7, 8], list(range(40, 75)), [9] * 3]
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=2, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=24, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=9, min_p=0.05, seed=1, max_tokens=24, ignore_eos=True),
]  # fmt: skip


@contextlib.contextmanager
def changed(
    get: Callable[[], Any], set_: Callable[[Any], object], value: Any, back: Any = None
) -> Iterator[None]:
    before = get()
    set_(value)
    try:
        yield
    finally:
        set_(before if back is None else back)


@contextlib.contextmanager
def with_new_arrays_filled() -> Iterator[None]:
    with changed(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True):
        assert torch.utils.deterministic.fill_uninitialized_memory
        yield


@contextlib.contextmanager
def in_another_locale() -> Iterator[None]:
    before = locale.setlocale(locale.LC_ALL)
    for name in ("de_DE.UTF-8", "C.UTF-8", "C"):
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_ALL, name)
            break
    try:
        yield
    finally:
        locale.setlocale(locale.LC_ALL, before)


SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    **{
        f"default dtype {dtype}": lambda dtype=dtype: changed(  # type: ignore[misc]
            torch.get_default_dtype, torch.set_default_dtype, dtype
        )
        for dtype in (torch.float64, torch.bfloat16, torch.float16)
    },
    "default device": lambda: changed(torch.get_default_device, torch.set_default_device, "meta"),
    "device context": lambda: torch.device("meta"),
    "no grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "deterministic algorithms": with_new_arrays_filled,
    "one thread": lambda: changed(torch.get_num_threads, torch.set_num_threads, 1),
    "three threads": lambda: changed(torch.get_num_threads, torch.set_num_threads, 3),
    "low precision": lambda: changed(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "no denormal numbers": lambda: changed(lambda: False, torch.set_flush_denormal, True),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "numpy raises": lambda: np.errstate(all="raise"),
    "numpy prints": lambda: np.printoptions(precision=1, threshold=2),
    "locale": in_another_locale,
}


def answers(llm: LLM) -> list[Any]:
    """Everything that came of each request: tokens, and log-probabilities to the bit."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], SAMPLING, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


@pytest.fixture(scope="module", params=["c", "reference"])
def kernels(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(make_tiny_model) -> str:
    return make_tiny_model(["a b c d e f g"], hidden_size=64, intermediate_size=96, num_hidden_layers=3)


@pytest.fixture(scope="module")
def open_llm(folder: str, kernels: str) -> Callable[[], LLM]:
    return lambda: LLM(folder, kernels=kernels, num_blocks=64, share=False)


@pytest.fixture(scope="module")
def expected(open_llm: Callable[[], LLM]) -> list[Any]:
    with open_llm() as llm:
        return answers(llm)


@pytest.mark.parametrize("name", SETTINGS)
def test_an_engine_made_and_used_under_any_setting_gives_the_same_bits(
    open_llm: Callable[[], LLM], expected: list[Any], name: str
) -> None:
    with SETTINGS[name](), open_llm() as llm:
        assert answers(llm) == expected


def test_settings_that_change_while_requests_run_change_nothing(
    open_llm: Callable[[], LLM], expected: list[Any]
) -> None:
    with open_llm() as llm:
        found: list[list[Any]] = []
        caller = threading.Thread(target=lambda: found.extend(answers(llm) for _ in range(3)))
        caller.start()
        while caller.is_alive():
            for setting in SETTINGS.values():
                with setting():
                    caller.join(0.003)
    assert found == [expected] * 3


def test_a_module_of_transformers_built_meanwhile_disturbs_nobody(
    open_llm: Callable[[], LLM], expected: list[Any]
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4
    )
    with open_llm() as llm:
        found: list[list[Any]] = []
        caller = threading.Thread(target=lambda: found.extend(answers(llm) for _ in range(3)))
        caller.start()
        built = 0
        while caller.is_alive():  # it sets torch's default dtype while it builds
            assert LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).dtype is torch.bfloat16
            built += 1
    assert built
    assert found == [expected] * 3
