"""The documentation's site is built without a warning, needs nothing from elsewhere, and has every public name."""

import ast
import contextlib
import dataclasses
import functools
import http.server
import importlib.util
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from blocks import PAGES, ROOT
from mkdocs.exceptions import PluginError

# What a browser fetches by itself.
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
SHOWN = ("index.html", "api/scores.html", "benchmarks.html")
IN_STYLES = re.compile(r"@import\s+[\"']?https?:|url\([\"']?https?:")


class Fetched(HTMLParser):
    """Collects the anchors of a page, and what it makes a browser fetch."""

    def __init__(self):
        super().__init__()
        self.addresses, self.anchors = [], set()

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values["id"]} if "id" in values else set()
        is_named_only = tag == "link" and values.get("rel") in ("canonical", "prev", "next")
        if values.get(FETCHED.get(tag)) and not is_named_only:
            self.addresses.append(values[FETCHED[tag]])


@dataclasses.dataclass(frozen=True)
class Site:
    """What was built: the folder, and its pages as they were read."""

    folder: Path
    pages: dict[Path, Fetched]

    def anchors(self, name):
        return self.pages[self.folder / name].anchors


def read(path):
    page = Fetched()
    page.feed(path.read_text())
    return page


def public_names(package):
    """What `__all__` lists, or, where that is made of a table of names, the table's."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    values = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    return list(ast.literal_eval(values.get("_HOMES", values["__all__"])))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site; links, anchors and references that lead nowhere are warnings, and these errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    settings = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return Site(folder, {path: read(path) for path in folder.rglob("*.html")})


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(site):
    """Where the built site is served."""
    handler = functools.partial(Quiet, directory=site.folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_every_page_is_there(site):
    pages = {path.relative_to(site.folder).as_posix() for path in site.pages}
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert {path.with_suffix(".html").as_posix() for path in sources} <= pages
    assert {"contributing.html", "changelog.html"} <= pages


def test_nothing_is_fetched_from_elsewhere(site):
    wrong = [
        f"{path.name}: {address}"
        for path, page in site.pages.items()
        for address in page.addresses
        if urlsplit(address).netloc
    ]
    wrong += [path.name for path in site.folder.rglob("*.css") if IN_STYLES.search(path.read_text())]
    assert not wrong


def test_what_pages_show_is_there(site):
    for path, page in site.pages.items():
        for address in page.addresses:
            target = urlsplit(address).path
            # The page of an address that does not exist is shown at any depth, so its own are absolute.
            assert path.name == "404.html" or (path.parent / target).is_file(), f"{path.name} shows {address}"


def test_the_reference_has_every_public_name(site):
    anchors = set().union(*(page.anchors for path, page in site.pages.items() if path.parent.name == "api"))
    names = [f"{package}.{name}" for package in ("jaxmask", "models", "train") for name in public_names(package)]
    # Names of `serve` are looked up on first use, so those that read the source see them where they live.
    last_parts = {anchor.rpartition(".")[2] for anchor in anchors}
    missing = set(names) - anchors | set(public_names("serve")) - last_parts
    assert len(names) > 50
    assert not missing


def test_what_is_wrong_with_a_page_is_an_error(tmp_path):
    """Under the site's own settings: a link to nothing, an anchor that is not there, a page that nothing leads to."""
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.SafeLoader)
    small = {name: settings[name] for name in ("site_name", "strict", "validation")}
    small |= {"docs_dir": "pages", "plugins": [], "nav": ["index.md"]}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(small))
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/index.md").write_text("# A\n[b](nothing.md) [c](#nothing)\n")
    (tmp_path / "pages/alone.md").write_text("# B\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert built.returncode == 1
    assert "3 warnings" in built.stdout + built.stderr
    for text in ("nothing.md", "#nothing", "alone.md"):
        assert text in built.stderr


def test_links_that_leave_the_docs_lead_to_the_repository():
    path = ROOT / "docs/_build/outside_pages.py"
    hook = importlib.util.module_from_spec(importlib.util.spec_from_file_location("outside_pages", path))
    hook.__spec__.loader.exec_module(hook)
    assert hook.with_links_of("changelog.md", "CHANGELOG.md", "[a](docs/faq.md#b) [c](#d)") == "[a](faq.md#b) [c](#d)"
    assert hook.with_links_of("api/index.md", "docs/api/index.md", "[a](../faq.md)") == "[a](../faq.md)"
    assert hook.with_links_of("faq.md", "docs/faq.md", "[a](../CHANGELOG.md)") == "[a](changelog.md)"
    outside = "[a](https://github.com/jaxmask/jaxmask/blob/main/Makefile)"
    assert hook.with_links_of("faq.md", "docs/faq.md", "[a](../Makefile)") == outside
    with pytest.raises(PluginError, match=r"docs/faq.md links to ../nothing"):
        hook.with_links_of("faq.md", "docs/faq.md", "[a](../nothing)")


@pytest.mark.parametrize("source", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_are_well_formed(source):
    for target in re.findall(r"(?:\]\(|<)([a-z]+:[^)>\s]+)", source.read_text()):
        parts = urlsplit(target)
        assert parts.scheme == "https", target
        assert "." in parts.netloc, target
    for target in re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", source.read_text()):
        assert (source.parent / target).exists(), f"{source.name} points at {target}"


def test_anchors_of_the_readme_are_there(site):
    links = re.findall(r"\]\(docs/([^)#]+)\.md#([^)]+)\)", (ROOT / "README.md").read_text())
    for name, anchor in links:
        assert anchor in site.anchors(f"{name}.html"), f"{name} has no {anchor}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1300])
def test_pages_ask_nobody_else_and_fit(address, chromium, width, scheme):
    asked, complaints = [], []
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    with contextlib.closing(chromium.new_context(**options)) as context:
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        for name in SHOWN:
            page.goto(f"{address}/{name}", wait_until="networkidle")
            # Wide tables and signatures scroll by themselves; the page does not.
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), name
            colours = page.evaluate("document.body.dataset.mdColorScheme")
            assert colours == {"light": "default", "dark": "slate"}[scheme]
        page.goto(f"{address}/index.html")
        for image in page.locator("article img").all():
            assert image.evaluate("image => image.naturalWidth") > 100
    assert [url for url in asked if not url.startswith(address)] == []
    assert complaints == []
