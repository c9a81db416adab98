"""C writes where it is told to, so whatever it is handed is looked at: the wrong array is named, nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from packing import pack
from tensors import OnTensors

from paged_backend.errors import ModelLoadError
from paged_backend.kernels.base import AttentionInputs
from paged_backend.kernels.cpu.backend import CpuKernels
from paged_backend.kernels.ggml import GGML_TYPES
from paged_backend.kernels.kv_cache import LayerCache
from paged_backend.kernels.weights import GGMLBlocks

HEADS, GROUPS, D, SIZE, BLOCKS, TOKENS, HIDDEN = 4, 2, 8, 16, 5, 3, 24


@pytest.fixture(scope="module")
def native() -> OnTensors:
    return OnTensors(CpuKernels(1))


def arguments(kernels: OnTensors) -> dict[str, dict[str, Any]]:
    """Right arguments of every operation, by name."""
    qkv = torch.randn(TOKENS, HEADS + 2 * GROUPS, D)
    x, cache = torch.randn(TOKENS, HIDDEN), kernels.empty_cache(1, BLOCKS, GROUPS, D, SIZE)[0]
    inputs = AttentionInputs(
        torch.tensor([0, 2, 3], dtype=torch.int32),
        torch.tensor([2, 17], dtype=torch.int32),
        torch.tensor([[1, 0], [2, 4]], dtype=torch.int32),
        torch.tensor([16, 17, 64]),
    )
    return {
        "linear": {"x": x, "weight": pack(kernels, [torch.randn(10, HIDDEN)])},
        "embedding": {"ids": torch.tensor([1, 2]), "table": pack(kernels, [torch.randn(10, HIDDEN)])},
        "rms_norm": {"x": x, "weight": torch.ones(HIDDEN), "eps": 1e-5},
        "add_rms_norm": {"x": x, "residual": x.clone(), "weight": torch.ones(HIDDEN), "eps": 1e-5},
        "act_and_mul": {"x": x, "activation": "silu"},
        "rotary_and_cache": {
            "q": qkv[:, :HEADS],
            "k": qkv[:, HEADS : HEADS + GROUPS],
            "v": qkv[:, HEADS + GROUPS :],
            "cos": torch.ones(TOKENS, D // 2),
            "sin": torch.zeros(TOKENS, D // 2),
            "cache": cache,
            "slot_mapping": inputs.slot_mapping,
        },
        "plan": {"inputs": inputs},
        "paged_attention": {
            "plan": kernels.plan(inputs),
            "q": qkv[:, :HEADS],
            "cache": cache,
            "scale": 0.3,
            "sinks": torch.zeros(HEADS),
        },
    }


def test_right_arguments_are_taken(native: OnTensors) -> None:
    for operation, given in arguments(native).items():
        getattr(native, operation)(**given)


Change = Callable[[torch.Tensor], torch.Tensor]
OTHER_KINDS: dict[str, Change] = {
    "another dtype": lambda x: x.to(torch.float64 if x.is_floating_point() else torch.int16),
    "half precision": lambda x: x.to(torch.bfloat16 if x.is_floating_point() else torch.int8),
    "another device": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("change", OTHER_KINDS.values(), ids=OTHER_KINDS.keys())
def test_arrays_of_another_kind_are_named(native: OnTensors, change: Change) -> None:
    tried = 0
    for operation, given in arguments(native).items():
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                with pytest.raises(TypeError, match=rf"^{name} must be (float32|int64)\b.*, got "):
                    getattr(native, operation)(**{**given, name: change(value)})
                tried += 1
            if isinstance(value, LayerCache):
                for part in ("key", "value"):
                    other = LayerCache(
                        **{"key": value.key, "value": value.value, part: change(getattr(value, part))}
                    )
                    with pytest.raises(TypeError, match="cache"):
                        getattr(native, operation)(**{**given, name: other})
                    tried += 1
            if isinstance(value, AttentionInputs):
                for part in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
                    with pytest.raises(TypeError, match=rf"^{part} must be (int32|int64)\b.*, got "):
                        getattr(native, operation)(replace(value, **{part: change(getattr(value, part))}))
                    tried += 1
    assert tried == 24


def test_sizes_that_do_not_fit_are_refused(native: OnTensors) -> None:
    """Each array in turn one row longer, one shorter, one column narrower, or with a dimension more."""
    changes: list[Change] = [
        lambda x: torch.cat([x, x[:1]]),
        lambda x: x[:-1],
        lambda x: x[..., :-1].contiguous(),
        lambda x: x[None],
    ]
    may_vary = {("linear", "x"), ("embedding", "ids"), ("rms_norm", "x"), ("act_and_mul", "x")}
    for operation, given in arguments(native).items():
        for name, value in given.items():
            if not isinstance(value, torch.Tensor):
                continue
            for i, change in enumerate(changes):
                if i in (0, 1) and (operation, name) in may_vary:
                    continue  # another number of tokens
                if i == 2 and name in ("ids", "slot_mapping"):
                    continue  # has no columns
                if i == 3 and operation in ("rms_norm", "embedding", "add_rms_norm", "paged_attention"):
                    continue  # of any dimensions, or a multiplier whose size is what counts
                if i == 2 and (operation, name) in {("rotary_and_cache", "cos"), ("rotary_and_cache", "sin")}:
                    continue
                said = "weight" if (operation, name) == ("rms_norm", "x") else name
                with pytest.raises(ValueError, match=rf"\b{said}\b"):
                    getattr(native, operation)(**{**given, name: change(value)})


def test_what_is_changed_or_read_in_place_must_be_contiguous(native: OnTensors) -> None:
    given = arguments(native)
    apart = torch.randn(TOKENS, HIDDEN, 2)[..., 0]
    for operation, name in (("add_rms_norm", "residual"), ("rms_norm", "weight")):
        wrong = apart if name == "residual" else apart[0]
        with pytest.raises(ValueError, match=f"{name} must be contiguous"):
            getattr(native, operation)(**{**given[operation], name: wrong})
    with pytest.raises(ValueError, match="heads of q must be contiguous"):
        native.paged_attention(
            **{**given["paged_attention"], "q": torch.randn(TOKENS, D, HEADS).transpose(1, 2)}
        )
    torch.testing.assert_close(
        native.rms_norm(apart, torch.ones(HIDDEN), 1e-5),
        native.rms_norm(apart.clone(), torch.ones(HIDDEN), 1e-5),
    )


@pytest.mark.parametrize("slot", [-1, BLOCKS * SIZE, 1 << 40])
def test_nothing_is_written_to_a_slot_outside_of_the_cache(native: OnTensors, slot: int) -> None:
    given = arguments(native)["rotary_and_cache"]
    before = given["cache"].key.clone()
    with pytest.raises(IndexError, match=f"slot {slot} is outside of the cache of 5 blocks of 16"):
        native.rotary_and_cache(**{**given, "slot_mapping": torch.tensor([16, slot, 17])})
    assert torch.equal(given["cache"].key, before)


@pytest.mark.parametrize(
    ("part", "wrong", "said"),
    [
        ("block_table", [[1, 0], [2, BLOCKS]], "block outside of the cache of 5"),
        ("block_table", [[1, 0], [-2, 4]], "block outside of the cache of 5"),
        ("seq_lens", [2, 33], "2 blocks of 16 tokens for a context of 33"),
        ("seq_lens", [1, 17], "no more queries than tokens"),
        ("query_start_loc", [0, 4, 3], "ascend from 0"),
        ("query_start_loc", [1, 2, 3], "ascend from 0"),
        ("query_start_loc", [0, 2, 4], r"slot_mapping must be \[4\]"),
        ("query_start_loc", [0, 3], r"query_start_loc is \[3\]"),
        ("block_table", [[1, 0]], r"block_table \[2, B\]"),
    ],
)
def test_tables_that_lead_outside_of_the_cache_are_refused(
    native: OnTensors, part: str, wrong: list[Any], said: str
) -> None:
    given = arguments(native)
    inputs = replace(given["plan"]["inputs"], **{part: torch.tensor(wrong, dtype=torch.int32)})
    with pytest.raises(ValueError, match=said):
        native.paged_attention(**{**given["paged_attention"], "plan": native.plan(inputs)})


def test_caches_that_are_no_pair_or_have_odd_blocks_are_refused(native: OnTensors) -> None:
    given = arguments(native)["rotary_and_cache"]
    key, value = given["cache"].key, given["cache"].value
    for wrong in (
        LayerCache(key, value[:-1]),
        LayerCache(key, key),
        LayerCache(key[0], value[0]),
        LayerCache(key.transpose(2, 3).contiguous().transpose(2, 3), value),
        LayerCache(torch.zeros(3, GROUPS, D, 24), torch.zeros(3, GROUPS, 24, D)),
    ):
        with pytest.raises(ValueError, match=r"cache|blocks hold"):
            native.rotary_and_cache(**{**given, "cache": wrong})


def test_copies_stay_within_the_cache(native: OnTensors) -> None:
    caches = native.empty_cache(2, BLOCKS, GROUPS, D, SIZE)
    for pair in ((0, BLOCKS), (-1, 2), (BLOCKS, 0)):
        with pytest.raises(IndexError, match="below 5"):
            native.copy_blocks(caches, [(1, 2), pair])


def test_packing_takes_floating_point_weights_and_a_bias_each(native: OnTensors) -> None:
    weight = torch.randn(6, 8)
    for wrong in (torch.ones(6, 8, dtype=torch.int32), torch.ones(6, 8, dtype=torch.bool)):
        with pytest.raises(TypeError, match="floating point weights"):
            pack(native, [weight, wrong])
    with pytest.raises(TypeError, match="in numpy arrays, or blocks; got Tensor"):
        native.kernels.pack_linear([weight])
    for biases in ([torch.ones(5)], [torch.ones(1)], [None, torch.ones(6)], [torch.ones(6, 1)]):
        with pytest.raises(ValueError, match="one bias"):
            pack(native, [weight], biases)


@pytest.mark.parametrize(("size", "shape"), [(101, (1, 96)), (102, (1, 128)), (102, (2, 96)), (102, (3, 34))])
def test_blocks_are_as_many_bytes_as_their_matrix_takes(size: int, shape: tuple[int, int]) -> None:
    q8 = GGML_TYPES[8]  # 34 bytes for 32 values
    assert GGMLBlocks(np.zeros(102, np.uint8), q8, (1, 96)).to_dense().shape == (1, 96)
    with pytest.raises(ModelLoadError, match=f"here: {size} bytes of Q8_0 are no matrix"):
        GGMLBlocks(np.zeros(size, np.uint8), q8, shape, "here")
