"""Serve 32 requests one by one and batched continuously: tokens per second, and bytes of cache in use.

python studies/serving.py FOLDER softmax softmax1 elu1 window+hedgehog
"""

import argparse
import time

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_linattn import from_pretrained, is_patched, patch_model, unpatch_model

REQUESTS = 32


def requests(vocabulary, longest):
    """Prompts of 8 to `longest` random tokens, and how many tokens to add to each."""
    generator = torch.Generator().manual_seed(0)

    def number(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    lengths = [number(8, longest) for _ in range(REQUESTS)]
    prompts = [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    return [(prompt, number(4, 24)) for prompt in prompts]


def one_by_one(model, work):
    """Generate for each request alone."""
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=None)[
            0, len(prompt) :
        ].tolist()
        for prompt, new in work
    ]


def batched(model, work):
    """Serve all requests, step by step; also the most bytes of pages and slots in use."""
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings = ContinuousBatchingConfig(
        page_size=32, num_blocks=512, max_batch_tokens=512, max_requests_per_batch=REQUESTS
    )
    manager = model.init_continuous_batching(config, settings)
    manager.batch_processor = processor = manager._create_batch_processor()
    names = [manager.add_request(prompt, max_new_tokens=new) for prompt, new in work]
    most = 0
    while processor.prepare_next_batch():
        manager._generation_step()
        kinds = processor.cache.cache_allocators.values()
        used = sum(
            len({block for blocks in kind.block_table.values() for block in blocks}) * kind.bytes_per_block
            for kind in kinds
        )
        most = max(most, used)
        processor.update_batch()
    found = {}
    while (result := manager.get_result(timeout=0)) is not None:
        found[result.request_id] = result.generated_tokens
    return [found[name] for name in names], most


def main():
    """Print a row for each patch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("patches", nargs="+")
    parser.add_argument("--longest", type=int, default=256, help="tokens in the longest prompt")
    arguments = parser.parse_args()
    model = from_pretrained(arguments.folder, dtype=torch.float32)
    work = requests(model.config.vocab_size, arguments.longest)
    total = sum(new for _, new in work)
    print("| patch | one by one, tokens/s | batched, tokens/s | cache in use, MB | same tokens |")
    print("|---|---|---|---|---|")
    for patch in arguments.patches:
        if is_patched(model):
            unpatch_model(model)
        patch_model(model, patch)
        with torch.no_grad():
            start = time.process_time()
            want = one_by_one(model, work)
            middle = time.process_time()
            found, most = batched(model, work)
            end = time.process_time()
        same = sum(a == b for a, b in zip(want, found, strict=True))
        speeds = f"{total / (middle - start):.1f} | {total / (end - middle):.1f}"
        print(f"| {patch} | {speeds} | {most / 1e6:.1f} | {same} of {REQUESTS} |", flush=True)


if __name__ == "__main__":
    main()
