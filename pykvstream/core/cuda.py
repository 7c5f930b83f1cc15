"""A CUDA card as a device, and the kernels that its tapes need.

Source: ``include/kvstream/device.h``, ``kernel.h``.
Holds: ``CudaDevice``, ``CudaPlanner``, ``KernelKey``, ``card_flags``, ``kernel_sources``, ``kernel_options``,
``kernels_digest``, ``open_device``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pykvstream._ffi import ffi, lib
from pykvstream.core.device import Device, DeviceFlag, make_device
from pykvstream.core.handle import Handle
from pykvstream.core.status import check, make_struct
from pykvstream.errors import InvalidArgument, Unsupported

CPU = "cpu"
CUDA = "cuda"
CARD_SWITCHES = {"early": DeviceFlag.NO_EARLY, "graphs": DeviceFlag.NO_GRAPHS}
"""Settings behind a card's name that are ``on`` or ``off``, and what switches each off. No bit depends on them."""


@dataclass(frozen=True, slots=True)
class KernelKey:
    """What an image of kernels is made of: a source of the library, macros, an architecture (90 for sm_90)."""

    source: str
    macros: tuple[tuple[str, int], ...]
    arch: int

    def __str__(self) -> str:
        return " ".join((f"{self.source} for sm_{self.arch}", *(f"{name}={value}" for name, value in self.macros)))


MAX_WAIT_LIMIT_S = 86400.0
"""The longest limit of a wait for a card, in seconds."""


class CudaDevice(Device):
    """The card with the driver's number ``ordinal``.

    ``wait_limit_s``: how many seconds any wait for the card may take, by default 60. Past it the card is lost, see
    ``kvs_device_desc``: calls raise ``DeviceError`` at once until it is found to have finished.

    Raises ``Unsupported`` without a driver or with too old a card, ``NotFound`` where there is no such card,
    ``DeviceError``.
    """

    __slots__ = ()

    def __init__(
        self, ordinal: int = 0, *, flags: DeviceFlag = DeviceFlag.NONE, wait_limit_s: float | None = None
    ) -> None:
        if isinstance(ordinal, bool) or not isinstance(ordinal, int) or not 0 <= ordinal < 1 << 31:
            raise InvalidArgument(f"a card's number must be an integer of at least 0, got {ordinal!r}")
        desc = make_struct(
            "kvs_device_desc",
            flags=int(flags),
            backend=lib.KVS_BACKEND_CUDA,
            ordinal=ordinal,
            wait_limit_ns=_limit_ns(wait_limit_s),
        )
        cell = make_device(desc, f"no device {CUDA}:{ordinal}")
        self._hook_handle: Any = None
        self._chooser_handle: Any = None
        Handle.__init__(self, cell)

    def kernels(self) -> list[tuple[KernelKey, bool]]:
        """Images that the tapes sealed so far need, in a stable order, and whether each has been given."""
        count = ffi.new("uint32_t *")
        check(lib.kvs_kernel_count(self.ptr, count), self.ptr)
        return [self._kernel(index) for index in range(count[0])]

    def _kernel(self, index: int) -> tuple[KernelKey, bool]:
        key = make_struct("kvs_kernel_key")
        check(lib.kvs_kernel_get(self.ptr, index, key), self.ptr)
        macros = tuple((_text(key.names[i]), int(key.values[i])) for i in range(key.n_macros))
        return KernelKey(_text(key.source), macros, int(key.arch)), bool(key.has_image)

    def give_pack(self, pack: Any) -> int:
        """Load what is needed from a pack, an object with bytes such as a mapped file; returns how many images it had.

        Raises ``FormatError``, and nothing was loaded, for one that is damaged or of other kernels than the library's.
        """
        n_given = ffi.new("uint32_t *")
        with ffi.from_buffer(pack) as view:
            check(lib.kvs_kernel_give_pack(self.ptr, view, len(view), n_given), self.ptr)
        count: int = n_given[0]
        return count

    def give_kernel(self, index: int, image: bytes) -> None:
        """Load the image of the needed kernel of this number. Raises ``DeviceError`` where the driver refuses it."""
        check(lib.kvs_kernel_give(self.ptr, index, ffi.from_buffer(image), len(image)), self.ptr)


