"""Addresses, the release rules, and the local folder target."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from distribute import swap
from distribute.errors import StageError, TargetError
from infra import folder as folder_module
from infra.redact import SecretFilter, scrub
from infra.release import RECEIPT, LocalFile, check_files, is_safe_name, receipt_names, stale_names
from infra.storage import open_target, publish
from tests.infra.conftest import MakeFiles, Progress, contents_of, write_files


def read_folder(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def publish_to(address: Path, files: list[LocalFile], *, overwrite: bool = False) -> dict[str, Any]:
    target = open_target(str(address), overwrite=overwrite)
    target.preflight()
    return publish(target, files, on_progress=Progress())


# ---- addresses


@pytest.mark.parametrize(
    ("address", "canonical"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("hf://org/name", "hf://org/name"),
        ("hf://org/name@v1.0", "hf://org/name@v1.0"),
        ("hf://org/name@main", "hf://org/name"),
        ("hf://org/name@feature/x", "hf://org/name@feature/x"),
        ("hf://org/a_hf_converted_model", "hf://org/a_hf_converted_model"),
        ("file:///srv/with%20space", "/srv/with space"),
        ("/srv/out", "/srv/out"),
    ],
)
def test_an_address_is_kept_in_canonical_form(address: str, canonical: str) -> None:
    assert open_target(address).address == canonical


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("s3://", "no valid bucket"),
        ("s3:///prefix", "no valid bucket"),
        ("s3://bucket", "no prefix"),
        ("s3://bucket/", "no prefix"),
        ("s3://bucket/a//b", "empty"),
        ("s3://bucket/../b", "'..'"),
        ("s3:/bucket/a", "lacks '//'"),
        ("hf:org/name", "lacks '//'"),
        ("hf://name", "hf://org/name"),
        ("hf://a/b/c", "hf://org/name"),
        ("hf://a/b@", "revision"),
        ("hf://a/b@../x", "revision"),
        ("hf://a/-b", "hf://org/name"),
        ("gs://bucket/x", "'gs'"),
        ("https://huggingface.co/a/b", "'https'"),
        ("", "empty"),
        ("/", "root"),
        ("file://", "empty"),
    ],
)
def test_a_wrong_address_is_refused_in_one_sentence(address: str, says: str) -> None:
    with pytest.raises(TargetError) as caught:
        open_target(address)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "s3://someone:planted-secret-1@bucket/a",
        "s3://planted-secret-1@bucket/a",
        "hf://org:planted-secret-1@host/name",
        "hf://hf_plantedsecret1plantedsecret/name",
        "s3://bucket/a?X-Amz-Signature=planted-secret-1",
        "https://user:planted-secret-1@host/x",
    ],
)
def test_an_address_with_a_secret_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(TargetError, match="credentials") as caught:
        open_target(address)
    assert "planted" not in str(caught.value)


def test_an_endpoint_with_a_password_is_refused() -> None:
    with pytest.raises(TargetError) as caught:
        open_target("s3://bucket/a", endpoint_url="http://user:planted@host:9000")
    assert "planted" not in str(caught.value)


@pytest.mark.parametrize("url", ["127.0.0.1:9000", "ftp://host", "https://"])
def test_an_endpoint_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(TargetError, match="is no URL"):
        open_target("s3://bucket/a", endpoint_url=url)


# ---- rules of a release


@pytest.mark.parametrize("name", ["", "/a", "a/../b", "..", "a//b", "./a", "a\\b", "c:/a", "a\nb", "a/"])
def test_a_name_that_could_leave_the_target_is_refused(name: str, tmp_path: Path) -> None:
    file = write_files(tmp_path, {"ok": b"1"})[0]
    assert not is_safe_name(name)
    with pytest.raises(TargetError, match="cannot be published"):
        check_files([LocalFile(name, file.path, file.size, file.sha256)])


def test_weights_come_first_and_config_last(make_files: MakeFiles) -> None:
    names = [file.name for file in check_files(reversed(make_files(shards=2)))]
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "hf_quant_config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "config.json",
    ]


def test_a_single_weight_file_comes_just_before_the_config(tmp_path: Path) -> None:
    files = write_files(tmp_path, {"config.json": b"{}", "model.safetensors": b"w", "tokenizer.json": b"{}"})
    assert [f.name for f in check_files(files)] == ["tokenizer.json", "model.safetensors", "config.json"]


def test_a_changed_double_or_reserved_file_is_refused(tmp_path: Path) -> None:
    file = write_files(tmp_path, {"a": b"12"})[0]
    with pytest.raises(TargetError, match="twice"):
        check_files([file, file])
    with pytest.raises(TargetError, match="no longer 3 bytes"):
        check_files([LocalFile("a", file.path, 3, file.sha256)])
    with pytest.raises(TargetError, match="receipt"):
        check_files([LocalFile(RECEIPT, file.path, 2, file.sha256)])
    with pytest.raises(TargetError, match="no files"):
        check_files([])


def test_only_what_an_export_owns_is_stale() -> None:
    present = ["README.md", "model-00003-of-00003.safetensors", "old.json", "sub/model.safetensors", RECEIPT]
    assert stale_names(present, set(), None) == ["model-00003-of-00003.safetensors"]
    earlier = {"files": [{"name": "old.json"}, {"name": "../outside"}, {"name": 7}, "x"]}
    assert stale_names([*present, "../outside"], {"a"}, earlier) == [
        "model-00003-of-00003.safetensors",
        "old.json",
    ]
    assert receipt_names({"files": "nonsense"}) == []


# ---- the local folder


def test_a_folder_gets_exactly_the_files_and_a_receipt(tmp_path: Path, make_files: MakeFiles) -> None:
    files, progress = make_files(extra={"sub/code.py": b"x = 1"}), Progress()
    target = open_target(str(tmp_path / "new" / "out"))
    assert "new" in target.preflight()
    assert not (tmp_path / "new").exists()
    receipt = publish(target, files, on_progress=progress)
    found = read_folder(tmp_path / "new" / "out")
    assert json.loads(found.pop(RECEIPT)) == receipt
    assert found == contents_of(files)
    assert progress.done == {file.name: file.size for file in files}
    assert receipt["uploaded_bytes"] == sum(file.size for file in files)
    assert (receipt["address"], receipt["revision"], receipt["skipped"]) == (target.address, None, [])
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["out"]


def test_published_files_are_copies(tmp_path: Path, make_files: MakeFiles) -> None:
    files = make_files()
    publish_to(tmp_path / "out", files)
    before = files[0].path.read_bytes()
    (tmp_path / "out" / files[0].name).write_bytes(b"edited")
    assert files[0].path.read_bytes() == before


@pytest.mark.parametrize("exchange", [True, False])
def test_an_older_export_is_replaced_and_the_owners_files_stay(
    tmp_path: Path, make_files: MakeFiles, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(swap, "exchange", lambda first, second: False)
    out = tmp_path / "out"
    publish_to(out, make_files(shards=5, extra={"chat_template.jinja": b"old"}))
    (out / "README.md").write_bytes(b"by the owner")
    files = make_files(shards=2, seed=1)
    publish_to(out, files)
    found = read_folder(out)
    assert json.loads(found.pop(RECEIPT))["files"][0]["name"] == "config.json"
    assert found == contents_of(files) | {"README.md": b"by the owner"}
    assert not [p.name for p in tmp_path.iterdir() if "nogather" in p.name]


def test_a_foreign_folder_is_refused_unless_overwrite(tmp_path: Path, make_files: MakeFiles) -> None:
    out = tmp_path / "out"
    write_files(out, {"thesis.txt": b"precious"})
    with pytest.raises(TargetError, match="not empty"):
        open_target(str(out)).preflight()
    publish_to(out, make_files(), overwrite=True)
    assert (out / "thesis.txt").read_bytes() == b"precious"


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for address in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(TargetError, match="is a file"):
            open_target(str(address)).preflight()


def test_a_folder_on_a_file_system_that_takes_no_files_is_refused() -> None:
    with pytest.raises(TargetError, match="cannot write to"):
        open_target("/proc/nogather-test/out").preflight()


def test_two_runs_do_not_publish_to_one_folder_at_once(tmp_path: Path, make_files: MakeFiles) -> None:
    out, files = tmp_path / "out", make_files()
    first = open_target(str(out))
    first.plan(files)
    first.put(files, on_progress=lambda name, count: None)
    with pytest.raises(TargetError, match="another run is publishing"):
        publish_to(out, files)
    first.commit(files)
    first.verify(files)  # the other one has not touched the copies
    first.seal({"files": [{"name": file.name} for file in files]})
    publish_to(out, files)
    assert not [p.name for p in tmp_path.iterdir() if "nogather" in p.name]


def test_the_checkpoint_cannot_be_published_onto_itself(make_files: MakeFiles) -> None:
    files = make_files()
    before = contents_of(files)
    with pytest.raises(TargetError, match="lies in the target"):
        publish(open_target(str(files[0].path.parent), overwrite=True), files, on_progress=Progress())
    assert contents_of(files) == before


def test_a_failed_copy_leaves_the_older_export_and_nothing_else(tmp_path: Path, make_files: MakeFiles) -> None:
    out = tmp_path / "out"
    old = make_files()
    publish_to(out, old)
    before = read_folder(out)
    files = make_files(seed=1)
    files[2].path.write_bytes(bytes(files[2].size))  # altered after it was hashed
    with pytest.raises(StageError, match="changed since"):
        publish_to(out, files)
    assert read_folder(out) == before
    assert not (tmp_path / ".out.nogather-partial").exists()


def test_a_kill_between_the_renames_is_undone_by_the_next_preflight(tmp_path: Path, make_files: MakeFiles) -> None:
    out = tmp_path / "out"
    publish_to(out, make_files())
    before = read_folder(out)
    out.rename(tmp_path / ".out.nogather-old")
    assert "earlier export" in open_target(str(out)).preflight()
    assert read_folder(out) == before


def test_copies_of_a_killed_attempt_are_used_when_whole(tmp_path: Path, make_files: MakeFiles) -> None:
    files = make_files(shards=3)
    contents = contents_of(files)
    whole, short = files[2].name, files[3].name
    write_files(
        tmp_path / ".out.nogather-partial", {whole: contents[whole], short: contents[short][:-1], "left": b""}
    )
    receipt = publish_to(tmp_path / "out", files)
    assert receipt["skipped"] == [whole]
    assert receipt["uploaded_bytes"] == sum(file.size for file in files if file.name != whole)
    assert set(read_folder(tmp_path / "out")) == {*contents, RECEIPT}


def test_too_little_space_is_told_before_the_copy(
    tmp_path: Path, make_files: MakeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = folder_module.shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(folder_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(TargetError, match="GB free"):
        publish(open_target(str(tmp_path / "out")), make_files(), on_progress=Progress())
    assert not (tmp_path / ".out.nogather-partial").exists()


# ---- secrets


def test_scrub_hides_known_secrets_and_their_usual_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "from/the+environment")
    text = scrub(
        "given-secret from/the+environment hf_abcDEF1234567890 Bearer abcdef0123 https://u:pw@h/ "
        "?X-Amz-Signature=0a1b2c&x=1 AKIAIOSFODNN7EXAMPLE kept",
        ["given-secret"],
    )
    assert text == "*** *** *** Bearer *** https://***@h/ ?X-Amz-Signature=***&x=1 *** kept"


def test_a_token_without_its_prefix_is_hidden_too() -> None:
    assert scrub("echo plantedTOKEN1234", ["hf_plantedTOKEN1234"]) == "echo ***"


def test_log_handlers_scrub_records_of_any_library(caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.addFilter(redacting := SecretFilter())
    try:
        logging.getLogger("some.client").warning("GET %s", "https://h/x?X-Amz-Signature=0a1b2c")
    finally:
        caplog.handler.removeFilter(redacting)
    assert "0a1b2c" not in caplog.text
    assert "X-Amz-Signature=***" in caplog.text
