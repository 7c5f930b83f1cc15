"""Every order of copies and operations that a deferred device may take, one after another.

A schedule is the list of choices at the places where more than one stream can go on; as text, a letter for each:
``C`` the compute stream, ``F`` the oldest copy without a gate, ``G`` the oldest one with a gate. Whoever runs the same
program again with the same text gets the same order, on the CPU and on a trace device.
Holds: ``Schedule``, ``explore``, ``sample``, ``replay``, ``Exploration``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pykvstream.core.device import Stream

LETTERS = {Stream.COMPUTE: "C", Stream.FREE: "F", Stream.GATED: "G"}
STREAMS = {letter: stream for stream, letter in LETTERS.items()}

Run = Callable[["Schedule"], None]
"""Runs a program from the same state as ever, with the schedule as the chooser of its device."""


@dataclass
class Schedule:
    """A chooser: first what ``asked`` says, then what ``draw`` says, by default the first of what is offered.

    ``offers`` and ``taken`` say what happened.
    """

    asked: Sequence[Stream] = ()
    draw: Callable[[Sequence[Stream]], Stream] = field(default=lambda options: options[0], repr=False)
    offers: list[tuple[Stream, ...]] = field(default_factory=list)
    taken: list[Stream] = field(default_factory=list)
    strays: int = 0

    def __call__(self, offered: frozenset[Stream]) -> Stream:
        options = tuple(sorted(offered))
        at = len(self.taken)
        chosen = self.asked[at] if at < len(self.asked) else self.draw(options)
        if chosen not in offered:
            self.strays += 1
            chosen = options[0]
        self.offers.append(options)
        self.taken.append(chosen)
        return chosen

    @property
    def text(self) -> str:
        return "".join(LETTERS[stream] for stream in self.taken)

    def follows(self) -> bool:
        """Whether the program offered what the schedule asked for, to the end."""
        return self.strays == 0 and len(self.taken) >= len(self.asked)

    def next(self) -> list[Stream] | None:
        """The choices that lead to the next schedule in depth-first order; None after the last one."""
        for at in range(len(self.taken) - 1, -1, -1):
            rest = self.offers[at][self.offers[at].index(self.taken[at]) + 1 :]
            if rest:
                return [*self.taken[:at], rest[0]]
        return None


@dataclass(frozen=True)
class Exploration:
    """How many schedules ran, whether they were all there are, and how many choices the longest took."""

    n_schedules: int
    is_complete: bool
    n_choices: int

    def __str__(self) -> str:
        kind = "all" if self.is_complete else "the first"
        return f"{kind} {self.n_schedules} schedules, up to {self.n_choices} choices each"


def _checked(run: Run, schedule: Schedule) -> Schedule:
    run(schedule)
    assert schedule.follows(), f"the program does not repeat itself: {schedule.text}"
    return schedule


def explore(run: Run, limit: int) -> Exploration:
    """Run a program under every schedule, or the first ``limit`` in depth-first order. Errors of ``run`` come out."""
    asked: list[Stream] | None = []
    n_schedules = n_choices = 0
    while asked is not None and n_schedules < limit:
        schedule = _checked(run, Schedule(asked))
        n_schedules += 1
        n_choices = max(n_choices, len(schedule.taken))
        asked = schedule.next()
    return Exploration(n_schedules, asked is None, n_choices)


def sample(run: Run, seeds: Sequence[int]) -> Iterator[Schedule]:
    """Run a program under one schedule per seed; a seed also says how eager copies are."""
    for seed in seeds:
        rng = random.Random(seed)
        eagerness = rng.random()

        def draw(options: Sequence[Stream], rng: random.Random = rng, eagerness: float = eagerness) -> Stream:
            copies = [each for each in options if each is not Stream.COMPUTE]
            return rng.choice(copies) if len(copies) == len(options) or rng.random() < eagerness else Stream.COMPUTE

        yield _checked(run, Schedule(draw=draw))


def replay(run: Run, text: str) -> Schedule:
    """Run a program under the schedule that a text states."""
    return _checked(run, Schedule([STREAMS[letter] for letter in text]))
