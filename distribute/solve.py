"""Calibration algorithms over a model, layer by layer: inputs are watched, the layer is solved, its outputs go on.

Owns the order of things and what survives a stop. All ranks work on one layer at a time: each runs its share of the
batches, moments are summed, smoothing is searched fold by fold, rows are rounded run by run, and rank 0 writes what
was found to `parameters/<layer>.safetensors` (names: `distribute.encode`). Where calibration is sequential, the next
layer's inputs are what the coded layer gives. A layer that is written is not solved again: a run that starts anew
makes its outputs from its parameters.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from distribute.coded import Subject
from distribute.encode import PARAMETERS
from distribute.errors import StageError
from distribute.job import Progress, read_json, write_json
from distribute.layerwise import LayerwiseModel, Part, computing
from distribute.part_solver import PartSolver
from distribute.ranks import Ranks
from distribute.spill import Spill

#: Records of solved layers, beside their parameters.
SOLVED = "solved"
#: Hidden states of each rank that do not fit into memory.
HIDDEN = "hidden"


@dataclass(frozen=True)
class Limits:
    """What solving may take. None of these but `most_fallen` changes what is found."""

    moments_bytes: int = 8 << 30  # of inputs that are watched at a time, a rank
    activation_bytes: int = 8 << 30  # hidden states in memory, a rank; the others go to the workspace
    most_fallen: float = 0.1  # share of GPTQ's layers that may be rounded to the nearest instead


_LIMITS = Limits()


def solve(
    subject: Subject,
    batches: Sequence[Tensor],
    *,
    ranks: Ranks,
    folder: Path,
    progress: Progress,
    limits: Limits = _LIMITS,
    trust_remote_code: bool = False,
    threads: int = 1,
) -> dict[str, Any]:
    """Solve every layer, and leave the parameters in `folder`. Called by all ranks with equal arguments.

    Args:
        batches: token ids [n, len] int64 of all ranks together.

    Returns:
        report: `layers` by path (smoothing, errors, coverage of experts, what GPTQ gave up), `warnings`.

    Raises:
        StageError: inputs are not finite; a fold changes a layer's outputs; GPTQ gave up on too many layers.
    """
    with ranks.together("open"):
        model = LayerwiseModel.open(
            subject.checkpoint, device=ranks.device, trust_remote_code=trust_remote_code, threads=threads
        )
        model.check({module for module, scheme in subject.schemes.items() if scheme.is_solved})
    own = batches[ranks.rank :: ranks.world]
    records = _Records(folder, _digest(subject, batches), ranks)
    states = Spill(folder / HIDDEN / str(ranks.rank), limits.activation_bytes, ranks.device)
    runs = 2 if subject.is_sequential and model.layerwise else 1
    progress.start("solving", sum(batch.numel() for batch in own) * model.num_parts * runs, "token layers")
    with ranks.together("solve"), computing(threads):
        for number, part in enumerate(model.parts(own, states)):
            linears = subject.linears_of(part)
            parameters = records.read(number, part)
            is_new = parameters is None
            if parameters is None:
                solver = PartSolver(subject, part, linears, ranks)
                first = states[0] if own else None
                solver.solve(limits.moments_bytes, progress, advance=not subject.is_sequential)
                with ranks.together(f"fold {part.path}"):
                    if first is not None:
                        solver.check(first)
                parameters = records.write(number, part, solver)
                _refuse_fallen(subject, records.reports, limits.most_fallen)
            if subject.is_sequential and part.path:
                part.change(subject.changes(linears, parameters, coded=True))
            if part.path and (subject.is_sequential or not is_new):
                part.run(progress)
    states.close()
    return {"layers": records.reports, "warnings": [*model.warnings, *_warnings(records.reports)]}


class _Records:
    """Solved layers in a folder: parameters, and a record with the digest of all that they follow from."""

    def __init__(self, folder: Path, digest: str, ranks: Ranks):
        self.reports: dict[str, Any] = {}
        self._folder, self._digest, self._ranks = folder, digest, ranks
        with ranks.together("resume"):
            if ranks.is_first and not self._are_ours():
                for name in (PARAMETERS, SOLVED):
                    shutil.rmtree(folder / name, ignore_errors=True)
            if ranks.is_first:
                shutil.rmtree(folder / HIDDEN, ignore_errors=True)  # of a run that ended, of any number of ranks
                for name in (PARAMETERS, SOLVED):
                    (folder / name).mkdir(parents=True, exist_ok=True)

    def read(self, number: int, part: Part) -> dict[str, Tensor] | None:
        """The parameters of a layer that was solved before; None when it was not."""
        record = self._folder / SOLVED / f"{number}.json"
        if not self._ranks.share(record.exists()):
            return None
        self.reports[part.path or "model"] = read_json(record)["report"]
        return load_file(self._parameters(number))

    def write(self, number: int, part: Part, solver: PartSolver) -> dict[str, Tensor]:
        """Make a layer's parameters durable, then its record; the parameters as a later run will read them."""
        parameters = {name: value.cpu().contiguous().clone() for name, value in solver.parameters.items()}
        self.reports[part.path or "model"] = solver.report
        with self._ranks.together(f"write {part.path}"):
            if self._ranks.is_first:
                path = self._parameters(number)
                temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
                save_file(parameters, temporary)
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())
                temporary.replace(path)
                record = {"digest": self._digest, "report": solver.report}
                write_json(self._folder / SOLVED / f"{number}.json", record)
        return parameters

    def _parameters(self, number: int) -> Path:
        return self._folder / PARAMETERS / f"{number:05}.safetensors"

    def _are_ours(self) -> bool:
        records = list((self._folder / SOLVED).glob("*.json"))
        return bool(records) and all(read_json(record)["digest"] == self._digest for record in records)


def _digest(subject: Subject, batches: Sequence[Tensor]) -> str:
    """Of all that the parameters follow from."""
    plain = {
        "source": subject.checkpoint.digest(),
        "dialect": subject.dialect,
        "dtype": str(subject.dtype),
        "schemes": {module: scheme.model_dump(mode="json") for module, scheme in subject.schemes.items()},
        "folds": [[fold.consumers, fold.producer] for fold in subject.folds],
        "batches": [hashlib.sha256(batch.contiguous().numpy().tobytes()).hexdigest() for batch in batches],
    }
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _refuse_fallen(subject: Subject, reports: Mapping[str, Any], most: float) -> None:
    fallen = [module for report in reports.values() for module in report["fallen"]]
    total = sum(scheme.algorithm.name == "gptq" for scheme in subject.schemes.values())
    if len(fallen) > most * total:
        raise StageError(
            f"GPTQ could not solve {len(fallen)} of {total} layers, for example {fallen[0]}: the moments of their "
            "inputs cannot be factored; give more or other calibration text, or more damping"
        )


def _warnings(reports: Mapping[str, Any]) -> list[str]:
    found = []
    fallen = [module for report in reports.values() for module in report["fallen"]]
    if fallen:
        found.append(
            f"GPTQ could not solve {len(fallen)} layers, which are rounded to the nearest: {', '.join(fallen)}"
        )
    unseen = [module for report in reports.values() for module in report["unseen"]]
    if unseen:
        found.append(
            f"{len(unseen)} layers of experts saw no token; they are coded without calibration, "
            f"for example {unseen[0]}"
        )
    return found
