"""Names of models: `NAME[@VERSION][:ADAPTER]` chooses policy, weight version and adapter."""

import re
from collections.abc import Collection

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.control import ServerFacts
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.near_names import nearest
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.trainer_adapter.client.client import RolloutClient

DEFAULT_POLICY = "default"
_FORM = re.compile(r"(?P<name>[^@:]*)(@(?P<version>[0-9]{1,19}))?(:(?P<adapter>.+))?")


class AdapterNames:
    """Adapters that were seen loaded; workers refuse a request for one that is gone."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._seen: set[str] = set()

    async def has(self, name: str) -> bool:
        """Whether some worker had it loaded, now or lately; asks the fleet if it was never seen."""
        if name not in self._seen:
            facts = await self._client.server_info(check=False)
            for each in facts.by_worker.values():
                if isinstance(each, ServerFacts):
                    self._seen |= each.adapters.keys()
        return name in self._seen


def options_of_model(
    model: str, served: Collection[str], policies: Collection[str]
) -> GenerateOptions:
    """What the name of a model asks for.

    Args:
        model: as the body has it; empty: the default policy.
        served: other names of the default policy.
        policies: that the fleet's workers have now.

    Raises:
        Refused: `bad_request` if it has another form; `unknown_model` if nobody has the policy.
    """
    if model in served:  # it may contain @ or : itself
        return {}
    form = _FORM.fullmatch(model)
    if form is None:
        message = f"{model[:64]!r} is not NAME, NAME@VERSION, NAME:ADAPTER or NAME@VERSION:ADAPTER"
        raise Refused(bad_request("model", message))
    options: GenerateOptions = {}
    name = form["name"]
    if name not in ("", DEFAULT_POLICY, *served):
        if name not in policies:
            raise Refused(_unknown(name, [*served, *policies]))
        options["policy"] = name
    if form["version"]:
        options["versions"] = f"exact:{int(form['version'])}"
    if form["adapter"]:
        options["lora"] = form["adapter"]
    return options


def _unknown(name: str, known: Collection[str]) -> Problem:
    near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else f"there are {', '.join(sorted(set(known)))}"
    message = f"no worker has a model {name[:64]!r}; {hint}"
    return Problem("unknown_model", message, "not_started", field="model")
