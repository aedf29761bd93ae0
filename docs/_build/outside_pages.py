"""A hook of MkDocs: pages that live at the repository's root, and links that leave the docs folder.

The files read well on GitHub, where their links are relative to themselves. Here CONTRIBUTING.md and CHANGELOG.md
become pages, and links to any other file of the repository lead to it on GitHub. A link to nothing is an error.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
SOURCE = "https://github.com/jaxmask/jaxmask/blob/main/"
# Files of the repository's root and the pages they become.
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
INSIDE = {"README.md": "index.md", **OUTSIDE}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The docs folder's files, and those of the root as pages."""
    for name, page in OUTSIDE.items():
        if (ROOT / name).is_file():
            text = with_links_of(page, name, (ROOT / name).read_text())
            files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """The page, with links out of the docs folder leading to GitHub."""
    if page.file.generated_by is not None:
        return markdown
    source = page.file.src_uri
    return with_links_of(source, f"docs/{source}", markdown)


def with_links_of(page: str, source: str, markdown: str) -> str:
    """The text of the file `source`, its links as they must be on `page`."""
    return LINK.sub(lambda link: at_page(page, source, link[1]), markdown)


def at_page(page: str, source: str, target: str) -> str:
    """What a link of the file `source`, relative to it, is on the page `page`.

    In: ("changelog.md", "CHANGELOG.md", "docs/faq.md")  Out: "faq.md"
    """
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if not (ROOT / path).exists():
        raise PluginError(f"{source} links to {target}, which is not there")
    inside = INSIDE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
    if inside is None:
        return SOURCE + path
    return posixpath.relpath(inside, posixpath.dirname(page) or ".")
