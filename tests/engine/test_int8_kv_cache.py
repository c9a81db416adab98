"""An engine with keys and values in 8 bits: nothing that the scheduler or the cache decides changes a result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paged_backend import LLM, SamplingParams
from paged_backend.sampling_params import BeamSearch

SHARED = [3 + i * 7 % 40 for i in range(45)]
DRAWN = SamplingParams(
    temperature=0.9, seed=5, max_tokens=40, ignore_eos=True, n=3, logprobs=2, prompt_logprobs=1
)
BEAMS = SamplingParams(temperature=0, max_tokens=30, beam_search=BeamSearch(3), n=3)
REQUESTS = [
    *(([*SHARED[: 20 + 3 * i], i + 4], replace(DRAWN, seed=i)) for i in range(6)),
    ([*SHARED, 9], BEAMS),
    (SHARED[:31], BEAMS),
]


def results(outputs: list[Any]) -> list[Any]:
    return [
        (out.prompt_logprobs, [(o.token_ids, o.logprobs, o.cumulative_logprob) for o in out.outputs])
        for out in outputs
    ]


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_chunks_copies_prefix_hits_and_preemptions_change_nothing(tiny_model: str, kernels: str) -> None:
    options: dict[str, Any] = {"kernels": kernels, "kv_cache_dtype": "int8", "max_model_len": 200}
    prompts, params = zip(*REQUESTS)
    with LLM(tiny_model, num_blocks=300, enable_prefix_caching=False, **options) as llm:
        alone = results([llm.generate([p], s, use_tqdm=False)[0] for p, s in REQUESTS])
    crowded = {"num_blocks": 26, "max_num_batched_tokens": 24, "max_num_seqs": 16, **options}
    with LLM(tiny_model, **crowded) as llm:
        for _ in range(200):  # answers are thought to be short, so that too many are let in
            llm.engine._core.scheduler.lengths.add(1)
        for _ in range(2):
            assert results(llm.generate(list(prompts), list(params), use_tqdm=False)) == alone
        assert llm.engine.stats().num_preemptions > 0
        llm.engine.check()
