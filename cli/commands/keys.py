"""`rolloutbus keys`: make key pairs, show them, and choose which keys may connect."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from rolloutbus.bus.security.invites import KeyList, read_token, with_invite
from rolloutbus.bus.security.key_files import (
    edit_allow_list,
    edit_key_list,
    is_there,
    public_file,
    read_key_list,
    read_key_pair,
    remove_key_pair,
    write_key_pair,
)
from rolloutbus.bus.security.keys import KeyPair, check_public_key, is_public_key
from rolloutbus.bus.security.principals import Principal, Role
from rolloutbus.bus.security.zmq_curve import new_key_pair
from rolloutbus.bus.transport.endpoints import is_local_router
from rolloutbus.bus.wire.errors import PeerLost, SettingsError
from rolloutbus.bus.wire.validation import check_name
from rolloutbus.cli.options import AsJson, Deadline, example, not_empty
from rolloutbus.cli.terminal import ExitStatus, Unreachable, checked, fail, print_json, run
from rolloutbus.cli.verbs import Verbs
from rolloutbus.gateway.keys.http_keys import add_http_key
from rolloutbus.launcher.joining import Joined, new_invitation
from rolloutbus.launcher.joining import join as join_fleet

app = Verbs()
keys = Verbs(no_args_is_help=True, help="Make keys, and say who may connect.")
app.add_typer(keys, name="keys")

List = Annotated[
    Path, typer.Option("--allow-list", "-l", metavar="PATH", help="Who may connect; a JSON file.")
]
KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="A key file, `NAME.key`.")]
DEFAULT_LIST = Path("allow.json")
ROUTER_KEY = "router.key"
"""As `up --secure` names it, and those who look for router.pub expect."""
Actors = Annotated[
    list[str] | None,
    typer.Option(
        "--actor",
        metavar="PATTERN",
        help="A name it may take on the bus, `*` at the end for anything. "
        "Default: NAME and NAME-*.",
    ),
]
SessionNames = Annotated[
    list[str] | None,
    typer.Option("--session", metavar="PATTERN", help="A session it may use. Default: any"),
]
Priorities = Annotated[
    tuple[int, int],
    typer.Option(
        metavar="LOW HIGH",
        help="Priorities that its requests may have: those of a high one go before everybody "
        "else's.",
    ),
]


@keys.command(epilog=example("rolloutbus keys new trainer-a -o ~/keys"))
def new(
    name: Annotated[str, typer.Argument(help="Whose it will be.")],
    directory: Annotated[
        Path,
        typer.Option("--output", "-o", "--dir", metavar="PATH", help="Where the two files go."),
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Make a key pair: NAME.key, for its owner's eyes only, and NAME.pub. Prints the public key."""
    pair = new_key_pair(checked(lambda: _bus_name(name)))
    file = directory / f"{name}.key"
    checked(lambda: write_key_pair(file, pair))
    if as_json:
        print_json({"name": name, "key": pair.public, "file": str(file)})
    else:
        _say(pair.public)


def _bus_name(name: str) -> str:
    """The name; its key's actors are named after it, so SettingsError: none can be."""
    directory, slash, last = name.rpartition("/")
    if slash:
        raise SettingsError(f"{name!r} is a path, no name: say {last or 'NAME'} --dir {directory}/")
    problem = check_name(name)
    if problem is not None:
        raise SettingsError(problem.message)
    return name


@keys.command(epilog=example("rolloutbus keys show trainer-a.key"))
def show(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="A key file, or an allow-list. Default: that of --allow-list."
        ),
    ] = None,
    allow_list: List = DEFAULT_LIST,
    as_json: AsJson = False,
) -> None:
    """Print a key file's public key, or the allow-list. Never prints a secret."""
    if file is not None and not _is_list(file):
        pair = checked(lambda: read_key_pair(file))
        print_json({"name": pair.name, "key": pair.public})
        return
    listed = checked(lambda: read_key_list(file or allow_list))
    for each in listed.principals:
        if as_json:
            print_json(each)
        else:
            sessions = f", sessions {' '.join(each.sessions)}" if each.sessions else ""
            actors = " ".join(each.actor_patterns)
            low, high = each.priorities
            priorities = f", priorities {low} to {high}" if low or high else ""
            _say(f"{each.key} {each.role} {each.name}: may be {actors}{sessions}{priorities}")
    for each in listed.invites:
        if as_json:
            print_json(each)
        else:
            until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.expires_at))
            state = f"used by {each.used_by}" if each.used_by else f"good until {until}"
            _say(f"invitation {each.key} {each.role} {each.name}: {state}")


def _is_list(file: Path) -> bool:
    """Whether it is an allow-list, by its fields."""
    if not file.is_file():
        return False
    try:
        msgspec.json.decode(file.read_bytes(), type=KeyList)
    except (OSError, msgspec.DecodeError):
        return False
    return True


