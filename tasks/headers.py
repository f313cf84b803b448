"""What a plan needs of a model on the Hub: config, index, and the header of every weight file, no weight.

A header is written into a stub: a file of the weight file's size whose data is a hole. So the plan reads a folder
like any other, and a trillion parameters take no room.
"""

import json
import logging
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

from distribute.errors import SourceError
from distribute.job import read_json
from distribute.source import INDEX_NAME, SINGLE_NAME
from infra.release import is_safe_name
from tasks.fetch import find_repo, hub_errors, open_folder

log = logging.getLogger(__name__)


def fetch_headers(model: str, workspace: Path) -> Path:
    """The folder of a local checkpoint, or stubs of `org/name[@revision]` on the Hub below the workspace.

    Raises:
        SourceError: neither; or it cannot be read, or it may not.
    """
    if Path(model).expanduser().exists():
        return open_folder(model).folder
    repo, revision = find_repo(model)
    with hub_errors(f"{model} is no folder here, and as a model on the Hub it", SourceError):
        commit = str(HfApi().model_info(repo, revision=revision).sha)
        folder = workspace / "headers" / repo.replace("/", "--") / commit
        snapshot_download(repo, revision=commit, local_dir=folder, allow_patterns=["config.json", INDEX_NAME])
        for name in _weight_files(folder):
            if not (folder / name).exists():
                log.info("fetch: header of %s", name)
                found = HfApi().parse_safetensors_file_metadata(repo, name, revision=commit)
                tensors = {
                    key: {"dtype": info.dtype, "shape": info.shape, "data_offsets": list(info.data_offsets)}
                    for key, info in found.tensors.items()
                }
                write_stub(folder / name, tensors)
    return folder


def write_stub(path: Path, tensors: dict[str, dict]) -> None:
    """A weight file of this header (entries as safetensors has them) whose data is a hole."""
    text = json.dumps(tensors).encode()
    end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    temporary.replace(path)


def _weight_files(folder: Path) -> list[str]:
    index = folder / INDEX_NAME
    names = set(read_json(index)["weight_map"].values()) if index.is_file() else {SINGLE_NAME}
    bad = [name for name in names if not isinstance(name, str) or not is_safe_name(name)]
    if bad:
        raise SourceError(f"{INDEX_NAME} names {bad[0]!r}, which is no file of this model")
    return sorted(names)
