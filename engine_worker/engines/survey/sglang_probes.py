"""Whether the installed SGLang is as the worker needs it: the list that an engine checks, too."""

from collections.abc import Iterator

from rolloutbus.engine_worker.engines.sglang.upstream import hooks, presence
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.hooks import Lack, When
from rolloutbus.engine_worker.engines.survey.machine import Finding

SECTION = "sglang"


def probes() -> Iterator[Finding]:
    """SGLang itself, each function that is patched, and what is lacking of all that is read."""
    try:
        version = upstream.version()
        presence.found("managers.scheduler:Scheduler")
    except ImportError as error:
        is_absent = error.name == "sglang"
        says = "not installed: pip install rolloutbus[sglang]" if is_absent else str(error)
        yield Finding(SECTION, "import", "missing" if is_absent else "failed", says)
        return
    yield Finding(SECTION, "import", "ok", version)
    warning = hooks.untested(version)
    says = warning or f"tested are {', '.join(hooks.TESTED)}"
    yield Finding(SECTION, "version", "note" if warning else "ok", says)
    yield from _of_hooks()
    yield from _of_parts()


def _of_hooks() -> Iterator[Finding]:
    conditions = _conditions()
    unfit = {hook: presence.why_unfit(hook) for hook in hooks.HOOKS if hook.when in conditions}
    lacks = {each.what: each for each in presence.lacks_among(unfit)}
    for hook, why in unfit.items():
        if not why:
            yield Finding(SECTION, _short(hook.target), "ok", f"can be patched: {hook.carries}")
        elif why in lacks:
            yield _finding(_short(hook.target), lacks[why], hook.when)


def _of_parts() -> Iterator[Finding]:
    n_lacking = 0
    for part in hooks.PARTS:
        for name in presence.lacking(part.owner, part.names):
            n_lacking += 1
            lack = presence.lack_of(part, f"there is no {name}")
            yield _finding(".".join(name.split(".")[-2:]), lack, part.when)
    n_names = sum(len(part.names) for part in hooks.PARTS)
    n_there = f"{n_names - n_lacking} of" if n_lacking else "all"
    yield Finding(SECTION, "attributes", "ok", f"{n_there} {n_names} that are read are there")


def _finding(name: str, lack: Lack, when: When) -> Finding:
    says = f"{lack.what}, which carries: {lack.carries}"
    if lack.loses is None and when == "always":
        return Finding(SECTION, name, "failed", f"{says}; no engine starts without it")
    if lack.loses is None:
        return Finding(SECTION, name, "note", f"{says}; report_prefixes needs it")
    lost = ", ".join(lack.loses)
    return Finding(SECTION, name, "note", f"{says}; lost: {lost}" if lost else says)


def _conditions() -> set[When]:
    found: set[When] = {"always", "prefixes"}
    if upstream.has_rust_tree():
        found.add("rust tree")
    if upstream.has_xgrammar():
        found.add("grammars")
    return found


def _short(target: str) -> str:
    return target.rpartition(":")[2]
