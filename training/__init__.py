"""Training of the bundled pair: corpus, tokenizer, target, distilled drafter, model card (assets/pair/README.md)."""
