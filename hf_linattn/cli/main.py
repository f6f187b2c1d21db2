"""How every command ends: its exit status, and one line for what stood in its way."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hf_linattn.errors import LinattnError


def exit_status(
    work: Callable[[], None], *, interrupted: str, extra: str = "eval", process: int = 0, alike: bool = False
) -> int:
    """Do a command's work; the exit status is 0 done, 1 failed, 130 interrupted.

    Args:
        work: everything behind the parsing of arguments, with the imports that take time.
        interrupted: what the user should know after Ctrl-C.
        extra: the extra that installs what the command needs.
        process: the rank of this process.
        alike: every process fails in the same way, so that one line is enough.
    """
    try:
        work()
    except LinattnError as error:
        message = " ".join(str(error).split())
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        message = f"{package} is not installed; pip install 'hf-linattn[{extra}]'"
    except KeyboardInterrupt:
        if process == 0:
            sys.stderr.write(f"\ninterrupted; {interrupted}\n")
        return 130
    else:
        return 0
    if process == 0 or not alike:
        where = f" (process {process})" if process else ""
        sys.stderr.write(f"error{where}: {message}\n")
    return 1
