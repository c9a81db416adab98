"""A ``tokenizers.Tokenizer`` from the vocabulary inside a GGUF file.

A GGUF file names how text is split before merging (``tokenizer.ggml.pre``) but does not spell it out; the
rules here are those of the original models' ``tokenizer.json``. An unknown name is an error: a wrong split
still produces fluent text, only worse, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from paged_backend.checkpoints.gguf_metadata import GGUFFile
from paged_backend.errors import ModelLoadError, UnsupportedModelError, missing_extra

if TYPE_CHECKING:
    import tokenizers

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_TAIL}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_TAIL}"
)
_PLAIN, _DIGITS = "plain", "digits"  # GPT-2's own split; the same after every digit has been cut off
_SPLITS = {
    **dict.fromkeys(("gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion", "granite-docling", "phi-2"), _PLAIN),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "dbrx", "smaug-bpe"), _LLAMA3
    ),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez", "kormo"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}
# these take a word that is a token as it is, even where merging would not arrive at it; they also start every
# text with bos unless the file says otherwise
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "tekken")
_NORMALIZED = ("qwen2", "deepseek-r1-qwen")  # composes characters first (NFC)


@dataclass(frozen=True)
class GGUFTokenizer:
    """``backend`` with what belongs to it. ``named``: ``bos_token`` and so on -> text; ``templates``: chat
    templates by name, ``default`` first."""

    backend: tokenizers.Tokenizer
    named: dict[str, str]
    templates: dict[str, str] = field(default_factory=dict)


def build_tokenizer(file: GGUFFile) -> GGUFTokenizer:
    """Raises ``ModelLoadError`` if the file carries no vocabulary, ``UnsupportedModelError`` for an unknown
    kind."""
    metadata = file.metadata
    model, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if model is None or tokens is None:
        raise ModelLoadError(f"{file.path} carries no tokenizer; pass tokenizer=<folder with tokenizer.json>")
    names = list(tokens)
    named = _named(metadata, names)
    if model == "gpt2":
        backend = _byte_level(file, names)
    elif model == "llama":
        names, backend = _sentencepiece(file, names, named)
    else:
        backend = _by_transformers(file, str(model))
    _add_special(backend, metadata, names, named)
    _add_ends(backend, metadata, named, model)
    return GGUFTokenizer(backend, named, _templates(metadata))


def _named(metadata: dict[str, Any], names: list[str]) -> dict[str, str]:
    found = {}
    for name, key in (
        ("bos", "bos"),
        ("eos", "eos"),
        ("unk", "unknown"),
        ("pad", "padding"),
        ("sep", "seperator"),
        ("mask", "mask"),
    ):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int) and 0 <= token < len(names):
            found[f"{name}_token"] = names[token]
    return found


def _templates(metadata: dict[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {
        key[len(prefix) + 1 :] or "default": value
        for key, value in metadata.items()
        if key.startswith(prefix)
    }
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _byte_level(file: GGUFFile, names: list[str]) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    metadata = file.metadata
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre == "default":
        pre = _guess_split(str(metadata.get("general.architecture")), len(names))
    if pre not in _SPLITS:
        raise UnsupportedModelError(
            f"{file.path}: pre-tokenizer {pre!r} is unknown here; pass tokenizer=<folder with the model's "
            "tokenizer.json>"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ModelLoadError(f"{file.path}: the metadata lacks tokenizer.ggml.merges")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {token: index for index, token in enumerate(names)}
    try:
        model = models.BPE(vocabulary, pairs, ignore_merges=pre in _WHOLE_WORDS)
    except Exception as error:
        raise ModelLoadError(
            f"{file.path}: the vocabulary and its merges contradict each other ({error})"
        ) from error
    backend = Tokenizer(model)
    rule = _SPLITS[pre]
    if rule == _PLAIN:
        splitter: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    elif rule == _DIGITS:
        splitter = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        splitter = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(rule), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    if pre in _NORMALIZED:
        backend.normalizer = normalizers.NFC()
    return backend


def _guess_split(architecture: str, size: int) -> str:
    """Files older than the key ``tokenizer.ggml.pre`` leave it to the reader."""
    if architecture.startswith("qwen"):
        return "qwen2"
    return "llama-bpe" if architecture == "llama" and size == 128256 else "gpt-2"


def _sentencepiece(
    file: GGUFFile, names: list[str], named: dict[str, str]
) -> tuple[list[str], tokenizers.Tokenizer]:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    metadata = file.metadata
    architecture = str(metadata.get("general.architecture"))
    gemma = architecture.startswith("gemma")
    if gemma:
        # the converter wrote runs of spaces as such; the model knows them in SentencePiece's spelling
        names = [_SPACE * len(name) if len(name) > 1 and not name.strip(" ") else name for name in names]
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is not None:
        pairs: list[Any] = [tuple(merge.split(" ", 1)) for merge in merges]
    else:
        scores = metadata.get("tokenizer.ggml.scores")
        if gemma:
            scores = -np.arange(
                len(names)
            )  # its merge order is the order of the vocabulary, its scores are not
        if not isinstance(scores, np.ndarray) or len(scores) != len(names):
            raise ModelLoadError(f"{file.path}: tokenizer.ggml.scores does not fit the {len(names)} tokens")
        pairs = merges_from_scores(names, scores)
    vocabulary = {token: index for index, token in enumerate(names)}
    unknown = named.get("unk_token") if gemma else None
    backend = Tokenizer(models.BPE(vocabulary, pairs, fuse_unk=True, byte_fallback=True, unk_token=unknown))
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True)) and not gemma
    if gemma:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    elif architecture == "phi3" and prefix:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
        )
    else:
        scheme = "first" if prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=_SPACE, prepend_scheme=scheme, split=False
        )
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return names, backend


def merges_from_scores(names: Sequence[str], scores: np.ndarray) -> list[tuple[str, str]]:
    """The merges that a SentencePiece vocabulary implies, best first.

    Every way to cut a token into two tokens is a merge; SentencePiece always joins the pair whose result
    scores highest. Ties go to the longer left part, as in transformers' conversion, so that ids agree.
    """
    ids = {name: index for index, name in enumerate(names)}
    left: list[int] = []
    right: list[int] = []
    owner: list[int] = []
    cut: list[int] = []
    for index, name in enumerate(names):
        for at in range(1, len(name)):
            first = ids.get(name[:at])
            if first is not None and (second := ids.get(name[at:])) is not None:
                left.append(first)
                right.append(second)
                owner.append(index)
                cut.append(at)
    if not left:
        return []
    owners, cuts = np.array(owner), np.array(cut)
    rests = np.array([len(name) for name in names])[owners] - cuts
    # the last key counts most
    keys = (np.array(right), np.array(left), owners, -rests, -cuts, -np.asarray(scores, np.float64)[owners])
    order = np.lexsort(keys)
    return [(names[left[i]], names[right[i]]) for i in order.tolist()]


def _add_special(
    backend: tokenizers.Tokenizer, metadata: dict[str, Any], names: list[str], named: dict[str, str]
) -> None:
    """Control tokens match whole and can be skipped in decoding; user-defined ones only match whole."""
    from tokenizers import AddedToken

    types = metadata.get("tokenizer.ggml.token_type")
    types = (
        types if isinstance(types, np.ndarray) and len(types) == len(names) else np.ones(len(names), np.int32)
    )
    control = [names[i] for i in np.flatnonzero(types == _CONTROL)]
    # what the file names bos, eos, unk or pad is special whatever its type says; neither list may invent new
    # ids
    control += [name for name in named.values() if name not in control]
    control = [name for name in control if backend.token_to_id(name) is not None]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
    known = set(control)
    plain = [names[i] for i in np.flatnonzero(types == _USER_DEFINED)]
    plain = [name for name in plain if name not in known and name.strip(_SPACE)]
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in plain])


def _add_ends(
    backend: tokenizers.Tokenizer, metadata: dict[str, Any], named: dict[str, str], model: Any
) -> None:
    default = model == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", default)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    set_ends(
        backend, named.get("bos_token") if add_bos else None, named.get("eos_token") if add_eos else None
    )


def set_ends(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make ``encode(add_special_tokens=True)`` put ``bos`` in front and ``eos`` behind."""
    from tokenizers import processors

    used = [token for token in (bos, eos) if token is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(used)],
    )


def _by_transformers(file: GGUFFile, model: str) -> tokenizers.Tokenizer:
    """Rare kinds (unigram, ...) through transformers' own conversion, which takes seconds to import."""
    with missing_extra("huggingface", f"the tokenizer of {file.path}, of kind {model!r},"):
        from transformers import AutoTokenizer
    try:
        loaded: Any = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
        return loaded.backend_tokenizer
    except Exception as error:
        raise UnsupportedModelError(
            f"{file.path}: tokenizer kind {model!r} cannot be built from the file ({error}); pass "
            "tokenizer=<folder with the model's tokenizer.json>"
        ) from error
