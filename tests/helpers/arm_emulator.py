"""The C kernels for ARM, run by an emulator: a library that is called like the one that ``load_library`` returns.

Only the kernels are ARM code. They find their arguments where Python put them, as memory that they touch is mapped into
the emulator at the address it has here. Threads are left out.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import paged_backend.kernels.cpu as kernels
from paged_backend.kernels.cpu.backend import _SIGNATURES
from paged_backend.kernels.cpu.build import FLAGS

COMPILER = "aarch64-linux-gnu-gcc"
_PAGE = 1 << 12
_BASE, _STACK, _RETURN = 0x2000_0000_0000, 0x2100_0000_0000, 0x2200_0000_0000  # where no process has anything
_STACK_SIZE = 1 << 22

_SERIAL = """
#include <stddef.h>
#include "threads.h"
void pb_parallel(pb_task task, const void *context, int64_t items, int threads) {
    (void)threads;
    for (int64_t i = 0; i < items; i++) task(context, i);
}
static _Alignas(64) char memory[2][1 << 24], heap[1 << 24];
void *pb_thread_memory(int use, int64_t bytes) { return bytes <= 1 << 24 ? memory[use] : NULL; }
void *malloc(size_t bytes) { return bytes <= sizeof heap ? heap : NULL; } /* nobody has two */
void free(void *p) { (void)p; }
void *memcpy(void *to, const void *from, size_t n) {
    for (size_t i = 0; i < n; i++) ((volatile char *)to)[i] = ((const char *)from)[i];
    return to;
}
void *memmove(void *to, const void *from, size_t n) {
    if ((char *)to < (char *)from) return memcpy(to, from, n);
    while (n--) ((volatile char *)to)[n] = ((const char *)from)[n];
    return to;
}
void *memset(void *to, int value, size_t n) {
    for (size_t i = 0; i < n; i++) ((volatile char *)to)[i] = (char)value;
    return to;
}
void _start(void) {}
"""


class EmulatedLibrary:
    """Functions by name, with the argument types of ``_SIGNATURES``; folder: for the files that are compiled."""

    def __init__(self, folder: Path) -> None:
        import unicorn
        from unicorn import arm64_const as registers

        self._registers = registers
        image = self._compile(folder)
        self._machine = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self._machine.reg_write(registers.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # vector registers
        for address, size, content in _segments(image.read_bytes()):
            start, end = address // _PAGE * _PAGE, -(-(address + size) // _PAGE) * _PAGE
            self._machine.mem_map(start, end - start)
            self._machine.mem_write(address, content)
        self._machine.mem_map(_STACK, _STACK_SIZE)
        self._machine.mem_map(_RETURN, _PAGE)
        self._lent: set[int] = set()
        missing = unicorn.UC_HOOK_MEM_READ_UNMAPPED | unicorn.UC_HOOK_MEM_WRITE_UNMAPPED
        self._machine.hook_add(missing, self._lend)
        symbols = subprocess.run(
            ["aarch64-linux-gnu-nm", image], check=True, capture_output=True, text=True
        ).stdout
        self._addresses = {
            name: int(address, 16) for address, _, name in map(str.split, symbols.splitlines())
        }

    def _compile(self, folder: Path) -> Path:
        source, image = folder / "serial.c", folder / "kernels"
        source.write_text(_SERIAL)
        sources = Path(next(iter(kernels.__path__)))
        files = [path for path in sorted(sources.glob("*.c")) if path.name != "threads.c"]
        flags = [flag for flag in FLAGS if flag not in ("-fPIC", "-pthread")]
        alone = ["-static", "-nostdlib", "-fno-stack-protector", "-fno-tree-loop-distribute-patterns"]
        command = [
            COMPILER,
            *flags,
            *alone,
            f"-Wl,-Ttext-segment={_BASE}",
            f"-I{sources}",
            *files,
            source,
            "-lgcc",
        ]
        subprocess.run([*command, "-o", image], check=True)
        return image

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


def _segments(image: bytes) -> list[tuple[int, int, bytes]]:
    """[(address, bytes in memory, content)] of an ELF file."""
    (table,), (size, count) = struct.unpack_from("<Q", image, 32), struct.unpack_from("<HH", image, 54)
    found = []
    for i in range(count):
        kind, _, offset, address, _, in_file, in_memory, _ = struct.unpack_from(
            "<IIQQQQQQ", image, table + i * size
        )
        if kind == 1:
            found.append((address, in_memory, image[offset : offset + in_file]))
    return found
