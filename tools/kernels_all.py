"""Compile every kernel of an architecture and write what it takes into ``docs/kernels.md``.

    python tools/kernels_all.py [--arch sm_90] [--results FILE] [--seconds N] [-o docs/kernels.md]

Registers, spills and static shared memory are what NVRTC's assembler says (``ptxas -v``); the size is that of the whole
image, the seconds those of one thread. Results are kept line by line, so that an interrupted run goes on where it was;
with ``--seconds`` one ends in time and says how many are left, with code 3.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from pykvstream.cli.values import architectures
from pykvstream.core.cuda import KernelKey, kernel_options, kernel_sources, kernels_digest
from pykvstream.gguf import TYPES_BY_ID
from pykvstream.kernels.cache import digest_of
from pykvstream.kernels.nvrtc import compile_image, load_compiler
from pykvstream.runtime.catalogue import MIXES, catalogue

TYPE_MACROS = ("KVS_TYPE_K", "KVS_TYPE_V", "KVS_T0", "KVS_T1", "KVS_T2", "KVS_T3")
FUNCTION = re.compile(r"Compiling entry function '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


@dataclass(frozen=True, slots=True)
class Function:
    """One ``__global__`` function of an image; bytes of a thread but ``shared``, of a block."""

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


@dataclass(frozen=True, slots=True)
class Result:
    source: str
    macros: dict[str, int]
    functions: tuple[Function, ...]
    n_bytes: int
    seconds: float

    @property
    def spilled(self) -> int:
        return sum(each.spill_stores + each.spill_loads for each in self.functions)


def functions_of(log: str) -> tuple[Function, ...]:
    """What the assembler's report says, function by function."""
    found: list[Function] = []
    for part in log.split("Compiling entry function")[1:]:
        name = FUNCTION.search("Compiling entry function" + part)
        spills, used = SPILLS.search(part), USED.search(part)
        if name is None or spills is None or used is None:
            raise ValueError(f"the assembler's report cannot be read: {part[:200]!r}")
        stack, stores, loads = map(int, spills.groups())
        found.append(Function(name[1], int(used[1]), stack, stores, loads, int(used[2] or 0)))
    return tuple(found)


def measure(core: object, source: str, key: KernelKey) -> Result:
    log = io.StringIO()
    began = time.thread_time()
    image = compile_image(core, source, key, log)  # type: ignore[arg-type]
    seconds = time.thread_time() - began
    return Result(key.source, dict(key.macros), functions_of(log.getvalue()), len(image), seconds)


def load(path: Path) -> dict[str, Result]:
    """Results that were kept, by the digest of what each was made of."""
    found: dict[str, Result] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        item = json.loads(line)
        functions = tuple(Function(**each) for each in item["functions"])
        found[item["digest"]] = Result(item["source"], item["macros"], functions, item["n_bytes"], item["seconds"])
    return found


def measure_all(keys: list[KernelKey], path: Path, seconds: float) -> dict[str, Result]:
    """Results of all keys, or of as many as ``seconds`` allow."""
    sources, until = kernel_sources(), time.monotonic() + seconds
    digests = {key: digest_of(sources[key.source], key, str(kernel_options())) for key in keys}
    results = load(path)
    missing = [key for key in keys if digests[key] not in results]
    path.parent.mkdir(parents=True, exist_ok=True)
    core = load_compiler()
    with path.open("a", encoding="utf-8") as file, ThreadPoolExecutor() as workers:
        begun = {workers.submit(measure, core, sources[key.source], key): key for key in missing}
        for future in as_completed(begun):
            result, digest = future.result(), digests[begun[future]]
            results[digest] = result
            file.write(json.dumps({"digest": digest, **asdict(result)}) + "\n")
            file.flush()
            if time.monotonic() > until:
                workers.shutdown(cancel_futures=True, wait=False)
                break
    return {str(key): results[digest] for key, digest in digests.items() if digest in results}


def spread(values: Iterable[float], form: str = "{:.0f}") -> str:
    """``12`` or ``12 - 40``."""
    given = list(values)
    least, most = form.format(min(given)), form.format(max(given))
    return least if least == most else f"{least} - {most}"


