"""``pykvstream devices``: what ``--device`` can name here.

Holds: ``run``. Each card is opened as a model would open it, so that what is listed as usable is.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from pykvstream.cli.options import DevicesOptions
from pykvstream.core.cuda import CPU, CUDA, open_device
from pykvstream.core.device import DeviceInfo
from pykvstream.core.host import check_history
from pykvstream.errors import KvStreamError, NotFound
from pykvstream.kernels.nvrtc import has_compiler
from pykvstream.runtime.admission import host_memory_available

_GIB = 1 << 30
_NO_COMPILER = "no compiler for kernels: they must be in the cache or in a pack, or pip install 'pykvstream[cuda]'"
_COPIES_ROWS = "kernels do not reach host memory: rows go to history by copies"


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """One device: its name for ``--device``, what it is, and why it cannot be used, empty where it can.

    ``note``: what is missing on the way to a first start, or goes another way than on other cards.
    """

    device: str
    name: str = ""
    arch: int = 0
    memory_bytes: int = 0
    memory_free_bytes: int = 0
    refused: str = ""
    note: str = ""


def run(options: DevicesOptions) -> int:
    """Print the list."""
    lines = list_devices()
    if options.json:
        print(json.dumps({"devices": [asdict(line) for line in lines]}))
        return 0
    width = max(len(line.device) for line in lines)
    for line in lines:
        print(f"{line.device:<{width}}  {_describe(line)}")
    return 0


def list_devices() -> list[DeviceLine]:
    """The CPU, then every card of the driver; one line that says why, where there is no driver."""
    memory = host_memory_available()
    with open_device(CPU) as device:
        threads = device.info.n_threads
        isa = device.info.isa.name.lower()
    lines = [DeviceLine(CPU, f"{threads} threads, {isa}", 0, memory.total, memory.available)]
    while True:
        name = f"{CUDA}:{len(lines) - 1}"
        try:
            with open_device(name) as device:
                check_history(device, _GIB)
                lines.append(_of_card(name, device.info))
        except NotFound as error:
            if len(lines) == 1:
                lines.append(DeviceLine(CUDA, refused=str(error)))
            return lines
        except KvStreamError as error:
            lines.append(DeviceLine(name, refused=str(error)))
            if not _has_more(name, error):
                return lines


def _of_card(name: str, info: DeviceInfo) -> DeviceLine:
    notes = ("" if has_compiler() else _NO_COMPILER, "" if info.maps_history else _COPIES_ROWS)
    note = "; ".join(note for note in notes if note)
    return DeviceLine(name, info.name, info.arch, info.memory_bytes, info.memory_free_bytes, note=note)


def _has_more(name: str, error: KvStreamError) -> bool:
    """Whether a refusal is about this card rather than about the driver."""
    text = str(error)
    return "cannot be pinned" in text or ("the card" in text and name in text)


def _describe(line: DeviceLine) -> str:
    if line.refused:
        return f"not usable: {line.refused}"
    arch = f"sm_{line.arch}, " if line.arch else ""
    note = f"; {line.note}" if line.note else ""
    return f"{line.name}, {arch}{line.memory_free_bytes / _GIB:.1f} of {line.memory_bytes / _GIB:.1f} GiB free{note}"
