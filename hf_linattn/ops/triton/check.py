"""Whether the Triton kernels may be used: they are held to float64 on the very device that would run them.

The first use of a (device, dtypes, widths, form) runs `selftest`. What it found is kept in memory and in
the cache folder, under a name made of all that could change it. Where the kernels do not compile, run or
agree, torch operations compute the same, and one warning says so.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import subprocess
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops import switches
from hf_linattn.ops.triton import (
    gate,
    gate_selftest,
    heavy,
    heavy_selftest,
    launch,
    measured_tiles,
    plan,
    selftest,
    softmax_map,
    softmax_map_selftest,
    token_selftest,
    verdict_files,
    window,
    window_rest,
    window_rest_selftest,
    window_selftest,
    window_token,
)
from hf_linattn.ops.triton.gate_selftest import GateForm
from hf_linattn.ops.triton.heavy_selftest import HeavyForm
from hf_linattn.ops.triton.selftest import Form, Key
from hf_linattn.ops.triton.softmax_map_selftest import MapForm
from hf_linattn.ops.triton.token_selftest import TokenForm
from hf_linattn.ops.triton.window_rest_selftest import RestForm
from hf_linattn.ops.triton.window_selftest import WindowForm
from hf_linattn.ops.types import Inputs

TRITON = "HF_LINATTN_TRITON"
"""Environment variable: unset, kernels where they pass their check; 1, an error where they cannot run; 0,
torch operations."""
OLDEST = (3, 5)
"""Of triton: what torch 2.9 comes with."""
SAFE_ROWS = plan.MOST_PROGRAMS // plan.WIDEST
"""Batch times heads below which no grid is too long."""
REPORT = "Please report this line, with the versions of torch and triton, to the authors of hf_linattn."
T = TypeVar("T")
WindowForms: TypeAlias = WindowForm | TokenForm | RestForm | HeavyForm | GateForm | MapForm


class Verdict(NamedTuple):
    """What a check found: None in `why` where the kernels may be used, whose `form` this is."""

    why: str | None
    device: str
    form: str = "triton"

    @property
    def text(self) -> str:
        """One line."""
        return f"{self.form}, checked on {self.device}" if self.why is None else f"torch: {self.why}"


class Trial(Protocol):
    """What is checked once; two that are equal compare so."""

    @property
    def device(self) -> torch.device:
        """Where it runs, with its number."""

    @property
    def name(self) -> str:
        """Text without the device."""


def asked() -> Literal["auto", "0", "1"]:
    """Tell what the user wants: the kernels or an error, torch's operations, or what works.

    Raises:
        OptionError: the variable is neither 0 nor 1.
    """
    meaning = "1 insists on Triton kernels, 0 turns them off, unset they are used where they pass their check"
    return switches.switch(TRITON, meaning)


class Checks:
    """Verdicts on one set of kernels.

    Args:
        kernels: has the functions of `launch`.
        length: tokens of the trial.
        windows, tokens, rests, heavies, gates, maps: have those of `window`, `window_token`, `window_rest`,
            `heavy`, `gate` and `softmax_map`.

    Class attributes:
        form: who computes where the kernels do, in a word.
        kernels_of: what they are, for messages.
        most_tokens: of calls that `refusal` need not look at again once there is a verdict.
        most_rows: likewise.
    """

    form: ClassVar[str] = "triton"
    kernels_of: ClassVar[str] = "Triton kernels of linear attention"
    most_tokens: ClassVar[int] = plan.LONGEST
    most_rows: ClassVar[int] = SAFE_ROWS

    def __init__(
        self,
        kernels: Any = launch,
        length: int = selftest.LENGTH,
        windows: Any = window,
        tokens: Any = window_token,
        rests: Any = window_rest,
        heavies: Any = heavy,
        gates: Any = gate,
        maps: Any = softmax_map,
    ) -> None:
        self.kernels, self.length, self.windows, self.tokens = kernels, length, windows, tokens
        self.rests, self.heavies, self.gates, self.maps = rests, heavies, gates, maps
        self.verdicts: dict[Trial, Verdict] = {}
        self.refused: dict[str, None] = {}
        self._lock = threading.RLock()
        self._running = threading.local()

    def takes(self, key: Any, tokens: int = 0, rows: int = 0, *, compiling: bool = False) -> bool:
        """Tell whether the kernels compute a call; check them if nobody has.

        Args:
            key: what is to be computed.
            tokens: queries or keys, the larger number.
            rows: batch times query heads.
            compiling: nothing can be run now: what is known counts.

        Raises:
            OptionError: `HF_LINATTN_TRITON` is neither 0 nor 1.
            UnsupportedCallError: it is 1, and they cannot.
        """
        wish = asked()
        if wish == "0" or getattr(self._running, "now", False):
            return False
        verdict = self.verdicts.get(key)
        if verdict is None or tokens > self.most_tokens or rows > self.most_rows:
            why = self.refusal(key, tokens, rows)
            if why is not None:
                return self._without(wish, why, compiling)
            still = compiling or _capturing(key.device)
            verdict = self._known(key) if still else self._checked(key)
        if wish == "1":
            self._insist(key, verdict)
        return verdict is not None and verdict.why is None

    def refusal(self, key: Any, tokens: int, rows: int) -> str | None:
        """Say what is known to hinder before anything is tried; None for nothing."""
        widest = max(key.D, getattr(key.form, "features", 0))
        dtypes, widths = (key.dtype, key.dtype, key.value_dtype), (widest, key.Dv)
        why = None if launch.available(key.device) else "triton is not installed"
        why = why or triton_too_old() or plan.refusal(dtypes, widths, tokens, rows)
        return why or device_refusal(key.device, key.operand)

    def worth_saying(self, why: str) -> bool:
        """Tell whether somebody would wonder: nobody expects kernels of float64."""
        return "float64" not in why

    def disagreement(self, key: Any) -> str | None:
        """Run the trial and say what differs from float64; None where nothing does."""
        if isinstance(key.form, TokenForm):
            return token_selftest.disagreement(key, self.tokens)
        short = min(self.length, window_selftest.LENGTH)
        trials: dict[type, tuple[Any, Any, int]] = {
            WindowForm: (window_selftest, self.windows, short),
            RestForm: (window_rest_selftest, self.rests, short),
            HeavyForm: (heavy_selftest, self.heavies, min(short, heavy_selftest.LENGTH)),
            GateForm: (gate_selftest, self.gates, self.length),
            MapForm: (softmax_map_selftest, self.maps, self.length),
        }
        trial, kernels, length = trials.get(type(key.form), (selftest, self.kernels, self.length))
        wrong: str | None = trial.disagreement(key, kernels, length)
        return wrong

    def file(self, device: torch.device) -> Path | None:
        """Name the file of verdicts; None where no folder can be found."""
        return _file(device)

    def _without(self, wish: str, why: str, compiling: bool) -> bool:
        """Go on without kernels, said once, or raise."""
        if wish == "1":
            raise UnsupportedCallError(f"{TRITON}=1 insists on {self.kernels_of}: {why}")
        if why not in self.refused:
            self.refused[why] = None
            if not compiling and self.worth_saying(why):
                warnings.warn(
                    f"{self.kernels_of} are not used: {why}. Torch operations compute the same, more slowly.",
                    stacklevel=2,
                )
        return False

    def _known(self, key: Trial) -> Verdict | None:
        """Look a verdict up, on the disk too."""
        with self._lock:
            if key not in self.verdicts:
                told = verdict_files.read(self.file(key.device)).get(key.name, "")
                if told != "":
                    self.verdicts[key] = Verdict(told, device_name(key.device), self.form)
            return self.verdicts.get(key)

    def _checked(self, key: Trial) -> Verdict:
        with self._lock:
            verdict = self._known(key)
            if verdict is not None:
                return verdict
            why, lasting = self._run(key)
            verdict = self.verdicts[key] = Verdict(why, device_name(key.device), self.form)
            if lasting:
                verdict_files.write(self.file(key.device), key.name, why)
        if why is not None:
            warnings.warn(
                f"{self.kernels_of} ({key.name}) on {verdict.device}: {why}. Torch "
                f"operations compute the same from now on, more slowly; {TRITON}=0 silences this. {REPORT}",
                stacklevel=2,
            )
        return verdict

    def _run(self, key: Trial) -> tuple[str | None, bool]:
        """Run the trial; return what is wrong, and whether that will last."""

        def run() -> str | None:
            self._running.now = True
            wrong = self.disagreement(key)
            if wrong is None and key.device.type == "cuda":
                wrong = self.disagreement(key)  # kernels that are compiled are launched another way
            return wrong

        try:
            why = _apart(run, key.device)
        except Exception as error:  # whatever a compiler, a driver or a device raises
            line = next((x.strip() for x in str(error).splitlines() if x.strip()), "")
            return f"they did not run ({type(error).__name__}: {line[:300]})", not _passing(error)
        return (None if why is None else f"they disagree with float64: {why}"), True

    def _insist(self, key: Trial, verdict: Verdict | None) -> None:
        """Raise where kernels were insisted on and cannot be used."""
        if verdict is None:
            raise UnsupportedCallError(
                f"{TRITON}=1 insists on {self.kernels_of}, and they have not been checked for {key.name}: "
                "run the model once before it is compiled or captured"
            )
        if verdict.why is not None:
            raise UnsupportedCallError(
                f"{TRITON}=1 insists on {self.kernels_of} ({key.name}) on {verdict.device}, and "
                f"{verdict.why}. Unset it: torch operations compute the same. {REPORT}"
            )

    def summary(self) -> list[str]:
        """Say which form runs, a line for each kind of call so far."""
        if asked() == "0":
            return [f"torch: {TRITON}=0"]
        lines = [f"{key.name}: {verdict.text}" for key, verdict in self.verdicts.items()]
        return lines + [f"torch: {why}" for why in self.refused]


def _apart(run: Callable[[], T], device: torch.device) -> T:
    """Run something in a thread of its own, on a stream of its own.

    Gradient mode, autocast, inference mode, hooks on saved tensors (of checkpointing and offloading), modes
    of dispatch, the current device and stream all belong to a thread: nothing of the caller's is seen or
    changed.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad():
                if device.type != "cuda":
                    results.append(run())
                    return
                with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                    results.append(run())
        except BaseException as error:  # raised again where it is waited for
            errors.append(error)

    thread = threading.Thread(target=work, name="hf_linattn triton check", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _passing(error: Exception) -> bool:
    """Tell whether a failure may be gone next time: memory, a compiler not installed, a folder in the way."""
    texts = ("out of memory", "c compiler")
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, OSError, subprocess.SubprocessError)):
        return True
    return any(text in str(error).lower() for text in texts)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def triton_too_old() -> str | None:
    """Say why this triton is not used; None where it is."""
    try:
        version = str(importlib.import_module("triton").__version__)
        found = plan.release(version)
    except (ImportError, AttributeError, ValueError, OSError, RuntimeError) as error:
        return f"triton cannot be imported ({type(error).__name__}: {error})"
    wanted = ".".join(map(str, OLDEST))
    return f"triton {version} is older than {wanted}" if found < OLDEST else None


