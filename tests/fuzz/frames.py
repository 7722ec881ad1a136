"""Mutated frames through every reader of peers' bytes: `python tests/fuzz/frames.py --n 1000000`.

Exits with 1 if a reader raised anything but a protocol error, or memory grew by 1 MiB or more.
"""

import argparse
import asyncio
import ctypes
import gc
import json
import random
import secrets
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec

from rolloutbus.bus.wire.codec import SIGNATURE
from tests.conformance.make_vectors import frame_of
from tests.conformance.representatives import NAMES
from tests.fuzz.mutations import changed_bytes, changed_map
from tests.fuzz.readers import Readers

MAX_GROWTH_KIB = 1024
WARM_UP = 50_000
PAGE_KIB = 4
FRAMES = [frame_of(entry) for entry in NAMES.values()]
ENTRIES = list(NAMES.values())


def feed_one(readers: Readers, rng: random.Random) -> bool:
    """One hostile message in one of the ways to make one; whether anything understood it."""
    match rng.randrange(10):
        case 0:
            return readers.frame(SIGNATURE + rng.randbytes(rng.randrange(40)))
        case 1:
            frame = changed_bytes(rng.choice(FRAMES), rng, spared=len(SIGNATURE))
            readers.host_frame(frame)
            return False
        case 2 | 3 | 4:
            return readers.frame(changed_bytes(rng.choice(FRAMES), rng, spared=len(SIGNATURE)))
        case 5:
            frame = rng.choice(FRAMES)
            return readers.frame(SIGNATURE + changed_map(frame[len(SIGNATURE) :], rng))
        case 6 | 7:
            entry = rng.choice(ENTRIES)
            body = changed_map(bytes(entry.body), rng)
        case _:  # as in a frame of its own: no one has looked at its MessagePack before
            entry = rng.choice(ENTRIES)
            body = changed_bytes(bytes(entry.body), rng)
    n_before = sum(readers.n_understood.values())
    readers.entry(msgspec.structs.replace(entry, body=msgspec.Raw(body)))
    return sum(readers.n_understood.values()) > n_before + 1


def rss_kib() -> int:
    """Resident memory of this process, without what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_KIB


async def fuzz(n: int, seed: int) -> dict[str, object]:
    """Feed `n` messages; what came of it."""
    rng = random.Random(seed)
    warm = Readers()
    for _ in range(min(n, WARM_UP)):
        feed_one(warm, rng)
    readers = Readers()
    before_kib, begun = rss_kib(), time.perf_counter()
    n_understood = sum(feed_one(readers, rng) for _ in range(n))
    seconds = time.perf_counter() - begun
    return {
        "n": n,
        "seed": seed,
        "understood": n_understood,
        "readings": readers.n_understood,
        "refusals": readers.n_refused,
        "crashes": len(readers.crashes) + len(warm.crashes),
        "first_crashes": (warm.crashes + readers.crashes)[:5],
        "rss_growth_kib": rss_kib() - before_kib,
        "seconds": round(seconds, 1),
    }


def main() -> int:
    """Read the command line, fuzz, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args()
    found = asyncio.run(fuzz(options.n, options.seed))
    if options.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{key}: {value}" for key, value in found.items()))
    is_good = not found["crashes"] and int(str(found["rss_growth_kib"])) < MAX_GROWTH_KIB
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
