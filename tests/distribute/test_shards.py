import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from distribute.shards import file_header, plan_files, preallocate, write_index, write_range
from distribute.source import TensorEntry
from distribute.tensors import DTYPES, NAMES, to_bytes

TENSORS = {
    "layers.10.é": torch.randn(3, 4).bfloat16(),
    "layers.2.b": torch.randn(5),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(1.5),
    'quote"d': torch.randn(7).to(torch.float8_e4m3fn),
    "ids": torch.arange(4),
    "flags": torch.tensor([True, False, True]),
} | {f"every.{name}": torch.zeros(3, dtype=dtype) for name, dtype in DTYPES.items()}
specs = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from(["F32", "BF16", "F8_E4M3"]), st.integers(0, 50)),
    min_size=1,
    max_size=30,
)


def test_a_file_equals_what_the_reference_serializer_writes(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "reference.safetensors", metadata={"format": "pt"})
    files, placed = plan_files([(k, NAMES[v.dtype], tuple(v.shape)) for k, v in TENSORS.items()], 1 << 30)
    path = tmp_path / files[0].name
    preallocate(path, files[0].size, file_header(placed))
    fd = os.open(path, os.O_WRONLY)
    for tensor in reversed(placed):
        write_range(fd, to_bytes(TENSORS[tensor.name]), tensor.begin)
    os.close(fd)
    assert path.read_bytes() == (tmp_path / "reference.safetensors").read_bytes()


@given(specs, st.integers(1, 400))
def test_files_hold_every_tensor_once_within_the_limit(parts: list[tuple[int, str, int]], limit: int) -> None:
    given_specs = [(f"t.{i}.{n}", dtype, (rows,)) for i, (n, dtype, rows) in enumerate(parts)]
    files, placed = plan_files(given_specs, limit)
    assert sorted(tensor.name for tensor in placed) == sorted(spec[0] for spec in given_specs)
    count = len(files)
    expected = [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
    assert [file.name for file in files] == (expected if count > 1 else ["model.safetensors"])
    for file in files:
        members = sorted((t for t in placed if t.file == file.name), key=lambda t: (t.begin, t.end))
        assert members, "a file without tensors"
        held = sum(t.end - t.begin for t in members)
        assert held <= limit or len([t for t in members if t.end > t.begin]) == 1
        assert members[0].begin == len(file_header(members))
        assert all(a.end == b.begin for a, b in itertools.pairwise(members))
        assert members[-1].end == file.size


def test_an_oversized_tensor_is_alone_and_no_file_is_empty() -> None:
    files, placed = plan_files([("a", "F32", (100,)), ("b", "F32", (2,)), ("c", "F32", (3,))], 50)
    assert [[t.name for t in placed if t.file == file.name] for file in files] == [["a"], ["b", "c"]]


def test_the_plan_does_not_depend_on_the_order_given() -> None:
    given_specs = [(f"layers.{i}.w", "BF16", (i, 3)) for i in range(12)]
    assert plan_files(given_specs, 100) == plan_files(given_specs[::-1], 100)


def test_index_is_written_only_for_several_files(tmp_path: Path) -> None:
    write_index(tmp_path, [TensorEntry("a", "F32", (1,), "model.safetensors", 8, 12)])
    assert not list(tmp_path.iterdir())
    pair = [
        TensorEntry("a", "F32", (1,), "model-00001-of-00002.safetensors", 8, 12),
        TensorEntry("b", "F32", (2,), "model-00002-of-00002.safetensors", 8, 16),
    ]
    write_index(tmp_path, pair)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 12}, "weight_map": {t.name: t.file for t in pair}}


def test_preallocate_makes_the_final_size(tmp_path: Path) -> None:
    preallocate(tmp_path / "x", 1000, b"head")
    assert (tmp_path / "x").read_bytes() == b"head" + bytes(996)
    with pytest.raises(FileNotFoundError):
        preallocate(tmp_path / "no" / "x", 10, b"")
