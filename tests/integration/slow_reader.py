"""A process whose socket is read only when it is told to: a message at a time."""

import json
import sys

import zmq

from rolloutbus.bus.transport.zmq_sockets import new_socket


def main() -> None:
    kind, endpoint = sys.argv[1:]
    with new_socket(zmq.SUB if kind == "SUB" else zmq.DEALER) as socket:
        if kind == "SUB":
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        if kind == "DEALER":
            socket.send(b"here")
        print(json.dumps({"ready": True}), flush=True)
        for _ in sys.stdin:
            print(json.dumps({"message": socket.recv().decode().strip()}), flush=True)


if __name__ == "__main__":
    main()
