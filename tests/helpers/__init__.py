"""What several tests share: oracles, formulas, small models, texts."""
