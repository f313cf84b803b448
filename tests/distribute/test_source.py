import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from distribute.errors import SourceError
from distribute.source import Checkpoint, is_inside
from distribute.tensors import read_tensor, to_bytes
from tests.checkpoints import decoder_tensors, write_checkpoint, write_index


def _index(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def test_reads_every_tensor_bit_for_bit(tmp_path: Path) -> None:
    tensors = decoder_tensors()
    tensors |= {
        "a.scalar": torch.tensor(1.5),
        "a.empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "a.flag": torch.tensor([True, False]),
        "a.ids": torch.arange(5),
        "a.é": torch.randn(3, 4).half(),
    }
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, tensors, files=3))
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        read = read_tensor(checkpoint, name)
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
        assert bytes(to_bytes(read)) == bytes(to_bytes(tensor))


def test_rows_equal_a_slice(tmp_path: Path) -> None:
    tensors = decoder_tensors()
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, tensors))
    rows = read_tensor(checkpoint, "lm_head.weight", range(3, 7))
    assert torch.equal(rows, tensors["lm_head.weight"][3:7])


def test_lists_every_missing_and_truncated_file_at_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, decoder_tensors(), files=4)
    (tmp_path / "model-00002-of-00004.safetensors").unlink()
    cut = tmp_path / "model-00003-of-00004.safetensors"
    cut.write_bytes(cut.read_bytes()[:-7])
    with pytest.raises(SourceError) as caught:
        Checkpoint.open(tmp_path)
    assert "model-00002-of-00004.safetensors: missing" in str(caught.value)
    assert "model-00003-of-00004.safetensors: truncated" in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 8, b"\xff" * 64, (20).to_bytes(8, "little") + b"not json at all....."]
)
def test_refuses_what_is_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    write_checkpoint(tmp_path, decoder_tensors())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(SourceError, match=r"model\.safetensors"):
        Checkpoint.open(tmp_path)


def test_takes_the_copy_that_the_index_names(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, decoder_tensors(), files=2)
    name = "model.norm.weight"
    valid = _index(tmp_path)[name]
    other = next(file for file in set(_index(tmp_path).values()) if file != valid)
    stale = load_file(tmp_path / other) | {name: torch.full((8,), 9.0).bfloat16()}
    save_file(stale, tmp_path / other)
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(read_tensor(checkpoint, name), decoder_tensors()[name])
    assert any(name in warning and other in warning for warning in checkpoint.warnings)


def test_weights_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, decoder_tensors(), files=2)
    save_file({"extra.weight": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "old.safetensors").mkdir()
    checkpoint = Checkpoint.open(tmp_path)
    assert "extra.weight" not in checkpoint.tensors
    assert any("adapter_model.safetensors" in warning for warning in checkpoint.warnings)


@pytest.mark.parametrize("kind", ["parent", "absolute", "link"])
def test_an_index_cannot_lead_outside_the_folder(tmp_path: Path, kind: str) -> None:
    folder = write_checkpoint(tmp_path / "model", decoder_tensors(), files=2)
    outside = write_checkpoint(tmp_path / "outside", decoder_tensors(seed=1), files=2)
    weight_map = _index(folder)
    first = sorted(set(weight_map.values()))[0]
    given = {"parent": f"../outside/{first}", "absolute": str(outside / first), "link": first}[kind]
    if kind == "link":
        (folder / first).unlink()
        (folder / first).symlink_to(outside / first)
    write_index(folder, {name: given if file == first else file for name, file in weight_map.items()})
    with pytest.raises(SourceError, match="outside") as caught:
        Checkpoint.open(folder)
    assert given in str(caught.value)


def test_links_of_a_hub_cache_are_legal(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", decoder_tensors(), files=2)
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / ("0" * 40)
    blobs = tmp_path / "models--org--tiny" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in plain.iterdir():
        shutil.copy(file, blobs / f"b{file.name}")
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / f"b{file.name}", snapshot))
    assert Checkpoint.open(snapshot).tensors == Checkpoint.open(plain).tensors


@pytest.mark.parametrize("fields", [{}, {"metadata": {}}, {"metadata": {"total_size": "12"}}, {"metadata": None}])
def test_metadata_may_be_missing(tmp_path: Path, fields: dict[str, object]) -> None:
    tensors = decoder_tensors()
    write_checkpoint(tmp_path, tensors, files=2, metadata=False)
    write_index(tmp_path, _index(tmp_path), **fields)
    assert set(Checkpoint.open(tmp_path).tensors) == set(tensors)


