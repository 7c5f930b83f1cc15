"""What the maker of the demo hybrid states again, because it runs where the package is not built, is the same."""

from __future__ import annotations

import pytest

pytest.importorskip("tokenizers")

from pykvstream.text.pretokenizers import PRE_TOKENIZERS
from tools.train_demo_hybrid.tokens import PATTERN


def test_the_tokenizer_is_trained_on_the_pieces_that_are_read() -> None:
    assert PRE_TOKENIZERS["qwen35"].patterns == (PATTERN,)
