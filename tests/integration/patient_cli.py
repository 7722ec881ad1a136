"""The command line, with leases that outlast a busy machine: none of its options is about them."""

import sys

from rolloutbus.bus import settings


class Patient(settings.LeaseSettings, frozen=True):
    """As `live_fleet.PATIENT`."""

    lease_s: float = 30.0
    holder_s: float = 24.0
    recovery_s: float = 31.0


if __name__ == "__main__":
    settings.LeaseSettings = Patient
    # Now, for actors' settings take the class as it is when they are imported.
    from rolloutbus.cli.main import main

    sys.exit(main())
