"""The rows of docs/results.md in steps of few rows: hybrids, and the best linear map."""

from __future__ import annotations

from study_row import (
    ALL_WEIGHTS,
    BOTH_AT_ONCE,
    HYBRID_BOTH_AT_ONCE,
    LONG_MEMORY,
    MUON,
    OFTEN,
    PATCH_FASTER,
    SELDOM_DROPPED,
    SHORT_TRANSFER,
    TAYLOR2_BEHIND_A_LAYER,
    WINDOW,
    WINDOW_AND_FAR,
    WINDOW_NEAR_AND_FAR,
    Row,
)

SMALL_STEPS: tuple[Row, ...] = (
    Row(
        "window-hedgehog-often",
        "convert",
        "window+hedgehog",
        WINDOW,
        (
            *(*ALL_WEIGHTS, *OFTEN, *PATCH_FASTER, "--distill-tokens", "400000", "--distill-lr", "5e-4"),
            *("--finetune-tokens", "400000", "--finetune-lr", "1.5e-4"),
        ),
        told="`window+hedgehog` (64), fine-tuned likewise, its own parameters at ten times the rate, "
        "steps of 2 rows in place of 8",
    ),
    Row(
        "window-hedgehog-both",
        "convert",
        "window+hedgehog",
        WINDOW,
        HYBRID_BOTH_AT_ONCE,
        told="`window+hedgehog` (64), as before, but divergence and text at once in 0.8 M",
    ),
    Row(
        "window-hedgehog-both-finetune",
        "convert",
        "window+hedgehog",
        WINDOW,
        (
            *(*HYBRID_BOTH_AT_ONCE, "--transfer-tokens", "100000", "--distill-tokens", "400000"),
            *("--finetune-tokens", "500000", "--finetune-lr", "1.5e-4"),
        ),
        told="`window+hedgehog` (64), likewise in 0.4 M, transfer in 0.1 M, fine-tuned in the last 0.5 M",
    ),
    Row(
        "window-hedgehog-both-four",
        "convert",
        "window+hedgehog",
        WINDOW,
        (
            *(*ALL_WEIGHTS, "--batch-size", "4", *OFTEN[2:], *PATCH_FASTER, "--ce-weight", "1"),
            *("--distill-lr", "7e-4", *SHORT_TRANSFER),
        ),
        told="`window+hedgehog` (64), transfer in 0.1 M, both at once in 0.9 M, steps of 4 rows",
    ),
    Row(
        "window-hedgehog-both-text",
        "convert",
        "window+hedgehog",
        WINDOW,
        (*ALL_WEIGHTS, *OFTEN, *PATCH_FASTER, "--ce-weight", "4", "--distill-lr", "3e-4"),
        told="`window+hedgehog` (64), divergence and text at once in 0.8 M, the text four times as heavy",
    ),
    *(
        Row(
            f"window-hedgehog-both-{name}",
            "convert",
            "window+hedgehog",
            WINDOW,
            ("--ce-weight", "1", *extra),
            told=f"`window+hedgehog` (64), likewise, {told}",
        )
        for name, extra, told in (
            ("lora", ("--lora", "16", *OFTEN, "--distill-lr", "2.5e-3"), "LoRA of rank 16"),
            ("muon", (*ALL_WEIGHTS, *MUON, *OFTEN, *PATCH_FASTER, "--distill-lr", "5e-4"), "Muon"),
            (
                "single",
                (*ALL_WEIGHTS, "--batch-size", "1", *OFTEN[2:], *PATCH_FASTER, "--distill-lr", "3.5e-4"),
                "steps of 1 row",
            ),
            (
                "memory",
                (*ALL_WEIGHTS, *OFTEN, *PATCH_FASTER, "--distill-lr", "5e-4", *LONG_MEMORY),
                "AdamW's beta2 0.999 (others: 0.95)",
            ),
            (
                "memory-long",
                (
                    *(*ALL_WEIGHTS, *OFTEN, *PATCH_FASTER, "--distill-lr", "5e-4"),
                    *(*LONG_MEMORY, *SHORT_TRANSFER),
                ),
                "AdamW's beta2 0.999, transfer in 0.1 M, both at once in 0.9 M",
            ),
        )
    ),
    Row(
        "window-gated-hedgehog-both",
        "convert",
        "window+gated",
        WINDOW_AND_FAR,
        HYBRID_BOTH_AT_ONCE,
        told="`window+gated` (64, hedgehog), likewise",
    ),
    Row(
        "window-gated-hedgehog-drop-both",
        "convert",
        "window+gated",
        WINDOW_NEAR_AND_FAR,
        (*HYBRID_BOTH_AT_ONCE, "--drop-window", "0.5"),
        told="`window+gated` (64, hedgehog, half-lives from 4), likewise, window dropped in half of the "
        "distillation",
    ),
    Row(
        "window-gated-hedgehog-drop-seldom",
        "convert",
        "window+gated",
        WINDOW_NEAR_AND_FAR,
        (*HYBRID_BOTH_AT_ONCE, *SELDOM_DROPPED),
        told="`window+gated` (64, hedgehog, half-lives from 4), likewise, dropped in a tenth of it",
    ),
    *(
        Row(
            f"window-gated-taylor2-{name}",
            "convert",
            "window+gated",
            {**WINDOW, **TAYLOR2_BEHIND_A_LAYER},
            (*ALL_WEIGHTS, *OFTEN, "--ce-weight", "1", "--distill-lr", rate, *extra),
            told="`window+gated` (64, taylor2, a layer in front, half-lives from 4), divergence and text at "
            f"once in steps of 2 rows{told}",
        )
        for name, rate, extra, told in (
            ("both", "5e-4", PATCH_FASTER, ""),
            (
                "drop-both",
                "5e-4",
                (*PATCH_FASTER, *SELDOM_DROPPED),
                ", window dropped in a tenth of the distillation",
            ),
            (
                "drop-rarely",
                "5e-4",
                (*PATCH_FASTER, "--drop-window", "0.03"),
                ", window dropped in 3 % of the distillation",
            ),
            (
                "zero",
                "5e-4",
                (*PATCH_FASTER, *SELDOM_DROPPED, "--min-lr-rate", "0"),
                ", window dropped in a tenth of the distillation, rates that end at 0 (others: at a tenth)",
            ),
            (
                "fast",
                "1e-3",
                (*PATCH_FASTER, *SELDOM_DROPPED),
                ", window dropped in a tenth of the distillation, at twice the rate",
            ),
            (
                "memory",
                "5e-4",
                (*PATCH_FASTER, *SELDOM_DROPPED, *LONG_MEMORY),
                ", window dropped in a tenth of the distillation, AdamW's beta2 0.999 (others: 0.95)",
            ),
            (
                "memory-long",
                "5e-4",
                (*PATCH_FASTER, *SELDOM_DROPPED, *LONG_MEMORY, *SHORT_TRANSFER),
                ", window dropped in a tenth of the distillation, AdamW's beta2 0.999, 0.1 M of transfer",
            ),
            (
                "even",
                "5e-4",
                ("--drop-window", "0.03"),
                ", window dropped in 3 % of the distillation, its own parameters at no other rate",
            ),
        )
    ),
    Row(
        "gated-taylor2-front-both",
        "convert",
        "gated",
        TAYLOR2_BEHIND_A_LAYER,
        (*ALL_WEIGHTS, *OFTEN, *BOTH_AT_ONCE),
        told="`gated` (taylor2, a layer in front), divergence and text at once, steps of 2 rows",
    ),
)
