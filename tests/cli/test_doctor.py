"""``paged-backend doctor``."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from paged_backend.cli import app
from paged_backend.commands import doctor


def test_json_names_versions_cpu_threads_kernels_memory_and_the_demo_model():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == (1 if report["problems"] else 0)
    assert set(report) == {"versions", "cpu", "threads", "kernels", "memory", "demo", "warnings", "problems"}
    assert report["versions"]["torch"] is not None
    assert report["cpu"]["usable_cores"] >= 1
    assert report["threads"]["torch"] >= 1


def test_build_compiles_the_kernels_into_the_cache(tmp_path, monkeypatch):
    from paged_backend.kernels.cpu.build import KernelBuildError, find_compiler

    try:
        find_compiler()
    except KernelBuildError:
        pytest.skip("no C compiler here")
    monkeypatch.setenv("PAGED_BACKEND_CACHE", str(tmp_path))
    before = doctor.examine()["kernels"]
    assert before["built"] is False
    assert not list(tmp_path.iterdir())
    after = doctor.examine(build=True)["kernels"]
    assert (after["built"], after["in_use"]) == (True, "c")
    assert [str(p) for p in tmp_path.glob("*.so")] == [after["library"]]


def test_without_a_compiler_it_says_which_kernels_are_used_and_how_to_mend_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGED_BACKEND_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    report = doctor.examine(build=True)
    assert report["kernels"]["in_use"] == "reference"
    assert any("no-such-compiler" in warning for warning in report["warnings"])


def test_two_openmp_runtimes_are_a_warning(monkeypatch):
    # vllm issues 10971, 43240: two OpenMP pools on the same cores
    maps = [
        f"7f00-7f01 r-xp 00000000 08:01 42  /lib/{name}\n"
        for name in ("libgomp-a34b.so.1", "libiomp5.so", "libm.so.6")
    ]
    monkeypatch.setattr(doctor, "_lines", lambda path: iter(maps if path == "/proc/self/maps" else ()))
    warnings: list[str] = []
    assert doctor._threads(warnings)["openmp"] == ["/lib/libgomp-a34b.so.1", "/lib/libiomp5.so"]
    assert any("2 OpenMP runtimes" in warning for warning in warnings)


def test_the_report_for_people_has_every_section(monkeypatch):
    monkeypatch.setattr(doctor, "_demo", lambda warnings: {"path": None})
    result = CliRunner().invoke(app, ["doctor"])
    for section in ("versions", "cpu", "threads", "kernels", "memory", "demo"):
        assert f"\n{section}\n" in result.stdout
