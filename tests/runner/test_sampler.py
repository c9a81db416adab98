"""Sampler: agrees with transformers' logits processors, and every row is a function of itself alone."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from paged_backend.errors import RequestFailedError
from paged_backend.runner.history import TokenHistory
from paged_backend.runner.sampler import Sampled, Sampler, SampleRow, uniform
from paged_backend.sampling_params import SamplingParams

SAMPLER = Sampler()


class Mask:
    """A grammar that allows the same tokens everywhere."""

    def __init__(self, allowed):
        self.allowed = allowed

    def mask(self):
        return self.allowed

    def settle(self, token):
        return token


def make_row(prompt=(), output=(), seed=0, stop_ids=(), bad_words_ids=(), mask=None, **params):
    constraint = None if mask is None else Mask(mask)
    resolved = SamplingParams(**params).resolved()
    history = TokenHistory([*prompt, *output], len(prompt))
    return SampleRow(resolved, history, len(output), seed, stop_ids, bad_words_ids, constraint)


def make_logits(*shape, seed=0, scale=2.0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)


def sample_one(logits, row):
    (result,) = SAMPLER.sample(logits.reshape(1, -1), [row])
    return result


def hf_scores(logits, row):
    """The row's distribution as transformers computes it, in generate's order."""
    p = row.params
    ids = torch.tensor([row.history.token_ids], dtype=torch.long)
    scores = torch.from_numpy(logits.reshape(1, -1).copy())
    steps = []
    if p.repetition_penalty != 1:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.logit_bias:
        steps.append(hf.SequenceBiasLogitsProcessor([[[i], b] for i, b in p.logit_bias.items()]))
    if row.num_output_tokens < p.min_tokens:
        steps.append(
            hf.MinNewTokensLengthLogitsProcessor(
                row.history.num_prompt_tokens, p.min_tokens, list(row.stop_ids), device="cpu"
            )
        )
    if row.bad_words_ids:
        steps.append(hf.NoBadWordsLogitsProcessor([list(w) for w in row.bad_words_ids]))
    if p.temperature:
        steps.append(hf.TemperatureLogitsWarper(float(p.temperature)))
        if p.top_k > 0:
            steps.append(hf.TopKLogitsWarper(p.top_k))
        if p.top_p < 1:
            steps.append(hf.TopPLogitsWarper(p.top_p))
        if p.min_p > 0:
            steps.append(hf.MinPLogitsWarper(p.min_p))
    for step in steps:
        scores = step(ids, scores)
    return scores[0]


def assert_drawn_from(scores, row, token):
    """The token is the one where the cumulative distribution, in id order, passes the row's noise."""
    mass = torch.softmax(scores.double(), -1).cumsum(0)
    u = uniform(row.seed, row.num_output_tokens)
    low = float(mass[token - 1]) if token else 0.0
    assert low - 1e-5 <= u <= float(mass[token]) + 1e-5
    assert scores[token] > -math.inf or min(abs(u - low), abs(u - float(mass[token]))) < 1e-5


token_ids = st.integers(0, 59)
token_lists = st.lists(token_ids, min_size=3, max_size=12)


@settings(max_examples=300)
@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.3, 2.0, 8.0]),
    prompt=token_lists,
    output=token_lists,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, -1, 1, 2, 17, 60, 100]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    logit_bias=st.none() | st.dictionaries(token_ids, st.floats(-5, 5, width=32), min_size=1, max_size=4),
    min_tokens=st.integers(0, 16),
    bad_words_ids=st.lists(st.lists(token_ids, min_size=1, max_size=2).map(tuple), max_size=4, unique=True),
)
def test_every_processor_matches_transformers(seed, scale, prompt, output, bad_words_ids, **params):
    row = make_row(prompt, output, seed, stop_ids=(3, 7), bad_words_ids=tuple(bad_words_ids), **params)
    logits = make_logits(60, seed=seed, scale=scale)
    result = sample_one(logits, row)
    scores = hf_scores(logits, row)
    if row.params.greedy:
        assert scores[result.token_id] == scores.max()
    else:
        assert_drawn_from(scores, row, result.token_id)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 5},
        {"top_k": 700},
        {"top_k": 5, "top_p": 0.6},
        {"top_p": 0.3},
        {"top_p": 0.99, "temperature": 2.0},
        {"top_p": 0.9999999},
        {"min_p": 0.2},
        {"top_p": 0.9, "min_p": 0.05, "temperature": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [0.2, 3.0])
def test_large_vocabularies_match_transformers(params, scale):
    for seed in range(20):
        logits = make_logits(9001, seed=seed, scale=scale)
        row = make_row(seed=seed, **params)
        # in float64: a running sum of so many float32 may end one token off, and where depends on the processor
        expected = hf_scores(logits.astype(np.float64), row)
        assert_drawn_from(expected, row, sample_one(logits, row).token_id)


