import json
from pathlib import Path

import pytest

from distribute.passthrough import checkpoint_files, copy_side_files, side_files, write_config
from distribute.source import Checkpoint
from tests.checkpoints import CONFIG, decoder_tensors, write_checkpoint

TRAVELS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "chat_template.jinja", "generation_config.json", "preprocessor_config.json",
    "processor_config.json", "modeling_custom.py", "LICENSE", "README.md", "assets/logo.png", "encoding/table.txt",
    "modules.json", "1_Pooling/config.json",
)  # fmt: skip
STAYS = (
    "pytorch_model.bin", "model.gguf", "consolidated.pth", "original/params.json", ".cache/token", ".env", ".gitattributes",
    "adapter_model.safetensors", "pytorch_model.bin.index.json", "recipe.yaml", "quantize_config.json",
    "hf_quant_config.json", "onnx/model.onnx", "training_args.bin", "optimizer.pt", "adapter_config.json",
    "consolidated.json", "old.safetensors/x.json", "SHA256SUMS",
)  # fmt: skip


def _fill(folder: Path) -> Path:
    write_checkpoint(folder, decoder_tensors(), files=2)
    for name in (*TRAVELS, *STAYS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(f"content of {name} é".encode())
    return folder


def test_all_but_weights_and_private_files_travel_byte_for_byte(tmp_path: Path) -> None:
    source = _fill(tmp_path / "source")
    target = tmp_path / "target"
    target.mkdir()
    assert copy_side_files(source, target) == sorted(TRAVELS)
    present = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert present == set(TRAVELS)
    for name in TRAVELS:
        assert (target / name).read_bytes() == (source / name).read_bytes()


def test_a_link_that_leads_outside_does_not_travel(tmp_path: Path) -> None:
    source = _fill(tmp_path / "source")
    (tmp_path / "secret").write_text("secret")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    assert "notes.txt" not in side_files(source)


def test_config_is_the_source_json_with_the_block_replaced(tmp_path: Path) -> None:
    source = write_checkpoint(
        tmp_path / "s", decoder_tensors(), auto_map={"AutoModel": "modeling_custom.X"}, odd_key=[1, {"é": None}]
    )
    write_config(Checkpoint.open(source), tmp_path, {"quantization_config": {"quant_method": "x"}})
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    expected = CONFIG | {
        "auto_map": {"AutoModel": "modeling_custom.X"},
        "odd_key": [1, {"é": None}],
        "quantization_config": {"quant_method": "x"},
    }
    assert written == expected
    assert list(written) == list(expected)


@pytest.mark.parametrize("content", ['{"top_k": 5, "do_sample": false,  "odd":1}', '{"temperature":0.0}\n\n'])
def test_generation_config_is_copied_as_it_is(tmp_path: Path, content: str) -> None:
    source = write_checkpoint(tmp_path / "s", decoder_tensors())
    (source / "generation_config.json").write_text(content)
    copy_side_files(source, tmp_path)
    assert (tmp_path / "generation_config.json").read_text() == content


def test_the_files_of_a_checkpoint_are_its_weights_json_and_side_files(tmp_path: Path) -> None:
    folder = _fill(tmp_path / "m")
    weights = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    own = ["config.json", "model.safetensors.index.json", "hf_quant_config.json"]
    assert checkpoint_files(folder) == sorted([*TRAVELS, *weights, *own])
