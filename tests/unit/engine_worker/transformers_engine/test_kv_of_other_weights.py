"""No request reads KV of weights that were replaced before it began, nor suffers from broken ones.

The model of these tests does what attention does with its KV and no more: what it writes is a stamp
of its weights, what it reads decides its next token, and what its mask hides counts zero times.
"""

# pyright: reportUnknownMemberType=false

import random
from collections import deque
from typing import Any, cast

import numpy as np
import pytest
import torch

from rolloutbus.bus.wire.messages.generation import SamplingParams, Want
from rolloutbus.engine_worker.engine import EngineFacts, Work
from rolloutbus.engine_worker.engines.shared.request import EngineRequest, open_request
from rolloutbus.engine_worker.engines.transformers.batch import Batch, BatchLimits
from rolloutbus.engine_worker.engines.transformers.causal_lm import CausalLm
from rolloutbus.engine_worker.engines.transformers.forward import Forward
from rolloutbus.engine_worker.engines.transformers.kv_blocks import KvBlocks
from rolloutbus.engine_worker.engines.transformers.sampler import Sampler
from tests.lora_adapters import random_lora
from tests.step_log import StepLog, key
from tests.tiny_models import Build, check_fresh, make_model, prompt, work

N_VERSIONS = 60
MAX_CONTEXT = 24
BLOCK = 4
N_BLOCKS = 14
SLOTS = 4
FACTS = EngineFacts("transformers", N_VERSIONS, MAX_CONTEXT, SLOTS, ())
BROKEN = [float("nan"), float("inf"), float("-inf")]


