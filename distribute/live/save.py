"""`distributed_save_hf_checkpoint`: a live, sharded model becomes a Hugging Face checkpoint without a gather.

    read      each rank looks at its part of the state; names, placements and replicas are compared
    plan      every rank makes the same plan: names on the Hub, scales, files, byte ranges
    prepare   rank 0 creates the files at full size in a hidden folder beside the export folder
    write     each rank codes and writes the rows it owns; only rows of tensors cut across rows travel
    seal      every file is flushed and re-read once, by one rank, for its sha256
    commit    rank 0 writes index and JSON files and swaps the folders by a rename

A failure of any rank at any step ends the call on all of them with one error and leaves the export folder as it was.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distribute.errors import UserError
from distribute.live.blocks import quantization_blocks, read_kv_format, read_layers
from distribute.live.collect import (
    Meshes,
    StateTensor,
    compare,
    measure_rows,
    read_state,
)
from distribute.live.config import config_files, sha256_sums
from distribute.live.equal import check_replicas, refuse_unequal_ties, refuse_unlike_plans
from distribute.live.folder import Staging, await_visible
from distribute.live.names import hub_module_names, hub_tensors
from distribute.live.plan import LivePlan, make_live_plan
from distribute.live.quantizers import read_quantized, share_amax
from distribute.live.request import Request, unwrapped
from distribute.live.state import clean_state
from distribute.live.ties import tied_aliases
from distribute.live.write import Writer, write_rows, write_values
from distribute.ranks import Ranks
from distribute.shards import file_header, preallocate, sha256, write_index
from distribute.sizes import format_size
from distribute.source import TensorEntry
from distribute.state_file import VISIBLE_LIMIT_S

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0
SUMS_NAME = "SHA256SUMS"
KV_SCALES = (".k_scale", ".v_scale")


def distributed_save_hf_checkpoint(
    model: torch.nn.Module,
    export_dir: Path | str,
    maxbound: float,
    kv_cache_format: str | None,
    max_shard_size: int | str = "10GB",
    is_modelopt_qlora: bool = False,
) -> None:
    """Write a live model, sharded or not, as a Hugging Face checkpoint. Called by all ranks of the process group.

    The parameters may be DTensors of any placement but Partial, plain tensors, or both; on any device. Weights that
    nvidia-modelopt has fake-quantized are coded on the way (FP8, NVFP4); weights that are packed already, and plain
    ones, keep their bytes. The checkpoint depends on the model alone: world size and placements change no byte. The
    model is not changed. Works inside `torch.inference_mode()` and `no_grad`, and without.

    Args:
        model: a transformers model (or any module, which then gets weights and no config.json).
        export_dir: a folder that all ranks see. What it holds is replaced when the new checkpoint is whole; files
            that are no part of a checkpoint stay.
        maxbound: divisor of K/V absmax values: 448 for FP8 and for NVFP4.
        kv_cache_format: "FP8", "NVFP4", "NVFP4_AFFINE" or None.
        max_shard_size: tensor bytes of a file at most, such as "10GB"; a larger tensor gets a file of its own.
        is_modelopt_qlora: leave LoRA adapters out and take their base layers.

    Raises:
        UserError: the model or an argument cannot work; names tensor and rank.
        RankError: a rank failed, or did not come within NOGATHER_WAIT_LIMIT_S (six hours); rank -> reason.
    """
    ranks = Ranks.join()
    # Steps within have names of their own; this one is for what fails between them.
    with torch.inference_mode(False), torch.no_grad(), ranks.together("export"):
        with ranks.together("read the arguments"), _named(ranks):
            request = Request.of(model, export_dir, maxbound, kv_cache_format, max_shard_size, is_modelopt_qlora)
            model = unwrapped(model)
        request.refuse_unlike(ranks)
        _export(ranks, model, request)


@dataclass(frozen=True)
class _Content:
    """What is to be written; the same on all ranks but for `state`, the tensors by their names in the checkpoint."""

    plan: LivePlan
    texts: dict[str, str]
    state: dict[str, StateTensor]
    meshes: dict[str, Meshes]


def _export(ranks: Ranks, model: torch.nn.Module, request: Request) -> None:
    """All steps. Called by all ranks, with the same request."""
    dtype = _model_dtype(model)
    content = _read(ranks, model, request, dtype)
    with _staged(ranks, request, content.plan) as staging:
        meter = _Meter(content.plan.nbytes // ranks.world, shown=ranks.is_first)
        with ranks.together("write"), Writer(staging.path, meter.advance) as writer:
            write_values(writer, content.plan, ranks.control)
            write_rows(writer, content.plan, content.state, content.meshes, control=ranks.control, dtype=dtype)
        digests = _seal(ranks, staging.path, content.plan)
        with ranks.together("commit"):
            if ranks.is_first:
                staging.commit(_write_small_files(staging.path, content, digests))
    if ranks.is_first:
        size, files = format_size(content.plan.nbytes), len(content.plan.files)
        log.info("exported %d tensors, %s in %d files, to %s", len(content.plan.outputs), size, files, request.folder)


def _read(ranks: Ranks, model: torch.nn.Module, request: Request, dtype: torch.dtype) -> _Content:
    """Look, compare and plan. Called by all ranks; no weight is copied."""
    qlora = request.is_modelopt_qlora
    with ranks.together("read the model"), _named(ranks):
        ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()  # of transformers: what it remakes on loading
        state_dict = {key: value for key, value in model.state_dict().items() if key not in ignored}
        state = read_state(state_dict)
    meshes = compare(ranks, state)
    check_replicas(ranks, state, meshes)
    with ranks.together("read the quantizers"), _named(ranks):
        clean = clean_state(state_dict, request.maxbound, request.kv_cache_format, qlora)
        named = {name: state[key] for name, key in clean.sources.items()}
        named_meshes = {name: meshes[key] for name, key in clean.sources.items()}
        quantized = read_quantized(model, clean.sources, qlora)
        formats = {name: weight.format for name, weight in quantized.items()}
        aliases = tied_aliases(model, clean.shapes, formats, qlora)
        ties = {alias: name for alias, name in aliases.items() if alias in named and name in named}
        refuse_unequal_ties(named, named_meshes, ties, ranks.rank)
    measured = measure_rows(ranks, {name: weight.unmeasured for name, weight in quantized.items()}, named)
    with ranks.together("plan"):
        quantized = {name: weight.measured(measured.get(name, {})) for name, weight in quantized.items()}
        plan = make_live_plan(
            hub_tensors(model, {name: shape for name, shape in clean.shapes.items() if name not in aliases}),
            {name: tensor.dtype for name, tensor in named.items()},
            clean.values,
            share_amax(quantized, aliases),
            model_dtype=dtype,
            max_shard_bytes=request.max_shard_bytes,
        )
        texts = _small_files(model, request, clean.shapes)
    refuse_unlike_plans(ranks, dtype, plan.facts())
    return _Content(plan, texts, named, named_meshes)


@contextmanager
def _named(ranks: Ranks) -> Iterator[None]:
    """For work of each rank alone, with no exchange inside: a refusal says which rank it is of."""
    try:
        yield
    except UserError as error:
        if ranks.world == 1:
            raise
        raise type(error)(f"rank {ranks.rank}: {error}") from error


def _small_files(model: torch.nn.Module, request: Request, names: Iterable[str]) -> dict[str, str]:
    """Name -> text of the JSON files, and of the code of a custom model, for tensors of these names in memory."""
    layers = read_layers(model, request.is_modelopt_qlora)
    hub_names = hub_module_names(model, layers.formats)
    hub_formats = {hub: form for name, form in layers.formats.items() for hub in hub_names[name]}
    existing = getattr(getattr(model, "config", None), "quantization_config", None)
    if existing is not None and not isinstance(existing, Mapping):
        existing = existing.to_dict()
    kv_cache = _kv_cache(model, request.kv_cache_format, names)
    hf_quant_config, block = quantization_blocks(layers, hub_formats, kv_cache, existing)
    return config_files(model, quantization_config=block, hf_quant_config=hf_quant_config)


def _kv_cache(model: torch.nn.Module, asked: str | None, names: Iterable[str]) -> str | None:
    """The K/V cache that the checkpoint declares: what was asked for, if the model has any of it."""
    found = read_kv_format(model)
    if found is not None and found != asked:
        raise UserError(
            f"the model's quantizers are for a K/V cache of {found}, but kv_cache_format is {asked!r}; "
            f"give {found!r}, or disable these quantizers"
        )
    if asked and not found and not any(name.endswith(KV_SCALES) for name in names):
        log.warning(
            "kv_cache_format is %s, but the model has no K/V quantizer and no K/V scale: it is left out", asked
        )
        return None
    return asked


@contextmanager
def _staged(ranks: Ranks, request: Request, plan: LivePlan) -> Iterator[Any]:
    """The staging folder with all weight files at full size; gone again after an error. Called by all ranks."""
    staging: Staging | None = None
    try:
        with ranks.together("prepare"):
            if ranks.is_first:
                staging = Staging(request.folder)
            path, token = ranks.share([str(staging.path), staging.token] if staging else None)
            if staging is None:
                # Sooner than rank 0 gives this rank up, so that the message tells of the folder.
                await_visible(Path(path), token, min(VISIBLE_LIMIT_S, ranks.control.limit_s / 2))
            else:
                _preallocate(staging.path, plan)
        yield staging or _Seen(Path(path))
    finally:
        if staging is not None:
            staging.discard()


@dataclass(frozen=True)
class _Seen:
    """The staging folder as ranks other than 0 know it."""

    path: Path


def _preallocate(folder: Path, plan: LivePlan) -> None:
    by_file: dict[str, list[TensorEntry]] = defaultdict(list)
    for output in plan.outputs:
        by_file[output.file].append(output)
    for file in plan.files:
        preallocate(folder / file.name, file.size, file_header(by_file[file.name]))


def _seal(ranks: Ranks, folder: Path, plan: LivePlan) -> dict[str, str]:
    """sha256 by file; each file is read back by one rank. Called by all ranks."""
    files = sorted(plan.files, key=lambda file: file.size)
    own = files[ranks.rank :: ranks.world]
    parts = ranks.control.call("seal", lambda: {file.name: sha256(folder / file.name) for file in own})
    return {name: digest for part in parts.values() for name, digest in part.items()}


def _write_small_files(folder: Path, content: _Content, digests: Mapping[str, str]) -> list[str]:
    """Index, JSON files and the list of digests; returns the names of all files. Called by rank 0."""
    for name, text in content.texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    write_index(folder, content.plan.outputs)
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    sums = {name: digests.get(name) or sha256(folder / name) for name in names}
    (folder / SUMS_NAME).write_text(sha256_sums(sums), encoding="utf-8")
    return [*names, SUMS_NAME]


def _model_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype that the config names, else that of the first parameter."""
    named = getattr(getattr(model, "config", None), "dtype", None)
    found = getattr(torch, named, None) if isinstance(named, str) else named
    if isinstance(found, torch.dtype):
        return found
    return next((parameter.dtype for parameter in model.parameters()), torch.get_default_dtype())


class _Meter:
    """Says now and then how far this rank is."""

    def __init__(self, total: int, *, shown: bool):
        self._total, self._shown, self._done = total, shown, 0
        self._last = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        if self._shown and time.monotonic() - self._last >= LOG_INTERVAL_S:
            self._last = time.monotonic()
            log.info("export: %s of about %s written by this rank", *map(format_size, (self._done, self._total)))
