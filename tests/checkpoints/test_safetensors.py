"""Reading safetensors: the library that writes them is the oracle."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from paged_backend.checkpoints.safetensors import WEIGHTS, load_folder
from paged_backend.errors import ModelLoadError
from paged_backend.kernels.tensor import as_tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OTHERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text("{}")
    return path


def write(path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(start: int, stop: int, dtype: object = "F32", shape: object = (2,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@given(
    st.lists(st.tuples(st.sampled_from(FLOATS + OTHERS), st.lists(st.integers(0, 5), max_size=3)), max_size=6)
)
@settings(deadline=None, max_examples=60)
def test_tensors_of_any_dtype_and_shape_equal_what_the_library_reads(folder, wanted):
    (folder / WEIGHTS).unlink(missing_ok=True)  # the file of the example before may still be mapped
    made = {f"t{i}": (torch.randn(shape) * 50).to(dtype) for i, (dtype, shape) in enumerate(wanted)}
    save_file(made, folder / WEIGHTS)
    checkpoint = load_folder(folder)
    read = {**checkpoint.tensors, **{name: source for name, (_, source) in checkpoint.integers.items()}}
    expected = load_file(folder / WEIGHTS)
    assert set(read) == set(expected)
    for name, tensor in expected.items():
        got = as_tensor(read[name]())
        assert got.dtype == tensor.dtype
        assert torch.equal(got, tensor)
        if tensor.is_floating_point():
            assert checkpoint.shapes[name] == tuple(tensor.shape)
    assert set(checkpoint.tensors) == {name for name, tensor in made.items() if tensor.is_floating_point()}


def test_a_tensor_is_a_view_of_the_file(folder):
    (folder / WEIGHTS).unlink(missing_ok=True)
    save_file({"a": torch.ones(4, 4, dtype=torch.bfloat16)}, folder / WEIGHTS)
    source = load_folder(folder).tensors["a"]
    assert np.shares_memory(source(), source())


def test_a_tensor_that_the_file_does_not_align_is_read_all_the_same(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    values = np.array([1.5, -2.0], np.float32)
    header = {"a": entry(0, 1, "U8", [1]), "b": entry(1, 9)}
    text = json.dumps(header).encode()
    write(tmp_path, text + b" " * (-len(text) % 8), b"\7" + values.tobytes())
    np.testing.assert_array_equal(load_folder(tmp_path).tensors["b"](), values)


def test_what_has_no_dtype_here_comes_as_bytes_with_its_name(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path, {"a": entry(0, 2, "F8_E4M3")}, b"\1\2")
    dtype, source = load_folder(tmp_path).integers["a"]
    assert dtype == "F8_E4M3"
    assert source().tolist() == [1, 2]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ([], "no JSON object"),
        (b"{", "Expecting"),
        (b"\xff\xfe", "decode"),
        ({"a": 1}, "'a' has no dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "'a' has no dtype, shape and data_offsets"),
        ({"a": entry(0, 8, shape=2)}, "'a' has no dtype, shape and data_offsets"),
        ({"a": entry(0, 8, shape=[-2])}, "'a' has no dtype, shape and data_offsets of the right kind"),
        ({"a": entry(0, 8, shape=[2.0])}, "'a' has no dtype, shape and data_offsets of the right kind"),
        ({"a": entry(0, 8, shape=[True, 2])}, "'a' has no dtype, shape and data_offsets of the right kind"),
        ({"a": entry(0, 8, dtype=["F32"])}, "'a' has no dtype, shape and data_offsets of the right kind"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        ({"a": entry(4, 12)}, "'a' lies outside"),
        ({"a": entry(8, 0)}, "'a' lies outside"),
        ({"a": entry(-8, 0)}, "'a' has no dtype, shape and data_offsets of the right kind"),
        ({"a": entry(0, 8, shape=[3])}, r"'a' of F32 \[3\] has 8 bytes"),
        ({"a": entry(0, 8, shape=[1 << 62, 8])}, "has 8 bytes"),
        ({"a": entry(0, 8), "b": entry(4, 8, shape=[1])}, "'a' and 'b' overlap"),
    ],
)
def test_a_header_that_does_not_fit_the_file_is_refused_with_its_reason(tmp_path, header, reason):
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path, header, bytes(8))
    with pytest.raises(ModelLoadError, match=rf"{WEIGHTS} is damaged or cut short \(.*{reason}"):
        load_folder(tmp_path)


def test_reading_a_folder_needs_no_torch(folder):
    (folder / WEIGHTS).unlink(missing_ok=True)
    save_file({"a": torch.ones(4, dtype=torch.bfloat16)}, folder / WEIGHTS)
    code = (
        "import sys; from pathlib import Path; from paged_backend.checkpoints.loading import load_checkpoint;"
        "import paged_backend.checkpoints.gguf, paged_backend.models.tensors;"
        "load_checkpoint(Path(sys.argv[1])).tensors['a']();"
        "sys.exit(sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
