"""The model under test in the formats that peers read: the same numbers, in their containers.

    hf-float32, hf-bfloat16   a Hugging Face folder with safetensors, for transformers and vLLM
    gguf-f16, -q8_0, -q4_0    a GGUF file, for llama.cpp and OpenVINO; metadata copied from the source file

Matrices are dequantized from the source and stored anew; vectors stay float32. ``q4_0`` keeps the embedding (which
is the head of a tied model) at q8_0, as llama.cpp's own quantizer keeps more bits there. Files are made once per
source file.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paged_backend.errors import PagedBackendError

HF_FORMATS = ("hf-float32", "hf-bfloat16")
GGUF_FORMATS = ("gguf-f16", "gguf-q8_0", "gguf-q4_0")
FORMATS = HF_FORMATS + GGUF_FORMATS
_WIDE = ("token_embd.weight", "output.weight")  # tensors that q4_0 stores as q8_0


class ExportError(PagedBackendError):
    """A model cannot be written in the format a peer needs; the message says why."""


def export(model: str, format_: str, workdir: Path) -> Path:
    """Path of ``model`` (as ``EngineConfig.model``) in ``format_``, written below ``workdir`` unless it is there.

    Raises ExportError, and ModelLoadError for a model that cannot be read.
    """
    from paged_backend.checkpoints.resolve import resolve_model

    if format_ not in FORMATS:
        raise ExportError(f"unknown format {format_!r}: choose one of {', '.join(FORMATS)}")
    source = resolve_model(model)
    if format_ in GGUF_FORMATS and source.suffix != ".gguf":
        raise ExportError(
            f"{source} is not a GGUF file, and only from one can {format_} be made: give the peer a file of its own "
            "with the option model=PATH"
        )
    stat = source.stat()
    folder = workdir / f"{source.stem}-{stat.st_size}-{int(stat.st_mtime)}"
    target = folder / (format_ if format_ in HF_FORMATS else f"{format_.removeprefix('gguf-')}.gguf")
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write = _write_folder if format_ in HF_FORMATS else _write_gguf
        _write_whole(target, lambda path: write(source, format_.split("-")[1], path))
    return target


def _write_whole(target: Path, write: Callable[[Path], None]) -> None:
    """Write beside the target and rename, so that an interrupted run leaves nothing that looks finished."""
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".writing-"))
    try:
        write(scratch / target.name)
        os.replace(scratch / target.name, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_folder(source: Path, dtype: str, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from paged_backend.checkpoints.loading import load_checkpoint
    from paged_backend.kernels.tensor import as_tensor
    from paged_backend.kernels.weights import to_dense

    checkpoint = load_checkpoint(source)
    wanted = getattr(torch, dtype)
    path.mkdir()
    dense = {name: as_tensor(to_dense(read())) for name, read in checkpoint.tensors.items()}
    tensors = {name: tensor.to(wanted).contiguous().clone() for name, tensor in dense.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {**checkpoint.config, "torch_dtype": dtype}
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if checkpoint.generation_config:
        text = json.dumps(dict(checkpoint.generation_config), indent=1)
        (path / "generation_config.json").write_text(text, encoding="utf-8")
    _write_tokenizer(source, path)


def _write_tokenizer(source: Path, path: Path) -> None:
    from transformers import AutoTokenizer

    if source.suffix == ".gguf":
        tokenizer: Any = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    else:
        tokenizer = AutoTokenizer.from_pretrained(str(source))
    tokenizer.save_pretrained(str(path))


def _write_gguf(source: Path, kind: str, path: Path) -> None:
    try:
        import gguf
    except ImportError as error:
        raise ExportError("writing GGUF files needs the gguf package: pip install gguf") from error

    reader: Any = gguf.GGUFReader(source)
    architecture = reader.get_field("general.architecture").contents()
    writer: Any = gguf.GGUFWriter(path, architecture)
    kinds = {
        "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
        "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
        "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    }
    wanted, file_type = kinds[kind]
    writer.add_file_type(int(file_type))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        value_type = field.types[0]
        item_type = field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), value_type, sub_type=item_type)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = values.reshape(tuple(int(n) for n in reversed(tensor.shape)))
        type_ = wanted if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        if kind == "q4_0" and tensor.name in _WIDE:
            type_ = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
