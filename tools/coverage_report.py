"""Report which lines of a folder the runs of a gcov build have reached, file by file, and fail below a percentage.

usage: coverage_report.py BUILD FOLDER [--least PERCENT], with a folder of native/
Source: gcov's JSON intermediate format, version 1 or 2.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

LEAST_PERCENT = 95.0
ROOT = Path(__file__).resolve().parents[1]
Lines = dict[int, int]
"""How often each line that holds code was reached."""


def reports(build: Path, folder: str) -> Iterator[dict[str, Any]]:
    """What gcov says about the objects of a folder, whose names begin with its path below ``native``."""
    prefix = folder.removeprefix("native/").replace("/", "_")
    for notes in sorted(build.rglob(f"{prefix}_*.gcno")):
        command = ["gcov", "--json-format", "--stdout", str(notes.resolve())]
        done = subprocess.run(command, cwd=build, capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            yield json.loads(line)


def reached(build: Path, folder: str) -> dict[str, Lines]:
    """Lines of the folder's files by name. A line counts as reached where any object
    that holds it has."""
    found: dict[str, Lines] = defaultdict(lambda: defaultdict(int))
    for report in reports(build, folder):
        for file in report["files"]:
            path = Path(build, file["file"]).resolve()
            if path.is_relative_to(ROOT / folder):
                lines = found[path.relative_to(ROOT).as_posix()]
                for line in file["lines"]:
                    lines[line["line_number"]] += line["count"]
    return found


def runs(numbers: list[int]) -> str:
    """``3-5 9`` for 3, 4, 5, 9."""
    groups = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    ends = [(members[0][1], members[-1][1]) for members in (list(group) for _, group in groups)]
    return " ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("folder")
    parser.add_argument("--least", type=float, default=LEAST_PERCENT)
    options = parser.parse_args()
    n_lines = n_missed = 0
    for name, lines in sorted(reached(options.build, options.folder).items()):
        missed = [number for number, count in lines.items() if count == 0]
        n_lines += len(lines)
        n_missed += len(missed)
        share = 100 * (1 - len(missed) / len(lines))
        print(f"{share:6.1f} %  {len(lines) - len(missed):5} of {len(lines):5}  {name}  {runs(missed)}")
    if n_lines == 0:
        print(f"no line of {options.folder} is in {options.build}", file=sys.stderr)
        return 1
    share = 100 * (1 - n_missed / n_lines)
    print(f"{share:6.2f} %  {n_lines - n_missed:5} of {n_lines:5}  {options.folder} (at least {options.least} %)")
    return 0 if share >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
