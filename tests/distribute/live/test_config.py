import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from distribute.errors import UserError
from distribute.live.config import config_files, sha256_sums
from tests.models import KINDS
from tests.torchrun import run_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": [0, 1],
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
BLOCK = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "é"}}


class Loose(LlamaConfig):
    """As the configs of many custom models: checks nothing when it is saved."""

    def validate(self) -> None: ...


def make(kind: str = "llama", dtype: torch.dtype = torch.bfloat16, **config: Any) -> PreTrainedModel:
    cls = {**KINDS, "gemma3_text": Gemma3TextConfig}[kind]
    values = SIZES | (EXPERTS if kind in ("mixtral", "qwen3_moe") else {}) | config
    return AutoModelForCausalLM.from_config(cls(**values), dtype=dtype)


def saved(model: PreTrainedModel, folder: Path) -> dict[str, str]:
    model.save_pretrained(folder)
    return {p.name: p.read_text(encoding="utf-8") for p in folder.iterdir() if p.suffix != ".safetensors"}


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mixtral", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unquantized_files_are_those_of_save_pretrained(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model = make(kind, dtype)
    files = config_files(model)
    assert files == saved(model, tmp_path)
    assert set(files) == {"config.json", "generation_config.json"}


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_files_of_a_loaded_model_are_those_of_save_pretrained(tmp_path: Path, kind: str) -> None:
    """Loading leaves more in a config than making one: name, revision, attention; and fields nobody knows stay."""
    first = make(kind)
    first.config.odd_field = [1, {"é": float("inf")}]
    first.generation_config = GenerationConfig(do_sample=True, top_k=5, temperature=0.5, eos_token_id=[1, 2])
    first.save_pretrained(tmp_path / "first")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first", attn_implementation="eager", dtype=torch.float16)
    files = config_files(model)
    assert files == saved(model, tmp_path / "second")
    assert json.loads(files["config.json"])["odd_field"][0] == 1


def test_the_model_is_not_changed() -> None:
    model = make(dtype=torch.float32)
    model.config.quantization_config = {"quant_method": "stale"}
    model.config.dtype = model.config.architectures = None
    model.generation_config.top_p = 0.5
    before = copy.deepcopy((model.config.to_dict(), model.generation_config.to_dict()))
    config_files(model, BLOCK, {"quantization": {}})
    assert (model.config.to_dict(), model.generation_config.to_dict()) == before


def test_the_block_takes_the_place_of_a_stale_one() -> None:
    model = make()
    plain = json.loads(config_files(model)["config.json"])
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    assert json.loads(config_files(model)["config.json"]) == plain
    files = config_files(model, BLOCK, {"producer": {"name": "x"}, "quantization": {"quant_algo": "FP8"}})
    assert json.loads(files["config.json"]) == plain | {"quantization_config": BLOCK}
    assert files["hf_quant_config.json"].startswith('{\n    "producer": {\n')
    assert list(json.loads(files["config.json"])["quantization_config"]) == list(BLOCK)


@pytest.mark.parametrize(
    ("values", "sampling"),
    [
        ({"top_k": 20}, True),
        ({"top_p": 0.9, "do_sample": False}, True),
        ({"temperature": 0.7}, True),
        ({"temperature": 1.0}, None),
        ({"max_new_tokens": 3}, None),
    ],
)
def test_values_for_sampling_say_that_there_is_sampling(values: dict[str, Any], sampling: bool | None) -> None:
    model = make()
    model.generation_config = GenerationConfig(**values)
    written = json.loads(config_files(model)["generation_config.json"])
    assert written.get("do_sample") is sampling
    assert values.items() - {("do_sample", False)} <= written.items()


def test_a_config_that_transformers_refuses_is_the_users_error() -> None:
    model = make()
    model.generation_config.num_return_sequences = 3
    with pytest.raises(UserError, match=r"LlamaForCausalLM.*num_return_sequences"):
        config_files(model)


def test_llama3_scaling_says_its_theta() -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8, "rope_theta": 5e5}  # fmt: skip
    model = LlamaForCausalLM(Loose(**SIZES, rope_parameters=dict(rope)))
    assert json.loads(config_files(model)["config.json"])["rope_parameters"] == rope
    del model.config.rope_parameters["rope_theta"]
    model.config.rope_theta = 5e5
    assert json.loads(config_files(model)["config.json"])["rope_parameters"] == rope


def test_types_of_layers_that_predict_further_tokens_are_left_out() -> None:
    model = LlamaForCausalLM(Loose(**SIZES))
    model.config.layer_types = ["full_attention"] * 3
    assert len(json.loads(config_files(model)["config.json"])["layer_types"]) == 3  # nothing explains the third
    model.config.num_nextn_predict_layers = 1
    assert len(json.loads(config_files(model)["config.json"])["layer_types"]) == 2


def test_a_model_without_config_has_no_files() -> None:
    assert config_files(torch.nn.Linear(2, 2), BLOCK) == {}


def custom_model(folder: Path) -> PreTrainedModel:
    folder.mkdir()
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\nclass OwnModel(LlamaForCausalLM):\n    pass\n"
    )
    config = LlamaConfig(**SIZES, auto_map={"AutoModelForCausalLM": "modeling_own.OwnModel"})
    config.save_pretrained(folder)
    return AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder, trust_remote_code=True), trust_remote_code=True
    )


def test_custom_code_goes_along(tmp_path: Path) -> None:
    model = custom_model(tmp_path / "own")
    files = config_files(model)
    assert files == saved(model, tmp_path / "saved")
    assert set(files) == {"config.json", "generation_config.json", "modeling_own.py"}
    assert json.loads(files["config.json"])["auto_map"] == {"AutoModelForCausalLM": "modeling_own.OwnModel"}


def sharded(folder: str) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    from distribute.ranks import Ranks  # noqa: PLC0415

    with Ranks.start():
        results = {}
        for name, model in (("llama", make()), ("own", custom_model(Path(folder, "own")))):
            before = config_files(model)
            fully_shard(model)
            assert type(model).__name__.startswith("FSDP")
            results[name] = config_files(model) == before
        return results


def test_sharding_changes_no_file(tmp_path: Path) -> None:
    """`fully_shard` gives the model another class, from a module of torch."""
    assert run_ranks(sharded, 1, str(tmp_path)) == [{"llama": True, "own": True}]


def test_sums_are_what_sha256sum_checks(tmp_path: Path) -> None:
    contents = {"b": b"1", "a b": b"2", "é": b"3", "back\\slash": b"4", "line\nend": b"5"}
    digests = {}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        digests[name] = (
            subprocess.run(["sha256sum"], input=content, capture_output=True, check=True).stdout[:64].decode()
        )
    text = sha256_sums(digests)
    (tmp_path / "SHA256SUMS").write_text(text, encoding="utf-8")
    subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=tmp_path, check=True, capture_output=True)
    assert text == "".join(sorted(text.splitlines(keepends=True), key=lambda line: line.lstrip("\\")[66:]))