class CudaPlanner(CudaDevice):
    """A card of ``arch`` (90 for sm_90) that is not there: it seals tapes, lists their kernels and does nothing else.

    No driver is needed. Weights must be declared. Raises ``Unsupported`` for an architecture before sm_75.
    """

    __slots__ = ()

    def __init__(self, arch: int) -> None:
        if isinstance(arch, bool) or not isinstance(arch, int) or not 0 < arch < 1 << 16:
            raise InvalidArgument(f"an architecture must be a number such as 90, got {arch!r}")
        desc = make_struct("kvs_device_desc", backend=lib.KVS_BACKEND_CUDA, arch=arch)
        cell = make_device(desc, f"no kernels for sm_{arch}")
        self._hook_handle: Any = None
        self._chooser_handle: Any = None
        Handle.__init__(self, cell)


def _limit_ns(limit_s: float | None) -> int:
    if limit_s is None:
        return 0
    is_number = isinstance(limit_s, int | float) and not isinstance(limit_s, bool)
    if not is_number or not 1e-3 <= limit_s <= MAX_WAIT_LIMIT_S:
        raise InvalidArgument(
            f"the limit of a wait for a card must be 0.001 to {MAX_WAIT_LIMIT_S:.0f} seconds, got {limit_s!r}"
        )
    return round(limit_s * 1e9)


def _text(characters: Any) -> str:
    text: str = ffi.string(characters).decode("ascii")
    return text


def kernel_sources() -> dict[str, str]:
    """The sources of all kernels, by name: C++ without includes."""
    name, text = ffi.new("const char **"), ffi.new("const char **")
    found: dict[str, str] = {}
    while lib.kvs_kernel_get_source(len(found), name, text) == lib.KVS_OK:
        found[_text(name[0])] = _text(text[0])
    return found


def kernel_options() -> dict[str, str]:
    """What every kernel is compiled with: ``std``, and flags that are ``0`` or ``1``."""
    text = ffi.new("const char **")
    check(lib.kvs_kernel_get_options(text))
    language, *flags = _text(text[0]).split()
    return {"std": language, **dict(flag.split("=") for flag in flags)}


def kernels_digest() -> bytes:
    """What tells this library's kernels from another's, 32 bytes: of all sources and options."""
    digest = ffi.new("uint8_t[32]")
    check(lib.kvs_kernel_get_digest(digest))
    return bytes(ffi.buffer(digest))


def card_flags(settings: str) -> DeviceFlag:
    """The flags of settings as they stand behind a card's name: ``early=off``. Raises ``InvalidArgument``."""
    flags = DeviceFlag.NONE
    seen: set[str] = set()
    for setting in settings.split(","):
        name, _, value = setting.partition("=")
        if name not in CARD_SWITCHES or value not in ("on", "off") or name in seen:
            known = ", ".join(f"{each}=on|off" for each in CARD_SWITCHES)
            raise InvalidArgument(f"setting {setting!r} of a card: supported, each once: {known}")
        seen.add(name)
        flags |= CARD_SWITCHES[name] if value == "off" else DeviceFlag.NONE
    return flags


def open_device(name: str, n_threads: int = 0, wait_limit_s: float | None = None) -> Device:
    """A device by name: ``cpu``, ``cuda`` (the first card) or ``cuda:N``. ``wait_limit_s``: of a card.

    Raises ``Unsupported`` for another one.

    Behind a card's name settings may follow (``cuda:0,early=off``), which change its speed and no bit; they are for
    measurements and for finding faults. Raises ``InvalidArgument`` for one that is not known.
    """
    if name == CPU:
        if wait_limit_s is not None:
            raise InvalidArgument("the limit of a wait is for cards; the CPU has none")
        return Device(n_threads)
    place, comma, settings = name.partition(",") if isinstance(name, str) else ("", "", "")
    kind, _, number = place.partition(":")
    is_card = kind == CUDA and (place == CUDA or (number.isascii() and number.isdigit()))
    if not is_card:
        raise Unsupported(f"device {name!r} is not supported; supported: {CPU}, {CUDA}, {CUDA}:N")
    flags = card_flags(settings) if comma else DeviceFlag.NONE
    return CudaDevice(int(number or 0), flags=flags, wait_limit_s=wait_limit_s)
