"""Small tokenizers of every kind of vocabulary, with the same special tokens."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from paged_backend.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox",
    "Größe, naïve café; 東京の天気は晴れです。 🌶️ 👩‍👩‍👧",
    "  def f(x):\n\treturn x",
] * 20
SPECIAL = ["<unk>", "<s>", "</s>", "<|ü|>", "<\uff5ceot\uff5c>"]


def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend, {"bos_token": "<s>"})


def trained_metaspace(decoder, normalizer=None) -> Tokenizer:
    """A SentencePiece-like vocabulary with bytes for what it has no letters for."""
    teacher = tokenizers.Tokenizer(models.BPE())
    teacher.pre_tokenizer = pre_tokenizers.Metaspace()
    teacher.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=120, limit_alphabet=30, show_progress=False)
    )
    stored = json.loads(teacher.to_str())["model"]
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *stored["vocab"]]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    merges = [tuple(pair) for pair in stored["merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    if normalizer is None:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizer
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return Tokenizer(backend, {"unk_token": "<unk>"})


LLAMA = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
NESTED = decoders.Sequence([decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])])
KINDS = {
    "byte level": byte_level(),
    "byte fallback": trained_metaspace(LLAMA),
    "nested": trained_metaspace(NESTED),
    "legacy": trained_metaspace(
        LLAMA, normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    ),
}
