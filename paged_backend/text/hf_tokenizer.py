"""Tokenizer files of a Hugging Face model folder, read the way transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paged_backend.errors import ModelLoadError, missing_extra
from paged_backend.folders import hub_cache

if TYPE_CHECKING:
    import tokenizers

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "vocab.json",
    "merges.txt",
    "config.json",
)


class FolderTokenizer(NamedTuple):
    """What a folder holds: the backend, ``bos_token`` and so on -> text, chat templates by name."""

    backend: tokenizers.Tokenizer
    named: dict[str, str]
    templates: dict[str, str]


def fetch(name: str) -> Path:
    """Folder with the tokenizer files of a hub repository. Raises ``ModelLoadError``."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES), cache_dir=hub_cache()))
    except Exception as error:
        raise ModelLoadError(
            f"{name!r} is neither a folder nor a .gguf file here, and the hub did not deliver a "
            f"tokenizer ({error})"
        ) from error


def read_folder(folder: Path) -> FolderTokenizer:
    """The tokenizer in ``folder``: from ``tokenizer.json`` and the files beside it, else by transformers.

    Raises ``ModelLoadError`` naming the file that is missing or damaged.
    """
    return _from_json(folder) if (folder / "tokenizer.json").is_file() else _from_transformers(folder)


def _from_json(folder: Path) -> FolderTokenizer:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    from paged_backend.text.gguf_tokenizer import set_ends

    config = _json(folder / "tokenizer_config.json")
    fallback = _json(folder / "special_tokens_map.json")
    try:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
    except Exception as error:
        raise ModelLoadError(
            f"{folder / 'tokenizer.json'}: damaged or of an unknown format ({error})"
        ) from error
    entries = sorted(
        (int(index), token) for index, token in (config.get("added_tokens_decoder") or {}).items()
    )
    backend.add_tokens([AddedToken(**{k: v for k, v in t.items() if k != "__type"}) for _, t in entries])
    legacy = sorted(_json(folder / "added_tokens.json").items(), key=lambda item: item[1])
    backend.add_tokens([name for name, _ in legacy if backend.token_to_id(name) is None])
    named = {}
    for name in _NAMED:
        token = config.get(name, fallback.get(name))
        if token is not None:
            named[name] = _content(token)
    special = list(named.values())
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(key, fallback.get(key)) or ()
        if isinstance(extra, Mapping):
            named.update({name: _content(token) for name, token in extra.items()})
            extra = list(extra.values())
        special += [_content(token) for token in extra]
    have = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    missing = [t for t in dict.fromkeys(special) if t not in have or not have[t].special]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])
    if "add_bos_token" in config or "add_eos_token" in config:
        bos = named.get("bos_token") if config.get("add_bos_token") else None
        eos = named.get("eos_token") if config.get("add_eos_token") else None
        set_ends(backend, bos, eos)
    return FolderTokenizer(backend, named, _templates(folder, config))


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    own = folder / "chat_template.json"
    for file, source in (
        (own, _json(own).get("chat_template")),
        (folder / "tokenizer_config.json", config.get("chat_template")),
    ):
        found.update(_named_templates(source, file))
    if (folder / "chat_template.jinja").is_file():
        found["default"] = _template_file(folder / "chat_template.jinja")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = _template_file(file)
    return found


def _named_templates(source: Any, file: Path) -> dict[str, str]:
    """``chat_template`` in its three forms: a text, texts by name, a list of names and texts."""
    if source is None:
        return {}
    if isinstance(source, str):
        return {"default": source}
    if isinstance(source, list) and all(isinstance(entry, Mapping) for entry in source):
        source = {entry.get("name"): entry.get("template") for entry in source}
    if isinstance(source, Mapping) and all(isinstance(x, str) for pair in source.items() for x in pair):
        return dict(source)
    raise ModelLoadError(f"{file}: chat_template must be a text, or texts with a name each (name, template)")


def _template_file(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{file} is not UTF-8 text ({error})") from error


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, Mapping) else str(token)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return data


def _from_transformers(folder: Path) -> FolderTokenizer:
    """Folders without ``tokenizer.json`` (SentencePiece models, vocab and merges files)."""
    with missing_extra("huggingface", f"{folder}, which has no tokenizer.json,"):
        from transformers import AutoTokenizer
    try:
        loaded: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        backend = loaded.backend_tokenizer
    except Exception as error:
        raise ModelLoadError(
            f"{folder} has no tokenizer.json, and transformers cannot build a fast tokenizer from it "
            f"({error}); pass tokenizer=<folder or hub id with tokenizer.json>"
        ) from error
    named = {name: str(token) for name, token in loaded.special_tokens_map.items() if isinstance(token, str)}
    templates = loaded.chat_template
    if isinstance(templates, str):
        templates = {"default": templates}
    return FolderTokenizer(backend, named, dict(templates or {}))
