"""Storage that speaks S3, kept in memory: `python server_program.py`, in .venv-s3.

Writes a line of JSON with its address; then one for each line that it reads, a bucket to be made
(`make`), or one whose objects are to be listed (`list`).
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# What it needs is in another environment.

import json
import sys
from typing import Any

import boto3
from moto.server import ThreadedMotoServer


def main() -> None:
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    told(address=address)
    storage: Any = boto3.client("s3", endpoint_url=address)
    for line in sys.stdin:
        order = json.loads(line)
        if "make" in order:
            storage.create_bucket(Bucket=order["make"])
            told(made=order["make"])
        elif "list" in order:
            found = storage.list_objects_v2(Bucket=order["list"]).get("Contents", [])
            told(keys=[each["Key"] for each in found])
        else:
            storage.download_file(order["bucket"], order["key"], order["into"])
            told(into=order["into"])


def told(**answer: object) -> None:
    print(f"told:{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
