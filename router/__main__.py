"""`python -m rolloutbus.router --settings-json '{…}'`: one router process."""

import sys

from rolloutbus.bus.actor.process import run_actor
from rolloutbus.router.actor import serve
from rolloutbus.router.settings import RouterSettings

if __name__ == "__main__":
    sys.exit(run_actor("rolloutbus.router", RouterSettings, serve))
