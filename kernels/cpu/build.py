"""The library of C kernels: what the wheel brings, else compiled at first use into the user's cache folder.

The compiled library's name holds a hash of the sources, the compiler, the flags and the CPU's features, so a new
version, compiler or machine gets its own file. It is written beside its final name and renamed, so nobody sees half a
file. Of concurrent starts one compiles and the others wait for it; where files cannot be locked, each compiles. It is
not linked to OpenMP or to torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from paged_backend.folders import user_cache
from paged_backend.kernels.cpu.cores import usable_cores
from paged_backend.kernels.cpu.prebuilt import prebuilt
from paged_backend.kernels.cpu.targets import TARGETS, KernelBuildError, chosen_target

try:
    import fcntl
except ImportError:  # a system without it
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-pthread",
)
"""What every compiler gets, whatever it compiles for."""

LOCK_PATIENCE = 300.0
"""Seconds to wait for another process that compiles, before compiling beside it."""

_LEFTOVER_AGE = 3600.0  # seconds after which the folder of a build that was killed is removed


def cache_dir() -> Path:
    """Folder of compiled kernels: ``PAGED_BACKEND_CACHE``, else ``paged_backend`` under the user's cache folder.

    Raises KernelBuildError if there is no safe place.
    """
    own = os.environ.get("PAGED_BACKEND_CACHE")
    if own:
        return Path(own)
    try:
        return user_cache() / "paged_backend"
    except OSError as error:
        raise KernelBuildError(f"no folder for compiled kernels: {error}; set PAGED_BACKEND_CACHE") from error


def build(extra_flags: tuple[str, ...] | None = None) -> Path:
    """Path of the library: that which the wheel brings, else the compiled one, compiling it if it is not in the cache.

    extra_flags: which instruction set to compile for; None takes that of ``PAGED_BACKEND_TARGET`` (see ``TARGETS``), or
    what suits the processor. ``native`` is always compiled here.
    """
    library = library_path(extra_flags)
    try:
        if library.exists():
            return library
        library.parent.mkdir(parents=True, exist_ok=True)
        with _alone(library.parent / "build.lock"):
            if not library.exists():
                _sweep(library.parent)
                logger.warning("compiling the kernels, once, about 10 s")
                compiler = find_compiler()
                _compile(compiler, _flags(compiler, extra_flags), c_files(), library)
    except OSError as error:
        raise _unwritable(library.parent, error) from error
    return library


def check() -> None:
    """Raise the KernelBuildError that :func:`build` would end in: no place to write, or no compiler that works."""
    if prebuilt(chosen_target()):
        return
    folder = cache_dir()
    try:
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryDirectory(prefix="build-", dir=folder):
            pass
    except OSError as error:
        raise _unwritable(cache_dir(), error) from error
    with tempfile.TemporaryDirectory() as scratch:
        source, shared = Path(scratch) / "empty.c", Path(scratch) / "empty.so"
        source.touch()
        compiler = find_compiler()
        _run([[*compiler, *_flags(compiler, None), "-shared", str(source), "-o", str(shared)]])
        if not shared.exists():
            raise KernelBuildError(f"{shlex.join(compiler)} compiles nothing: set CC to a working C compiler")


def library_path(extra_flags: tuple[str, ...] | None = None) -> Path:
    """Where :func:`build` finds the library, or puts it for these sources and flags, this compiler and machine."""
    ready = prebuilt(chosen_target()) if extra_flags is None else None
    if ready is not None:
        return ready
    compiler = find_compiler()
    return cache_dir() / f"kernels-{_key(compiler, _flags(compiler, extra_flags), _sources())}.so"


def _flags(compiler: list[str], extra_flags: tuple[str, ...] | None) -> tuple[str, ...]:
    if extra_flags is None:
        extra_flags = TARGETS[chosen_target() or "native"]
    if not extra_flags and _is_zig(compiler):
        extra_flags = ("-mcpu=baseline",)  # which others take by default; zig takes the machine's own
    return FLAGS + extra_flags


def _sources() -> list[Path]:
    return sorted(p for p in Path(__file__).parent.iterdir() if p.suffix in (".c", ".h"))


def c_files() -> list[Path]:
    """What is compiled."""
    return [path for path in _sources() if path.suffix == ".c"]


def find_compiler() -> list[str]:
    """The command ``CC`` names, else the first of cc, gcc and clang, else the ``ziglang`` package of this Python."""
    chosen = os.environ.get("CC")
    for candidate in [chosen] if chosen else ["cc", "gcc", "clang"]:
        command = shlex.split(candidate)
        path = shutil.which(command[0])
        if path:
            return [path, *command[1:]]
    if chosen:
        where = f"CC={chosen!r} names no program; set CC to a C compiler, or unset it and"
    elif importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    else:
        where = "there is no C compiler: no cc, gcc or clang on PATH;"
    raise KernelBuildError(f"{where} `pip install ziglang`, which brings one")


def _is_zig(compiler: list[str]) -> bool:
    return compiler[-1] == "cc" and ("ziglang" in compiler or Path(compiler[0]).stem == "zig")


def _program(compiler: list[str]) -> str:
    """The file that another version of the compiler replaces: behind ``python -m ziglang`` that is not Python's."""
    package = importlib.util.find_spec("ziglang") if "ziglang" in compiler else None
    return os.path.realpath(package.origin if package and package.origin else compiler[0])


