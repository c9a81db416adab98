"""Prompts in every form: what is one prompt, what is several, what is none."""

from __future__ import annotations

import array

import numpy as np
import pytest
import torch

from paged_backend.engine.inputs import as_prompts, encode_prompt
from paged_backend.errors import RequestRejectedError
from paged_backend.sampling_params import SamplingParams
from paged_backend.testing import small_tokenizer

T = torch.tensor


def encoded(prompts):
    tokenizer = small_tokenizer()
    return [encode_prompt(prompt, tokenizer)[1] for prompt in as_prompts(prompts)]


@pytest.mark.parametrize(
    "prompts",
    [
        [5, 6, 7],
        (5, 6, 7),
        range(5, 8),
        np.array([5, 6, 7]),
        np.array([5, 6, 7], np.uint16),
        T([5, 6, 7]),
        array.array("i", [5, 6, 7]),
        [T(5), np.int64(6), 7],
        iter([5, 6, 7]),
        {"prompt_token_ids": T([5, 6, 7])},
        [[5, 6, 7]],
        [T([5, 6, 7])],
        T([[5, 6, 7]]),
        [{"prompt_token_ids": (5, 6, 7)}],
    ],
    ids=repr,
)
def test_ids_of_one_prompt(prompts):
    assert encoded(prompts) == [[5, 6, 7]]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (T([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        (np.array([[5], [6]]), [[5], [6]]),
        (T([[5], [6]]), [[5], [6]]),
        ([T([5]), T([6])], [[5], [6]]),
        ([[5, 6], (7,)], [[5, 6], [7]]),
        ([np.array([5, 6]), T([7]), [8]], [[5, 6], [7], [8]]),
        ([range(5, 7), {"prompt_token_ids": [7]}], [[5, 6], [7]]),
        ([], []),
        (np.array([]), []),
    ],
    ids=repr,
)
def test_each_row_is_a_prompt(prompts, expected):
    assert encoded(prompts) == expected


def test_texts_may_lie_in_an_array_and_beside_ids():
    assert as_prompts(np.array(["a", "b"])) == ["a", "b"]
    assert as_prompts(["a", [5], {"prompt": "b"}]) == ["a", [5], {"prompt": "b"}]
    assert as_prompts("a") == as_prompts(["a"]) == ["a"]


@pytest.mark.parametrize(
    ("prompts", "problem"),
    [
        ([5.0, 6.0], r"integers, got 5\.0 of type float at position 0"),
        (np.array([5.0]), "integers"),
        (T([5.5]), "integers"),
        ([5, True], "integers, got True"),
        (T([True, False]), "integers, got True"),
        ([5, None], "got 5 beside None"),
        ([5, "a"], "got 5 beside 'a'"),
        ([5, [6]], r"got 5 beside \[6\]"),
        ([[5, [6]]], "one flat list"),
        (np.zeros((1, 2, 3), int), "one flat list"),
        ([T([[5, 6]])], "one flat list"),
        ({"prompt_token_ids": T([[5, 6]])}, "prompt_token_ids must be one flat list"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids must be a list"),
        ([["a"]], "integers, got 'a'"),
        ([b"a"], "text, token ids or a dict"),
        (b"a", "got bytes"),
        (5, "got int"),
        (T(5), "got int"),
        (None, "got NoneType"),
        ([None], "got None"),
        ({"input_ids": [5]}, "'input_ids': give its input_ids"),
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_named_in_one_line(prompts, problem):
    with pytest.raises(RequestRejectedError, match=problem) as caught:
        encoded(prompts)
    assert "\n" not in str(caught.value)


def test_token_options_may_be_arrays():
    for given in (np.array([3, 4]), T([3, 4]), [np.int64(3), 4], {3: 0, 4: 0}):
        assert SamplingParams(stop_token_ids=given).stop_token_ids == (3, 4)
        assert SamplingParams(allowed_token_ids=given).allowed_token_ids == (3, 4)
    for wrong in (T([[3]]), [3.0], [True], [-1], "3", 3, np.array([0.5])):
        with pytest.raises(ValueError, match="stop_token_ids must be"):
            SamplingParams(stop_token_ids=wrong)
    assert SamplingParams(stop=np.array(["a", "b"])).stop == ("a", "b")


def test_a_tokenizer_decodes_arrays():
    tokenizer = small_tokenizer()
    ids = tokenizer.encode("the fox")
    assert tokenizer.decode(T(ids)) == tokenizer.decode(np.array(ids)) == "the fox"
