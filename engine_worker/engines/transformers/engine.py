"""The embedded engine: any Hugging Face causal language model, on a CPU or one GPU.

The model's own forward pass runs in continuous batches over a paged KV cache with prefix sharing.
Batching, cache and sampling are ours and not `transformers.generation.continuous_batching`,
which keeps its loop, its cancellations and its one sampler for all requests to itself. Here,
what an RL trainer relies on is exact: a seed, a penalty or an abort concerns one request, a
request's tokens do not depend on its neighbours, and weights and KV change between two steps in
a way that the token versions tell. On a CPU its attention, one mask over the KV of all requests,
also costs more than a small model's whole step.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, cast, get_args

import numpy as np
import torch
import transformers

from rolloutbus.bus.wire.entry import AttemptKey
from rolloutbus.bus.wire.messages.control import DEVICE, CacheTier, StartProfile
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.generation import Grammar, GrammarKind
from rolloutbus.bus.wire.validation import adapter_of
from rolloutbus.engine_worker.engine import (
    EngineBusy,
    EngineFacts,
    EngineStats,
    Float32s,
    Int32s,
    LoraTensors,
    MemoryFreed,
    PauseMode,
    ScoreRows,
    StepSink,
    Work,
    began_with,
)
from rolloutbus.engine_worker.engines.shared.cached_prefixes import CachedPrefixes
from rolloutbus.engine_worker.engines.shared.checkpoint_writer import CheckpointWriter
from rolloutbus.engine_worker.engines.shared.live_weights import LiveWeights
from rolloutbus.engine_worker.engines.shared.lora_adapter import read_adapter
from rolloutbus.engine_worker.engines.shared.processors import Processors
from rolloutbus.engine_worker.engines.shared.request import EngineRequest, open_request, refusal
from rolloutbus.engine_worker.engines.shared.step_loop import StepLoop
from rolloutbus.engine_worker.engines.shared.texts import (
    NO_TOKENIZER,
    Decode,
    StopTexts,
    decoder_of,
    tokenizer_of,
)
from rolloutbus.engine_worker.engines.transformers.batch import Batch, BatchLimits
from rolloutbus.engine_worker.engines.transformers.causal_lm import (
    ModelWeights,
    kv_tokens,
    load_causal_lm,
)
from rolloutbus.engine_worker.engines.transformers.forward import Forward
from rolloutbus.engine_worker.engines.transformers.grammars import (
    INSTALL,
    GrammarMatch,
    Grammars,
    installed_version,
)
from rolloutbus.engine_worker.engines.transformers.kv_blocks import KvBlocks
from rolloutbus.engine_worker.engines.transformers.lora_layers import LoadedAdapter, LoraLayers
from rolloutbus.engine_worker.engines.transformers.sampler import Sampler
from rolloutbus.engine_worker.engines.transformers.settings import TransformersSettings
from rolloutbus.engine_worker.features import unknown_adapter
from rolloutbus.engine_worker.weights.torch_tensors import DeviceCopies, gpus_of

TRACE = "trace.json"


class StepProfiler:
    """Implements `Profiler`: it records the steps and what is done between them."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._record: tuple[Any, Path] | None = None
        """The profiler that records, and where its record goes."""

    def start(self, folder: Path, ask: StartProfile) -> None:
        """See `Profiler`."""
        if self._record is not None:
            raise EngineBusy("a profile is being recorded; send stop_profile first")
        if ask.n_steps:
            raise ValueError("n_steps: this engine records until stop_profile")
        profiler = _profiler(ask)
        # It records the thread that starts it.
        self._loop.call(lambda: _or_busy(profiler.start))
        self._record = (profiler, folder)

    def stop(self) -> None:
        """See `Profiler`."""
        if self._record is None:
            raise EngineBusy("no profile is being recorded; send start_profile first")
        (profiler, folder), self._record = self._record, None
        self._loop.call(lambda: _or_busy(profiler.stop))
        profiler.export_chrome_trace(str(folder / TRACE))


class StepMeter:
    """Implements `LoadMeter`."""

    def __init__(self, loop: StepLoop, blocks: KvBlocks) -> None:
        self._loop = loop
        self._blocks = blocks

    def load(self) -> Mapping[str, float]:
        """See `LoadMeter`."""
        stats = self._loop.stats()
        return {
            "n_running": stats.n_running,
            "n_waiting": stats.n_waiting,
            "n_steps": stats.steps,
            "n_kv_blocks_used": self._blocks.n_used,
            "n_kv_blocks_idle": self._blocks.n_idle,
            "n_kv_blocks_free": self._blocks.n_free,
        }


