"""What the files of deploy/ start works: their own commands, with keys, on this host."""

import asyncio
import os
import random
import re
import shlex
import shutil
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest

import rolloutbus
from rolloutbus.engine_worker.engines.sglang.rendezvous import settled_ports
from tests.deploy import slurm_stand_in
from tests.deploy.deploy_files import OURS, SLURM, environment_with_ours, pods_of, probes_of
from tests.integration.control_steps import N_BEFORE, N_TOKENS, PROMPT, all_under_way
from tests.integration.live_fleet import (
    DEADLINE_S,
    START_S,
    assert_fake_rollout,
    fake_sampling,
    serves_at,
    status_when,
)
from tests.integration.programs import running, status_of
from tests.integration.token_limit import TokenLimit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200), pytest.mark.asyncio]

LOCAL = "127.0.0.1"
TASKS = 2


def ours(*command: str, **variables: str) -> AbstractAsyncContextManager[Process]:
    """A program in whose environment our commands are."""
    return running(*command, environment=environment_with_ours(**variables))


def free_ports() -> int:
    """The first of two; the script names its ports, for nobody tells clients of others.

    Whoever else asks for any port meanwhile is given none of these.
    """
    candidates = settled_ports()[:-1]
    while True:
        port = random.choice(candidates)
        try:
            for number in (port, port + 1):
                socket.create_server((LOCAL, number)).close()
        except OSError:
            continue
        return port


