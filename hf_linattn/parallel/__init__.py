"""One text over many processes: each holds a part of every row, and states go from one to the next.

shard   this process's part of the rows, and what it sends and receives
carry   the state before a part, of the states of all parts
rows    the token ids, positions and labels of a part
"""

from hf_linattn.parallel.carry import carry
from hf_linattn.parallel.rows import RowPart, check_length, row_part
from hf_linattn.parallel.shard import Shard, lost_processes

__all__ = ["RowPart", "Shard", "carry", "check_length", "lost_processes", "row_part"]
