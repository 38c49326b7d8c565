"""What the site has beside the pages of docs/: the README as its home, and references made from the code."""

import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make the README the home page; its links are from the repository's root."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the references, and show links to files outside the site as their paths."""
    markdown = markdown.replace("<!-- commands -->", "\n".join(commands()))
    markdown = re.sub(r"<!-- api: (\S+) -->", r"::: \1", markdown)
    folder = ROOT if page.file.src_uri == "index.md" else ROOT / "docs"

    def within(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / link[3]))
        if link[3] in files.src_uris or path.is_relative_to(ROOT / "docs"):
            return link[0]  # of the site, which checks it
        if not path.exists():
            raise PluginError(f"{page.file.src_uri} links to {link[3]}, which does not exist: mend the link")
        shown = path.relative_to(ROOT)
        return f"`{shown}`" if str(shown).endswith(link[2]) else f"{link[2]} (`{shown}`)"

    return _LINK.sub(within, markdown)


def commands() -> Iterator[str]:
    """Yield the help of every command, as Markdown."""
    from tide_lm.cli import commands as every

    group = typer.main.get_command(every())
    for name, command in group.commands.items():
        for path, one in _leaves(name, command):
            yield from _command(path, one)


def _leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, inner in command.commands.items():
        yield from _leaves(f"{path} {name}", inner)


def _command(path: str, command: Any) -> Iterator[str]:
    yield f"\n## {path}\n"
    yield inspect.cleandoc(command.help or "") + "\n"
    context = command.make_context(path, [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"```\ntide-lm {path} {usage}\n```\n"
    yield "| option | what it does | default |\n|---|---|---|"
    for parameter in command.get_params(context):
        if parameter.name == "help":
            continue
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        if parameter.param_type_name == "argument":
            names = f"`{parameter.metavar or parameter.name}`"
        default = parameter.default
        shown = "" if default in (None, False, ()) or callable(default) else f"`{default}`"
        told = (parameter.help or "").replace("|", r"\|")
        yield f"| {names} | {told} | {shown} |"
