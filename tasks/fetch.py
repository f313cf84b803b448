"""Brings the source checkpoint and the calibration text onto the workspace, and names their content.

A local folder or file is used where it lies. What is on the Hub is fetched at one commit into
`<workspace>/sources/<org>--<name>/<commit>/` or `<workspace>/data/...`; unfinished files of an interrupted
fetch are continued. Only safetensors and side files are fetched, never pickles.
"""

import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from distribute.errors import DataError, SourceError, StageError, UserError
from distribute.passthrough import side_files
from distribute.source import Checkpoint
from infra.redact import scrub
from infra.release import is_safe_name
from tasks.manifest import sha256_of
from tasks.run import DataFile, Source

log = logging.getLogger(__name__)

#: Weights in formats that are not read, and second copies of the weights.
NEVER_FETCHED = [
    "*.bin", "*.gguf", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx*", "*.ot", "*.tflite", "*.pkl",
    "original/*", "onnx/*", "gguf/*", "coreml/*", "openvino/*",
]  # fmt: skip
DATA_SUFFIXES = (".parquet", ".jsonl", ".txt")
_REPO = re.compile(r"(?:hf://)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_DATASET = re.compile(r"(?:hf://datasets/)?(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<split>[\w.-]+))?")


def fetch_source(model: str, workspace: Path) -> Source:
    """The checkpoint that `model` means: a local folder, or `org/name[@revision]` on the Hub.

    Raises:
        SourceError: neither; or it cannot be read, or it may not.
    """
    if Path(model).expanduser().exists():
        return open_folder(model)
    repo, revision = find_repo(model)
    with hub_errors(f"{model} is no folder here, and as a model on the Hub it", SourceError):
        commit = HfApi().model_info(repo, revision=revision).sha
        folder = workspace / "sources" / repo.replace("/", "--") / str(commit)
        log.info("fetch: %s at %s into %s", repo, commit, folder)
        snapshot_download(repo, revision=commit, local_dir=folder, ignore_patterns=NEVER_FETCHED)
    return _name_content(model, folder)


def find_repo(model: str) -> tuple[str, str | None]:
    """(org/name, revision) of a Hub address; SourceError when it is none."""
    found = _REPO.fullmatch(model)
    if found is None:
        raise SourceError(f"{model} is neither an existing folder nor a Hub model like org/name or org/name@revision")
    return found["repo"], found["revision"]


def open_folder(folder: str) -> Source:
    """A checkpoint folder that is there.

    Raises:
        SourceError: it is not, or it cannot be read.
    """
    return _name_content(folder, Path(folder).expanduser().resolve())


def fetch_data(calib: str, workspace: Path) -> DataFile:
    """The calibration text that `calib` means: a local file or folder, or `hf://datasets/org/name[:split]`.

    Of a Hub data set the first file of the split (train when none is named) is taken: calibration needs few texts.

    Raises:
        DataError: neither; or there is no readable text file.
    """
    path = Path(calib).expanduser()
    if path.exists():
        return _name_data(calib, path.resolve())
    found = _DATASET.fullmatch(calib)
    if found is None or path.suffix in DATA_SUFFIXES:
        raise DataError(
            f"calibration text {calib} is neither an existing file ({', '.join(DATA_SUFFIXES)}) "
            "nor a Hub data set like hf://datasets/org/name:split"
        )
    repo = found["repo"]
    with hub_errors(f"{calib} is no file here, and as a data set on the Hub it", DataError):
        info = HfApi().dataset_info(repo)
        name = choose_data_file([sibling.rfilename for sibling in info.siblings or []], found["split"], repo=repo)
        folder = workspace / "data" / repo.replace("/", "--") / str(info.sha)
        log.info("fetch: %s of %s at %s", name, repo, info.sha)
        fetched = hf_hub_download(repo, name, repo_type="dataset", revision=info.sha, local_dir=folder)
    return _name_data(calib, Path(fetched))


def choose_data_file(names: list[str], split: str | None, *, repo: str) -> str:
    """The first file of a split: parquet before jsonl before txt, then by name. Pure.

    Raises:
        DataError: the data set has no such file.
    """
    readable = [name for name in names if name.endswith(DATA_SUFFIXES)]
    wanted = re.compile(rf"(?:^|[^a-z0-9]){re.escape(split or 'train')}(?:[^a-z0-9]|$)", re.IGNORECASE)
    chosen = [name for name in readable if wanted.search(name)] or ([] if split else readable)
    if not chosen:
        raise DataError(
            f"data set {repo} holds no {', '.join(DATA_SUFFIXES)} file{f' of split {split}' if split else ''}; "
            f"its files: {', '.join(names[:8]) or 'none'}"
        )
    return min(chosen, key=lambda name: (DATA_SUFFIXES.index(Path(name).suffix), name))


def _name_content(address: str, folder: Path) -> Source:
    """`revision` covers headers, sizes and times of the weights, and every side file: they are exported, too."""
    checkpoint = Checkpoint.open(folder)
    digest = hashlib.sha256(checkpoint.digest().encode())
    for name in side_files(folder):
        if not is_safe_name(name):
            raise SourceError(f"{folder} holds a file named {name!r}, which cannot be published; rename or remove it")
        digest.update(f"\0{name}\0{sha256_of(folder / name)}".encode())
    return Source(address, folder, digest.hexdigest())


def _name_data(address: str, path: Path) -> DataFile:
    """A text file, or a folder of text files, by the bytes of all of them."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        texts = [file for file in files if file.suffix in DATA_SUFFIXES]
        if not sum(file.stat().st_size for file in texts):
            what = "is empty" if texts else f"is no {', '.join(DATA_SUFFIXES)} file, nor a folder of such files"
            raise DataError(f"calibration text {path} {what}")
        if len(texts) == 1:
            return DataFile(address, path, sha256_of(texts[0]))
        listing = "".join(f"{file.name}\0{sha256_of(file)}\0" for file in texts)
        return DataFile(address, path, hashlib.sha256(listing.encode()).hexdigest())
    except OSError as error:
        raise DataError(f"calibration text {path} cannot be read: {error.strerror}") from None


@contextmanager
def hub_errors(what: str, kind: type[UserError]) -> Iterator[None]:
    """What the Hub refuses for good is the user's to change; everything else may be tried again."""
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status not in (401, 403, 404):
            raise StageError(f"{what} could not be fetched; try again later: {_one_line(error)}") from None
        raise kind(
            f"{what} does not exist or may not be read ({status}); check the name, "
            "accept its licence on the Hub, or set HF_TOKEN"
        ) from None
    except (HFValidationError, OfflineModeIsEnabled) as error:
        raise kind(f"{what} cannot be fetched: {_one_line(error)}") from None
    except (HTTPError, LocalEntryNotFoundError) as error:
        raise StageError(f"{what} could not be fetched; try again later: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return scrub(" ".join(str(error).split()))
