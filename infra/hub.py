"""A Hugging Face Hub repository as target: weights are sent ahead, one commit makes everything visible.

The commit adds the new files and deletes what an older export left, so every revision is a whole checkpoint;
a README.md or .gitattributes of the owner stays. The commit names its parent: somebody else's push in between
is an error, not an overwrite. `huggingface_hub` retries uploads but not the commit; that is done here, and
the repository is looked at before every further attempt, for only the answer may have been lost.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.lfs import UploadInfo, post_lfs_batch_info
from pydantic import SecretStr

from distribute.errors import StageError, TargetError
from infra.hub_client import ATTEMPTS, CLIENT_ERRORS, HubCalls, is_xet_used, no_bars, status_of
from infra.release import LocalFile, is_weight, stale_names

MAX_FILE_BYTES = 50_000_000_000  # Hub documentation, "Repository limitations and recommendations"
MAX_FILES_PER_FOLDER = 10_000
OWNED = ("README.md", ".gitattributes")  # once there, they are the owner's to write
_ASKED_AT_ONCE = 256
_PREFLIGHT_ATTEMPTS = 3
_IGNORE_NOTHING = "# the owner's .gitignore does not apply to a checkpoint\n"


class HubTarget:
    """Publishes to the model repository `org/name` at a branch. See `infra.storage.Target`.

    The token comes from the Hub's usual chain (HF_TOKEN, `hf auth login`) unless given.
    """

    def __init__(
        self,
        repo: str,
        *,
        revision: str = "main",
        private: bool = True,
        endpoint: str | None = None,
        token: SecretStr | None = None,
    ):
        self.repo, self.revision, self.private = repo, revision, private
        plain = token.get_secret_value() if token else None
        self._api = HfApi(endpoint=endpoint, token=plain, library_name="nogather")
        self._secrets = [plain] if plain else []
        self._calls = HubCalls(self.address, secrets=self._secrets)
        self._additions: dict[str, CommitOperationAdd] = {}
        self._parent: str | None = None
        self._revision: str | None = None

    def __repr__(self) -> str:
        return f"HubTarget({self.address!r})"

    @property
    def address(self) -> str:
        return f"hf://{self.repo}" + ("" if self.revision == "main" else f"@{self.revision}")

    def preflight(self) -> str:
        calls = HubCalls(self.address, secrets=self._secrets, attempts=_PREFLIGHT_ATTEMPTS)
        try:
            return self._look(calls.retried)
        except StageError as error:
            raise TargetError(str(error)) from None

    def kept(self) -> frozenset[str]:
        return frozenset(OWNED) & frozenset(self._names(self._head()))

    def plan(self, files: Sequence[LocalFile]) -> list[LocalFile]:
        _check_limits(files)
        self._parent = self._head()
        held = {name for name, info in self._ask(files, self._parent).items() if info is not None}
        lacking = [file for file in files if file.name not in held]
        stored = self._stored([file for file in lacking if is_weight(file.name)])
        return [file for file in lacking if file.name not in stored]

    def put(self, files: Sequence[LocalFile], *, on_progress: Callable[[str, int], None]) -> None:
        """Weights are sent now; what the Hub keeps as plain text travels in the commit."""
        with no_bars():
            for file in files:
                addition = self._additions[file.name] = CommitOperationAdd(file.name, file.path)
                if is_weight(file.name):
                    self._calls.retried(f"upload of {file.name}", self._preupload, [addition])
                    _check_digest(file, addition)
                on_progress(file.name, file.size)

    def commit(self, files: Sequence[LocalFile]) -> str | None:
        new = {file.name for file in files}
        stale = stale_names(self._names(self._parent), new, None)
        additions = [self._additions.get(file.name) or CommitOperationAdd(file.name, file.path) for file in files]
        deletions = [CommitOperationDelete(name, is_folder=False) for name in stale]
        with no_bars():
            self._calls.retried("preupload", self._preupload, additions)
            self._revision = self._commit_once([*additions, *deletions], files, stale)
        return self._revision

    def verify(self, files: Sequence[LocalFile]) -> dict[str, dict[str, Any]]:
        remote = {}
        for name, info in self._ask(files, self._revision).items():
            if info is None:
                raise StageError(
                    f"{self.address}: {name} is absent or has another size or checksum in {self._revision}; "
                    "publish again"
                )
            checksum = {"sha256": info.lfs.sha256} if info.lfs else {"git_blob": info.blob_id}
            remote[name] = {"size": info.size, **checksum}
        return remote

    def seal(self, receipt: dict[str, Any]) -> None:
        """Nothing to do: the commit is the seal, and a repository keeps no receipt beside its own history."""

    def discard(self) -> None:
        """Nothing to do: what was sent is invisible without a commit and serves a resume."""
        self._additions.clear()

    # ---- the commit

    def _commit_once(self, operations: list[Any], files: Sequence[LocalFile], stale: Sequence[str]) -> str:
        """Commit, and try again after a passing failure, but never when the commit turns out to be there."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._api.create_commit(
                    self.repo,
                    operations,
                    commit_message="Upload quantized checkpoint",
                    revision=self.revision,
                    parent_commit=self._parent,
                ).oid
            except CLIENT_ERRORS as error:
                # 412: the parent is no longer the head, perhaps by our own commit whose answer was lost.
                if status_of(error) != 412:
                    self._calls.wait_or_raise(error, "create_commit", attempt)
            head = self._head()
            if head != self._parent:
                return self._own_commit(head, files, stale)
        raise StageError(f"the Hub refused create_commit on {self.address} {ATTEMPTS} times; publish again later")

    def _own_commit(self, head: str, files: Sequence[LocalFile], stale: Sequence[str]) -> str:
        """`head` when its content is what we commit; otherwise somebody else pushed."""
        whole = all(info is not None for info in self._ask(files, head).values())
        if whole and not set(stale) & set(self._names(head)):
            return head
        raise StageError(
            f"{self.address} was changed by somebody else during the upload; look at it and publish again"
        )

    # ---- parts

    def _look(self, ask: Callable[..., Any]) -> str:
        """Log in, and make the repository and the branch when they are not there."""
        api = self._api
        name = ask("whoami", api.whoami)["name"]
        found = "exists"
        if not ask("repo_info", api.repo_exists, self.repo):
            ask("create_repo", api.create_repo, self.repo, private=self.private, exist_ok=True)
            found = f"created, {'private' if self.private else 'public'}"
        ask("auth_check", api.auth_check, self.repo, write=True)
        if not ask("repo_info", api.revision_exists, self.repo, self.revision):
            ask("create_branch", api.create_branch, self.repo, branch=self.revision, exist_ok=True)
            found += f", branch {self.revision} created"
        return f"{self.address}: writable by {name}, {found}"

    def _preupload(self, additions: list[CommitOperationAdd]) -> None:
        self._api.preupload_lfs_files(
            self.repo,
            additions,
            revision=self.revision,
            free_memory=False,
            gitignore_content=_IGNORE_NOTHING,
        )

    def _head(self) -> str:
        info = self._calls.retried("repo_info", self._api.repo_info, self.repo, revision=self.revision)
        return str(info.sha)

    def _names(self, revision: str | None) -> list[str]:
        def listing() -> list[str]:
            return self._api.list_repo_files(self.repo, revision=revision)

        return self._calls.retried("list_repo_files", listing)

    def _ask(self, files: Sequence[LocalFile], revision: str | None) -> dict[str, RepoFile | None]:
        """What `revision` holds of each file; None where it is absent or has other content."""
        found: dict[str, RepoFile] = {}
        for start in range(0, len(files), _ASKED_AT_ONCE):
            names = [file.name for file in files[start : start + _ASKED_AT_ONCE]]
            entries = self._calls.retried("paths_info", self._api.get_paths_info, self.repo, names, revision=revision)
            found.update({entry.path: entry for entry in entries if isinstance(entry, RepoFile)})
        return {
            file.name: info if (info := found.get(file.name)) and _is_same(info, file) else None for file in files
        }

    def _stored(self, files: Sequence[LocalFile]) -> set[str]:
        """Weights whose content the Hub's LFS store has from an ended attempt, though no commit names them.

        Xet storage cannot be asked; there the client finds out, chunk by chunk, while it uploads.
        """
        if not files or is_xet_used():
            return set()
        there: set[str] = set()
        for start in range(0, len(files), _ASKED_AT_ONCE):
            answers, _, _ = self._calls.retried(
                "lfs_batch",
                post_lfs_batch_info,
                upload_infos=[_upload_info(file) for file in files[start : start + _ASKED_AT_ONCE]],
                token=self._api.token,
                repo_type="model",
                repo_id=self.repo,
                revision=self.revision,
                endpoint=self._api.endpoint,
            )
            there |= {answer["oid"] for answer in answers if not answer.get("actions")}
        return {file.name for file in files if file.sha256 in there}


def _upload_info(file: LocalFile) -> UploadInfo:
    return UploadInfo(size=file.size, sample=b"", sha256=bytes.fromhex(file.sha256))


def _check_limits(files: Sequence[LocalFile]) -> None:
    for file in files:
        if file.size > MAX_FILE_BYTES:
            raise TargetError(
                f"{file.name} has {file.size} bytes, the Hub takes {MAX_FILE_BYTES} a file; use smaller shards"
            )
    for folder, count in Counter(str(PurePosixPath(file.name).parent) for file in files).items():
        if count > MAX_FILES_PER_FOLDER:
            raise TargetError(
                f"folder {folder} has {count} files, the Hub takes {MAX_FILES_PER_FOLDER}; use larger shards"
            )


def _is_same(info: RepoFile, file: LocalFile) -> bool:
    if info.size != file.size:
        return False
    if info.lfs is not None:
        return info.lfs.sha256 == file.sha256
    content = file.path.read_bytes()  # plain files on the Hub are at most a few MB
    return info.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _check_digest(file: LocalFile, addition: CommitOperationAdd) -> None:
    if addition.upload_info.sha256.hex() != file.sha256:
        raise StageError(f"{file.path} changed since it was written (sha256 differs); run the export again")