@pytest.mark.parametrize("params", [{"top_p": 0.5}, {"top_k": 300, "top_p": 0.5}, {"top_p": 0.25}], ids=str)
def test_nucleus_of_equal_logits_holds_as_many_tokens_as_in_transformers(params):
    logits = np.zeros(512, np.float32)
    drawn = {sample_one(logits, make_row(seed=s, **params)).token_id for s in range(1500)}
    row = make_row(**params)
    expected = int((hf_scores(logits, row) > -math.inf).sum())
    assert max(drawn) < expected  # of equal tokens the lower ids
    assert len(drawn) > 0.9 * expected


def test_sampled_frequencies_follow_the_distribution():
    logits = make_logits(16, seed=3, scale=1.5)
    rows = [make_row(seed=s) for s in range(20_000)]
    counts = Counter(r.token_id for r in SAMPLER.sample(np.broadcast_to(logits, (len(rows), 16)), rows))
    for token, probability in enumerate(torch.softmax(torch.from_numpy(logits), -1).tolist()):
        deviation = math.sqrt(probability * (1 - probability) / len(rows))
        assert abs(counts[token] / len(rows) - probability) < 5 * deviation


def test_a_tiny_temperature_is_greedy_not_nan():
    logits = make_logits(500)
    for temperature in (1e-3, 1e-30, 5e-324):
        token = sample_one(logits, make_row(temperature=temperature)).token_id
        assert token == int(logits.argmax())


def test_frequency_and_presence_penalties_ignore_the_prompt():
    """Public reports: vLLM PR #1577, vllm-metal PR #69, TensorRT-LLM PR #5623."""
    logits = np.zeros(10, np.float32)
    logits[4], logits[5], logits[6] = 3.0, 2.5, 2.2
    common = {"temperature": 0, "frequency_penalty": 0.2, "presence_penalty": 0.25}
    assert sample_one(logits, make_row([4, 4, 4, 4], [], **common)).token_id == 4
    # 4 once: 3 - 0.2 - 0.25 = 2.55, still ahead; twice: 2.35, behind 5; then 5 itself falls to 2.05
    assert sample_one(logits, make_row([], [4], **common)).token_id == 4
    assert sample_one(logits, make_row([], [4, 4], **common)).token_id == 5
    assert sample_one(logits, make_row([], [4, 5, 4], **common)).token_id == 4
    assert sample_one(logits, make_row([], [4, 5, 4, 4], **common)).token_id == 6


def test_repetition_penalty_sees_the_prompt():
    """Public reports: vLLM PR #1577, TensorRT-LLM PR #5623; transformers PR #48468 (no effect at all)."""
    logits = np.zeros(10, np.float32)
    logits[4], logits[5] = 3.0, 2.5
    assert sample_one(logits, make_row([], [], temperature=0, repetition_penalty=1.5)).token_id == 4
    assert sample_one(logits, make_row([4, 4], [], temperature=0, repetition_penalty=1.5)).token_id == 5


def test_min_tokens_masks_every_stop_id_and_does_not_count_the_prompt():
    """Public reports: vLLM #4180, PR #5849, PR #4468; mlx-vlm PR #2112; TensorRT-LLM PR #12358."""
    logits = np.array([0.0, 1.0, 5.0, 4.0, 3.0], np.float32)
    picked = [
        sample_one(
            logits, make_row([1] * 9, [0] * n, stop_ids=(2, 3, 99), temperature=0, min_tokens=2)
        ).token_id
        for n in range(3)
    ]
    assert picked == [4, 4, 2]


def test_bad_words_are_never_completed_even_across_the_prompt_border():
    logits = np.array([0.0, 1.0, 2.0, 9.0], np.float32)
    words = ((1, 2, 3),)
    for prompt, output in (([1, 2], []), ([0, 1], [2]), ([], [1, 2]), ([3], [0, 1, 2])):
        row = make_row(prompt, output, bad_words_ids=words, temperature=0)
        assert sample_one(logits, row).token_id == 2
    for prompt, output in (([2], []), ([], []), ([1, 2], [0]), ([], [2, 1])):
        row = make_row(prompt, output, bad_words_ids=words, temperature=0)
        assert sample_one(logits, row).token_id == 3


def test_allowed_token_ids_and_mask_apply_together():
    logits = np.array([9.0, 8.0, 7.0, 6.0, 5.0], np.float32)
    mask = np.array([False, True, False, True])  # ids past its end are not allowed
    row = make_row(allowed_token_ids=[0, 3, 4], mask=mask, temperature=0)
    assert sample_one(logits, row).token_id == 3
    assert sample_one(logits, make_row(mask=mask, temperature=0)).token_id == 1
    drawn = {sample_one(logits, make_row(mask=mask, seed=s, temperature=5.0)).token_id for s in range(50)}
    assert drawn == {1, 3}


