"""Build the wheels that bring the compiled kernels, for every platform from any one, and the sdist.

    pip install 'setuptools>=77' wheel 'ziglang>=0.15'
    python scripts/build_wheels.py                   # all of them, into dist/
    python scripts/build_wheels.py linux-x86_64 --out wheels

zig compiles the C files for all platforms. Each library is looked at before it is packed: which symbol versions,
libraries and macOS it asks for, that nothing in it is undefined, and that it exports what is called.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from binaries import Needs, needs

from paged_backend.kernels.cpu.backend import _SIGNATURES
from paged_backend.kernels.cpu.build import FLAGS, c_files
from paged_backend.kernels.cpu.cores import usable_cores
from paged_backend.kernels.cpu.targets import PREFERENCE, TARGETS

ROOT = Path(__file__).resolve().parents[1]
GLIBC = (2, 17)
MACOS = (11, 0)
MOST_BYTES = 10_000_000  # of a wheel
_X86 = [name for name in PREFERENCE if name != "amx"]  # whose registers only Linux is asked for


@dataclass(frozen=True)
class Platform:
    """triple: what zig calls it. tags: of the wheel. libraries: what its system has, as a pattern."""

    triple: str
    tags: tuple[str, ...]
    suffix: str
    targets: Sequence[str]
    libraries: str
    flags: tuple[str, ...] = ()


_LINUX = r"lib(c|m|pthread|dl|rt)\.so\.\d|ld-linux-[a-z0-9-]+\.so\.\d"
_GLIBC = ".".join(map(str, GLIBC))
_DEFS = ("-Wl,-z,defs",)  # other linkers than that of ELF refuse undefined symbols without being told
_SYSTEM = r"/usr/lib/libSystem\.B\.dylib"
_DLLS = r"(?i)(kernel32|ntdll|api-ms-win-crt-[a-z0-9-]+)\.dll"


def _linux(machine: str, targets: Sequence[str]) -> Platform:
    tags = (f"manylinux_2_17_{machine}", f"manylinux2014_{machine}")
    # other linkers than that of ELF refuse undefined symbols without being told
    return Platform(f"{machine}-linux-gnu.{_GLIBC}", tags, ".so", targets, _LINUX, ("-Wl,-z,defs",))


PLATFORMS = {
    "linux-x86_64": _linux("x86_64", PREFERENCE),
    "linux-aarch64": _linux("aarch64", ["portable"]),
    "macos-arm64": Platform("aarch64-macos.11.0", ("macosx_11_0_arm64",), ".dylib", ["portable"], _SYSTEM),
    "macos-x86_64": Platform("x86_64-macos.11.0", ("macosx_11_0_x86_64",), ".dylib", _X86, _SYSTEM),
    "windows-x86_64": Platform("x86_64-windows-gnu", ("win_amd64",), ".dll", _X86, _DLLS),
}


class WheelError(Exception):
    """What was built is not what a wheel may hold."""


def compile_library(platform: Platform, target: str, folder: Path) -> Path:
    """The library of one target in ``folder``. Raises WheelError with the compiler's words, or what ``fault`` finds."""
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", platform.triple, *FLAGS]
    # LLVM otherwise makes two instructions of VNNI's product and sum, which costs a quarter of the speed of int8
    processor = "-mcpu=baseline+fast_dpwssd" if platform.triple.startswith("x86_64") else "-mcpu=baseline"
    with tempfile.TemporaryDirectory() as scratch:  # zig puts .pdb and .lib files beside a DLL
        objects = []
        for source in c_files():
            objects.append(str(Path(scratch) / f"{source.stem}.o"))
            _zig([*zig, processor, *TARGETS[target], "-c", str(source), "-o", objects[-1]])
        made = Path(scratch) / f"{target}{platform.suffix}"
        # what zig itself adds is not for the target, so that it is compiled once for all of them
        _zig([*zig, "-mcpu=baseline", *platform.flags, "-shared", "-s", *objects, "-o", str(made)])
        problem = fault(platform, needs(made))
        if problem:
            raise WheelError(f"{target} for {platform.triple} {problem}")
        return Path(shutil.copy(made, folder))


