"""From the name of a model to the folder or file that holds it."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from paged_backend.errors import ModelLoadError
from paged_backend.folders import hub_cache

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")
HUB_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.model", "vocab*", "merges.txt", "*.jinja")


def resolve_model(model: str, files: Sequence[str] = HUB_FILES) -> Path:
    """Folder or .gguf file of what the user named: a path, ``demo``, or a hub id (downloaded on first use).

    files: patterns of those that are needed. A folder of that name wins over a hub id. Raises ModelLoadError.
    """
    path = Path(os.path.expanduser(model))
    if path.exists():
        return path.resolve()
    if model == "demo":
        from paged_backend.checkpoints import gguf

        return gguf.demo_path()
    if path.suffix == ".gguf" or model.startswith((".", "/", "~")):
        kind = "file" if path.suffix == ".gguf" else "folder"
        raise ModelLoadError(f"there is no {kind} {model!r}")
    if not _HUB_ID.fullmatch(model):
        raise ModelLoadError(
            f"no model at {model!r}: give a folder with safetensors, a .gguf file, a hub id or 'demo'"
        )
    if difflib.get_close_matches(model.lower(), ["demo"], cutoff=0.7):  # no model on the hub has such a name
        raise ModelLoadError(f"there is no model {model!r}: did you mean 'demo'?")
    return _download(model, files)


def _download(model: str, files: Sequence[str]) -> Path:
    """Fetch a hub repository (weights as safetensors only) or find it in the local cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(files), cache_dir=hub_cache()))
    except HFValidationError as error:
        raise ModelLoadError(f"{model!r} is neither an existing path nor a valid hub id: {error}") from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"{model!r} is not in the local cache and the hub cannot be reached: check the network, "
            "or give a local folder"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelLoadError(f"downloading {model!r} from the hub failed: {error}") from error