def test_greedy_ties_take_the_lowest_id():
    logits = np.zeros((3, 700), np.float32)
    logits[1, 300:] = 1.0
    rows = [make_row(temperature=0) for _ in range(3)]
    assert [r.token_id for r in SAMPLER.sample(logits, rows)] == [0, 300, 0]
    assert sample_one(logits[1], make_row(temperature=0, logit_bias={0: 1.0})).token_id == 0


# --- logprobs


def test_logprobs_are_of_the_raw_logits_with_ranks():
    logits = make_logits(2000, seed=5)
    row = make_row([7], [9], seed=4, logprobs=6, temperature=0.4, top_k=20, repetition_penalty=1.4)
    result = sample_one(logits, row)
    expected = torch.log_softmax(torch.from_numpy(logits), -1)
    order = expected.argsort(descending=True, stable=True).tolist()
    assert result.logprob == pytest.approx(float(expected[result.token_id]), abs=1e-5)
    assert result.rank == order.index(result.token_id) + 1
    assert [(i, r) for i, _, r in result.top] == [(i, r + 1) for r, i in enumerate(order[:6])]
    assert [lp for _, lp, _ in result.top] == pytest.approx(expected[order[:6]].tolist(), abs=1e-5)


def test_logprobs_zero_reports_the_sampled_token_only_and_none_nothing():
    logits = make_logits(100)
    result = sample_one(logits, make_row(logprobs=0, temperature=0))
    assert (result.rank, result.top) == (1, [])
    assert sample_one(logits, make_row(temperature=0)) == Sampled(int(logits.argmax()))


def test_equal_logits_rank_by_id_and_more_logprobs_than_tokens_are_all():
    result = sample_one(np.zeros(5, np.float32), make_row(logprobs=9, temperature=0, logit_bias={3: 1.0}))
    assert (result.token_id, result.rank) == (3, 4)
    assert [(i, r) for i, _, r in result.top] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


def test_prompt_logprobs_sum_to_those_of_log_softmax():
    """Public reports: vLLM #9336, lm-eval #1411, llama.cpp #27174."""
    logits = make_logits(30, 1200, seed=8)
    next_ids = [(i * 37) % 1200 for i in range(30)]
    scored = SAMPLER.prompt_logprobs(logits, next_ids, 2)
    expected = torch.log_softmax(torch.from_numpy(logits), -1)
    assert [s.token_id for s in scored] == next_ids
    for position, s in enumerate(scored):
        assert s.logprob == pytest.approx(float(expected[position, s.token_id]), abs=1e-5)
        assert s.rank == 1 + int((logits[position] > logits[position, s.token_id]).sum())
        assert [i for i, _, _ in s.top] == expected[position].topk(2).indices.tolist()


# --- rows are independent


def assorted_rows(seed):
    return [
        make_row([1, 2, 3], [4, 5], seed, logprobs=3),
        make_row([], [1], seed, temperature=0),
        make_row([], [1], seed, temperature=0, logprobs=0),
        make_row([5], [], seed, top_k=4, logprobs=1),
        make_row([5], [8], seed, top_p=0.8, temperature=0.7),
        make_row([5], [8] * 9, seed, top_k=600, top_p=0.8, min_p=0.01),
        make_row([6, 7], [8, 8], seed, repetition_penalty=1.2, frequency_penalty=0.4, logprobs=2),
        make_row([6], [7], seed, logit_bias={11: 4.0}, bad_words_ids=((7, 11), (12,))),
        make_row([6], [7], seed, allowed_token_ids=[3, 30, 300]),
    ]


@pytest.mark.parametrize("vocab", [4096, 5003])
def test_a_row_is_bit_identical_alone_and_in_any_batch(vocab):
    """Public reports: vLLM #51226 and #17524 (seeds), #9567, #5898, #51187 (batch size)."""
    rows = [row for seed in range(4) for row in assorted_rows(seed)]
    logits = make_logits(len(rows), vocab, seed=1)
    alone = [sample_one(logits[i].copy(), row) for i, row in enumerate(rows)]
    assert SAMPLER.sample(logits, rows) == alone
    for seed in (1, 2):
        order = np.random.default_rng(seed).permutation(len(rows)).tolist()
        for part in (order[:3], order[3:17], order[17:]):
            assert SAMPLER.sample(logits[part], [rows[i] for i in part]) == [alone[i] for i in part]


@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_scores_do_not_depend_on_how_many_positions_are_scored_at_once(count):
    """Public reports: vLLM #8268, #5344 (prompt logprobs under chunking and caching)."""
    logits = make_logits(33, 5003, seed=2)
    ids = list(range(100, 133))
    whole = SAMPLER.prompt_logprobs(logits, ids, 4)
    parts = []
    for start in range(0, 33, count):
        parts += SAMPLER.prompt_logprobs(logits[start : start + count], ids[start : start + count], 4)
    assert parts == whole


