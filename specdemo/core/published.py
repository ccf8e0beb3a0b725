"""Figures published by others, to compare with measurements."""

from __future__ import annotations

# Leviathan et al. 2211.17192, Table 2 and appendix: T5-XXL (11B) on a TPU v4, batch size 1.
# Task, drafter, temperature, gamma, alpha, c, measured speed-up.
LEVIATHAN_2 = (
    ("EnDe", "small", 0, 7, 0.75, 0.02, 3.4),
    ("EnDe", "base", 0, 7, 0.80, 0.04, 2.8),
    ("EnDe", "large", 0, 7, 0.82, 0.11, 1.7),
    ("EnDe", "small", 1, 7, 0.62, 0.02, 2.6),
    ("EnDe", "base", 1, 5, 0.68, 0.04, 2.4),
    ("EnDe", "large", 1, 3, 0.71, 0.11, 1.4),
    ("CNN/DM", "small", 0, 5, 0.65, 0.02, 3.1),
    ("CNN/DM", "base", 0, 5, 0.73, 0.04, 3.0),
    ("CNN/DM", "large", 0, 3, 0.74, 0.11, 2.2),
    ("CNN/DM", "small", 1, 5, 0.53, 0.02, 2.3),
    ("CNN/DM", "base", 1, 3, 0.55, 0.04, 2.2),
    ("CNN/DM", "large", 1, 3, 0.56, 0.11, 1.7),
)

# Leviathan et al. 2211.17192, Table 3: target, drafter, alpha at temperature 0 and 1.
LEVIATHAN_3 = (
    ("GPT-like 97M", "unigram", 0.03, 0.03),
    ("GPT-like 97M", "bigram", 0.05, 0.05),
    ("GPT-like 97M", "GPT-like 6M", 0.88, 0.89),
    ("T5-XXL EnDe", "unigram", 0.08, 0.07),
    ("T5-XXL EnDe", "bigram", 0.20, 0.19),
    ("T5-XXL EnDe", "T5-small", 0.75, 0.62),
    ("T5-XXL EnDe", "T5-base", 0.80, 0.68),
    ("T5-XXL EnDe", "T5-large", 0.82, 0.71),
    ("T5-XXL CNN/DM", "unigram", 0.13, 0.08),
    ("T5-XXL CNN/DM", "bigram", 0.23, 0.16),
    ("T5-XXL CNN/DM", "T5-small", 0.65, 0.53),
    ("T5-XXL CNN/DM", "T5-base", 0.73, 0.55),
    ("T5-XXL CNN/DM", "T5-large", 0.74, 0.56),
    ("LaMDA 137B", "LaMDA 100M", 0.61, 0.57),
    ("LaMDA 137B", "LaMDA 2B", 0.71, 0.71),
    ("LaMDA 137B", "LaMDA 8B", 0.75, 0.74),
)

# Theory of NASD, section 4.3, an expectation: repetition in the text, acceptance of a draft model, of n-grams.
NASD_ACCEPTANCE = (
    ("long repetition", "high", "close to 1.0"),
    ("short repetition", "high", "0.5 to 0.7"),
    ("no repetition", "medium", "0.3 to 0.5"),
)
