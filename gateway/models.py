"""Names of models: `NAME[@VERSION][:ADAPTER]` chooses policy, weight version and adapter."""

import re
from collections.abc import Collection

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.control import ServerFacts
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.near_names import nearest
from rolloutbus.bus.wire.validation import adapter_of
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.trainer_adapter.client.client import RolloutClient

DEFAULT_POLICY = "default"
_FORM = re.compile(r"(?P<name>[^@:]*)(@(?P<version>[0-9]{1,19}))?(:(?P<adapter>.+))?")


class ModelNames:
    """What requests may call a model here: the served names, policies, and loaded adapters."""

    def __init__(self, client: RolloutClient, served: Collection[str]) -> None:
        self._client = client
        self._served = served
        self._adapters: set[str] = set()
        """That were seen loaded; workers refuse a request for one that is gone."""

    async def options(self, model: str) -> GenerateOptions:
        """What the name of a model asks for.

        An adapter is found by `NAME` and `NAME@VERSION`, and by `NAME@N` if it is called `NAME-N`:
        trainers name one for each step so, and no adapter here has an @ in its name.

        Raises:
            Refused: as `options_of_model`.
        """
        policies = {each.policy for each in self._client.connection.members}
        try:
            return options_of_model(model, self._served, policies)
        except Refused as error:
            if error.code != "unknown_model":
                raise
            for lora in (model, model.replace("@", "-")):
                named = adapter_of(lora)
                if named is not None and await self._has(named[0]):
                    return {"lora": lora}
            raise

    async def _has(self, adapter: str) -> bool:
        """Whether some worker had it loaded, now or lately; asks the fleet if it was never seen."""
        if adapter not in self._adapters:
            facts = await self._client.server_info(check=False)
            for each in facts.by_worker.values():
                if isinstance(each, ServerFacts):
                    self._adapters |= each.adapters.keys()
        return adapter in self._adapters


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
