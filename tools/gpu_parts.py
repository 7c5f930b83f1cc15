"""What needs a card, in parts that go on where they were: one line for each figure, beside what is predicted.

    tools/gpu.sh [--list] [--again] [--seconds N] [PART...]

Without parts all of them, in the order of ``--list``: what is worth most comes first. Commands that have ended well,
with all their figures, are not run again; ``--again`` forgets them. ``--seconds`` (540): no command begins that is not
likely to end by then, and one that goes on beyond is ended; code 3 says that something is left. Logs, figures
(``figures.txt``) and what is done lie in ``build/gpu``; where the environment has ``OUT``, they are copied there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "gpu"
KEPT = Path(tempfile.gettempdir()) / "kvstream-27b.gguf"
SMALL = Path(tempfile.gettempdir()) / "kvstream-small.gguf"
TESTS = ("-m", "pytest", "-p", "no:cacheprovider", "--tb=short")
JOBS = os.environ.get("JOBS", str(os.cpu_count() or 8))
DECODE = ("-m", "tests.bench.cuda_decode")
ANSWER = (
    "-m", "pykvstream", "generate", "demo-hybrid", "--device", "cuda", "--wait-limit", "600", "--raw",
    "-p", "Once upon a time", "-n", "4", "--temp", "0",
)  # fmt: skip
NOTHING = "NOTHING FOUND"


@dataclass(frozen=True, slots=True)
class Figure:
    """What a group of a pattern finds in the output, beside what is predicted."""

    name: str
    pattern: str
    predicted: str


@dataclass(frozen=True, slots=True)
class Command:
    """Arguments of Python, or of ``tool`` before it; about how many seconds it takes."""

    seconds: int
    arguments: tuple[str, ...]
    figures: tuple[Figure, ...] = ()
    tool: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    what: str
    commands: tuple[Command, ...]

    @property
    def seconds(self) -> int:
        return sum(command.seconds for command in self.commands)


def passed(predicted: str) -> tuple[Figure, ...]:
    return (Figure("tests", r"(\d+ passed.*)", predicted),)


def resident(rows: int, predicted: str, name: str = "") -> Figure:
    return Figure(f"{name or 'resident'}, {rows} rows", rf"resident, {rows} rows +(.*)", predicted)


def streamed(rows: int, predicted: str) -> Figure:
    return Figure(f"streamed, {rows} rows", rf"streamed, {rows} rows +(.*)", predicted)


def launched(rows: int, predicted: str) -> Figure:
    return Figure(f"on the card, copies too, {rows} rows", rf"( +[\d.]+ us +[\d.]+) of all, {rows} rows", predicted)


def decode(seconds: int, *arguments: str, figures: tuple[Figure, ...]) -> Command:
    return Command(seconds, (*DECODE, *arguments), figures)


def whole(seconds: int, *arguments: str, figures: tuple[Figure, ...]) -> Command:
    """The 27B shape, whose file stays."""
    return decode(
        seconds, "--layers", "64", "--type", "IQ4_XS", "--head", "Q6_K", "--file", str(KEPT), "--steps", "24",
        *arguments, figures=figures,
    )  # fmt: skip


def shaped(seconds: int, shape: str, path: Path) -> Command:
    """A random file, which stays."""
    found = Figure("file", rf"^{shape}: (.*)$", "there")
    return Command(seconds, ("-m", "tests.bench.shaped_file", shape, str(path)), (found,))


def long(seconds: int, *arguments: str) -> Command:
    """Lines of which each says ``same``; one that does not ends the command with an error."""
    figures = (Figure("runs", r"^(.*  (?:same|DIFFERENT)  .*)$", "same"),)
    return Command(seconds, ("-m", "tests.gpu.long_promises", *arguments), figures)


HASH = (Figure("verdict", r"^(one hash|hashes differ)$", "one hash"),)
PARTS = (
    Part("promises", "placement, streaming, width and repetition change no bit; card against CPU", (
        Command(50, (*TESTS, "tests/gpu/test_cuda_promises.py"), passed("25 passed")),
    )),
    Part("hashes", "one hash of logits, early launches and graphs on and off, 20 times each", (
        Command(20, ("-m", "tests.bench.card_hashes"), HASH),
    )),
    Part("decode", "passes over layers as wide as those of a 27B model, IQ4_XS", (
        decode(20, "--type", "IQ4_XS", "--rows", "1,6", figures=(
            resident(1, "1.10 ms (1.0 on the card)"), resident(6, "1.8 ms"),
        )),
        decode(30, "--type", "IQ4_XS", "--rows", "1,6", "--device", "cuda,graphs=off", "--kernels", figures=(
            resident(1, "1.4 ms"), launched(1, "1,000 us, 60 kernels and copies"), launched(6, "64 kernels and copies"),
        )),
        decode(15, "--type", "IQ4_XS", "--rows", "1,6", "--device", "cuda,graphs=off,early=off", figures=(
            resident(1, "1.55 ms"),
        )),
    )),
    Part("whole", "the shape of a 27B file, IQ4_XS and a head of Q6_K, behind 8,192 tokens", (
        whole(50, "--rows", "1,6", figures=(
            resident(1, "6.9 ms, 145 tokens/s"), resident(6, "9.4 ms"),
        )),
        whole(30, "--rows", "1,6", "--device", "cuda,graphs=off", "--kernels", figures=(
            resident(1, "7.0 ms"), resident(6, "9.5 ms"), launched(1, "454 kernels and copies"),
            launched(6, "486 kernels and copies"),
        )),
    )),
    Part("front", "the sampling front: its words are the CPU's; what it takes of 248,320 logits", (
        Command(45, (*TESTS, "tests/gpu/test_kernels_front.py", "-rs"), passed("all passed, none skipped")),
        Command(15, (*TESTS, "tests/gpu/test_kernels_speed.py", "-k", "front"), (
            Figure("chunks + merge", r"^front of (.*)$", "normal, 1 row: below 20 us"),
        )),
    )),
    Part("long", "the promises at full length: every arena and width says the same", (
        shaped(30, "small", SMALL),
        long(180, "demo-hybrid", str(SMALL), "--contexts", "4096,32768"),
        shaped(30, "27b", KEPT),
        long(300, str(KEPT), "--contexts", "98304", "--arenas", "smallest,512,1024"),
    )),
    Part("kernels", "every kernel against float64 and against itself, faults and waits on a stand-in", (
        Command(150, (*TESTS, "tests/gpu", "--ignore", "tests/gpu/test_cuda_promises.py",
                      "--ignore", "tests/gpu/test_kernels_speed.py", "-n", JOBS, "-v", "-rf"), passed("all passed")),
    )),
    Part("limits", "what is reached of what the card allows, from 8 Ki to 256 Ki tokens", (
        shaped(30, "27b", KEPT),
        Command(240, ("-m", "tests.bench.card_limits", str(KEPT), "--rings", "64,128"), (
            Figure("ceilings", r"^(bus .*)$", "bus 55 GB/s, device memory 4,550 GB/s"),
            Figure("passes", r"^((?:resident|arena|ring) .*)$", "resident 1.6 to 2 x the limit, arena 1.25 x"),
            Figure("prompts", r"^(prompt.*tokens/s)$", "5,200 tokens/s resident, as many in the arena"),
            Figure("idle", r"^(card at work.*)$", "6 %, gaps between kernels too"),
            Figure("host", r"^while recorded, (.*)$", "below 2 %"),
        )),
    )),
    Part("memcheck", "compute-sanitizer over a short answer: no error", (
        Command(60, ANSWER, (Figure("errors", r"ERROR SUMMARY: (.*)", "0 errors"),),
                ("compute-sanitizer", "--error-exitcode", "1", "--tool", "memcheck")),
    )),
    Part("streamed", "passes over 65,536 tokens that go through 64 slots, Q8_0", (
        decode(30, "--type", "Q8_0", "--tokens", "65536", "--rows", "1,6", figures=(
            resident(1, "2.2 ms"), streamed(1, "5.70 ms, 38.7 GB/s"), streamed(6, "6.03 ms"),
        )),
    )),
    Part("cuts", "each of three cuts equals itself, resident and streamed", (
        Command(90, ("-m", "tests.bench.card_hashes", "--cuts", "--steps", "24"), HASH),
    )),
    Part("late", "10,000 steps whose copies and operations begin late say the same, histories too", (
        long(180, "demo-hybrid", "--late-steps", "10000", "--contexts", "2048"),
    )),
    Part("types", "decode passes of other types", (
        decode(20, "--type", "Q4_K", "--rows", "1,6", figures=(
            resident(1, "1.1 to 1.3 ms (was 1.74)"), resident(6, "below 1.93 ms"),
        )),
        decode(20, "--type", "Q8_0", "--rows", "1,6", figures=(
            resident(1, "1.5 to 1.7 ms (was 2.07)"), resident(6, "below 2.34 ms"),
        )),
    )),
    Part("racecheck", "compute-sanitizer over a short answer: no hazard", (
        Command(240, ANSWER, (Figure("hazards", r"RACECHECK SUMMARY: (.*)", "0 hazards"),),
                ("compute-sanitizer", "--error-exitcode", "1", "--tool", "racecheck")),
    )),
    Part("prefill", "prompts behind 0, 32 Ki and 128 Ki tokens", (
        Command(120, ("-m", "tests.bench.cuda_prefill", "--depths", "0,32768,131072"), (
            Figure("tokens/s", r"^(.*tokens/s.*)$", "46,300 / 35,300 / 20,400"),
        )),
    )),
    Part("opening", "starts with the file of the whole part", (
        Command(60, ("-m", "tests.bench.cuda_opening", str(KEPT)), (
            Figure("beyond the bus", r"([\d.]+ s beyond the bus)", "1.3 to 1.6 s"),
        )),
    )),
    Part("attend", "attention alone", (
        Command(60, ("-m", "tests.bench.cuda_attend"), (Figure("attention", r"^(.*/s.*)$", "docs/cuda.md"),)),
    )),
)  # fmt: skip


def run(part: Part, command: Command, limit_s: float) -> tuple[str, str]:
    """How it ended: ``ok``, ``failed``, ``cut`` by the limit, or ``skipped``; and its output, which the log holds."""
    if command.tool and shutil.which(command.tool[0]) is None:
        return "skipped", f"no {command.tool[0]} here\n"
    words = [*command.tool, sys.executable, *command.arguments]
    log = FOLDER / f"{part.name}-{part.commands.index(command)}.log"
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            code = None
    return "cut" if code is None else "ok" if code == 0 else "failed", log.read_text("utf-8", errors="replace")


def figures_of(part: Part, command: Command, output: str) -> list[str]:
    lines = []
    for figure in command.figures:
        found = [" ".join(match.split()) for match in re.findall(figure.pattern, output, re.MULTILINE)]
        lines += [f"{part.name}: {figure.name}: {each} | predicted {figure.predicted}" for each in found or [NOTHING]]
    return lines


def tell(lines: list[str]) -> None:
    with (FOLDER / "figures.txt").open("a", encoding="utf-8") as file:
        for line in lines:
            print(line, flush=True)
            file.write(line + "\n")


def carry_out(parts: list[Part], seconds: float) -> int:
    done_file = FOLDER / "done.txt"
    done = set(done_file.read_text("utf-8").split("\n")) if done_file.exists() else set()
    end = time.monotonic() + seconds
    has_failed, is_left = False, False
    for part in parts:
        for command in part.commands:
            name = " ".join((*command.tool, *command.arguments))
            left = end - time.monotonic()
            if name in done:
                continue
            if left < command.seconds:
                is_left = True
                continue
            begin = time.monotonic()
            how, output = run(part, command, left)
            figures = figures_of(part, command, output)
            how = "failed" if how == "ok" and any(NOTHING in line for line in figures) else how
            tell([f"{part.name}: {how} after {time.monotonic() - begin:.0f} s: {name}", *figures])
            has_failed |= how == "failed"
            is_left |= how == "cut"
            if how in ("ok", "skipped"):
                with done_file.open("a", encoding="utf-8") as file:
                    file.write(name + "\n")
            else:
                print("\n".join(output.splitlines()[-25:]), flush=True)
    return 1 if has_failed else 3 if is_left else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--list", action="store_true", help="name the parts and about how long each takes")
    parser.add_argument("--again", action="store_true", help="forget what is done")
    parser.add_argument("--seconds", type=float, default=540)
    parser.epilog = "\n".join(f"{part.name:<10} {part.seconds:>4} s  {part.what}" for part in PARTS)
    options = parser.parse_args()
    if options.list:
        print(parser.epilog)
        return 0
    unknown = set(options.parts) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"no part is named {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in PARTS)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    if options.again:
        (FOLDER / "done.txt").unlink(missing_ok=True)
    wanted = [part for part in PARTS if not options.parts or part.name in options.parts]
    try:
        return carry_out(wanted, options.seconds)
    finally:
        if "OUT" in os.environ:
            shutil.copytree(FOLDER, Path(os.environ["OUT"]) / "gpu", dirs_exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
