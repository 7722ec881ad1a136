"""Addresses: this machine for everybody, other machines only with keys."""

import pytest

from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.transport.endpoints import (
    advertised,
    check_advertised,
    is_out_of_reach,
    require_bindable,
    require_local,
    require_reachable,
    require_routers,
    router_addresses,
    split_key,
    with_key,
    without_keys,
)
from rolloutbus.bus.transport.interfaces import facing, is_own
from rolloutbus.bus.wire.errors import SettingsError

KEY = "ab" * 32
KEYS_AND_LIST = SecuritySettings(key_file="k", allow_list="l")
UNSAFE = SecuritySettings(unsafe_no_auth=True)
LOCAL = ["ipc:///tmp/x", "tcp://127.0.0.1:0", "tcp://localhost:7", "tcp://[::1]:7"]
REMOTE = ["tcp://10.0.0.1:7", "tcp://0.0.0.0:7", "tcp://*:7", "tcp://example:7", "tcp://[::]:7"]


@pytest.mark.parametrize("endpoint", LOCAL)
def test_this_machine_needs_no_keys(endpoint: str) -> None:
    assert require_local(endpoint) == endpoint
    assert require_bindable(endpoint, None, is_router=True) == endpoint
    if not endpoint.endswith(":0"):
        assert require_reachable(endpoint, None) == endpoint


@pytest.mark.parametrize("endpoint", REMOTE)
@pytest.mark.parametrize("security", [None, SecuritySettings()])
def test_other_machines_need_keys_and_the_one_line_says_which(
    endpoint: str, security: SecuritySettings | None
) -> None:
    for check in (require_bindable, require_reachable):
        with pytest.raises(SettingsError, match="key_file") as caught:
            check(endpoint, security)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("endpoint", REMOTE)
def test_with_keys_and_allow_list_any_address_may_be_bound(endpoint: str) -> None:
    assert require_bindable(endpoint, KEYS_AND_LIST, is_router=True) == endpoint


@pytest.mark.parametrize(
    "security", [SecuritySettings(key_file="k"), SecuritySettings(allow_list="l")]
)
@pytest.mark.parametrize("endpoint", [*LOCAL, *REMOTE])
def test_who_listens_needs_both_keys_and_allow_list(
    endpoint: str, security: SecuritySettings
) -> None:
    with pytest.raises(SettingsError, match="allow_list"):
        require_bindable(endpoint, security)


def test_unsafe_setting_never_opens_a_router() -> None:
    assert require_bindable("tcp://10.0.0.1:7", UNSAFE)
    with pytest.raises(SettingsError):
        require_bindable("tcp://10.0.0.1:7", UNSAFE, is_router=True)


@pytest.mark.parametrize("endpoint", ["tcp://*:7", "tcp://0.0.0.0:7", "tcp://[::]:7"])
def test_announced_address_is_one_that_peers_can_reach(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="interface"):
        require_bindable(endpoint, KEYS_AND_LIST, is_announced=True)


@pytest.mark.parametrize("endpoint", ["", "http://127.0.0.1:1", "ipc://", "inproc://x", "#" + KEY])
def test_other_kinds_of_addresses_are_refused(endpoint: str) -> None:
    with pytest.raises(SettingsError):
        require_bindable(endpoint, KEYS_AND_LIST)


@pytest.mark.parametrize("host", ["a b", "[::1", "::1", "a@b", "[a]b", "a/b", ""])
def test_what_is_no_host_is_refused_before_anybody_connects_there(host: str) -> None:
    for check in (require_bindable, require_reachable):
        with pytest.raises(SettingsError, match=r"tcp://HOST:PORT|from 1 to 65535"):
            check(f"tcp://{host}:7", SecuritySettings("k", [KEY], allow_list="l"))
    with pytest.raises(SettingsError, match="tcp://HOST:PORT"):
        router_addresses("tcp://a:7/")


def test_address_carries_the_key_of_who_listens_there() -> None:
    endpoint = with_key("tcp://10.0.0.1:7", KEY)
    assert split_key(endpoint) == ("tcp://10.0.0.1:7", KEY)
    assert require_reachable(endpoint, SecuritySettings(key_file="k")) == endpoint


@pytest.mark.parametrize("key", ["short", "AB" * 32, "ab" * 33, "gg" * 32])
def test_wrong_key_in_an_address_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        split_key(f"tcp://10.0.0.1:7#{key}")
    assert key not in str(caught.value)


def test_guarded_address_needs_a_key_of_ones_own_and_a_key_needs_to_know_whom_to_expect() -> None:
    with pytest.raises(SettingsError, match="key of yours"):
        require_reachable(f"tcp://127.0.0.1:7#{KEY}", None)
    with pytest.raises(SettingsError, match="whose key"):
        require_reachable("tcp://127.0.0.1:7", SecuritySettings(key_file="k"))
    listed = SecuritySettings(key_file="k", server_keys=[KEY])
    assert require_reachable("tcp://10.0.0.1:7", listed)


@pytest.mark.parametrize("port", ["99999", "65536", "-5", "15999abc", " 15998", "", "*"])
def test_what_is_no_port_is_not_taken_for_another(port: str) -> None:
    for check in (require_bindable, require_reachable):
        with pytest.raises(SettingsError, match="from 1 to 65535"):
            check(f"tcp://127.0.0.1:{port}", None)


