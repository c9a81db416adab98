"""Opening a checkpoint, whatever it is stored as."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paged_backend.checkpoints import safetensors
from paged_backend.checkpoints.checkpoint import Checkpoint
from paged_backend.checkpoints.resolve import resolve_model
from paged_backend.errors import ModelLoadError


def load_config(model: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The content of a model's ``config.json`` and ``generation_config.json``. Raises ModelLoadError."""
    path = resolve_model(model, ("config.json", "generation_config.json"))
    if path.suffix == ".gguf":
        checkpoint = load_checkpoint(path)
        return checkpoint.config, checkpoint.generation_config
    return safetensors.read_configs(path)


def load_checkpoint(path: Path) -> Checkpoint:
    """Config and lazily read tensors of a safetensors folder or a .gguf file. Raises ModelLoadError."""
    path = Path(path)
    if path.suffix == ".gguf":
        from paged_backend.checkpoints import gguf

        return gguf.load_gguf(path)
    if not path.exists():
        raise ModelLoadError(f"no model folder at {path}")
    if not path.is_dir():
        raise ModelLoadError(
            f"{path} is neither a folder nor a .gguf file; give the folder that holds config.json"
        )
    return safetensors.load_folder(path)
