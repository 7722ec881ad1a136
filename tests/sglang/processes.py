"""The processes of an engine, as tests look at them from outside."""

from contextlib import suppress
from pathlib import Path

from rolloutbus import Fleet
from rolloutbus.launcher.fleet import children_of, command_of

SCHEDULER = "sglang::scheduler"
LISTENING = "0A"
"""As the kernel's tables of sockets say it."""


def scheduler_pids(fleet: Fleet, worker: str = "w0") -> list[int]:
    """SGLang's schedulers below a worker; none while its engine is being started again."""
    waiting = fleet.host_pids(worker)
    found: list[int] = []
    while waiting:
        pid = waiting.pop()
        waiting += children_of(pid)
        if command_of(pid)[:1] and command_of(pid)[0].startswith(SCHEDULER):
            found.append(pid)
    return found


def listening_ports(pid: int) -> set[int]:
    """TCP ports that this process listens at."""
    opened: set[str] = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            opened.add(str(each.readlink()))
    ports: set[int] = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = row.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in opened:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports
