"""The C kernels for ARM, run by an emulator: a library that is called like the one that ``load_library`` returns.

The library is that of the wheel for Linux on ARM, from the same compiler. It finds its arguments where Python put them,
as memory that it touches is mapped into the emulator at the address it has here. What it calls of the C library is done
by Python. No thread is ever started, so the caller does all the work.
"""

from __future__ import annotations

import ctypes
import importlib.util
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from paged_backend.kernels.cpu.backend import _SIGNATURES

_PAGE = 1 << 12
# where no process has anything
_BASE, _STACK, _RETURN, _C_LIBRARY, _HEAP, _THREAD = (n << 40 for n in range(0x20, 0x26))
_STACK_SIZE, _HEAP_SIZE, _SCRATCH_SIZE = 1 << 22, 1 << 30, 1 << 24
_RET, _LOAD_SECOND = 0xD65F03C0, 0xF9400400  # ret; ldr x0, [x0, #8]
_RELATIVE, _SYMBOL_SLOTS, _THREAD_LOCAL = 1027, (257, 1025, 1026), 1031


def available() -> bool:
    """Whether the emulator and the compiler are installed."""
    return all(importlib.util.find_spec(name) for name in ("unicorn", "ziglang"))


def compile_for_arm(folder: Path, flags: tuple[str, ...] = ()) -> Path:
    """The library as ``scripts/build_wheels.py`` makes it, for a processor that has more."""
    from build_wheels import PLATFORMS, TARGETS, compile_library

    with patch.dict(TARGETS, portable=flags):
        return compile_library(PLATFORMS["linux-aarch64"], "portable", folder)


