"""Strict calls: unknown keywords and values that do not fit are refused, with a hint.

`strict` stands on every public class and function. Unknown keywords raise TypeError with the
nearest right one; values are compared with the annotations of the parameters.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from re import Pattern
from types import FunctionType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from rolloutbus.bus.wire.errors import BusError, Refused, SettingsError
from rolloutbus.bus.wire.messages.endings import bad_request
from rolloutbus.bus.wire.messages.generation import SAID_ELSEWHERE, SamplingParams, Want
from rolloutbus.bus.wire.near_names import MEANT, RENAMED, nearest

T = TypeVar("T")

MAX_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class Spelled:
    """In `Annotated[str, Spelled(...)]`: texts that follow a rule."""

    pattern: Pattern[str]
    wanted: str
    """The valid ones, for a person."""

    def __repr__(self) -> str:
        return self.wanted


@dataclass(frozen=True, slots=True)
class Described:
    """In `Annotated[T, Described(...)]`: what a T is, in the caller's words."""

    wanted: str

    def __repr__(self) -> str:
        return self.wanted


class _Kind(NamedTuple):
    """Values that a parameter takes."""

    fits: Callable[[object], bool]
    wanted: str


class _Call(NamedTuple):
    """Name and parameters of one callable."""

    name: str
    positional: tuple[str, ...]
    names: frozenset[str]
    kinds: Mapping[str, _Kind]
    is_method: bool


def strict(
    *,
    options: Callable[..., Any] | None = None,
    refused: Callable[[Iterable[object]], None] | None = None,
) -> Callable[[T], T]:
    """Check every call of a function, or of the public methods of a class.

    Unknown keywords raise TypeError. Values that do not fit raise Refused from methods, with
    `.field`, and SettingsError from functions and constructors.

    Args:
        options: whose keyword parameters have the defaults of an `**options: Unpack[...]`.
        refused: called with the arguments of a call that is refused, for those who wait for it.
    """

    def decorate(thing: T) -> T:
        if not isinstance(thing, type):
            return cast(
                "T", _checked(cast("FunctionType", thing), options, refused, is_method=False)
            )
        for name, member in list(vars(thing).items()):
            is_public = not name.startswith("_") or name == "__init__"
            if is_public and isinstance(member, FunctionType):
                setattr(thing, name, _checked(member, options, refused, is_method=True))
        return thing

    return decorate


def unknown_keyword(
    call: str, name: str, names: Collection[str], within: Mapping[str, Collection[str]]
) -> TypeError:
    """The error for a keyword that does not exist.

    Args:
        call: the name of what was called.
        name: of the keyword.
        names: the keywords that exist.
        within: keyword -> names of fields of the value that it takes.
    """
    begin = f"{call}() has no parameter {name!r}"
    is_known = any(MEANT.get(name) in fields for fields in within.values())  # of another library
    if not is_known and (meant := nearest(name, names)):
        return TypeError(f"{begin}; did you mean {meant}=?")
    for holder, fields in within.items():
        if holder in names and (meant := name if name in fields else nearest(name, fields)):
            return TypeError(f"{begin}; say it in {holder}={_KINDS[holder]}({meant}=...)")
    if name in SAID_ELSEWHERE and "sampling" in names:
        return TypeError(f"{begin}: {SAID_ELSEWHERE[name]}")
    return TypeError(f"{begin}; there are {', '.join(sorted(names)) or 'none'}")


def _checked(
    function: FunctionType,
    options: Callable[..., Any] | None,
    refused: Callable[[Iterable[object]], None] | None,
    *,
    is_method: bool,
) -> Callable[..., Any]:
    signature = _spelled_out(function, options)
    call = _described(function, signature, is_method=is_method)
    names, positional = call.names, call.positional
    tests = {name: kind.fits for name, kind in call.kinds.items()}
    test_of = tests.get

    def fault(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
        if not kwargs.keys() <= names:
            wrong = next(each for each in kwargs if each not in names)
            return unknown_keyword(call.name, wrong, names, _FIELDS)
        for name, value in zip(positional, args, strict=False):
            fits = test_of(name)
            if fits is not None and not fits(value):
                return _wrong_value(call, name, value)
        for name, value in kwargs.items():
            fits = test_of(name)
            if fits is not None and not fits(value):
                return _wrong_value(call, name, value)
        return None

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the function has them
        error = fault(args, kwargs)
        if error is not None:
            if refused is not None:
                refused((*args, *kwargs.values()))
            raise error
        return function(*args, **kwargs)

    cast("Any", checked).__signature__ = signature
    return checked


def _spelled_out(function: FunctionType, options: Callable[..., Any] | None) -> inspect.Signature:
    """The signature, with a parameter for each key of an `Unpack[...]`, as `options` has them."""
    signature = inspect.signature(function)
    defaults = dict(inspect.signature(options).parameters) if options is not None else {}
    parameters: list[inspect.Parameter] = []
    for each in signature.parameters.values():
        keys = _keys_of(each)
        if keys is None:
            parameters.append(each)
            continue
        parameters += [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults[name].default,
                annotation=keys[name],
            )
            for name in sorted(keys, key=list(defaults).index)
        ]
    return signature.replace(parameters=parameters)


def _keys_of(parameter: inspect.Parameter) -> dict[str, Any] | None:
    if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
        return None
    keys = next(iter(get_args(parameter.annotation)), None)
    return get_type_hints(keys, include_extras=True) if is_typeddict(keys) else None


