"""Text and code that the model learns from: documentation and sources of permissively licensed Python packages.

    python -m tools.train_demo_hybrid.corpus OUT_DIR [--index URL]

Source distributions are taken from the package index that pip is configured for, at pinned versions and by their
SHA-256 once known. Of each: prose (``.rst .txt .md`` of documentation) and Python sources. Duplicates (by paragraph
for prose, by file for sources) are dropped. Packages in ``HELD_OUT`` never enter the training text.
Holds: ``build``, which writes ``train.txt.xz``, ``held_out.txt.xz`` and ``corpus.json`` (package, version, licence,
bytes).
"""

from __future__ import annotations

import argparse
import hashlib
import html
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

PACKAGES = {
    "django": "5.2.8", "sphinx": "8.2.3", "sqlalchemy": "2.0.44", "sympy": "1.14.0", "networkx": "3.5",
    "numpy": "2.3.4", "scipy": "1.16.3", "pandas": "2.3.3", "matplotlib": "3.10.7", "scikit-learn": "1.7.2",
    "statsmodels": "0.14.5", "astropy": "7.1.1", "xarray": "2025.10.1", "dask": "2025.10.0", "bokeh": "3.8.0",
    "twisted": "25.5.0", "tornado": "6.5.2", "celery": "5.5.3", "pyramid": "2.0.2", "flask": "3.1.2",
    "werkzeug": "3.1.3", "jinja2": "3.1.6", "click": "8.3.0", "pytest": "8.4.2", "pip": "25.3",
    "setuptools": "80.9.0", "attrs": "25.4.0", "nltk": "3.9.2", "ipython": "9.6.0", "wtforms": "3.2.1",
    "pygments": "2.19.2", "docutils": "0.22.2", "mako": "1.3.10", "biopython": "1.86", "aiohttp": "3.13.2",
    "requests": "2.32.5", "rich": "14.2.0", "cherrypy": "18.10.0", "bottle": "0.13.4", "kombu": "5.5.4",
}  # fmt: skip
"""Name to version; each is under an MIT, BSD, Apache, PSF or equally permissive licence (docutils: its public-domain
and BSD parts make up its text)."""

HELD_OUT = frozenset({"flask", "werkzeug", "networkx", "attrs"})
PROSE_BYTES, CODE_BYTES = 90 << 20, 40 << 20
_PROSE = (".rst", ".txt", ".md")
_SKIPPED = re.compile(
    r"(^|/)(tests?|testing|locale|licenses?|vendor|_vendor|third_?party|data|fixtures|changelog)(/|$)", re.I
)
_SKIPPED_NAMES = re.compile(
    r"(license|copying|authors|thanks|changelog|changes|news|history|requirements|sources|top_level)", re.I
)
_LARGEST_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """One package as it entered the corpus."""

    name: str
    version: str
    licence: str
    sha256: str
    prose_bytes: int
    code_bytes: int
    is_held_out: bool


def index_url() -> str:
    """The index that pip would use."""
    result = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "https://pypi.org/simple"


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=120) as response:
        content: bytes = response.read()
    return content


def sdist(index: str, name: str, version: str) -> bytes:
    """The source distribution of a version, checked against the hash that the index states."""
    page_url = f"{index.rstrip('/')}/{name}/"
    page = fetch(page_url).decode()
    normal = re.sub(r"[-_.]+", "[-_.]+", name)
    pattern = re.compile(rf'href="([^"]*/{normal}-{re.escape(version)}\.tar\.gz[^"]*)"', re.I)
    match = pattern.search(page)
    if match is None:
        raise SystemExit(f"{name} {version}: no source distribution on the index")
    link = urllib.parse.urljoin(page_url, html.unescape(match.group(1)))
    url, _, fragment = link.partition("#")
    content = fetch(url)
    stated = fragment.removeprefix("sha256=")
    if fragment.startswith("sha256=") and hashlib.sha256(content).hexdigest() != stated:
        raise SystemExit(f"{name} {version}: the file does not have the hash that the index states")
    return content


