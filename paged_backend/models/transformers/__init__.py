"""Models through transformers' own modules, attention excepted."""
