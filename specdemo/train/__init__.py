"""How the bundled pair was made: corpus, tokenizer, target, distilled drafter, model card.

Run it with ``python -m specdemo.train``. Nothing else in the project imports this package.
"""
