"""The adapters that a worker's engine has, kept for the engine that follows it when it dies."""

from collections.abc import Collection

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.ids import NO_ATTEMPT, AttemptKey, RequestId
from rolloutbus.bus.wire.messages.engine import LoadLora


class ReloadList:
    """Of one worker."""

    def __init__(self) -> None:
        self._asked: dict[AttemptKey, LoadLora] = {}
        """Being loaded."""
        self._loaded: dict[str, LoadLora] = {}
        """By name: how each was had."""
        self._due: set[AttemptKey] = set()

    @property
    def is_reloading(self) -> bool:
        """Whether the engine does not have all yet that the one before it had."""
        return bool(self._due)

    def asked(self, key: AttemptKey, ask: LoadLora) -> None:
        """The engine was told to load one."""
        self._asked[key] = ask

    def ended(self, key: AttemptKey, adapters: Collection[str] | None) -> None:
        """The engine has loaded or unloaded one; what it has now, None: it has failed."""
        self._due.discard(key)
        ask = self._asked.pop(key, None)
        if adapters is None:
            return
        if ask is not None:
            self._loaded[ask.name] = ask
        self._loaded = {name: each for name, each in self._loaded.items() if name in adapters}

    def reload(self) -> list[Entry]:
        """What to tell an engine that has just begun; its endings concern nobody else."""
        entries = [
            Entry("load_lora", RequestId(f"again/{name}"), NO_ATTEMPT, body=pack(ask))
            for name, ask in self._loaded.items()
        ]
        for entry, ask in zip(entries, self._loaded.values(), strict=True):
            key = (RequestId(entry.rid), entry.attempt)
            self._due.add(key)
            self._asked[key] = ask
        return entries

    def host_lost(self) -> None:
        """The engine is gone; whatever the next one should have had, the one after it should."""
        for key in self._due:
            self._loaded[self._asked[key].name] = self._asked[key]
        self._asked.clear()
        self._due.clear()
