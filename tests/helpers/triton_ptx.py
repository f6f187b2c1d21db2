"""The PTX in our kernels, executed by numpy: triton's interpreter cannot."""

import re
from contextlib import contextmanager
from unittest import mock

import numpy as np
from triton.runtime import interpreter

from hf_linattn.ops.triton import plan


class Outcome:
    """What a piece of assembly returns, as triton asks for it."""

    def __init__(self, results):
        self.get_result = results.__getitem__


def permuted(a, b, selector):
    """Compute prmt.b32: four of the eight bytes of b and a, or the signs of bytes."""
    bytes_of = [a >> np.uint32(8 * i) & np.uint32(255) for i in range(4)]
    bytes_of += [b >> np.uint32(8 * i) & np.uint32(255) for i in range(4)]
    found = np.zeros_like(a)
    for place in range(4):
        one = selector >> 4 * place & 15
        byte = bytes_of[one & 7]
        byte = np.where(byte >= 128, 255, 0).astype(np.uint32) if one & 8 else byte
        found |= byte << np.uint32(8 * place)
    return found


def executed(assembly, registers):
    """Run three instructions on registers by name, arrays of 32 bits."""

    def read(name):
        return registers[name] if name in registers else np.uint32(int(name, 0))

    for line in re.sub(r"[{}]|\.reg[^;]*;", "", assembly).split(";"):
        if not line.strip():
            continue
        name, operands = line.split(None, 1)
        to, *given = (x.strip() for x in operands.split(","))
        if name == "shl.b32":
            registers[to] = read(given[0]) << read(given[1])
        elif name == "and.b32":
            registers[to] = read(given[0]) & read(given[1])
        else:
            assert name == "prmt.b32", name
            registers[to] = permuted(read(given[0]), read(given[1]), int(given[2], 0))


def inline_assembly(builder, assembly, constraints, values, types, pure, pack):
    """Stand in for the interpreter's `create_inline_asm`: `pack` numbers beside each other at a time."""
    assert (pure, pack) == (True, 2)
    outputs = constraints.count("=")
    registers = {}
    for value in values:
        numbers = np.ascontiguousarray(value.data)
        words = numbers.view(np.uint32).reshape(-1, pack * numbers.itemsize // 4)
        for word in words.T:
            registers[f"${outputs + len(registers)}"] = word.copy()
    executed(assembly, registers)
    words = np.stack([registers[f"${i}"] for i in range(outputs)], -1)
    kind = values[0].data.dtype if outputs == 1 else np.float32  # two of 16 bits in one, or one in each
    (type_,) = types
    return Outcome([interpreter.TensorHandle(words.view(kind).reshape(values[0].data.shape), type_.scalar)])


@contextmanager
def in_pairs(major):
    """Take bfloat16 in pairs, as on a CUDA device of this major capability."""
    plan_of = plan.plan_of.__wrapped__

    def of_device(*arguments):
        found = plan_of(*arguments)
        return found._replace(maps=found.maps | {"PAIRS": major})

    with (
        mock.patch.object(interpreter.InterpreterBuilder, "create_inline_asm", inline_assembly),
        mock.patch.object(plan, "plan_of", of_device),
    ):
        yield
