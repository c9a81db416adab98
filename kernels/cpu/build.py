"""Compile the C kernels at first use into the user's cache folder.

The library's name holds a hash of the sources, the compiler, the flags and the CPU's features, so a new version,
compiler or machine gets its own file. It is written beside its final name and renamed: concurrent starts may
compile twice but never see half a file. It is not linked to OpenMP or to torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from paged_backend.errors import BackendUnavailableError

_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-pthread",
)

_NATIVE = (
    ("-march=native",) if platform.machine().lower() in ("x86_64", "amd64", "i686") else ("-mcpu=native",)
)

# for a machine whose operating system does not hand out the registers of the matrix unit that its CPU has
WITHOUT_MATRIX_UNIT = (*_NATIVE, "-mno-amx-tile")


class KernelBuildError(BackendUnavailableError):
    """The C kernels cannot be compiled or loaded here; the message says why and names the fix."""


def cache_dir() -> Path:
    """Folder of compiled kernels: ``PAGED_BACKEND_CACHE``, else ``paged_backend`` under the user's cache folder."""
    own = os.environ.get("PAGED_BACKEND_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paged_backend"


def build(extra_flags: tuple[str, ...] | None = None) -> Path:
    """Path of the compiled library, compiling it if it is not in the cache.

    extra_flags: which instruction set to compile for; None takes the machine's own.
    """
    library = library_path(extra_flags)
    if not library.exists():
        _compile(find_compiler(), _flags(extra_flags), [p for p in _sources() if p.suffix == ".c"], library)
    return library


def library_path(extra_flags: tuple[str, ...] | None = None) -> Path:
    """Where :func:`build` puts the library for these sources and flags, this compiler and machine."""
    return cache_dir() / f"kernels-{_key(find_compiler(), _flags(extra_flags), _sources())}.so"


def _flags(extra_flags: tuple[str, ...] | None) -> tuple[str, ...]:
    return _FLAGS + (_NATIVE if extra_flags is None else extra_flags)


def _sources() -> list[Path]:
    return sorted(p for p in Path(__file__).parent.iterdir() if p.suffix in (".c", ".h"))


def find_compiler() -> list[str]:
    """The command ``CC`` names, else the first of cc, gcc and clang."""
    chosen = os.environ.get("CC")
    for candidate in [chosen] if chosen else ["cc", "gcc", "clang"]:
        command = shlex.split(candidate)
        path = shutil.which(command[0])
        if path:
            return [path, *command[1:]]
    where = f"CC={chosen!r} names no program" if chosen else "there is no cc, gcc or clang on PATH"
    raise KernelBuildError(f"{where}; install a C compiler (for instance `apt install gcc`) or set CC to one")


def _key(compiler: list[str], flags: tuple[str, ...], sources: list[Path]) -> str:
    stat = os.stat(os.path.realpath(compiler[0]))
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


def _compile(compiler: list[str], flags: tuple[str, ...], sources: list[Path], library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as folder:
            objects = [str(Path(folder) / f"{p.stem}.o") for p in sources]
            commands = [[*compiler, *flags, "-c", str(p), "-o", o] for p, o in zip(sources, objects)]
            _run(commands)
            shared = str(Path(folder) / library.name)
            _run([[*compiler, *flags, "-shared", *objects, "-o", shared]])
            os.replace(shared, library)
    except OSError as error:
        raise KernelBuildError(
            f"cannot write compiled kernels to {library.parent} ({error}); set PAGED_BACKEND_CACHE to a writable folder"
        ) from error


def _run(commands: list[list[str]]) -> None:
    """Run compiler commands side by side; raise with the first failing one's output."""
    running = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands
    ]
    outputs = [process.communicate()[0] for process in running]
    for command, process, output in zip(commands, running, outputs):
        if process.returncode:
            detail = output.strip()[-800:] or f"exit status {process.returncode}"
            raise KernelBuildError(
                f"`{shlex.join(command)}` failed; install or set CC to a working C compiler:\n{detail}"
            )
