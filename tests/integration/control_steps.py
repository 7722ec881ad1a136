"""Streams that are under way, and what an abort owes them, whatever engine samples them."""

from collections.abc import Callable, Sequence

from rolloutbus import RolloutClient, SamplingParams
from rolloutbus.bus.wire.codec import pack, unpack_result
from rolloutbus.bus.wire.messages.generation import Abort, Aborted, Generated
from tests.integration.live_fleet import ENDLESS, Streamed
from tests.integration.raw_client import RawClient, generate_body

PROMPT = [3, 10, 20, 7]
N_BEFORE, N_TOKENS = 20, 200


async def all_under_way(
    clients: Sequence[RolloutClient], sampling: SamplingParams
) -> list[Streamed]:
    """A stream of each, once the first tokens of all of them came."""
    streams = [Streamed(client, PROMPT, sampling) for client in clients]
    for streamed in streams:
        await streamed.reached(N_BEFORE)
    return streams


async def abort_stops_exactly_the_request_that_it_names(
    address: str, sampling: Callable[[int], SamplingParams]
) -> None:
    """`address`: of the router; `sampling`: of so many tokens."""
    async with RawClient(address, "x") as raw:
        rids = ["x/1", "x/10", "x/11", "x/100"]
        for rid in rids:
            n_tokens = ENDLESS if rid == "x/1" else N_TOKENS
            raw.generate(rid, generate_body(PROMPT, sampling(n_tokens)))
        raw.say("abort", "x/2", pack(Abort(["x/1"])))

        assert unpack_result("abort", await raw.ending("x/2")) == Aborted(1)
        assert (await raw.ending("x/1")).kind == "cancelled"
        for rid in rids[1:]:
            ending = await raw.ending(rid)
            assert ending.kind == "finished"
            generated = unpack_result("generate", ending)
            assert isinstance(generated, Generated)
            assert len(generated.tokens) == 4 * N_TOKENS
