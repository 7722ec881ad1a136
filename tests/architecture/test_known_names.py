"""docs/engine_surface.toml names what users of other engines know; what it says is here is here."""

import ast
import inspect
import re
from types import ModuleType
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import pytest

import rolloutbus
from docs.list_surface import surface
from rolloutbus.trainer_adapter.client import logit_processors

CODE = re.compile(r"`([^`]+)`")
CALLED = re.compile(r"[A-Za-z_][\w.]*\(.*\)")
FIELD = re.compile(r"[A-Z]\w*\.[A-Za-z_]+")
KNOWN = [
    "generate",
    "generate_stream",
    "generate_with_session",
    "supports_streaming",
    "group_outputs_by_prompt",
    "InferenceEngineInput",
    "InferenceEngineOutput",
    "StreamingChunk",
    "session_ids",
    "return_hidden_states",
    "image_data",
    "video_data",
    "audio_data",
    "responses",
    "response_ids",
    "stop_reasons",
    "response_logprobs",
    "weight_version",
    "n_per_prompt",
    "request_ids",
    "hidden_states",
    "chat_completion",
    "completion",
    "load_lora_adapter",
    "unload_lora_adapter",
    "pinned",
    "max_lora_rank",
    "max_loras_per_batch",
    "lora_backend",
    "sleep",
    "wake_up",
    "sleep_weights_only",
    "wake_up_weights_only",
    "sleep_all",
    "wake_up_all",
    "pause_generation",
    "continue_generation",
    "resume_generation",
    "abort_generation",
    "abort_first",
    "drain_timeout",
    "MemoryTag",
    "reset_prefix_cache",
    "clear_hicache_storage",
    "open_session",
    "close_session",
    "supports_sessions",
    "init_weight_update_communicator",
    "update_named_weights",
    "get_weight_version",
    "update_weight_version",
    "check_weight_sync_integrity",
    "start_weight_transfer",
    "WeightTransferHandle",
    "get_remote_weight_version",
    "get_weights_by_name",
    "validate_weights",
    "encode",
    "encode_single",
    "compute_similarity",
    "supports_embeddings",
    "dimensions",
    "score",
    "load_weights_from_disk",
    "save_sharded_model",
    "save_remote_model",
    "decode",
    "start_profile",
    "stop_profile",
    "teardown",
    "tp_size",
    "pp_size",
    "dp_size",
    "ep_size",
    "RLActionMaskProcessor",
    "DisallowedTokensProcessor",
    "TemperatureScaleProcessor",
    "create_rl_logit_processor",
    "parse_rl_logit_processor",
    "gpu_memory_utilization",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_generate_length",
    "max_tokens",
    "max_completion_tokens",
    "num_inference_engines",
    "inference_engine_tensor_parallel_size",
    "inference_engine_pipeline_parallel_size",
    "inference_engine_data_parallel_size",
    "inference_engine_expert_parallel_size",
    "weight_sync_backend",
    "enable_http_endpoint",
    "http_endpoint_host",
    "http_endpoint_port",
    "moe_a2a_backend",
    "moe_runner_backend",
    "enable_eplb",
    "inference_device",
    "training_devices",
    "mem_fraction_static",
    "disable_radix_cache",
    "context_length",
    "weight_sync_method",
    "flush_cache_on_sync",
    "server_timeout",
    "tensor_parallel_size",
]
"""What complete engines of other projects call their operations, fields and settings."""


CALLS = [item.call for item in surface().items.values()]


def spans(pattern: re.Pattern[str]) -> list[str]:
    """Code in what is said to be here that is wholly such."""
    found = {span for call in CALLS for span in CODE.findall(call)}
    return sorted(span for span in found if pattern.fullmatch(span))


def ours(path: str) -> Any:  # noqa: ANN401 - a method, a class, a function
    """What a name in there stands for."""
    first, *rest = path.split(".")
    places: dict[str, ModuleType] = {"rolloutbus": rolloutbus, "logit_processors": logit_processors}
    if not rest and not first[0].isupper():
        return getattr(rolloutbus.RolloutClient, first)
    found: Any = places.get(first) or public(first)
    for name in rest:
        found = getattr(found, name)
    return found


def public(name: str) -> Any:  # noqa: ANN401 - a class or a function
    """What users import by this name."""
    return getattr(rolloutbus if name in rolloutbus.__all__ else rolloutbus.types, name)


def keywords_of(call: Any) -> set[str]:  # noqa: ANN401 - as above
    """Names that it takes, those of `**options: Unpack[SomeOptions]` included."""
    names: set[str] = set()
    for parameter in inspect.signature(call).parameters.values():
        if get_origin(parameter.annotation) is Unpack:
            names |= get_type_hints(get_args(parameter.annotation)[0]).keys()
        else:
            names.add(parameter.name)
    return names


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_name_is_an_item(name: str) -> None:
    assert name in {part for item in surface().items for part in (item, *item.split("."))}


@pytest.mark.parametrize("called", spans(CALLED))
def test_what_is_called_exists_and_takes_what_is_given(called: str) -> None:
    call = ast.parse(called.replace("…", "..."), mode="eval").body
    assert isinstance(call, ast.Call)
    method = ours(ast.unparse(call.func))
    assert callable(method)
    known = keywords_of(method)
    given = {keyword.arg for keyword in call.keywords}
    given |= {each.id for each in call.args if isinstance(each, ast.Name)}
    assert given <= known


@pytest.mark.parametrize("named", spans(FIELD))
def test_what_is_named_exists(named: str) -> None:
    owner, field = named.split(".")
    kind = public(owner)
    assert hasattr(kind, field) or field in get_type_hints(kind)


def test_there_are_calls_and_names_to_check() -> None:
    assert len(spans(CALLED)) > 40
    assert len(spans(FIELD)) > 8