def _described(function: FunctionType, signature: inspect.Signature, *, is_method: bool) -> _Call:
    parameters = list(signature.parameters.values())
    takes_any = [each for each in parameters if each.kind is inspect.Parameter.VAR_KEYWORD]
    assert not takes_any, f"{function.__qualname__} would swallow any keyword"
    kinds = {each.name: _kind_of(each.annotation) for each in parameters}
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    owner, _, name = function.__qualname__.rpartition(".")
    own = 1 if is_method else 0
    return _Call(
        name=owner if name == "__init__" else name,
        positional=tuple(each.name for each in parameters if each.kind in by_position),
        names=frozenset(each.name for each in parameters[own:] if each.kind in by_name),
        kinds={name: kind for name, kind in kinds.items() if kind is not None},
        is_method=is_method and name != "__init__",
    )


def shown(value: object) -> str:
    """A value in a sentence: itself if it is short, else its type."""
    text = repr(value)
    is_plain = len(text) <= MAX_SHOWN_CHARS and not text.startswith("<")
    return text if is_plain else f"a value of type {type(value).__name__}"


def _wrong_value(call: _Call, name: str, value: object) -> BusError:
    message = f"{name} is {shown(value)}; it must be {call.kinds[name].wanted}"
    if isinstance(value, str):
        meant = RENAMED.get((name, value)) or MEANT.get(value, "!")
        if meant in call.kinds[name].wanted:
            message += f"; {value} is said as {meant!r}"
    if call.is_method:
        return Refused(bad_request(name, message))
    return SettingsError(f"{call.name}: {message}")


def _kind_of(annotation: Any) -> _Kind | None:  # noqa: ANN401 - whatever stands after the colon
    """Values that an annotation takes; None if only the function itself can judge them."""
    if annotation is inspect.Parameter.empty:
        return None
    if annotation is None:
        annotation = NoneType
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _Kind(functools.partial(_is_among, inner), _listed([str(each) for each in inner]))
    if origin is Annotated:
        for each in inner[1:]:
            if isinstance(each, Spelled):
                return _Kind(functools.partial(_is_spelled, each.pattern), each.wanted)
        kind = _kind_of(inner[0])
        described = [each.wanted for each in inner[1:] if isinstance(each, Described)]
        return kind._replace(wanted=described[0]) if kind is not None and described else kind
    if origin in (Union, UnionType):
        return _either([_kind_of(each) for each in inner])
    if origin is Callable:
        return _Kind(callable, "a function")
    if origin in _LISTS:
        return _list_of(_kind_of(inner[0]) if get_origin(inner[0]) is Literal else None)
    is_open = getattr(annotation, "_is_protocol", False)
    if isinstance(annotation, type) and (
        not is_open or getattr(annotation, "_is_runtime_protocol", False)
    ):
        name = annotation.__name__
        article = "an" if name[0] in "AEIOaeio" else "a"
        return _Kind(functools.partial(_is_a, (annotation,)), f"{article} {name}")
    return None


def _either(kinds: Sequence[_Kind | None]) -> _Kind | None:
    known = [each for each in kinds if each is not None]
    if len(known) != len(kinds):
        return None

    def fits(value: object) -> bool:
        return any(each.fits(value) for each in known)

    return _Kind(fits, " or ".join(each.wanted for each in known))


def _list_of(item: _Kind | None) -> _Kind:
    def fits(value: object) -> bool:
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            return False
        try:
            iter(cast("Iterable[object]", value))
        except TypeError:  # an array without dimensions
            return False
        if item is None or not isinstance(value, Collection):
            return True
        return all(map(item.fits, cast("Collection[object]", value)))

    return _Kind(fits, "a list" if item is None else f"a list of {item.wanted}")


def _listed(values: Sequence[str]) -> str:
    *most, last = [each or "''" for each in values]
    return f"{', '.join(most)} or {last}" if most else last


def _is_among(values: tuple[object, ...], value: object) -> bool:
    return isinstance(value, str) and value in values


def _is_spelled(pattern: Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_a(kinds: tuple[type, ...], value: object) -> bool:
    return isinstance(value, kinds)


def _is_number(kind: type, value: object) -> bool:
    """NaN is none; nor is a truth value, though Python counts it among the integers."""
    if type(value) is int:  # as most are, and asking an abstract class takes long
        return True
    return isinstance(value, kind) and not isinstance(value, bool) and value == value  # noqa: PLR0124 - NaN


_LISTS = (Sequence, Iterable, Collection, list, tuple)
_PLAIN: Mapping[object, _Kind] = {
    NoneType: _Kind(functools.partial(_is_a, (NoneType,)), "None"),
    bool: _Kind(functools.partial(_is_a, (bool,)), "True or False"),
    int: _Kind(functools.partial(_is_number, Integral), "an integer"),
    float: _Kind(functools.partial(_is_number, Real), "a number"),
    str: _Kind(functools.partial(_is_a, (str,)), "a str"),
}
_FIELDS: Mapping[str, Collection[str]] = {
    "sampling": SamplingParams.__struct_fields__,
    "want": Want.__struct_fields__,
}
"""Keyword -> fields of the value that it takes; callers mistake them for keywords."""
_KINDS = {"sampling": "SamplingParams", "want": "Want"}
"""Keyword -> name of the class of its value."""