@keys.command(epilog=example("rolloutbus keys allow trainer-a.pub --name trainer-a --role trainer"))
def allow(
    key: Annotated[str, typer.Argument(help="A public key, or a file NAME.pub or NAME.key.")],
    role: Annotated[Role, typer.Option(help="What it may do.")],
    name: Annotated[str, typer.Option(help="Whose it is.")],
    allow_list: List = DEFAULT_LIST,
    actor: Actors = None,
    session: SessionNames = None,
    *,
    priorities: Priorities = (0, 0),
) -> None:
    """Let a key in. Running actors see it within a second."""

    def add(known: Sequence[Principal]) -> list[Principal]:
        key_ = _public(key)
        return [*known, Principal(key_, name, role, actor or [], session or [], priorities)]

    checked(lambda: edit_allow_list(allow_list, add))


@keys.command(epilog=example("rolloutbus keys invite host-b --role worker -l ./keys/allow.json"))
def invite(
    name: Annotated[str, typer.Argument(help="Whose the new key will be.")],
    role: Annotated[Role, typer.Option(help="What it may do.")],
    allow_list: List = DEFAULT_LIST,
    actor: Actors = None,
    session: SessionNames = None,
    *,
    priorities: Priorities = (0, 0),
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.01, max=7 * 24 * 60, help="How long it is good for.")
    ] = 60.0,
    router: Annotated[
        str,
        typer.Option(
            "--router",
            "-r",
            metavar="ENDPOINT",
            callback=not_empty,
            help="Where the new host reaches the router: its frontend, or for a worker or store "
            "its backend; tcp://HOST:PORT or tcp://HOST:PORT#KEY; with a standby both, separated "
            "by a comma. Default: what the router has left in router.json beside the allow-list.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Print a token that lets one new key in, once. `keys join TOKEN` uses it on the other host.

    Give it to that host alone: who reads it before it is used can take its place.
    """

    def made() -> str:
        token, invitation = new_invitation(
            allow_list,
            Principal("0" * 64, name, role, actor or [], session or [], priorities),
            int(time.time() + minutes * 60),
            router,
        )
        edit_key_list(allow_list, lambda listed: with_invite(listed, invitation))
        if is_local_router(read_token(token).address):
            sys.stderr.write(
                "warning: the router listens for this host only, so no other one can join; its "
                "--address, or --frontend and --backend, must name an address on the network\n"
            )
        return token

    token = checked(made)
    if as_json:
        print_json({"name": name, "role": role, "token": token})
    else:
        _say(token)


@keys.command(epilog=example("rolloutbus keys join TOKEN -o ~/keys"))
def join(
    token: Annotated[str, typer.Argument(help="What `keys invite` has printed; `-` reads stdin.")],
    directory: Annotated[
        Path,
        typer.Option(
            "--output", "-o", "--dir", metavar="PATH", help="Where the files go; made if missing."
        ),
    ] = Path(),
    deadline: Deadline = 15.0,
    as_json: AsJson = False,
) -> None:
    """Make a key pair on this host, and have the router of the token let it in.

    The directory gets NAME.key, NAME.pub, router.pub and router.json: with `--key NAME.key` the
    other commands know the router and its key. May be repeated if the router did not answer.
    """
    is_piped = token == "-"  # noqa: S105 - no token looks like that
    text = sys.stdin.readline() if is_piped else token
    joined = run(_joined(text, directory, deadline))
    if as_json:
        print_json({"name": joined.name, "role": joined.role, "key_file": str(joined.key_file)})
        return
    _say(f"{joined.name} is let in as a {joined.role}. Its key: {joined.key_file}")
    if joined.role == "worker":
        _say(f"Next: rolloutbus worker --name {joined.name} --key {joined.key_file} --model PATH")
    elif joined.role == "store":
        _say(f"Next: rolloutbus store --key {joined.key_file} --directory PATH")
    else:
        _say(f"Next: rolloutbus status --key {joined.key_file}")


@keys.command(epilog=example("rolloutbus keys revoke trainer-a"))
def revoke(
    who: Annotated[str, typer.Argument(metavar="NAME|KEY", help="A name, or one public key.")],
    allow_list: List = DEFAULT_LIST,
) -> None:
    """Let a key, or all keys of a name, in no more. Open connections end within a second.

    Invitations of that name are withdrawn.
    """

    def remove(listed: KeyList) -> KeyList:
        left = [each for each in listed.principals if who not in (each.key, each.name)]
        invites = [each for each in listed.invites if who not in (each.key, each.name)]
        if (len(left), len(invites)) == (len(listed.principals), len(listed.invites)):
            raise SettingsError(f"{allow_list}: nobody has the name or key {who[:64]!r}")
        return KeyList(left, invites)

    if not checked(lambda: is_there(allow_list)):
        fail(f"cannot read {allow_list}: there is no such file", ExitStatus.USAGE)
    checked(lambda: edit_key_list(allow_list, remove))


@keys.command(epilog=example("rolloutbus keys rotate trainer-a.key"))
def rotate(
    file: KeyFile,
    allow_list: Annotated[
        Path | None,
        typer.Option(
            "--allow-list",
            "-l",
            metavar="PATH",
            help="Who may connect. Default: allow.json beside FILE.",
        ),
    ] = None,
) -> None:
    """Put a fresh pair in a key file. Both keys are let in until the old one is revoked.

    The old pair is kept beside it as NAME.old.key. An actor uses the new one when it is started
    again. A router's own key stands in no allow-list: those who connect to it find it in the file
    router.pub, as in a fleet of `up --secure` and on hosts that have joined. Nobody brings them the
    new one: copy it to each such host, then start the router again.
    """
    old = checked(lambda: read_key_pair(file))
    fresh = new_key_pair(old.name)
    is_listed = checked(lambda: _rotate(file, old, fresh, allow_list))
    if file.name == ROUTER_KEY:
        sys.stderr.write(
            f"Next: copy {public_file(file)} to each other host that has a router.pub of this "
            "router, then start the router again\n"
        )
    elif not is_listed:
        sys.stderr.write(
            f"warning: the old key stands in no allow-list here. Unless it is a router's, let the "
            f"new one in on the router's host: rolloutbus keys allow {fresh.public} --name "
            f"{fresh.name} --role ROLE\n"
        )
    print_json({"old": old.public, "new": fresh.public})


def _rotate(file: Path, old: KeyPair, fresh: KeyPair, allow_list: Path | None) -> bool:
    """Put `fresh` in the place of `old`, or change nothing; whether a list lets in both."""
    kept = file.with_name(f"{file.name.removesuffix('.key')}.old.key")
    draft = file.with_name(f"{file.name}.new")
    listed = allow_list or file.with_name(DEFAULT_LIST.name)
    if allow_list is not None and not is_there(allow_list):
        raise SettingsError(f"cannot read {allow_list}: there is no such file")
    if kept.exists():
        raise SettingsError(
            f"{kept} exists: the last rotation is not over; "
            "remove it when nothing uses its key any more"
        )
    is_listed = False

    def add(known: Sequence[Principal]) -> list[Principal]:
        nonlocal is_listed
        mine = [each for each in known if each.key == old.public]
        is_listed = bool(mine)
        return [*known, *(msgspec.structs.replace(each, key=fresh.public) for each in mine)]

    write_key_pair(draft, fresh)
    try:
        kept.hardlink_to(file)
        if is_there(listed):
            edit_allow_list(listed, add)
    except (OSError, SettingsError) as error:
        kept.unlink(missing_ok=True)
        remove_key_pair(draft)
        if isinstance(error, OSError):
            raise SettingsError(f"cannot write {kept}: {error.strerror}") from error
        raise
    public_file(draft).replace(public_file(file))
    draft.replace(file)
    return is_listed


@keys.command(epilog=example("rolloutbus keys http alice --acts-as alice.key"))
def http(
    name: Annotated[str, typer.Argument(help="Whose it is; replaces that of the same name.")],
    acts_as: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Key file of the principal of the bus. Left out: the router asks for no key.",
        ),
    ] = None,
    file: Annotated[
        Path,
        typer.Option("--file", "-f", metavar="PATH", help="API keys of `gateway --http-keys`."),
    ] = Path("http-keys.json"),
    as_json: AsJson = False,
) -> None:
    """Make an API key for HTTP clients of a gateway. Prints it, once; only its hash is kept.

    A gateway reads the file when it starts. What the key may do is what its principal may: revoke
    that one to shut its API keys out at once.
    """
    if acts_as is not None:
        checked(lambda: read_key_pair(acts_as))
    api_key = checked(lambda: add_http_key(file, name, acts_as))
    if as_json:
        print_json({"name": name, "key": api_key, "file": str(file)})
    else:
        _say(api_key)


async def _joined(token: str, directory: Path, deadline_s: float) -> Joined:
    try:
        return await join_fleet(token, directory, deadline_s)
    except PeerLost as error:
        raise Unreachable(str(error)) from error


def _public(text: str) -> str:
    """The public key that an argument means."""
    if is_public_key(text):
        return text
    path = Path(text)
    if path.suffix == ".key":
        return read_key_pair(path).public
    try:
        content = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{text[:200]!r} is neither a public key nor a file of one") from error
    return check_public_key(content.strip())


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
