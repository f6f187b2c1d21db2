"""A small stand-in of the Hugging Face hub: repositories of files in memory, over HTTP on this machine.

It answers what huggingface_hub asks to create a repository, to upload (small files in the commit, large ones
by LFS), and to download. Nothing else of the hub is there.
"""

import base64
import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SHA = "a" * 40


class Hub(ThreadingHTTPServer):
    """`repos`: name -> path -> bytes. A repository called ".../locked" takes no commit."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos, self.objects = {}, {}
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, content=None, status=200, **headers):
        body = (
            content if isinstance(content, bytes) else json.dumps({} if content is None else content).encode()
        )
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def repo(self):
        """Name of the repository in the path, and the rest of the path."""
        parts = self.path.partition("?")[0].removeprefix("/api/models").strip("/").split("/", 2)
        return "/".join(parts[:2]), parts[2] if len(parts) > 2 else ""

    def do_POST(self):
        server, body = self.server, self.body()
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            server.repos.setdefault(name, {})
            return self.answer({"url": f"{server.url}/{name}", "id": name, "name": name})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        name, rest = self.repo()
        if rest.startswith("preupload/"):
            return self.answer({"files": [self.mode(file) for file in json.loads(body)["files"]]})
        if rest == "info/lfs/objects/batch":
            return self.answer(
                {"transfer": "basic", "objects": [self.place(o) for o in json.loads(body)["objects"]]}
            )
        if rest.startswith("commit/"):
            if name.endswith("/locked"):
                return self.answer({"error": "this repository is locked"}, 403)
            for line in body.decode().splitlines():
                self.keep(server.repos[name], **json.loads(line))
            return self.answer({"commitUrl": f"{server.url}/{name}/commit/{SHA}", "commitOid": SHA})
        return self.answer({"error": self.path}, 404)

    def mode(self, file):
        large = file["path"].endswith(".safetensors")
        return {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}

    def place(self, wanted):
        upload = {"href": f"{self.server.url}/objects/{wanted['oid']}"}
        return {**wanted, "authenticated": True, "actions": {"upload": upload}}

    def keep(self, files, key, value):
        if key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            files[value["path"]] = self.server.objects[value["oid"]]

    def do_PUT(self):
        content = self.body()
        oid = self.path.rsplit("/", 1)[1]
        assert hashlib.sha256(content).hexdigest() == oid
        self.server.objects[oid] = content
        self.answer()

    def do_GET(self):
        name, rest = self.repo()
        files = self.server.repos.get(name)
        if files is None:
            return self.answer({"error": "no such repository"}, 404, X_Error_Code="RepoNotFound")
        if rest.startswith("resolve/"):
            content = files.get(rest.split("/", 2)[2])
            if content is None:
                return self.answer({}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=SHA)
            return self.answer(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=SHA)
        if rest.startswith("revision/"):
            return self.answer({"id": name, "sha": SHA})
        if rest.startswith("tree/"):
            return self.answer(
                [{"type": "file", "path": path, "size": len(files[path]), "oid": SHA} for path in files]
            )
        return self.answer({"error": self.path}, 404)

    do_HEAD = do_GET


@contextlib.contextmanager
def running():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
