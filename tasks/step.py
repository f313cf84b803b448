"""What one stage is made from, and the key that follows from it.

A key is a pure function of everything that decides the stage's bytes: stage and schema, source revision,
upstream keys, full recipe, options, data digest, the code of `distribute` and the libraries that compute.
The number of ranks, hosts, paths and log levels decide no byte and are no part of it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import distribute
from tasks.run import DataFile, Run

#: Raised when the meaning of a stage's files changes although its code digest might not.
SCHEMA = {"sensitivity": 1, "calibrate": 1, "quantize": 1, "export": 1, "verify": 1}
#: Libraries that compute or write what a stage leaves.
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "jinja2")
KEY_DIGITS = 20  # 80 bits of the sha256: short enough for a path


@dataclass(frozen=True)
class Upstream:
    """An artifact of an earlier stage: the key that made it and the folder that holds it."""

    key: str
    folder: Path


@dataclass(frozen=True)
class Step:
    """One stage of one run."""

    run: Run
    stage: str  # one of distribute.job.STAGES
    inputs: Mapping[str, Upstream] = field(default_factory=dict)  # artifact name -> where it is
    options: Mapping[str, Any] = field(default_factory=dict)  # those that change bytes
    data: DataFile | None = None
    is_fresh: bool = False  # made anew in every run: the run is part of the key

    @cached_property
    def made_from(self) -> dict[str, Any]:
        """Everything that decides the stage's bytes, as JSON."""
        return {
            "stage": self.stage,
            "schema": SCHEMA[self.stage],
            "recipe": self.run.recipe.model_dump(mode="json"),
            "source": self.run.source.revision,
            "data": self.data.digest if self.data else None,
            "options": dict(self.options),
            "libraries": {name: version(name) for name in LIBRARIES},
            "code": code_digest(),
            "inputs": {name: upstream.key for name, upstream in self.inputs.items()},
            "run": self.run.run_id if self.is_fresh else None,
        }

    @cached_property
    def key(self) -> str:
        """Names the stage's folder: sha256 of `made_from` as canonical JSON."""
        text = json.dumps(self.made_from, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]

    @property
    def folder(self) -> Path:
        """The stage's folder on the workspace."""
        return self.run.workspace / self.stage / self.key

    def as_input(self) -> Upstream:
        """This step as input of a later one."""
        return Upstream(self.key, self.folder)


@cache
def code_digest() -> str:
    """sha256 over the name and text of every Python file of `distribute`."""
    root = Path(distribute.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One phrase for each value of `made_from` that differs, in its order: "recipe.preset: fp8 -> fp8_dynamic"."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    return [
        name if _is_digest(old.get(name), new.get(name)) else f"{name}: {old.get(name)} -> {new.get(name)}"
        for name in (new | old)
        if old.get(name) != new.get(name)
    ]


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else key)
    else:
        yield name, value


def _is_digest(*values: Any) -> bool:
    return any(isinstance(value, str) and len(value) >= KEY_DIGITS for value in values)
