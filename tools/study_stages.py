"""What docs/results.md says of stages, LoRA, hybrids and learning rates."""

from __future__ import annotations

from study_row import (
    ALL_WEIGHTS,
    ALONE,
    AT_A_LOW_RATE,
    BOTH_AT_ONCE,
    FINETUNED_LAST,
    HYBRID_BOTH_AT_ONCE,
    MUON,
    NEAR_AND_FAR,
    OFTEN,
    PATCH_FASTER,
    TAYLOR2_BEHIND_A_LAYER,
    TUNED,
    WINDOW,
    WINDOW_AND_FAR,
    Row,
)

STAGES: tuple[Row, ...] = (
    Row("hedgehog", "convert", "hedgehog", main=True, told="transfer 0.2 M, distill 0.8 M (as above)"),
    Row("hedgehog-distill", "convert", "hedgehog", extra=ALONE, told="distill 1 M"),
    Row(
        "hedgehog-long-transfer",
        "convert",
        "hedgehog",
        extra=("--transfer-tokens", "500000", "--distill-tokens", "500000"),
        told="transfer 0.5 M, distill 0.5 M",
    ),
    Row(
        "hedgehog-transfer",
        "convert",
        "hedgehog",
        extra=("--stages", "transfer", "--transfer-tokens", "1000000"),
        told="transfer 1 M alone",
    ),
    Row(
        "hedgehog-transfer-finetune",
        "convert",
        "hedgehog",
        extra=("--distill-tokens", "0", "--finetune-tokens", "800000", "--finetune-lr", "1e-3"),
        told="transfer 0.2 M, fine-tune 0.8 M",
    ),
    Row(
        "hedgehog-finetune", "finetune", "hedgehog", extra=("--lr", "1e-3"), told="fine-tune 1 M (no teacher)"
    ),
    Row("nope-hedgehog", "convert", "nope+hedgehog", told="`nope+hedgehog`: as the first, without RoPE"),
    Row(
        "hedgehog-2048",
        "convert",
        "hedgehog",
        extra=(
            *("--distill-tokens", "400000", "--finetune-tokens", "400000"),
            *("--finetune-length", "2048", "--finetune-lr", "1e-3"),
        ),
        told="transfer 0.2 M, distill 0.4 M, fine-tune 0.4 M on rows of 2,048",
    ),
    Row("hedgehog-lora", "convert", "hedgehog", extra=("--lora", "16"), told="as the first, LoRA of rank 16"),
    Row(
        "window-hedgehog",
        "convert",
        "window+hedgehog",
        WINDOW,
        ALL_WEIGHTS,
        main=True,
        told="`window+hedgehog` (64), all weights",
    ),
    Row(
        "window-hedgehog-lora",
        "convert",
        "window+hedgehog",
        WINDOW,
        ("--lora", "16"),
        told="`window+hedgehog` (64), LoRA of rank 16",
    ),
    Row(
        "window-hedgehog-lora-finetune",
        "convert",
        "window+hedgehog",
        WINDOW,
        (
            *("--lora", "16", "--distill-tokens", "400000"),
            *("--finetune-tokens", "400000", "--finetune-lr", "1.5e-3"),
        ),
        told="`window+hedgehog` (64), LoRA of rank 16, fine-tuned in the last 0.4 M",
    ),
    Row(
        "window-hedgehog-lora-64",
        "convert",
        "window+hedgehog",
        WINDOW,
        (
            *("--lora", "64", "--distill-tokens", "200000"),
            *("--finetune-tokens", "600000", "--finetune-lr", "1.5e-3"),
        ),
        told="`window+hedgehog` (64), LoRA of rank 64, fine-tuned in the last 0.6 M",
    ),
    Row(
        "window-hedgehog-drop",
        "convert",
        "window+hedgehog",
        WINDOW,
        (*ALL_WEIGHTS, "--drop-window", "0.5"),
        told="`window+hedgehog` (64), all weights, window dropped in half of the steps",
    ),
    Row(
        "window-hedgehog-finetune",
        "convert",
        "window+hedgehog",
        WINDOW,
        TUNED,
        told="`window+hedgehog` (64), all weights, fine-tuned in the last 0.4 M",
    ),
    Row(
        "window-gated-hedgehog-finetune",
        "convert",
        "window+gated",
        WINDOW_AND_FAR,
        TUNED,
        told="`window+gated` (64, hedgehog), all weights, fine-tuned in the last 0.4 M",
    ),
    Row(
        "window-hedgehog-rate",
        "convert",
        "window+hedgehog",
        WINDOW,
        (*ALL_WEIGHTS, *PATCH_FASTER, "--distill-tokens", "400000", *FINETUNED_LAST),
        told="`window+hedgehog` (64), fine-tuned likewise, its own parameters at ten times the rate",
    ),
    *(
        Row(
            f"window-{patch}-low",
            "convert",
            f"window+{patch}",
            WINDOW,
            (*ALL_WEIGHTS, "--patch-rate", "30", *AT_A_LOW_RATE, *FINETUNED_LAST),
            told=f"`window+{patch}` (64), fine-tuned likewise, at a rate of 3e-4, "
            "its own parameters at 30 times that",
        )
        for patch in ("hedgehog", "taylor2")
    ),
    Row(
        "window-gated-taylor2-finetune",
        "convert",
        "window+gated",
        {**WINDOW_AND_FAR, "feature_map": "taylor2"},
        TUNED,
        told="`window+gated` (64, taylor2), all weights, fine-tuned in the last 0.4 M",
    ),
    Row(
        "window-gated-hedgehog-drop",
        "convert",
        "window+gated",
        {**WINDOW, "feature_map": "hedgehog", **NEAR_AND_FAR},
        (*ALL_WEIGHTS, "--drop-window", "0.5", "--distill-tokens", "400000", *FINETUNED_LAST),
        told="`window+gated` (64, hedgehog, half-lives from 4), window dropped in half of the distillation, "
        "fine-tuned in the last 0.4 M",
    ),
    Row("window-64", "finetune", "window", WINDOW, told="`window` (64) alone, fine-tuned 1 M"),
    Row(
        "window-hedgehog-transfer-finetune",
        "convert",
        "window+hedgehog",
        WINDOW,
        (*ALL_WEIGHTS, "--distill-tokens", "0", "--finetune-tokens", "800000", "--finetune-lr", "3e-4"),
        told="`window+hedgehog` (64), all weights, transfer 0.2 M, fine-tune 0.8 M",
    ),
    Row(
        "window-hedgehog-sinks",
        "convert",
        "window+hedgehog",
        {**WINDOW, "sinks": 4},
        (*ALL_WEIGHTS, *PATCH_FASTER, "--distill-tokens", "400000", *FINETUNED_LAST),
        told="`window+hedgehog` (64, and the first 4 tokens exact), fine-tuned likewise, its own parameters "
        "at ten times the rate",
    ),
    Row(
        "window-hedgehog-muon",
        "convert",
        "window+hedgehog",
        WINDOW,
        (*ALL_WEIGHTS, *MUON, *PATCH_FASTER, "--distill-tokens", "400000", *FINETUNED_LAST),
        told="`window+hedgehog` (64), fine-tuned likewise, its own parameters at ten times the rate, Muon",
    ),
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
            *("--distill-lr", "7e-4", "--transfer-tokens", "100000", "--distill-tokens", "900000"),
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
        {**WINDOW, "feature_map": "hedgehog", **NEAR_AND_FAR},
        (*HYBRID_BOTH_AT_ONCE, "--drop-window", "0.5"),
        told="`window+gated` (64, hedgehog, half-lives from 4), likewise, window dropped in half of the "
        "distillation",
    ),
    Row(
        "window-gated-hedgehog-drop-seldom",
        "convert",
        "window+gated",
        {**WINDOW, "feature_map": "hedgehog", **NEAR_AND_FAR},
        (*HYBRID_BOTH_AT_ONCE, "--drop-window", "0.1"),
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
                (*PATCH_FASTER, "--drop-window", "0.1"),
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
                (*PATCH_FASTER, "--drop-window", "0.1", "--min-lr-rate", "0"),
                ", window dropped in a tenth of the distillation, rates that end at 0 (others: at a tenth)",
            ),
            (
                "fast",
                "1e-3",
                (*PATCH_FASTER, "--drop-window", "0.1"),
                ", window dropped in a tenth of the distillation, at twice the rate",
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
    Row(
        "gated-taylor2-front-muon",
        "convert",
        "gated",
        TAYLOR2_BEHIND_A_LAYER,
        (*ALL_WEIGHTS, *MUON),
        told="`gated` (taylor2, a layer in front), Muon",
    ),
    Row(
        "gated-taylor2-front-lora",
        "convert",
        "gated",
        TAYLOR2_BEHIND_A_LAYER,
        ("--lora", "16"),
        told="`gated` (taylor2, a layer in front), LoRA of rank 16",
    ),
    Row("control-muon", "finetune", extra=MUON, told="control with Muon"),
    Row(
        "control-often",
        "finetune",
        extra=(*OFTEN, "--max-steps", "980", "--lr", "1.5e-4"),
        told="control, steps of 2 rows in place of 8, at a rate of 1.5e-4",
    ),
    Row("control-1e-4", "finetune", extra=("--lr", "1e-4"), told="control at a rate of 1e-4 (others: 3e-4)"),
    Row("control-1e-3", "finetune", extra=("--lr", "1e-3"), told="control at a rate of 1e-3"),
)
