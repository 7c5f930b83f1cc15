"""Build step: make a C file that holds the sources of kernels as texts without includes.

Holds: ``main(source.cu..., output.c)``. ``#include "name"`` of a file beside the source is replaced by that file, once;
anything else that is included is an error, for nobody has it where kernels are compiled.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|(\S.*))$')


def amalgamate(path: Path, seen: set[Path] | None = None) -> str:
    """The text of a source with what it includes."""
    seen = set() if seen is None else seen
    seen.add(path.resolve())
    lines = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = INCLUDE.match(line)
        if match is None:
            lines.append(line)
            continue
        if match[1] is None:
            raise SystemExit(f"{path}:{number}: cannot include {match[2]}")
        other = path.parent / match[1]
        if other.resolve() not in seen:
            lines.append(amalgamate(other, seen))
    return "\n".join(lines)


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'    "{escaped}\\n"'


def main(arguments: list[str]) -> None:
    *sources, output = map(Path, arguments)
    parts = ['#include "backends/cuda/sources.h"\n\nconst kvs_cuda_source kvs_cuda_sources[] = {']
    for path in sorted(sources, key=lambda source: source.stem):
        text = amalgamate(path)
        if not text.isascii():
            raise SystemExit(f"{path}: not ASCII")
        parts.append(f'{{"{path.stem}",')
        parts += map(quoted, text.splitlines())
        parts.append("},")
    parts.append("{NULL, NULL}};\n")
    output.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
