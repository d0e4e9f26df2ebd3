"""For the site: links to files of the repository that are no pages become the files' names, and the reference of the
command line is made from the commands themselves."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import typer

from gradientflow.cli import app

#: Where commands go, on the page that has it.
COMMANDS = "<!-- commands -->"
_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+(?!docs/)[^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    docs = Path(config["docs_dir"])
    here = (docs / page.file.src_uri).parent

    def name(link: re.Match[str]) -> str:
        words, target = link.groups()
        path = (here / target).resolve()
        if path.is_relative_to(docs):
            return link[0]
        inside = path.relative_to(docs.parent)
        return f"{words} (`{inside}`)" if words.strip("`") != str(inside) else f"`{inside}`"

    return _LINK.sub(name, markdown.replace(COMMANDS, described_commands()) if COMMANDS in markdown else markdown)


def described_commands() -> str:
    """Every command, with its arguments and options, as Markdown."""
    group = typer.main.get_command(app)
    found, panel = [], ""
    for name, command in group.commands.items():
        if command.rich_help_panel != panel:
            panel = command.rich_help_panel
            found.append(f"## {panel}")
        arguments = [each for each in command.params if not each.opts[0].startswith("-")]
        written = [_written(each) if each.required else f"[{_written(each)}]" for each in arguments]
        usage = " ".join(["gradientflow", name, "[OPTIONS]", *written])
        found += [f"### {name}", inspect.cleandoc(command.help or ""), f"```\n{usage}\n```"]
        if command.params:
            rows = [_row(each) for each in command.params]
            found.append("\n".join(["| | | unless given |", "|---|---|---|", *rows]))
    return "\n\n".join(found)


def _written(parameter: Any) -> str:
    return (parameter.metavar or parameter.name.upper()) + "..." * (parameter.nargs == -1)


def _row(parameter: Any) -> str:
    names = parameter.opts if parameter.opts[0].startswith("-") else [_written(parameter)]
    default = parameter.default
    shown = f"`{default}`" if default not in (None, "", False) and not callable(default) else ""
    words = (parameter.help or "").replace("|", "\\|")
    return f"| {', '.join(f'`{name}`' for name in names)} | {words} | {shown} |"
