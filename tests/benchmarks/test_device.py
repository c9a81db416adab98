"""The device benchmark as far as it runs without a GPU: its checks, its random model, its commands."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs: pip install 'paged-backend[triton]'")


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, where Triton compiles instead of interpreting."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
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
    from benchmarks.device.checks import TINY, check_kernels
    from paged_backend.kernels.triton.backend import TritonKernels

    kernels = TritonKernels("cpu", "float32")
    checks = list(check_kernels(kernels, TINY))
    assert [check for check in checks if not check.passed] == []
    assert len({check.name for check in checks}) == len(checks) > 20

    def crash(*_: object) -> None:
        raise RuntimeError("misaligned address")

    def sample(logits: torch.Tensor, **columns: torch.Tensor) -> torch.Tensor:
        return TritonKernels.sample(kernels, logits / 2, **columns)

    monkeypatch.setattr(kernels, "act_and_mul", lambda x, activation: x[:, : x.shape[1] // 2])
    monkeypatch.setattr(kernels, "paged_attention", crash)
    monkeypatch.setattr(kernels, "sample", sample)
    failed = {check.name.split()[0] for check in check_kernels(kernels, TINY) if not check.passed}
    assert failed == {"silu", "gelu", "gelu_tanh", "attention", "sample"}


@needs_triton
def test_checks_get_the_same_inputs_every_time() -> None:
    from benchmarks.device.checks import TINY, checks
    from paged_backend.kernels.triton.backend import TritonKernels

    kernels = TritonKernels("cpu", "float32")
    named = dict(checks(kernels, TINY))
    torch.manual_seed(1)
    first = named["rms_norm"]().error
    named["silu and mul"]()
    torch.manual_seed(2)
    assert named["rms_norm"]().error == first > 0


@needs_triton
def test_a_token_is_right_if_the_noise_falls_into_its_part_of_what_is_kept() -> None:
    from benchmarks.device.draws import nearest

    logits = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64).log()
    row = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "noise": 0.45}
    assert nearest(logits, 1, row) == 0.45
    assert nearest(logits, 0, row) == pytest.approx(0.1)
    assert nearest(logits, 2, row) == pytest.approx(0.5)
    assert math.isnan(nearest(logits, -1, row))
    nucleus = row | {"top_p": 0.6}  # 0.4 and 0.3, which make 4 and 3 sevenths
    assert nearest(logits, 2, nucleus) == pytest.approx(4 / 7)
    assert math.isnan(nearest(logits, 3, nucleus))
    assert nearest(logits, 2, row | {"top_k": 2}) == pytest.approx(4 / 7)
    assert math.isnan(nearest(logits, 0, row | {"min_p": 0.3}))
    greedy = row | {"temperature": 0.0}
    assert nearest(logits, 1, greedy) == 0.45
    assert math.isnan(nearest(logits, 2, greedy))


@needs_triton
def test_of_some_dtypes_few_head_shapes_are_checked_and_what_is_left_out_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks.device import checks as device_checks
    from benchmarks.device.report import Report

    def operations(kernels: object, sizes: Any) -> Any:
        for heads in sizes.heads:
            yield f"attention {heads}", lambda random: (random.normal(4), random.normal(4).double())

    monkeypatch.setattr(device_checks, "_operations", operations)
    sizes = device_checks.Sizes(2, 32, 32, (3,), 20, ((1, 1, 16), (2, 1, 16), (3, 1, 16)))
    report = Report("interpreter")
    device_checks.check_all(report, device="cpu", sizes=sizes)
    assert [name.split(":")[0] for name in report.checks_failed] == [
        f"attention {heads} {dtype}"
        for dtype, count in (("bfloat16", 3), ("float16", 2), ("float32", 2))
        for heads in sizes.heads[:count]
    ]
    assert [note.split(":")[0] for note in report.notes] == ["float16", "float32"]
    assert all("(3, 1, 16)" in note for note in report.notes)

    late = Report("interpreter")
    device_checks.check_all(late, 0.0, "cpu", sizes)
    assert late.checks_failed == []
    assert "bfloat16: 3 checks left out" in late.notes[0]


@needs_triton
def test_a_check_that_costs_the_gpu_ends_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.device import checks as device_checks
    from benchmarks.device.report import Report
    from paged_backend.kernels.triton.backend import TritonKernels

    def crash(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(TritonKernels, "rms_norm", crash)
    monkeypatch.setattr(device_checks, "still_works", lambda: False)
    report = Report("interpreter")
    device_checks.check_all(report, device="cpu", sizes=device_checks.TINY)
    assert report.checks_passed == 0
    assert len(report.checks_failed) == 1
    assert "illegal memory access" in report.checks_failed[0]


@needs_triton
def test_attention_is_timed_as_a_share_of_what_the_device_can_do() -> None:
    from benchmarks.device.attention import measure_attention, measure_ceilings
    from benchmarks.device.report import Report
    from paged_backend.kernels.triton.backend import TritonKernels

    report = Report("interpreter")
    kernels = TritonKernels("cpu", "float32")
    measure_attention(report, kernels=kernels, decodes=[(2, 20)], prefills=[], cold=1)
    assert [unit for _, _, unit in report.rows] == ["us"], "no ceilings, no shares"
    measure_ceilings(report, "cpu", 1 << 12, 32)
    assert report.bandwidth > 0
    assert report.peak > 0
    measure_attention(report, kernels=kernels, decodes=[(1, 20)], prefills=[(1, 18)], cold=1 << 20)
    assert [unit for _, _, unit in report.rows[1:]] == [
        "TB/s", "TFLOP/s", "us", "% of copy bandwidth", "us", "% of bf16 matmul",
    ]  # fmt: skip
    assert all(value > 0 for _, value, _ in report.rows)
    measure_attention(report, 0.0, kernels, [(1, 20)], [])
    assert report.notes == ["decode attention, 1 x 20: left out, the time was used up"]


@needs_triton
def test_calls_go_round_more_memory_than_an_l2_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.device.attention import time_attention
    from paged_backend.kernels.triton.backend import TritonKernels

    kernels = TritonKernels("cpu", "float32")
    read: list[torch.Tensor] = []

    def attend(plan: object, q: object, cache: Any, *_: object) -> None:
        read.extend((cache.key, cache.value))

    monkeypatch.setattr(kernels, "paged_attention", attend)
    time_attention(kernels, 2, 1, 40, 10 << 20)
    assert len({tensor.data_ptr() for tensor in read}) == len(read)
    assert 10 << 20 <= sum(tensor.nbytes for tensor in read) < 12 << 20


def small_llama() -> dict[str, Any]:
    from benchmarks.device.engine import LLAMA_8B

    small = {**LLAMA_8B, "vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return small | {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}


@needs_triton
def test_a_model_with_random_weights_is_measured() -> None:
    from benchmarks.device.engine import measure_engine
    from benchmarks.device.report import Report

    told: list[str] = []
    report = Report("interpreter", told.append, bandwidth=1e12, peak=1e15)
    options: dict[str, Any] = {"device": "cpu", "kernels": "triton", "num_blocks": 20}
    measure_engine(report, float("inf"), small_llama(), (1, 2), 4, 3, 5, **options)
    one = ["tok/s", "ms", "ms", "ms"]
    assert [unit for _, _, unit in report.rows] == [
        *one, "% of the roofline", *one, "% of the roofline", "ms", "% of bf16 matmul", *one,
    ]  # fmt: skip
    assert all(value > 0 for _, value, _ in report.rows)
    assert [line.split("  ")[0].strip() for line in told] == [what for what, _, _ in report.rows]
    assert "not launched ahead" in told[-1]
    assert json.loads(json.dumps(report.as_data()))["figures"][0]["unit"] == "tok/s"

    late = Report("interpreter")
    measure_engine(late, 0.0, small_llama(), (1, 2), 4, 3, 5, **options)
    assert late.rows == []
    assert len(late.notes) == 3


def scripted_engine() -> Any:
    """An engine without a model."""
    from paged_backend.config import EngineConfig
    from paged_backend.engine.engine import Engine
    from paged_backend.testing import scripted_core

    return Engine(scripted_core(prefix_caching=False), None, EngineConfig("scripted"))


@needs_triton
def test_what_steps_and_prompts_cost_at_least_is_counted_as_the_page_on_gpus_does() -> None:
    from benchmarks.device.engine import prefill_work, random_checkpoint, weight_bytes
    from paged_backend.kernels.triton.backend import TritonKernels
    from paged_backend.models.architectures import spec_from_config
    from paged_backend.models.decoder import Decoder

    kernels = TritonKernels("cpu", "float32")
    for tied in (False, True):
        config = small_llama() | {"num_hidden_layers": 2, "tie_word_embeddings": tied}
        checkpoint = random_checkpoint(config, kernels.torch_device)
        decoder = Decoder(spec_from_config(config), checkpoint.tensors, kernels)
        layer = {"qkv": 16 * 32, "rest": 16 * 16 + 3 * 16 * 16}
        assert weight_bytes(decoder) == 4 * (2 * sum(layer.values()) + 50 * 16)
        products = 7 * (2 * layer["qkv"] + layer["rest"]) + layer["rest"] + 50 * 16
        assert prefill_work(decoder, 7) == 2 * products + 2 * 2 * 2 * 8 * 7 * 8


def test_steps_in_which_everybody_decodes_are_told_from_those_with_prompts() -> None:
    from benchmarks.device.engine import run_requests

    with scripted_engine() as engine:
        assert run_requests(engine, 3, 5, 4).step is not None
        assert run_requests(engine, 3, 5, 1).step is None
        assert "step" not in vars(engine._core)


def test_the_demo_model_is_measured_or_its_absence_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.device.engine import measure_demo
    from benchmarks.device.report import Report
    from paged_backend.engine import registry
    from paged_backend.errors import ModelLoadError

    def missing(*_: object, **__: object) -> None:
        raise ModelLoadError("install it first")

    monkeypatch.setattr(registry, "get_engine", lambda *_, **__: scripted_engine())
    report = Report("scripted")
    measure_demo(report, batches=(1, 2), length=5)
    assert len(report.rows) == 8
    monkeypatch.setattr(registry, "get_engine", missing)
    measure_demo(report)
    assert report.notes == ["demo model: left out, install it first"]
    assert not report.failed


@needs_triton
def test_what_a_stage_finds_is_told_and_saved_before_the_next_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks.device import run
    from benchmarks.device.report import Report
    from benchmarks.device.run import Stage, run_stages

    events: list[str] = []

    def stage(name: str) -> Stage:
        return Stage(name, lambda report, deadline: report.add(f"row of {name}", 1.0, "s"), 0)

    def crash(report: Report, deadline: float) -> None:
        report.add("row before the error", 1.0, "s")
        raise RuntimeError("out of\nmemory")

    stages = [stage("a"), Stage("crash", crash, 0), Stage("too long", crash, 1e9), stage("b")]
    now = time.monotonic()
    report = Report("none", events.append)
    run_stages(report, stages, now + 1000, lambda r: events.append(f"saved {len(r.rows)}"))
    assert [event.split("  ")[0].strip().split(" (")[0] for event in events] == [
        "a", "row of a", "saved 1",
        "crash", "row before the error", "ERROR", "saved 2",
        "too long: left out, the time was used up",
        "b", "row of b", "saved 3", "saved 3",
    ]  # fmt: skip
    assert report.errors == ["crash: RuntimeError: out of memory"]
    assert report.failed

    monkeypatch.setattr(run, "still_works", lambda: False)
    lost = Report("none")
    saved: list[int] = []
    run_stages(lost, stages, now + 1000, lambda r: saved.append(len(r.rows)))
    assert saved == [1], "nothing is run on a GPU that does not answer"
    assert lost.failed


@needs_triton
@pytest.mark.parametrize("bad", [False, True])
def test_the_command_prints_and_writes_what_is_known_and_fails_if_anything_did(
    bad: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import typer
    from typer.testing import CliRunner

    from benchmarks.device import commands, run
    from benchmarks.device.report import Report

    def bench(seconds: float, tell: Any, save: Any) -> Report:
        report = Report("a card", tell)
        report.add("copy bandwidth", 4.3, "TB/s")
        save(report)
        if bad:
            report.fail("the GPU does not answer")
        return report

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "run_device_bench", bench)
    app = typer.Typer()
    commands.register(app)
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(app, ["device", "--json", str(file)])
    assert result.exit_code == bad
    assert "4.3  TB/s" in result.stdout
    assert json.loads(file.read_text())["figures"][0]["value"] == 4.3


@needs_triton
def test_the_compile_table_of_one_target_and_what_it_says_of_it(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    done = command(
        "kernels", "--quick", "--target", "sm_90", "--json", str(file), TRITON_CACHE_DIR=str(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads(file.read_text())
    assert {row["kernel"] for row in table} >= {
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
        [sys.executable, "-m", "benchmarks", "kernels", "--target", target],
        env={**env, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
