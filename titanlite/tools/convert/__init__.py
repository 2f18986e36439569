"""Weights and tokenizers in other formats: export, import, and what runs on the weights alone."""
