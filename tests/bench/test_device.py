"""The device benchmark as far as it runs without a GPU: its checks, its random model, its commands."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs: pip install 'paged-backend[triton]'")


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, where Triton compiles instead of interpreting."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "paged_backend.cli", "bench", *arguments],
        env={**env, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_so_and_succeeds() -> None:
    done = command("device")
    assert done.returncode == 0
    assert "no GPU" in done.stdout


@needs_triton
def test_the_checks_pass_in_the_interpreter_and_notice_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from paged_backend.kernels.triton.backend import TritonKernels

    from paged_backend.bench.device_checks import TINY, check_kernels

    kernels = TritonKernels("cpu", "float32")
    checks = list(check_kernels(kernels, TINY))
    assert [check for check in checks if not check.passed] == []
    assert len({check.name for check in checks}) == len(checks) > 20

    def crash(*_: object) -> None:
        raise RuntimeError("misaligned address")

    monkeypatch.setattr(kernels, "act_and_mul", lambda x, activation: x[:, : x.shape[1] // 2])
    monkeypatch.setattr(kernels, "paged_attention", crash)
    failed = {check.name.split()[0] for check in check_kernels(kernels, TINY) if not check.passed}
    assert failed == {"silu", "gelu", "gelu_tanh", "attention"}


@needs_triton
def test_a_model_with_random_weights_is_measured() -> None:
    from paged_backend.bench.device import LLAMA_8B, Report, measure_engine

    report = Report("interpreter")
    small = {**LLAMA_8B, "vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    measure_engine(report, small, (1, 2), 4, 3, device="cpu", kernels="triton", num_blocks=20)
    assert len(report.rows) == 6
    assert all(value > 0 for _, value, _ in report.rows)
    assert json.loads(json.dumps(report.as_data()))["figures"][0]["unit"] == "tok/s"


@needs_triton
def test_the_compile_table_of_one_target_and_what_it_says_of_it(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    done = command(
        "kernels", "--quick", "--target", "sm_90", "--json", str(file), TRITON_CACHE_DIR=str(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads(file.read_text())
    assert {row["kernel"] for row in table} == {
        "attention", "attention_merge", "rms_norm", "act_and_mul", "rotary_and_cache", "int_matmul", "copy_blocks",
        "sample",
    }  # fmt: skip
    assert all(row["spills"] == 0 and row["registers"] > 8 for row in table)
    assert max(row["shared"] for row in table) > 32 << 10
    assert "0 that spill or do not fit" in done.stdout


@needs_triton
def test_what_cannot_be_compiled_is_named() -> None:
    assert "sm_91" in command("kernels", "--target", "sm_91").stderr
    assert "unset it" in command("kernels", TRITON_INTERPRET="1").stderr


@needs_triton
def test_a_spill_and_too_much_shared_memory_do_not_fit() -> None:
    code = (
        "from paged_backend.kernels.triton.aot import Compiled\n"
        "one = lambda shared, spills: Compiled('', '', 'sm_80', 4, 255, shared, spills).fits\n"
        "assert one(166912, 0) and not one(166913, 0) and not one(0, 4)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=120)


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_every_configuration_compiles_without_a_spill(tmp_path: Path, target: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "paged_backend.cli", "bench", "kernels", "--target", target],
        env={**env, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