def test_nobody_connects_to_a_port_that_is_to_be_chosen() -> None:
    with pytest.raises(SettingsError, match="port 0"):
        require_reachable("tcp://127.0.0.1:0", None)


def test_a_member_needs_a_key_and_is_handed_the_list() -> None:
    key_only = SecuritySettings(key_file="k")
    assert require_bindable("tcp://10.0.0.1:7", key_only, is_router=True, is_member=True)
    with pytest.raises(SettingsError, match="key_file"):
        require_bindable("tcp://10.0.0.1:7", SecuritySettings(allow_list="l"), is_member=True)


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("", f"tcp://10.0.0.1:7#{KEY}"),
        ("gpu-7.example.org", f"tcp://gpu-7.example.org:7#{KEY}"),
        ("2001:db8::7", f"tcp://[2001:db8::7]:7#{KEY}"),
    ],
)
def test_another_host_may_be_told_instead_of_the_one_that_is_listened_on(
    host: str, told: str
) -> None:
    assert advertised(f"tcp://10.0.0.1:7#{KEY}", host) == told
    assert advertised("ipc:///run/x", host) == "ipc:///run/x"


@pytest.mark.parametrize("host", ["10.0.0.1:7777", "tcp://a", "*", "0.0.0.0", "::", "a b", "-a"])  # noqa: S104
def test_what_is_no_host_is_not_advertised(host: str) -> None:
    with pytest.raises(SettingsError, match="advertise"):
        check_advertised(host)


@pytest.mark.parametrize(
    ("endpoint", "router", "is_far"),
    [
        (f"tcp://127.0.0.1:7#{KEY}", f"tcp://10.0.0.1:7777#{KEY}", True),
        ("ipc:///run/x", "tcp://10.0.0.1:7777", True),
        ("tcp://10.0.0.1:7", "tcp://10.0.0.1:7777", False),
        ("tcp://127.0.0.1:7", "tcp://127.0.0.1:7777", False),
        ("tcp://127.0.0.1:7", "ipc:///run/router", False),
        ("", "tcp://10.0.0.1:7777", False),
    ],
)
def test_local_endpoints_of_another_host_are_out_of_reach(
    endpoint: str, router: str, *, is_far: bool
) -> None:
    assert is_out_of_reach(endpoint, router) is is_far


@pytest.mark.parametrize("router", ["tcp://127.0.0.1:7778", "tcp://[::1]:7", "ipc:///run/r"])
def test_members_of_a_local_router_listen_on_the_loopback(router: str) -> None:
    assert facing(router) == "tcp://127.0.0.1:0"


@pytest.mark.parametrize("router", ["tcp://0.0.0.0:7778", "tcp://[::]:7778"])
def test_a_router_is_not_connected_to_by_every_interface(router: str) -> None:
    with pytest.raises(SettingsError, match="on the network"):
        facing(router)


def test_a_host_without_an_address_is_told_to_name_one() -> None:
    with pytest.raises(SettingsError, match="--stream"):
        facing("tcp://no-such-host.invalid:7778")


@pytest.mark.parametrize(
    ("address", "is_ours"),
    [("127.0.0.1", True), ("::ffff:127.0.0.1", True), ("192.0.2.7", False), ("nonsense", False)],
)
def test_own_addresses_are_known(address: str, *, is_ours: bool) -> None:
    assert is_own(address) is is_ours


def test_several_routers_are_tried_in_the_order_in_which_they_are_named() -> None:
    text = f"tcp://10.0.0.2:7777#{KEY}, tcp://10.0.0.1:7777"
    assert router_addresses(text) == (f"tcp://10.0.0.2:7777#{KEY}", "tcp://10.0.0.1:7777")
    assert router_addresses("ipc:///run/x") == ("ipc:///run/x",)
    assert without_keys(f"tcp://a:1#{KEY},ipc:///run/x") == "tcp://a:1,ipc:///run/x"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tcp://a:1,", "empty place"),
        (",tcp://a:1", "empty place"),
        ("tcp://a:1,,tcp://b:1", "empty place"),
        ("", "only ipc://PATH and tcp://HOST:PORT"),
        ("tcp://a:1,b:1", "b:1: only ipc://PATH and tcp://HOST:PORT"),
        ("tcp://a:1;tcp://b:1", "its port is a number"),
        (f"tcp://a:1#{KEY},tcp://a:1", "stands twice"),
        ("tcp://a:1#key,tcp://b:1", "64 hexadecimal digits"),
    ],
)
def test_nonsense_among_the_addresses_of_routers_is_refused(text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        router_addresses(text)


def test_each_of_several_routers_must_be_reachable() -> None:
    require_routers("ipc:///run/x,tcp://127.0.0.1:7777", None)
    with pytest.raises(SettingsError, match=r"10\.0\.0\.1:7777 is beyond this machine"):
        require_routers("ipc:///run/x,tcp://10.0.0.1:7777", None)


def test_of_several_routers_one_on_another_host_says_that_there_are_several_hosts() -> None:
    assert is_out_of_reach("ipc:///run/x", "ipc:///run/r,tcp://10.0.0.1:7777")
    assert not is_out_of_reach("ipc:///run/x", "ipc:///run/r,ipc:///run/q")
    assert facing("ipc:///run/r,tcp://127.0.0.1:7777") == "tcp://127.0.0.1:0"
    with pytest.raises(SettingsError, match="on the network"):
        facing("ipc:///run/r,tcp://0.0.0.0:7777")
