"""A stand-in for the Hugging Face Hub: its HTTP protocol on loopback, spoken by the real `huggingface_hub`.

It covers what publishing and downloading a model use: whoami, create, auth-check, preupload, LFS batch with
basic and multipart transfers, commit, tree, paths-info, refs, branch and resolve. Blobs lie on disk, every
revision is kept. It emulates no Xet storage, no quotas, no rate limits of its own and not the Hub's texts.
`fail(...)` plants faults and `requests` records every call, so tests can count and time them.
"""

import hashlib
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub_repos import Blobs, Repo, apply, described, is_lfs

WRITER, READER = "hf_WriterPlantedTokenQ7x2LmZ", "hf_ReaderPlantedTokenT3n9VbK"
SIGNATURE = "plantedsignature5e1d"  # in every upload address, as the real store has one


@dataclass
class Fault:
    method: str
    path: re.Pattern[str]
    status: int  # 0 cuts the connection instead of answering
    times: int
    headers: dict[str, str]
    after: bool  # do the work, then answer with the fault


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    status: int
    time_s: float


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)


def not_found(code: str) -> Reply:
    return Reply(404, {"error": code}, {"X-Error-Code": code})


class HubServer:
    """State and behaviour; `started(folder)` serves it. Blobs of at least `part_bytes` go in parts."""

    def __init__(self, folder: Path, *, part_bytes: int = 100_000):
        self.part_bytes = part_bytes
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.on_blob: Callable[[int], None] = lambda count: None  # called before blob number `count` is stored
        self._faults: list[Fault] = []
        self._parts: dict[str, bytes] = {}
        self._count = itertools.count(1)
        self.lock = threading.RLock()
        self.blobs = Blobs(folder / "blobs")

    @classmethod
    @contextmanager
    def started(cls, folder: Path) -> Iterator["HubServer"]:
        hub = cls(folder)
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
        server.daemon_threads = True
        hub.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # ---- for tests

    def fail(
        self,
        method: str,
        path: str,
        *,
        status: int,
        times: int = 1,
        headers: dict[str, str] | None = None,
        after: bool = False,
    ) -> None:
        self._faults.append(Fault(method, re.compile(path), status, times, headers or {}, after))

    def add_repo(self, repo: str, files: dict[str, bytes]) -> str:
        """A repository as somebody pushed it earlier."""
        self.repos[repo] = Repo()
        return self.repos[repo].commit("main", {name: self.blobs.entry(name, c) for name, c in files.items()})

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """Every file of a revision, read from the store."""
        found = self.repos[repo]
        commit = found.resolve(revision)
        assert commit is not None
        return {name: self.blobs.read(entry) for name, entry in found.commits[commit].items()}

    def called(self, method: str, path: str) -> list[Request]:
        return [r for r in self.requests if r.method == method and re.search(path, r.path)]

    # ---- behaviour

    def answer(self, method: str, path: str, token: str, body: bytes) -> Reply:
        """The reply to one request, faults included."""
        with self.lock:
            fault = next((f for f in self._faults if f.times and f.method == method and f.path.search(path)), None)
            if fault:
                fault.times -= 1
        if fault and not fault.after:
            return Reply(fault.status, {"error": f"fault; you sent {token}"}, fault.headers)
        if method == "PUT":
            return self._put(path, body)
        with self.lock:
            reply = self._route(method, path, token, body)
        return Reply(fault.status, {"error": "answer lost"}, fault.headers) if fault else reply

    def _route(self, method: str, path: str, token: str, body: bytes) -> Reply:
        if path.startswith("/_cdn/"):
            return Reply(200, (self.blobs.folder / path[6:]).read_bytes())
        if path.startswith("/_complete/"):
            return self._complete(json.loads(body))
        if token not in (WRITER, READER):
            return Reply(401, {"error": f"Invalid token {token}"})
        for verb, pattern, action in self._routes():
            match = re.fullmatch(pattern, path)
            if verb == method and match:
                groups = {name: unquote(value or "") for name, value in match.groupdict().items()}
                return self._permitted(action, groups, token) or action(body=body, **groups)
        return Reply(404, {"error": f"no such route: {method} {path}"})

    def _permitted(self, action: Callable[..., Reply], groups: dict[str, str], token: str) -> Reply | None:
        if "repo" in groups and groups["repo"] not in self.repos:
            return not_found("RepoNotFound")
        writes = (self._commit, self._preupload, self._batch, self._branch, self._check, self._create)
        return Reply(403, {"error": f"{token} may not write"}) if action in writes and token == READER else None

    def _routes(self) -> list[tuple[str, str, Callable[..., Reply]]]:
        repo, rev = r"(?P<repo>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
        api = f"/api/models/{repo}"
        return [
            ("GET", "/api/whoami-v2", self._whoami),
            ("POST", "/api/repos/create", self._create),
            ("POST", "/api/validate-yaml", lambda **_: Reply(200, {"errors": [], "warnings": []})),
            ("GET", f"{api}/auth-check/write", self._check),
            ("POST", f"{api}/preupload/{rev}", self._preupload),
            ("POST", rf"/{repo}\.git/info/lfs/objects/batch", self._batch),
            ("POST", "/_verify", self._verify),
            ("POST", f"{api}/commit/{rev}", self._commit),
            ("POST", f"{api}/paths-info/{rev}", self._paths_info),
            ("POST", f"{api}/branch/{rev}", self._branch),
            ("GET", f"{api}/tree/{rev}", self._tree),
            ("GET", f"{api}(/revision/{rev})?", self._info),
            ("HEAD", f"/{repo}/resolve/{rev}/(?P<name>.+)", self._resolve),
            ("GET", f"/{repo}/resolve/{rev}/(?P<name>.+)", self._resolve),
        ]

    def _whoami(self, **_: Any) -> Reply:
        return Reply(200, {"type": "user", "name": "lab", "orgs": [], "auth": {"type": "access_token"}})

    def _check(self, **_: Any) -> Reply:
        return Reply(200, {})

    def _create(self, *, body: bytes, **_: Any) -> Reply:
        wanted = json.loads(body)
        repo = f"{wanted['organization']}/{wanted['name']}" if wanted.get("organization") else f"lab/{wanted['name']}"
        url = {"url": f"{self.endpoint}/{repo}"}
        if repo in self.repos:
            return Reply(409, url | {"error": "exists"})
        self.add_repo(repo, {".gitattributes": b"*.safetensors filter=lfs\n"})
        self.repos[repo].private = wanted.get("visibility") == "private"
        return Reply(200, url)

    def _branch(self, *, repo: str, revision: str, **_: Any) -> Reply:
        self.repos[repo].branches[revision] = self.repos[repo].branches["main"]
        return Reply(201, {})

    def _info(self, *, repo: str, revision: str = "", **_: Any) -> Reply:
        commit = self.repos[repo].resolve(revision or "main")
        if commit is None:
            return not_found("RevisionNotFound")
        siblings = [{"rfilename": name} for name in self.repos[repo].commits[commit]]
        info = {
            "id": repo,
            "sha": commit,
            "private": self.repos[repo].private,
            "tags": [],
            "siblings": siblings,
        }
        return Reply(200, info)

    def _preupload(self, *, repo: str, revision: str, body: bytes, **_: Any) -> Reply:
        commit = self.repos[repo].resolve(revision)
        if commit is None:
            return not_found("RevisionNotFound")
        answers = []
        for file in json.loads(body)["files"]:
            entry = self.repos[repo].commits[commit].get(file["path"])
            mode = "lfs" if is_lfs(file["path"]) else "regular"
            oid = {"oid": entry.lfs or entry.blob} if entry else {}
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, **oid})
        return Reply(200, {"files": answers})

    def _batch(self, *, body: bytes, **_: Any) -> Reply:
        objects = []
        for wanted in json.loads(body)["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            if self.blobs.has(oid):
                objects.append({"oid": oid, "size": size})
                continue
            store = f"{self.endpoint}/_store/{oid}"
            upload: dict[str, Any] = {"href": f"{store}/0?X-Amz-Signature={SIGNATURE}"}
            if size > self.part_bytes:
                count = -(-size // self.part_bytes)
                parts = {str(n): f"{store}/{n}?X-Amz-Signature={SIGNATURE}" for n in range(1, count + 1)}
                header = {"chunk_size": str(self.part_bytes), **parts}
                upload = {"href": f"{self.endpoint}/_complete/{oid}", "header": header}
            verify = {"href": f"{self.endpoint}/_verify"}
            objects.append({"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}})
        return Reply(200, {"transfer": "basic", "objects": objects})

    def _put(self, path: str, content: bytes) -> Reply:
        _, _, oid, part = path.split("/")
        self.on_blob(next(self._count))
        with self.lock:
            if part == "0":
                if hashlib.sha256(content).hexdigest() != oid:
                    return Reply(400, {"error": "content is not its oid"})
                self.blobs.add(content)
            else:
                self._parts[f"{oid}/{part}"] = content
        return Reply(200, b"", {"ETag": f'"{hashlib.md5(content).hexdigest()}"'})

    def _complete(self, wanted: dict[str, Any]) -> Reply:
        content = b"".join(self._parts[f"{wanted['oid']}/{part['partNumber']}"] for part in wanted["parts"])
        if hashlib.sha256(content).hexdigest() != wanted["oid"]:
            return Reply(400, {"error": "content is not its oid"})
        self.blobs.add(content)
        return Reply(200, {})

    def _verify(self, *, body: bytes, **_: Any) -> Reply:
        wanted = json.loads(body)
        return Reply(200 if self.blobs.has(wanted["oid"], wanted["size"]) else 404, {})

    def _commit(self, *, repo: str, revision: str, body: bytes, **_: Any) -> Reply:
        header, *operations = [json.loads(line) for line in body.splitlines() if line]
        found = self.repos[repo]
        head = found.branches.get(revision)
        if head is None:
            return not_found("RevisionNotFound")
        if header["value"].get("parentCommit", head) != head:
            return Reply(412, {"error": "A commit has happened since. Please refresh and try again."})
        try:
            files = apply(operations, found.commits[head], self.blobs)
        except KeyError as error:
            return Reply(400, {"error": f"{error} is not there"})
        oid = found.commit(revision, files)
        return Reply(200, {"commitUrl": f"{self.endpoint}/{repo}/commit/{oid}", "commitOid": oid})

    def _paths_info(self, *, repo: str, revision: str, body: bytes, **_: Any) -> Reply:
        commit = self.repos[repo].resolve(revision)
        if commit is None:
            return not_found("RevisionNotFound")
        files = self.repos[repo].commits[commit]
        names = parse_qs(body.decode()).get("paths", [])
        return Reply(200, [described(name, files[name]) for name in names if name in files])

    def _tree(self, *, repo: str, revision: str, **_: Any) -> Reply:
        commit = self.repos[repo].resolve(revision)
        if commit is None:
            return not_found("RevisionNotFound")
        return Reply(200, [described(name, entry) for name, entry in self.repos[repo].commits[commit].items()])

    def _resolve(self, *, repo: str, revision: str, name: str, **_: Any) -> Reply:
        commit = self.repos[repo].resolve(revision)
        if commit is None:
            return not_found("RevisionNotFound")
        entry = self.repos[repo].commits[commit].get(name)
        if entry is None:
            return not_found("EntryNotFound")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{entry.lfs or entry.blob}"'}
        if entry.lfs is None:
            return Reply(200, self.blobs.read(entry), headers)
        # Another host name than the endpoint's: the client follows redirects on the same host by itself.
        store = {"Location": f"http://localhost:{self.port}/_cdn/{entry.lfs}"}
        linked = {"X-Linked-ETag": f'"{entry.lfs}"', "X-Linked-Size": str(entry.size)}
        return Reply(302, b"", headers | store | linked)


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # header and body are two writes

        def _serve(self) -> None:
            start = time.monotonic()
            address = urlsplit(self.path)
            body = self._body()
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            reply = hub.answer(self.command, address.path, token, body)
            hub.requests.append(Request(self.command, address.path, reply.status, start))
            if reply.status == 0:
                self.close_connection = True
                return
            content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if not isinstance(reply.body, bytes):
                self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815  names of http.server

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