def device_refusal(device: torch.device, operand: str) -> str | None:
    """Say what a device lacks; None for nothing that is known before it is tried."""
    capability = plan.device_of(device).capability
    if operand == "bf16" and (0, 0) < capability < (8, 0):
        return f"{device_name(device)} multiplies no bfloat16 (compute capability {capability[0]})"
    return None


@functools.cache
def device_name(device: torch.device) -> str:
    """Name a device for people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, interpreted"


def _file(device: torch.device) -> Path | None:
    """Name the file of verdicts on kernels of this folder."""
    kernels = (path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
    return verdicts_file(device, measured_tiles.digest(device), *kernels)


def verdicts_file(device: torch.device, *kernels: str) -> Path | None:
    """Name a file of verdicts after all that could change them; None where no folder can be found.

    Args:
        device: where kernels run.
        kernels: texts that change with them.
    """
    try:
        folder = switches.cache_folder()
    except RuntimeError:  # nobody's home
        return None
    driver = getattr(torch._C, "_cuda_getDriverVersion", int)() if device.type == "cuda" else 0
    parts = [
        importlib.import_module("triton").__version__,
        *(torch.__version__, torch.version.cuda, torch.version.hip, driver),
        *(device_name(device), plan.device_of(device), *kernels),
    ]
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:20]
    return folder / f"triton-{digest}.json"


CHECKS = Checks()
"""Of the kernels that are used."""
ALL = [CHECKS]
"""Of all kernels that are checked so."""


def takes(query: Tensor, key: Tensor, value: Tensor, form: Form, features: int | None = None) -> bool:
    """Tell whether the Triton kernels compute a call, see `Checks.takes`.

    Args:
        query: `[B, H, N, D]`, as the model gives it.
        key: `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        form: what is computed.
        features: number of features, where the map is not in the kernel; None for D.
    """
    width = query.shape[-1] if features is None else features
    grouped = query.shape[1] != key.shape[1]
    dtypes = query.dtype, value.dtype
    wide = value.shape[-1]
    if torch.compiler.is_compiling():
        known: bool = _takes_in_a_graph(query.device, *dtypes, width, wide, grouped, *form)
        return known
    if not (type(query) is type(key) is type(value) is Tensor) or query.dtype != key.dtype:
        return False  # a fake or distributed tensor has no memory to read
    about = _key(query.device, *dtypes, width, wide, grouped, *form)
    return CHECKS.takes(about, max(query.shape[2], key.shape[2]), query.shape[0] * query.shape[1])


def takes_map(x: Tensor, weight: Tensor) -> bool:
    """Tell whether the Triton kernels compute a learned map of `[B, H, N, D]` by `[H, F / 2, D]`."""
    if type(x) is not Tensor or not softmax_map.fits(x, weight):
        return False
    operand = plan.operand_of((x.dtype,)) if usable(x.device) else ""
    form = MapForm(weight.dtype != x.dtype)
    key = Key(x.device, x.dtype, x.dtype, x.shape[-1], weight.shape[1], 1, operand, form)
    return CHECKS.takes(key, x.shape[2], x.shape[0] * x.shape[1])


def usable(device: torch.device) -> bool:
    """Tell whether there is a triton that can be asked."""
    return launch.available(device) and triton_too_old() is None


def takes_window(query: Tensor, key: Tensor, value: Tensor, form: WindowForms) -> bool:
    """Tell whether the Triton kernels compute a window, what is behind it, or gates; see `Checks.takes`.

    Args:
        query: `[B, H, N, D]`, as the model gives it.
        key: `[B, Hkv, M, D]`.
        value: `[B, Hkv, M, Dv]`.
        form: what is computed.
    """
    grouped = query.shape[1] != key.shape[1]
    if not query.dtype == key.dtype == value.dtype:
        return False
    about = query.device, query.dtype, query.shape[-1], value.shape[-1], grouped, form
    if torch.compiler.is_compiling():
        if not isinstance(form, WindowForm | HeavyForm):
            return False  # a graph writes over nothing, and has a backward
        known: bool = _takes_window_in_a_graph(*about[:-1], isinstance(form, HeavyForm), *form)
        return known
    if not type(query) is type(key) is type(value) is Tensor:
        return False
    return CHECKS.takes(
        _window_key(*about), max(query.shape[2], key.shape[2]), query.shape[0] * query.shape[1]
    )


def _window_key(device: torch.device, dtype: torch.dtype, D: int, Dv: int, grouped: bool, form: Any) -> Key:
    operand = plan.operand_of((dtype,)) if usable(device) else ""
    return Key(device, dtype, dtype, D, Dv, 1 + grouped, operand, form)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _takes_window_in_a_graph(
    device: torch.device, dtype: torch.dtype, D: int, Dv: int, grouped: bool, heavy: bool, *form: bool
) -> bool:
    """Answer what is known while a graph is traced: it asks once."""
    about = HeavyForm(*form) if heavy else WindowForm(*form)
    return CHECKS.takes(_window_key(device, dtype, D, Dv, grouped, about), compiling=True)


def _key(
    device: torch.device,
    dtype: torch.dtype,
    value_dtype: torch.dtype,
    D: int,
    Dv: int,
    grouped: bool,
    *form: Any,
) -> Key:
    """Make a key of what a call is, features in the dtype that they are handed over in."""
    how = Form(*form)
    if how.kind == "none":
        dtype = features_dtype(dtype)
    operand = plan.operand_of((dtype, value_dtype)) if usable(device) else ""
    return Key(device, dtype, value_dtype, D, Dv, 1 + grouped, operand, how)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _takes_in_a_graph(*about: Any) -> bool:
    """Answer what is known while a graph is traced: it asks once."""
    return CHECKS.takes(_key(*about), compiling=True)


def features_dtype(dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype in which features of a model's queries are handed to the kernels.

    Those of float16 stay in float32: many maps leave float16's range.
    """
    return dtype if dtype == torch.bfloat16 else torch.promote_types(dtype, torch.float32)


def narrowed(inputs: Inputs, query_dtype: torch.dtype, value_dtype: torch.dtype, form: Form) -> Inputs:
    """Bring features to the dtype that `features_dtype` says, and values to the model's, as they came.

    Args:
        inputs: features and values in float32 where the map is not in the kernel.
        query_dtype: of the model's queries.
        value_dtype: of its values.
        form: what is computed.
    """
    if form.kind != "none":
        return inputs
    query, key = (x.to(features_dtype(query_dtype)) for x in inputs[:2])
    return inputs._replace(query=query, key=key, value=inputs.value.to(value_dtype))


def summary() -> list[str]:
    """Say which form computes linear attention on GPUs, a line for each kind of call so far."""
    return list(dict.fromkeys(line for checks in ALL for line in checks.summary()))
