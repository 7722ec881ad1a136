"""Everything of SGLang's insides that is patched or read, and what each of it carries.

SGLang promises none of it, and its hook registry passes over a target that has moved. So a
scheduler process looks at this list before it builds anything, the host before it starts one, and
`rolloutbus doctor` whenever it is asked. What is required and not there ends the start; what is
optional takes the features that it carries out of the worker's capabilities.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

TESTED = ("0.5.17", "0.5.23")
"""Versions that all tests ran with. Another one gets a warning, and the same checks."""

Call = Callable[..., Any]
"""What a hook is given of the function that it wraps, to be called or not."""
Process = Literal["scheduler", "host"]
When = Literal["always", "prefixes", "stages", "rust tree", "grammars"]
"""`prefixes`: only if KV events are read; `stages`: in a pipeline (`pp_size`); `rust tree`: if that
is installed too; `grammars`: if xgrammar is installed."""


class Hook(NamedTuple):
    """A function of SGLang that each scheduler process wraps."""

    target: str
    """`module:Class.function` below `sglang.srt`."""
    takes: tuple[str, ...]
    """Its first parameters after `self`, by which the hook tells its arguments apart."""
    carries: str
    """What is wrong without it, or missing."""
    loses: tuple[str, ...] | None = None
    """Features that a worker has not without it; None: it is required."""
    when: When = "always"
    instead_of: str = ""
    """Target of another version: one of the two is enough."""

    @property
    def group(self) -> str:
        """What hooks have in common of which one is enough."""
        return self.instead_of or self.target


class Part(NamedTuple):
    """Attributes and functions of SGLang that are used as they are."""

    owner: str
    """`module:Class` or `module`, below `sglang.srt`."""
    listed: str
    """Words: `name`, or `name(first,second)` for a function that takes these parameters."""
    carries: str
    loses: tuple[str, ...] | None = None
    """As of `Hook`."""
    process: Process = "scheduler"
    when: When = "always"

    @property
    def names(self) -> list[str]:
        """What is listed: `name`, or `name(first, second)`."""
        return [each.replace(",", ", ") for each in self.listed.split()]


class Lack(msgspec.Struct, array_like=True, frozen=True):
    """Something of this list that the installed SGLang has not, or that was not patched."""

    what: Annotated[str, msgspec.Meta(max_length=1000)]
    """A dotted path, and what is wrong with it."""
    carries: str
    loses: list[str] | None
    """As of `Hook`."""

    @property
    def is_required(self) -> bool:
        """Whether an engine must not start without it."""
        return self.loses is None


SCHEDULER = "managers.scheduler:Scheduler"
REQUEST = "managers.schedule_batch:Req"
LOGPROBS = "managers.schedule_batch:ReqLogprob"
COMPONENTS = "managers.scheduler_components"
STRUCTS = "managers.io_struct"
MANAGER = "managers.tokenizer_manager:TokenizerManager"
GENERATE = f"{STRUCTS}:GenerateReqInput"
SAMPLING = "sampling.sampling_params:SamplingParams"
ENGINE = "entrypoints.engine:Engine"
EVENTS = "mem_cache.events"
GRAMMAR = "constrained.xgrammar_backend:XGrammarGrammar"

OF_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
OF_MEDIA = ("image", "video", "audio")
OF_STOP_TEXTS = ("stop", "stop_regex")
OF_STATES = ("hidden_states_last", "hidden_states_full")
VERSION_CHECK = "version_check"
"""Versions of a request's tokens are compared with SGLang's own account when it ends."""

RUN_EVENT_LOOP = Hook(
    f"{SCHEDULER}.run_event_loop", (), "which scheduler is hooked, and why it ended"
)
CONSTRUCT = Hook(f"{SCHEDULER}.__init__", (), "why a scheduler was not built", loses=())
RUN_BATCH = Hook(f"{SCHEDULER}.run_batch", ("batch",), "the weights that compute each step")
PROCESS_BATCH_RESULT = Hook(
    f"{SCHEDULER}.process_batch_result", ("batch", "result"), "the weight version of each token"
)
STREAM_OUTPUT = Hook(
    f"{COMPONENTS}.output_streamer:SchedulerOutputStreamer.stream_output",
    ("reqs", "return_logprob", "skip_req"),
    "tokens and ends of requests",
)
ADD_REQUEST = Hook(
    f"{SCHEDULER}._add_request_to_queue",
    ("req",),
    "prefixes of older weights are not used again; what a request brings of earlier attempts",
)
NEXT_BATCH = Hook(
    f"{SCHEDULER}.get_next_batch_to_run", ("running_batch",), "weights change between two steps"
)
PAUSE = Hook(f"{SCHEDULER}.pause_generation", ("recv_req",), "updates of a paused engine")
CONTINUE = Hook(f"{SCHEDULER}.continue_generation", ("recv_req",), "torn weights compute no steps")
WEIGHT_BY_NAME = Hook(
    f"{COMPONENTS}.weight_updater:SchedulerWeightUpdaterManager.get_weights_by_name",
    ("recv_req",),
    "orders to a scheduler: new weights, and what is active",
)
SAMPLE = Hook(
    "model_executor.model_runner:ModelRunner.sample",
    ("logits_output", "forward_batch"),
    "penalties, min_new_tokens, processors and what truncation left",
)
DRAW = Hook(
    "layers.sampler:Sampler._sample_from_probs",
    ("probs", "sampling_info", "positions", "simple_sampling_case"),
    "behaviour logprobs under top_k, top_p and min_p",
)
DRAW_ONE = Hook(
    "layers.sampler:sampling_from_probs_torch",
    ("probs", "sampling_seed", "positions"),
    "a row of broken weights ends its request, and not the engine",
)
COMPUTE_LOGPROBS = Hook(
    "layers.logprob_processor:OutputLogprobProcessor.compute_logprobs",
    (),
    "batches in which only some requests ask for logprobs of given ids",
    loses=("logprobs_of",),
)
FLUSH = Hook(f"{SCHEDULER}.flush_cache", (), "how many tokens a flush has freed", loses=())
TAKE_IN = Hook(
    f"{SCHEDULER}.process_input_requests",
    ("recv_reqs",),
    "a paused scheduler sleeps instead of spinning",
    loses=(),
)
ALLOCATE_MASK = Hook(
    f"{GRAMMAR}.allocate_vocab_mask",
    ("vocab_size", "batch_size", "device"),
    "grammars on a CPU",
    loses=OF_GRAMMARS,
    when="grammars",
)
APPLY_MASK = Hook(
    f"{GRAMMAR}.apply_vocab_mask",
    ("logits", "vocab_mask"),
    "grammars on a CPU",
    loses=OF_GRAMMARS,
    when="grammars",
)
_CACHED = "which prefixes are told as cached"
RECORD_STORE = Hook(
    f"{EVENTS}:KVCacheEventMixin._record_store_event", ("node",), _CACHED, when="prefixes"
)
RECORD_REMOVE = Hook(
    f"{EVENTS}:KVCacheEventMixin._record_remove_event", ("node",), _CACHED, when="prefixes"
)
RECORDER_STORE = Hook(
    f"{EVENTS}:KVCacheEventRecorder.record_store",
    ("node",),
    _CACHED,
    when="prefixes",
    instead_of=RECORD_STORE.target,
)
RECORDER_REMOVE = Hook(
    f"{EVENTS}:KVCacheEventRecorder.record_remove",
    ("node",),
    _CACHED,
    when="prefixes",
    instead_of=RECORD_REMOVE.target,
)
RUST_EVENT = Hook(
    "mem_cache.rust_tree_core.adapter:_kv_event_from_tagged", (), _CACHED, when="rust tree"
)

HOOKS: Sequence[Hook] = (
    *(RUN_EVENT_LOOP, CONSTRUCT, RUN_BATCH, PROCESS_BATCH_RESULT, STREAM_OUTPUT, ADD_REQUEST),
    *(NEXT_BATCH, PAUSE, CONTINUE, WEIGHT_BY_NAME, SAMPLE, DRAW, DRAW_ONE, COMPUTE_LOGPROBS),
    *(FLUSH, TAKE_IN, ALLOCATE_MASK, APPLY_MASK),
    *(RECORD_STORE, RECORD_REMOVE, RECORDER_STORE, RECORDER_REMOVE, RUST_EVENT),
)
"""All that is patched."""

_CHECKED = "versions of tokens are checked by SGLang's own account"
_SHAPED = "penalties, min_new_tokens, processors and what truncation left"
_PLACES = "media have their places"
_BROKEN = "a row of broken weights ends its request"

_IN_SCHEDULER: Sequence[Part] = (
    Part("plugins", "load_plugins", "hooks are applied"),
    Part("plugins.hook_registry:HookRegistry", "register(target,hook)", "hooks are applied"),
    Part("plugins.hook_registry:HookType", "AROUND", "hooks are applied"),
    Part(
        SCHEDULER,
        "running_batch last_batch waiting_queue chunked_req result_queue",
        "which requests a change of weights meets",
    ),
    Part(
        SCHEDULER,
        "_engine_paused pause_generation(recv_req) continue_generation(recv_req) "
        "abort_request(recv_req)",
        "weights change between two steps, and torn ones compute none",
    ),
    Part(
        SCHEDULER,
        "tp_worker tp_cpu_group weight_updater tree_cache",
        "weights",
    ),
    Part(SCHEDULER, "token_to_kv_pool_allocator max_total_num_tokens", "load"),
    Part(SCHEDULER, "max_req_input_len", "limits of requests"),
    Part(SCHEDULER, "server_args", "what an engine is started with"),
    Part(
        SCHEDULER,
        "record_weight_version_change(new_version)",
        _CHECKED,
        (VERSION_CHECK,),
    ),
    Part(REQUEST, "weight_version_events", _CHECKED, (VERSION_CHECK,)),
    Part(
        "utils.weight_versions:WeightVersionEvent",
        "old_version num_output_tokens",
        _CHECKED,
        (VERSION_CHECK,),
    ),
    Part("runtime_context", "get_serving", _CHECKED, (VERSION_CHECK,)),
    Part(SCHEDULER, "maybe_sleep_on_idle", "a paused scheduler sleeps", ()),
    Part("managers.tp_worker:TpModelWorker", "model_runner", "weights"),
    Part("model_executor.model_runner:ModelRunner", "model weight_updater", "weights are loaded"),
    Part(
        "model_executor.model_runner_components.weight_updater:WeightUpdater",
        "update_weights_from_tensor(named_tensors,load_format)",
        "weights are loaded",
    ),
    Part(
        f"{COMPONENTS}.weight_updater:SchedulerWeightUpdaterManager",
        "offload_tags",
        "weights that sleep are not overwritten",
    ),
    Part(
        f"{COMPONENTS}.output_streamer:SchedulerOutputStreamer",
        "is_generation",
        "tokens and ends of requests",
    ),
    Part("mem_cache.allocator.base:BaseTokenToKVPoolAllocator", "available_size", "load"),
    Part("mem_cache.base_prefix_cache:BasePrefixCache", "evictable_size", "load"),
    Part("managers.schedule_batch:ScheduleBatch", "reqs", "requests of a step"),
    Part(REQUEST, "rid output_ids logprob sampling_params", "tokens and their logprobs"),
    Part(
        REQUEST,
        "finished_reason finished_len finished_output finished to_finish",
        "ends of requests",
    ),
    Part(
        REQUEST,
        "extra_key origin_input_ids origin_input_ids_unpadded inflight_middle_chunks",
        "prompts, and that no prefix of older weights is used again",
    ),
    Part(REQUEST, "set_finish_with_abort(error_msg)", "a request that cannot run ends alone"),
    Part(
        REQUEST,
        "_check_token_based_finish(new_accepted_tokens)",
        "stop ids of requests that ignore the model's own",
    ),
    Part(REQUEST, "lora_id", "which adapter was broken", ("lora",)),
    Part(REQUEST, "grammar", "grammars of resumed requests", OF_GRAMMARS),
    Part(REQUEST, "_check_str_based_finish(new_accepted_len)", "stop texts", OF_STOP_TEXTS),
    Part(SCHEDULER, "tokenizer", "stop texts", OF_STOP_TEXTS),
    Part("server_args:ServerArgs", "tokenizer_path", "stop texts", OF_STOP_TEXTS),
    Part(REQUEST, "multimodal_inputs", _PLACES, OF_MEDIA),
    Part(REQUEST, "hidden_states", "hidden states", OF_STATES),
    Part(REQUEST, "routed_experts", "experts", ("routed_experts",)),
    Part(REQUEST, "cached_tokens", "tokens found in the cache", ("cached_tokens",)),
    Part(LOGPROBS, "output_token_logprobs_val output_token_logprobs_idx", "logprobs"),
    Part(
        LOGPROBS,
        "output_top_logprobs_val output_top_logprobs_idx",
        "likeliest tokens",
        ("top_logprobs",),
    ),
    Part(
        LOGPROBS,
        "output_token_ids_logprobs_val output_token_ids_logprobs_idx",
        "logprobs of given ids",
        ("logprobs_of",),
    ),
    Part(
        LOGPROBS,
        "input_token_logprobs_val input_token_logprobs_idx input_top_logprobs_val "
        "input_top_logprobs_idx input_token_ids_logprobs_val "
        "input_token_ids_logprobs_idx",
        "logprobs of prompts",
        ("prompt_logprobs",),
    ),
    Part("managers.schedule_batch:MultimodalInputs", "mm_items", _PLACES, OF_MEDIA),
    Part("managers.schedule_batch:MultimodalDataItem", "pad_value offsets", _PLACES, OF_MEDIA),
    Part(
        "managers.schedule_batch",
        "FINISH_ABORT(message,status_code) FINISH_MATCHED_TOKEN(matched)",
        "ends of requests",
    ),
    Part("managers.schedule_batch:BaseFinishReason", "to_json", "ends of requests"),
    Part(
        SAMPLING,
        "custom_params ignore_eos stop_token_ids max_new_tokens temperature top_k top_p min_p",
        "what requests ask for",
    ),
    Part(SAMPLING, "logit_bias", "biased logits", ("logit_bias",)),
    Part(SAMPLING, "sampling_seed", "seeds", ("seed",)),
    Part(SAMPLING, " ".join(OF_GRAMMARS), "grammars", OF_GRAMMARS),
    Part(
        "sampling.sampling_batch_info:SamplingBatchInfo",
        "custom_params has_custom_logit_processor need_top_p_sampling "
        "need_top_k_sampling need_min_p_sampling top_ks top_ps min_ps",
        _SHAPED,
    ),
    Part(
        "model_executor.forward_batch_info:ForwardBatch",
        "sampling_info input_ids seq_lens_cpu forward_mode extend_seq_lens_cpu",
        _SHAPED,
    ),
    Part("model_executor.forward_batch_info:ForwardMode", "is_decode", "penalties, processors"),
    Part("runtime_context", "get_exec", "how a step was truncated"),
    Part("managers.utils:GenerationBatchResult", "logits_output copy_done", _BROKEN),
    Part("layers.logits_processor:LogitsProcessorOutput", "next_token_logprobs", _BROKEN),
    Part(
        "layers.logprob_processor:LogprobResult",
        "token_ids_logprobs_val",
        "logprobs of given ids",
        ("logprobs_of",),
    ),
    Part(STRUCTS, "PauseGenerationReqInput(mode) AbortReq(rid)", "what a change of weights does"),
    Part(STRUCTS, "ContinueGenerationReqInput(torch_empty_cache)", "steps go on"),
    Part(
        STRUCTS,
        "GetWeightsByNameReqOutput(parameter) GetWeightsByNameReqInput(name)",
        "orders to a scheduler",
    ),
    Part(
        SCHEDULER,
        "running_mbs last_mbs mbs world_group",
        "stages of a pipeline change their weights before the same step",
        when="stages",
    ),
    Part(
        "managers.schedule_batch",
        "NextBatchPlan(batch_to_run,running_batch)",
        "stages of a pipeline stand still together",
        when="stages",
    ),
    Part("disaggregation.kv_events", "BlockRemoved(block_hashes)", _CACHED, when="prefixes"),
)
_IN_HOST: Sequence[Part] = (
    Part(GENERATE, "rid input_ids sampling_params return_logprob logprob_start_len", "requests"),
    Part(GENERATE, "custom_logit_processor", "penalties, min_new_tokens, processors"),
    Part(GENERATE, "top_logprobs_num", "likeliest tokens", ("top_logprobs",)),
    Part(GENERATE, "token_ids_logprob", "logprobs of given ids", ("logprobs_of",)),
    Part(GENERATE, "return_hidden_states", "hidden states", OF_STATES),
    Part(GENERATE, "return_routed_experts", "experts", ("routed_experts",)),
    Part(GENERATE, "lora_path", "adapters", ("lora",)),
    Part(GENERATE, "priority", "priorities", ("priority",)),
    Part(GENERATE, "image_data video_data audio_data", "media", OF_MEDIA),
    Part(
        MANAGER,
        "generate_request(obj,request) abort_request(rid) rid_to_state model_config server_args",
        "requests",
    ),
    Part(
        MANAGER,
        "pause_generation(obj) continue_generation(obj) get_weights_by_name(obj,request)",
        "pauses, and orders to a scheduler",
    ),
    Part(MANAGER, "flush_cache(timeout_s) get_loads get_internal_state", "operations"),
    Part(
        MANAGER,
        "load_lora_adapter(obj) lora_update_lock lora_registry lora_ref_cache",
        "adapters",
        ("lora",),
    ),
    Part(
        MANAGER,
        "close_session(obj,request) clear_hicache_storage start_profile stop_profile",
        "operations",
        (),
    ),
    Part(
        MANAGER,
        "release_memory_occupation(obj,request) resume_memory_occupation(obj,request)",
        "sleep and wake_up",
        (),
    ),
    Part(
        "managers.tokenizer_manager:ReqState",
        "dispatched",
        "a request that waits before a pause is not run in spite of its abort",
    ),
    Part(ENGINE, "shutdown", "ends"),
    Part(ENGINE, "run_scheduler_process_func", "hooks are applied"),
    Part(
        "managers.scheduler",
        "run_scheduler_process(server_args,port_args,tp_rank,pp_rank,dp_rank)",
        "which scheduler is which",
    ),
    Part(
        "configs.model_config:ModelConfig",
        "vocab_size context_len hf_eos_token_id is_generation hf_config",
        "limits of requests",
    ),
    Part(
        "server_args:ServerArgs",
        "model_path skip_tokenizer_init max_running_requests dtype device "
        "context_length enable_custom_logit_processor watchdog_timeout "
        "speculative_algorithm hicache_storage_backend page_size tp_size pp_size "
        "dp_size ep_size",
        "what an engine is started with",
    ),
)
PARTS: Sequence[Part] = (*_IN_SCHEDULER, *(each._replace(process="host") for each in _IN_HOST))
"""All that is read, called or made. What only an option of SGLang's brings, such as sleep or its
storage, is asked of its arguments when an engine starts."""


def refusal(version: str, lacks: Sequence[Lack]) -> str:
    """Why an engine must not be started with this version; empty: nothing required is missing."""
    required = [f"{each.what} (it carries: {each.carries})" for each in lacks if each.is_required]
    if not required:
        return ""
    more = f", and {len(required) - SHOWN} more" if len(required) > SHOWN else ""
    return (
        f"sglang {version} is not as this worker needs it: {'; '.join(required[:SHOWN])}{more}. "
        f"Install a tested version: {', '.join(TESTED)}"
    )


def untested(version: str) -> str:
    """A warning about a version that no test ran with; empty: it is a tested one."""
    if version in TESTED:
        return ""
    return (
        f"sglang {version} was not tested with this worker; tested are {', '.join(TESTED)}. What "
        "is patched and read is checked at the start, but not how it behaves"
    )


def remaining(features: AbstractSet[str], lacks: Sequence[Lack]) -> frozenset[str]:
    """What requests may still ask for."""
    return frozenset(features - {feature for each in lacks for feature in each.loses or ()})


def lost(version: str, lacks: Sequence[Lack]) -> dict[str, str]:
    """Features that this version cannot carry, and why."""
    found: dict[str, list[str]] = {}
    for lack in lacks:
        for feature in lack.loses or ():
            found.setdefault(feature, []).append(lack.what)
    tested = f"Tested versions are {', '.join(TESTED)}"
    return {
        feature: f"sglang {version} cannot carry it: {'; '.join(whats[:SHOWN])}. {tested}"
        for feature, whats in found.items()
    }


SHOWN = 3
"""Lacks in one message; the rest is counted."""
