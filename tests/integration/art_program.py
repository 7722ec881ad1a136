"""ART's service with a trainer that finds no room, beside a fleet; ART itself is a stand-in.

Run by the test of the same name: ART is not installed where the fleet is.
"""

# pyright: basic

import asyncio
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import rolloutbus
from tests.integration.live_fleet import DEADLINE_S


class Anything(type):
    """A class that has any other in it."""

    def __getattr__(cls, name: str) -> Any:  # noqa: ANN401
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Module(ModuleType):
    """A module that has any class in it."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class StandIn(MetaPathFinder, Loader):
    """Finds any module of ART and of what its trainer needs, with any name in it."""

    def find_spec(self, fullname: str, _path: Sequence[str] | None, _target: Any = None) -> Any:  # noqa: ANN401
        """One that this loads, if it is theirs."""
        is_theirs = fullname.partition(".")[0] in ("art", "peft")
        return ModuleSpec(fullname, self, is_package=True) if is_theirs else None

    def create_module(self, spec: ModuleSpec) -> Any:  # noqa: ANN401
        """It has whatever is asked of it."""
        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class NoRoom:
    """A trainer whose GPU is full."""

    def move(self, *, is_aside: bool) -> None:
        """It can be neither entered nor left."""
        raise MemoryError("no room to leave it" if is_aside else "no room")


async def main() -> None:
    sys.meta_path.insert(0, StandIn())
    from rolloutbus.trainer_adapter.frameworks.art.service import FleetService  # noqa: PLC0415

    given: Any = SimpleNamespace(devices=SimpleNamespace(is_shared=True))
    async with rolloutbus.up(workers=1, engine="fake", store=False) as fleet:
        service = FleetService("m", "m", given, "", given)
        async with rolloutbus.connect(fleet.address) as client:
            service._trainer = NoRoom()
            service._served = SimpleNamespace(client=client)  # type: ignore[assignment]
            try:
                await anext(aiter(service.train(given, given, given)))
            except MemoryError as error:
                print(error)
            sampling = rolloutbus.SamplingParams(max_new_tokens=4)
            rollout = await client.generate([1, 2, 3], sampling, deadline_s=DEADLINE_S / 4)
            print(len(rollout.tokens))


if __name__ == "__main__":
    asyncio.run(main())
