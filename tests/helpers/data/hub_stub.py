"""A folder served as the Hugging Face hub serves a repository: as much of its interface as fetching
and pushing small files needs."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "1" * 40


@contextmanager
def hub(root: Path) -> Iterator[str]:
    """The address of a hub whose repositories are folders `<root>/<owner>/<name>`."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

        def folder(self, start: int) -> Path:
            parts = self.path.removeprefix("/datasets").split("?")[0].split("/")
            return root.joinpath(*parts[start : start + 2])

        def say(self, body: bytes, headers: dict | None = None, code: int = 200) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def say_json(self, found: object, code: int = 200) -> None:
            self.say(json.dumps(found).encode(), {"Content-Type": "application/json"}, code)

        def missing(self) -> None:
            self.say(b"{}", {"X-Error-Code": "RepoNotFound"}, 404)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if not self.path.startswith("/api/"):
                return self.file()
            folder = self.folder(3)
            if not folder.is_dir():
                return self.missing()
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            names = [str(path.relative_to(folder)) for path in files]
            if "/tree/" in self.path:
                sizes = [
                    {"type": "file", "path": n, "size": f.stat().st_size, "oid": digest(f)}
                    for n, f in zip(names, files, strict=True)
                ]
                return self.say_json(sizes)
            siblings = [{"rfilename": name} for name in names]
            self.say_json({"id": "/".join(folder.parts[-2:]), "sha": COMMIT, "siblings": siblings})

        def file(self) -> None:
            path = self.folder(1) / self.path.split("/resolve/")[1].split("/", 1)[1]
            if not path.is_file():
                return self.missing()
            self.say(path.read_bytes(), {"ETag": f'"{digest(path)}"', "X-Repo-Commit": COMMIT})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path.endswith("/repos/create"):
                asked = json.loads(body)
                name = f"{asked.get('organization') or 'me'}/{asked['name']}"
                (root / name).mkdir(parents=True, exist_ok=True)
                return self.say_json({"url": f"http://{self.headers['Host']}/{name}"})
            if "/preupload/" in self.path:
                files = [
                    {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for one in json.loads(body)["files"]
                ]
                return self.say_json({"files": files})
            if "/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        path = self.folder(3) / line["value"]["path"]
                        path.write_bytes(base64.b64decode(line["value"]["content"]))
                    if line["key"] == "deletedFile":
                        (self.folder(3) / line["value"]["path"]).unlink()
                return self.say_json({"commitUrl": self.path, "commitOid": COMMIT, "success": True})
            self.say_json({"ok": True})

    with served(Handler) as address:
        yield address


@contextmanager
def no_hub(body: bytes) -> Iterator[str]:
    """The address of a server that answers everything with `body`, as the page of a login does."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

    with served(Handler) as address:
        yield address


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda request, client: None  # type: ignore[method-assign]
    often = {"poll_interval": 0.01}
    threading.Thread(target=server.serve_forever, kwargs=often, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
