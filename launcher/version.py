"""Which release this is."""

import importlib.metadata

DISTRIBUTION = "rolloutbus"


def installed_version() -> str:
    """Version of the distribution; `unknown` when the code runs without having been installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
