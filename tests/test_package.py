"""The package as it is installed: light to import, and no trouble for the packages beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def python(code: str, cwd: Path | str = ROOT, **environment: str) -> str:
    """Output of a fresh interpreter. With -c, Python puts its working directory first on sys.path."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_no_heavy_library():
    code = (
        "import sys, paged_backend\n"
        "paged_backend.SamplingParams(temperature=0), paged_backend.EngineConfig('demo'), paged_backend.RequestOutput\n"
        "print({'torch', 'transformers', 'numpy', 'tokenizers', 'tqdm', 'typer'} & set(sys.modules))"
    )
    assert python(code) == "set()"


def test_cache_and_bench_traces_need_no_torch():
    code = (
        "import sys, paged_backend.cache.manager, paged_backend.bench.traces, benchmarks.memory.contiguous\n"
        "print('torch' in sys.modules)"
    )
    assert python(code) == "False"


def test_every_public_name_can_be_imported():
    code = "import paged_backend as p; print([n for n in p.__all__ if getattr(p, n, None) is None])"
    assert python(code) == "[]"


def test_an_unknown_name_is_an_attribute_error():
    import paged_backend

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = paged_backend.nonsense


def test_the_root_folders_are_not_importable_as_top_level_packages(tmp_path):
    code = (
        "from importlib.util import find_spec\n"
        "import paged_backend.kernels, paged_backend.adapters\n"
        "for name in ('kernels', 'adapters'):\n"
        "    spec = find_spec(name)\n"
        f"    assert spec is None or {str(ROOT)!r} not in str(spec.origin), spec\n"
    )
    python(code, cwd=tmp_path)


def test_transformers_models_import_from_the_root_folder():
    python("from transformers import LlamaForCausalLM")


def test_transformers_finds_the_real_kernels_package_past_our_folder(tmp_path):
    """With a package ``kernels`` installed in the range that transformers accepts, it imports names from it when a
    model module loads; found from the repository root, our folder of that name must hand over to it."""
    wanted = python(
        "from transformers.utils.import_utils import KERNELS_MIN_VERSION; print(KERNELS_MIN_VERSION)"
    )
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text(
        "class Stand:\n"
        "    def __init__(self, *args, **kwargs): pass\n"
        "    def __call__(self, *args, **kwargs): return Stand()\n"
        "    def __getattr__(self, name): return Stand()\n"
        "STAND_IN = True\n"
        "def __getattr__(name):\n"
        "    if name.startswith('__'): raise AttributeError(name)\n"
        "    return Stand\n"
    )
    info = tmp_path / f"kernels-{wanted}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {wanted}\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\n")
    code = (
        "from transformers.utils.import_utils import is_kernels_available\n"
        "assert is_kernels_available()\n"
        "from transformers import LlamaForCausalLM\n"
        "import kernels, paged_backend.kernels\n"
        "print(kernels.STAND_IN, kernels is not paged_backend.kernels)\n"
    )
    assert python(code, PYTHONPATH=str(tmp_path), USE_HUB_KERNELS="0") == "True True"


def test_what_an_extra_brings_is_asked_for_in_one_line_and_a_module_of_ours_that_is_missing_is_no_extra():
    from paged_backend.errors import MissingExtraError, missing_extra

    wanted = r"^this needs no_such_package: pip install 'paged-backend\[torch\]'$"
    with pytest.raises(MissingExtraError, match=wanted), missing_extra("torch", "this"):
        import no_such_package  # noqa: F401
    with pytest.raises(ModuleNotFoundError), missing_extra("torch", "this"):
        import paged_backend.no_such_module  # noqa: F401


def test_every_folder_of_modules_is_installed():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {
        "adapters": "paged_backend.adapters",
        "kernels": "paged_backend.kernels",
        "paged_backend": "paged_backend",
    }
    found = {
        ".".join((package, *file.parent.relative_to(ROOT / folder).parts))
        for folder, package in folders.items()
        for file in (ROOT / folder).rglob("*.py")
    }
    assert found == set(settings["packages"])
