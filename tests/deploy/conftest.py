"""Keys and manifests that tests of deploy/ share."""

from pathlib import Path
from typing import Any

import pytest

from rolloutbus.bus.security.principals import Role
from rolloutbus.gateway.keys.http_keys import add_http_key
from tests.deploy.deploy_files import rendered
from tests.integration.key_directory import KeyDirectory

ROLES: dict[str, Role] = {
    "store": "store",
    "worker": "worker",
    "trainer": "trainer",
    "probe": "subscriber",
    "operator": "admin",
}


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As make-keys.sh makes them, which takes seconds, and an API key."""
    directory = tmp_path_factory.mktemp("keys")
    held = KeyDirectory(directory)
    held.make_unlisted("router")
    for name, role in ROLES.items():
        held.add(name, role)
    add_http_key(directory / "http-keys.json", "alice", held.file("trainer"))
    return directory


@pytest.fixture(scope="session")
def manifests(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rendered(keys, tmp_path_factory.mktemp("rendered"))