class EmulatedLibrary:
    """Functions of ``library`` by name, with the argument types of ``_SIGNATURES``."""

    def __init__(self, library: Path) -> None:
        import unicorn
        from unicorn import arm64_const as registers

        self._registers = registers
        self._machine = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self._machine.ctl_set_cpu_model(registers.UC_CPU_ARM64_MAX)
        self._machine.reg_write(registers.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # vector registers
        self._machine.reg_write(registers.UC_ARM64_REG_TPIDR_EL0, _THREAD)
        for start, size in (
            (_STACK, _STACK_SIZE),
            (_RETURN, _PAGE),
            (_C_LIBRARY, _PAGE),
            (_HEAP, _HEAP_SIZE),
            (_THREAD, _PAGE),
        ):
            self._machine.mem_map(start, size)
        self._given = _SCRATCH_SIZE  # of the heap; its beginning is what malloc returns
        self._lent: set[int] = set()
        missing = unicorn.UC_HOOK_MEM_READ_UNMAPPED | unicorn.UC_HOOK_MEM_WRITE_UNMAPPED
        self._machine.hook_add(missing, self._lend)
        self._machine.hook_add(
            unicorn.UC_HOOK_CODE, self._serve, begin=_C_LIBRARY + 8, end=_C_LIBRARY + _PAGE
        )
        self._imports: list[str] = []
        self._addresses = self._load(library.read_bytes())

    def _load(self, image: bytes) -> dict[str, int]:
        """Put the library at ``_BASE`` and bind it; returns where its functions are."""
        segments = list(_segments(image))
        end = max(address + size for kind, address, size, _ in segments if kind == 1)
        self._machine.mem_map(_BASE, -(-end // _PAGE) * _PAGE)
        for kind, address, _, content in segments:
            if kind == 1:
                self._machine.mem_write(_BASE + address, content)
        dynamic = dict(
            struct.iter_unpack("<QQ", next(content for kind, *_, content in segments if kind == 2))
        )
        strings, symbols = dynamic[5], dynamic[6]

        def symbol(index: int) -> tuple[str, int, int]:
            """Its name, its section (0: another library has it) and its value."""
            name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", image, symbols + 24 * index)
            at = strings + name
            return image[at : image.index(b"\0", at)].decode(), section, value

        self._machine.mem_write(_C_LIBRARY, struct.pack("<II", _LOAD_SECOND, _RET))
        for table, size in ((dynamic[7], dynamic[8]), (dynamic[23], dynamic[2])):
            for slot, info, addend in struct.iter_unpack("<QQq", image[table : table + size]):
                kind, (name, section, value) = info & 0xFFFFFFFF, symbol(info >> 32)
                if kind == _RELATIVE:
                    words = [_BASE + addend]
                elif kind in _SYMBOL_SLOTS:
                    words = [_BASE + value + addend if section else self._import(name)]
                elif (
                    kind == _THREAD_LOCAL
                ):  # a function that returns the place in the thread's memory, and that
                    words = [_C_LIBRARY, value + addend]
                else:
                    raise ValueError(f"relocation {kind} is unknown here")
                self._machine.mem_write(_BASE + slot, struct.pack(f"<{len(words)}Q", *words))
        count = struct.unpack_from("<I", image, dynamic[4] + 4)[0]  # of symbols, as the hash table says
        named = (symbol(index) for index in range(1, count))
        return {name: _BASE + value for name, section, value in named if section}

    def _import(self, name: str) -> int:
        """Where a function of the C library is: a place at which ``_serve`` is called."""
        self._imports.append(name)
        address = _C_LIBRARY + 4 + 4 * len(self._imports)
        self._machine.mem_write(address, struct.pack("<I", _RET))
        return address

    def _serve(self, machine: Any, address: int, size: int, data: Any) -> None:
        """Do what the function at ``address`` does."""
        name, r = self._imports[(address - _C_LIBRARY - 8) // 4], self._registers
        first, second, third = (machine.reg_read(r.UC_ARM64_REG_X0 + i) for i in range(3))
        result = 0
        if name in ("memcpy", "memmove"):
            self._write(first, self._read(second, third))
            result = first
        elif name == "memset":
            self._write(first, bytes([second & 0xFF]) * third)
            result = first
        elif name == "malloc":
            result = _HEAP if first <= _SCRATCH_SIZE else 0  # nobody has two
        elif name == "aligned_alloc":
            result = _HEAP + self._given
            self._given += -(-second // _PAGE) * _PAGE
            assert self._given <= _HEAP_SIZE
        elif name == "clock_gettime":
            self._write(second, bytes(16))
        elif not name.startswith("pthread_") and name not in ("free", "sched_yield"):
            raise AssertionError(f"the kernels called {name}")
        machine.reg_write(r.UC_ARM64_REG_X0, result)

    def _read(self, address: int, size: int) -> bytes:
        return (
            bytes(self._machine.mem_read(address, size)) if _own(address) else ctypes.string_at(address, size)
        )

    def _write(self, address: int, content: bytes) -> None:
        if _own(address):
            self._machine.mem_write(address, content)
        else:
            ctypes.memmove(address, content, len(content))

    def _lend(self, machine: Any, access: int, address: int, size: int, value: int, data: Any) -> bool:
        first, last = address // _PAGE, (address + size - 1) // _PAGE
        for page in range(first, last + 1):
            if page not in self._lent:
                machine.mem_map_ptr(page * _PAGE, _PAGE, 3, ctypes.c_void_p(page * _PAGE))
                self._lent.add(page)
        return True

    def __getattr__(self, name: str) -> Callable[..., int | None]:
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> int | None:
        result, types = _SIGNATURES[name]
        write, r = self._machine.reg_write, self._registers
        whole, floating, stacked = 0, 0, []
        for argument, kind in zip(arguments, types, strict=True):
            if kind is ctypes.c_double:
                write(r.UC_ARM64_REG_D0 + floating, struct.unpack("<Q", struct.pack("<d", argument))[0])
                floating += 1
            elif whole < 8:
                write(r.UC_ARM64_REG_X0 + whole, int(argument or 0) & (1 << 64) - 1)
                whole += 1
            else:
                stacked.append(int(argument or 0) & (1 << 64) - 1)
        top = _STACK + _STACK_SIZE - (len(stacked) * 8 + 15) // 16 * 16 - 64
        self._machine.mem_write(top, struct.pack(f"<{len(stacked)}Q", *stacked))
        write(r.UC_ARM64_REG_SP, top)
        write(r.UC_ARM64_REG_X30, _RETURN)
        self._machine.emu_start(self._addresses[name], _RETURN)
        value = self._machine.reg_read(r.UC_ARM64_REG_X0)
        for page in self._lent:  # what lies there may be freed and mapped anew before the next call
            self._machine.mem_unmap(page * _PAGE, _PAGE)
        self._lent.clear()
        return None if result is None else value - (value >> 63 << 64)


def _own(address: int) -> bool:
    """Whether the emulator has it and not this process."""
    return _BASE <= address < _THREAD + _PAGE


def _segments(image: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """(kind, address, bytes in memory, content) of an ELF file."""
    (table,), (size, count) = struct.unpack_from("<Q", image, 32), struct.unpack_from("<HH", image, 54)
    for i in range(count):
        kind, _, offset, address, _, in_file, in_memory, _ = struct.unpack_from(
            "<IIQQQQQQ", image, table + i * size
        )
        yield kind, address, in_memory, image[offset : offset + in_file]
