"""What is kept of responses is bounded, and the least recently used goes first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_backend.server.store import ResponseStore, StoredResponse, UnknownResponseError


def response(index, size=1, previous=None):
    return StoredResponse(index, b"x" * size, b"", previous)


def test_count_and_bytes_are_bounded():
    store = ResponseStore(2, 100)
    for index in "abc":
        store.put(response(index))
    assert ["a" in store, "b" in store, "c" in store] == [False, True, True]
    store.put(response("d", 99))
    assert ("c" in store, store.num_bytes) == (True, 100)
    store.put(response("e", 101))
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_chain_in_use_outlives_what_was_kept_later():
    store = ResponseStore(4, 100)
    store.put(response("a"))
    store.put(response("b", previous="a"))
    store.put(response("other"))
    assert [kept.id for kept in store.chain("b")] == ["a", "b"]
    store.put(response("c", previous="b"))
    store.put(response("d", previous="c"))
    assert [kept.id for kept in store.chain("d")] == ["a", "b", "c", "d"]
    assert "other" not in store


def test_what_is_missing_is_named():
    store = ResponseStore(4, 100)
    store.put(response("b", previous="a"))
    for index, missing in (("b", "a"), ("x", "x")):
        with pytest.raises(UnknownResponseError) as caught:
            store.chain(index)
        assert caught.value.args == (missing,)
    store.delete("b")
    with pytest.raises(UnknownResponseError):
        store.delete("b")


@given(
    st.integers(0, 4),
    st.integers(0, 40),
    st.lists(st.tuples(st.sampled_from("pgd"), st.integers(0, 9), st.integers(0, 20))),
)
def test_the_account_is_right_whatever_happens(most, most_bytes, acts):
    store = ResponseStore(most, most_bytes)
    for act, which, size in acts:
        name = f"r{which}"
        if act == "p":
            store.put(response(name, size))
        elif name in store:
            store.chain(name) if act == "g" else store.delete(name)
        kept = [store.get(f"r{number}") for number in range(10) if f"r{number}" in store]
        assert store.num_bytes == sum(one.size for one in kept) <= most_bytes
        assert len(store) == len(kept) <= most
