"""Commands that measure a model: perplexity against length, and what stands beside it."""
