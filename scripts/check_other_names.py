"""Checks that names of other libraries' options, on the pages about coming from them, are in their newest releases.

    python scripts/check_other_names.py [page ...]

It downloads each library from PyPI (23 MB in all), and prints names that its files lack. Names are the code in the
first column of a page's tables; `...` and `*` stand for any text.
"""

import io
import json
import pathlib
import re
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator

from packaging.version import Version

ROOT = pathlib.Path(__file__).parents[1] / "docs" / "coming_from"
LIBRARIES = {"deepspeed": "deepspeed", "fsdp2": "torchtitan", "maxtext": "maxtext", "megatron": "megatron-core"}
TEXT = (".py", ".yml", ".yaml", ".toml", ".json", ".md")
OF_PYTORCH = "fsdp2", "torchtitan"  # of that page, only the tables after this title are about the library


def fetched(url: str, accept: str = "*/*") -> bytes:
    """The bytes at an address."""
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=120) as answer:
        return answer.read()


def newest(library: str) -> tuple[str, str]:
    """(The newest release, its file's address): a wheel if it has one, else its source."""
    found = json.loads(fetched(f"https://pypi.org/simple/{library}/", "application/vnd.pypi.simple.v1+json"))
    version = max((v for v in map(Version, found["versions"]) if not v.is_prerelease), default=Version("0"))
    files = [file["url"] for file in found["files"] if f"-{version}" in file["filename"]]
    return str(version), min(files, key=lambda url: not url.endswith(".whl"))


def texts(url: str) -> str:
    """All text of a wheel or a source archive."""
    data = io.BytesIO(fetched(url))
    if url.endswith(".whl"):
        with zipfile.ZipFile(data) as wheel:
            parts = [wheel.read(name) for name in wheel.namelist() if name.endswith(TEXT)]
    else:
        with tarfile.open(fileobj=data) as archive:
            files = [archive.extractfile(member) for member in archive if member.name.endswith(TEXT)]
            parts = [file.read() for file in files if file is not None]
    return "\n".join(part.decode(errors="ignore") for part in parts)


def names(page: str) -> Iterator[tuple[int, str]]:
    """The options that a page names, each with its line."""
    starts = page != OF_PYTORCH[0]
    for number, line in enumerate((ROOT / f"{page}.md").read_text().splitlines(), 1):
        starts |= line == f"## {OF_PYTORCH[1]}"
        if starts and line.startswith("| ") and "available" not in line:
            for code in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
                yield number, code


def is_in(name: str, text: str) -> bool:
    """Whether a text has a name, or all parts of one with wildcards, with underscores or hyphens."""
    words = re.findall(r"[A-Za-z_][\w-]*", name.split("=")[0].split(":")[0].split(".")[-1] or name)
    parts = [word.strip("-_") for word in words]
    return all(part in text or part.replace("-", "_") in text for part in parts if len(part) > 2)


def main() -> int:
    """Checks the pages; returns how many names are missing."""
    missing = 0
    for page in sys.argv[1:] or LIBRARIES:
        version, url = newest(LIBRARIES[page])
        text, all_names = texts(url), list(names(page))
        lost = [(number, name) for number, name in all_names if not is_in(name, text)]
        print(f"{page}: {LIBRARIES[page]} {version} lacks {len(lost)} of {len(all_names)} names")
        for number, name in lost:
            print(f"  docs/coming_from/{page}.md:{number}: {name}")
        missing += len(lost)
    return missing


if __name__ == "__main__":
    sys.exit(min(main(), 1))
