"""A filter keeps what belongs to the requests that it names, and what happens to the fleet."""

import pytest

from rolloutbus.bus.wire.codec import pack, topic_of
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.messages.endings import Accepted
from rolloutbus.bus.wire.messages.generation import Deltas
from rolloutbus.replay.choice import Choice, Filter, filter_in


def generate(rid: str, session: str = "", policy: str = "default") -> Entry:
    return Entry("generate", rid, place=Placement(policy, session=session))


def deltas(*rids: str) -> Entry:
    n = len(rids)
    empty = [0] * n
    columns = Deltas(
        rids=list(rids),
        attempts=[(1, 1)] * n,
        seqs=empty,
        counts=empty,
        tokens=b"",
        logprobs=b"",
        versions=empty,
    )
    return Entry("deltas", body=pack(columns))


def test_a_filter_is_a_list_of_names() -> None:
    wanted = filter_in("session=s1,client=a,session=s2")
    assert (wanted.client, wanted.session, wanted.policy) == (["a"], ["s1", "s2"], [])
    assert filter_in(wanted.text) == wanted
    assert filter_in("").is_everything


@pytest.mark.parametrize("text", ["worker=w0", "session", "session=", "client=a b"])
def test_what_is_no_filter_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="filter"):
        filter_in(text)


def test_requests_are_chosen_by_all_that_is_named() -> None:
    choice = Choice(Filter(client=["a"], session=["s"], policy=["p"]))
    asked = [
        generate("a/1", "s", "p"),
        generate("b/1", "s", "p"),
        generate("a/2", "t", "p"),
        generate("a/3", "s"),
    ]
    assert choice.routed(asked) == asked[:1]


def test_what_a_chosen_request_leads_to_is_kept_also_in_lists() -> None:
    choice = Choice(Filter(session=["s"]))
    choice.routed([generate("a/1", "s")])
    kept = [
        Entry("finished", "a/1"),
        Entry("accepted", body=pack(Accepted([("b/1", (1, 1)), ("a/1", (1, 2))]))),
    ]
    others = [
        Entry("finished", "b/1"),
        Entry("accepted", body=pack(Accepted([("b/1", (1, 1))]))),
        Entry("client_beat"),
    ]
    assert choice.routed([*kept, *others]) == kept
    assert choice.is_published(b"any", [deltas("b/1", "a/1")])
    assert not choice.is_published(b"any", [deltas("b/1")])


def test_members_and_weights_belong_to_every_recording() -> None:
    entries = [Entry("hello"), Entry("members"), Entry("commit_update", "t/1@w0")]
    assert Choice(Filter(client=["a"])).routed(entries) == entries


def test_streams_of_a_client_are_those_of_its_topic() -> None:
    choice = Choice(Filter(client=["a"]))
    assert choice.is_published(topic_of("a"), [])
    assert not choice.is_published(topic_of("b"), [])
