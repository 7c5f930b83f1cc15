"""What drafting has brought: counters of a session.

Holds: ``DraftCounter``, which counts, and the frozen ``DraftStats`` and ``DrafterStats`` that it shows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrafterStats:
    """Of one drafter: verify passes over its drafts, tokens that it proposed, tokens of these that were right, and both
    by their index in the draft."""

    rounds: int
    proposed: int
    accepted: int
    proposed_by_index: tuple[int, ...]
    accepted_by_index: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Of all drafters together, and of each. ``by_index``: which share of the tokens at each index was right.

    ``tokens_per_round``: accepted ones and the one that the pass itself gives.
    ``depth_histogram``: entry i is how many drafts had i tokens; those of none cost no pass and stand at 0.
    ``decided``: rounds for which a controller chose each drafter, or ``none``; None without a controller.
    ``coupled_bound``: of drafts by an MTP head at a temperature, the mean of sum(min(p, q)) over the tokens that were
    judged, p what the target chose from and q what the draft did: the share that is accepted by probability, and at
    best by equal choices of one noise. Of drafts by the target's noise every eighth is measured. None where none was.
    """

    rounds: int
    proposed: int
    accepted: int
    by_index: tuple[float, ...]
    tokens_per_round: float
    depth_histogram: tuple[int, ...]
    by_drafter: dict[str, DrafterStats]
    decided: dict[str, int] | None = None
    coupled_bound: float | None = None


class DraftCounter:
    """Counts the drafts of one drafter."""

    def __init__(self) -> None:
        self.rounds = 0
        self._proposed: list[int] = []
        self._accepted: list[int] = []

    def propose(self, n_tokens: int) -> None:
        """A pass verifies a draft."""
        self.rounds += 1
        more = [0] * (n_tokens - len(self._proposed))
        self._proposed += more
        self._accepted += more
        for i in range(n_tokens):
            self._proposed[i] += 1

    def accept(self, index: int) -> None:
        """The token at an index of the draft was right."""
        self._accepted[index] += 1

    @property
    def stats(self) -> DrafterStats:
        """What was counted so far."""
        return DrafterStats(
            self.rounds, sum(self._proposed), sum(self._accepted), tuple(self._proposed), tuple(self._accepted)
        )


def stats_of(
    counters: dict[str, DraftCounter],
    n_without: int,
    decided: dict[str, int] | None = None,
    coupled_bound: float | None = None,
) -> DraftStats:
    """The sums; ``n_without`` steps had no draft."""
    by_drafter = {name: counter.stats for name, counter in counters.items()}
    widest = max((len(each.proposed_by_index) for each in by_drafter.values()), default=0)
    proposed = [_sum_at([each.proposed_by_index for each in by_drafter.values()], i) for i in range(widest)]
    accepted = [_sum_at([each.accepted_by_index for each in by_drafter.values()], i) for i in range(widest)]
    rounds = sum(each.rounds for each in by_drafter.values())
    longer = [*proposed[1:], 0]
    return DraftStats(
        rounds=rounds,
        proposed=sum(proposed),
        accepted=sum(accepted),
        by_index=tuple(a / p for a, p in zip(accepted, proposed, strict=True)),
        tokens_per_round=1 + sum(accepted) / rounds if rounds else 0.0,
        depth_histogram=(n_without, *(p - q for p, q in zip(proposed, longer, strict=False))),
        by_drafter=by_drafter,
        decided=decided,
        coupled_bound=coupled_bound,
    )


def _sum_at(lists: list[tuple[int, ...]], i: int) -> int:
    return sum(each[i] for each in lists if i < len(each))
