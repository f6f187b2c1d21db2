"""Draw the figure of docs/results.md: perplexity and recall by length, from results.json.

python studies/plot.py --output docs/images/results.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from figures import load
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from plan import HERE

CURVES = {
    "softmax (control)": ("long", "control-0", "recall", "control-0"),
    "hedgehog": ("books", "hedgehog-0", "recall", "hedgehog-0"),
    "state alone (gated, taylor2)": ("long", "gated-taylor2-front-both-0", "recall", "gated-taylor2-front-0"),
    "window of 64 + state": ("long", "window-gated-hedgehog-memory-0", "recall", "window-gated-hedgehog-0"),
    "1 softmax layer of 6 + these": ("long", "kept-5-nope-logn-0", "recall", "kept-5-nope-logn-both-0"),
}
"""Label -> base and row of the perplexity, base and row of the recall."""


def main(argv: Sequence[str] | None = None) -> None:
    """Draw both panels and save them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--figures", type=Path, default=HERE / "results.json", help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="picture to write")
    args = parser.parse_args(argv)
    figures = load(args.figures)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "study", "font.size": 9}):
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        for label, (base, row, recall_base, recall_row) in CURVES.items():
            perplexity = figures[f"{base}/perplexity/{row}"]["lengths"]
            recall = figures[f"{recall_base}/recall/{recall_row}"]["row"]["induction"]
            _line(left, perplexity, label)
            _line(right, {length: 100 * share for length, share in recall.items()}, label)
        left.set(yscale="log", ylabel="perplexity", title="Perplexity, novels")
        left.set_yticks([30, 60, 120], ["30", "60", "120"])
        left.yaxis.set_minor_formatter(NullFormatter())
        right.set(ylabel="%", ylim=(-3, 103), title="Tokens of a repeated segment found again")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
        figure.savefig(args.output, metadata={"Date": None})


def _line(axes: Axes, values: Mapping[str, float], label: str) -> None:
    lengths = [int(length) for length in values]
    axes.plot(lengths, [*values.values()], "o-", label=label, linewidth=1.3, markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.axvline(512, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("tokens (trained at 512)")


if __name__ == "__main__":
    main()
