"""Which client works with which kind of patch, and the test that shows it; writes the table of its page.

python -m tests.helpers.compatibility    # writes docs/compatibility.md again
"""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import NamedTuple

from .docs_tables import ROOT, replaced

PAGE = ROOT / "docs" / "compatibility.md"
COLUMNS = {
    "scores": "scores: `softmax1`, `logn`",
    "linear": "linear: `elu1`",
    "gated": "`gated`",
    "hybrid": "hybrids: `window+...`",
    "encoder": "encoders",
}
DECODERS = "scores linear gated hybrid"
ALL = f"{DECODERS} encoder"


class Shown(NamedTuple):
    """What a test shows: "works" or "clear error", for which columns, by `file::function` below tests/."""

    verdict: str
    columns: str
    test: str


def works(columns: str, test: str) -> Shown:
    return Shown("works", columns, test)


def refused(columns: str, test: str) -> Shown:
    return Shown("clear error", columns, test)


def nothing(columns: str) -> Shown:
    """There is nothing to do there: no encoder generates."""
    return Shown("-", columns, "")


GENERATE = "attention/test_generate.py::test_"
INVARIANT = "properties/test_invariance.py::test_"
COPIES = "patching/test_copies.py::test_"
QUANTISED = "patching/test_quantised.py::test_"
SERVED = "cli/test_wrapper.py::test_a_server_"
NO_ENCODER = nothing("encoder")

# A column that no entry of a row names is "not tried". A new client or answer changes these rows alone.
ROWS: dict[str, list[Shown]] = {
    "left and right padding": [works(ALL, f"{INVARIANT}padding_changes_nothing")],
    "packed rows (`position_ids`)": [
        works(DECODERS, f"{INVARIANT}packed_documents_are_separate"),
        NO_ENCODER,
    ],
    "`generate`: greedy": [works(DECODERS, f"{GENERATE}greedy_is_the_argmax_of_full_forwards"), NO_ENCODER],
    "`generate`: sampling": [
        works(DECODERS, f"{GENERATE}sampling_draws_the_same_tokens_with_and_without_cache"),
        NO_ENCODER,
    ],
    "`generate`: beams": [works(DECODERS, f"{GENERATE}beams_are_those_without_cache"), NO_ENCODER],
    "`generate`: assisted, prompt lookup": [
        works(DECODERS, f"{GENERATE}assisted_decoding_takes_candidates_back"),
        NO_ENCODER,
    ],
    "`generate`: static cache": [works(DECODERS, f"{GENERATE}static_cache"), NO_ENCODER],
    "`generate`: cache handed on (second turn, prefix)": [
        works(DECODERS, f"{GENERATE}second_turn_with_the_cache_of_the_first"),
        NO_ENCODER,
    ],
    "`generate`: offloaded cache (needs a GPU)": [NO_ENCODER],
    "continuous batching (`generate_batch`)": [
        works(DECODERS, "patching/test_batching.py::test_requests_of_mixed_lengths_get_their_tokens"),
        NO_ENCODER,
    ],
    "`transformers serve`": [
        works(DECODERS, f"{SERVED}answers_as_the_model_does_and_keeps_the_state_of_a_chat"),
        NO_ENCODER,
    ],
    "several threads": [
        works(DECODERS, "attention/test_threads.py::test_threads_generate_what_one_thread_does")
    ],
    "`pipeline` by the folder's name": [
        works(DECODERS, "patching/test_auto.py::test_a_pipeline_by_the_name_of_the_folder"),
        works("encoder", "patching/test_auto.py::test_a_pipeline_of_an_encoder"),
    ],
    "`Trainer`": [works(ALL, f"{COPIES}the_trainer_learns_and_its_checkpoint_loads")],
    "accelerate: `Accelerator`": [works(ALL, "patching/test_training_tools.py::test_accelerator")],
    "tensor parallel (`tp_plan`)": [
        works(DECODERS, "parallel/test_split.py::test_heads_that_two_processes_share"),
    ],
    "accelerate: FSDP 2": [
        works("linear", "training/test_fsdp.py::test_finetuning_gives_the_result_of_one_process"),
        works("hybrid", "training/test_fsdp.py::test_lora_with_the_teacher_inside_and_a_window_dropped"),
    ],
    "TRL: SFT": [
        works("linear", "training/test_trl.py::test_sft_is_a_plain_loop"),
        works("scores gated hybrid", "training/test_trl.py::test_sft_of_other_patches_without_padding"),
        NO_ENCODER,
    ],
    "TRL: packing, padding-free": [
        works("linear", "training/test_trl.py::test_sft_by_the_name_of_the_folder_and_with_joined_rows"),
        works("scores gated hybrid", "training/test_trl.py::test_sft_of_other_patches_without_padding"),
        NO_ENCODER,
    ],
    "TRL: DPO, reward models": [
        works(DECODERS, "training/test_trl.py::test_preferences_and_rewards_of_every_kind"),
        NO_ENCODER,
    ],
    "TRL: GRPO": [works(DECODERS, "training/test_trl.py::test_grpo_generates_and_learns"), NO_ENCODER],
    "PEFT: LoRA": [
        works("scores linear", "patching/test_checkpoint.py::test_lora"),
        works("gated hybrid", f"{QUANTISED}lora_on_a_quantised_base"),
        works("encoder", "convert/test_encoders.py::test_an_encoder_in_memory_with_lora"),
    ],
    "lm_eval": [
        works(DECODERS, "eval/harness/test_model.py::test_generation_under_left_padding"),
        refused("encoder", "eval/harness/test_model.py::test_an_encoder_is_refused"),
    ],
    "sentence-transformers": [
        nothing(DECODERS),
        works("encoder", "patching/test_sentence_transformers.py::test_its_trainer"),
    ],
    "torchao, int8": [works(DECODERS, f"{QUANTISED}a_quantised_base_is_patched_in_place")],
    "bitsandbytes, 8 and 4 bits": [works(DECODERS, f"{QUANTISED}a_quantised_base_is_patched_in_place")],
    "quantised while loading, patched, saved": [works(DECODERS, f"{QUANTISED}saved_and_loaded")],
    "quantised by torchao's `quantize_`, saved": [
        refused("linear", f"{QUANTISED}what_cannot_be_saved_says_so_and_leaves_the_folder")
    ],
    "a patched folder, quantised while loading": [
        works("linear", f"{QUANTISED}a_patched_folder_is_quantised_at_load_and_its_maps_are_not")
    ],
    "GGUF": [
        works(
            DECODERS,
            "patching/test_gguf.py::test_a_patched_model_saves_and_unpatching_brings_the_marks_back",
        )
    ],
    "`torch.compile`": [
        works("scores linear", "ops/test_compiled.py::test_forward_is_one_graph"),
        works("gated hybrid", "ops/test_compiled.py::test_training_step_has_the_gradients_of_eager"),
    ],
    "`torch.func`: `grad`, `vmap`": [
        works(DECODERS, "ops/test_second_order.py::test_gradients_of_each_text_by_vmap")
    ],
    "gradients of gradients (scores: `softmax1`; torch's fused softmax has none)": [
        works(DECODERS, "ops/test_second_order.py::test_models_on_kernels_have_the_curvature_of_torchs")
    ],
    "`torch.export`": [
        works("scores linear gated", "patching/test_export.py::test_the_table"),
        works("hybrid encoder", "patching/test_export.py::test_one_program_serves_every_batch_and_length"),
    ],
    "ONNX": [
        works("scores linear gated", "patching/test_export.py::test_the_table"),
        works("hybrid", "patching/test_export.py::test_onnx_of_layers_of_both_kinds"),
    ],
    "`push_to_hub`, download": [
        works(DECODERS, "patching/test_hub.py::test_what_is_pushed_is_what_is_saved_and_comes_back")
    ],
    "sharded saves, `device_map`, `dtype`": [works(ALL, f"{COPIES}shards_device_maps_and_dtypes")],
    "code beside the model (`trust_remote_code`)": [
        works(DECODERS, "patching/test_own_code.py::test_it_is_patched_saved_and_loaded")
    ],
    "weights offloaded by accelerate": [
        works(DECODERS, "patching/test_offload.py::test_an_offloaded_model_is_the_model")
    ],
    "`copy.deepcopy`, `pickle`, `torch.save(model)`": [
        works(ALL, f"{COPIES}a_copy_is_whole_and_comes_off_alone")
    ],
    "transformers without this package": [
        refused(ALL, "patching/test_checkpoint.py::test_plain_loaders_fail_without_the_package")
    ],
    "a save that is killed or fails": [
        works("hybrid", "patching/test_saving.py::test_killed_while_saving"),
        refused("gated", "patching/test_saving.py::test_a_full_disk_leaves_the_folder_as_it_was"),
    ],
    "a folder half written": [
        refused("hybrid", "patching/test_saving.py::test_a_folder_half_written_by_others")
    ],
}


