"""`python -m router --settings-json '{…}'`: one router process."""

import sys

from bus.process import run_actor
from router.serving import serve
from router.settings import RouterSettings

if __name__ == "__main__":
    sys.exit(run_actor("router", RouterSettings, serve))
