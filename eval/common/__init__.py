"""What the evaluation commands share: models, text, results, tables and figures."""
