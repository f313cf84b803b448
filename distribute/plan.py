"""The plan: for every tensor of the checkpoint its source, codec, dtype, shape, file, byte range. Pure, torch-free.

A function of source headers, recipe and shard size alone: no weights, no ranks, no statistics. The values that
statistics decide (scales) lie beside it in plan.safetensors under the names of their output tensors.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from distribute.dialects.spec import Dialect, implied_modules
from distribute.dialects.table import DIALECTS
from distribute.errors import RecipeError, SourceError
from distribute.job import read_json, write_json
from distribute.layers import QUANTIZE, Decision, decide, natural_key
from distribute.recipe import Recipe
from distribute.shards import ShardFile, Spec, plan_files
from distribute.source import EMBEDDING_SUFFIXES, Checkpoint, TensorEntry, text_config

COPY = "copy"  # the bytes of the source
VALUE = "value"  # a tensor of plan.safetensors
#: safetensors dtype by the name that config.json uses.
CONFIG_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class _Origin:
    """What an output tensor is made of; the fields that an `Output` has beside its place."""

    codec: str
    source: str | None = None
    scale: str | None = None


@dataclass(frozen=True, slots=True)
class Output(TensorEntry):
    """One tensor of the checkpoint. `source`: tensor it is made of; `scale`: output tensor that holds its scale."""

    codec: str  # COPY, VALUE or a key of CODECS
    source: str | None = None
    scale: str | None = None


@dataclass(frozen=True)
class Plan:
    """Everything that export needs besides the values."""

    recipe: Recipe
    source_digest: str
    source_bytes: int
    model_dtype: str  # weights are cast to it before they are coded, as loading the model does
    max_shard_bytes: int
    files: list[ShardFile]
    outputs: list[Output]
    decisions: list[Decision]
    dropped: list[str]  # source tensors that are not written: tied copies
    config_changes: dict[str, Any]
    json_files: dict[str, Any]
    warnings: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all weight files."""
        return sum(file.size for file in self.files)

    @property
    def quantized(self) -> list[str]:
        """Quantized modules in natural order."""
        return [decision.module for decision in self.decisions if decision.action == QUANTIZE]

    @cached_property
    def by_file(self) -> dict[str, list[Output]]:
        """Outputs of each file, in byte order."""
        groups: dict[str, list[Output]] = defaultdict(list)
        for output in self.outputs:
            groups[output.file].append(output)
        return groups

    def check_source(self, checkpoint: Checkpoint) -> None:
        """Raise SourceError when the checkpoint is not the one that was planned."""
        if checkpoint.digest() != self.source_digest:
            raise SourceError(f"{checkpoint.folder} has changed since the plan was made; run the whole job again")

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        plain = {key: value for key, value in vars(self).items() if key in self.__dataclass_fields__}
        del plain["outputs"]
        return plain | {
            "recipe": self.recipe.model_dump(mode="json"),
            "files": [asdict(file) for file in self.files],
            "tensors": [asdict(output) | {"shape": list(output.shape)} for output in self.outputs],
            "decisions": [asdict(decision) for decision in self.decisions],
        }

    def write(self, path: Path) -> None:
        """Write plan.json."""
        write_json(path, self.to_json())

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """Read a plan written by `write`."""
        values = read_json(path)
        return cls(
            **values
            | {
                "recipe": Recipe.model_validate(values["recipe"]),
                "files": [ShardFile(**file) for file in values["files"]],
                "outputs": [Output(**tensor | {"shape": tuple(tensor["shape"])}) for tensor in values.pop("tensors")],
                "decisions": [Decision(**decision) for decision in values["decisions"]],
            }
        )


