"""What is wrong with a model is told before its weights are packed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paged_backend.config import EngineConfig
from paged_backend.engine import factory
from paged_backend.errors import ModelLoadError
from paged_backend.models import decoder


def test_a_tokenizer_that_cannot_be_read_ends_the_loading_at_once(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / "tokenizer.json").write_text("{")
    packed: list[int] = []
    layer = decoder._Packer.layer

    def slow(packer: decoder._Packer, index: int) -> object:
        with pytest.raises(ModelLoadError):
            factory._tokenizer(config, checkpoint)  # as long as it takes to be refused
        packed.append(index)
        return layer(packer, index)

    from paged_backend.checkpoints.loading import load_checkpoint

    config, checkpoint = EngineConfig(str(folder)), load_checkpoint(folder)
    monkeypatch.setattr(decoder._Packer, "layer", slow)
    with pytest.raises(ModelLoadError, match="tokenizer"):
        factory.build_engine(config)
    assert len(packed) < 2, "of two layers"