def _or_busy(act: Callable[[], None]) -> None:
    """A profiler that fails must not end the engine."""
    try:
        act()
    except RuntimeError as error:
        raise EngineBusy(f"torch records nothing: {error}") from error


def _profiler(ask: StartProfile) -> Any:  # noqa: ANN401 - untyped
    kinds = cast("Any", torch.profiler.ProfilerActivity)
    known = {"CPU": kinds.CPU}
    if torch.cuda.is_available():
        known["GPU"] = kinds.CUDA
    activities = [known[name] for name in ask.activities if name in known]
    unknown = sorted(set(ask.activities) - {"CPU", "GPU"})
    if unknown or not activities:
        raise ValueError(
            f"activities: {unknown or ask.activities}: this engine has {sorted(known)}"
        )
    return torch.profiler.profile(
        activities=activities, with_stack=ask.with_stack, record_shapes=ask.record_shapes
    )


WEIGHTS = "weights"
KV_CACHE = "kv_cache"
CUDA_GRAPH = "cuda_graph"
"""This engine captures no graphs: there is nothing to give up, and nothing wrong with asking."""
ROOT_BYTES = 8


class DeviceMemory:
    """Implements `MemoryTiers`. Steps stop until all is awake; requests that run are retracted."""

    def __init__(
        self,
        loop: StepLoop,
        forward: Forward,
        blocks: KvBlocks,
        weights: ModelWeights,
        device: torch.device,
    ) -> None:
        self._loop = loop
        self._forward = forward
        self._blocks = blocks
        self._weights = weights
        self._device = device

    def sleep(self, tags: Sequence[str]) -> MemoryFreed:
        """See `MemoryTiers`."""
        known = _known(tags)
        return self._loop.call(lambda: self._sleep(known))

    def wake_up(self, tags: Sequence[str]) -> MemoryFreed:
        """See `MemoryTiers`."""
        known = _known(tags)
        return self._loop.call(lambda: self._wake_up(known))

    def _sleep(self, tags: frozenset[str]) -> MemoryFreed:
        freed: dict[str, int] = {}
        self._loop.retract()
        for tag in sorted(tags):
            self._loop.halt(tag)
        if KV_CACHE in tags:
            self._blocks.forget()
            freed[KV_CACHE] = self._forward.drop()
        if WEIGHTS in tags:
            freed[WEIGHTS] = self._weights.put_aside()
        if CUDA_GRAPH in tags:
            freed[CUDA_GRAPH] = 0
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return MemoryFreed(freed)

    def _wake_up(self, tags: frozenset[str]) -> MemoryFreed:
        taken: dict[str, int] = {}
        if WEIGHTS in tags:
            taken[WEIGHTS] = self._weights.bring_back(self._device)
        if KV_CACHE in tags:
            # Its tensors come back with the first forward pass, which needs the weights.
            taken[KV_CACHE] = 0 if self._weights.are_aside else self._forward.allocate()
        if CUDA_GRAPH in tags:
            taken[CUDA_GRAPH] = 0
        for tag in sorted(tags):
            self._loop.lift(tag)
        return MemoryFreed(taken)


class BlockCache:
    """Implements `PrefixCache`."""

    tiers: Sequence[CacheTier] = (DEVICE,)

    def __init__(self, loop: StepLoop, blocks: KvBlocks, block_size: int) -> None:
        self._loop = loop
        self._blocks = blocks
        self._block_size = block_size

    def flush(self, tiers: Sequence[CacheTier]) -> int:  # noqa: ARG002 - there is one
        """See `PrefixCache`."""
        return self._loop.call(self._blocks.evict_idle) * self._block_size


class LabelScorer:
    """Implements `Scorer`. A text is one pass; steps of the batch come between them."""

    def __init__(self, forward: Forward, loop: StepLoop, weights: LiveWeights) -> None:
        self._forward = forward
        self._loop = loop
        self._weights = weights

    def score(
        self,
        query: Int32s,
        items: Sequence[Int32s],
        label_token_ids: Sequence[int],
        *,
        apply_softmax: bool,
        item_first: bool,
    ) -> ScoreRows:
        """See `Scorer`. EngineBusy: the weights are asleep, or torn."""
        if not label_token_ids:
            raise ValueError("label_token_ids: a model that generates needs at least one")
        texts = [np.concatenate([item, query] if item_first else [query, item]) for item in items]
        rows = [
            self._loop.call(lambda text=text: self._scored(text, label_token_ids)) for text in texts
        ]
        scores = np.array(rows, np.float32).reshape(len(items), len(label_token_ids))
        if apply_softmax:
            scores = np.exp(scores - np.logaddexp.reduce(scores, axis=1, keepdims=True))
        return ScoreRows(scores, sum(map(len, texts)))

    def _scored(self, text: Int32s, labels: Sequence[int]) -> Float32s:
        """float32 [labels]: logprobs over the whole vocabulary."""
        self._weights.require_usable()
        logits = self._forward.score(text[None].astype(np.int64))[0].float()
        with torch.inference_mode():
            return torch.log_softmax(logits, -1)[list(labels)].cpu().numpy()


