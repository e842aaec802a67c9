"""The command `finetune`: a subcommand for each module that people start, from any folder.

    finetune plan glm47          the same as python -m flows.plan glm47
    finetune completion bash     print what the shell needs to complete subcommands, options and configurations

A module is imported when its subcommand runs. Help and completion need only its parser (flows/arguments.py) and take a
fraction of a second.
"""

import argparse
import runpy
import sys
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem, get_completion_class

from contract import closed_pipe
from flows import arguments

SUMMARIES = {
    "up": "Start Prefect, MLflow and workers on this host, and deploy everything.",
    "down": "Stop what `finetune up` started.",
}


class Subcommand(click.Command):
    """A subcommand that runs a module like python -m."""

    def __init__(self, name: str, words: str) -> None:
        module, *self.words = words.split()
        summary = SUMMARIES.get(name) or arguments.about(module).partition("\n")[0]
        super().__init__(name, short_help=summary, add_help_option=False)
        self.module = module

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = args
        return args

    def invoke(self, ctx: click.Context) -> None:
        if {"-h", "--help"} & {*ctx.args}:
            arguments.of_command(self.module).parse_args([*self.words, *ctx.args])  # prints the help and ends
        sys.argv[1:] = [*self.words, *ctx.args]
        runpy.run_module(self.module, run_name="__main__", alter_sys=True)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        parser, words = arguments.of_command(self.module), [*self.words, *ctx.args]
        nested = next((one for one in parser._actions if isinstance(one, argparse._SubParsersAction)), None)
        if nested and (name := next((word for word in words if word in nested.choices), None)):
            parser, words, nested = nested.choices[name], words[words.index(name) + 1 :], None
        last = parser._option_string_actions.get(words[-1]) if words else None
        if last and last.nargs != 0:
            values = arguments.stages() if last.metavar == "STAGE" else last.choices or ()
            return _items([*values], incomplete, files=True)
        if incomplete.startswith("-"):
            options = {name: action for name, action in parser._option_string_actions.items() if name.startswith("--")}
            shown = [name for name, action in options.items() if action.help != argparse.SUPPRESS]
            return [CompletionItem(name, help=options[name].help) for name in shown if name.startswith(incomplete)]
        if nested:
            return _items([*nested.choices], incomplete)
        if self.words or not any(action.dest == "conf" for action in parser._actions) or any(map(_is_name, words)):
            return _items([], incomplete, files=not self.words)
        from conf.load import names

        return _items(names(), incomplete, files=True)


def _is_name(word: str) -> bool:
    return not word.startswith("-") and "=" not in word


def _items(values: Sequence[str], incomplete: str, files: bool = False) -> list[CompletionItem]:
    """Return the values that start with `incomplete`. If there are none, `files` lets the shell complete file names."""
    fitting = [CompletionItem(value) for value in values if value.startswith(incomplete)]
    return fitting or [CompletionItem(incomplete, type="file")] * files


@click.group(
    commands=[Subcommand(*command) for command in arguments.COMMANDS.items()],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="finetune")
def finetune() -> None:
    """Fine-tune large language models: plan, run, serve. `finetune COMMAND --help` explains a command."""


@finetune.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    Use it with: eval "$(finetune completion bash)"
    """
    kind = get_completion_class(shell)
    assert kind
    print(kind(finetune, {}, "finetune", "_FINETUNE_COMPLETE").source())


def main() -> int:
    arguments.invoked_as = "finetune"
    with closed_pipe.quiet():
        try:
            finetune.main(sys.argv[1:] or ["--help"], prog_name="finetune", standalone_mode=False)
        except click.ClickException as fault:
            return arguments.refused(fault.format_message())
        except click.exceptions.Exit as end:
            return end.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
