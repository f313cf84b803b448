from pathlib import Path

import pytest
import torch

from distribute.errors import SourceError
from distribute.job import Progress
from distribute.ranks import Ranks
from distribute.scan import scan
from distribute.source import Checkpoint
from tests.checkpoints import decoder_tensors, write_checkpoint

WEIGHT = "model.layers.1.mlp.down_proj.weight"


def _scan(
    folder: Path, tensors: dict[str, torch.Tensor], measured: list[str], *, per_row: bool = True
) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(write_checkpoint(folder / "source", tensors))
    progress = Progress(folder, 0)
    return scan(checkpoint, measured, Ranks.start(), per_row=per_row, workspace=folder, progress=progress)


def test_rows_are_measured_exactly(tmp_path: Path) -> None:
    tensors = decoder_tensors()
    rows = _scan(tmp_path, tensors, [WEIGHT])
    assert set(rows) == {WEIGHT}
    assert torch.equal(rows[WEIGHT], tensors[WEIGHT].float().abs().amax(dim=1))


@pytest.mark.parametrize("name", [WEIGHT, "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize(("value", "counts"), [(float("nan"), "1 NaN and 0 Inf"), (-float("inf"), "0 NaN and 1 Inf")])
def test_a_value_that_is_not_finite_is_named_with_its_place(
    tmp_path: Path, name: str, value: float, counts: str
) -> None:
    tensors = decoder_tensors()
    place = (5,) if tensors[name].dim() == 1 else (5, 7)
    tensors[name][place] = value
    with pytest.raises(SourceError) as caught:
        _scan(tmp_path, tensors, [WEIGHT])
    assert f"{name} holds {counts}, first at index {list(place)}" in str(caught.value)


def test_every_damaged_tensor_is_listed(tmp_path: Path) -> None:
    tensors = decoder_tensors()
    for name in (WEIGHT, "model.norm.weight"):
        tensors[name].fill_(float("nan"))
    with pytest.raises(SourceError, match=r"down_proj.*model\.norm.*2 damaged tensors"):
        _scan(tmp_path, tensors, [WEIGHT])


def test_integers_and_empty_tensors_are_passed_over(tmp_path: Path) -> None:
    tensors = decoder_tensors() | {"a.ids": torch.arange(4), "a.empty": torch.zeros(0, 3)}
    assert set(_scan(tmp_path, tensors, [WEIGHT])) == {WEIGHT}


def test_a_per_tensor_recipe_gets_one_number(tmp_path: Path) -> None:
    tensors = decoder_tensors()
    found = _scan(tmp_path, tensors, [WEIGHT], per_row=False)
    assert torch.equal(found[WEIGHT], tensors[WEIGHT].float().abs().max().reshape(1))
