"""The other ways to save a live FSDP2 model as a Hugging Face checkpoint, each as its publisher does it.

    gather      rank 0 gathers the full state (`get_model_state_dict(full_state_dict=True)`) and saves it
    dcp         torch's HuggingFaceStorageWriter writes shards, then all ranks consolidate their files
    owner       each tensor has one owner, the lightest rank, which gets the rows of the others point to point

All write the same files as ours (same packing), and flush them.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from distribute import distributed_save_hf_checkpoint
from distribute.shards import plan_files

METADATA = {"format": "pt"}


def ours(model: torch.nn.Module, folder: Path, max_shard_bytes: int) -> None:
    """The function that is measured."""
    distributed_save_hf_checkpoint(model, folder, 448.0, None, max_shard_size=max_shard_bytes)


def gather(model: torch.nn.Module, folder: Path, max_shard_bytes: int) -> None:
    """Rank 0 gathers and saves, file by file."""
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        for file, names in _files(full, max_shard_bytes):
            save_file({name: full[name].contiguous() for name in names}, folder / file, metadata=METADATA)
            _flush(folder / file)
    dist.barrier()


def dcp_writer(model: torch.nn.Module, folder: Path, max_shard_bytes: int) -> None:
    """Shards first, then every rank makes some of the final files of them."""
    state = get_model_state_dict(model)
    number = {name: index for index, (_, names) in enumerate(_files(state, max_shard_bytes), 1) for name in names}
    sharded = folder / "sharded"
    writer = HuggingFaceStorageWriter(str(sharded), fqn_to_index_mapping=number, save_distributed=True)
    dcp.save(state, storage_writer=writer)
    dist.barrier()
    consolidate_safetensors_files_on_every_rank(str(sharded), str(folder), number)
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.glob("*.safetensors"):
            _flush(path)
        for path in sharded.iterdir():
            path.unlink()
        sharded.rmdir()
    dist.barrier()


def owner(model: torch.nn.Module, folder: Path, max_shard_bytes: int) -> None:
    """Every tensor is put together by the rank that writes its file."""
    state = model.state_dict()
    rank, world = dist.get_rank(), dist.get_world_size()
    load = [0] * world
    for file, names in _files(state, max_shard_bytes):
        target = load.index(min(load))
        load[target] += sum(state[name].numel() for name in names)
        whole = {name: _collect(state[name], target) for name in names}
        if rank == target:
            save_file({name: tensor for name, tensor in whole.items() if tensor is not None}, folder / file, METADATA)
            _flush(folder / file)
    dist.barrier()


def _collect(tensor: torch.Tensor, target: int) -> torch.Tensor | None:
    """The whole tensor on `target`; rows of a Shard(0) DTensor travel once."""
    if not isinstance(tensor, DTensor):
        return tensor
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [len(part) for part in torch.arange(tensor.shape[0]).chunk(world)]
    rows += [0] * (world - len(rows))
    local = tensor.to_local()
    if rank != target:
        if len(local):
            dist.send(local.contiguous(), target)
        return None
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    begin = 0
    for source, count in enumerate(rows):
        part = whole[begin : begin + count]
        if source == rank:
            part.copy_(local)
        elif count:
            dist.recv(part, source)
        begin += count
    return whole


def _files(state: dict[str, torch.Tensor], max_shard_bytes: int) -> Iterator[tuple[str, list[str]]]:
    files, placed = plan_files(
        [(name, "BF16", tuple(tensor.shape)) for name, tensor in state.items()], max_shard_bytes
    )
    for file in files:
        yield file.name, [tensor.name for tensor in placed if tensor.file == file.name]


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


METHODS: dict[str, Callable[[torch.nn.Module, Path, int], None]] = {
    "nogather": ours, "gather": gather, "dcp": dcp_writer, "owner": owner,
}  # fmt: skip
