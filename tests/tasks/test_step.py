from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from distribute.errors import DataError
from tasks.calibrate import calibrate_step
from tasks.export import export_step
from tasks.quantize import quantize_step
from tasks.run import Calibration, DataFile, Run, Source
from tasks.step import differences
from tasks.verify import verify_step

MakeRun = Callable[..., Run]


def keys(run: Run) -> list[str]:
    return [step(run).key for step in (calibrate_step, quantize_step, export_step, verify_step)]


def test_a_key_is_stable_and_short(make_run: MakeRun) -> None:
    assert keys(make_run()) == keys(make_run())
    assert {len(key) for key in keys(make_run())} == {20}


def test_what_decides_no_byte_changes_no_key(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    moved = replace(
        run,
        run_id="other",
        workspace=tmp_path / "elsewhere",
        nproc=7,
        target="s3://bucket/prefix",
        overwrite=True,
        trust_remote_code=True,
        source=replace(run.source, folder=tmp_path / "moved", address="other/name"),
        data=DataFile("other name", tmp_path / "moved.txt", run.data.digest if run.data else ""),
    )
    assert keys(moved) == keys(run)


@pytest.mark.parametrize(
    ("changes", "first_changed"),
    [
        ({"source": Source("org/model", Path("source"), "c" * 64)}, 0),
        ({"data": DataFile("text.txt", Path("text.txt"), "d" * 64)}, 0),
        ({"calibration": Calibration(seed=1)}, 0),
        ({"recipe": {"preset": "fp8", "ignore": ["*.down_proj"]}}, 0),
        ({"max_shard_bytes": 10**6}, 1),
    ],
)
def test_a_change_reruns_what_depends_on_it(make_run: MakeRun, changes: dict, first_changed: int) -> None:
    before, after = keys(make_run()), keys(make_run(**changes))
    assert [a == b for a, b in zip(before, after, strict=True)] == [i < first_changed for i in range(4)]


def test_changed_code_and_libraries_change_every_key(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    before = keys(make_run())
    monkeypatch.setattr("tasks.step.version", lambda name: "99.0")
    assert not set(before) & set(keys(make_run()))
    monkeypatch.undo()
    monkeypatch.setattr("tasks.step.code_digest", lambda: "other code")
    assert not set(before) & set(keys(make_run()))


def test_a_recipe_with_dynamic_inputs_ignores_the_text(make_run: MakeRun) -> None:
    dynamic = {"preset": "fp8_dynamic"}
    assert keys(make_run(recipe=dynamic)) == keys(
        make_run(recipe=dynamic, data=None, calibration=Calibration(seed=5))
    )


def test_a_recipe_that_needs_text_says_how_to_give_it(make_run: MakeRun) -> None:
    with pytest.raises(DataError, match="recipe fp8 measures inputs and needs text: give --calib FILE"):
        calibrate_step(make_run(data=None))


def test_differences_name_values_but_not_digests() -> None:
    before = {"recipe": {"preset": "fp8", "ignore": []}, "options": {}, "code": "1" * 64, "data": None}
    after = {
        "recipe": {"preset": "fp8", "ignore": ["a"]},
        "options": {"seed": 1},
        "code": "2" * 64,
        "data": None,
    }
    assert differences(before, after) == ["recipe.ignore: [] -> ['a']", "options.seed: None -> 1", "code"]
