"""A router that traces tells of requests and attempts; peers that know no traces notice nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rolloutbus.bus.actor.spans import Attributes, SpanKind
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import NO_BODY, Entry, Placement, TracedEntry, traced
from rolloutbus.bus.wire.messages.membership import Hello, Welcome
from rolloutbus.router.traces import RouterTraces, traced_handle
from tests.unit.router.harness import Bus, SimClient, SimWorker

CALLERS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@dataclass
class Noted:
    """A span that a test looks at."""

    name: str
    parent: str | None
    traceparent: str
    about: dict[str, object] = field(default_factory=dict[str, object])
    events: list[str] = field(default_factory=list[str])
    outcome: str = ""

    def tell(self, event: str, attributes: Attributes | None = None) -> None:
        del attributes
        self.events.append(event)

    def learn(self, attributes: Attributes) -> None:
        self.about.update(attributes)

    def end(self, outcome: str, *, is_failure: bool = False) -> None:
        del is_failure
        assert not self.outcome, "a span ends once"
        self.outcome = outcome


class Notes:
    """A tracer that keeps its spans."""

    def __init__(self) -> None:
        self.spans: list[Noted] = []

    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        *,
        parent: str | None = None,
        links: Sequence[str] = (),
    ) -> Noted:
        del kind, links
        number = len(self.spans) + 1
        span = Noted(name, parent, f"00-{7:032x}-{number:016x}-01", dict(attributes))
        self.spans.append(span)
        return span

    def named(self, name: str) -> list[Noted]:
        return [each for each in self.spans if each.name == name]


def tracing_bus() -> tuple[Bus, Notes]:
    bus, notes = Bus(), Notes()
    core = bus.core
    core.context.is_traced = True
    traces = RouterTraces(notes, core)
    core.handle = traced_handle(core.handle, traces)  # type: ignore[method-assign] - as its shell does
    return bus, notes


def say_hello(client: SimClient, protocol: tuple[int, int]) -> int:
    """Introduce a client again; returns the version that the router chooses."""
    client.heard.clear()
    client.say(Entry("hello", body=pack(Hello("client", client.name, "c" * 32, protocol=protocol))))
    welcome = client.take_body("welcome")
    assert isinstance(welcome, Welcome)
    return welcome.protocol


def newer(worker: SimWorker) -> SimWorker:
    """The worker says that it reads traces."""
    known = worker.bus.core.context.members.named(worker.name)
    assert known is not None
    hello = known.hello
    worker.lease_no += 1
    worker.say(
        Entry(
            "hello",
            body=pack(
                Hello(
                    *("worker", worker.name, worker.boot, worker.epoch),
                    protocol=(1, 2),
                    worker=hello.worker,
                )
            ),
        )
    )
    worker.heartbeat()
    return worker


def test_traces_are_asked_for_where_both_sides_know_them() -> None:
    bus, _ = tracing_bus()
    assert say_hello(bus.client(), (1, 1)) == 1
    assert say_hello(bus.client(), (1, 2)) == 2
    assert say_hello(bus.client(), (1, 9)) == 2
    assert say_hello(Bus().client(), (1, 2)) == 1, "a router that does not trace asks for none"


def test_a_worker_that_knows_no_traces_is_sent_none() -> None:
    bus, notes = tracing_bus()
    worker, client = bus.worker(), bus.client()
    place = Placement("default", cost=10)
    entry = Entry("generate", client.next_rid(), deadline_ms=10_000, place=place, body=NO_BODY)

    client.say(traced(entry, CALLERS))

    assert type(worker.heard_one("generate")) is Entry
    (route,) = notes.named("route generate")
    assert route.parent == CALLERS


def test_a_worker_gets_the_span_of_its_attempt() -> None:
    bus, notes = tracing_bus()
    worker, client = newer(bus.worker()), bus.client()

    client.generate()

    command = worker.heard_one("generate")
    assert isinstance(command, TracedEntry)
    (attempt,) = notes.named("attempt")
    (route,) = notes.named("route generate")
    assert command.trace == attempt.traceparent
    assert (attempt.parent, route.parent) == (route.traceparent, "")


def test_an_attempt_that_was_not_accepted_is_followed_by_another_in_the_same_span() -> None:
    bus, notes = tracing_bus()
    first, client = bus.worker("w0"), bus.client()
    client.generate()
    first.is_alive = False
    second = bus.worker("w1")

    bus.advance(5.0)
    command = second.heard_one("generate")
    second.accept(command)
    second.end(command)

    assert client.ending() == ("finished", "")
    tries = notes.named("attempt")
    assert [each.outcome for each in tries] == ["given to another worker", "finished"]
    assert [each.about["member"] for each in tries] == ["w0", "w1"]
    (route,) = notes.named("route generate")
    assert {each.parent for each in tries} == {route.traceparent}
    assert route.outcome == "finished"


def test_spans_of_a_client_that_is_gone_end() -> None:
    bus, notes = tracing_bus()
    worker, client = bus.worker(), bus.client()
    client.generate(deadline_s=3600)
    worker.accept(worker.heard_one("generate"))
    client.is_alive = False

    bus.advance(35.0)
    assert worker.take("fenced")
    worker.running = []
    bus.advance(25.0)

    assert [each.outcome for each in notes.spans] == ["forgotten", "sent", "forgotten"]
