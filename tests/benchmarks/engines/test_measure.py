"""What a reader tells reaches the record, however the reader ends; the engines themselves are stood in for by scripts."""

import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import measure
from benchmarks.engines.measure import Record, append_record, digest_of, read_records, try_engine
from benchmarks.engines.table import ENGINES, READERS, Engine

HEAD = """
import os, sys, time
sys.path.insert(0, READERS)
from record import run_reader
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a reader of the given body, in this Python."""

    def try_body(body: str, time_limit_s: float = 30) -> dict[str, Any]:
        script = tmp_path / "fake.py"
        script.write_text(HEAD.replace("READERS", repr(str(READERS))) + textwrap.dedent(body), encoding="utf-8")
        monkeypatch.setattr(Engine, "path", property(lambda self: script))
        return try_engine(
            Engine("fake", "Fake", "1", "fake"),
            tmp_path / "checkpoint",
            {"prompt": "Hello", "windows": [[1, 2]]},
            home=tmp_path,
            time_limit_s=time_limit_s,
            log_file=tmp_path / "logs" / "fake.log",
        )

    return try_body


def test_what_a_reader_tells_is_found(run: Any) -> None:
    found = run("""
        def read(checkpoint, request, tell):
            tell(answer=request["prompt"] + " " + checkpoint.name)
            tell(perplexity=2.5, tokens=len(request["windows"]))
        run_reader(read)
    """)
    assert found.pop("seconds") >= 0
    assert found == {"answer": "Hello checkpoint", "perplexity": 2.5, "tokens": 1}


def test_the_exact_message_of_an_exception_is_found_beside_what_came_before_it(run: Any) -> None:
    found = run("""
        def read(checkpoint, request, tell):
            tell(answer="yes")
            raise ValueError("no kernel: a, b")
        run_reader(read)
    """)
    assert (found["answer"], found["error"]) == ("yes", "ValueError: no kernel: a, b")


@pytest.mark.parametrize(
    ("ending", "said"),
    [("os._exit(7)", "ended with exit code 7"), ("os.kill(os.getpid(), 11)", "ended with SIGSEGV")],
)
def test_a_crash_is_an_error_and_keeps_what_was_told(run: Any, ending: str, said: str) -> None:
    found = run(f"""
        def read(checkpoint, request, tell):
            tell(answer="yes")
            {ending}
        run_reader(read)
    """)
    assert (found["answer"], found["error"]) == ("yes", said)


def test_a_reader_that_hangs_is_stopped_with_all_that_it_started(run: Any, tmp_path: Path) -> None:
    noted = tmp_path / "child"
    found = run(
        f"""
        import subprocess
        child = subprocess.Popen(["sleep", "60"])
        open({str(noted)!r}, "w").write(str(child.pid))
        time.sleep(60)
        """,
        time_limit_s=3,
    )
    assert found["error"] == "not done in 3 s"
    stat = Path(f"/proc/{noted.read_text()}/stat")
    ends = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < ends, "the child goes on"
        time.sleep(0.05)


def test_a_reader_that_cannot_start_is_an_error(run: Any, tmp_path: Path) -> None:
    found = run("import no_such_engine")
    assert found["error"] == "ended with exit code 1"
    assert "No module named 'no_such_engine'" in (tmp_path / "logs" / "fake.log").read_text()


def test_the_last_record_of_a_key_counts_and_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "records.jsonl"
    old = Record("fp8", "modelopt", "vllm", "a", error="no")
    new = Record("fp8", "modelopt", "vllm", "b", answer="yes", perplexity=2.0)
    other = Record("fp8", "modelopt", "mistralrs", "a")
    for record in (old, other, new):
        append_record(path, record)
    with path.open("a") as file:
        file.write('{"case": "fp8", "dia')
    assert read_records(path) == {new.key: new, other.key: other}
    assert read_records(tmp_path / "none") == {}


def test_the_digest_follows_weights_config_version_request_and_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = next(one for one in ENGINES if one.key == "vllm-emulated")
    readers = tmp_path / "readers"
    readers.mkdir()
    monkeypatch.setattr(measure, "READERS", readers)
    monkeypatch.setattr(Engine, "path", property(lambda self: readers / "vllm_cpu.py"))
    files = [readers / name for name in ("vllm_cpu.py", "emulate.py", "arithmetic.py")]
    files += [tmp_path / "a.safetensors", tmp_path / "config.json"]
    for path in files:
        path.write_text("1")
    (tmp_path / "receipt.json").write_text("1")
    first = digest_of(engine, tmp_path, {"prompt": "a"})
    (tmp_path / "receipt.json").write_text("2")
    assert digest_of(engine, tmp_path, {"prompt": "a"}) == first
    digests = {first, digest_of(engine, tmp_path, {"prompt": "b"})}
    for path in files:
        path.write_text("2")
        digests.add(digest_of(engine, tmp_path, {"prompt": "a"}))
    assert len(digests) == 2 + len(files)
