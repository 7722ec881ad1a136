"""Which tokens leave a scheduler when: whatever the batches, none is lost, late or told twice."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from rolloutbus.engine_worker.engines.sglang.inside.tap_columns import TapColumns
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import STREAMED, Rows

COARSE = 5


class Turn(NamedTuple):
    """Something that happens at a scheduler."""

    what: Literal["run", "join", "version"]
    n: int = 0
    """Steps to run, or tokens of who joins."""
    kind: str = ""
    n_prefills: int = 0
    """Steps before the first token."""


RUNS = st.builds(Turn, st.just("run"), st.integers(1, 12))
KINDS = st.sampled_from([STREAMED, "c"])
JOINS = st.builds(Turn, st.just("join"), st.integers(1, 14), KINDS, st.integers(0, 3))
TURNS = st.lists(st.one_of(RUNS, JOINS, st.just(Turn("version"))), min_size=1, max_size=25)


class Request:
    """As SGLang's scheduler has it; `told` holds what left of it."""

    def __init__(self, rid: str, n_tokens: int, n_prefills: int) -> None:
        self.rid = rid
        self.n_tokens = n_tokens
        self.n_prefills = n_prefills
        self.output_ids: list[int] = []
        self.finished_reason: Any = None
        self.finished_len: int | None = None
        self.finished_output: bool | None = None
        self.logprob = SimpleNamespace(output_token_logprobs_val=list[float]())
        self.sampling_params = SimpleNamespace(custom_params=None, top_k=1, top_p=1.0, min_p=0.0)

    def sample(self, token: int) -> None:
        self.output_ids.append(token)
        self.logprob.output_token_logprobs_val.append(-float(token))
        if len(self.output_ids) == self.n_tokens:
            self.finished_reason = SimpleNamespace(to_json=lambda: {"type": "length"})


class Listener:
    """Puts together what was told."""

    def __init__(self) -> None:
        self.tokens: defaultdict[str, list[tuple[int, int | None]]] = defaultdict(list)
        """rid -> (token, version) of each."""
        self.ended: list[str] = []

    def hear(self, rows: Rows | None) -> None:
        if rows is None:
            return
        told = memoryview(rows.tokens).cast("i").tolist()
        logprobs = memoryview(rows.logprobs).cast("f").tolist()
        assert logprobs == [-float(token) for token in told]
        at = 0
        for rid, n_new in zip(rows.rids, rows.counts, strict=True):
            self.tokens[rid] += [(token, rows.version) for token in told[at : at + n_new]]
            at += n_new
        self.ended += [rows.rids[finish.row] for finish in rows.finishes]


@given(TURNS)
def test_every_token_leaves_once_in_time_and_with_its_version(turns: list[Turn]) -> None:
    columns, listener = TapColumns(COARSE), Listener()
    columns.change_version(0, [])
    running: list[Any] = []  # of Request, as the columns know it
    expected: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    ended: list[str] = []
    version = n_sampled = n_joined = 0
    for what, n, kind, n_prefills in [*turns, Turn("run", 20)]:
        if what == "version":
            version += 1
            listener.hear(columns.change_version(version, running))
        elif what == "join":
            n_joined += 1
            running.append(Request(f"{kind}{n_joined}", n, n_prefills))
        for _ in range(n if what == "run" else 0):
            for request in running:
                if request.n_prefills:
                    request.n_prefills -= 1
                elif request.finished_reason is None:  # overlapped: it is shown once more
                    n_sampled += 1
                    request.sample(n_sampled)
                    expected[request.rid].append((n_sampled, version))
            listener.hear(columns.step(running))
            for request in running:
                n_untold = len(expected[request.rid]) - len(listener.tokens[request.rid])
                is_due = request.rid.startswith(STREAMED) or request.finished_reason is not None
                assert n_untold == 0 if is_due else n_untold < COARSE
            running = [each for each in running if not each.finished_output]
            for request in running:
                if request.finished_reason is not None:
                    request.finished_output = True
                    ended.append(request.rid)
    assert listener.tokens == expected
    assert sorted(listener.ended) == sorted(ended)
