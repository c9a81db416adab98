"""Text and tokens: tokenizers, chat templates, detokenizing, stop strings."""
