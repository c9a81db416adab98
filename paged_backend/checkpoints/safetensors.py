"""Checkpoints from folders of safetensors, as Hugging Face saves them."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paged_backend.checkpoints.checkpoint import Checkpoint, TensorSource
from paged_backend.checkpoints.checks import check_generation_config
from paged_backend.checkpoints.mapped_file import drop_pages, map_file
from paged_backend.checkpoints.quantized.parts import Stored
from paged_backend.checkpoints.quantized.settings import split_config
from paged_backend.errors import ModelLoadError
from paged_backend.kernels.array import BFLOAT16, Array

_LONGEST_HEADER = 100_000_000  # bytes, the format's own limit
_FLOATS = ("F64", "F32", "F16", "BF16")
_DTYPES = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": BFLOAT16,
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"), "F8_E4M3": np.dtype("u1"), "F8_E5M2": np.dtype("u1"), "F8_E8M0": np.dtype("u1"),
}  # fmt: skip

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OLD_SETTINGS = "quantize_config.json"  # of GPTQ, before they were part of config.json


def load_folder(path: Path) -> Checkpoint:
    """Config and lazily read tensors of a folder. Raises ModelLoadError naming the file.

    Of a quantised model the config is that of the plain one, and weights have its names and shapes.
    """
    config, settings, generation_config = _read_configs(path)
    stored: dict[str, Stored] = {}
    mapped = [_map_shard(path / shard, names, stored) for shard, names in _shards(path).items()]
    sources: dict[str, TensorSource] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    integers: dict[str, tuple[str, TensorSource]] = {}
    quantized_bytes = 0
    if settings is not None:
        from paged_backend.checkpoints.quantized.methods import read_quantized

        quantized_bytes = sum(
            math.prod(e.shape) * _DTYPES[e.dtype].itemsize for e in stored.values() if e.dtype in _DTYPES
        )
        weights, stored = read_quantized(path, settings, stored)
        for name, found in weights.items():
            sources[name], shapes[name] = found.read, found.shape
    for name, entry in stored.items():
        if entry.dtype in _FLOATS:
            sources[name], shapes[name] = entry.read, entry.shape
        else:
            integers[name] = entry.dtype, entry.read
    return Checkpoint(
        config=config,
        tensors=sources,
        shapes=shapes,
        generation_config=generation_config,
        path=path,
        tokenizer_source=str(path),
        integers=integers,
        drop_pages=partial(drop_pages, mapped),
        quantized_bytes=quantized_bytes,
    )


def read_configs(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of ``config.json`` but for quantisation, and of ``generation_config.json`` if there is one.

    Raises ModelLoadError.
    """
    config, _, generation_config = _read_configs(path)
    return config, generation_config


def _read_configs(path: Path) -> tuple[dict[str, Any], Mapping[str, Any] | None, dict[str, Any]]:
    """:func:`read_configs` with what the folder says of quantisation in between."""
    config = _read_json(path / "config.json", f"{path} has no config.json, so it is not a model folder")
    config, settings = split_config(config)
    if settings is None and (path / OLD_SETTINGS).exists():
        settings = {"quant_method": "gptq", **_read_json(path / OLD_SETTINGS, "")}
    generation = path / "generation_config.json"
    defaults = _read_json(generation, "") if generation.exists() else {}
    check_generation_config(defaults, str(generation))
    return config, settings, defaults


def _shards(path: Path) -> dict[str, list[str]]:
    """Safetensors files of a folder, with the tensors the index promises in each."""
    if (path / WEIGHTS).exists():
        return {WEIGHTS: []}
    if (path / INDEX).exists():
        weight_map = _read_json(path / INDEX, "").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{path / INDEX} has no weight_map")
        shards: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            # an index is downloaded data: it may not point outside of its folder
            if not isinstance(shard, str) or os.path.basename(shard) != shard:
                raise ModelLoadError(
                    f"{path / INDEX} places tensor {name!r} in {shard!r}, which is no plain file name"
                )
            shards.setdefault(shard, []).append(name)
        for shard in shards:
            if not (path / shard).exists():
                raise ModelLoadError(
                    f"{path / INDEX} names {shard!r}, but that file is missing: download it again"
                )
        return shards
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern))
    if pickles:
        raise ModelLoadError(
            f"{path} has only pickled weights ({pickles[0]}), which can run code when read and are "
            "refused: convert them with transformers, "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise ModelLoadError(f"{path} has no weights: neither {WEIGHTS} nor {INDEX}")


def _map_shard(file: Path, promised: list[str], stored: dict[str, Stored]) -> mmap.mmap:
    """Add the tensors of one file to ``stored``, and map it; only its header is read."""
    try:
        buffer = map_file(file)
        entries = _directory(buffer)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} is damaged or cut short ({error}): download it again") from error
    for name in promised:
        if name not in entries:
            raise ModelLoadError(
                f"{file.parent / INDEX} places tensor {name!r} in {file.name!r}, which does not have it"
            )
    for name, entry in entries.items():
        stored[name] = Stored(entry.dtype, entry.shape, partial(_read, buffer, entry))
    return buffer


class _Entry(NamedTuple):
    """A tensor in the header. dtype: the format's name of it. start, stop: bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def _directory(buffer: mmap.mmap) -> dict[str, _Entry]:
    """The header: eight bytes of length, then JSON: name -> dtype, shape and place among the bytes that follow.

    Raises ValueError unless every tensor lies within the file, has the size that its shape asks for, and shares no byte
    with another.
    """
    first = 8 + int.from_bytes(buffer[:8], "little")
    if first > min(len(buffer), _LONGEST_HEADER):
        raise ValueError(f"its header would end at byte {first} of {len(buffer)}")
    try:
        header = json.loads(buffer[8:first].decode("utf-8"))
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    entries: dict[str, _Entry] = {}
    for name, told in header.items():
        try:
            dtype, shape, (start, stop) = told["dtype"], tuple(told["shape"]), told["data_offsets"]
            whole = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, start, stop))
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"tensor {name!r} has no dtype, shape and data_offsets") from error
        if not whole:
            raise ValueError(f"tensor {name!r} has no dtype, shape and data_offsets of the right kind")
        if not start <= stop <= len(buffer) - first:
            raise ValueError(f"tensor {name!r} lies outside of the file")
        if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype].itemsize != stop - start:
            raise ValueError(f"tensor {name!r} of {dtype} {list(shape)} has {stop - start} bytes")
        entries[name] = _Entry(dtype, shape, first + start, first + stop)
    end, last = first, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < end:
            raise ValueError(f"tensors {last!r} and {name!r} overlap")
        end, last = entry.stop, name
    return entries


def _read(buffer: mmap.mmap, entry: _Entry) -> Array:
    """A view of the mapped file; a copy where the file does not align it. What has no dtype here comes as uint8."""
    dtype = _DTYPES.get(entry.dtype)
    raw = np.frombuffer(buffer, np.uint8, entry.stop - entry.start, entry.start)
    if dtype is None:
        return raw
    if raw.ctypes.data % dtype.itemsize:
        raw = raw.copy()
    return raw.view(dtype).reshape(entry.shape)


def _read_json(file: Path, missing: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(missing) from error
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} must hold a JSON object")
    return content
