"""No public callable swallows a wrong name or a wrong choice; found by looking, not by a list."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import pytest

import rolloutbus
from rolloutbus.bus.strict_calls import Spelled
from rolloutbus.bus.wire.errors import BusError, Refused, SettingsError

OURS = ("rolloutbus.launcher.", "rolloutbus.replay.", "rolloutbus.trainer_adapter.")
WRONG = "wrnog"
SHORT = 4


def is_ours(thing: Any) -> bool:  # noqa: ANN401 - a class or a function
    return thing.__module__.startswith(OURS)


def is_plain_value(kind: type) -> bool:
    """Results, which callers read."""
    is_struct = issubclass(kind, msgspec.Struct)
    return dataclasses.is_dataclass(kind) or is_struct or issubclass(kind, BusError)


def classes_in(annotation: Any) -> Iterator[type]:  # noqa: ANN401 - whatever it is
    if isinstance(annotation, type):
        yield annotation
    for each in get_args(annotation):
        yield from classes_in(each)


def public_callables() -> dict[str, Callable[..., Any]]:
    """Whatever a user of `rolloutbus` can get at and call, by way of what calls return."""
    found: dict[str, Callable[..., Any]] = {}
    seen: set[type] = set()
    waiting: list[Any] = [getattr(rolloutbus, name) for name in rolloutbus.__all__]
    while waiting:
        thing = waiting.pop()
        if inspect.isfunction(thing):
            found[thing.__qualname__] = thing
            waiting += classes_in(inspect.signature(thing).return_annotation)
        if not isinstance(thing, type) or thing in seen or not is_ours(thing):
            continue
        seen.add(thing)
        for name, member in inspect.getmembers(thing):
            function = member.fget if isinstance(member, property) else member
            if not inspect.isfunction(function) or not is_ours(function):
                continue
            if name.startswith("_") and name != "__init__":
                continue
            waiting += classes_in(inspect.signature(function).return_annotation)
            if not isinstance(member, property) and not is_plain_value(thing):
                found[f"{thing.__qualname__}.{name}"] = function
    return found


CALLABLES = public_callables()


def named_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [
        each
        for each in parameters
        if each.name != "self" and each.kind is not inspect.Parameter.POSITIONAL_ONLY
    ]


def choices_of(annotation: Any) -> list[str]:  # noqa: ANN401 - whatever it is
    """What a parameter's value, or each item of it, must be one of; empty if it is no choice."""
    if get_origin(annotation) is Literal:
        return [str(each) for each in get_args(annotation)]
    if get_origin(annotation) is Annotated:
        return [
            text.strip()
            for each in get_args(annotation)
            if isinstance(each, Spelled)
            for text in each.wanted.replace(" or ", ", ").split(",")
        ]
    return [choice for each in get_args(annotation) for choice in choices_of(each)]


CHOICES = {
    f"{name}({parameter.name})": (function, parameter)
    for name, function in CALLABLES.items()
    for parameter in named_parameters(function)
    if choices_of(parameter.annotation)
}


def test_the_search_finds_what_users_call() -> None:
    assert CALLABLES.keys() >= {
        "OpenAIClient.chat_completion",
        "RolloutClient.generate",
        "RolloutClient.pause",
        "Session.sample",
        "SyncOpenAIClient.completion",
        "SyncRolloutClient.score",
        "SyncSession.replace",
        "SyncWeightPublisher.publish",
        "TextClient.chat",
        "PublisherUpdate.put_all",
        "WeightPublisher.__init__",
        "connect",
        "connect_sync",
        "record",
        "subscribe",
        "up",
    }
    assert CHOICES.keys() >= {
        "RolloutClient.generate(on_loss)",
        "RolloutClient.generate(versions)",
        "RolloutClient.pause(mode)",
        "RolloutClient.save_weights(kind)",
        "RolloutClient.sleep(tags)",
        "Session.sample(on_loss)",
        "TextClient.generate(versions)",
        "WeightPublisher.publish(in_flight)",
        "WeightPublisher.publish(mode)",
        "WeightPublisher.publish(require)",
        "WeightPublisher.publish(transport)",
    }


def error_of(function: Callable[..., Any], keyword: str, value: object) -> BaseException | None:
    """What a call with this keyword raises."""
    own = [object()] if "self" in inspect.signature(function).parameters else []
    try:
        function(*own, **{keyword: value})
    except Exception as error:  # noqa: BLE001 - that is asked for
        return error
    return None


def test_a_keyword_that_does_not_exist_is_an_error() -> None:
    told = {name: error_of(function, WRONG, 1) for name, function in CALLABLES.items()}
    assert [
        (name, error)
        for name, error in told.items()
        if not isinstance(error, TypeError) or WRONG not in str(error)
    ] == []


def test_a_misspelt_keyword_is_told_the_right_one() -> None:
    told = {
        (name, parameter.name): error_of(function, f"{parameter.name}z", 1)
        for name, function in CALLABLES.items()
        for parameter in named_parameters(function)
        if len(parameter.name) >= SHORT  # nothing is near a shorter one
    }
    assert [
        (name, keyword, error)
        for (name, keyword), error in told.items()
        if not isinstance(error, TypeError) or f"did you mean {keyword}=?" not in str(error)
    ] == []


def test_a_choice_that_does_not_exist_is_told_those_that_do() -> None:
    offenders: list[object] = []
    for name, (function, parameter) in CHOICES.items():
        choices = choices_of(parameter.annotation)
        for wrong in (WRONG, [WRONG], 7, object()):
            error = error_of(function, parameter.name, wrong)
            if not isinstance(error, Refused | SettingsError):
                offenders.append((name, wrong, error))
                continue
            missing = [each for each in (*choices, parameter.name) if each not in str(error)]
            if missing:
                offenders.append((name, wrong, error, missing))
    assert offenders == []


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("RolloutClient.generate", "version", "versions="),
        ("RolloutClient.generate", "timeout", "deadline_s="),
        ("RolloutClient.generate", "timeout_s", "deadline_s="),
        ("RolloutClient.generate", "n", "generate_batch"),
        ("RolloutClient.generate", "on_lost", "on_loss="),
        ("RolloutClient.generate", "stop", "SamplingParams(stop="),
        ("RolloutClient.generate", "max_tokens", "SamplingParams(max_new_tokens="),
        ("RolloutClient.generate", "top_logprobs", "Want(top_logprobs="),
        ("SyncRolloutClient.generate", "temperature", "SamplingParams(temperature="),
        ("WeightPublisher.publish", "requires", "require="),
        ("WeightPublisher.publish", "inflight", "in_flight="),
        ("RolloutClient.score", "softmax", "apply_softmax="),
    ],
)
def test_what_other_libraries_say_is_told_by_our_name(name: str, wrong: str, right: str) -> None:
    error = error_of(CALLABLES[name], wrong, 1)
    assert isinstance(error, TypeError)
    assert right in str(error)


def test_help_shows_every_keyword_with_its_default() -> None:
    whole = inspect.signature(rolloutbus.RolloutClient.generate).parameters
    for other in (rolloutbus.SyncRolloutClient.generate, rolloutbus.TextClient.chat):
        shown = inspect.signature(other).parameters
        for name, parameter in whole.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                assert shown[name].default == parameter.default
    assert not any(
        each.kind is inspect.Parameter.VAR_KEYWORD
        for function in CALLABLES.values()
        for each in inspect.signature(function).parameters.values()
    )
