"""States in memory: the safetensors format, exact bytes of every dtype, damaged input."""

import json

import pytest
import safetensors.torch
import torch

from distribute.errors import UserError
from distribute.state import copy_into, from_buffer, plan_layout, write_into
from distribute.tensors import DTYPES

NAMES = ["a.b/c", "ünïcødé 名前", 'quote"\\', "", "sha256", "\ud800"]


def odd_tensors():
    """Every dtype with every bit pattern of a byte, and every odd shape and stride."""
    pattern = torch.arange(256, dtype=torch.uint8)
    tensors = {name: pattern.view(dtype) for name, dtype in DTYPES.items() if dtype != torch.bool}
    tensors["bool"] = torch.tensor([True, False, True])
    tensors["scalar"] = torch.tensor(0.5)
    tensors["count"] = torch.tensor(7)
    tensors["empty"] = torch.zeros(0)
    tensors["empty rows"] = torch.zeros(0, 64, dtype=torch.bfloat16)
    tensors["transposed"] = pattern.view(torch.float8_e4m3fn).reshape(16, 16).T
    tensors["transposed bf16"] = pattern.view(torch.bfloat16).reshape(8, 16).T
    tensors["strided"] = pattern[::3]
    tensors["expanded"] = torch.tensor([1.5]).expand(4, 3)
    tensors["shared 1"] = tensors["shared 2"] = torch.arange(5)
    return tensors


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def assert_same(tensors, expected):
    assert set(tensors) == set(expected)
    for name, tensor in expected.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(tensors[name]) == raw(tensor), name


def pack(tensors, metadata):
    layout = plan_layout(tensors, metadata)
    buffer = bytearray(layout.nbytes)
    copy_into(buffer, layout, tensors)
    return buffer


def test_every_dtype_shape_and_stride_survives_bit_for_bit():
    metadata, tensors = from_buffer(pack(odd_tensors(), {"a": "b"}))
    assert metadata == {"a": "b"}
    assert_same(tensors, odd_tensors())


def test_a_file_gets_the_same_bytes_as_a_buffer(tmp_path):
    layout = plan_layout(odd_tensors(), {"a": "b"})
    path = tmp_path / "state"
    with path.open("w+b") as file:
        file.truncate(layout.nbytes)
        write_into(file.fileno(), layout, odd_tensors())
    assert path.read_bytes() == pack(odd_tensors(), {"a": "b"})


def test_any_name_survives():
    expected = {name: torch.tensor([index]) for index, name in enumerate(NAMES)}
    assert_same(from_buffer(pack(expected, {}))[1], expected)


def test_bytes_are_a_safetensors_file():
    expected = {"w": torch.arange(6.0).reshape(2, 3), "e": torch.zeros(0, 2), "b": torch.tensor(True)}
    assert_same(safetensors.torch.load(bytes(pack(expected, {"k": "v"}))), expected)


def test_reading_copies_nothing():
    buffer = pack({"w": torch.zeros(3, dtype=torch.uint8)}, {})
    tensor = from_buffer(buffer)[1]["w"]
    buffer[-3:] = b"\x01\x02\x03"
    assert tensor.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"c": torch.zeros(1, dtype=torch.complex64)}, "tensor 'c' of dtype torch.complex64 cannot be stored"),
        ({"__metadata__": torch.zeros(1)}, "any name but __metadata__"),
    ],
)
def test_what_cannot_be_stored_is_refused(tensors, text):
    with pytest.raises(UserError, match=text):
        plan_layout(tensors, {})


def _with_entry(**changes):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    text = json.dumps({"__metadata__": {}, "w": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        (2**63).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"[1]]",
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"\xff\xff",
        _with_entry(data_offsets=[0, 16]),
        _with_entry(data_offsets=[8, 16], shape=[2]),
        _with_entry(data_offsets=[-8, 0]),
        _with_entry(shape=[3]),
        _with_entry(shape=[-1, -2]),
        _with_entry(dtype="F7"),
    ],
)
def test_damaged_bytes_are_refused(data):
    with pytest.raises(ValueError):
        from_buffer(bytearray(data))


def test_the_entry_that_others_damage_is_valid():
    assert from_buffer(bytearray(_with_entry()))[1]["w"].tolist() == [0.0, 0.0]
