"""What is asked of the fleet in one run: how much, when, and of which kinds."""

import dataclasses
from dataclasses import dataclass
from random import Random
from typing import get_args

from msgspec.structs import replace

from rolloutbus.bus.wire.entry import Placement
from rolloutbus.bus.wire.messages.generation import Generate, SamplingParams
from rolloutbus.bus.wire.messages.weights import Offer, PublishVersion, TransportChoice
from rolloutbus.bus.wire.validation import cost_of
from rolloutbus.trainer_adapter.client.core.requests import Ask
from rolloutbus.trainer_adapter.client.core.results import OnLoss
from tests.drills.simulation.sim_host import POISON
from tests.drills.simulation.watch import UpdatePhase

PROBE_DEADLINE_S = 15.0
LOSS_POLICIES: tuple[OnLoss, ...] = ("resume", "retry", "fail")
LOSS_WEIGHTS = (6, 3, 1)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Sizes and times of a run; all times in virtual seconds from its start."""

    n_workers: int = 4
    n_clients: int = 3
    n_requests: int = 57
    """Besides these each client sends a probe at the end."""
    work_s: float = 50.0
    """Requests arrive until then."""
    faults_s: float = 72.0
    """Faults begin before; then the network is calm."""
    probe_s: float = 100.0
    """A request of each client at this time must be served at once: liveness."""
    total_s: float = 120.0
    publish_s: tuple[float, float] = (5.0, 30.0)
    """The weight update begins in this interval."""
    deadline_s: float = 60.0
    """Of the patient requests."""
    n_faults: tuple[int, int] = (3, 12)
    """Bounds of the number of faults."""
    is_swarm: bool = True
    """Whether each run draws its own climate, paces and faults."""
    kinds: tuple[str, ...] = ()
    """Kinds of faults in a swarm; empty: each run draws its own."""
    echoes: float | None = None
    """Share of frames that arrive twice in a swarm; None: each run draws its own."""
    detached_share: float = 0.15
    """Of requests: they go on without the client that asked."""
    fault: tuple[str, float] | None = None
    """Without a swarm: the only fault, and when."""
    pause_s: tuple[float, float] | None = None
    """The fleet is paused once within this interval, and goes on at its end at the latest."""
    second_fleet_s: tuple[float, float] | None = None
    """Another fleet comes to the address within this interval, and its store later."""
    pair_share: float = 0.0
    """Of runs: two routers, of which one stands by."""
    ambush: tuple[UpdatePhase, str] | None = None
    """Besides: when in the weight update to strike, and how."""
    publish_deadline_s: float = 20.0
    """Of each try to publish."""
    store_answer_s: float = 0.0
    """The store has written a commit down so long before it says so."""
    publication: PublishVersion | None = None
    """How the weights are published; None: each run draws its own."""


SWARM = Scenario(pair_share=0.15)
HAUNTED = Scenario(kinds=("freeze_worker", "cut_worker"), echoes=0.4, n_faults=(12, 24))
"""Leases end all the time, and what was said under the old ones comes again."""
BLINKING = Scenario(kinds=("blink_router", "kill_worker"), n_faults=(12, 24))
"""Routers come back before the workers they had find out."""
DESERTED = Scenario(
    kinds=("restart_client", "restart_client", "kill_worker", "kill_worker", "blink_router"),
    n_faults=(8, 16),
    detached_share=0.8,
)
"""Clients die in the middle of work that others of their name are to collect."""
FORSAKEN = Scenario(
    kinds=("restart_client", "restart_client", "cut_worker", "cut_worker", "freeze_worker",
           "restart_router", "blink_router"),
    n_faults=(12, 24),
    detached_share=0.8,
)  # fmt: skip
"""Workers come back with work that others have ended since, to routers and clients that are new."""
BARRIER = Scenario(
    kinds=("kill_worker", "kill_worker", "kill_host", "restart_router", "blink_router",
           "cut_worker", "restart_store"),
    n_faults=(12, 24),
    faults_s=40.0,
    pause_s=(5.0, 35.0),
    deadline_s=65.0,
    echoes=0.0,
)  # fmt: skip
"""A trainer pauses the fleet, and whoever is told of it dies, routers included."""
SUCCEEDED = Scenario(
    kinds=("restart_router", "kill_worker", "cut_client", "half_open", "freeze_client"),
    n_faults=(4, 10),
    detached_share=0.0,
    second_fleet_s=(12.0, 35.0),
)
"""Another fleet comes to the address, and its routers do not know its name at first."""
PAIRED = Scenario(
    kinds=("lose_router", "strand_router", "part_routers", "part_routers", "freeze_second",
           "kill_second", "isolate_router", "split_fleet", "restart_router", "freeze_router",
           "cut_worker", "cut_client", "kill_worker", "half_open"),
    pair_share=1.0,
)  # fmt: skip
"""Two routers, of which one stands by, and whatever may make them disagree."""
SMALL = Scenario(
    n_workers=2,
    n_clients=1,
    n_requests=8,
    work_s=9.0,
    faults_s=20.0,
    probe_s=40.0,
    total_s=56.0,
    publish_s=(5.0, 5.5),
    deadline_s=40.0,
    is_swarm=False,
    publication=PublishVersion("default", 1),
)
"""A short run without faults of its own: the ground for one fault at a time."""


FORGETFUL = dataclasses.replace(
    SMALL,
    total_s=90.0,
    ambush=("recorded", "restart_store"),
    publish_deadline_s=2.0,
    store_answer_s=0.2,
)
"""The store dies between writing the commit down and saying so, for longer than anybody waits."""


OFFERS: dict[TransportChoice, Offer] = {
    "cuda_ipc": Offer("cuda_ipc", "GPU-w0", "host-0"),
    "collective": Offer("collective", "sim:1"),
    "disk": Offer("disk", "v1"),
}
"""What the trainer offers beside the store's bytes."""


