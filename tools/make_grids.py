"""Write the codebooks of the IQ types: ``native/kernels/grids.h`` for C, ``pykvstream/gguf/grids.py`` for Python.

Codebooks are facts of the file format. The ``gguf`` package carries them as numbers, one per value of an entry: the
place of the value in a short list of levels. This script packs those places into one 16-bit word per entry, element 0
lowest: eight places of 2 bits where the list has three levels, four of 4 bits where it is longer.

Run it from the top of the tree where ``gguf`` is installed; the build itself needs only the two files.
"""

from __future__ import annotations

import base64
import textwrap
from pathlib import Path

import gguf.quants
import numpy as np
import numpy.typing as npt

TYPES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")
WORDS_PER_LINE = 14
C_PATH = Path("native/kernels/grids.h")
PYTHON_PATH = Path("pykvstream/gguf/grids.py")

C_HEAD = """\
/* grids.h: the codebooks of the IQ types, one word per entry. Written by tools/make_grids.py; not edited by hand.
 *
 * An entry of an IQ1 or IQ2 table holds the places of eight values in the list of levels, 2 bits each, element 0
 * lowest; one of an IQ3 table the places of four values, 4 bits each. Levels: IQ1 -1, 0, 1; IQ2 8, 25, 43; IQ3_XXS 4,
 * 12, 20, 28, 36, 44, 52, 62; IQ3_S the odd numbers 1 to 15. IQ1_M shares the table of IQ1_S.
 * Without includes, because kernels include it: they say KVS_GRID_TABLE in their own way.
 */
#ifndef KVS_NATIVE_KERNELS_GRIDS_H
#define KVS_NATIVE_KERNELS_GRIDS_H

#ifndef KVS_GRID_TABLE
#define KVS_GRID_TABLE static const unsigned short
#endif

"""

PYTHON_HEAD = '''\
"""Codebooks of the IQ types. Written by ``tools/make_grids.py``; not edited by hand.

Shapes: ``grid(name)`` gives [entries, 8] (IQ1, IQ2) or [entries, 4] (IQ3) levels as int8. IQ1_M shares IQ1_S.
Holds: ``grid``.
"""

from __future__ import annotations

import base64
from typing import Final

import numpy as np
import numpy.typing as npt


def grid(name: str) -> npt.NDArray[np.int8]:
    """Return the codebook of a type, unpacked: ``"IQ2_S"`` gives 1024 entries of eight levels."""
    levels, packed = _GRIDS[name]
    bits = 2 if len(levels) == 3 else 4
    words = np.frombuffer(base64.b85decode(packed), "<u2")
    places = words[:, None] >> np.arange(0, 16, bits, dtype=np.uint16) & np.uint16((1 << bits) - 1)
    entries: npt.NDArray[np.int8] = np.array(levels, np.int8)[places]
    return entries


'''


def entry_words(name: str) -> npt.NDArray[np.uint16]:
    """One word per entry of the codebook of ``name``."""
    kind = getattr(gguf.quants, name)
    kind.init_grid()
    levels = np.array(kind.grid_map, np.float32)
    entries = kind.grid.reshape(kind.grid_shape)
    places = np.searchsorted(levels, entries)
    if not (levels[places] == entries).all():
        raise SystemExit(f"{name} has values outside its list of levels")
    bits = 16 // kind.grid_shape[1]
    shifted = places.astype(np.uint32) << np.arange(0, 16, bits, dtype=np.uint32)
    words: npt.NDArray[np.uint16] = np.bitwise_or.reduce(shifted, axis=1).astype(np.uint16)
    return words


def c_table(name: str) -> str:
    words = entry_words(name)
    lines = [
        "    " + " ".join(f"0x{word:04x}," for word in words[at : at + WORDS_PER_LINE])
        for at in range(0, len(words), WORDS_PER_LINE)
    ]
    body = "\n".join(lines).rstrip(",")
    return f"KVS_GRID_TABLE kvs_grid_{name.lower()}[{len(words)}] = {{\n{body}}};\n\n"


def python_entry(name: str) -> str:
    levels = ", ".join(str(level) for level in getattr(gguf.quants, name).grid_map)
    text = base64.b85encode(entry_words(name).astype("<u2").tobytes()).decode()
    lines = textwrap.wrap(text, 108, break_on_hyphens=False)
    body = "\n".join(f'        r"{line}"' for line in lines)
    return f'    "{name}": (\n        ({levels}),\n{body},\n    ),\n'


def main() -> None:
    C_PATH.write_text(C_HEAD + "".join(map(c_table, TYPES)) + "#endif\n", "utf-8")
    table = "_GRIDS: Final[dict[str, tuple[tuple[int, ...], str]]] = {\n" + "".join(map(python_entry, TYPES)) + "}\n"
    PYTHON_PATH.write_text(PYTHON_HEAD + table, "utf-8")


if __name__ == "__main__":
    main()
