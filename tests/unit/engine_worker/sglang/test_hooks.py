"""What SGLang has moved is told before anything is built, and what it carried is not promised."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest

from rolloutbus.engine_worker.engines.sglang.inside.scheduler import SchedulerTap, run_scheduler
from rolloutbus.engine_worker.engines.sglang.schedulers.connection import TapListener
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import (
    COARSE_VARIABLE,
    PATH_VARIABLE,
    PREFIX_VARIABLE,
    LastWords,
    Looked,
    Message,
    SchedulerRank,
)
from rolloutbus.engine_worker.engines.sglang.upstream import hooks
from rolloutbus.engine_worker.engines.sglang.upstream.hooks import HOOKS, PARTS, TESTED, Hook, Lack
from rolloutbus.engine_worker.engines.sglang.upstream.presence import (
    dotted,
    found,
    is_wrapped,
    lacking,
    lacks_for,
)
from rolloutbus.engine_worker.engines.survey.sglang_probes import probes
from tests.unit.engine_worker.sglang.sglang_stand_in import (
    SglangStandIn,
    hook_targets,
    part_names,
)

WAIT_S = 240.0
STAGES = SimpleNamespace(pp_size=2)
PLACE = {"server_args": STAGES, "port_args": None, "tp_rank": 0, "pp_rank": 0, "dp_rank": None}
"""What SGLang calls the process function of a scheduler with."""
target_of = attrgetter("target")
FEATURES = frozenset(
    {
        *("logit_bias", "top_logprobs", "logprobs_of", "prompt_logprobs", "cached_tokens"),
        *("min_new_tokens", "sampling_mask", "stop", "stop_regex", "json_schema", "seed", "lora"),
        *("priority", "image", "hidden_states_last", "routed_experts", "processor:action_mask"),
    }
)


@dataclass
class Host:
    """The engine host's end of the tap."""

    messages: list[Message] = field(default_factory=list[Message])
    n_gone: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, message: Message, _: object) -> None:
        """Called by the listener's thread."""
        with self.changed:
            self.messages.append(message)
            self.changed.notify_all()

    def gone(self) -> None:
        self.n_gone += 1

    def heard(self, n_schedulers: int = 1) -> Message:
        """The only thing that a scheduler told."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.messages) >= n_schedulers, WAIT_S)
        assert len(self.messages) == n_schedulers
        return self.messages[-1]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    host = Host()
    listener = TapListener(host.take, host.gone)
    monkeypatch.setenv(PATH_VARIABLE, listener.path)
    monkeypatch.setenv(COARSE_VARIABLE, "4")
    monkeypatch.setenv(PREFIX_VARIABLE, "1")
    yield host
    listener.close()


MakeSglang = Callable[..., SglangStandIn]


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> MakeSglang:
    return partial(SglangStandIn, monkeypatch)


def lost_of(lacks: list[Lack]) -> frozenset[str]:
    return FEATURES - hooks.remaining(FEATURES, lacks)


def expected_of(loses: tuple[str, ...]) -> frozenset[str]:
    return FEATURES & {*loses}


def assert_refused(host: Host, what: str, carries: str) -> None:
    """A scheduler ends, and says what it lacks and which versions have it."""
    with pytest.raises(SystemExit) as ended:
        run_scheduler(**PLACE)
    last = host.heard()
    assert isinstance(last, LastWords)
    assert last.message == str(ended.value)
    for said in (what, carries, TESTED[-1], *TESTED):
        assert said in last.message


def test_a_scheduler_with_everything_is_patched_everywhere(sglang: MakeSglang, host: Host) -> None:
    package = sglang()
    originals = {hook: found(hook.target) for hook in HOOKS}
    run_scheduler(**PLACE)
    assert package.has_run
    assert host.heard() == Looked([])
    assert not lacks_for("host")
    for hook, original in originals.items():
        assert is_wrapped(hook.target, original), hook.target


def alternatives(hook: Hook) -> list[str]:
    """Targets of which one is enough."""
    return [each.target for each in HOOKS if each.group == hook.group]


@pytest.mark.parametrize("hook", HOOKS, ids=hook_targets())
@pytest.mark.parametrize("fault", ["gone", "other parameters", "not patched"])
def test_each_target_is_missed(hook: Hook, fault: str, sglang: MakeSglang, host: Host) -> None:
    if fault == "gone":
        if hook.target.endswith("__init__"):
            return  # every class has one
        package = sglang(without=alternatives(hook))
    elif fault == "other parameters":
        if not hook.takes:
            return
        package = sglang(renamed=hook.target)
    else:
        package = sglang(unpatched=dotted(hook.target))
    if hook.loses is None:
        assert_refused(host, dotted(hook.target), hook.carries)
        assert not package.has_run
        return
    run_scheduler(**PLACE)
    looked = host.heard()
    assert isinstance(looked, Looked)
    assert [dotted(hook.target) in each.what for each in looked.lacks] == [True]
    assert lost_of(looked.lacks) == expected_of(hook.loses)
    assert package.has_run


@pytest.mark.parametrize("hook", [h for h in HOOKS if len(alternatives(h)) > 1], ids=target_of)
def test_of_two_versions_one_is_enough(hook: Hook, sglang: MakeSglang, host: Host) -> None:
    sglang(without=[hook.target])
    run_scheduler(**PLACE)
    assert host.heard() == Looked([])


@pytest.mark.parametrize("hook", [h for h in HOOKS if h.when == "prefixes"], ids=target_of)
def test_what_only_prefixes_need_is_not_asked_for_without_them(
    hook: Hook, sglang: MakeSglang, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PREFIX_VARIABLE)
    sglang(without=alternatives(hook))
    run_scheduler(**PLACE)
    assert host.heard() == Looked([])


@pytest.mark.parametrize("name", [n for n in part_names() if not n.startswith("plugins")])
def test_each_attribute_is_missed(name: str, sglang: MakeSglang, host: Host) -> None:
    sglang(without=[name])
    declared = [part for part in PARTS if name in names_of(part)]
    hook = next((each for each in HOOKS if each.target == name), None)
    lacks = list(lacks_for("host"))
    is_required = any(each.loses is None for each in [*declared, *([hook] if hook else [])])
    if is_required and not any(part.process == "host" for part in declared):
        assert_refused(host, dotted(name), (hook or declared[0]).carries)
        return
    if not lacks:
        run_scheduler(**PLACE)
        looked = host.heard()
        assert isinstance(looked, Looked)
        lacks = looked.lacks
    assert any(dotted(name) in each.what for each in lacks)
    assert bool(hooks.refusal("1.2.3", lacks)) == is_required
    loses = tuple(feature for part in declared for feature in part.loses or ())
    assert lost_of(lacks) == expected_of(loses)


def names_of(part: hooks.Part) -> list[str]:
    joint = "." if ":" in part.owner else ":"
    return [f"{part.owner}{joint}{name.partition('(')[0]}" for name in part.names]


def test_a_refusal_names_three_and_counts_the_rest() -> None:
    lacks = [Lack(f"there is no x{n}", f"y{n}", None) for n in range(5)]
    told = hooks.refusal("9.9.9", lacks)
    for said in ("sglang 9.9.9", "x0", "y0", "x2", "and 2 more", *TESTED):
        assert said in told
    assert "x3" not in told


def test_what_is_lost_is_told_with_its_causes_and_the_tested_versions() -> None:
    lacks = [Lack(f"there is no x{n}", "y", ["seed", "lora"]) for n in range(5)]
    lost = hooks.lost("9.9.9", [*lacks, Lack("there is no z", "y", None)])
    assert set(lost) == {"seed", "lora"}
    for said in ("sglang 9.9.9", "there is no x0; there is no x1", *TESTED):
        assert said in lost["seed"]


def test_versions_that_no_test_ran_with_get_a_warning() -> None:
    assert [hooks.untested(version) for version in TESTED] == [""] * len(TESTED)
    assert "0.6.0" in hooks.untested("0.6.0")


def test_the_doctor_looks_at_exactly_this_list(sglang: MakeSglang) -> None:
    sglang()
    found = list(probes())
    assert {each.state for each in found} == {"ok"}
    shown = {each.name for each in found}
    assert {hook.target.rpartition(":")[2] for hook in HOOKS} <= shown


@pytest.mark.parametrize("hook", [h for h in HOOKS if h is not hooks.CONSTRUCT], ids=target_of)
def test_the_doctor_misses_each_target(hook: Hook, sglang: MakeSglang) -> None:
    sglang(without=alternatives(hook))
    failed = hook.loses is None and hook.when == "always"
    missed = [each for each in probes() if dotted(hook.target) in each.says]
    assert missed
    assert {each.state for each in missed} == {"failed" if failed else "note"}


@pytest.mark.parametrize("name", [n for n in part_names() if not n.startswith("plugins")])
def test_the_doctor_misses_each_attribute(name: str, sglang: MakeSglang) -> None:
    sglang(without=[name])
    missed = [each for each in probes() if dotted(name) in each.says]
    assert {each.state for each in missed} & {"failed", "note"}


def test_what_a_class_gives_its_objects_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sglang: MakeSglang
) -> None:
    sglang()
    source = "class A:\n    x: int\n    def start(self):\n        self.y, z = 1, 2\n"
    (tmp_path / "things.py").write_text(source + "class B(A):\n    pass\n")
    spec = spec_from_file_location("sglang.srt.things", tmp_path / "things.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sglang.srt.things", module)
    spec.loader.exec_module(module)
    assert lacking("things:B", ["x", "y", "start", "z"]) == ["sglang.srt.things.B.z"]
    assert lacking("nothings:B", ["x"]) == ["sglang.srt.nothings.B.x"]


def test_the_doctor_warns_of_a_version_that_was_not_tested(sglang: MakeSglang) -> None:
    sglang(version="0.6.0")
    (version,) = [each for each in probes() if each.name == "version"]
    assert version.state == "note"
    assert "0.6.0" in version.says


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.usefixtures("host")
def test_the_first_step_is_booked_with_and_without_overlapped_scheduling(
    sglang: MakeSglang, *, is_overlapped: bool
) -> None:
    sglang()
    batch = SimpleNamespace(reqs=[])
    scheduler = SimpleNamespace(
        running_batch=batch,
        last_batch=None,
        chunked_req=None,
        waiting_queue=[],
        max_total_num_tokens=100,
        max_req_input_len=90,
        server_args=SimpleNamespace(model_path="no such model", tp_size=1, pp_size=1),
    )
    if is_overlapped:
        scheduler.result_queue = [(batch, None)]
    booked: list[object] = []
    result = SimpleNamespace(rolloutbus_version=0)

    def book(*_: object) -> None:
        booked.append(result)

    with closing(SchedulerTap(os.environ[PATH_VARIABLE], 4, SchedulerRank(0, 0, 0), 1)) as tap:
        calls = dict(tap.calls())
        calls[hooks.RUN_EVENT_LOOP](book, scheduler)
        calls[hooks.PROCESS_BATCH_RESULT](book, scheduler, batch, result)
    assert booked == [result, result]
