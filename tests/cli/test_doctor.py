"""``paged-backend doctor``."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from paged_backend.cli import doctor
from paged_backend.cli.app import app

SECTIONS = ("versions", "extras", "cpu", "threads", "gpu", "kernels", "memory", "demo")


def test_json_names_versions_cpu_threads_kernels_memory_and_the_demo_model():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == (1 if report["problems"] else 0)
    assert set(report) == {*SECTIONS, "warnings", "problems"}
    assert report["versions"]["numpy"] is not None
    assert report["versions"]["llguidance"] is not None
    extras = {"server", "langchain", "llama-index", "gguf", "bench", "huggingface", "triton", "compiler"}
    assert extras == set(report["extras"])
    assert report["cpu"]["usable_cores"] >= 1
    assert report["threads"]["torch"] >= 1
    assert 1 <= report["threads"]["kernels"] <= report["cpu"]["usable_cores"]


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


@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [("CC", "/bin/false", "CC"), ("PAGED_BACKEND_CACHE", "/proc/x", "PAGED_BACKEND_CACHE")],
)
def test_what_would_keep_the_kernels_from_being_compiled_is_a_warning(
    tmp_path, monkeypatch, variable, value, hint
):
    monkeypatch.setenv("PAGED_BACKEND_CACHE", str(tmp_path / "cache"))
    assert not any("kernels" in warning for warning in doctor.examine()["warnings"])
    monkeypatch.setenv(variable, value)
    report = doctor.examine()
    assert report["kernels"]["in_use"] == "reference"
    assert any("slow numpy kernels" in warning and hint in warning for warning in report["warnings"])


def test_an_extra_that_is_missing_is_named_with_its_install_command_and_is_no_problem(monkeypatch):
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "uvicorn" else real(name))
    report = doctor.examine()
    assert not report["problems"]
    assert "missing uvicorn: pip install 'paged-backend[server]'" in doctor._text(report)


def test_a_gpu_is_named(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    report = doctor.examine()
    assert report["gpu"]["names"] == ["NVIDIA H200"]
    assert "NVIDIA H200" in doctor._text(report)


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
    for section in SECTIONS:
        assert f"\n{section}\n" in result.stdout
