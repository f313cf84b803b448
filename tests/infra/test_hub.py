"""The Hub target: the real `huggingface_hub` client (LFS mode) against a stand-in that speaks its protocol."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download
from pydantic import SecretStr

from distribute.errors import StageError, TargetError
from infra.hub import HubTarget
from infra.release import LocalFile
from infra.storage import open_target, publish
from tests.hub_server import READER, SIGNATURE, WRITER, HubServer
from tests.infra.conftest import MakeFiles, Progress, contents_of, write_files

REPO = "lab/tiny-fp8"
COMMIT = f"/api/models/{REPO}/commit/main"
OWNERS = {"README.md": b"# by the owner\n", ".gitattributes": b"*.safetensors filter=lfs\n"}


def hub_target(hub: HubServer, **options: Any) -> HubTarget:
    return HubTarget(REPO, endpoint=hub.endpoint, **options)


def publish_to(hub: HubServer, files: list[LocalFile]) -> dict[str, Any]:
    target = hub_target(hub)
    target.preflight()
    return publish(target, files, on_progress=Progress())


def weights(files: list[LocalFile]) -> int:
    return sum(file.name.endswith(".safetensors") for file in files)


def incomplete_revisions(hub: HubServer) -> list[str]:
    """Revisions of main that a reader would take for a model, though a shard of their index is absent."""
    found = []
    for oid in hub.repos[REPO].history:
        files = hub.files(REPO, oid)
        index = json.loads(files.get("model.safetensors.index.json", b'{"shards": 0}'))
        shards = {name for name in files if name.endswith(".safetensors")}
        expected = {f"model-{n:05d}-of-{index['shards']:05d}.safetensors" for n in range(1, index["shards"] + 1)}
        if "config.json" in files and shards != expected:
            found.append(oid)
    return found


# ---- a new and an existing repository


def test_one_commit_publishes_everything_into_a_new_private_repository(hub: HubServer, make_files: MakeFiles) -> None:
    files, progress = make_files(extra={"sub/code.py": b"x = 1"}), Progress()
    target = hub_target(hub)
    assert target.preflight() == f"hf://{REPO}: writable by lab, created, private"
    receipt = publish(target, files, on_progress=progress)
    repo = hub.repos[REPO]
    assert repo.private
    assert len(repo.history) == 2  # the Hub's own first commit, and ours
    assert hub.files(REPO) == contents_of(files) | {".gitattributes": OWNERS[".gitattributes"]}
    assert progress.done == {file.name: file.size for file in files}
    assert (receipt["address"], receipt["revision"]) == (f"hf://{REPO}", repo.history[-1])
    assert receipt["uploaded_bytes"] == sum(file.size for file in files)
    assert json.loads(json.dumps(receipt)) == receipt


def test_what_was_pushed_is_downloaded_by_the_same_client(
    hub: HubServer, make_files: MakeFiles, tmp_path: Path
) -> None:
    files = make_files()
    publish_to(hub, files)
    folder = Path(snapshot_download(REPO, endpoint=hub.endpoint, token=WRITER, cache_dir=tmp_path / "cache"))
    for file in files:
        assert (folder / file.name).read_bytes() == file.path.read_bytes()


def test_a_weight_in_several_parts_arrives_whole(hub: HubServer, tmp_path: Path) -> None:
    contents = {"model.safetensors": os.urandom(2 * hub.part_bytes + 5), "config.json": b"{}"}
    publish_to(hub, write_files(tmp_path / "c", contents))
    assert len(hub.called("PUT", "/_store/")) == 3
    assert hub.files(REPO)["model.safetensors"] == contents["model.safetensors"]


def test_a_new_branch_gets_the_commit_and_main_stays(hub: HubServer, make_files: MakeFiles) -> None:
    main = hub.add_repo(REPO, OWNERS)
    target, files = hub_target(hub, revision="v2"), make_files()
    assert "branch v2 created" in target.preflight()
    receipt = publish(target, files, on_progress=Progress())
    assert receipt["address"] == f"hf://{REPO}@v2"
    assert hub.repos[REPO].branches == {"main": main, "v2": receipt["revision"]}
    assert hub.files(REPO, "v2") == OWNERS | contents_of(files)


def test_stale_shards_go_in_the_same_commit_and_the_owners_files_stay(hub: HubServer, make_files: MakeFiles) -> None:
    older = contents_of(make_files(shards=9))
    hub.add_repo(REPO, OWNERS | older)
    files = [file for file in make_files(shards=2, seed=1) if file.name != "hf_quant_config.json"]
    publish_to(hub, files)
    assert hub.files(REPO) == OWNERS | contents_of(files)
    assert len(hub.repos[REPO].history) == 2
    assert incomplete_revisions(hub) == []


def test_a_card_of_the_owner_is_not_replaced_by_that_of_the_source(
    hub: HubServer, make_files: MakeFiles, tmp_path: Path
) -> None:
    card = tmp_path / "README.md"
    card.write_bytes(b"# of the source\n")
    own = LocalFile("README.md", card, card.stat().st_size, hashlib.sha256(card.read_bytes()).hexdigest())
    files = [*make_files(), own]
    publish_to(hub, files)
    assert hub.files(REPO)["README.md"] == card.read_bytes()  # better than none
    hub.repos.clear()
    hub.add_repo(REPO, OWNERS)
    receipt = publish_to(hub, files)
    assert hub.files(REPO)["README.md"] == OWNERS["README.md"]
    assert "README.md" not in {file["name"] for file in receipt["files"]}


def test_publishing_the_same_again_sends_and_commits_nothing(hub: HubServer, make_files: MakeFiles) -> None:
    files = make_files()
    first = publish_to(hub, files)
    hub.requests.clear()
    second = publish_to(hub, files)
    assert hub.called("PUT", "") == hub.called("POST", COMMIT) == []
    assert second["revision"] == first["revision"]
    assert second["skipped"] == sorted(file.name for file in files)
    assert second["uploaded_bytes"] == 0
    assert second["files"] == first["files"]


# ---- ends in the middle


def test_a_kill_in_the_middle_shows_nothing_and_the_next_run_sends_only_the_rest(
    hub: HubServer, make_files: MakeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_files(shards=6)
    reached, release = threading.Event(), threading.Event()

    def stop_at_fifth(count: int) -> None:
        if count == 5:
            reached.set()
            release.wait(60)
            raise ConnectionAbortedError("the sender is gone")

    hub.on_blob = stop_at_fifth
    child = subprocess.Popen(
        [sys.executable, "-c", _script(hub, files)], env=os.environ | {"HF_HUB_DISABLE_XET": "1"}
    )
    try:
        assert reached.wait(60)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        release.set()
    hub.on_blob = lambda count: None
    assert len(hub.repos[REPO].history) == 1
    hub.requests.clear()
    receipt = publish_to(hub, files)
    assert len(hub.called("PUT", "/_store/")) == 2
    assert len(receipt["skipped"]) == 4
    assert incomplete_revisions(hub) == []
    assert hub.files(REPO) == contents_of(files) | {".gitattributes": OWNERS[".gitattributes"]}


def _script(hub: HubServer, files: list[LocalFile]) -> str:
    listed = [(file.name, str(file.path), file.size, file.sha256) for file in files]
    return textwrap.dedent(
        f"""
        from pathlib import Path
        from infra.hub import HubTarget
        from infra.storage import LocalFile, publish
        files = [LocalFile(name, Path(path), size, sha256) for name, path, size, sha256 in {listed!r}]
        target = HubTarget({REPO!r}, endpoint={hub.endpoint!r})
        target.preflight()
        publish(target, files, on_progress=lambda name, size: None)
        """
    )


# ---- rate limits and failures of the commit


@pytest.mark.parametrize(
    ("status", "times", "headers", "pause_s"),
    [(503, 2, {}, 1), (429, 1, {"Retry-After": "2"}, 2), (500, 1, {"Retry-After": "1"}, 1)],
)
def test_a_refused_commit_is_repeated_after_the_time_asked_for(
    hub: HubServer,
    make_files: MakeFiles,
    caplog: pytest.LogCaptureFixture,
    status: int,
    times: int,
    headers: dict[str, str],
    pause_s: float,
) -> None:
    hub.fail("POST", COMMIT, status=status, times=times, headers=headers)
    files = make_files()
    publish_to(hub, files)
    commits = hub.called("POST", COMMIT)
    assert [request.status for request in commits] == [status] * times + [200]
    assert commits[1].time_s - commits[0].time_s >= pause_s
    assert len(hub.repos[REPO].history) == 2
    assert len(hub.called("PUT", "/_store/")) == weights(files)
    assert f"the Hub answered {status} to create_commit" in caplog.text


def test_a_commit_whose_answer_was_lost_is_not_made_twice(hub: HubServer, make_files: MakeFiles) -> None:
    hub.fail("POST", COMMIT, status=504, after=True)
    files = make_files()
    receipt = publish_to(hub, files)
    assert len(hub.called("POST", COMMIT)) == 1
    assert len(hub.repos[REPO].history) == 2
    assert receipt["revision"] == hub.repos[REPO].history[-1]


def test_a_cut_connection_at_the_commit_is_repeated(hub: HubServer, make_files: MakeFiles) -> None:
    hub.fail("POST", COMMIT, status=0)
    publish_to(hub, make_files())
    assert len(hub.repos[REPO].history) == 2


def test_a_push_by_somebody_else_is_not_overwritten(hub: HubServer, make_files: MakeFiles) -> None:
    hub.add_repo(REPO, OWNERS)

    def push(count: int) -> None:
        if count == 1:
            found = hub.repos[REPO]
            found.commit("main", dict(found.commits[found.branches["main"]]))

    hub.on_blob = push
    with pytest.raises(StageError, match="changed by somebody else"):
        publish_to(hub, make_files())
    assert hub.files(REPO) == OWNERS


@pytest.mark.parametrize("path", ["/api/whoami-v2", "/preupload/", "/objects/batch", "/paths-info/", "/_store/"])
def test_a_passing_failure_of_any_other_call_is_waited_out(hub: HubServer, make_files: MakeFiles, path: str) -> None:
    method = "PUT" if path == "/_store/" else "GET" if "whoami" in path else "POST"
    hub.fail(method, path, status=503)
    files = make_files(shards=1)
    publish_to(hub, files)
    assert set(contents_of(files)) <= set(hub.files(REPO))


# ---- refusals


def test_a_token_that_may_not_write_is_told_at_preflight(
    hub: HubServer, make_files: MakeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_repo(REPO, OWNERS)
    monkeypatch.setenv("HF_TOKEN", READER)
    with pytest.raises(TargetError, match=r"\(403\): the token may not write there"):
        hub_target(hub).preflight()
    assert len(hub.repos[REPO].history) == 1


def test_a_wrong_token_is_told_at_preflight(hub: HubServer) -> None:
    with pytest.raises(TargetError, match=r"\(401\): the token is missing or wrong"):
        hub_target(hub, token=SecretStr("hf_WrongPlantedTokenAAAA1111")).preflight()
    assert hub.repos == {}


def test_no_token_is_told_at_preflight(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent/token")
    with pytest.raises(TargetError, match="HF_TOKEN"):
        hub_target(hub).preflight()


def test_a_namespace_of_somebody_else_is_told_at_preflight(hub: HubServer) -> None:
    hub.fail("POST", "/api/repos/create", status=403)
    with pytest.raises(TargetError, match=r"create_repo on hf://lab/tiny-fp8 \(403\)"):
        hub_target(hub).preflight()


def test_a_hub_that_keeps_failing_is_told_at_preflight(hub: HubServer) -> None:
    hub.fail("GET", "whoami", status=503, times=9, headers={"Retry-After": "0"})
    with pytest.raises(TargetError, match=r"the Hub failed at whoami .*\(503\)"):
        hub_target(hub).preflight()
    assert len(hub.called("GET", "whoami")) == 3


def test_what_the_hub_cannot_hold_is_told_before_any_request(hub: HubServer, tmp_path: Path) -> None:
    file = write_files(tmp_path / "c", {"config.json": b"{}"})[0]
    large = LocalFile("model.safetensors", file.path, 51_000_000_000, file.sha256)
    fits = LocalFile("model-2.safetensors", file.path, 50_000_000_000, file.sha256)
    many = [LocalFile(f"many/{n}", file.path, 2, file.sha256) for n in range(10_001)]
    with pytest.raises(TargetError, match=r"model\.safetensors has 51000000000 bytes, the Hub takes 50000000000"):
        hub_target(hub).plan([fits, large])
    with pytest.raises(TargetError, match="folder many has 10001 files, the Hub takes 10000"):
        hub_target(hub).plan(many)
    assert hub.requests == []


def test_a_file_changed_since_the_export_is_not_committed(hub: HubServer, make_files: MakeFiles) -> None:
    files = make_files()
    files[2].path.write_bytes(bytes(files[2].size))
    with pytest.raises(StageError, match="changed since"):
        publish_to(hub, files)
    assert len(hub.repos[REPO].history) == 1


def test_no_secret_is_told_anywhere(
    hub: HubServer,
    make_files: MakeFiles,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", logger="infra")
    target = hub_target(hub, token=SecretStr(WRITER))
    told = [target.preflight(), repr(target)]
    hub.fail("POST", COMMIT, status=400)  # the stand-in echoes the token in its error texts
    hub.fail("PUT", "/_store/", status=403)
    for match in ("refused upload of model-00001", "failed at create_commit"):
        with pytest.raises((TargetError, StageError), match=match) as caught:
            publish(target, make_files(), on_progress=Progress())
        told += [repr(caught.value), str(caught.getrepr(chain=True))]
    told.append(json.dumps(publish(target, make_files(), on_progress=Progress())))
    records = [record.getMessage() for record in caplog.records if record.name.startswith("infra")]
    text = "\n".join([*told, *records, *capfd.readouterr()])
    for planted in (WRITER, WRITER.removeprefix("hf_"), SIGNATURE):
        assert planted not in text


def test_the_address_opens_this_target(hub: HubServer, make_files: MakeFiles) -> None:
    target = open_target(f"hf://{REPO}", private=False)
    assert "created, public" in target.preflight()
    publish(target, make_files(), on_progress=Progress())
    assert "config.json" in hub.files(REPO)