class Stamped(torch.nn.Module):
    """A model whose next token is the oldest version of weights whose KV it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.stamp = 0.0
        self.read: list[list[int]] = []
        """Tokens that the rows of the last passes saw."""

    def forward(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        past_key_values: Any,  # noqa: ANN401
        use_cache: bool,
        logits_to_keep: int,
    ) -> Any:  # noqa: ANN401
        del position_ids, use_cache, logits_to_keep
        written = input_ids[:, None, :, None].float()
        k, v = past_key_values.update(torch.full_like(written, self.stamp), written, 0)
        seen = attention_mask[:, 0, -1]
        self.read += [row[see].int().tolist() for row, see in zip(v[:, 0, :, 0], seen, strict=True)]
        hidden = ((k + v) * 0).sum((1, 2, 3))
        oldest = torch.where(seen, k[:, 0, :, 0], float("inf")).amin(-1) + hidden
        likely = -(torch.arange(N_VERSIONS) - oldest[:, None]).abs() * 100
        return type("Output", (), {"logits": likely[:, None]})


class Bench:
    """A batch over that model, and what each request may be told."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.model = Stamped()
        cpu = torch.device("cpu")
        lm = CausalLm(
            self.model,
            cpu,
            torch.float32,
            n_layers=1,
            vocab_size=N_VERSIONS,
            max_context=MAX_CONTEXT,
            eos_token_ids=(),
            windows={"all": None},
            is_mask_additive=False,
        )
        self.forward = Forward(lm, N_BLOCKS, BLOCK)
        self.blocks = KvBlocks(N_BLOCKS, is_sharing=True)
        limits = BatchLimits(SLOTS, BLOCK, MAX_CONTEXT // BLOCK, prefill_tokens=10)
        self.batch = Batch(self.forward, Sampler(SLOTS, N_VERSIONS, cpu), self.blocks, limits)
        self.waiting: deque[EngineRequest] = deque()
        self.running: dict[str, EngineRequest] = {}
        self.floor: dict[str, int] = {}
        """The version at which a request began."""
        self.hurt: set[str] = set()
        """Requests that ran while the weights were broken."""
        self.n_cached = self.n_failed = self.n_tokens = 0
        self.names = iter(range(1_000_000))

    @property
    def is_broken(self) -> bool:
        return not np.isfinite(self.model.stamp)

    def submit(self) -> None:
        tokens = self.rng.choices([2, 3], k=self.rng.randint(1, 16))
        n_new = self.rng.randint(1, MAX_CONTEXT - len(tokens))
        sampling = SamplingParams(n_new, temperature=0.0, ignore_eos=True)
        asked = Work(
            key(f"r{next(self.names)}"),
            np.array(tokens, np.int32),
            sampling,
            want=Want(cached_tokens=True),
        )
        self.waiting.append(open_request(asked, FACTS, 0))

    def update(self) -> None:
        match self.rng.choice(["keep", "retract", "abort", "alone"]):
            case "keep":
                self.put_back(self.batch.retract(without_tokens_only=True))
            case "retract":
                self.put_back(self.batch.retract())
            case "abort":
                self.end([request.key[0] for request in self.batch.retract()])
            case _:
                pass  # rows in the middle of their prompt stay, too
        version = self.batch.version + 1
        broken = self.rng.random() < 0.4
        self.model.stamp = self.rng.choice(BROKEN) if broken else float(version)
        self.batch.change_weights(version)

    def sleep(self) -> None:
        self.put_back(self.batch.retract())
        self.blocks.forget()
        self.forward.drop()
        self.forward.allocate()

    def put_back(self, requests: list[EngineRequest]) -> None:
        self.waiting.extendleft(reversed(requests))
        for request in requests:
            del self.running[request.key[0]]

    def end(self, names: list[str]) -> None:
        for name in names:
            del self.running[name]

    def step(self) -> None:
        queued = {request.key[0]: request for request in self.waiting}
        self.batch.admit(self.waiting)
        began = queued.keys() - {request.key[0] for request in self.waiting}
        for name in began:
            self.running[name] = queued[name]
            self.floor[name] = self.batch.version
            self.hurt.discard(name)
        if self.is_broken:
            self.hurt.update(self.running)
        self.model.read.clear()
        self.batch.compute()
        told = {tuple(request.all_tokens().tolist()) for request in self.running.values()}
        for read in self.model.read:
            assert any(each[: len(read)] == tuple(read) for each in told), "it read others' tokens"
        self.check(self.batch.accept(frozenset()))

    def check(self, step: Any) -> None:  # noqa: ANN401
        names = [each[0] for each in step.keys]
        for row, problem in step.problems:
            assert problem.code == "broken_weights"
            assert names[row] in self.hurt, f"{names[row]} failed for what others had"
            self.n_failed += 1
        rows = [name for name, n in zip(names, step.counts, strict=True) for _ in range(n)]
        for name, token in zip(rows, step.tokens.tolist(), strict=False):
            assert not self.is_broken
            assert token >= self.floor[name], f"{name} read KV of version {token}"
            self.n_tokens += 1
        ended = [names[row] for row, _ in (*step.finishes, *step.problems)]
        for name in ended:
            wanted = self.running[name].wanted
            self.n_cached += (wanted.n_cached or 0) if wanted is not None else 0
        self.end(ended)


def test_no_request_reads_a_block_of_weights_that_were_replaced_before_it_began(
    rng: random.Random,
) -> None:
    torch.set_num_threads(1)
    benches = [Bench(rng) for _ in range(2)]
    for bench in benches:
        while bench.batch.version < N_VERSIONS - 1:
            if len(bench.waiting) < 6:
                bench.submit()
            chance = rng.random()
            if chance < 0.12:
                bench.update()
            elif chance < 0.17 and bench.running:
                name = rng.choice(list(bench.running))
                bench.batch.release([key(name)])
                bench.end([name])
            elif chance < 0.19:
                bench.sleep()
            elif chance < 0.22:
                bench.blocks.evict_idle()
            bench.step()
            bench.blocks.check_invariants()
    assert all(bench.n_cached and bench.n_failed and bench.n_tokens for bench in benches)


@pytest.mark.parametrize("hurt", ["model.layers.0.input_layernorm.weight", "lm_head.weight"])
@pytest.mark.parametrize("name", ["llama", "sliding"])
def test_sound_weights_serve_from_the_blocks_of_broken_ones(
    build: Build, log: StepLog, name: str, hurt: str
) -> None:
    engine = build(name, block_size=16)
    model = make_model(name, 0)
    sound = {n: p.detach().numpy().reshape(-1).view(np.uint8) for n, p in model.named_parameters()}
    weight = cast("torch.Tensor", dict(model.named_parameters())[hurt])
    huge = torch.full_like(weight, 3e38).numpy().reshape(-1).view(np.uint8)
    engine.weights.install(1, {**sound, hurt: huge}, "keep")
    # Of all lengths: padding is written, too.
    failing = [work(f"broken{i}", 4, 3 + 4 * i) for i in range(8)]
    engine.generate(failing)
    log.wait_until(lambda: sum(len(step.problems) for step in log.steps) == len(failing))

    engine.weights.install(2, sound, "keep")
    jobs = [work(f"sound{i}", 4, 2 + 5 * i) for i in range(8)]
    engine.generate(jobs)
    log.wait_finished(*(job.key[0] for job in jobs))

    for job in jobs:
        check_fresh(log, job, model)


def test_an_adapter_that_overflows_leaves_nothing_in_blocks_that_others_get(
    build: Build, log: StepLog
) -> None:
    model = make_model("llama", 0)
    lora = random_lora(model, 1)
    engine = build(block_size=16)
    engine.lora.load(
        "a",
        1,
        type(lora)(
            lora.rank,
            lora.alpha,
            lora.targets,
            {name: each * 1e30 for name, each in lora.tensors.items()},
        ).in_memory(),
    )
    failing = [
        Work(
            key(f"a{i}"),
            prompt(3 + 5 * i, i),
            SamplingParams(4, sampling_seed=1, ignore_eos=True),
            lora="a",
        )
        for i in range(4)
    ]
    together = [work(f"beside{i}", 6, 4 + 3 * i) for i in range(4)]
    engine.generate([*failing, *together])
    log.wait_finished(*(each.key[0] for each in together))
    after = [work(f"after{i}", 4, 2 + 4 * i) for i in range(8)]
    engine.generate(after)
    log.wait_finished(*(each.key[0] for each in after))

    for each in (*together, *after):
        check_fresh(log, each, model)