class AdapterSet:
    """Implements `LoraHost`.

    Requests keep the adapter that they began with: one that is replaced or forgotten is gone once
    the last of its requests has ended.
    """

    def __init__(self, layers: LoraLayers, loop: StepLoop) -> None:
        self._layers = layers
        self._loop = loop
        self._loading = Lock()
        self._adapters: dict[str, LoadedAdapter] = {}
        self._roots = count(1)

    def versions(self) -> Mapping[str, int]:
        """See `LoraHost`."""
        return {name: each.version for name, each in self._adapters.copy().items()}

    def load(self, name: str, version: int, source: Path | LoraTensors) -> None:
        """See `LoraHost`."""
        with self._loading:
            if self.versions().get(name) == version:
                return
            adapter = read_adapter(source, self._layers.shapes)
            root = next(self._roots).to_bytes(ROOT_BYTES, "little")
            self._adapters[name] = self._loop.call(
                lambda: self._layers.place(name, version, root, adapter)
            )

    def unload(self, name: str) -> None:
        """See `LoraHost`."""
        with self._loading:
            if self._adapters.pop(name, None) is None:
                raise ValueError(f"{name} is not loaded")

    def named(self, lora: str) -> LoadedAdapter | Problem | None:
        """The adapter that a request asks for; None: it asks for none."""
        named = adapter_of(lora) if lora else None
        if named is None:
            return None
        loaded = self._adapters.copy()
        versions = {name: each.version for name, each in loaded.items()}
        return unknown_adapter(lora, versions) or loaded[named[0]]


