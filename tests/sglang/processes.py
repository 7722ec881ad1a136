"""The processes of an engine, as tests look at them from outside."""

from rolloutbus import Fleet
from rolloutbus.launcher.fleet import children_of, command_of

SCHEDULER = "sglang::scheduler"


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
