"""`rolloutbus generate`: one prompt from the command line."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from rolloutbus.bus.wire.messages.generation import SamplingParams
from rolloutbus.cli.options import Address, Deadline, YourKey, example
from rolloutbus.cli.terminal import (
    ExitStatus,
    checked,
    client_settings,
    connected,
    fail,
    harmless,
    run,
)
from rolloutbus.cli.verbs import Verbs
from rolloutbus.launcher.discovery import model_of
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import Rollout
from rolloutbus.trainer_adapter.client.text import TextPieces, TokenizerFile, load_tokenizer

app = Verbs()


@dataclass(frozen=True, slots=True)
class Job:
    """What to sample and how to show it."""

    prompt: list[int]
    sampling: SamplingParams
    options: GenerateOptions
    tokenizer: TokenizerFile | None
    shows_tokens: bool
    """Token ids instead of text."""
    n: int
    as_json: bool


@app.command(epilog=example('rolloutbus generate "Once upon a time" --max-new-tokens 16 --stream'))
def generate(
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="The prompt, for a model with a tokenizer.")
    ] = "",
    *,
    address: Address = "",
    key: YourKey = "",
    prompt_ids: Annotated[
        str, typer.Option(metavar="IDS", help="The prompt as token ids, separated by commas.")
    ] = "",
    tokens: Annotated[
        bool,
        typer.Option("--tokens", help="Print token ids, as after --prompt-ids, and no text."),
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="tokenizer.json, or a directory with it. Default: that of the model, if the fleet "
            "runs here."
        ),
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print it as it comes.")] = False,
    n: Annotated[int, typer.Option("--n", min=1, help="Samples of the prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Sample i draws with seed + i.")] = None,
    versions: Annotated[
        str,
        typer.Option(
            metavar="RULE",
            help="Which weights will do: any, latest, min:V, exact:V, min-tag:T, max-staleness:K.",
        ),
    ] = "any",
    policy: Annotated[str, typer.Option(help="Whose weights.")] = "default",
    session: Annotated[str, typer.Option(help="Stay on the worker of this session.")] = "",
    deadline: Deadline = 60.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per sample, with logprobs.")
    ] = False,
) -> None:
    """Sample continuations of a prompt: text of text, token ids of token ids.

    Token ids are printed in one line per sample. With --tokenizer they are printed as text.
    """
    if stream and (n > 1 or as_json):
        fail("--stream shows one sample as it comes: leave out --n and --json", ExitStatus.USAGE)
    loaded = _tokenizer(tokenizer, address) if text or tokenizer else None
    job = Job(
        prompt=_prompt(prompt_ids, text, loaded),
        sampling=SamplingParams(
            max_new_tokens=max_new_tokens, temperature=temperature, sampling_seed=seed
        ),
        options=GenerateOptions(
            versions=versions, policy=policy, session=session, deadline_s=deadline
        ),
        tokenizer=loaded,
        shows_tokens=tokens or loaded is None,
        n=n,
        as_json=as_json,
    )
    run(_generate(address, key, job, is_stream=stream))


def _prompt(prompt_ids: str, text: str, tokenizer: TokenizerFile | None) -> list[int]:
    if bool(prompt_ids) == bool(text):
        fail("give a prompt: either text or --prompt-ids 1,2,3", ExitStatus.USAGE)
    if prompt_ids:
        try:
            return [int(each) for each in prompt_ids.split(",")]
        except ValueError:
            fail(f"--prompt-ids: {prompt_ids!r} is not like 1,2,3", ExitStatus.USAGE)
    assert tokenizer is not None  # of every text
    return tokenizer.encode(text, add_special_tokens=True)


def _tokenizer(given: Path | None, address: str) -> TokenizerFile:
    """The tokenizer that was named, or that of the fleet's model."""
    if given is not None:
        return checked(partial(load_tokenizer, given))
    model = checked(partial(model_of, address))
    if model is None:
        # Whoever has no fleet, or a wrong address, is told of that first.
        checked(partial(client_settings, address))
        fail(
            "the fleet's model is not a directory here, so its tokenizer is unknown: name one with "
            "--tokenizer PATH, or give token ids (--prompt-ids 1,2,3)",
            ExitStatus.USAGE,
        )
    if not (model / "tokenizer.json").is_file():
        fail(
            f"the fleet's model has no tokenizer: there is no {model / 'tokenizer.json'}; give "
            "token ids (--prompt-ids 1,2,3), or name a tokenizer (--tokenizer PATH)",
            ExitStatus.USAGE,
        )
    return checked(partial(load_tokenizer, model))


async def _generate(address: str, key: str, job: Job, *, is_stream: bool) -> None:
    async with connected(address, key) as client:
        if is_stream:
            await _stream(client, job)
            return
        groups = await client.generate_batch([job.prompt], job.sampling, n=job.n, **job.options)
        for rollout in groups[0]:
            sys.stdout.write(
                _as_json(job, rollout) if job.as_json else _shown(job, rollout.tokens.tolist())
            )
            sys.stdout.write("\n")


async def _stream(client: RolloutClient, job: Job) -> None:
    pieces = TextPieces(partial(_shown, job))
    async for delta in client.stream(job.prompt, job.sampling, **job.options):
        is_last = delta.finish_reason is not None
        sys.stdout.write(pieces.add(delta.start, delta.tokens.tolist(), is_last=is_last))
        sys.stdout.flush()
    sys.stdout.write("\n")


def _shown(job: Job, tokens: Sequence[int]) -> str:
    if job.tokenizer is None or job.shows_tokens:
        return ",".join(map(str, tokens))
    text = job.tokenizer.decode(tokens, skip_special_tokens=True)
    return harmless(text) if sys.stdout.isatty() else text


def _as_json(job: Job, rollout: Rollout) -> str:
    shown: dict[str, Any] = {
        "rid": rollout.rid,
        "tokens": rollout.tokens.tolist(),
        "logprobs": rollout.logprobs.tolist(),
        "version_runs": rollout.version_runs,
        "lora": rollout.lora,
        "finish_reason": rollout.finish_reason,
        "worker": rollout.worker,
        "n_attempts": rollout.n_attempts,
        "n_resumed": rollout.n_resumed,
    }
    if job.tokenizer is not None and not job.shows_tokens:
        tokens = shown["tokens"]
        shown["text"] = job.tokenizer.decode(tokens, skip_special_tokens=True)
    return msgspec.json.encode(shown).decode()