@asynccontextmanager
async def job(
    folder: Path, keys: Path, *command: str, engine: Sequence[str] = ()
) -> AsyncGenerator[Process]:
    """The script of a Slurm job, as on one node."""
    programs = folder / "bin"
    programs.mkdir()
    (folder / "steps").mkdir()
    for name in ("srun", "scancel"):
        stand_in = f"{sys.executable} {slurm_stand_in.__file__} {name}"
        (programs / name).write_text(f'#!/bin/sh\nexec {stand_in} "$@"\n')
        (programs / name).chmod(0o700)
    options = " ".join(f"--engine-option {each}" for each in engine)
    variables = {
        "PATH": f"{programs}{os.pathsep}{environment_with_ours()['PATH']}",
        "SLURM_STAND_IN": str(folder / "steps"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS": str(TASKS),
        "MODEL": "none",
        "ENGINE": "fake",
        "WORKER_OPTIONS": options,
        "DRAIN_S": str(round(DEADLINE_S)),
        "KEYS": str(keys),
        "RUN_DIR": str(folder / "run"),
        "INTERFACE": "lo",
        "FRONTEND_PORT": str(free_ports()),
    }
    async with ours("bash", str(SLURM), *command, **variables) as process:
        yield process


async def test_a_slurm_job_that_is_told_to_end_loses_no_request(tmp_path: Path, keys: Path) -> None:
    limit = TokenLimit(tmp_path / "limit")
    engine = ["slots=64", "step_s=0.002", f"hold_file={limit.path}"]
    key = keys / "trainer.key"
    workers = {f"worker-{number}" for number in range(TASKS)}
    async with job(tmp_path, keys, engine=engine) as process:
        async with rolloutbus.connect(await told(process), key_file=key) as client:
            await status_when(
                client, lambda status: {each.name for each in status.workers} == workers, START_S
            )
            assert (await client.status()).store is not None
            with limit.at(N_BEFORE):
                streams = await all_under_way([client] * 24, fake_sampling(N_TOKENS))
                process.terminate()
                await status_when(
                    client,
                    lambda status: {each.state for each in status.workers} == {"draining"},
                )
            rollouts = [await streamed.rollout() for streamed in streams]
        assert await status_of(process) == 143
    for rollout in rollouts:
        assert_fake_rollout(PROMPT, rollout, N_TOKENS)
        assert rollout.n_attempts == 1
    assert (tmp_path / "run" / "address").read_text().startswith(f"tcp://{LOCAL}:")
    logs = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
    assert logs == {"head.log", *(f"{each}.log" for each in workers)}


async def test_a_slurm_job_ends_with_its_command_and_its_status(tmp_path: Path, keys: Path) -> None:
    asked = f"{OURS} generate --address $ROUTER_ADDRESS --key {keys}/trainer.key"
    asked += f" --prompt-ids 1,2 --max-new-tokens 3 --deadline {START_S}"
    command = f"{asked} >{tmp_path}/said && exit 9"
    async with job(tmp_path, keys, "sh", "-c", command) as process:
        async with asyncio.timeout(3 * START_S):
            out, err = await process.communicate()
        assert process.returncode == 9, (out + err).decode()


async def told(process: Process) -> str:
    """The router's address, which the job's log has once the router answers."""
    assert process.stdout is not None
    async with asyncio.timeout(START_S):
        while " at " not in (line := (await process.stdout.readline()).decode()):
            assert line, "it ended before"
    return line.split(" at ")[1].split(",")[0]


class Pods:
    """Containers of the manifests as processes of this host: their commands, paths replaced."""

    def __init__(self, manifests: list[dict[str, Any]], keys: Path, folder: Path) -> None:
        self._pods = pods_of(manifests)
        self._keys = keys
        self._folder = folder
        self._stack = AsyncExitStack()
        self._places = {"0.0.0.0:7777": f"{LOCAL}:0", "0.0.0.0:7778": f"{LOCAL}:0"}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start(self, name: str, *more: str) -> Process:
        """Lay out its volumes, run its first container, and wait until the member is ready."""
        pod, folder = self._pods[name], self._folder / name
        volumes = {each: folder / each for each in ("secrets", "access", "keys", "tmp", "data")}
        for path in volumes.values():
            path.mkdir(parents=True)
        [secrets] = [each for each in pod["volumes"] if each["name"] == "secrets"]
        for source in secrets["projected"]["sources"]:
            secret = source["secret"]["name"].removesuffix("-key")
            shutil.copy(self._keys / f"{secret}.key", volumes["secrets"])
        for public in ("allow.json", "router.pub"):
            shutil.copy(self._keys / public, volumes["access"])
        for path in volumes["secrets"].iterdir():
            path.chmod(0o440)  # as Kubernetes has them
        [keys] = pod["initContainers"]
        async with ours(*self._here(name, keys["command"])) as copied:
            assert await status_of(copied) == 0
        [container] = pod["containers"]
        words = [OURS, *self._here(name, container["args"]), *more]
        process = await self._stack.enter_async_context(ours(*words))
        ready = await serves_at(process)
        if name == "router":
            frontend, backend = (ready[side].split("#")[0] for side in ("frontend", "backend"))
            self._places = {
                **{f"tcp://{host}:7777": frontend for host in ("router", LOCAL)},
                **{f"tcp://{host}:7778": backend for host in ("router", LOCAL)},
            }
        return process

    async def probe(self, name: str, kind: str) -> int:
        """Exit status of a probe's command."""
        [container] = self._pods[name]["containers"]
        command = self._here(name, probes_of(container)[kind])
        async with ours(*command, POD_NAME="worker-0") as process:
            return await status_of(process)

    def _here(self, name: str, words: Sequence[str]) -> list[str]:
        text = shlex.join(words)
        values: Mapping[str, str] = {
            "$(POD_IP)": LOCAL,
            "$(POD_NAME)": "worker-0",
            "--engine=sglang": "--engine=fake",
            "--model=/models/model": "--model=none",
            **self._places,
        }
        for value, ours in values.items():
            text = text.replace(value, ours)
        text = re.sub(
            r"(?<![\w.])/(secrets|access|keys|tmp|data)/", rf"{self._folder / name}/\1/", text
        )
        return shlex.split(text)


async def ended(process: Process) -> None:
    process.terminate()
    assert await status_of(process) == 0


async def test_pods_run_answer_their_probes_and_leave(
    tmp_path: Path, keys: Path, manifests: list[dict[str, Any]]
) -> None:
    async with Pods(manifests, keys, tmp_path) as pods:
        router = await pods.start("router")
        assert await pods.probe("router", "readinessProbe") == 0
        store = await pods.start("store")
        worker = await pods.start("worker")
        for name in ("store", "worker"):
            assert await pods.probe(name, "readinessProbe") == 0
        await ended(worker)
        assert await pods.probe("worker", "readinessProbe") == 1
        for process in (store, router):
            await ended(process)
        assert await pods.probe("router", "livenessProbe") == 3
        # No router answers: that is no reason to kill a worker.
        assert await pods.probe("worker", "livenessProbe") == 0