def _licence(text: str) -> str:
    match = re.search(r"^License-Expression: (.+)$", text, re.M) or re.search(
        r"^Classifier: License :: OSI Approved :: (.+)$", text, re.M
    )
    if match is None:
        match = re.search(r"^License: (.{2,60})$", text, re.M)
    return match.group(1).strip() if match else "see the package"


def members(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Regular files of useful size, by path, in the archive's order."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for member in tar:
            if member.isfile() and 200 < member.size <= _LARGEST_FILE:
                file = tar.extractfile(member)
                if file is not None:
                    yield member.name.partition("/")[2], file.read()


class Texts:
    """Collects prose and code and forgets what it has seen before."""

    def __init__(self) -> None:
        self.prose: list[str] = []
        self.code: list[str] = []
        self._seen: set[bytes] = set()

    def _is_new(self, text: str) -> bool:
        key = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=12).digest()
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def add_prose(self, text: str) -> int:
        kept = []
        for paragraph in re.split(r"\n\s*\n", text):
            is_short = len(paragraph) < 60
            if is_short or self._is_new(paragraph):
                kept.append(paragraph)
        joined = "\n\n".join(kept)
        if len(joined) < 400:
            return 0
        self.prose.append(joined)
        return len(joined)

    def add_code(self, text: str) -> int:
        if not self._is_new(text):
            return 0
        self.code.append(text)
        return len(text)


def _read(content: bytes) -> str | None:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    lines = text.splitlines()
    is_data = not lines or max(map(len, lines)) > 2000 or len(text) / len(lines) > 300
    return None if is_data else text.replace("\r\n", "\n")


def add_package(texts: Texts, archive: bytes) -> tuple[int, int, str]:
    """Returns bytes of prose and of code that were new, and the licence."""
    prose = code = 0
    licence = "see the package"
    for path, content in members(archive):
        if path == "PKG-INFO":
            licence = _licence(content.decode("utf-8", "replace"))
        name = path.rsplit("/", 1)[-1]
        if _SKIPPED.search(path) or _SKIPPED_NAMES.match(name):
            continue
        text = _read(content) if name.endswith((*_PROSE, ".py")) else None
        if text is None:
            continue
        if name.endswith(_PROSE):
            prose += texts.add_prose(text)
        else:
            code += texts.add_code(text)
    return prose, code, licence


def _trim(parts: list[str], most: int) -> list[str]:
    """Every document in a fixed shuffled order, up to a number of characters."""
    order = sorted(parts, key=lambda text: hashlib.sha256(text.encode()).digest())
    kept, total = [], 0
    for text in order:
        if total + len(text) <= most:
            kept.append(text)
            total += len(text)
    return kept


def build(out: Path, index: str) -> None:
    """Fetch, collect and write everything."""
    out.mkdir(parents=True, exist_ok=True)
    train, held_out = Texts(), Texts()
    sources = []
    for name, version in sorted(PACKAGES.items()):
        archive = sdist(index, name, version)
        target = held_out if name in HELD_OUT else train
        prose, code, licence = add_package(target, archive)
        digest = hashlib.sha256(archive).hexdigest()
        sources.append(Source(name, version, licence, digest, prose, code, name in HELD_OUT))
        print(f"{name} {version}: {prose >> 10} KiB prose, {code >> 10} KiB code, {licence}", flush=True)
    for label, texts, share in (("train", train, 1), ("held_out", held_out, 20)):
        documents = _trim(texts.prose, PROSE_BYTES // share) + _trim(texts.code, CODE_BYTES // share)
        documents.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
        raw = "\x00".join(text.replace("\x00", "") for text in documents).encode()
        packed = lzma.compress(raw, preset=6)
        (out / f"{label}.txt.xz").write_bytes(packed)
        print(f"{label}: {len(documents)} documents, {len(raw) >> 20} MiB, {len(packed) / 2**20:.1f} MiB packed")
    (out / "corpus.json").write_text(json.dumps([asdict(source) for source in sources], indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--index", default=None)
    options = parser.parse_args()
    build(options.out, options.index or index_url())


if __name__ == "__main__":
    main()
