"""`rolloutbus completion`: what a shell needs to complete commands and options."""

import sys
from typing import Annotated, Literal

import typer

# It has no other way to ask for a script than options that edit files in the home directory.
from typer.completion import get_completion_script  # pyright: ignore[reportPrivateImportUsage]

from rolloutbus.cli.main import COMPLETE_VARIABLE, PROGRAM
from rolloutbus.cli.options import example
from rolloutbus.cli.verbs import Verbs

app = Verbs()

HELP = """Print the script that completes commands and options in a shell.

For this and every later shell:

\b
  bash: echo 'eval "$(rolloutbus completion bash)"' >> ~/.bashrc
  zsh:  echo 'eval "$(rolloutbus completion zsh)"' >> ~/.zshrc
  fish: rolloutbus completion fish \\
          > ~/.config/fish/completions/rolloutbus.fish
"""


@app.command(help=HELP, epilog=example('eval "$(rolloutbus completion bash)"'))
def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(metavar="bash|zsh|fish", help="Your shell.")
    ],
) -> None:
    """See HELP."""
    wanted = {"prog_name": PROGRAM, "complete_var": COMPLETE_VARIABLE, "shell": shell}
    script = get_completion_script(**wanted)
    if shell == "zsh":  # its completion is not on before this, unless a framework has done it
        script = f"(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit; }}\n{script}"
    sys.stdout.write(f"{script}\n")
