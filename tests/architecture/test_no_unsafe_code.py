"""Nothing in the source can turn received bytes into running code."""

import ast
from collections.abc import Collection, Iterable, Iterator

import pytest

from tests.architecture.source_tree import source_modules

# Dotted names; whatever lies below one is meant as well.
BANNED = {
    "_pickle": "runs code while it loads",
    "cloudpickle": "runs code while it loads",
    "dill": "runs code while it loads",
    "joblib": "pickles",
    "jsonpickle": "runs code while it loads",
    "marshal": "loads code",
    "pickle": "runs code while it loads",
    "shelve": "pickles",
    "compile": "makes code from text",
    "eval": "runs text",
    "exec": "runs text",
    "builtins.compile": "makes code from text",
    "builtins.eval": "runs text",
    "builtins.exec": "runs text",
    "importlib.reload": "module state must not change while actors live",
    "multiprocessing.Manager": "pickles between processes",
    "multiprocessing.Pipe": "pickles between processes",
    "multiprocessing.Pool": "pickles between processes",
    "multiprocessing.Queue": "pickles between processes",
    "multiprocessing.SimpleQueue": "pickles between processes",
    "multiprocessing.connection": "pickles between processes",
    "multiprocessing.managers": "pickles between processes",
    "numpy.loads": "pickles",
    "os.popen": "runs a shell",
    "os.system": "runs a shell",
    "torch.load": "unpickles; use safetensors",
    "torch.save": "pickles; use safetensors",
    "yaml.full_load": "makes objects by name",
    "yaml.load": "makes objects by name",
    "yaml.unsafe_load": "makes objects by name",
}
BANNED_METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized"}
BANNED_FLAGS = {"allow_pickle", "shell", "trust_remote_code"}

OWN_PICKLES = {
    "tests/adapters/skyrl_program.py",
    "tests/unit/launcher/test_ticket.py",
    "tests/unit/rolloutbus/test_pickling.py",
    "tests/unit/trainer_adapter/test_fleet_options.py",
}
"""Tests that load what they have pickled themselves, as process pools and Ray do."""
OWN_TEXT = {"tests/page_snippets.py"}
"""Runs the blocks of code in our own pages."""

UNSAFE_SNIPPETS = [
    "import pickle",
    "from pickle import loads",
    "import cloudpickle as cp",
    "import torch as t\nt.load('x')",
    "from torch import load as read\nread('x')",
    "import yaml\nyaml.load(text)",
    "eval('1')",
    "run = exec",
    "import multiprocessing\nmultiprocessing.Queue()",
    "import multiprocessing as mp\nmp.get_context('spawn').Pipe()",
    "import numpy as np\nnp.load(path, allow_pickle=True)",
    "AutoModel.from_pretrained(path, trust_remote_code=True)",
    "subprocess.run(command, shell=True)",
    "socket.recv_pyobj()",
]
SAFE_SNIPPETS = [
    "model.eval()",
    "import re\nre.compile('a')",
    "import torch\ntorch.compile(model)",
    "from multiprocessing import shared_memory",
    "import yaml\nyaml.safe_load(text)",
    "AutoModel.from_pretrained(path, trust_remote_code=False)",
    "queue = Queue()",
]


def _aliases(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Local name -> the dotted name it stands for."""
    aliases: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                aliases[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return aliases


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """`t.load` -> `torch.load`; a call in between is skipped; empty if it starts elsewhere."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, aliases)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _reason(name: str) -> str | None:
    parts = name.split(".")
    return next(
        (
            BANNED[start]
            for n in range(len(parts), 0, -1)
            if (start := ".".join(parts[:n])) in BANNED
        ),
        None,
    )


def _is_context_pipe(node: ast.Attribute) -> bool:
    """`get_context(...).Queue()` and the like."""
    call = node.value
    return (
        isinstance(call, ast.Call)
        and ast.unparse(call.func).endswith("get_context")
        and f"multiprocessing.{node.attr}" in BANNED
    )


def unsafe_uses(nodes: Collection[ast.AST]) -> Iterator[str]:
    """A line and a reason for each use of something banned, in all nodes of a tree."""
    aliases = _aliases(nodes)
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Name | ast.Attribute):
            names = [_dotted(node, aliases)]
        elif isinstance(node, ast.keyword):
            is_off = isinstance(node.value, ast.Constant) and not node.value.value
            if node.arg in BANNED_FLAGS and not is_off:
                yield f"line {node.lineno}: {node.arg} is on"
        for name in names:
            if reason := _reason(name):
                yield f"line {getattr(node, 'lineno', 0)}: {name}: {reason}"
        if isinstance(node, ast.Attribute) and (
            node.attr in BANNED_METHODS or _is_context_pipe(node)
        ):
            yield f"line {node.lineno}: {node.attr}: pickles"


def test_no_module_uses_anything_unsafe() -> None:
    found = [
        f"{module} {use}"
        for module in source_modules()
        if str(module) not in OWN_PICKLES | OWN_TEXT
        for use in unsafe_uses(module.nodes)
    ]
    assert found == []


@pytest.mark.parametrize("snippet", UNSAFE_SNIPPETS)
def test_unsafe_code_is_recognised(snippet: str) -> None:
    assert list(unsafe_uses([*ast.walk(ast.parse(snippet))])) != []


@pytest.mark.parametrize("snippet", SAFE_SNIPPETS)
def test_safe_code_is_left_alone(snippet: str) -> None:
    assert list(unsafe_uses([*ast.walk(ast.parse(snippet))])) == []
