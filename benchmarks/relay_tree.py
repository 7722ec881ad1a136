"""How often does a version cross the trainer's link when many workers on another host take it?

Two network namespaces, joined by a pair of virtual Ethernet devices, are the two hosts: router,
store and trainer on one, the weight receivers of four workers, with their relays, on the other.
The router's own plan says which worker pulls from which; all links have keys. What the kernel
counts on the trainer's device is compared with the size of the model, and with every worker pulling
from the store. Needs root, and a kernel that permits namespaces.

    python benchmarks/relay_tree.py --json
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rolloutbus.bus.security.principals import Role
from rolloutbus.bus.wire.messages.membership import StoreFacts, WorkerFacts
from rolloutbus.bus.wire.messages.weights import PrepareUpdate, PublishVersion
from rolloutbus.launcher.plan import FleetKeys, environment
from rolloutbus.router.settings import RouterSettings
from rolloutbus.router.updates.transport_plan import Target, plan_ways
from rolloutbus.trainer_adapter.store.settings import StoreSettings

ROOT = Path(__file__).resolve().parents[1]
GOAL = 1.3
"""At most so many times the model over the trainer's link."""
TRAINER, WORKERS = f"trainer-{os.getpid()}", f"workers-{os.getpid()}"
"""The namespaces."""
IP = shutil.which("ip") or ""
LINK = "rbus0"
ADDRESS = {TRAINER: "10.213.77.1", WORKERS: "10.213.77.2"}


class NotPermitted(Exception):
    """This machine or this user cannot make network namespaces."""


def _ip(*arguments: str) -> None:
    done = subprocess.run([IP, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPermitted(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def two_hosts() -> Generator[None]:
    """Both namespaces and the link between them.

    Raises:
        NotPermitted: they cannot be had.
    """
    if os.geteuid() or not IP:
        raise NotPermitted("network namespaces need root, and the `ip` command")
    try:
        for name in (TRAINER, WORKERS):
            _ip("netns", "add", name)
        _ip("link", "add", LINK, "netns", TRAINER, "type", "veth", "peer", LINK, "netns", WORKERS)
        for name, address in ADDRESS.items():
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", LINK)
            for device in (LINK, "lo"):
                _ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        for name in (TRAINER, WORKERS):
            subprocess.run([IP, "netns", "del", name], capture_output=True, check=False)


class Process:
    """A program on one of the hosts that speaks in lines."""

    def __init__(self, host: str, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [IP, "netns", "exec", host, sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> None:
        """Send one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Return its next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args}: ended with {self._process.wait()}")
        return json.loads(line)

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and return the answer."""
        self.tell(line)
        return self.hear()

    def end(self) -> None:
        """Kill the process."""
        self._process.terminate()
        self._process.communicate()


class Scene:
    """Everything that runs."""

    def __init__(self, stack: ExitStack, folder: Path, n_workers: int, n_mib: int) -> None:
        self._stack = stack
        names = [f"w{index}" for index in range(n_workers)]
        members: dict[str, Role] = {"store": "store", **dict.fromkeys(names, "worker")}
        keys = FleetKeys(folder / "keys")
        keys.make(members)
        loopback = "tcp://127.0.0.1:0"
        settings = RouterSettings(loopback, loopback, security=keys.security_of("router"))
        router = self._start(TRAINER, "router", *_told(settings)).hear()["ready"]
        bulk = f"tcp://{ADDRESS[TRAINER]}:0"
        directory = str(folder / "store")
        security = keys.security_of("store")
        store = StoreSettings(router["backend"], directory, bulk, security=security)
        started = self._start(TRAINER, "rolloutbus.trainer_adapter.store", *_told(store))
        self.bulk: str = started.hear()["ready"]["bulk"]
        ends, where = "benchmarks.relay_tree_ends", str(folder / "keys")
        self.receivers = {
            name: self._start(WORKERS, ends, "receiver", name, where, ADDRESS[WORKERS], str(n_mib))
            for name in names
        }
        self.facts = {
            name: _facts(receiver.hear()["bulk"]) for name, receiver in self.receivers.items()
        }
        frontend = router["frontend"]
        self.trainer = self._start(TRAINER, ends, "trainer", frontend, where, LINK, str(n_mib))
        self.trainer.hear()

    def sources(self, version: int) -> dict[str, Sequence[str]]:
        """The source that each worker asks before the store, as the router plans it."""
        targets = [Target(name, facts) for name, facts in self.facts.items()]
        store = StoreFacts(self.bulk, host="trainer's")
        ways = plan_ways(targets, store, PublishVersion("default", version))
        return {name: way.sources for name, way in ways.items()}

    def update(self, *, by_relay: bool) -> dict[str, float]:
        """All receivers take a new version; what crossed the link for it, and how long it took."""
        version: int = self.trainer.ask("seal")["version"]
        sources = self.sources(version)
        before: int = self.trainer.ask("count")["sent"]
        for name, receiver in self.receivers.items():
            asked = list(sources[name]) if by_relay else []
            ask = PrepareUpdate("default", version, self.bulk, "tcp", asked)
            receiver.tell(msgspec.json.encode(ask).decode())
        outcomes = [receiver.hear() for receiver in self.receivers.values()]
        for outcome in outcomes:
            if "problem" in outcome:
                raise SystemExit(outcome["problem"])
        sent: int = self.trainer.ask("count")["sent"] - before
        return {"link_bytes": sent, "seconds": max(each["seconds"] for each in outcomes)}

    def _start(self, host: str, module: str, *arguments: str) -> Process:
        process = Process(host, module, *arguments)
        self._stack.callback(process.end)
        return process


def _told(settings: msgspec.Struct) -> tuple[str, str]:
    return "--settings-json", msgspec.json.encode(settings).decode()


def _facts(bulk: str) -> WorkerFacts:
    """The facts of a worker that is on another host than the store."""
    return WorkerFacts("default", "", 1, 1, 1, "fake", [], host="workers'", bulk=bulk)


def measure(n_workers: int, n_mib: int, rounds: int) -> dict[str, Any]:
    """Updates by relay and without, in turn."""
    model_bytes = n_mib << 20
    by_relay: list[dict[str, float]] = []
    by_store: list[dict[str, float]] = []
    with two_hosts(), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        scene = Scene(stack, Path(folder), n_workers, n_mib)
        for _ in range(rounds):
            by_relay.append(scene.update(by_relay=True))
            by_store.append(scene.update(by_relay=False))
    worst = max(each["link_bytes"] for each in by_relay) / model_bytes
    return {
        "workers": n_workers,
        "model_bytes": model_bytes,
        "link_ratio": round(worst, 3),
        "goal": GOAL,
        "ok": worst <= GOAL,
        "link_ratio_without_relay": round(
            max(each["link_bytes"] for each in by_store) / model_bytes, 3
        ),
        "seconds": [round(each["seconds"], 3) for each in by_relay],
        "seconds_without_relay": [round(each["seconds"], 3) for each in by_store],
        "load_1m": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }


def main() -> None:
    """Measure and print; exits with 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description="Bytes over the trainer's link, with relays")
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--mib", type=int, default=128, help="size of the model")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    try:
        report = measure(options.workers, options.mib, options.rounds)
    except NotPermitted as reason:
        print(json.dumps({"skipped": str(reason)}) if options.json else f"skipped: {reason}")
        return
    if not options.json:
        print(f"{report['link_ratio']:.2f} times the model over the trainer's link, goal {GOAL}")
    print(json.dumps(report))
    sys.exit(not report["ok"])


if __name__ == "__main__":
    main()