@lru_cache
def functions(file: str) -> frozenset[str]:
    """Names of the test functions in a file below tests/; none where there is no file."""
    path = ROOT / "tests" / file
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else ()
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def strange() -> list[str]:
    """What is wrong with the rows: tests that do not exist, columns that are named twice or not known."""
    wrong = []
    for client, row in ROWS.items():
        named = [column for shown in row for column in shown.columns.split()]
        if len(named) != len(set(named)) or not set(named) <= COLUMNS.keys():
            wrong.append(f"{client}: {named}")
        for shown in row:
            file, _, name = shown.test.partition("::")
            if shown.test and name not in functions(file):
                wrong.append(f"{client}: no test {shown.test}")
    return wrong


def table() -> str:
    """The table and, below it, the tests that its numbers stand for."""
    numbers: dict[str, int] = {}
    lines = [f"| | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for client, row in ROWS.items():
        cells = dict.fromkeys(COLUMNS, "not tried")
        for verdict, columns, test in row:
            number = f" [{numbers.setdefault(test, len(numbers) + 1)}](#tests)" if test else ""
            cells |= dict.fromkeys(columns.split(), verdict + number)
        lines.append(f"| {client} | {' | '.join(cells.values())} |")
    tests = (test.partition("::") for test in numbers)
    listed = [f"{i}. [{file}](../tests/{file}) `{name}`" for i, (file, _, name) in enumerate(tests, 1)]
    return "\n".join([*lines, "", "### Tests", "", *listed])


def page() -> str:
    return replaced(PAGE.read_text(encoding="utf-8"), "table", "\n" + table() + "\n")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
