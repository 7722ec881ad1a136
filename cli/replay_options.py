"""Options of `rolloutbus replay`."""

from typing import Annotated

import typer

Speed = Annotated[str, typer.Option(metavar="1|10|max", help="How many times as fast as it was.")]
Requests = Annotated[
    list[str] | None,
    typer.Option("--request", metavar="RID", help="Only of this request; may be repeated."),
]
Bind = Annotated[
    str, typer.Option(metavar="ENDPOINT", help="Where listeners find it. Default: a fresh one.")
]
Wait = Annotated[
    int, typer.Option(min=0, help="Begin when every stream has so many subscriptions.")
]
Stay = Annotated[bool, typer.Option("--stay", help="Go on answering after the end, until Ctrl-C.")]
Regenerates = Annotated[
    bool,
    typer.Option("--regenerate", help="Instead: ask a live fleet the same, and compare."),
]
Scores = Annotated[
    bool,
    typer.Option(
        "--score",
        help="--regenerate: sample nothing, compare what the weights say of the recorded tokens.",
    ),
]
LiveFleet = Annotated[
    str,
    typer.Option(
        "--name",
        "--address",
        "-a",
        "--router",
        "-r",
        metavar="NAME|ENDPOINT",
        help="--regenerate: of this fleet. Default: the only one that runs here.",
    ),
]
VersionRule = Annotated[
    str,
    typer.Option(
        "--version", metavar="RULE", help="--regenerate: exact:V, min:V, latest or any weights."
    ),
]
DeadlineEach = Annotated[
    float, typer.Option("--deadline", min=0.001, help="--regenerate: seconds for each request.")
]
Concurrency = Annotated[int, typer.Option(min=1, help="--regenerate: requests under way at once.")]
Tolerance = Annotated[
    float, typer.Option(min=0.0, help="--regenerate: difference of logprobs that is none.")
]
