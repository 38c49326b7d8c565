"""A stand-in for the Hugging Face Hub, which says as much as pushing and opening models takes.

It keeps everything in memory. All models are private: TOKEN opens them.
"""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_x"


class Hub(ThreadingHTTPServer):
    """A server that answers from when it is made until its `with` ends."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}  # of each model: their files, newest last
        self.large: dict[str, bytes] = {}  # what is sent apart from a commit, by its sha256
        self.requests: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        super().__exit__(*error)

    def commit(self, model: str, files: dict[str, bytes]) -> str:
        commits = self.commits.setdefault(model, {})
        commits[key := hashlib.sha1(f"{model} {len(commits)}".encode()).hexdigest()] = files
        return key


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def answer(self) -> None:
        self.status, self.head, path = 200, {}, self.path.partition("?")[0]
        sent = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.requests.append(f"{self.command} {path}")
        try:
            if self.headers["Authorization"] != f"Bearer {TOKEN}" and self.command != "PUT":
                raise _Refused(401, "RepoNotFound")
            found = self.find(self.command.replace("HEAD", "GET"), path[1:].split("/"), sent)
        except _Refused as refused:
            self.status, self.head["X-Error-Code"], found = *refused.args, {}
        body = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(self.status)
        for name, value in {**self.head, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def find(self, method: str, path: list[str], sent: bytes) -> Any:
        """What there is to answer: bytes, or else what becomes JSON."""
        hub = self.server
        match [method, *path]:
            case ["POST", "api", "repos", "create"]:
                model = "{organization}/{name}".format(**json.loads(sent))
                self.status = 409 if model in hub.commits else 200
                if self.status == 200:
                    hub.commit(model, {".gitattributes": b""})
                return {"url": f"{hub.address}/{model}"}
            case ["POST", "api", "validate-yaml"]:
                return {}
            case ["POST", "api", "models", owner, name, "preupload", revision]:
                there, ways = self.files(owner, name, revision), []
                for file in json.loads(sent)["files"]:
                    mode = "lfs" if _is_binary(base64.b64decode(file["sample"])) else "regular"
                    key = _key(there[file["path"]]) if file["path"] in there else None
                    ways.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": key})
                return {"files": ways}
            case ["POST", _, _, "info", "lfs", "objects", "batch"]:
                objects = json.loads(sent)["objects"]
                for one in objects:
                    one["actions"] = {"upload": {"href": f"{hub.address}/large/{one['oid']}"}}
                return {"objects": objects}
            case ["PUT", "large", key] if hashlib.sha256(sent).hexdigest() == key:
                hub.large[key] = sent
                return {}
            case ["POST", "api", "models", owner, name, "commit", revision]:
                files = dict(self.files(owner, name, revision))
                for change in map(json.loads, sent.splitlines()):
                    match change:
                        case {"key": "file", "value": {"path": path, "content": content}}:
                            files[path] = base64.b64decode(content)
                        case {"key": "lfsFile", "value": {"path": path, "oid": key}}:
                            files[path] = hub.large[key]
                key = hub.commit(f"{owner}/{name}", files)
                return {"commitUrl": f"{hub.address}/{owner}/{name}/commit/{key}", "commitOid": key}
            case ["GET", "api", "models", owner, name, *rest] if rest[:1] in ([], ["revision"]):
                files = self.files(owner, name, rest[1] if rest else "main")
                siblings = [{"rfilename": path} for path in files]
                return {"id": f"{owner}/{name}", "sha": self.head["X-Repo-Commit"], "siblings": siblings}
            case ["GET", "api", "models", owner, name, "tree", revision, *folder]:
                files = self.files(owner, name, revision).items()
                if not folder:
                    return [{"type": "file", "path": p, "size": len(c), "oid": _key(c)} for p, c in files]
            case ["GET", owner, name, "resolve", revision, *parts]:
                if (content := self.files(owner, name, revision).get("/".join(parts))) is not None:
                    self.head["ETag"] = f'"{_key(content)}"'
                    return content
            case _:
                raise _Refused(501, "NotKnownHere")
        raise _Refused(404, "EntryNotFound")

    def files(self, owner: str, name: str, revision: str) -> dict[str, bytes]:
        """Of a commit, or those of the newest."""
        if not (commits := self.server.commits.get(f"{owner}/{name}")):
            raise _Refused(404, "RepoNotFound")
        key = list(commits)[-1] if revision == "main" else revision
        if key not in commits:
            raise _Refused(404, "RevisionNotFound")
        self.head["X-Repo-Commit"] = key
        return commits[key]

    def log_message(self, *words: object) -> None:
        """Says nothing: `requests` has them all."""


class _Refused(Exception):  # noqa: N818
    """A status, and the Hub's word for what is wrong."""


def _is_binary(content: bytes) -> bool:
    """As the Hub guesses it: such files it keeps apart from git."""
    return b"\0" in content[:512]


def _key(content: bytes) -> str:
    """What a file is known by: its sha256 if it is kept apart, and else git's sum."""
    if _is_binary(content):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