def make_plan(checkpoint: Checkpoint, recipe: Recipe, max_shard_bytes: int) -> Plan:
    """Plan the checkpoint that this recipe makes of a source.

    Raises:
        RecipeError, SourceError: the recipe does not fit the source; see `decide`.
    """
    checkpoint.refuse_quantized()
    decisions = decide(checkpoint, recipe)
    dropped = checkpoint.tied_copies()
    for name in dropped:
        if decisions[name.removesuffix(".weight")].action == QUANTIZE:
            raise RecipeError(
                f"the recipe includes {name}, which is tied to the embedding and cannot be quantized alone; "
                "take it out of include, or untie it (tie_word_embeddings: false in config.json)"
            )
    dialect = DIALECTS[recipe.dialect]
    model_dtype = find_model_dtype(checkpoint, decisions)
    specs, origins = _outputs(checkpoint, decisions, dropped, recipe, model_dtype)
    files, placed = plan_files(specs, max_shard_bytes)
    outputs = [_join(tensor, origins[tensor.name]) for tensor in placed]
    return Plan(
        recipe=recipe,
        source_digest=checkpoint.digest(),
        source_bytes=checkpoint.nbytes,
        model_dtype=model_dtype,
        max_shard_bytes=max_shard_bytes,
        files=files,
        outputs=outputs,
        decisions=sorted(decisions.values(), key=lambda decision: natural_key(decision.module)),
        dropped=list(dropped),
        warnings=[*checkpoint.warnings, *_oversized(files, outputs, max_shard_bytes)],
        **_json_blocks(checkpoint, decisions, dropped, dialect, recipe),
    )


def find_model_dtype(checkpoint: Checkpoint, decisions: Mapping[str, Decision]) -> str:
    """The dtype in which the model is loaded: config.json's, else that of the first quantized weight."""
    text = text_config(checkpoint.config)
    for config in (text, checkpoint.config):
        named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
        if named in CONFIG_DTYPES:
            return CONFIG_DTYPES[named]
    first = next(module for module, decision in decisions.items() if decision.action == QUANTIZE)
    return checkpoint.tensors[f"{first}.weight"].dtype


def _join(placed: TensorEntry, origin: _Origin) -> Output:
    place = (placed.name, placed.dtype, placed.shape, placed.file, placed.begin, placed.end)
    return Output(*place, origin.codec, origin.source, origin.scale)


def _outputs(
    checkpoint: Checkpoint,
    decisions: Mapping[str, Decision],
    dropped: tuple[str, ...],
    recipe: Recipe,
    model_dtype: str,
) -> tuple[list[Spec], dict[str, _Origin]]:
    """Every output tensor, and by its name what it is made of. Equal values are one object: there may be millions."""
    dialect = DIALECTS[recipe.dialect]
    codec, scheme, value = dialect.codec(recipe.scheme), recipe.scheme, _Origin(VALUE)
    tensors_of = cache(lambda rows, columns: dialect.tensors((rows, columns), scheme, model_dtype))
    specs: list[Spec] = []
    origins: dict[str, _Origin] = {}
    for entry in checkpoint.tensors.values():
        module = entry.name.removesuffix(".weight")
        decision = decisions.get(module)
        if entry.name in dropped:
            continue
        if decision is None or module == entry.name or decision.action != QUANTIZE:
            specs.append((entry.name, entry.dtype, entry.shape))
            origins[entry.name] = _Origin(COPY, entry.name)
            continue
        tensors = tensors_of(*entry.shape)
        names = {tensor.role: f"{module}.{tensor.suffix}" for tensor in tensors}
        coded = _Origin(codec, entry.name, names["weight_scale"])
        for tensor in tensors:
            specs.append((names[tensor.role], tensor.dtype, tensor.shape))
            origins[names[tensor.role]] = coded if tensor.role == "weight" else value
    return specs, origins


def _json_blocks(
    checkpoint: Checkpoint,
    decisions: Mapping[str, Decision],
    dropped: tuple[str, ...],
    dialect: Dialect,
    recipe: Recipe,
) -> dict[str, Any]:
    """The edited part of config.json and the further JSON files."""
    quantized = [module for module, decision in decisions.items() if decision.action == QUANTIZE]
    plain = [module for module, decision in decisions.items() if decision.action != QUANTIZE]
    embeddings = [module for module in plain if f"{module}.weight".endswith(EMBEDDING_SUFFIXES)]
    linears = {module for module in plain if module not in embeddings}
    kept = sorted(linears | implied_modules(checkpoint.tensors))
    block = dialect.quantization_config(quantized, kept, recipe.scheme, embeddings=embeddings)
    extra = dialect.extra_files(quantized, kept, recipe.scheme, embeddings=embeddings)
    return {"config_changes": {"quantization_config": block}, "json_files": extra}


def _oversized(files: list[ShardFile], outputs: list[Output], limit: int) -> list[str]:
    return [
        f"{output.name} has {output.end - output.begin} bytes, more than the shard limit of {limit}: "
        f"it gets a file of its own"
        for output in outputs
        if output.end - output.begin > limit
    ]
