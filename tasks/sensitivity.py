"""The sensitivity task: what each preset costs in each group of layers; then the recipe that a budget chooses.

What was measured depends on no budget, so another one measures nothing again. Beside the report of a run it leaves
sensitivity.md, sensitivity.png and recipe.yaml: a recipe that can be read, changed and used as it is.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import log10
from pathlib import Path

import yaml

from distribute.allocation import Allocation, Choice, Group
from distribute.auto import Table, choose
from distribute.errors import DataError
from distribute.layers import KEEP
from distribute.recipe import Recipe
from tasks.plots import plot_sensitivity
from tasks.run import Run
from tasks.stage import StageResult, run_step
from tasks.step import Step

log = logging.getLogger(__name__)

ANY_BUDGET = 32.0
RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class Chosen:
    """What a budget chooses. `run`: with the recipe that is written out."""

    run: Run
    table: Table
    allocation: Allocation

    @property
    def recipe_path(self) -> Path:
        """The recipe that was chosen, as a file."""
        return self.run.folder / RECIPE

    @property
    def report_path(self) -> Path:
        """What led to it, for people."""
        return self.run.folder / "sensitivity.md"

    @property
    def counts(self) -> dict[str, int]:
        """Groups by preset, the most frequent first."""
        return dict(Counter(choice.preset for choice in self.allocation.choices).most_common())


def sensitivity_step(run: Run) -> Step:
    """What is measured: of the recipe all but the budget.

    Raises:
        DataError: there is no calibration text.
    """
    if run.data is None:
        raise DataError(
            "a recipe with auto measures what each preset loses and needs text: give --calib FILE "
            "(.txt, .jsonl, .parquet or hf://datasets/org/name)"
        )
    assert run.recipe.auto is not None
    auto = run.recipe.auto.model_copy(update={"bits": ANY_BUDGET})
    measured = replace(run, recipe=run.recipe.model_copy(update={"auto": auto}))
    return Step(measured, "sensitivity", options=asdict(run.calibration), data=run.data)


def sensitivity(run: Run) -> StageResult:
    """Leave sensitivity.json."""
    step = sensitivity_step(run)
    assert run.data is not None
    return run_step(step, job_options={"data": str(run.data.path), "trust_remote_code": run.trust_remote_code})


def choose_presets(run: Run, measured: StageResult) -> Chosen:
    """The run with its presets written out. What led to them goes to the run's folder.

    Raises:
        BudgetError: the budget cannot be met.
    """
    table = Table.read(measured.folder)
    recipe, allocation = choose(run.recipe, table)
    chosen = Chosen(replace(run, recipe=recipe), table, allocation)
    run.folder.mkdir(parents=True, exist_ok=True)
    chosen.report_path.write_text(make_markdown(run, chosen), encoding="utf-8")
    chosen.recipe_path.write_text(recipe_yaml(recipe), encoding="utf-8")
    table.write(run.folder)
    levels = levels_by_preset(table)
    plot_sensitivity(levels, run.folder / "sensitivity.png", title=f"{run.source.address}: outputs by preset")
    log.info(
        "auto: %s; %.3f bits a weight of the %g allowed",
        ", ".join(f"{count} groups {preset}" for preset, count in chosen.counts.items()),
        allocation.bits,
        run.recipe.auto.bits if run.recipe.auto else 0,
    )
    return chosen


def recipe_yaml(recipe: Recipe) -> str:
    """A recipe file with what differs from the defaults."""
    values = recipe.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    return yaml.safe_dump({"preset": recipe.preset} | values, sort_keys=False, width=120)


def levels_by_preset(table: Table) -> dict[str, list[dict[str, str | float | None]]]:
    """By preset: groups as rows with the name of their first weight and their error as SQNR in dB."""
    found: dict[str, list[dict[str, str | float | None]]] = {}
    for group in table.groups:
        for choice in group.choices:
            if choice.preset != KEEP:
                row = {"name": f"{group.names[0]}.weight", "sqnr_db": _decibel(choice)}
                found.setdefault(choice.preset, []).append(row)
    return found


def make_markdown(run: Run, chosen: Chosen) -> str:
    """The table for people: what each group would lose, and what was chosen."""
    assert run.recipe.auto is not None
    presets = list(dict.fromkeys(choice.preset for group in chosen.table.groups for choice in group.choices))
    head = ["group", "weights", *presets]
    rows = [
        _row(group, choice, presets)
        for group, choice in zip(chosen.table.groups, chosen.allocation.choices, strict=True)
    ]
    lines = [" | ".join(cells) for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(
        [
            f"# {run.source.address}: sensitivity",
            "",
            f"{chosen.allocation.bits:.3f} bits a weight in the mean, of {run.recipe.auto.bits:g} allowed. Each "
            "cell: squared error of the outputs by their size, and bits a weight with scales; the chosen is bold. "
            f"`{RECIPE}` beside this file is the recipe.",
            "",
            "![by layer](sensitivity.png)",
            "",
            *(f"| {line} |" for line in lines),
            "",
        ]
    )


def _row(group: Group, chosen: Choice, presets: Sequence[str]) -> list[str]:
    by_preset = {choice.preset: choice for choice in group.choices}
    cells = []
    for preset in presets:
        choice = by_preset.get(preset)
        text = "-" if choice is None else f"{choice.error:.2e} ({choice.bits / group.weights:.2f})"
        cells.append(f"**{text}**" if choice == chosen else text)
    more = f" and {len(group.names) - 1} more" if len(group.names) > 1 else ""
    return [group.names[0] + more, str(group.weights), *cells]


def _decibel(choice: Choice) -> float | None:
    return -10 * log10(choice.error) if choice.error > 0 else None
