"""Plant each fault of ``tests/meta/sabotage`` in a copy of the tree and see which test notices.

usage: ``python tools/sabotage.py [--only NAME ...] [--sample N --seed S] [--jobs N]``

A sabotage is a TOML file: ``file`` (what is edited), ``old`` (text that occurs there exactly once), ``new`` (what
replaces it), ``breaks`` (one sentence), ``catcher`` (a C test such as ``native/test_ring``, or a pytest node id) and,
where a failed assertion is not what the fault leads to, ``ends``: ``hangs``, or ``crashes``, which may hang or fail.

Order: one tree is copied to ``build/sabotage`` and built there. Every catcher must pass before anything is edited.
Then, sabotage by sabotage: edit, rebuild what changed, run the catcher; and only where it notices nothing, all fast
tests.
Holds: exit status 0 only if every text was found once and every sabotage was noticed.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "meta" / "sabotage"
NATIVE = "native/"
ENDS = ("fails", "hangs", "crashes")
# What reads memory that is gone crashes, or waits for a lock in it, or finds nonsense.
ALSO = {"crashes": ("hangs", "fails")}
COPIED = (".ci", "docs", "examples", "fuzz", "include", "native", "pykvstream", "tests", "tools")
LEFT_OUT = frozenset({"__pycache__", ".hypothesis"})
# The list's own test finds every edited text missing.
BESIDE_THE_POINT = "tests/meta/test_sabotage_list.py"
# Whether a test notices is asked, not which example shows it best: see tests/conftest.py.
PROFILE = "--hypothesis-profile=first-failure"

CATCHER_S = 120
SUITE_S = 1800


class SabotageError(Exception):
    """The list or the tree is not as the run needs it."""


@dataclass(frozen=True, slots=True)
class Sabotage:
    """One edit, and the test that must notice it."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    catcher: str
    ends: str = "fails"

    @property
    def c_test(self) -> str | None:
        """Name of the C test that catches it; None for a Python test."""
        return self.catcher.removeprefix(NATIVE) if self.catcher.startswith(NATIVE) else None

    def edited(self, text: str) -> str:
        """Return the text of ``file`` with the edit. Raises ``SabotageError`` unless ``old`` occurs exactly once."""
        if text.count(self.old) != 1:
            raise SabotageError(f"{self.name}: the old text occurs {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


def load(path: Path) -> Sabotage:
    """Read one sabotage. Raises ``SabotageError`` naming what is missing or unknown."""
    fields = tomllib.loads(path.read_text(encoding="utf-8"))
    known, needed = set(Sabotage.__slots__) - {"name"}, set(Sabotage.__slots__) - {"name", "ends"}
    if not (needed <= set(fields) <= known and all(isinstance(value, str) for value in fields.values())):
        raise SabotageError(f"{path.name}: needs {sorted(needed)} and may have 'ends', has {sorted(fields)}")
    sabotage = Sabotage(path.stem, **fields)
    if sabotage.old == sabotage.new or sabotage.ends not in ENDS:
        raise SabotageError(f"{path.name}: an edit that changes something, and an end of {ENDS}")
    return sabotage


def load_all(folder: Path = LIST) -> list[Sabotage]:
    return [load(path) for path in sorted(folder.glob("*.toml"))]


@dataclass(frozen=True, slots=True)
class End:
    """How a test run ended: one of ``ENDS``, ``passes``, or what kept it from running; and its first complaint."""

    kind: str
    complaint: str = ""


class Tree:
    """The copy, and its build."""

    def __init__(self, root: Path, jobs: int) -> None:
        self.root = root
        self.sources = root / "tree"
        self.build = root / "native"
        self._jobs = jobs

    def prepare(self) -> None:
        """Bring the copy up to date and build all of it."""
        self._copy()
        if not (self.build / "build.ninja").exists():
            options = ("--buildtype=release", "-Dnative_tests=true")
            self._call("meson", "setup", *options, str(self.build), str(self.sources))
        self._compile()
        module = self.build / "pykvstream" / "_native.abi3.so"
        link = self.sources / "pykvstream" / "_ffi" / module.name
        if not link.is_symlink():
            link.symlink_to(module)

    def _copy(self) -> None:
        wanted = {path.relative_to(ROOT) for path in _files()}
        for path in wanted:
            target = self.sources / path
            if not (target.exists() and filecmp.cmp(ROOT / path, target, shallow=False)):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / path, target)
        there = [path for path in self.sources.rglob("*") if path.is_file() and not path.is_symlink()]
        for path in there:
            if path.relative_to(self.sources) not in wanted:
                path.unlink()

    @contextmanager
    def edited(self, sabotage: Sabotage) -> Iterator[None]:
        """The tree with one edit, rebuilt as far as its catcher needs; as before when left."""
        path = self.sources / sabotage.file
        before = path.read_text(encoding="utf-8")
        self._write(path, sabotage.edited(before))
        try:
            self._compile(sabotage)
            yield
        finally:
            self._write(path, before)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Bytecode is matched to its source by seconds and size: two edits within a second may look alike.
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            stale.unlink()

    def _compile(self, sabotage: Sabotage | None = None) -> None:
        targets: list[str] = []
        if sabotage is not None:
            c_test = sabotage.c_test
            targets = ["pykvstream/_native.abi3.so" if c_test is None else f"tests/native/{c_test}"]
        self._call("ninja", "-C", str(self.build), "-j", str(self._jobs), *targets)

    def _call(self, *command: str) -> None:
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SabotageError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")

    def run(self, sabotage: Sabotage) -> End:
        """Run the catcher of one sabotage."""
        if sabotage.c_test is not None:
            return self._run([str(self.build / "tests" / "native" / sabotage.c_test)], CATCHER_S)
        return self.pytest([sabotage.catcher], CATCHER_S)

    def pytest(self, arguments: Sequence[str], limit_s: float) -> End:
        options = ("-x", "--tb=short", "-p", "no:cacheprovider", PROFILE)
        return self._run([sys.executable, "-m", "pytest", *options, *arguments], limit_s)

    def run_fast_suite(self) -> End:
        """Run every test but the slow ones and end with the first that notices something."""
        self._compile()
        meson = ["meson", "test", "-C", str(self.build), "--no-rebuild", "--num-processes", str(self._jobs)]
        end = self._run(meson, SUITE_S)
        if end.kind == "hangs":
            return end
        if end.kind != "passes":  # meson's status is the number of tests that did not pass
            return End("fails" if end.complaint else "crashes", end.complaint)
        spread = ["-n", str(self._jobs)] if self._jobs > 1 else []
        return self.pytest([*spread, "-m", "not slow", f"--ignore={BESIDE_THE_POINT}", "tests"], SUITE_S)

    def _run(self, command: Sequence[str], limit_s: float) -> End:
        # The tree before everything, an editable install of the original too.
        paths = [str(self.sources), *filter(None, [os.environ.get("PYTHONPATH")])]
        installed = os.pathsep.join(str(path) for path in (ROOT / "build").glob("cp*"))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MESONPY_EDITABLE_SKIP": installed}
        running = subprocess.Popen(
            command,
            cwd=self.sources,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = running.communicate(timeout=limit_s)
        except BaseException as error:
            os.killpg(running.pid, signal.SIGKILL)  # workers of the test too
            running.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return End("hangs", f"after {limit_s} s")
            raise
        return end_of(running.returncode, output)


def _files() -> Iterator[Path]:
    """Yield what a checkout holds and builds or tests read."""
    yield from (path for path in ROOT.iterdir() if path.is_file())
    for folder in COPIED:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix != ".so" and not LEFT_OUT & set(path.parts):
                yield path


def end_of(status: int, output: str) -> End:
    """Return how a test run ended, from the exit status (``-signal`` where one ended it) and what was printed."""
    complaint = _first_complaint(output)
    if status == 0:
        return End("passes")
    # A C test goes on after a check that failed, and may then fall over what it has found. Pytest that spreads its
    # tests and stops at the first failure ends as if someone had interrupted it.
    is_first_of_many = status == 2 and "stopping after 1 failures" in output
    if status == 1 or is_first_of_many or (status < 0 and complaint):
        return End("fails", complaint)
    if status < 0:
        return End("crashes", f"signal {-status}")
    return End(f"cannot run ({status})", complaint or output[-2000:])


def _first_complaint(output: str) -> str:
    """Return the line in which a test says what it found: of a C test, of pytest, or which C test meson saw fail."""
    for line in output.splitlines():
        if ": failed: " in line:
            return line.partition(": failed: ")[2]
        if line.startswith("E  ") or (" FAIL " in line and "killed by signal" not in line):
            return line.removeprefix("E").strip()
    return ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one sabotage."""

    sabotage: Sabotage
    end: End
    is_caught: bool
    is_expected: bool
    seconds: float

    def line(self, width: int) -> str:
        who = self.sabotage.catcher if self.is_expected else "another test" if self.is_caught else "NOBODY"
        head = f"{self.sabotage.name:<{width}} {self.seconds:6.1f} s  {self.end.kind}"
        return f"{head}  {who.removeprefix('tests/')}  {self.end.complaint[:100]}"


def judge(tree: Tree, sabotage: Sabotage) -> Verdict:
    """Apply one sabotage and run who should notice it; all others only where that one does not."""
    begin = time.perf_counter()
    with tree.edited(sabotage):
        end = tree.run(sabotage)
        is_expected = is_caught = end.kind in (sabotage.ends, *ALSO.get(sabotage.ends, ()))
        if not is_expected:
            print(f"{sabotage.name}: {sabotage.catcher} {end.kind}; now all fast tests", flush=True)
            suite = tree.run_fast_suite()
            is_caught = suite.kind == "fails"
            end = suite if is_caught else end
    return Verdict(sabotage, end, is_caught, is_expected, time.perf_counter() - begin)


def check_clean(tree: Tree, chosen: Iterable[Sabotage]) -> None:
    """Raise ``SabotageError`` unless every catcher passes on the tree as it is."""
    nodes: dict[str, None] = {}
    for sabotage in chosen:
        if sabotage.c_test is None:
            nodes[sabotage.catcher] = None
        elif (end := tree.run(sabotage)).kind != "passes":
            raise SabotageError(f"{sabotage.catcher} {end.kind} before anything is edited: {end.complaint}")
    if nodes and (end := tree.pytest(list(nodes), SUITE_S)).kind != "passes":
        raise SabotageError(f"a catcher {end.kind} before anything is edited: {end.complaint}")


def choose(everything: list[Sabotage], only: Sequence[str], sample: int, seed: int) -> list[Sabotage]:
    """Return those asked for by name, or a sample, or all."""
    unknown = set(only) - {sabotage.name for sabotage in everything}
    if unknown:
        raise SabotageError(f"no sabotage is called {sorted(unknown)}")
    chosen = [sabotage for sabotage in everything if sabotage.name in only or not only]
    if 0 < sample < len(chosen):
        return sorted(random.Random(seed).sample(chosen, sample), key=lambda each: each.name)
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description="plant the faults of tests/meta/sabotage and see who notices")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this one; may be repeated")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="N of them, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # a test under way must end too
    begin = time.perf_counter()
    try:
        chosen = choose(load_all(), options.only, options.sample, options.seed)
        for sabotage in chosen:
            sabotage.edited((ROOT / sabotage.file).read_text(encoding="utf-8"))
        tree = Tree(ROOT / "build" / "sabotage", options.jobs)
        tree.prepare()
        check_clean(tree, chosen)
        width = max(len(sabotage.name) for sabotage in chosen)
        drawn = f" drawn by seed {options.seed}" if options.sample else ""
        seconds = time.perf_counter() - begin
        print(f"{len(chosen)} sabotages{drawn}; built, and all their catchers pass, after {seconds:.0f} s", flush=True)
        verdicts = []
        for sabotage in chosen:
            verdicts.append(judge(tree, sabotage))
            print(verdicts[-1].line(width), flush=True)
    except SabotageError as error:
        print(error, file=sys.stderr)
        return 2
    survivors = sum(not verdict.is_caught for verdict in verdicts)
    elsewhere = sum(verdict.is_caught and not verdict.is_expected for verdict in verdicts)
    seconds = time.perf_counter() - begin
    print(f"{len(verdicts) - survivors} caught ({elsewhere} by another test than expected), {survivors} survived")
    print(f"all of it: {seconds:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
