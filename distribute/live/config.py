"""The small files of a live model's checkpoint, as text: config.json, generation_config.json, hf_quant_config.json.

transformers itself writes them, from copies: the model and its configs are never changed. On top come the
quantization block and what nvidia-modelopt repairs in a config for engines that are strict.
"""

import copy
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from distribute.errors import UserError

Block = Mapping[str, Any]


def config_files(
    model: torch.nn.Module, quantization_config: Block | None = None, hf_quant_config: Block | None = None
) -> dict[str, str]:
    """File name -> text of every small file of the model's checkpoint, the code of a custom model included.

    config.json and generation_config.json are, byte for byte, those of `model.save_pretrained`, but for the block.

    Args:
        quantization_config: takes the place of any block in the config; None: the checkpoint is not quantized.
        hf_quant_config: content of hf_quant_config.json; None: no such file.

    Returns:
        {} for a model without a transformers config, whatever the blocks.

    Raises:
        UserError: transformers refuses to save one of the configs.
    """
    if not isinstance(model, PreTrainedModel):
        return {}
    with tempfile.TemporaryDirectory(prefix="nogather-") as name:
        folder = Path(name)
        try:
            _save(model, folder)
        except ValueError as error:
            raise UserError(f"the config of {_model_class(model).__name__} cannot be saved: {error}") from error
        files = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())}
    files["config.json"] = _finished(files["config.json"], model.config, quantization_config)
    if hf_quant_config is not None:
        files["hf_quant_config.json"] = json.dumps(hf_quant_config, indent=4, ensure_ascii=False) + "\n"
    return files


def sha256_sums(digests: Mapping[str, str]) -> str:
    """Text of SHA256SUMS, which `sha256sum -c` reads: hex digest by file name, sorted by name."""
    return "".join(_sum_line(name, digest) for name, digest in sorted(digests.items()))


def _sum_line(name: str, digest: str) -> str:
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    mark = "\\" if escaped != name else ""  # as sha256sum itself does
    return f"{mark}{digest}  {escaped}\n"


def _save(model: PreTrainedModel, folder: Path) -> None:
    """What `save_pretrained` does beside writing weights, without its changes to the model's configs."""
    cls = _model_class(model)
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [cls.__name__]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if cls.is_remote_code():
        custom_object_save(object.__new__(cls), folder, config=config)  # type: ignore[arg-type]  # takes either
    config.save_pretrained(folder)
    if cls.can_generate() and model.generation_config is not None:
        _generation_config(model).save_pretrained(folder)


def _model_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class the model was made with: `fully_shard` puts one of its own in front of it."""
    classes = (cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    return next(cls for cls in classes if issubclass(cls, PreTrainedModel))


def _generation_config(model: PreTrainedModel) -> Any:
    """A copy that can be saved: values for sampling say that there is sampling, as nvidia-modelopt 0.47 has it."""
    config = copy.deepcopy(model.generation_config)
    if config.top_k is not None or config.top_p is not None or config.temperature not in (None, 1.0):
        config.do_sample = True
    return config


def _finished(text: str, config: PreTrainedConfig, quantization_config: Block | None) -> str:
    """config.json with the repairs of nvidia-modelopt 0.47 (`sanitize_hf_config_for_deployment`) and the block."""
    data = json.loads(text)
    for part in data.values():
        if isinstance(part, dict) and "model_type" in part:
            part.pop("quantization_config", None)
    _complete_rope(data, config)
    _trim_layer_types(data, config)
    if quantization_config is not None:
        data["quantization_config"] = quantization_config
    return json.dumps(data, indent=2) + "\n"


def _complete_rope(data: dict[str, Any], config: PreTrainedConfig) -> None:
    """Engines want `rope_theta` beside the other values of llama3 scaling."""
    theta = data.get("rope_theta", getattr(config, "rope_theta", None))
    for rope in (data.get("rope_parameters"), data.get("rope_scaling")):
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) == "llama3" and theta is not None:
            rope.setdefault("rope_theta", theta)


def _trim_layer_types(data: dict[str, Any], config: PreTrainedConfig) -> None:
    """Layers that predict further tokens are not counted in `num_hidden_layers`, so they have no type either."""
    layers, types = data.get("num_hidden_layers"), data.get("layer_types")
    further = data.get("num_nextn_predict_layers", getattr(config, "num_nextn_predict_layers", None))
    if isinstance(types, list) and further and len(types) - further == layers:
        data["layer_types"] = types[:layers]
