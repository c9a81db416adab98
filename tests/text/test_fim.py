"""Filling in the middle: which tokens, in which order, for each family."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from paged_backend.errors import RequestRejectedError
from paged_backend.text.fim import fill_in
from paged_backend.text.tokenizer import Tokenizer


def byte_level(*special: str) -> Tokenizer:
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in special])
    return Tokenizer(backend, {"eos_token": "<|endoftext|>"} if "<|endoftext|>" in special else {})


def sentence_piece(*special: str) -> Tokenizer:
    """As Llama's: a space before the first word, bytes for what is in no word."""
    names = ["<unk>", "<s>", "▁", "a", "b", "▁a", "▁b", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("▁", "a"), ("▁", "b")]
    backend = Backend(
        models.BPE({n: i for i, n in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend, {"bos_token": "<s>"})


@pytest.mark.parametrize(
    ("special", "text", "ends"),
    [
        (
            ("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
            "<|fim_prefix|>ab<|fim_suffix|> cd<|fim_middle|>",
            "<|fim_pad|>",
        ),
        (
            ("<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<file_sep>"),
            "<fim_prefix>ab<fim_suffix> cd<fim_middle>",
            "<file_sep>",
        ),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
            "<｜fim▁begin｜>ab<｜fim▁hole｜> cd<｜fim▁end｜>",  # noqa: RUF001
            "<｜fim▁end｜>",  # noqa: RUF001
        ),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX] cd[PREFIX]ab", "[PREFIX]"),
    ],
)
def test_the_gap_is_marked_as_the_family_does(special, text, ends):
    tokenizer = byte_level(*special)
    found = fill_in(tokenizer)
    ids = found.encode("ab", " cd")
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert found.encode(tokenizer.encode("ab"), " cd") == ids
    assert tokenizer.token_to_id(ends) in found.stop_ids


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        (("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"), ["<s>", "▁<PRE>", "▁a", "▁<SUF>", "b", "▁a", "▁<MID>"]),
        (("[PREFIX]", "[SUFFIX]"), ["<s>", "[SUFFIX]", "b", "▁a", "[PREFIX]", "▁a"]),
    ],
)
def test_what_follows_the_gap_is_given_no_space(special, expected):
    tokenizer = sentence_piece(*special)
    found = fill_in(tokenizer)
    assert [tokenizer.id_to_token(i) for i in found.encode("a", "b a")] == expected
    assert [tokenizer.id_to_token(i) for i in found.encode("a", "b a", add_special_tokens=False)] == expected[
        1:
    ]


def test_a_model_that_cannot_is_named():
    with pytest.raises(RequestRejectedError, match="suffix is not supported"):
        fill_in(byte_level("<|fim_prefix|>"))
