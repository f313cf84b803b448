"""A launcher as bad as can be: each rank leads its own session and has a grandchild that does, too.

    fake_torchrun.py FOLDER [--deaf] [--daemon] [--code N] [--seconds S]

Every process writes FOLDER/pids/<pid>; each rank makes a shared-memory name with its pid. --deaf ranks and
grandchildren ignore SIGTERM; --daemon: the launcher ends at once and leaves its ranks behind. The launcher ends with
--code after --seconds, and never tells its ranks anything.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def make_segment() -> None:
    """A shared-memory file named as distribute/segments.py does it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:8]
    space = os.stat("/proc/self/ns/pid").st_ino
    start = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    Path(f"/dev/shm/nogather-{boot}-{space}-{os.getpid()}-{start}-job-0-x").write_bytes(b"x" * 100)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--role", default="launcher")
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--daemon", action="store_true")
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120)
    options = parser.parse_args()
    if options.deaf and options.role != "launcher":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    below = {"launcher": ["rank", "rank"], "rank": ["grandchild"], "grandchild": []}[options.role]
    flags = ["--deaf"] if options.deaf else []
    for role in below:
        program = [sys.executable, "-I", "-S", __file__, str(options.folder), "--role", role, *flags]
        subprocess.Popen(program, start_new_session=True)
    if options.role == "rank":
        make_segment()
    pids = options.folder / "pids"
    pids.mkdir(exist_ok=True)
    (pids / str(os.getpid())).touch()
    if options.role == "launcher" and (options.daemon or options.code):
        while len(list(pids.iterdir())) < 5:
            time.sleep(0.02)
        sys.exit(options.code)
    time.sleep(options.seconds if options.role == "launcher" else 120)


main()
