"""The plan: for every tensor of the checkpoint its source, codec, dtype, shape, file, byte range. Pure, torch-free.

A function of source headers, recipe and shard size alone: no weights, no ranks, no statistics. The values that
statistics decide (scales) lie beside it in plan.safetensors under the names of their output tensors.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from distribute.dialects.spec import TensorSpec, implied_modules
from distribute.dialects.table import DIALECTS
from distribute.errors import RecipeError, SourceError
from distribute.folds import KEEPING, Fold, plan_folds
from distribute.job import read_json, write_json
from distribute.layers import QUANTIZE, Decision, Matrix, attention_modules, decide, matrix_of, natural_key
from distribute.recipe import Recipe
from distribute.scheme import Scheme
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
    module: str = ""
    first_row: int = 0
    rows: int = 0
    columns: int = 0
    per: int = 1
    together: int = 1


@dataclass(frozen=True, slots=True)
class Output(TensorEntry):
    """One tensor of the checkpoint.

    Of a coded one: `source` is the tensor it is made of, `module` the linear layer it belongs to. The weight is the
    `rows` rows from `first_row` on of the source (as a matrix of `columns` columns); one row of this tensor is made
    of `per` rows of the weight, and `together` rows are coded at once.
    """

    codec: str  # COPY, VALUE or a key of `distribute.numerics.table.find_codec`
    source: str | None = None
    module: str = ""
    first_row: int = 0
    rows: int = 0
    columns: int = 0
    per: int = 1
    together: int = 1

    @property
    def suffix(self) -> str:
        """Name under which the dialect stores it, after the module's."""
        return self.name.removeprefix(f"{self.module}.")

    @property
    def is_coded(self) -> bool:
        """Whether it is coded from rows of the source."""
        return self.codec not in (COPY, VALUE)


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
    def schemes(self) -> dict[str, Scheme]:
        """How each quantized module is coded, in natural order. Equal schemes are one object."""
        known = cache(self.recipe.scheme_of)
        return {d.module: known(d.preset, d.group_size) for d in self.decisions if d.action == QUANTIZE}

    @cached_property
    def matrices(self) -> dict[str, Matrix]:
        """Where the weight of each quantized module lies."""
        found: dict[str, Matrix] = {}
        for output in self.outputs:
            if output.is_coded and output.module not in found:
                assert output.source is not None
                found[output.module] = Matrix(output.source, output.first_row, (output.rows, output.columns))
        return found

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
            "tensors": [_without_defaults(output) for output in self.outputs],
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
    model_dtype = find_model_dtype(checkpoint, decisions)
    schemes = {
        module: recipe.scheme_of(decision.preset, decision.group_size)
        for module, decision in decisions.items()
        if decision.action == QUANTIZE
    }
    specs, origins = _outputs(checkpoint, schemes, dropped, recipe, model_dtype)
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
        warnings=[*checkpoint.warnings, *_oversized(files, outputs, max_shard_bytes), *_cut_blocks(outputs)],
        **_json_blocks(checkpoint, decisions, schemes, recipe),
    )


def find_folds(checkpoint: Checkpoint, schemes: Mapping[str, Scheme], recipe: Recipe) -> list[Fold]:
    """What takes up the smoothing of which layers."""
    shapes = {name: entry.shape for name, entry in checkpoint.tensors.items()}
    return plan_folds(schemes, shapes, recipe.dialect, kv_cache=recipe.kv_cache is not None)


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
    return Output(*place, *(getattr(origin, field) for field in _Origin.__slots__))


def _without_defaults(output: Output) -> dict[str, Any]:
    """As JSON, short: a plan may have a million of them."""
    return {key: value for key, value in asdict(output).items() if value != _DEFAULTS.get(key)} | {
        "shape": list(output.shape)
    }


