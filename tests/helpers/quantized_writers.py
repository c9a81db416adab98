"""Quantised weights written by the documented layout, one code after the other, each with the values it stands for.

A writer takes a random generator and a shape [N, K] and gives the tensors of a module by suffix, and its values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Writer = Callable[[np.random.Generator, int, int], tuple[dict[str, torch.Tensor], np.ndarray]]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column in nibble 0, 1, ... of a word
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = tuple(sign * size / 12 for sign in (1, -1) for size in (0, 0.0625, 8, 12, 4, 6, 2, 3))
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def words(codes: Sequence[int], bits: int, per_word: int | None = None) -> list[int]:
    """Codes as signed 32-bit words, lowest bits first: one stream, or ``per_word`` codes in each."""
    if per_word is not None:
        runs = [codes[at : at + per_word] for at in range(0, len(codes), per_word)]
        return [words(run, bits)[0] for run in runs]
    stream = sum(int(code) << (i * bits) for i, code in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    found = [stream >> (32 * i) & 0xFFFFFFFF for i in range(count)]
    return [word - (1 << 32) if word >> 31 else word for word in found]


def int32(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor(np.array(rows, np.int64), dtype=torch.int32)


def scales(random: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """About what makes values of the size of weights; exact in ``dtype``."""
    return torch.tensor(random.uniform(0.005, 0.03, shape)).to(dtype)


def integer_codes(
    random: np.random.Generator, bits: int, symmetric: bool, n: int, k: int, groups: int
) -> Any:
    """Codes [N, K], with each that there is, and zero points [N, G], with those of both ends."""
    codes = random.integers(0, 2**bits, (n, k))
    codes[0, :2] = 0, 2**bits - 1
    zeros = np.full((n, groups), 2 ** (bits - 1))
    if not symmetric:
        zeros = random.integers(0, 2**bits, (n, groups))
        zeros[0, 0], zeros[-1, -1] = 0, 2**bits - 1
    return codes, zeros


def values(codes: np.ndarray, zeros: np.ndarray, scale: torch.Tensor, group: np.ndarray) -> np.ndarray:
    """(code - zero) * scale, in float64: a product of 9 and 11 bits is exact in float32 as well."""
    wide = scale.double().numpy()
    return ((codes - zeros[:, group]) * wide[:, group]).astype(np.float32)


def gptq(bits: int, group: int, symmetric: bool, plain_zeros: bool, act_order: bool) -> Writer:
    def write(random: np.random.Generator, n: int, k: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        size = k if group == -1 else group
        codes, zeros = integer_codes(random, bits, symmetric, n, k, k // size)
        index = np.arange(k) // size
        if act_order:
            index = random.permutation(index)
        scale = scales(random, n, k // size) / 2 ** max(0, bits - 4)
        stored = zeros if plain_zeros else (zeros - 1) % 2**bits
        tensors = {
            "qweight": int32([words(row, bits) for row in codes]).T.contiguous(),
            "qzeros": int32([words(column, bits) for column in stored.T]),
            "scales": scale.T.contiguous(),
            "g_idx": torch.tensor(index, dtype=torch.int32),
        }
        return tensors, values(codes, zeros, scale, index)

    return write


def awq(group: int) -> Writer:
    def pack(rows: np.ndarray) -> torch.Tensor:
        return int32(
            [words(row.reshape(-1, 8)[:, AWQ_ORDER].reshape(-1).tolist(), 4) for row in rows]
        )  # rows of inputs or groups

    def write(random: np.random.Generator, n: int, k: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        codes, zeros = integer_codes(random, 4, False, n, k, k // group)
        scale = scales(random, n, k // group)
        tensors = {"qweight": pack(codes.T), "qzeros": pack(zeros.T), "scales": scale.T.contiguous()}
        return tensors, values(codes, zeros, scale, np.arange(k) // group)

    return write


def packed(bits: int, group: int, symmetric: bool, whole: bool = True, act_order: bool = False) -> Writer:
    """pack-quantized. whole: codes do not run on from one word into the next."""

    def write(random: np.random.Generator, n: int, k: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        size = k if group == -1 else group
        codes, zeros = integer_codes(random, bits, symmetric, n, k, k // size)
        index = np.arange(k) // size
        if act_order:
            index = random.permutation(index)
        scale = scales(random, n, k // size, dtype=torch.bfloat16) / 2 ** max(0, bits - 4)
        per_word = 32 // bits if whole else None
        tensors = {
            "weight_packed": int32([words(row.tolist(), bits, per_word) for row in codes]),
            "weight_scale": scale,
            "weight_shape": torch.tensor([n, k]),
        }
        if not symmetric:
            columns = [words(column.tolist(), bits, per_word) for column in zeros.T]
            tensors["weight_zero_point"] = int32(columns).T.contiguous()
        if act_order:
            tensors["weight_g_idx"] = torch.tensor(index, dtype=torch.int32)
        return tensors, values(codes, zeros, scale, index)

    return write


def int8(per_output: bool, symmetric: bool = True) -> Writer:
    """int-quantized, with a scale of the (static) activations beside it."""

    def write(random: np.random.Generator, n: int, k: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        codes = random.integers(-128, 128, (n, k))
        codes[0, :2] = -128, 127
        scale = scales(random, n, 1, dtype=torch.bfloat16) / 16 if per_output else torch.tensor([0.001])
        tensors = {"weight": torch.tensor(codes, dtype=torch.int8), "weight_scale": scale}
        tensors["input_scale"] = torch.tensor([0.5])
        zeros = np.zeros((n, 1), np.int64)
        if not symmetric:
            zeros = random.integers(-128, 128, (n, 1))
            tensors["weight_zero_point"] = torch.tensor(zeros, dtype=torch.int8)
        wide = scale.float().numpy().reshape(-1, 1)
        return tensors, ((codes - zeros).astype(np.float32) * wide).astype(np.float32)

    return write


def e4m3_codes(random: np.random.Generator, n: int, k: int) -> torch.Tensor:
    """Finite ones, the smallest among them."""
    codes = random.integers(0, 0x70, (n, k)) | random.integers(0, 2, (n, k)) << 7
    codes[0, :4] = 0, 1, 0x80, 0x87
    return torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn)


def float8(name: str, block: tuple[int, int] | None, scale_dtype: torch.dtype = torch.float32) -> Writer:
    """block: None for one scale, (1, 0) for one for each output; 0 is the whole side."""

    def write(random: np.random.Generator, n: int, k: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        codes = e4m3_codes(random, n, k)
        high, wide = (n, k) if block is None else (block[0] or n, block[1] or k)
        shape = -(-n // high), -(-k // wide)
        if scale_dtype in (torch.uint8, torch.float8_e8m0fnu):
            exponents = torch.tensor(random.integers(112, 119, shape), dtype=torch.uint8)
            scale, factors = exponents.view(scale_dtype), 2.0 ** (exponents.double().numpy() - 127)
        else:
            scale = scales(random, *shape, dtype=scale_dtype) / 256
            factors = scale.double().numpy()
        rows, columns = np.arange(n) // high, np.arange(k) // wide
        expected = codes.double().numpy() * factors[rows][:, columns]
        return {"weight": codes, name: scale.reshape(()) if block is None else scale}, expected.astype(
            np.float32
        )

    return write


def _pairs(codes: np.ndarray, first_is_high: bool = False) -> torch.Tensor:
    first, second = codes.reshape(-1, 2).T
    both = first << 4 | second if first_is_high else second << 4 | first
    return torch.tensor(both.astype(np.uint8))


def nvfp4(random: np.random.Generator, n: int, k: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    codes = random.integers(0, 16, (n, k))
    scale = torch.tensor(random.uniform(50, 400, (n, k // 16))).to(torch.float8_e4m3fn)
    whole = torch.tensor([random.uniform(8000, 16000)], dtype=torch.float32)
    tensors = {
        "weight_packed": _pairs(codes).reshape(n, k // 2),
        "weight_scale": scale,
        "weight_global_scale": whole,
    }
    factors = (scale.float() / whole).numpy().repeat(16, axis=1)
    return tensors, np.array(E2M1, np.float32)[codes] * factors


def mxfp4(random: np.random.Generator, n: int, k: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    codes = random.integers(0, 16, (n, k))
    scale = random.integers(119, 123, (n, k // 32))
    factors = (2.0 ** (scale - 127.0)).repeat(32, axis=1)
    tensors = {
        "weight_packed": _pairs(codes).reshape(n, k // 2),
        "weight_scale": torch.tensor(scale, dtype=torch.uint8),
    }
    return tensors, (np.array(E2M1)[codes] * factors).astype(np.float32)


def table4(kind: str, nested: bool) -> Writer:
    """bitsandbytes' nf4 and fp4: blocks of 64 over the rows laid end to end."""

    def write(random: np.random.Generator, n: int, k: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        table = np.array(NF4 if kind == "nf4" else FP4, np.float32)
        codes = random.integers(0, 16, n * k)
        blocks = -(-n * k // 64)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": [n, k]}
        tensors = {
            "weight": _pairs(codes, first_is_high=True).reshape(-1, 1),
            "weight.quant_map": torch.from_numpy(table),
        }
        largest = random.uniform(0.1, 0.4, blocks).astype(np.float32)
        if nested:
            offset = float(np.float32(random.uniform(0.2, 0.3)))
            steps = np.sort(random.uniform(-1, 1, 256)).astype(np.float32)
            index = random.integers(0, 256, blocks)
            outer = random.uniform(0.05, 0.2, -(-blocks // 256)).astype(np.float32)
            largest = steps[index] * outer[np.arange(blocks) // 256] + np.float32(offset)
            state.update(nested_blocksize=256, nested_dtype="float32", nested_offset=offset)
            tensors["weight.absmax"] = torch.tensor(index, dtype=torch.uint8)
            tensors["weight.nested_absmax"] = torch.from_numpy(outer)
            tensors["weight.nested_quant_map"] = torch.from_numpy(steps)
        else:
            tensors["weight.absmax"] = torch.from_numpy(largest)
        told = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.from_numpy(told)
        return tensors, (table[codes] * largest[np.arange(n * k) // 64]).reshape(n, k)

    return write


def rows_of_int8(random: np.random.Generator, n: int, k: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """bitsandbytes' int8."""
    codes = random.integers(-127, 128, (n, k))
    largest = random.uniform(0.2, 0.5, n).astype(np.float32)
    tensors = {
        "weight": torch.tensor(codes, dtype=torch.int8),
        "SCB": torch.from_numpy(largest),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, (codes * (largest * np.float32(1 / 127))[:, None]).astype(np.float32)


def _gptq_settings(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": True, "desc_act": False, **more}


def _ct_settings(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", **weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


_V2 = {"checkpoint_format": "gptq_v2"}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}

FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    **{
        f"gptq-{bits}-{'sym' if symmetric else 'asym'}-{'v2' if plain else 'v1'}": (
            _gptq_settings(bits, 32, sym=symmetric, **(_V2 if plain else {})),
            gptq(bits, 32, symmetric, plain, act_order=False),
        )
        for bits in (2, 3, 4, 8)
        for symmetric in (True, False)
        for plain in (True, False)
    },
    "gptq-one-group": (_gptq_settings(4, -1), gptq(4, -1, True, False, act_order=False)),
    "gptq-act-order": (
        _gptq_settings(4, 32, desc_act=True, sym=False),
        gptq(4, 32, False, False, act_order=True),
    ),
    "gptq-v2-under-the-name-of-v1": (_gptq_settings(4, 32), gptq(4, 32, True, True, act_order=False)),
    "gptq-other-bits-than-the-settings": (_gptq_settings(8, 32), gptq(4, 32, True, False, act_order=False)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq(32)),
    "pack-4": (_ct_settings("pack-quantized", num_bits=4), packed(4, 32, True)),
    "pack-4-asym": (_ct_settings("pack-quantized", num_bits=4), packed(4, 32, False)),
    "pack-4-channel": (_ct_settings("pack-quantized", num_bits=4), packed(4, -1, False)),
    "pack-4-act-order": (_ct_settings("pack-quantized", num_bits=4), packed(4, 32, False, act_order=True)),
    "pack-3-whole": (_ct_settings("pack-quantized", num_bits=3), packed(3, 32, False)),
    "pack-3-running-on": (_ct_settings("pack-quantized", num_bits=3), packed(3, 32, False, whole=False)),
    "pack-6": (_ct_settings("pack-quantized", num_bits=6), packed(6, 32, False)),
    "pack-8": (_ct_settings("pack-quantized", num_bits=8), packed(8, 32, False)),
    "int8-channel": (_ct_settings("int-quantized"), int8(per_output=True)),
    "int8-tensor": (_ct_settings("int-quantized"), int8(per_output=False)),
    "int8-asym": (_ct_settings("int-quantized"), int8(per_output=True, symmetric=False)),
    "float-tensor": (_ct_settings("float-quantized", type="float"), float8("weight_scale", None)),
    "float-channel": (
        _ct_settings("float-quantized", type="float"),
        float8("weight_scale", (1, 0), torch.bfloat16),
    ),
    "float-block": (
        _ct_settings("float-quantized", type="float", strategy="block", block_structure=[24, 40]),
        float8("weight_scale", (24, 40)),
    ),
    "float-group": (
        _ct_settings("float-quantized", type="float", strategy="group", group_size=32),
        float8("weight_scale", (1, 32)),
    ),
    "mxfp8": (
        _ct_settings("mxfp8-quantized", type="float", strategy="group", group_size=32),
        float8("weight_scale", (1, 32), torch.uint8),
    ),
    "nvfp4": (_ct_settings("nvfp4-pack-quantized", num_bits=4, type="float"), nvfp4),
    "mxfp4": (_ct_settings("mxfp4-pack-quantized", num_bits=4, type="float"), mxfp4),
    "fp8-block": ({**_FP8, "weight_block_size": [24, 40]}, float8("weight_scale_inv", (24, 40))),
    "fp8-block-of-exponents": (
        {**_FP8, "weight_block_size": [24, 40]},
        float8("weight_scale_inv", (24, 40), torch.float8_e8m0fnu),
    ),
    "fp8-tensor": (_FP8, float8("weight_scale", None)),
    "fp8-channel": ({"quant_method": "fbgemm_fp8"}, float8("weight_scale", (1, 0))),
    "nf4": (_BNB, table4("nf4", nested=False)),
    "nf4-nested": (_BNB, table4("nf4", nested=True)),
    "fp4": (_BNB, table4("fp4", nested=False)),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, rows_of_int8),
}
"""Name -> (quantization_config, writer)."""
