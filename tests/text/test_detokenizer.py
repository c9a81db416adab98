"""IncrementalDetokenizer: pieces add up to the whole text and no character is ever broken."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from paged_backend.text.detokenizer import IncrementalDetokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
EMOJI = "\U0001f336\U0001f600\u258f\u00e9"  # hot pepper, grinning face, a block, e acute: 4, 4, 3 and 2 bytes


class Wrapped:
    """The two things a detokenizer needs, around a ``tokenizers.Tokenizer``; counts the ids it decodes."""

    def __init__(self, backend):
        self.backend = backend
        self.special_ids = {i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        self.longest = 0

    def encode(self, text):
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids, skip_special_tokens=True):
        self.longest = max(self.longest, len(ids))
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)


def byte_level():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    # Runs of emoji make merges that hold the end of one character and the beginning of the next.
    backend.train_from_iterator(
        ["hello world", "\U0001f336\U0001f336\U0001f336 \U0001f600\U0001f336"], trainer
    )
    return Wrapped(backend)


def byte_fallback():
    words = ["\u2581", "\u2581world", "\u2581a", "hello", "b", ".", "\u2581\u2581"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [f"<0x{i:02X}>" for i in range(256)] + words:
        vocab[token] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Wrapped(backend)


def metaspace():
    words = ["\u2581hello", "\u2581world", "lo", "\u2581", "!", "<s>"]
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.decoder = decoders.Metaspace()
    return Wrapped(backend)


BYTE_LEVEL, FALLBACK, METASPACE = byte_level(), byte_fallback(), metaspace()
FIRST_BYTE = 3  # id of <0x00>


def byte_ids(data):
    return [FIRST_BYTE + b for b in data]


def single_bytes(data):
    """Byte-level ids, one a byte."""
    alphabet = dict(zip(range(256), _byte_characters()))
    return [BYTE_LEVEL.backend.token_to_id(alphabet[b]) for b in data]


def _byte_characters():
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def stream(tokenizer, ids, prompt=(), skip=True):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


def byte_level_ids(max_size=60):
    size = BYTE_LEVEL.backend.get_vocab_size()
    emoji_parts = BYTE_LEVEL.encode(EMOJI) + single_bytes(EMOJI.encode())
    return st.lists(st.integers(0, size - 1) | st.sampled_from(emoji_parts), max_size=max_size)


@settings(max_examples=400)
@given(byte_level_ids(), st.booleans())
def test_byte_level_pieces_add_up_to_the_decoding_of_all_ids(ids, skip):
    assert "".join(stream(BYTE_LEVEL, ids, skip=skip)) == BYTE_LEVEL.decode(ids, skip)


@settings(max_examples=200)
@given(byte_level_ids(), byte_level_ids(12))
def test_a_whole_prompt_changes_nothing_for_byte_level_tokenizers(ids, prompt):
    prompt = [*prompt, *BYTE_LEVEL.encode("x")]
    assert "".join(stream(BYTE_LEVEL, ids, prompt)) == BYTE_LEVEL.decode(ids)


def fallback_text(ids):
    """Independent reading: a character that a run of byte tokens completes stays, what never becomes one is
    one replacement character a byte."""
    text, run = "", b""
    for i in [*ids, None]:
        byte = i is not None and FIRST_BYTE <= i < FIRST_BYTE + 256
        if byte:
            run += bytes([i - FIRST_BYTE])
            try:
                text += run.decode()
                run = b""
            except UnicodeDecodeError:
                pass
        elif i not in FALLBACK.special_ids:
            text += BROKEN * len(run)
            run = b""
            if i is not None:
                text += FALLBACK.backend.id_to_token(i).replace("\u2581", " ")
    return text


ORDINARY = list(range(FIRST_BYTE + 256, FIRST_BYTE + 263))


@settings(max_examples=400)
@given(
    st.lists(
        st.sampled_from(
            [[i] for i in [*ORDINARY, 1, FIRST_BYTE + 10]] + [byte_ids(c.encode()) for c in EMOJI]
        ),
        max_size=40,
    )
)
def test_byte_fallback_pieces_add_up_to_the_decoding_of_all_ids(chunks):
    ids = [i for chunk in chunks for i in chunk]
    assert "".join(stream(FALLBACK, ids)) == FALLBACK.decode(ids)
    prompt = [1, *ORDINARY[:3]]
    whole, known = FALLBACK.decode(prompt + ids), FALLBACK.decode(prompt)
    assert "".join(stream(FALLBACK, ids, prompt)) == whole[len(known) :]


@settings(max_examples=400)
@given(st.lists(st.sampled_from([*ORDINARY, 1, *byte_ids(b"\nA" + EMOJI.encode())]), max_size=20))
def test_byte_fallback_keeps_the_characters_that_were_whole_in_a_broken_run(ids):
    assert "".join(stream(FALLBACK, ids, [ORDINARY[3]])) == fallback_text(ids)


@given(st.lists(st.integers(0, 5), max_size=20), st.lists(st.integers(0, 5), max_size=6))
def test_metaspace_keeps_the_space_between_prompt_and_output(ids, prompt):
    visible = [i for i in prompt if i != 5]
    pieces = "".join(stream(METASPACE, ids, prompt))
    assert pieces == METASPACE.decode(visible + ids)[len(METASPACE.decode(visible)) :]


@pytest.mark.parametrize("encode", [single_bytes, byte_ids], ids=["byte_level", "byte_fallback"])
def test_no_part_of_a_character_is_ever_shown(encode):
    """Public reports: llama-cpp-python #372, vllm #48853, mlx-vlm PR #1076."""
    tokenizer = BYTE_LEVEL if encode is single_bytes else FALLBACK
    for character in EMOJI:
        data = character.encode()
        pieces = stream(tokenizer, encode(data), encode(b"abcde"))
        assert pieces == [""] * (len(data) - 1) + [character, ""]