def _outputs(
    checkpoint: Checkpoint,
    schemes: Mapping[str, Scheme],
    dropped: tuple[str, ...],
    recipe: Recipe,
    model_dtype: str,
) -> tuple[list[Spec], dict[str, _Origin]]:
    """Every output tensor, and by its name what it is made of. Equal values are one object: there may be millions."""
    dialect = DIALECTS[recipe.dialect]
    origins = {name: _Origin(COPY, name) for name in checkpoint.tensors if name not in dropped}
    specs = {name: (name, entry.dtype, entry.shape) for name, entry in checkpoint.tensors.items() if name in origins}
    tensors_of = cache(partial(dialect.tensors, model_dtype=model_dtype))
    folds = find_folds(checkpoint, schemes, recipe)
    kept = {m for fold in folds if fold.kind == "kept" for m in fold.consumers if recipe.dialect in KEEPING}
    origins |= {name: _Origin(VALUE, name) for fold in folds for name in fold.absorbing}
    for module, scheme in schemes.items():
        matrix = matrix_of(module, checkpoint.tensors)
        specs.pop(matrix.source, None)
        for name, dtype, shape, origin in _coded(
            module, matrix, dialect.codec(scheme), tensors_of(matrix.shape, scheme, smoothed=module in kept)
        ):
            specs[name], origins[name] = (name, dtype, shape), origin
    scales = dialect.kv_tensors(recipe.kv_cache, model_dtype) if recipe.kv_cache else ()
    for module in attention_modules(checkpoint) if scales else ():
        for kv in scales:
            name = ".".join(filter(None, (module, kv.module, kv.suffix)))
            specs[name], origins[name] = (name, kv.dtype, kv.shape), _Origin(VALUE)
    return list(specs.values()), origins


def _coded(
    module: str, matrix: Matrix, codec: str, tensors: tuple[TensorSpec, ...]
) -> Iterator[tuple[str, str, tuple[int, ...], _Origin]]:
    """Name, dtype, shape and origin of the stored tensors of a quantized module."""
    together = max(tensor.per for tensor in tensors)
    place = (matrix.source, module, matrix.first_row, *matrix.shape)
    for tensor in tensors:
        origin = _Origin(codec, *place, tensor.per, together) if tensor.per else _VALUE
        yield f"{module}.{tensor.suffix}", tensor.dtype, tensor.shape, origin


_VALUE = _Origin(VALUE)
_DEFAULTS = {field.name: field.default for field in fields(Output) if field.default is not MISSING}


def _json_blocks(
    checkpoint: Checkpoint, decisions: Mapping[str, Decision], schemes: Mapping[str, Scheme], recipe: Recipe
) -> dict[str, Any]:
    """The edited part of config.json and the further JSON files."""
    dialect = DIALECTS[recipe.dialect]
    plain = [module for module in decisions if module not in schemes]
    embeddings = [module for module in plain if f"{module}.weight".endswith(EMBEDDING_SUFFIXES)]
    linears = {module for module in plain if module not in embeddings}
    kept = sorted(linears | implied_modules(checkpoint.tensors))
    arguments: dict[str, Any] = {"kv_cache": recipe.kv_cache, "embeddings": embeddings}
    block = dialect.quantization_config(schemes, kept, **arguments)
    extra = dialect.extra_files(schemes, kept, **arguments)
    return {"config_changes": {"quantization_config": block}, "json_files": extra}


def _oversized(files: list[ShardFile], outputs: list[Output], limit: int) -> list[str]:
    return [
        f"{output.name} has {output.end - output.begin} bytes, more than the shard limit of {limit}: "
        f"it gets a file of its own"
        for output in outputs
        if output.end - output.begin > limit
    ]


def _cut_blocks(outputs: list[Output]) -> list[str]:
    """A warning when blocks are cut off at the edge of a weight: legal, but loaders want whole ones."""
    scales = [output for output in outputs if output.codec.endswith(".block") and output.per > 1]
    cut = sorted(scale.module for scale in scales if scale.rows % scale.per or scale.columns % scale.per)
    if not cut:
        return []
    return [
        f"{len(cut)} weights are no whole blocks of 128 x 128, for example {cut[0]}; vLLM 0.32 and transformers 5.23 "
        "refuse such a checkpoint: fp8 and fp8_dynamic have no blocks"
    ]
