"""Patches SGLang in this process, and looks whether it is patched: SGLang itself does not."""

from collections.abc import Callable, Iterable
from typing import Any

from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream import presence
from rolloutbus.engine_worker.engines.sglang.upstream.hooks import Hook, Lack

Call = Callable[..., Any]


def patch(wanted: Iterable[tuple[Hook, Call]]) -> list[Lack]:
    """Wrap these functions of SGLang; returns what is not wrapped afterwards.

    Args:
        wanted: a target, and what is called in its place with the original and its arguments.
    """
    calls = dict(wanted)
    unfit = {hook: presence.why_unfit(hook) for hook in calls}
    originals = {hook: presence.found(hook.target) for hook, why in unfit.items() if not why}
    for hook in originals:
        upstream.hook_around(presence.dotted(hook.target), calls[hook])
    upstream.apply_hooks()
    for hook, original in originals.items():
        if not presence.is_wrapped(hook.target, original):
            unfit[hook] = f"{presence.dotted(hook.target)} was not patched"
    return presence.lacks_among(unfit)
