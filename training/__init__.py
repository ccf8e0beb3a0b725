"""How the bundled pair was made: corpus, tokenizer, target, distilled drafter, model card.

Run it with ``python -m training``. Nothing else in the project imports this package.
"""