def publication_by(transport: TransportChoice) -> PublishVersion:
    """The update, with whatever this transport needs."""
    offers = [OFFERS[transport]] if transport in OFFERS else []
    return PublishVersion("default", 1, transport=transport, offers=offers)


def drawn_publication(chance: Random) -> PublishVersion:
    """The update, as a trainer may ask for it."""
    body = publication_by(chance.choice(get_args(TransportChoice)))
    floor, require = chance.choice([0, 0, 1, 3]), chance.choice(["any", "any", "at-least:2"])
    return replace(body, floor=floor, require=require)


def session_of(client: str) -> str:
    """The session that a client opens."""
    return f"{client}-agent"


def drawn_ask(chance: Random, client: str, detached_share: float) -> Ask:
    """A request as a rollout generator may send it."""
    place = Placement(
        "default",
        chance.choice(["any"] * 5 + ["latest", "max-staleness:1", "min:1", "exact:0", "exact:1"]),
        session=chance.choice(["", "", "", "shared", session_of(client)]),
        group=chance.choice(["", "", "g1"]),
        priority=chance.choice([0, 0, 0, 5]),
        outlives_client=chance.random() < detached_share,
    )
    sampling = SamplingParams(
        max_new_tokens=chance.randrange(2, 120), sampling_seed=chance.randrange(1000)
    )
    body = Generate(_prompt(chance), sampling, stream=chance.random() < 0.4)
    place = replace(place, cost=cost_of(body))
    on_loss = chance.choices(LOSS_POLICIES, LOSS_WEIGHTS)[0]
    return Ask("generate", body, place=place, on_loss=on_loss)


def plain_ask(chance: Random, n_tokens: int) -> Ask:
    """A request that any worker can serve."""
    sampling = SamplingParams(max_new_tokens=n_tokens, sampling_seed=chance.randrange(1000))
    body = Generate(_prompt(chance), sampling, stream=True)
    return Ask("generate", body, place=Placement("default", cost=cost_of(body)))


def poison_ask(chance: Random) -> Ask:
    """A request that kills the engine that samples from it."""
    body = Generate(POISON + _prompt(chance), SamplingParams(max_new_tokens=100, sampling_seed=1))
    return Ask("generate", body, place=Placement("default"))


def drawn_deadline_s(chance: Random, patient_s: float) -> float:
    """Most requests are patient; some are not."""
    return chance.uniform(0.5, 8.0) if chance.random() < 0.15 else patient_s


def _prompt(chance: Random) -> bytes:
    return b"".join(chance.randrange(1000, 2000).to_bytes(4, "little") for _ in range(6))
