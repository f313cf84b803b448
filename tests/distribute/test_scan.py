from pathlib import Path

import pytest
import torch

from distribute.errors import SourceError
from distribute.job import Progress
from distribute.layers import Matrix
from distribute.ranks import Ranks
from distribute.scan import scan
from distribute.source import Checkpoint
from tests.checkpoints import decoder_tensors, write_checkpoint

MODULE = "model.layers.1.mlp.down_proj"
WEIGHT = f"{MODULE}.weight"


def _scan(
    folder: Path, tensors: dict[str, torch.Tensor], measured: dict[str, Matrix] | None = None
) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(write_checkpoint(folder / "source", tensors))
    rows, columns = tensors[WEIGHT].shape
    measured = measured or {MODULE: Matrix(WEIGHT, 0, (rows, columns))}
    return scan(checkpoint, measured, Ranks.start(), workspace=folder, progress=Progress(folder, 0))


def test_a_weight_is_measured_exactly(tmp_path: Path) -> None:
    tensors = decoder_tensors()
    found = _scan(tmp_path, tensors)
    assert set(found) == {MODULE}
    assert torch.equal(found[MODULE], tensors[WEIGHT].float().abs().max())


def test_modules_that_share_a_tensor_are_measured_apart(tmp_path: Path) -> None:
    experts = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    measured = {
        f"{index}.{half}": Matrix("experts", 6 * index + 3 * half, (3, 8)) for index in range(5) for half in (0, 1)
    }
    found = _scan(tmp_path, decoder_tensors() | {"experts": experts}, measured)
    for index in range(5):
        for half in (0, 1):
            assert found[f"{index}.{half}"] == experts[index, 3 * half : 3 * half + 3].float().abs().max()


@pytest.mark.parametrize("name", [WEIGHT, "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize(("value", "counts"), [(float("nan"), "1 NaN and 0 Inf"), (-float("inf"), "0 NaN and 1 Inf")])
def test_a_value_that_is_not_finite_is_named_with_its_place(
    tmp_path: Path, name: str, value: float, counts: str
) -> None:
    tensors = decoder_tensors()
    place = (5,) if tensors[name].dim() == 1 else (5, 7)
    tensors[name][place] = value
    with pytest.raises(SourceError) as caught:
        _scan(tmp_path, tensors)
    assert f"{name} holds {counts}, first at index {list(place)}" in str(caught.value)


def test_every_damaged_tensor_is_listed(tmp_path: Path) -> None:
    tensors = decoder_tensors()
    for name in (WEIGHT, "model.norm.weight"):
        tensors[name].fill_(float("nan"))
    with pytest.raises(SourceError, match=r"down_proj.*model\.norm.*2 damaged tensors"):
        _scan(tmp_path, tensors)


def test_integers_and_empty_tensors_are_passed_over(tmp_path: Path) -> None:
    tensors = decoder_tensors() | {"a.ids": torch.arange(4), "a.empty": torch.zeros(0, 3)}
    assert set(_scan(tmp_path, tensors)) == {MODULE}