def _zig(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise WheelError(f"{' '.join(command)} failed:\n{done.stdout.strip()[-2000:]}")


def fault(platform: Platform, found: Needs) -> str | None:
    """Why a library may not go into the platform's wheel."""
    strange = [name for name in found.libraries if not re.fullmatch(platform.libraries, name)]
    if strange:
        return f"needs {', '.join(sorted(strange))}"
    if found.unbound:
        return f"does not define {', '.join(sorted(found.unbound))}"
    late = [name for name in found.versions if not _old_enough(name)]
    if late:
        return f"needs {', '.join(sorted(late))}, and the wheel promises to run with glibc {_GLIBC}"
    if found.minimum_os is not None and found.minimum_os > MACOS:
        return f"needs macOS {found.minimum_os}, and the wheel promises to run with {MACOS}"
    missing = {*_SIGNATURES, "pb_instruction_sets"} - found.exports
    return f"does not export {', '.join(sorted(missing))}" if missing else None


def _old_enough(version: str) -> bool:
    name, _, number = version.partition("_")
    return name == "GLIBC" and tuple(map(int, number.split("."))) <= GLIBC


def build_sdist(out: Path) -> Path:
    """Of the files as they are here, those that git does not ignore; the checkout gets no build folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    with tempfile.TemporaryDirectory() as scratch:
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (Path(scratch) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, Path(scratch) / name)
        return _backend("sdist", Path(scratch), out)


def _backend(kind: str, tree: Path, out: Path) -> Path:
    """What setuptools builds of ``tree``, in ``out``."""
    code = f"import sys, setuptools.build_meta as b; print(b.build_{kind}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise WheelError(f"the {kind} does not build:\n{(done.stdout + done.stderr).strip()[-2000:]}")
    return out / done.stdout.split()[-1]


def build_pure_wheel(sdist: Path, out: Path) -> Path:
    """The wheel of an sdist, which brings no libraries."""
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        return _backend("wheel", next(Path(scratch).iterdir()), out)


def add_libraries(wheel: Path, platform: Platform, libraries: Sequence[Path], out: Path) -> Path:
    """The platform's wheel: what is in ``wheel`` and the libraries."""
    with tempfile.TemporaryDirectory() as scratch:
        _wheel("unpack", str(wheel), "--dest", scratch)
        (tree,) = Path(scratch).iterdir()
        folder = tree / "paged_backend" / "kernels" / "cpu" / "prebuilt"
        folder.mkdir()
        for library in libraries:
            shutil.copy(library, folder)
        (facts,) = tree.glob("*.dist-info/WHEEL")
        kept = [
            line for line in facts.read_text("utf-8").splitlines() if not line.startswith(("Tag:", "Root-"))
        ]
        tags = [f"Tag: py3-none-{tag}" for tag in platform.tags]
        facts.write_text("\n".join([*filter(None, kept), "Root-Is-Purelib: false", *tags, ""]), "utf-8")
        packed = Path(scratch) / "packed"
        packed.mkdir()
        _wheel("pack", str(tree), "--dest-dir", str(packed))
        (made,) = packed.iterdir()
        if made.stat().st_size > MOST_BYTES:
            raise WheelError(f"{made.name} has {made.stat().st_size} bytes, more than {MOST_BYTES}")
        return Path(shutil.copy(made, out))


def _wheel(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "wheel", *arguments], check=True, stdout=subprocess.DEVNULL)


def build_wheels(names: Sequence[str], out: Path) -> list[Path]:
    """The sdist and the wheels of these platforms, as many libraries compiled at once as there are cores."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(usable_cores()) as pool:
        waiting = {}
        for name in names:
            (Path(scratch) / name).mkdir()
            waiting[name] = [
                pool.submit(compile_library, PLATFORMS[name], target, Path(scratch) / name)
                for target in PLATFORMS[name].targets
            ]
        sdist = build_sdist(out)
        pure = build_pure_wheel(sdist, Path(scratch))
        try:
            return [sdist] + [
                add_libraries(pure, PLATFORMS[name], [library.result() for library in libraries], out)
                for name, libraries in waiting.items()
            ]
        finally:
            pool.shutdown(cancel_futures=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Build wheels with the compiled kernels inside, and the sdist."
    )
    parser.add_argument(
        "platforms", nargs="*", metavar="PLATFORM", help=f"of {', '.join(PLATFORMS)}; all of them"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder to put them in (dist)")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.platforms if name not in PLATFORMS]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(PLATFORMS)}")
    try:
        for path in build_wheels(arguments.platforms or list(PLATFORMS), arguments.out):
            print(f"{path}  {path.stat().st_size / 1e6:.2f} MB")
    except WheelError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