def _key(compiler: list[str], flags: tuple[str, ...], sources: list[Path]) -> str:
    stat = os.stat(_program(compiler))
    digest = hashlib.sha256()
    digest.update(repr((compiler, stat.st_size, stat.st_mtime_ns, flags, _cpu_features())).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:24]


def _cpu_features() -> str:
    """What the machine can execute, as far as the system tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.lower().startswith(("flags", "features")):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}"


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold ``lock``, which other processes and threads wait for; not where the file system has no locks."""
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # somebody else's file, or a folder that cannot be written: then compiling says so
        yield
        return
    try:
        _wait_for(handle)
        yield
    finally:
        os.close(handle)  # which also unlocks


def _wait_for(handle: int) -> None:
    if fcntl is None:
        return
    for attempt in range(int(LOCK_PATIENCE * 10)):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt == 0:
                logger.warning("another process is compiling the kernels: waiting for it")
            time.sleep(0.1)
        except OSError:  # no locks here, as on some network file systems
            return


def _sweep(folder: Path) -> None:
    """Remove what builds left that were killed."""
    for left in folder.glob("build-*"):
        if left.is_dir() and time.time() - left.stat().st_mtime > _LEFTOVER_AGE:
            shutil.rmtree(left, ignore_errors=True)


def _compile(compiler: list[str], flags: tuple[str, ...], sources: list[Path], library: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as folder:
        objects = [str(Path(folder) / f"{p.stem}.o") for p in sources]
        _run([[*compiler, *flags, "-c", str(p), "-o", o] for p, o in zip(sources, objects)])
        shared = str(Path(folder) / library.name)
        _run([[*compiler, *flags, "-shared", *objects, "-o", shared]])
        try:
            os.replace(shared, library)
        except PermissionError:
            if not library.exists():  # else Windows, where another process made it and has loaded it
                raise


def _run(commands: list[list[str]]) -> None:
    """Run compiler commands, as many at once as there are cores to use; raise with the first failing one's output."""
    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(_run_one, commands))


def _run_one(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        # the whole command has hundreds of characters of flags
        source = next((Path(part).name for part in command if part.endswith(".c")), "linking")
        detail = f":\n{done.stdout.strip()[-800:]}" if done.stdout.strip() else ""
        raise KernelBuildError(
            f"`{command[0]}` failed ({source}, exit status {done.returncode}); install or set CC to a working C "
            f"compiler{detail}"
        )


def _unwritable(folder: Path, error: OSError) -> KernelBuildError:
    return KernelBuildError(
        f"cannot write compiled kernels to {folder} ({error.strerror or error}); set PAGED_BACKEND_CACHE to a writable "
        "folder"
    )
