"""Work of a process pool: each process has one client of its own, made from what it was told."""

import rolloutbus
from rolloutbus import Rollout, SamplingParams, SyncRolloutClient
from rolloutbus.trainer_adapter.client.client import ConnectOptions

clients: list[SyncRolloutClient] = []


def begin(options: ConnectOptions) -> None:
    """Connect, once per process."""
    clients.append(rolloutbus.connect_sync(**options).open())


def sample(prompt: list[int], deadline_s: float) -> Rollout:
    """One rollout of the tiny model."""
    sampling = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    return clients[0].generate(prompt, sampling, deadline_s=deadline_s)


def sample_wrongly(deadline_s: float) -> Rollout:
    """A request that is refused."""
    return clients[0].generate([1], SamplingParams(temperature=-1.0), deadline_s=deadline_s)
