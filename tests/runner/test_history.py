"""What a sampler sees of a sequence's tokens: the same whether they were counted at once or as they came."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paged_backend.runner.history import TokenHistory


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_the_tokens_so_far_however_often_and_in_which_order_they_are_asked_for(seed):
    rnd = random.Random(seed)
    prompt = [rnd.randrange(9) for _ in range(rnd.randint(0, 12))]
    tokens = list(prompt)
    history = TokenHistory(tokens, len(prompt))
    for _ in range(30):
        tokens.extend(rnd.randrange(9) for _ in range(rnd.randint(0, 3)))
        count = rnd.randint(0, len(tokens) - len(prompt))  # a row may see less than there is by now
        output = tokens[len(prompt) : len(prompt) + count]
        ids, counts = history.output_counts(count)
        assert dict(zip(ids.tolist(), counts.tolist())) == {t: output.count(t) for t in output}
        assert sorted(history.context_ids(count).tolist()) == sorted(set(prompt + output))
        assert history.output(count) == output
        assert history.prompt() == prompt


def test_counts_that_were_handed_out_do_not_change():
    tokens = [1, 5, 5]
    history = TokenHistory(tokens, 1)
    ids, counts = history.output_counts(2)
    tokens += [5, 6]
    history.output_counts(4)
    assert (ids.tolist(), counts.tolist()) == ([5], [2])
    assert ids.dtype == counts.dtype == np.int64


def test_a_word_may_begin_in_the_prompt_and_end_in_the_output():
    history = TokenHistory([1, 2, 3, 4], 2)
    assert history.ends_with([2, 3], 1)
    assert not history.ends_with([2, 3], 2)
    assert history.ends_with([1, 2, 3, 4], 2)
    assert not history.ends_with([0, 1, 2, 3, 4], 2)
    assert history.ends_with([], 0)