class TransformersEngine:
    """Implements `Engine`; any call raises EngineDied once the engine's thread has ended."""

    shared = embedder = reranker = None

    def __init__(self, settings: TransformersSettings, sink: StepSink) -> None:
        """Load the model and start the thread; ValueError names a setting that cannot be used."""
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self._processors = Processors(settings.processors)
        tokenizer = tokenizer_of(Path(settings.model))
        self._decode = None if tokenizer is None else decoder_of(tokenizer)
        lm = load_causal_lm(settings)
        xgrammar = installed_version() if tokenizer is not None else ""
        self._grammars: Grammars | None = None
        if tokenizer is not None and xgrammar:
            self._grammars = Grammars(tokenizer, lm.vocab_size, lm.eos_token_ids)
        size = settings.block_size
        limits = BatchLimits(
            slots=settings.slots,
            block_size=size,
            max_blocks_per_request=-(-lm.max_context // size),
            prefill_tokens=settings.prefill_tokens,
        )
        n_blocks = -(-kv_tokens(settings, lm.max_context) // size)
        self.facts = EngineFacts(
            kind="transformers",
            vocab_size=lm.vocab_size,
            max_context=lm.max_context,
            slots=settings.slots,
            eos_token_ids=lm.eos_token_ids,
            gpus=gpus_of([lm.device]),
            features=_features(self._processors, self._decode, has_grammars=bool(xgrammar)),
            software={
                "torch": str(torch.__version__),
                "transformers": transformers.__version__,
                **({"xgrammar": xgrammar} if xgrammar else {}),
            },
            lost=_lost(has_text=tokenizer is not None, has_grammars=bool(xgrammar)),
            is_made_up=settings.load_format == "dummy",
        )
        self._chance = random.Random(settings.random_seed)  # noqa: S311 - sampling, not secrets
        self._sink = sink
        tensors = ModelWeights(lm.model)
        forward = Forward(lm, n_blocks, size)
        self.prefixes = CachedPrefixes() if settings.report_prefixes else None
        blocks = KvBlocks(n_blocks, is_sharing=settings.prefix_cache, news=self.prefixes)
        batch = Batch(forward, Sampler(settings.slots, lm.vocab_size, lm.device), blocks, limits)
        self._loop = loop = StepLoop(batch, sink, "transformers-engine")
        self.weights = LiveWeights(tensors, batch, loop, DeviceCopies(lm.device))
        self.overwriter = self.weights
        self.memory = DeviceMemory(loop, forward, blocks, tensors, lm.device)
        self.cache = BlockCache(loop, blocks, size)
        self.lora = AdapterSet(forward.lora, loop)
        self.scorer = LabelScorer(forward, loop, self.weights)
        self.checkpointer = CheckpointWriter(self.weights, Path(settings.model))
        self.profiler = StepProfiler(loop)
        self.meter = StepMeter(loop, blocks)

    def generate(self, work: Sequence[Work]) -> None:
        """See `Engine`. ValueError: a request does not fit or its key is in use; none is queued.

        One whose adapter is not loaded, whose processors' parameters do not fit, or whose grammar
        or pattern is none, ends with a problem. A request whose prefix is already complete ends
        with an empty row.
        """
        requests: list[EngineRequest] = []
        grammars: list[tuple[EngineRequest, Grammar]] = []
        for each in work:
            request = open_request(each, self.facts, self._chance.getrandbits(64))
            problem = self._resolve(request, each)
            if problem is None:
                requests.append(request)
                if each.grammar is not None:
                    grammars.append((request, each.grammar))
                if request.adapter is not None:
                    self._sink(began_with(each.key, request.adapter.full_name))
            else:
                self._sink(refusal(each.key, problem))
        self._loop.submit(requests, held=[request.key for request, _ in grammars])
        for request, grammar in grammars:
            assert self._grammars is not None, "a feature that is not there"
            self._grammars.begin(grammar, request.tokens, partial(self._let_go, request))

    def abort(self, keys: Sequence[AttemptKey]) -> int:
        """See `Engine`."""
        return self._loop.abort(keys)

    def pause(self, mode: PauseMode) -> None:
        """See `Engine`."""
        self._loop.pause(mode)

    def resume(self) -> None:
        """See `Engine`."""
        self._loop.resume()

    def stats(self) -> EngineStats:
        """See `Engine`."""
        return self._loop.stats()

    def close(self) -> None:
        """See `Engine`."""
        if self._grammars is not None:
            self._grammars.close()
        self._loop.close()

    def _let_go(self, request: EngineRequest, found: GrammarMatch | Problem) -> None:
        """Run a request with the match of its grammar, or end it; called from a thread."""
        if isinstance(found, Problem):
            self._loop.let_go(request.key, found)
        else:
            request.grammar = found
            self._loop.let_go(request.key, None)

    def _resolve(self, request: EngineRequest, work: Work) -> Problem | None:
        """Give a request what its work names; returns why that cannot be had, None if it can."""
        texts, patterns = work.sampling.stop, work.sampling.stop_regex
        if texts or patterns:
            assert self._decode is not None, "a feature that is not there"
            try:
                least = work.sampling.min_new_tokens
                request.ends_text = StopTexts(self._decode, texts, patterns, min_new_tokens=least)
            except ValueError as error:
                return bad_request("sampling.stop_regex", str(error))
        try:
            request.processors = self._processors.build(work.processors, self.facts.vocab_size)
        except ValueError as error:
            return bad_request("processors", str(error))
        adapter = self.lora.named(work.lora)
        if isinstance(adapter, Problem):
            return adapter
        request.adapter = adapter
        return None


OF_TEXT = frozenset({"stop", "stop_regex"})
OF_GRAMMARS = frozenset(get_args(GrammarKind))


def _features(
    processors: Processors, decode: Decode | None, *, has_grammars: bool
) -> frozenset[str]:
    features = {"min_new_tokens", "seed", "logit_bias", "lora"}
    features |= {"top_logprobs", "logprobs_of", "sampling_mask", "cached_tokens"}
    features |= {f"processor:{name}" for name in processors.names}
    features |= OF_TEXT if decode is not None else frozenset()
    return frozenset(features | OF_GRAMMARS if has_grammars else features)


def _lost(*, has_text: bool, has_grammars: bool) -> Mapping[str, str]:
    """Features that are not there, and what would bring them."""
    if not has_text:
        return dict.fromkeys(OF_TEXT | OF_GRAMMARS, NO_TOKENIZER)
    return {} if has_grammars else dict.fromkeys(OF_GRAMMARS, INSTALL)


def _known(tags: Sequence[str]) -> frozenset[str]:
    if unknown := set(tags) - {WEIGHTS, KV_CACHE, CUDA_GRAPH}:
        known = f"{WEIGHTS}, {KV_CACHE} and {CUDA_GRAPH}"
        raise ValueError(f"tags: {sorted(unknown)} is none of {known}")
    return frozenset(tags)
