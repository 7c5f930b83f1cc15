"""Drafters written down as their rules say, with a scan of the whole text wherever it takes one.

Source: model.md 4.2 to 4.5. ``prompt`` is the text without its newest token ``s``, N its length.
Holds: ``SlowSimple``, ``SlowMap``, ``SlowMod``, ``SlowCache``; they answer ``draft`` with a list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Self

Counts = dict[tuple[int, ...], Counter[int]]


class SlowDrafter:
    """A text, and what all of them do alike."""

    def __init__(self) -> None:
        self.text: list[int] = []

    def observe(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def begin(self) -> None:
        pass

    def truncate(self, n_tokens: int) -> None:
        del self.text[n_tokens:]

    def fork(self) -> Self:
        return deepcopy(self)

    def judge(self, n_accepted: int) -> None:
        pass

    def starts(self, at: int, key: Sequence[int]) -> bool:
        return self.text[at : at + len(key)] == list(key)


class SlowSimple(SlowDrafter):
    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.n, self.m = n, m

    def draft(self, n_max: int) -> list[int]:
        n, m = self.n, self.m
        n_prompt = len(self.text) - 1
        if n_prompt <= n + m + 1:
            return []
        pattern = self.text[-n:]
        for j in range(n_prompt - n - 1, 0, -1):
            if self.starts(j, pattern):
                n_copied = min(m, n_prompt - (j + n))
                return [] if n_copied < n else self.text[j + n : j + n + n_copied][:n_max]
        return []


class SlowMap(SlowDrafter):
    def __init__(self, n: int, m: int, min_hits: int | None, table_size: int) -> None:
        super().__init__()
        self.n, self.m, self.min_hits, self.table_size = n, m, min_hits, table_size
        self.table: dict[int, int] = {}
        self.indexed_to = 0  # the last place that is in the table
        self.keys: list[dict[str, Any]] = []
        self.last: dict[str, Any] | None = None

    def slot(self, key: Sequence[int]) -> int:
        h = 0
        for token in key:
            h = (h * 2654435761 + token) % 2**32
        return h % self.table_size

    def truncate(self, n_tokens: int) -> None:
        if n_tokens >= len(self.text):
            return
        super().truncate(n_tokens)
        cleanup = max(n_tokens - self.n - self.m, 0)
        self.table = {slot: at for slot, at in self.table.items() if at < cleanup}
        self.indexed_to = min(self.indexed_to, max(cleanup - 1, 0))
        self.last = None
        for key in self.keys:
            key["values"] = [value for value in key["values"] if value["at"] < cleanup]
            key["stat"] = min(key["stat"], cleanup)
        self.keys = [
            key for key in self.keys if key["at"] < cleanup and (key["values"] or self.min_hits is None)
        ]

    def draft(self, n_max: int) -> list[int]:
        n, m = self.n, self.m
        self.last = None
        n_prompt = len(self.text) - 1
        if n_prompt < 2 * n + m:
            return []
        pattern = self.text[-n:]
        end = n_prompt - n - m - 1
        match = self.table.get(self.slot(pattern), 0)
        if match >= end or not self.starts(match, pattern):
            match = 0
        for j in range(end - 1, self.indexed_to, -1):
            if match == 0 and self.starts(j, pattern):
                match = j
        for j in range(end - 1, self.indexed_to, -1):
            self.table.setdefault(self.slot(self.text[j : j + n]), j)
        self.indexed_to = max(self.indexed_to, end - 1)
        if match == 0:
            return []
        key = next((key for key in self.keys if self.starts(key["at"], pattern)), None)
        if key is None:
            key = {"at": match, "hits": 0, "stat": 0, "values": [], "accepted": m}
            self.keys.append(key)
        key["hits"] += 1
        chosen = key
        if self.min_hits is not None:
            if key["hits"] < self.min_hits:
                return []
            for i in range(key["stat"], match + 1):
                if self.starts(i, pattern):
                    self.count(key, i + n)
            key["stat"] = match
            counts = [value["count"] for value in key["values"]]
            most, rest = max(counts), sum(counts) - max(counts)
            if rest > 0 and most < 2 * rest:
                return []
            chosen = key["values"][counts.index(most)]
        self.last = chosen
        return self.text[match + n : match + n + min(m, chosen["accepted"])][:n_max]

    def count(self, key: dict[str, Any], at: int) -> None:
        for value in key["values"]:
            if self.starts(at, self.text[value["at"] : value["at"] + self.m]):
                value["count"] += 1
                return
        if len(key["values"]) < 4:
            key["values"].append({"at": at, "count": 1, "accepted": self.m})

    def judge(self, n_accepted: int) -> None:
        if self.last is not None:
            self.last["accepted"] = n_accepted


class SlowMod(SlowDrafter):
    def __init__(self, n: int, n_min: int, n_max: int, table_size: int) -> None:
        super().__init__()
        self.n, self.n_min, self.n_max, self.table_size = n, n_min, n_max, table_size
        self.table: dict[int, int] = {}
        self.n_added = 0
        self.n_low = 0
        self.n_drafted = 0

    def slot(self, window: Sequence[int]) -> int:
        r = 0
        for token in window:
            r = (r * 6364136223846793005 + token) % 2**64
        return r % self.table_size

    def add(self, first: int, end: int) -> None:
        for i in range(first, end):
            self.table[self.slot(self.text[i : i + self.n])] = self.text[i + self.n]
            self.n_added = end

    def begin(self) -> None:
        self.add(0, len(self.text) - self.n)
        if len(self.table) / self.table_size > 0.25:
            self.table = {}

    def truncate(self, n_tokens: int) -> None:
        super().truncate(n_tokens)
        self.n_added = min(self.n_added, max(n_tokens - self.n, 0))

    def fork(self) -> Self:
        child = super().fork()
        child.n_drafted = 0
        return child

    def draft(self, n_max: int) -> list[int]:
        self.n_drafted = 0
        n_prompt = len(self.text) - 1
        if n_prompt < self.n:
            return []
        if n_prompt - self.n - self.n_added >= 32:
            self.add(self.n_added, n_prompt - self.n)
        text = list(self.text)
        while len(text) - len(self.text) < self.n_max:
            token = self.table.get(self.slot(text[-self.n :]))
            if token is None:
                break
            text.append(token)
        found = text[len(self.text) :]
        if len(found) < self.n_min:
            return []
        self.n_drafted = min(len(found), n_max)
        return found[:n_max]

    def judge(self, n_accepted: int) -> None:
        if self.n_drafted:
            self.n_low = self.n_low + 1 if n_accepted / self.n_drafted < 0.25 else 0
            if self.n_low == 5:
                self.table = {}
                self.n_low = 0


class SlowCache(SlowDrafter):
    """Counts everything anew for each token of a draft."""

    def __init__(self, static: Counts, dynamic: Counts) -> None:
        super().__init__()
        self.static, self.dynamic = static, dynamic

    def draft(self, n_max: int) -> list[int]:
        if len(self.text) < 2:
            return []
        context = count_ngrams(self.text)
        text = list(self.text)
        while len(text) - len(self.text) < min(8, n_max):
            token = self.next(text, context)
            if token is None:
                break
            text.append(token)
        return text[len(self.text) :]

    def next(self, text: list[int], context: Counts) -> int | None:
        corpus = self.static.get(tuple(text[-2:]), Counter())
        lax = ((2, 66), (2, 50), (1, 50), (1, 50))
        strict = ((4, 75), (3, 66), (2, 66), (2, 66))
        for counts, thresholds in ((context, lax), (self.dynamic, strict)):
            for n in (4, 3, 2, 1):
                followers = counts.get(tuple(text[-n:])) if len(text) >= n else None
                token = pick(followers, corpus, *thresholds[n - 1])
                if token is not None:
                    return token
        return pick(corpus, Counter(), *lax[1])


def pick(followers: Counter[int] | None, corpus: Counter[int], fewest: int, percent: int) -> int | None:
    if not followers:
        return None
    products = {token: n * (100 * corpus[token] if token in corpus else 1) for token, n in followers.items()}
    best = min(token for token, product in products.items() if product == max(products.values()))
    total = sum(followers.values())
    return best if total >= fewest and 100 * followers[best] >= percent * total else None


def count_ngrams(text: Sequence[int]) -> Counts:
    """What followed each n-gram of 1 to 4 tokens."""
    counts: Counts = {}
    for n in (1, 2, 3, 4):
        for i in range(len(text) - n):
            counts.setdefault(tuple(text[i : i + n]), Counter())[text[i + n]] += 1
    return counts
