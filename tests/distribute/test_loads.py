"""Checkpoints of the compressed-tensors dialect as their readers see them: transformers, and compressed-tensors itself.

Each is loaded both ways that transformers has (compressed, and dequantized) and generates; what a way cannot do is in
`NOT_COMPRESSED` and `NOT_DEQUANTIZED` with the reason. The reference is the source with our own decoding of the codes
in place of the weights. Skips without the `oracle` group.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, PreTrainedModel

from distribute.dialects import compressed_tensors
from distribute.layerwise import LayerwiseModel
from distribute.numerics.table import find_codec
from distribute.observe import observe
from distribute.scheme import PRESETS, Scheme
from distribute.source import Checkpoint
from distribute.statistics import Statistics
from tests.exports import make_checkpoint, plan_of, read_tensors, weight_absmax
from tests.models import make_model

pytest.importorskip("compressed_tensors", reason="needs the dependency group `oracle`")

#: Both readers round the same products to bf16.
WEIGHTS_ALONE = 1e-3
#: name -> (kind of model, recipe, how far logits may be from the reference where inputs are coded too)
LOADED: dict[str, tuple[str, dict[str, Any], float]] = {
    "fp8": ("llama", {"preset": "fp8"}, 0.1),
    "fp8_dynamic": ("qwen3", {"preset": "fp8_dynamic"}, 0.1),
    "fp8_block": ("llama", {"preset": "fp8_block"}, 0.1),
    "int8": ("qwen3", {"preset": "int8"}, 0.05),
    "int8_weight_only": ("llama", {"preset": "int8_weight_only"}, WEIGHTS_ALONE),
    "int4": ("qwen3", {"preset": "int4"}, WEIGHTS_ALONE),
    "int4_asymmetric": ("llama", {"preset": "int4", "symmetric": False}, WEIGHTS_ALONE),
    "int4-32": ("llama", {"preset": "int4", "group_size": 32}, WEIGHTS_ALONE),
    "nvfp4": ("llama", {"preset": "nvfp4"}, 0.4),
    "nvfp4_weight_only": ("qwen3", {"preset": "nvfp4_weight_only"}, WEIGHTS_ALONE),
    "mxfp4": ("llama", {"preset": "mxfp4"}, 0.4),
    "mxfp8": ("qwen3", {"preset": "mxfp8"}, 0.1),
    "kv": ("llama", {"preset": "fp8", "kv_cache": "fp8"}, 0.1),
    "mixed": ("llama", {"preset": "fp8_dynamic", "overrides": {r"re:.*\.(mlp|block_sparse_moe)\.": "mxfp8"}}, 0.1),
    "experts-fp8": ("qwen3_moe", {"preset": "fp8"}, 0.1),
    "experts-fp8_dynamic": ("qwen3_moe", {"preset": "fp8_dynamic"}, 0.1),
    "experts-int4": ("qwen3_moe", {"preset": "int4", "group_size": 64}, WEIGHTS_ALONE),
    "experts-mxfp4": ("qwen3_moe", {"preset": "mxfp4"}, 0.4),
}
NOT_COMPRESSED = {"int4_asymmetric": "transformers builds an unpacked zero point and then finds a packed one"}
NOT_DEQUANTIZED = {"mixed": "transformers takes the scheme of the first group for all"}
KINDS = ("llama", "qwen3", "mixtral", "qwen3_moe")
SOLVED = ("int8_smoothquant", "int4_awq", "int4_gptq", "nvfp4_awq")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {kind: make_model(kind, folder / kind, hidden=128, layers=1) for kind in KINDS}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batch() -> torch.Tensor:
    return torch.randint(3, 300, (2, 16), generator=torch.Generator().manual_seed(7))


def written(source: Path, folder: Path, recipe: dict[str, Any]) -> Path:
    """The checkpoint of a recipe, calibrated on one batch."""
    recipe = {"dialect": "compressed-tensors", **recipe}
    plan = plan_of(source, recipe)
    model, kv = LayerwiseModel.open(Checkpoint.open(source)), "kv_cache" in recipe
    found = observe(model, [batch()], plan.quantized, kv=kv)
    weights = weight_absmax(source, plan)
    statistics = Statistics(weights, found.input_absmax, {"warnings": []}, kv_absmax=found.kv_absmax)
    return make_checkpoint(source, folder, recipe, statistics)


def decoded(folder: Path, source: Path, recipe: dict[str, Any]) -> dict[str, torch.Tensor]:
    """fp32 weights by module, as we read the stored tensors."""
    tensors = read_tensors(folder)
    plan = plan_of(source, {"dialect": "compressed-tensors", **recipe})
    return {m: _decode(tensors, m, scheme, plan.matrices[m].shape[1]) for m, scheme in plan.schemes.items()}


def _decode(tensors: dict[str, torch.Tensor], module: str, scheme: Scheme, width: int) -> torch.Tensor:
    return find_codec(compressed_tensors.codec(scheme)).decode(of_module(tensors, module), width)


def of_module(tensors: dict[str, torch.Tensor], module: str) -> dict[str, torch.Tensor]:
    return {n.rpartition(".")[2]: tensor for n, tensor in tensors.items() if n.rpartition(".")[0] == module}


def reference(source: Path, folder: Path, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """The source with these weights, loaded from `folder`."""
    folder.mkdir()
    changed = {f"{module}.weight": weight.bfloat16() for module, weight in weights.items()}
    save_file(read_tensors(source) | changed, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(source / "config.json", folder)
    return load(folder)


def load(folder: Path, **how: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **how).eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(batch()).logits.float()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("name", LOADED)
def test_transformers_loads_it_and_generates(sources: dict[str, Path], tmp_path: Path, name: str) -> None:
    kind, recipe, limit = LOADED[name]
    source = sources[kind]
    folder = written(source, tmp_path, recipe)
    same = reference(source, tmp_path / "reference", decoded(folder, source, recipe))
    if name not in NOT_COMPRESSED:
        model = load(folder)
        assert distance(logits(model), logits(same)) < limit
        assert model.generate(batch()[:1, :4], max_new_tokens=4, pad_token_id=0).shape[1] > 4
    if name not in NOT_DEQUANTIZED:
        model = load(folder, quantization_config=CompressedTensorsConfig(dequantize=True))
        assert distance(logits(model), logits(same)) < WEIGHTS_ALONE
        assert model.generate(batch()[:1, :4], max_new_tokens=4, pad_token_id=0).shape[1] > 4
        found = model.state_dict()
        for key, weight in same.state_dict().items():
            torch.testing.assert_close(found[key], weight, rtol=1 / 64, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", [name for name, (kind, _, _) in LOADED.items() if kind != "qwen3_moe"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_compressed_tensors_decompresses_what_we_decode(
    sources: dict[str, Path], tmp_path: Path, kind: str, name: str
) -> None:
    from compressed_tensors.compressors import BaseCompressor  # noqa: PLC0415  optional
    from compressed_tensors.quantization import QuantizationConfig  # noqa: PLC0415

    _, recipe, _ = LOADED[name]
    folder = written(sources[kind], tmp_path, recipe)
    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = QuantizationConfig.model_validate(block).config_groups.values()
    tensors, weights = read_tensors(folder), decoded(folder, sources[kind], recipe)
    for module, weight in weights.items():
        scheme = next(g for g in groups if g.targets == ["Linear"] or module in g.targets)
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        theirs = compressor.decompress(of_module(tensors, module), scheme)["weight"]
        torch.testing.assert_close(theirs.float(), weight, rtol=1 / 64, atol=1e-6)


def test_what_algorithms_find_is_stored_as_one_of_these() -> None:
    def stored(preset: str) -> Scheme:
        scheme = PRESETS[preset].for_dialect("compressed-tensors")
        return Scheme(weights=scheme.weights, inputs=scheme.inputs)

    covered = {recipe["preset"] for _, recipe, _ in LOADED.values()}
    refused = {name for name, preset in PRESETS.items() if "compressed-tensors" in preset.refused}
    assert covered | set(SOLVED) | refused == set(PRESETS)
    assert {stored(name) for name in SOLVED} <= {stored(name) for name in covered}
