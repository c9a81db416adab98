"""What a shared library asks of the system that loads it, read from its headers: ELF, Mach-O or PE, of 64 bits."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Needs:
    """libraries: loaded with it. versions: of symbols, such as ``GLIBC_2.17``. unbound: undefined symbols that none of
    the libraries is named for. minimum_os: the oldest macOS, (major, minor). exports: its own functions."""

    libraries: set[str] = field(default_factory=set)
    versions: set[str] = field(default_factory=set)
    unbound: set[str] = field(default_factory=set)
    minimum_os: tuple[int, int] | None = None
    exports: set[str] = field(default_factory=set)


def needs(library: Path) -> Needs:
    """Read ``library``. Raises ValueError for a file of another kind."""
    content = library.read_bytes()
    for magic, read in ((b"\x7fELF\x02\x01", _elf), (b"\xcf\xfa\xed\xfe", _mach_o), (b"MZ", _pe)):
        if content.startswith(magic):
            return read(content)
    raise ValueError(f"{library} is no shared library for Linux, macOS or Windows")


def _text(content: bytes, start: int) -> str:
    return content[start : content.index(b"\0", start)].decode("ascii")


def _elf(content: bytes) -> Needs:
    found = Needs()
    (table,), (size, count) = struct.unpack_from("<Q", content, 40), struct.unpack_from("<HH", content, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", content, table + i * size) for i in range(count)]
    at = {section[1]: section for section in sections}  # of these kinds there is one each
    dynamic, symbols = at[6], at[11]
    versions, needed_versions = at.get(0x6FFFFFFF), at.get(0x6FFFFFFE)
    strings = sections[symbols[6]][4]
    for start in range(dynamic[4], dynamic[4] + dynamic[5], 16):
        tag, value = struct.unpack_from("<QQ", content, start)
        if tag == 1:
            found.libraries.add(_text(content, strings + value))
    if needed_versions is not None:
        start = needed_versions[4]
        for _ in range(needed_versions[7]):
            _, names, _, first, following = struct.unpack_from("<HHIII", content, start)
            name = start + first
            for _ in range(names):
                _, _, _, text, next_name = struct.unpack_from("<IHHII", content, name)
                found.versions.add(_text(content, strings + text))
                name += next_name
            start += following
    for i in range(1, symbols[5] // 24):
        name, info, _, section, _, _ = struct.unpack_from("<IBBHQQ", content, symbols[4] + i * 24)
        weak = info >> 4 == 2
        if section:
            found.exports.add(_text(content, strings + name))
        elif not weak and (versions is None or struct.unpack_from("<H", content, versions[4] + 2 * i)[0] < 2):
            found.unbound.add(_text(content, strings + name))
    return found


def _mach_o(content: bytes) -> Needs:
    found = Needs()
    (commands,) = struct.unpack_from("<I", content, 16)
    start = 32
    for _ in range(commands):
        command, size = struct.unpack_from("<II", content, start)
        command &= 0x7FFFFFFF
        if command in (0xC, 0x18, 0x1F):  # a library, also one that may be missing or is handed on
            (name,) = struct.unpack_from("<I", content, start + 8)
            found.libraries.add(_text(content, start + name))
        elif command == 0x32:  # LC_BUILD_VERSION
            (version,) = struct.unpack_from("<I", content, start + 12)
            found.minimum_os = (version >> 16, version >> 8 & 0xFF)
        elif command == 0x2:  # LC_SYMTAB
            symbols, count, strings = struct.unpack_from("<III", content, start + 8)
            for i in range(count):
                name, kind, _, described, _ = struct.unpack_from("<IBBHQ", content, symbols + 16 * i)
                if kind & 0xE0 or not kind & 1:  # for a debugger, or not seen from outside
                    continue
                text = _text(content, strings + name).removeprefix("_")
                if kind & 0xE:
                    found.exports.add(text)
                elif not 1 <= described >> 8 <= 0xFC:  # the ordinal of its library
                    found.unbound.add(text)
        start += size
    return found


def _pe(content: bytes) -> Needs:
    """Every import of a PE file names its library, so nothing in it is unbound."""
    found = Needs()
    (header,) = struct.unpack_from("<I", content, 60)
    (sections, optional) = struct.unpack_from("<H12xH", content, header + 6)
    table = header + 24 + optional
    places = [struct.unpack_from("<IIII", content, table + 40 * i + 8) for i in range(sections)]

    def offset(address: int) -> int:
        for size, start, in_file, place in places:
            if start <= address < start + max(size, in_file):
                return address - start + place
        raise ValueError(f"no section holds {address:#x}")

    exports, _, imports, _ = struct.unpack_from("<IIII", content, header + 24 + 112)
    (names,) = struct.unpack_from("<I", content, offset(exports) + 24)
    (addresses,) = struct.unpack_from("<I", content, offset(exports) + 32)
    for i in range(names):
        (name,) = struct.unpack_from("<I", content, offset(addresses) + 4 * i)
        found.exports.add(_text(content, offset(name)))
    for start in range(offset(imports), len(content), 20):
        (name,) = struct.unpack_from("<I", content, start + 12)
        if not name:
            break
        found.libraries.add(_text(content, offset(name)))
    return found
