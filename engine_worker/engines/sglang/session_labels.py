"""Sessions whose prefixes SGLang's cache gives up last, and which of them it may forget.

SGLang keeps a session's mark until it is told that the session is over. Nobody tells a worker: a
session is of the router and its client. So the marks used least recently are taken back.
"""

from collections import OrderedDict

from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream

UNIFIED_TREE_VARIABLE = "SGLANG_ENABLE_UNIFIED_RADIX_TREE"
"""Of 0.5.17, where only that cache knows sessions; later it is the usual one."""
PER_SLOT = 4
"""Marked sessions for each request that runs side by side: twice what the router gives places to
by default."""


class SessionLabels:
    """At most `most` at a time."""

    def __init__(self, thread: EngineThread, most: int) -> None:
        self._thread = thread
        self._manager = thread.engine.tokenizer_manager
        self._most = most
        self._used: OrderedDict[str, None] = OrderedDict()
        """Least recently used first."""

    def use(self, session: str) -> None:
        """A request of this session is about to begin."""
        self._used[session] = None
        self._used.move_to_end(session)
        while len(self._used) > self._most:
            oldest, _ = self._used.popitem(last=False)
            self._thread.begin(lambda oldest=oldest: self._forget(oldest))

    async def _forget(self, session: str) -> None:
        asked = upstream.request("CloseSessionReqInput", session_id=session)
        await self._manager.close_session(asked, None)