@pytest.mark.parametrize("file", ["model.safetensors", "weights.safetensors"])
def test_one_file_may_have_an_index(tmp_path: Path, file: str) -> None:
    tensors = decoder_tensors()
    write_checkpoint(tmp_path, tensors)
    (tmp_path / "model.safetensors").rename(tmp_path / file)
    write_index(tmp_path, dict.fromkeys(tensors, file))
    assert set(Checkpoint.open(tmp_path).tensors) == set(tensors)


def test_refuses_a_quantized_source(tmp_path: Path) -> None:
    by_config = write_checkpoint(
        tmp_path / "config", decoder_tensors(), quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"}
    )
    with pytest.raises(SourceError, match="modelopt, FP8"):
        Checkpoint.open(by_config).refuse_quantized()
    by_dtype = write_checkpoint(tmp_path / "dtype", {"x.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)})
    with pytest.raises(SourceError, match="already quantized"):
        Checkpoint.open(by_dtype).refuse_quantized()


def test_leftovers_of_another_tool_do_not_make_a_source_quantized(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, decoder_tensors())
    (tmp_path / "recipe.yaml").write_text("quant_stage: {}\n")
    (tmp_path / "quantize_config.json").write_text('{"bits": 4}')
    Checkpoint.open(tmp_path).refuse_quantized()


def test_a_stored_tied_head_is_a_copy_or_an_error(tmp_path: Path) -> None:
    tensors = decoder_tensors()
    same = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    tied = write_checkpoint(tmp_path / "same", same, tie_word_embeddings=True)
    assert Checkpoint.open(tied).tied_copies() == ("lm_head.weight",)
    untied = write_checkpoint(tmp_path / "untied", same, tie_word_embeddings=False)
    assert Checkpoint.open(untied).tied_copies() == ()
    different = write_checkpoint(tmp_path / "different", tensors, tie_word_embeddings=True)
    with pytest.raises(SourceError, match=r"lm_head\.weight differs"):
        Checkpoint.open(different).tied_copies()


def test_digest_follows_content(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, decoder_tensors())
    before = Checkpoint.open(tmp_path).digest()
    assert Checkpoint.open(tmp_path).digest() == before
    write_checkpoint(tmp_path, decoder_tensors(seed=1))
    assert Checkpoint.open(tmp_path).digest() != before


@pytest.mark.parametrize("name", ["", "../x", "/etc/passwd", "a/../../b", "a\\b"])
def test_unsafe_names_are_not_inside(tmp_path: Path, name: str) -> None:
    assert not is_inside(tmp_path, name)


def test_says_what_a_folder_lacks(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="not a folder"):
        Checkpoint.open(tmp_path / "nothing")
    with pytest.raises(SourceError, match=r"config\.json"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match="only safetensors"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(SourceError, match="not valid JSON"):
        Checkpoint.open(tmp_path)


def _write_header(path: Path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    "offsets", [["0", "16"], [0.0, 16.0], [0, 8], [16, 0], [-16, 0], [8, 24], None, [True, 16]], ids=str
)
def test_a_damaged_entry_is_refused_in_one_sentence(tmp_path: Path, offsets: object) -> None:
    write_checkpoint(tmp_path, decoder_tensors())
    entry = {"dtype": "F32", "shape": [4], "data_offsets": offsets}
    _write_header(tmp_path / "model.safetensors", {"a": entry}, bytes(32))
    with pytest.raises(SourceError, match=r"model\.safetensors"):
        Checkpoint.open(tmp_path)


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, decoder_tensors())
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    _write_header(tmp_path / "model.safetensors", {"a": entry, "b": entry}, bytes(16))
    with pytest.raises(SourceError, match="gap or an overlap"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("block", [{"w_bit": 4, "q_group_size": 128}, {"quant_method": "awq"}, "awq"])
def test_any_quantization_config_means_quantized(tmp_path: Path, block: object) -> None:
    write_checkpoint(tmp_path, decoder_tensors(), quantization_config=block)
    with pytest.raises(SourceError, match="already quantized"):
        Checkpoint.open(tmp_path).refuse_quantized()


def test_a_tied_head_that_is_the_only_copy_is_kept(tmp_path: Path) -> None:
    tensors = decoder_tensors()
    del tensors["model.embed_tokens.weight"]
    write_checkpoint(tmp_path, tensors, tie_word_embeddings=True)
    assert Checkpoint.open(tmp_path).tied_copies() == ()
