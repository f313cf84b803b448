"""Ranges by percentile and least squared error over a model, against its inputs seen by plain hooks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from distribute import coded, scheme
from tests.distribute.test_observe import plain_model
from tests.distribute.test_solve import logits, solved, subject_of
from tests.toy_codec import find_toy_codec


@pytest.mark.parametrize("name", ["percentile", "mse"])
def test_ranges_that_leave_something_out(
    name: str, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coded, "find_codec", find_toy_codec)
    monkeypatch.setattr(scheme, "SOLVED", (*scheme.SOLVED, name))
    folder = tiny_model("llama")
    subject = subject_of(folder, "int8", "modelopt", algorithm={"name": name, "percentile": 90.0})
    parameters, _ = solved(subject, tmp_path)
    model, inputs = plain_model(folder), dict[str, list[Tensor]]()
    for module in subject.schemes:
        model.get_submodule(module).register_forward_pre_hook(
            lambda _, args, module=module: inputs.setdefault(module, []).append(args[0].flatten().float().abs())
        )
    logits(model)
    covered = []
    for module, seen in inputs.items():
        magnitudes, limit = torch.cat(seen), parameters[f"{module}.input_absmax"]
        covered.append(float((magnitudes <= limit).double().mean()))
        weight = load_file(folder / "model.safetensors")[f"{module}.weight"].float().abs()
        low, high = parameters[f"{module}.low"], parameters[f"{module}.high"]
        inside = (weight <= torch.maximum(-low, high)).float().mean(dim=1)
        assert float(inside.min()) >= (0.9 if name == "percentile" else 0.5)
        assert float(inside.max()) <= (0.95 if name == "percentile" else 1)
        assert float(inside.min()) < 1
    if name == "percentile":
        assert 0.9 <= min(covered) <= max(covered) < 0.91
    else:
        assert 0.9 < min(covered) <= max(covered) <= 1