@pytest.mark.parametrize("encode", [single_bytes, byte_ids], ids=["byte_level", "byte_fallback"])
@pytest.mark.parametrize("known", [1, 2, 3])
def test_a_prompt_that_ends_inside_a_character_does_not_leak(encode, known):
    """Public reports: mlx-vlm PR #1778, vllm #48853: the first delta held the whole prompt."""
    tokenizer = BYTE_LEVEL if encode is single_bytes else FALLBACK
    data = "\U0001f336".encode()
    prompt = encode(b"the whole prompt " + data[:known])
    pieces = stream(tokenizer, encode(data[known:] + b"ok"), prompt)
    assert "".join(pieces) == "\U0001f336ok"
    assert "".join(stream(tokenizer, tokenizer.encode("b"), prompt)) == "b"
    assert "".join(stream(tokenizer, [], prompt)) == ""


def test_an_emoji_after_a_prompt_of_emoji_is_whole():
    """Public report: vllm #48853. The left neighbours must not begin inside a character either."""
    for repeat in range(1, 6):
        prompt = byte_ids(("\U0001f600" * repeat).encode())
        assert "".join(stream(FALLBACK, byte_ids("\U0001f336".encode()), prompt)) == "\U0001f336"
        prompt = single_bytes(("\U0001f600" * repeat).encode())
        assert "".join(stream(BYTE_LEVEL, single_bytes("\U0001f336".encode()), prompt)) == "\U0001f336"


def test_a_newline_byte_token_is_shown_at_once():
    assert stream(FALLBACK, byte_ids(b"\n"), [ORDINARY[3]]) == ["\n", ""]


def test_an_unfinished_character_comes_out_at_the_end():
    ids = single_bytes("\U0001f336".encode()[:3])
    assert stream(BYTE_LEVEL, ids) == ["", "", "", BROKEN]


def test_special_tokens_are_skipped_or_shown():
    ids = [*BYTE_LEVEL.encode("hi"), BYTE_LEVEL.backend.token_to_id("</s>"), *BYTE_LEVEL.encode("yo")]
    assert "".join(stream(BYTE_LEVEL, ids)) == "hiyo"
    assert "".join(stream(BYTE_LEVEL, ids, skip=False)) == "hi</s>yo"


@pytest.mark.parametrize(
    "ids",
    [
        single_bytes(b"\x80" * 400),
        single_bytes(b"\xf0" * 400),
        BYTE_LEVEL.encode("\U0001f336" * 200),
        single_bytes(b"\x80\xf0\x9f\x98" * 100 + b"a"),
    ],
    ids=["continuation", "lead", "emoji", "mixed"],
)
def test_the_work_per_token_is_bounded_on_endless_broken_bytes(ids):
    BYTE_LEVEL.longest = 0
    pieces = stream(BYTE_LEVEL, ids)
    assert BYTE_LEVEL.longest < 100
    assert "".join(pieces) == BYTE_LEVEL.decode(ids)


@pytest.mark.parametrize("data", [b"\x80" * 300, b"\x80" + "\U0001f600".encode() * 100], ids=["bad", "emoji"])
def test_the_work_per_token_is_bounded_on_an_endless_broken_byte_run(data):
    FALLBACK.longest = 0
    text = "".join(stream(FALLBACK, [*byte_ids(data), ORDINARY[1]], [ORDINARY[3]]))
    assert FALLBACK.longest < 100
    assert text.startswith(BROKEN)
    assert text.endswith(" world")


def test_tokens_without_text_do_not_pile_up():
    size = FALLBACK.backend.get_vocab_size()
    FALLBACK.longest = 0
    unknown = [size + 5] * 200  # decodes to nothing
    assert "".join(stream(FALLBACK, [ORDINARY[3], *unknown, ORDINARY[1]])) == "hello world"
    assert FALLBACK.longest < 20
