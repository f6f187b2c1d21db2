"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def save_loss_curve(
    rows: Sequence[dict[str, str]], path: Path, title: str, label: str = "loss (nats per token)"
) -> None:
    """Write a PNG with training and validation loss over tokens; rows as in `train.csv`."""
    # A Figure of its own instead of pyplot leaves the caller's backend and open figures alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for column, name, style in (("loss", "training", "-"), ("eval_loss", "validation", "o-")):
        points = [(int(row["tokens"]), float(row[column])) for row in rows if row[column]]
        if points:
            tokens, losses = zip(*points, strict=True)
            axes.plot(tokens, losses, style, label=name, linewidth=1, markersize=3)
    axes.set(xlabel="tokens", ylabel=label, title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)
