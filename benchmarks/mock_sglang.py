"""An HTTP server that answers as an SGLang server does, without a model; for `vs_smg.py`.

Like SGLang it holds requests while it is paused and says at `/health` that it is well.
"""

import argparse
import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

Json = dict[str, Any]

TOKENS = [1, 2, 3, 4]


class Engine(ThreadingHTTPServer):
    """One engine that only pretends to sample."""

    def __init__(self, port: int, *, refuses_updates: bool) -> None:
        super().__init__(("127.0.0.1", port), Answer)
        self.refuses_updates = refuses_updates
        self.runs = threading.Event()
        self.runs.set()
        self.version = "1"

    @property
    def facts(self) -> Json:
        """Of every endpoint that asks what this is."""
        return {
            "model_path": "mock",
            "served_model_name": "mock",
            "tp_size": 1,
            "dp_size": 1,
            "version": "0.5.17",
            "is_generation": True,
            "weight_version": self.version,
            "object": "list",
            "data": [{"id": "mock", "object": "model", "owned_by": "sglang"}],
        }

    def generate(self) -> Json:
        """Waits while it is paused."""
        self.runs.wait()
        meta = {
            "id": secrets.token_hex(8),
            "finish_reason": {"type": "length", "length": len(TOKENS)},
            "prompt_tokens": 3,
            "completion_tokens": len(TOKENS),
            "weight_version": self.version,
        }
        return {"text": "", "output_ids": TOKENS, "meta_info": meta}


class Answer(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"

    @property
    def engine(self) -> Engine:
        """What answers."""
        return cast("Engine", self.server)

    def do_GET(self) -> None:
        """Health, and what it is."""
        self._send(200, self.engine.facts)

    def do_POST(self) -> None:
        """Samples, pauses, goes on, takes weights or refuses them."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        engine = self.engine
        match self.path:
            case "/generate":
                self._send(200, engine.generate())
            case "/update_weights_from_disk" if engine.refuses_updates:
                self._send(400, {"success": False, "message": "no such directory"})
            case "/update_weights_from_disk":
                engine.version = body["weight_version"]
                self._send(200, {"success": True, "message": "Succeeded"})
            case "/pause_generation":
                engine.runs.clear()
                self._send(200, {"status": "ok"})
            case _:
                engine.runs.set()
                self._send(200, {"status": "ok"})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Say nothing."""

    def _send(self, status: int, content: Json) -> None:
        encoded = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description="A server that answers as SGLang does.")
    parser.add_argument("port", type=int)
    parser.add_argument("--refuses-updates", action="store_true")
    options = parser.parse_args()
    Engine(options.port, refuses_updates=options.refuses_updates).serve_forever()


if __name__ == "__main__":
    main()
