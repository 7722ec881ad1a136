"""Whatever workers tell, in whatever order they come and go: the router's index stays true."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rolloutbus.bus.prefix_hashes import packed
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.membership import Prefixes
from tests.unit.router.harness import Bus, SimWorker

N_WORKERS = 3
WHICH = st.integers(0, N_WORKERS - 1)
MARKS = st.lists(st.integers(1, 12), max_size=6)


class Index(RuleBasedStateMachine):
    """A router whose workers tell of their caches, lose their leases and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.bus = Bus()
        self.client = self.bus.client()
        self.workers = [self.bus.worker(f"w{n}") for n in range(N_WORKERS)]
        self.seqs = [0] * N_WORKERS

    @rule(which=WHICH, added=MARKS, removed=MARKS)
    def tell(self, which: int, added: list[int], removed: list[int]) -> None:
        self._say(self.workers[which], self.seqs[which], added, removed)
        self.seqs[which] += 1

    @rule(which=WHICH, added=MARKS, seq=st.integers(0, 5))
    def tell_out_of_order(self, which: int, added: list[int], seq: int) -> None:
        self._say(self.workers[which], seq, added, [])

    @rule(which=WHICH, added=MARKS)
    def begin_anew(self, which: int, added: list[int]) -> None:
        self._say(self.workers[which], 0, added, [])
        self.seqs[which] = 1

    @rule(which=WHICH)
    def come_back_with_the_next_lease(self, which: int) -> None:
        worker = self.workers[which]
        worker.lease_no += 1
        worker.connect()
        worker.hello()
        worker.heartbeat()
        self.seqs[which] = 0

    @rule(which=WHICH)
    def come_back_with_the_same_lease(self, which: int) -> None:
        worker = self.workers[which]
        worker.connect()
        worker.hello()
        worker.heartbeat()

    @rule(which=WHICH)
    def be_replaced(self, which: int) -> None:
        self.workers[which] = self.bus.worker(f"w{which}")
        self.seqs[which] = 0

    @rule(marks=MARKS)
    def ask(self, marks: list[int]) -> None:
        self.client.generate(marks=packed(marks))
        for worker in self.workers:
            for command in worker.take("generate"):
                worker.end(command)

    @rule()
    def all_fall_silent(self) -> None:
        for worker in self.workers:
            worker.is_alive = False
        self.bus.advance(4)
        self.workers = [self.bus.worker(f"w{n}") for n in range(N_WORKERS)]
        self.seqs = [0] * N_WORKERS

    @invariant()
    def both_directions_agree(self) -> None:
        core = self.bus.core
        core._prefixes.check_invariants(core.context.members)  # pyright: ignore[reportPrivateUsage] - what is under test

    def _say(self, worker: SimWorker, seq: int, added: list[int], removed: list[int]) -> None:
        body = pack(Prefixes(seq, packed(added), packed(removed)))
        worker.say(Entry("prefixes", epoch=worker.epoch, body=body))


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
