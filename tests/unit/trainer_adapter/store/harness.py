"""A store core with a shell that succeeds at everything."""

from rolloutbus.bus.weights.manifest import lay_out
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.weights import (
    DeltaPart,
    RecordCommit,
    Reserved,
    ReserveVersion,
    SealVersion,
)
from rolloutbus.trainer_adapter.store.core import StoreCommand, StoreCore
from rolloutbus.trainer_adapter.store.effects import (
    Allocate,
    MakeDelta,
    Persist,
    Release,
    StoreAnswer,
    StoreEffect,
    Verify,
    WriteFiles,
)
from rolloutbus.trainer_adapter.store.settings import StoreSettings
from rolloutbus.trainer_adapter.store.versions import BulkAsker, MemberAsker, Record, VersionTable

TENSORS = lay_out([("a", "F32", (4, 4)), ("b", "BF16", (8,))])
SIZE_BYTES = 64 + 16
DIGESTS = [11, 22]
CLIENT = MemberAsker(("trainer/1@store", (1, 1)))  # type: ignore[arg-type]
PULLER = BulkAsker(b"\x01" * 16, "1")  # type: ignore[arg-type]


class StoreCoreHarness:
    """A core, a clock, and a shell that succeeds at everything."""

    def __init__(self, **settings: object) -> None:
        self.settings = StoreSettings(router="ipc:///router", directory="", **settings)  # type: ignore[arg-type]
        self.table = VersionTable()
        self.core = StoreCore(self.settings, "host", self.table)
        self.now = 100.0
        self.n_segments = 0
        self.records: list[Record] = []
        self.mismatch = ""
        self.holds_files = False
        """Whether what takes long is left to the test."""
        self.holds_deltas = False

    def say(self, command: StoreCommand, *, by_bulk: bool = False) -> list[StoreEffect]:
        return self.settle(self.core.handle(PULLER if by_bulk else CLIENT, command, self.now))

    def settle(self, effects: list[StoreEffect]) -> list[StoreEffect]:
        """Carries out what the shell would; returns all effects in order."""
        done: list[StoreEffect] = []
        for effect in effects:
            done.append(effect)
            match effect:
                case Persist(record):
                    self.records.append(record)
                case Allocate(key):
                    self.n_segments += 1
                    name = f"segment{self.n_segments}"
                    done += self.settle(self.core.allocated(key, name, self.now))
                case Verify(key):
                    done += self.settle(self.core.verified(key, self.mismatch, self.now))
                case MakeDelta(key=key) if not self.holds_deltas:
                    parts = [DeltaPart(0, "xor", 0, 8)]
                    done += self.settle(self.core.delta_made(key, parts, 8, self.now))
                case WriteFiles(key=key) if not self.holds_files:
                    done += self.settle(self.core.files_written(f"{key[0]}/{key[1]}"))
                case _:
                    pass
        return done

    def publish(self, policy: str = "default", n: int = 1) -> int:
        """Reserve, seal and commit, so many times; returns the last version."""
        version = 0
        for _ in range(n):
            version = self.seal(policy)
            assert answer_of(self.say(RecordCommit(policy, version))) == Done()
        return version

    def seal(self, policy: str = "default") -> int:
        reserved = answer_of(self.say(ReserveVersion(policy, TENSORS)))
        assert isinstance(reserved, Reserved)
        assert answer_of(self.say(SealVersion(policy, reserved.version, DIGESTS))) == Done()
        return reserved.version


def answer_of(effects: list[StoreEffect]) -> object:
    (answer,) = [each.body for each in effects if isinstance(each, StoreAnswer)]
    return answer


def code_of(effects: list[StoreEffect]) -> str:
    problem = answer_of(effects)
    assert isinstance(problem, Problem)
    return problem.code


def released(effects: list[StoreEffect]) -> list[str]:
    return [each.segment for each in effects if isinstance(each, Release)]
