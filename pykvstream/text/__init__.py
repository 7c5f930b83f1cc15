"""Text on both sides of the token ids: tokenizer, incremental detokenizer, stop strings and chat template."""
