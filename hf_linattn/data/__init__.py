"""Text for training and evaluation: from a file, a folder, a table or a dataset's name to packed blocks.

documents = load_documents("books/")  # columns: name, text
blocks = load_blocks("books/", tokenizer, 512)  # int32 [blocks, 512]
"""

from __future__ import annotations

from hf_linattn.data.blocks import (
    BlockFile,
    build_blocks,
    count_targets,
    document_separator,
    load_blocks,
    pack_blocks,
    read_tokens,
    token_ids,
    tokenize_documents,
)
from hf_linattn.data.documents import load_documents, streams

__all__ = [
    "BlockFile",
    "build_blocks",
    "count_targets",
    "document_separator",
    "load_blocks",
    "load_documents",
    "pack_blocks",
    "read_tokens",
    "streams",
    "token_ids",
    "tokenize_documents",
]
