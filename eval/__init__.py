"""Commands that measure a model: perplexity against length and what goes with it."""