def test_seed_and_position_decide_the_noise():
    """Public reports: vLLM #16449, #7808 (n > 1 with a seed), #16832 (seeded sampling after preemption)."""
    logits = make_logits(3000, scale=0.1)
    first = [sample_one(logits, make_row([], [0] * n, seed=1)).token_id for n in range(20)]
    again = [sample_one(logits, make_row([9, 9], [5] * n, seed=1)).token_id for n in range(20)]
    other = [sample_one(logits, make_row([], [0] * n, seed=2)).token_id for n in range(20)]
    assert first == again
    assert len(set(first)) > 15
    assert sum(a == b for a, b in zip(first, other)) < 5
    noise = [uniform(seed, position) for seed in (-1, 0, 2**80) for position in range(200)]
    assert len(set(noise)) == 600
    assert 0 <= min(noise) < 0.02
    assert 0.98 < max(noise) < 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_row_that_cannot_be_sampled_fails_alone(bad):
    """Public report: vLLM PR #16529."""
    logits = make_logits(3, 50)
    if bad is None:
        logits[1] = -np.inf
    else:
        logits[1, 17] = bad
    for params in ({"temperature": 0}, {}, {"logprobs": 2}, {"temperature": 0, "logit_bias": {1: 2.0}}):
        rows = [make_row(**params) for _ in range(3)]
        first, failed, last = SAMPLER.sample(logits, rows)
        assert isinstance(failed, RequestFailedError)
        assert "not finite" in str(failed)
        assert (first, last) == (sample_one(logits[0], rows[0]), sample_one(logits[2], rows[2]))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"allowed_token_ids": [2], "bad_words_ids": ((2,),)}, "no token is left"),
        ({"mask": np.zeros(50, bool)}, "no token is left"),
        ({"logit_bias": {50: 1.0}}, "logit_bias has an id outside the vocabulary of 50"),
        ({"allowed_token_ids": [1, 50]}, "allowed_token_ids has an id outside"),
    ],
    ids=["contradiction", "mask", "bias", "allowed"],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_impossible_options_fail_their_row_alone(params, message, temperature):
    """Public report: vLLM PR #16529."""
    failed, good = SAMPLER.sample(
        make_logits(2, 50), [make_row(**params, temperature=temperature), make_row()]
    )
    assert isinstance(failed, RequestFailedError)
    assert message in str(failed)
    assert isinstance(good, Sampled)


def test_the_callers_arrays_are_left_alone():
    logits = make_logits(9, 600)
    rows, before = assorted_rows(0), logits.copy()
    mask = np.ones(600, bool)
    for row in rows:
        row.constraint = Mask(mask)
    SAMPLER.sample(logits, rows)
    assert np.array_equal(logits, before)
    assert bool(mask.all())


def test_ids_without_a_logit_in_the_prompt_are_passed_over():
    row = make_row([-1, 70_000, 3], [2], temperature=0, repetition_penalty=1.5)
    assert isinstance(sample_one(make_logits(50), row), Sampled)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_logits_of_another_precision_are_taken_as_float32(dtype):
    logits = make_logits(2, 300).astype(dtype)
    single = logits.astype(np.float32)
    for row in (make_row(seed=3, logprobs=2), make_row(temperature=0), make_row(seed=4, top_p=0.9)):
        assert SAMPLER.sample(logits, [row] * 2) == SAMPLER.sample(single, [row] * 2)
    assert SAMPLER.prompt_logprobs(logits, [1, 2], 3) == SAMPLER.prompt_logprobs(single, [1, 2], 3)


@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_a_beams_continuations_have_the_log_probabilities_of_log_softmax(scale):
    logits = make_logits(5003, seed=6, scale=scale)
    row = make_row()
    row.candidates = 8
    result = sample_one(logits, row)
    exact = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    best = exact.topk(8)
    assert [token for token, _, _ in result.top] == best.indices.tolist()
    assert [lp for _, lp, _ in result.top] == best.values.float().tolist()


def test_no_rows_give_no_tokens_and_a_wrong_shape_is_refused():
    assert SAMPLER.sample(np.zeros((0, 10), np.float32), []) == []
    with pytest.raises(ValueError, match=r"logits must be \[1, V\] for 1 rows, got \[2, 10\]"):
        SAMPLER.sample(np.zeros((2, 10), np.float32), [make_row()])
    with pytest.raises(ValueError, match="logits must be"):
        SAMPLER.prompt_logprobs(np.zeros((2, 10), np.float32), [1], 0)
    with pytest.raises(RequestFailedError, match="token id 10 is outside"):
        SAMPLER.prompt_logprobs(np.zeros((1, 10), np.float32), [10], 0)