def row(name: str, kind: str, results: list[Result]) -> str:
    functions = [each for result in results for each in result.functions]
    n_spilling = sum(result.spilled > 0 for result in results)
    spilled = max(result.spilled for result in results)
    cells = (
        name,
        kind,
        str(len(results)),
        spread(each.registers for each in functions),
        f"{n_spilling}, at most {spilled}" if n_spilling else "0",
        spread(each.shared for each in functions),
        spread((result.n_bytes / 1024 for result in results), "{:.0f}"),
        spread((result.seconds for result in results), "{:.1f}"),
    )
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| source | what | images | registers | that spill, bytes | shared bytes | KiB | seconds |\n"
    "|---|---|---|---|---|---|---|---|"
)


def by_shape(results: Iterable[Result]) -> Iterator[str]:
    """A line for each source and each choice of macros that are no types."""
    groups: defaultdict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        rest = (f"{name.removeprefix('KVS_')}={value}" for name, value in result.macros.items()
                if name not in TYPE_MACROS and (name != "KVS_DIM_V"))  # fmt: skip
        groups[result.source, " ".join(rest)].append(result)
    for (source, kind), group in sorted(groups.items()):
        yield row(source, kind, group)


def by_type(results: Iterable[Result], sources: tuple[str, ...], macros: tuple[str, ...]) -> Iterator[str]:
    """A line for each source and type, over images that read nothing else of that side."""
    groups: defaultdict[tuple[str, int], list[Result]] = defaultdict(list)
    for result in results:
        kinds = {result.macros[name] for name in macros if name in result.macros}
        if result.source in sources and len(kinds) == 1:
            groups[result.source, kinds.pop()].append(result)
    for (source, kind), group in sorted(groups.items()):
        yield row(source, TYPES_BY_ID[kind].name, group)


def page(arch: int, results: dict[str, Result], digest: str) -> str:
    every = list(results.values())
    spilling = sorted((result for result in every if result.spilled), key=lambda result: -result.spilled)
    n_functions = sum(len(result.functions) for result in every)
    named = ", ".join(f"{first} with {second}" for first, second in MIXES)
    lines = [
        f"# Kernels of sm_{arch}",
        "",
        "Made by `make kernels-all` (`tools/kernels_all.py`); do not edit. Registers, spills and static shared memory",
        "are what NVRTC's assembler reports (`ptxas -v`), seconds those of one thread, KiB those of whole images.",
        "",
        f"{len(every)} images with {n_functions} functions: {sum(each.n_bytes for each in every) / 2**20:.1f} MiB,"
        f" {sum(each.seconds for each in every):.0f} seconds of one thread; {len(spilling)} images spill registers.",
        f"Digest of the kernels: `{digest[:16]}`.",
        "",
        "Complete: each pair of types of keys and values with head sizes 64, 96, 128 and 256; each weight type alone,",
        f"and the mixes {named};",
        "dense and hybrid models, with and without experts. Matmuls that share a launch are compiled for the types",
        "that they mix: a model with another mix compiles its own.",
        "",
        "## By shape",
        "",
        HEAD,
        *by_shape(every),
        "",
        "## By weight type",
        "",
        HEAD,
        *by_type(every, ("matmul", "matmul_wide", "matmul_float", "embed"), ("KVS_T0", "KVS_T1", "KVS_T2", "KVS_T3")),
        "",
        "## By type of values",
        "",
        HEAD,
        *by_type(every, ("attend", "attend_mma", "kv_write"), ("KVS_TYPE_V",)),
    ]
    if spilling:
        lines += ["", "## What spills most", "", "| image | functions: bytes stored, loaded |", "|---|---|"]
        for result in spilling[:12]:
            macros = " ".join(f"{name.removeprefix('KVS_')}={value}" for name, value in result.macros.items())
            told = ", ".join(f"{each.name} {each.spill_stores}, {each.spill_loads}"
                             for each in result.functions if each.spill_stores + each.spill_loads)  # fmt: skip
            lines.append(f"| {result.source} {macros} | {told} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile every kernel of an architecture.")
    parser.add_argument("--arch", type=architectures, default=(90,))
    parser.add_argument("--results", type=Path, default=Path("build/kernels/results.jsonl"))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    (arch,), digest = args.arch, kernels_digest().hex()
    keys = catalogue(arch)
    results = measure_all(keys, args.results, args.seconds)
    print(f"{len(results)} of {len(keys)} kernels for sm_{arch} compiled", file=sys.stderr)
    if len(results) < len(keys):
        return 3
    text = page(arch, results, digest)
    if args.output is None:
        print(text, end="")
    else:
        args.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
